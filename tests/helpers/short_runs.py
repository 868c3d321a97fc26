"""Short runs of a config from given numbers, for tests that compare one placement with another or with the
reference.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from meshtrain.config import Config
from meshtrain.mesh import make_mesh
from meshtrain.model.weights import lora_scale
from meshtrain.parallel.layout import Layout, shard_spec
from meshtrain.parallel.placement import Placed
from meshtrain.step import Program, State

Tree = Any

# widths of whole sixteens on two tensor ranks, which products in float8 take
OF_SIXTEENS = {
    "layers": 4,
    "d_model": 32,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
    "d_ff": 64,
    "vocab_size": 64,
}


def canonical_numbers(layout: Layout, seed: int = 0) -> Tree:
    """A canonical parameter tree with no special numbers in it: no zero bias, no unit scale, scores far from
    uniform.
    """
    random = np.random.default_rng(seed)

    def draw(leaf: Placed) -> np.ndarray:
        x = random.standard_normal(leaf.shape, np.float32)
        if leaf.name.endswith("scale"):
            return 1 + np.float32(0.2) * x
        return x * np.float32(
            0.1
            if leaf.name.endswith("bias")
            else 0.5 / np.sqrt(layout.config.model.d_model) * 2
        )

    return layout.map(draw)


def place(layout: Layout, canonical: Tree) -> Tree:
    """The live tree on the devices, laid out here step by step: each layer to its place, zeros in every padding."""

    def live(leaf: Placed, x: np.ndarray) -> jax.Array:
        out = np.zeros(leaf.padded, np.float32)
        if leaf.stacked:
            for at, layer in enumerate(layout.stack(leaf).layer_at.reshape(-1)):
                if layer >= 0:
                    out[at][tuple(slice(n) for n in x.shape[1:])] = x[layer]
        else:
            out[tuple(slice(n) for n in x.shape)] = x
        return layout.stored(
            leaf, jax.device_put(out, jax.NamedSharding(layout.mesh, shard_spec(leaf)))
        )

    return layout.map(live, canonical)


def merged(config: Config, parameters: Tree) -> Tree:
    """A canonical tree's model without adapters: W + scale A B."""
    blocks = {part: dict(leaves) for part, leaves in parameters["blocks"].items()}
    for part in ("attention", "mlp"):
        for name in [
            name.removesuffix("_lora_a")
            for name in blocks[part]
            if name.endswith("_lora_a")
        ]:
            a, b = (blocks[part].pop(f"{name}_lora_{which}") for which in "ab")
            layers, rank = b.shape[:2]
            product = jnp.einsum(
                "lir,lro->lio", a.reshape(layers, -1, rank), b.reshape(layers, rank, -1)
            )
            blocks[part][name] = blocks[part][name] + lora_scale(
                config.lora
            ) * product.reshape(blocks[part][name].shape)
    return {**parameters, "blocks": blocks}


def token_batches(
    config: Config, steps: int, seed: int = 1
) -> list[tuple[np.ndarray, np.ndarray]]:
    """(tokens, labels) of each step, int32 [B, T] each."""
    shape = (steps, config.train.global_batch_size, config.train.sequence_length + 1)
    text = np.random.default_rng(seed).integers(
        0, config.model.vocab_size, shape, np.int32
    )
    return [(t[:, :-1], t[:, 1:]) for t in text]


def packed_batch(
    tokens: np.ndarray, labels: np.ndarray, seed: int = 2
) -> dict[str, np.ndarray]:
    """The same tokens [B, T] as two or three documents in each sequence, positions counted within each.

    Labels across a seam, and some others, weigh nothing.
    """
    random, (rows, length) = np.random.default_rng(seed), tokens.shape
    starts = np.zeros(tokens.shape, bool)
    for row in range(rows):
        starts[row, random.choice(np.arange(1, length), 1 + row % 2, replace=False)] = (
            True
        )
    at = np.broadcast_to(np.arange(length), tokens.shape)
    first = np.maximum.accumulate(np.where(starts, at, 0), axis=1)
    seams = np.roll(starts, -1, axis=1)
    return {
        "tokens": tokens,
        "labels": labels,
        "positions": (at - first).astype(np.int32),
        "segments": np.cumsum(starts, axis=1).astype(np.int32),
        "weights": np.where(seams | (at % 5 == 4), 0, 1).astype(np.float32),
    }


def start_optimizer(
    program: Program, params: Tree
) -> tuple[Tree, Callable[..., tuple[Tree, Tree]]]:
    """The optimizer's state before the first step, and the compiled step (params, state, gradients) -> (params,
    state).
    """
    init = jax.jit(
        program.optimizer.init, out_shardings=program.state_shardings.optimizer
    )

    @jax.jit
    def step(params: Tree, state: Tree, gradients: Tree) -> tuple[Tree, Tree]:
        updates, state = program.optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    return init(params), step


def start(program: Program, canonical: Tree) -> State:
    """The state before the first step with the given parameters; an optimizer state starts at zero (as Adam's does)."""
    zeros = jax.tree.map(
        lambda s: jax.device_put(np.zeros(s.shape, s.dtype), s.sharding),
        program.state_shapes,
    )
    scale = zeros.scale
    if scale is not None:
        precision = program.config.precision
        put = lambda value, like: jax.device_put(
            np.asarray(value, like.dtype), like.sharding
        )
        scale = scale._replace(
            value=put(precision.loss_scale, scale.value),
            patience=put(precision.loss_scale_hysteresis, scale.patience),
        )
    return zeros._replace(params=place(program.layout, canonical), scale=scale)


def train(
    config: Config, steps: int, canonical: Tree | None = None, packed: bool = False
) -> tuple[list[dict[str, float]], Program, list[State]]:
    """Metrics of each step of a run on text, on the config's mesh, its program, and the states after the first and the
    last step.
    """
    batches = [
        dict(zip(("tokens", "labels"), batch, strict=True))
        for batch in token_batches(config, steps)
    ]
    return train_on(
        [packed_batch(**batch) for batch in batches] if packed else batches,
        config,
        canonical,
    )


def train_on(
    batches: Sequence[dict[str, np.ndarray]],
    config: Config,
    canonical: Tree | None = None,
) -> tuple[list[dict[str, float]], Program, list[State]]:
    """The same of these batches, one a step."""
    program, steps = Program(config, make_mesh(config)), len(batches)
    state = start(
        program, canonical_numbers(program.layout) if canonical is None else canonical
    )
    compiled = program.lower(program.batch_shapes(batches[0])).compile()
    metrics, kept = [], []
    for i, batch in enumerate(batches):
        state, measured = compiled(state, program.place(batch))
        metrics.append({name: float(value) for name, value in measured.items()})
        if i in (0, steps - 1):
            kept.append(jax.tree.map(np.asarray, state))
    return metrics, program, kept


def loss_and_gradients(program: Program) -> tuple[jax.Array, Tree]:
    """Those of a batch of text, from `canonical_numbers`."""
    tokens, labels = token_batches(program.config, 1)[0]
    batch = jax.device_put({"tokens": tokens, "labels": labels}, program.batch_sharding)
    live = place(program.layout, canonical_numbers(program.layout))
    return jax.jit(program.gradients)(live, batch, jnp.int32(0), jnp.float32(1))


def first_moment(state: State) -> Tree:
    """Adam's first moment, in the live layout."""
    found = [
        s.mu
        for s in jax.tree.leaves(state.optimizer, is_leaf=lambda x: hasattr(x, "mu"))
        if hasattr(s, "mu")
    ]
    assert len(found) == 1
    return found[0]
