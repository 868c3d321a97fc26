"""QK-clip (Kimi Team 2025, "Kimi K2", algorithm 1): attention logits stay below a bound, tau, by the weights that make
them.

    in the step    largest logit of each head, of all tokens that are no padding
    after it       gamma = tau / max(tau, largest) of each head
                   keys of a group of heads    x sqrt(the least gamma of its heads)
                   queries of a head           x gamma / the factor of its keys

So each head's logits shrink by its own gamma, and those of the others stay what they are though they share the keys.

A largest logit leaves the backward as the gradient of a weight of zeros, as a router's counts do (`model.experts`).
Since gradients are summed, not compared, each microbatch has a place of its own:

    maxima [layers, heads x microbatches]    of head 0: m0 m1 m2 m3   of head 1: ...    on each rank

The maximum of a head's places, and then of the ranks, is exact whatever the schedule. No state holds this weight.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from meshtrain.compat import vary
from meshtrain.mesh import PIPELINE, TENSOR
from meshtrain.model.experts import recorded
from meshtrain.model.kernels import MASKED
from meshtrain.model.rope import Sequence
from meshtrain.model.weights import Weight
from meshtrain.parallel.forward import Batch, Forward, LossAndGradients
from meshtrain.parallel.placement import place, splits
from meshtrain.parallel.zero import Weights

MAXIMA = "maxima"  # the weight's name, in a layer's attention


@dataclass(frozen=True)
class Maxima:
    """Takes the largest logits of a layer's heads in a microbatch."""

    places: jax.Array  # zeros [heads x microbatches], whose gradient takes them
    counted_BT: jax.Array
    is_microbatch: jax.Array  # [microbatches], of one true

    def record(self, rows: jax.Array, largest_H: jax.Array) -> jax.Array:
        """Returns attention's rows."""
        values = jnp.where(self.is_microbatch, largest_H[:, None], 0.0)
        return recorded(rows, self.places, values.reshape(-1))


class QkClip:
    """QK-clip of one config: `counting` gives a step the largest logits, `clip` applies them."""

    spec = PartitionSpec(PIPELINE, TENSOR)  # of the largest logits, [live layers, heads]

    def __init__(self, forward: Forward) -> None:
        self.config = forward.config
        self.layout = forward.layout
        self.microbatches = self.config.parallel.microbatches
        model = self.config.model
        mesh = self.config.mesh
        size = model.heads * self.microbatches
        weight = Weight(
            f"blocks.attention.{MAXIMA}",
            (("heads", size),),
            0.0,
            0.0,
            model.layers,
            float32=True,
            counts=True,
        )
        over = splits(model, mesh, self.config.parallel.vocab)
        self.placed = place(weight, over, mesh, self.layout.layer_at.size, zero=False)
        layout = copy.copy(self.layout)
        vars(layout)["weights"] = add_maxima(layout.weights, self.placed)
        # The step's functions as they are, but for one weight more.
        self.forward = copy.copy(forward)
        self.forward.layout = layout
        self.forward.zero = copy.copy(forward.zero)
        self.forward.zero.layout = layout
        self.forward.take_maxima = self._take

    def _take(self, sequence: Sequence, attention: Any, batch: Batch) -> Sequence:
        rows = batch["rows"]
        number = rows[0] // len(rows) % self.microbatches
        is_microbatch = jnp.arange(self.microbatches) == number
        counted = self.forward.counted(batch)
        return replace(sequence, maxima=Maxima(attention.pop(MAXIMA), counted, is_microbatch))

    def counting(self, run: Callable[..., LossAndGradients]) -> Callable[..., LossAndGradients]:
        """Returns the function `run` of the weights, which also returns the largest logits [layers, heads] of this
        stage's layers and this rank's heads.
        """

        def counted(weights: Weights, *more: Any) -> LossAndGradients:
            layers, places = (
                n // ways for n, ways in zip(self.placed.whole, self.placed.ways, strict=True)
            )
            zeros = vary(jnp.zeros((layers, places)), self.config.mesh.axes)
            differentiated, constant = weights
            totals, gradients, _ = run(
                Weights(add_maxima(differentiated, zeros), add_maxima(constant, None)), *more
            )
            attention = dict(gradients["blocks"]["attention"])
            each = attention.pop(MAXIMA).reshape(layers, -1, self.microbatches)
            blocks = {**gradients["blocks"], "attention": attention}
            ranks = tuple(axis for axis in self.config.mesh.axes if axis not in self.spec)
            maxima = lax.pmax(each.max(-1), ranks)
            return LossAndGradients(totals, {**gradients, "blocks": blocks}, maxima)

        return counted

    def clip(self, params: Any, maxima: jax.Array) -> tuple[Any, dict[str, jax.Array]]:
        """Returns the updated weights with those of queries and keys clipped, and numbers for the row of metrics."""
        bound = self.config.optimizer.qk_clip
        everywhere = NamedSharding(self.layout.mesh, PartitionSpec())
        largest = lax.with_sharding_constraint(maxima, everywhere)
        # Places that no layer has are 0, and stay it.
        is_layer = jnp.asarray(self.layout.layer_at.reshape(-1, 1) >= 0)
        largest = jnp.where(is_layer, largest, MASKED)
        by_group = bound / jnp.maximum(bound, largest).reshape(
            len(largest), self.config.model.kv_heads, -1
        )
        keys = jnp.sqrt(by_group.min(-1))
        queries = (by_group / keys[..., None]).reshape(largest.shape)
        attention = dict(params["blocks"]["attention"])
        for name, factors in {"q": queries, "k": keys}.items():
            for part in (name, f"{name}_bias"):
                if (x := attention.get(part)) is not None:
                    ones = [1] * (x.ndim - 3)
                    attention[part] = x * factors.reshape(len(factors), *ones, -1, 1)
        params = {**params, "blocks": {**params["blocks"], "attention": attention}}
        return params, {
            "qk_clip/max_logit": largest.max(),
            "qk_clip/clipped_heads": jnp.sum(largest > bound),
        }


def add_maxima(tree: Any, value: Any) -> Any:
    """Returns a tree of weights with one more."""
    blocks = tree["blocks"]
    attention = {**blocks["attention"], MAXIMA: value}
    return {**tree, "blocks": {**blocks, "attention": attention}}
