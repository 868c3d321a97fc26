"""A step of a mixture of experts beside the same step in plain JAX, sharded by hand, whose products are `ragged_dot`.

    plain      rows are sorted by expert and taken back in their order; of a rank's experts those of all ranks' rows
    MaxText    src/maxtext/layers/moe.py, `RoutedMoE.sparse_matmul` with a ring of experts, typed anew: rows are
               repeated, sorted with this rank's experts first, all others set to zero, and sorted back; both sorts'
               transposes are sorts (`use_custom_sort_vjp`)

On CPUs XLA has no `ragged_all_to_all`, so that both gather all rows and scatter the sums.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import meshtrain as mt
from experiments import bench, plain_jax, sharded_jax
from experiments.bench import Compared, Stepping, Table, config_of

Tree = Any
RANKS = 8
EXPERTS = ("gate", "up", "down")
Layer = Callable[[jax.Array, jax.Array, jax.Array, Tree], jax.Array]


def plain(rows: jax.Array, chosen: jax.Array, weights: jax.Array, w: Tree) -> jax.Array:
    """Returns the sum over each row's experts, of those that this rank has: E of them, the number E means none."""
    order = jnp.argsort(chosen.reshape(-1))
    loads = jnp.bincount(chosen.reshape(-1), length=len(w["gate"]))
    y = products(rows[order // chosen.shape[1]], loads, w)
    y = y[jnp.argsort(order)].reshape(*chosen.shape, -1)
    return jnp.einsum("nkd,nk->nd", y, jnp.where(chosen < len(w["gate"]), weights, 0))


def maxtext(
    rows: jax.Array, chosen: jax.Array, weights: jax.Array, w: Tree
) -> jax.Array:
    """Returns the same as MaxText computes it."""
    order = jnp.argsort(chosen.reshape(-1))
    loads = jnp.bincount(chosen.reshape(-1), length=len(w["gate"]))
    here = (jnp.arange(chosen.size) < loads.sum())[:, None]
    sorted_rows = reordered(jnp.repeat(rows, chosen.shape[1], 0), order)
    y = products(jnp.where(here, sorted_rows, 0), loads, w)
    y = reordered(jnp.where(here, y, 0), jnp.argsort(order)).reshape(*chosen.shape, -1)
    return jnp.einsum("nkd,nk->nd", y, weights)


def products(rows: jax.Array, loads: jax.Array, w: Tree) -> jax.Array:
    gate, up = (lax.ragged_dot(rows, w[name], loads) for name in ("gate", "up"))
    return lax.ragged_dot(jax.nn.silu(gate) * up, w["down"], loads)


@jax.custom_vjp
def reordered(x: jax.Array, order: jax.Array) -> jax.Array:
    """Returns x[order], whose transpose sorts too, where that of an index scatters sums."""
    return x[order]


reordered.defvjp(
    lambda x, order: (x[order], order), lambda order, g: (g[jnp.argsort(order)], None)
)


def loss(
    config: mt.Config, layer: Layer, w: Tree, tokens: jax.Array, labels: jax.Array
) -> Any:
    """Returns the mean loss of all ranks' rows [B / RANKS, T]; inside shard_map."""
    moe = config.model.moe
    here = moe.experts // config.mesh.expert

    def block(x: jax.Array, w: Tree) -> tuple[jax.Array, None]:
        x = plain_jax.attention(x, w)
        rows = plain_jax.rms(x, w["norm2"]).reshape(-1, x.shape[-1])
        weights, chosen = lax.top_k(jax.nn.softmax(rows @ w["router"]), moe.top_k)
        if moe.normalize:
            weights = weights / weights.sum(-1, keepdims=True)
        if config.mesh.expert > 1:
            gather = partial(lax.all_gather, axis_name="data", tiled=True)
            rows, weights, chosen = map(gather, (rows, weights, chosen))
            own = chosen - here * lax.axis_index("data")
            chosen = jnp.where((own >= 0) & (own < here), own, here)
        y = layer(rows, chosen, weights, w)
        if config.mesh.expert > 1:
            y = lax.psum_scatter(y, "data", scatter_dimension=0, tiled=True)
        return x + y.reshape(x.shape), None

    blocks = {name: w[name] for name in (*plain_jax.BLOCK, "router")}
    x = lax.scan(block, w["embedding"][tokens], blocks)[0]
    return lax.pmean(plain_jax.head_loss(w, x, labels), "data")


def by_hand(
    config: mt.Config, layer: Layer, params: Tree, batch: dict[str, Any]
) -> Stepping:
    """Returns the step with ZeRO-1, which begins with the weights of a canonical tree of ours."""
    mesh = jax.make_mesh((RANKS,), ("data",), axis_types=(AxisType.Auto,))
    experts = params["blocks"]["experts"]
    blocks = params["blocks"] | {
        "mlp": {name: experts[name] for name in (*EXPERTS, "router")}
    }
    weights = sharded_jax.weights_of(params | {"blocks": blocks})
    spread = EXPERTS if config.mesh.expert > 1 else ()
    used = {name: P(None, "data") if name in spread else P() for name in weights}

    def held(name: str, w: Any) -> P:
        """Returns where masters and moments lie: over the first dimension that divides, but for layers."""
        dims = [
            d for d in range(int(name not in ("embedding", "head", "norm")), w.ndim)
        ]
        split = next((d for d in dims if w.shape[d] % RANKS == 0), None)
        return P() if split is None else P(*[None] * split, "data")

    shards = {name: NamedSharding(mesh, held(name, w)) for name, w in weights.items()}
    optimizer = plain_jax.make_optimizer(config)
    mapped = jax.shard_map(
        partial(loss, config, layer),
        mesh=mesh,
        in_specs=(used, P("data"), P("data")),
        out_specs=P(),
    )

    def step(
        state: Tree, tokens: jax.Array, labels: jax.Array
    ) -> tuple[Tree, jax.Array]:
        weights, moments = state
        value, gradients = jax.value_and_grad(mapped)(weights, tokens, labels)
        gradients = lax.with_sharding_constraint(gradients, shards)
        updates, moments = optimizer.update(gradients, moments, weights)
        weights = plain_jax.optax.apply_updates(weights, updates)
        return (lax.with_sharding_constraint(weights, shards), moments), value

    weights = jax.device_put(weights, shards)
    state = weights, jax.jit(optimizer.init)(weights)
    rows = [
        jax.device_put(batch[k], NamedSharding(mesh, P("data")))
        for k in ("tokens", "labels")
    ]
    return Stepping(jax.jit(step, donate_argnums=0), state, *rows)


def ragged(*, rounds: int = 5) -> None:
    """Prints processor seconds of a step, ours and by hand in turns, and ours over each: below 1 ours is faster."""
    mt.fake_devices(RANKS)
    heads = (
        "experts on a rank",
        "by hand",
        "ours, s",
        "by hand, s",
        "ratio",
        "  (min-max)",
    )
    table = Table(*heads)
    random = np.random.default_rng(0)
    for expert in (1, RANKS):
        model = {"layers": 2, "d_model": 256, "heads": 8, "vocab_size": 2048}
        model |= {"moe": {"experts": 16, "top_k": 2, "d_ff": 256}}
        mesh = {"data": RANKS, "expert": expert}
        config = config_of(model, mesh, RANKS, 256, compute="float32")
        program = mt.Program(config)
        state = program.init()
        words = random.integers(0, 2048, (RANKS, 257)).astype(np.int32)
        batch = {"tokens": words[:, :-1], "labels": words[:, 1:]}
        params = jax.tree.map(np.asarray, program.layout.canonical(state.params))
        runs = {"ours": Stepping(program.train_step, state, program.place(batch))}
        for name, layer in {"plain": plain, "MaxText": maxtext}.items():
            runs[name] = by_hand(config, layer, params, batch)
        first = {name: run() for name, run in runs.items()}
        ours = float(first.pop("ours")["loss"])
        for name, value in first.items():
            if abs(ours - float(value)) > 1e-4:
                raise SystemExit(
                    f"the loss of the first step is {ours}, {name} {float(value)}"
                )
        found = bench.turns(runs, rounds)
        for name in first:
            beside = Compared(found["ours"], found[name])
            seconds = [bench.typical(times).processor for times in beside]
            span = f"({min(beside.processors):.2f}-{max(beside.processors):.2f})"
            cells = (*(f"{s:.2f}" for s in seconds), f"{beside.processor:.2f}", span)
            table.row(str(16 // expert).ljust(17), name, *cells)
