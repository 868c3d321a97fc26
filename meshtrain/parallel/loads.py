"""The routers' counts of a step: the metrics of experts' loads, of each layer where asked, and the bias that evens
loads out.

    gradient of `load` [layers, experts + 2] ──► expert_load, router_entropy, and expert_rounds or, with a capacity,
                                             │   dropped_rows, of all layers, in each row
                                             ├─► the same of each layer, and the tokens of each expert, where
                                             telemetry.experts_every └─► the step of the bias (balance: bias)

How counts leave the step as a gradient: `meshtrain.model.experts`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from meshtrain.config import Config
from meshtrain.config.stacks import expert_layers
from meshtrain.model.weights import COUNTED
from meshtrain.parallel.layout import Layout
from meshtrain.run.hooks import Row, RunHook

Tree = Any

DIGIT_BITS = 15  # n counts of as many bits sum up to an int32, of up to 2^15 experts
COUNTS = "expert_counts"  # in the metrics of a step, float32 [layers, experts + 2]


def optimize_loads(
    optimizer: optax.GradientTransformation, config: Config, layout: Layout
) -> optax.GradientTransformation:
    """Returns the optimizer of all but the experts' loads, whose gradients are counts: with `balance: bias` an expert's
    bias goes up where its load is below the mean, and down where it is above (Wang et al. 2024, algorithm 1).
    """
    moe = config.model.moe

    def update_load(counts: jax.Array) -> jax.Array:
        if moe.balance != "bias":
            return jnp.zeros_like(counts)
        tokens = counts[..., : moe.experts]
        step = moe.bias_rate * below_mean(tokens)
        return jnp.pad(step, [(0, 0)] * (step.ndim - 1) + [(0, COUNTED)])

    def update(gradients: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree]:
        updates, state = optimizer.update(
            layout.only_updated(gradients), state, layout.only_updated(params)
        )
        of = lambda weight, u, g: (
            update_load(g) if weight.trained and weight.counts else u
        )
        return layout.map(of, updates, gradients), state

    return optax.GradientTransformation(
        lambda params: optimizer.init(layout.only_updated(params)), update
    )


def below_mean(counts: jax.Array) -> jax.Array:
    """Returns the sign of (mean over the last axis - count) of whole numbers up to 2^31, float32; 0 exactly at the
    mean.

    The sum less n times the count is taken in two digits of 15 bits and more. Both may be beyond int32, and float32 is
    not exact beyond 2^24.
    """
    n = counts.shape[-1]
    whole = counts.astype(jnp.int32)
    high, low = (
        digits.sum(-1, keepdims=True) - n * digits
        for digits in (whole >> DIGIT_BITS, whole & ((1 << DIGIT_BITS) - 1))
    )
    high = high + (low >> DIGIT_BITS)
    low = low & ((1 << DIGIT_BITS) - 1)
    return jnp.sign(jnp.where(high != 0, high, low)).astype(jnp.float32)


def metrics(config: Config, layout: Layout, gradients: Tree) -> dict[str, jax.Array]:
    """Returns numbers for the row of metrics from the counts of a model's routers; none where loads are frozen.

    `expert_load`: an expert's most tokens over the mean, in the worst layer. `router_entropy`: in nats, the mean over
    tokens and layers. `expert_rounds`: rounds in which rows went to their experts, the mean likewise; with a capacity
    `dropped_rows`, for which there was no room, of all layers. With telemetry.experts_every also all counts, for
    `LayerLoads`.
    """
    of_stacks = {
        stack: gradients[stack]["experts"]["load"]
        for stack in layout.stacks
        if "experts" in layout.weights[stack]
    }
    if None in of_stacks.values():
        return {}
    counts = _joined(list(of_stacks.values()))
    tokens, noted, entropy = divided(counts, config.model.moe.experts)
    total = jnp.maximum(tokens.sum(), 1)
    # no mean, which a compiler makes a product with 1 / experts
    worst = jnp.max(
        tokens.max(-1) * config.model.moe.experts / jnp.maximum(tokens.sum(-1), 1)
    )
    numbers = {
        "expert_load": worst,
        "router_entropy": entropy.sum() * config.model.moe.top_k / total,
        **dropped_or_rounds(config, noted.sum(), total),
    }
    if config.telemetry.experts_every:
        in_order = _joined(
            [
                layout.canonical_leaf(layout.weights[stack]["experts"]["load"], counts)
                for stack, counts in of_stacks.items()
            ]
        )
        if len(of_stacks) > 1:
            layers = np.concatenate(
                [layout.stacks[stack].layers for stack in of_stacks]
            )
            in_order = in_order[np.argsort(layers)]
        # on all devices, so that the first process can read it
        numbers[COUNTS] = jax.lax.with_sharding_constraint(
            in_order, NamedSharding(layout.mesh, PartitionSpec())
        )
    return numbers


def _joined(arrays: list[jax.Array]) -> jax.Array:
    if len(arrays) > 1:
        return jnp.concatenate(arrays)
    return arrays[0]


def divided(counts: Any, experts: int) -> tuple[Any, Any, Any]:
    """Returns the counts of layers [L, experts + 2] as tokens [L, experts], what `dropped_or_rounds` takes [L] and
    entropies summed over tokens [L].
    """
    return counts[:, :experts], counts[:, experts], counts[:, experts + 1]


def dropped_or_rounds(config: Config, noted: Any, pairs: Any) -> dict[str, Any]:
    """Returns the metric of what dispatches note: with a capacity dropped rows, else each token's rounds, of which it
    is the mean.
    """
    if config.parallel.experts.capacity is not None:
        return {"dropped_rows": noted}
    return {"expert_rounds": noted * config.model.moe.top_k / pairs}


class LayerLoads(RunHook):
    """Adds to a row, each time that telemetry.experts_every steps are over, each layer's numbers and the tokens of its
    experts.

    It takes the counts out of the step's metrics, whose others are plain numbers, so it stands before all hooks that
    read them.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.every = config.telemetry.experts_every
        self._counts: jax.Array | None = None
        self._newest: int | None = None  # step that a row told of

    def after_step(
        self, step: int, compiled: jax.stages.Compiled, metrics: dict[str, jax.Array]
    ) -> None:
        self._counts = metrics.pop(COUNTS, None)

    def after_metrics(self, row: Row, due: bool) -> None:
        step = row["step"]
        last = self.config.train.steps
        if not due or self._counts is None:
            return
        if self._newest is None or step - self._newest >= self.every or step == last:
            self._newest = step
            row.update(of_layers(self._local_sum(self._counts), self.config))

    @staticmethod
    def _local_sum(counts: jax.Array) -> np.ndarray:
        """[L, experts + 2]; of islands that step by themselves, [islands, ...], the sum over those of this process."""
        if counts.ndim == 2:
            return np.asarray(counts)
        by_island = {
            shard.index[0].start: np.asarray(shard.data)
            for shard in counts.addressable_shards
        }
        return np.concatenate(list(by_island.values())).sum(0)


def of_layers(counts: np.ndarray, config: Config) -> Row:
    """Returns what a row says of each layer, by its number, and `expert_tokens`, a list of each layer's experts."""
    tokens, noted, entropy = divided(counts, config.model.moe.experts)
    total = np.maximum(tokens.sum(-1), 1)
    by_layer = {
        "layer_expert_load": tokens.max(-1) / (total / tokens.shape[1]),
        "layer_router_entropy": entropy * config.model.moe.top_k / total,
        **{
            f"layer_{name}": x
            for name, x in dropped_or_rounds(config, noted, total).items()
        },
    }
    layers = expert_layers(config.model)
    numbered = {
        name: {str(i): float(x) for i, x in zip(layers, values, strict=True)}
        for name, values in by_layer.items()
    }
    return {**numbered, "expert_tokens": tokens.astype(int).tolist()}
