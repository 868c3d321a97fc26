"""The step of `plain_jax` as one would shard it by hand: one `jit`, a sharding for every array and a few constraints
between them, of which XLA makes the collectives (GSPMD; Xu et al. 2021). Only the pipeline is written out: GPipe in a
`shard_map` over that axis alone.

    weights    heads, d_ff and vocabulary over tensor, layers (and the vocabulary) over pipeline
    ZeRO-1, 2  moments and weights between steps over data too: gathered before the microbatches, gradients sharded
    after them
    ZeRO-3     a layer's weights are gathered where they are used, and once more in its backward
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from experiments import plain_jax
from meshtrain.config import Config

Tree = Any
VOCABULARY = ("tensor", "pipeline")


def specs(data: str | None) -> dict[str, P]:
    """Where each weight lies; `data`: the axis that ZeRO shards it over, None for the weights that a layer computes
    with.
    """
    columns = P("pipeline", data, "tensor")
    return {
        "embedding": P(VOCABULARY, data),
        "head": P(data, VOCABULARY),
        "q": columns,
        "k": columns,
        "v": columns,
        "out": P("pipeline", "tensor", None, data),
        "gate": columns,
        "up": columns,
        "down": P("pipeline", "tensor", data),
        "norm1": P("pipeline"),
        "norm2": P("pipeline"),
        "norm": P(),
    }


def weights_of(params: Tree) -> Tree:
    """The weights of `plain_jax` from a canonical tree of ours."""
    embedding, blocks, head = params["embedding"], params["blocks"], params["head"]
    norms = {
        "norm1": blocks["attention_norm"],
        "norm2": blocks["mlp_norm"],
        "norm": head["norm"],
    }
    ends = {"embedding": embedding["tokens"], "head": head["weight"]}
    return (
        ends
        | blocks["attention"]
        | blocks["mlp"]
        | {name: norm["scale"] for name, norm in norms.items()}
    )


def pin(x: jax.Array, *axes: Any) -> jax.Array:
    return lax.with_sharding_constraint(x, P(*axes))


def stage(config: Config, blocks: Tree, x: jax.Array) -> jax.Array:
    """The layers that are here, of x [b, T, D]; of what they make the backward lacks nothing but gathered weights."""
    full = specs(None)

    def layer(x: jax.Array, w: Tree) -> tuple[jax.Array, None]:
        w = {
            name: checkpoint_name(pin(a, *full[name][1:]), "gathered")
            for name, a in w.items()
        }
        return pin(plain_jax.block(pin(x, "data"), w), "data"), None

    if config.parallel.zero_stage == 3:
        policy = jax.checkpoint_policies.save_anything_except_these_names("gathered")
        layer = jax.checkpoint(layer, policy=policy, prevent_cse=False)
    return lax.scan(layer, x, blocks)[0]


def gpipe(config: Config, blocks: Tree, xs: jax.Array) -> jax.Array:
    """All microbatches [M, b, T, D] through the stages, one clock after the other; a stage that is idle skips its
    layers.
    """
    last, count, here = config.mesh.pipeline - 1, len(xs), lax.axis_index("pipeline")
    run, vary = (
        partial(stage, config, blocks),
        partial(lax.pcast, axis_name="pipeline", to="varying"),
    )

    def clock(received: jax.Array, t: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = jnp.where(here == 0, vary(xs[jnp.minimum(t, count - 1)]), received)
        y = lax.cond((t >= here) & (t < here + count), run, lambda x: x, x)
        return lax.ppermute(y, "pipeline", [(i, i + 1) for i in range(last)]), y

    ys = lax.scan(clock, vary(jnp.zeros_like(xs[0])), jnp.arange(count + last))[1]
    return lax.psum(jnp.where(here == last, ys[last:], 0), "pipeline")


def loss(
    config: Config, weights: Tree, tokens: jax.Array, labels: jax.Array
) -> jax.Array:
    """Mean loss of a microbatch [b, T], or of all of them [M, b, T] through the stages of a pipeline."""
    blocks = {name: weights[name] for name in plain_jax.BLOCK}
    x = weights["embedding"][tokens]
    if config.mesh.pipeline == 1:
        return plain_jax.head_loss(weights, stage(config, blocks, x), labels)
    run = jax.shard_map(
        partial(gpipe, config),
        in_specs=(P("pipeline"), P()),
        out_specs=P(),
        axis_names={"pipeline"},
    )
    return plain_jax.head_loss(weights, run(blocks, pin(x, None, "data")), labels)


def loss_and_gradients(
    config: Config, weights: Tree, tokens: jax.Array, labels: jax.Array
) -> tuple[jax.Array, Tree]:
    """Of microbatches [M, b, T]: a pipeline's together, others one after the other."""
    of, count = jax.value_and_grad(partial(loss, config)), len(tokens)
    if config.mesh.pipeline > 1:
        return of(weights, tokens, labels)
    if count == 1:
        return of(weights, tokens[0], labels[0])

    def microbatch(sums: Tree, batch: tuple[jax.Array, jax.Array]) -> tuple[Tree, None]:
        return jax.tree.map(jnp.add, sums, of(weights, *batch)), None

    sums = lax.scan(
        microbatch,
        (jnp.zeros(()), jax.tree.map(jnp.zeros_like, weights)),
        (tokens, labels),
    )[0]
    return jax.tree.map(lambda x: x / count, sums)


def compiled(
    config: Config, params: Tree, *batch: np.ndarray
) -> tuple[jax.stages.Compiled, Tree, list[jax.Array]]:
    """(step, state, batch): step(state, *batch) -> (state, loss); the state begins with the weights of a canonical tree
    of ours.

    The batch [B, T] comes cut into microbatches [M, b, T], each of a part of every data rank's rows.
    """
    m, parallel = config.mesh, config.parallel
    if (
        m.context * m.expert * m.islands > 1
        or parallel.sequence_parallel
        or parallel.remat != "none"
    ):
        raise SystemExit(
            "by hand there are data, tensor, pipeline and ZeRO; leave out --by-hand for other layouts."
        )
    axes = {"data": m.data, "tensor": m.tensor, "pipeline": m.pipeline}
    mesh = jax.make_mesh(
        tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * 3
    )
    optimizer, zero = plain_jax.make_optimizer(config), parallel.zero_stage
    held, used = specs("data" if zero else None), specs("data" if zero == 3 else None)

    def step(
        state: Tree, tokens: jax.Array, labels: jax.Array
    ) -> tuple[Tree, jax.Array]:
        weights, moments = state
        resident = {name: pin(w, *used[name]) for name, w in weights.items()}
        value, gradients = loss_and_gradients(config, resident, tokens, labels)
        gradients = {name: pin(g, *held[name]) for name, g in gradients.items()}
        updates, moments = optimizer.update(gradients, moments, weights)
        return (optax.apply_updates(weights, updates), moments), value

    with jax.set_mesh(mesh):
        of = {name: NamedSharding(mesh, spec) for name, spec in held.items()}
        weights = jax.device_put(weights_of(params), of)
        state = weights, jax.jit(optimizer.init)(weights)
        mirrors, everywhere = optax.tree.map_params, NamedSharding(mesh, P())
        shardings = (
            of,
            mirrors(
                optimizer,
                lambda _, s: s,
                state[1],
                of,
                transform_non_params=lambda _: everywhere,
            ),
        )
        cut = [
            a.reshape(-1, parallel.microbatches, a.shape[-1]).swapaxes(0, 1)
            for a in batch
        ]
        placed = jax.device_put(cut, NamedSharding(mesh, P(None, "data")))
        state, placed = jax.block_until_ready(
            (jax.device_put(state, shardings), placed)
        )
        lowered = jax.jit(
            step, donate_argnums=0, out_shardings=(shardings, None)
        ).lower(state, *placed)
        return lowered.compile(), state, placed
