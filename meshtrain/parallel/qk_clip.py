"""QK-clip (Kimi Team 2025, "Kimi K2", algorithm 1): attention logits stay below a bound, tau, by the weights that make
them.

    in the step    largest logit of each head, of all tokens that are no padding
    after it       gamma = tau / max(tau, largest) of each head
                   keys of a group of heads    x sqrt(the least gamma of its heads)
                   queries of a head           x gamma / the factor of its keys

So each head's logits shrink by its own gamma, and those of the others stay what they are though they share the keys.
With latent attention a head has keys of its own but for the rotary part, which all heads share and nothing clips:

    queries and keys without rotary positions    x sqrt(gamma)
    rotary part of the queries                   x gamma

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

    def __init__(self, forward: Forward) -> None:
        self.config = forward.config
        self.layout = forward.layout
        self.microbatches = self.config.parallel.microbatches
        model = self.config.model
        mesh = self.config.mesh
        places = (("heads", model.heads * self.microbatches),)
        over = splits(model, mesh, self.config.parallel.vocab)
        self.placed = {}
        for stack, its in self.layout.stacks.items():
            name = f"{stack}.attention.{MAXIMA}"
            weight = Weight(
                name, places, 0.0, 0.0, len(its.layers), float32=True, counts=True
            )
            self.placed[stack] = place(
                weight, over, mesh, its.layer_at.size, zero=False
            )
        # of the largest logits of each stack, [live layers, heads]
        self.spec = dict.fromkeys(self.placed, PartitionSpec(PIPELINE, TENSOR))
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
        return replace(
            sequence, maxima=Maxima(attention.pop(MAXIMA), counted, is_microbatch)
        )

    def counting(
        self, run: Callable[..., LossAndGradients]
    ) -> Callable[..., LossAndGradients]:
        """Returns the function `run` of the weights, which also returns the largest logits [layers, heads] of this
        stage's layers and this rank's heads, by stack.
        """

        def counted(weights: Weights, *more: Any) -> LossAndGradients:
            axes = self.config.mesh.axes
            zeros = {}
            for stack, placed in self.placed.items():
                local = [
                    n // ways for n, ways in zip(placed.whole, placed.ways, strict=True)
                ]
                zeros[stack] = vary(jnp.zeros(local), axes)
            differentiated, constant = weights
            nothing = dict.fromkeys(zeros)
            totals, gradients, _ = run(
                Weights(
                    add_maxima(differentiated, zeros), add_maxima(constant, nothing)
                ),
                *more,
            )
            maxima = {}
            for stack in zeros:
                attention = dict(gradients[stack]["attention"])
                each = attention.pop(MAXIMA)
                gradients = {
                    **gradients,
                    stack: {**gradients[stack], "attention": attention},
                }
                maxima[stack] = each.reshape(len(each), -1, self.microbatches).max(-1)
            ranks = tuple(axis for axis in axes if axis not in (PIPELINE, TENSOR))
            return LossAndGradients(totals, gradients, lax.pmax(maxima, ranks))

        return counted

    def clip(self, params: Any, maxima: Any) -> tuple[Any, dict[str, jax.Array]]:
        """Returns the updated weights with those of queries and keys clipped, and numbers for the row of metrics."""
        everywhere = NamedSharding(self.layout.mesh, PartitionSpec())
        largest = {}
        for stack, of_stack in lax.with_sharding_constraint(maxima, everywhere).items():
            # Places that no layer has are 0, and stay it.
            is_layer = jnp.asarray(
                self.layout.stacks[stack].layer_at.reshape(-1, 1) >= 0
            )
            largest[stack] = jnp.where(is_layer, of_stack, MASKED)
            attention = dict(params[stack]["attention"])
            for name, factors in self._factors(largest[stack]).items():
                for part in (name, f"{name}_bias"):
                    if (x := attention.get(part)) is not None:
                        ones = [1] * (x.ndim - 3)
                        attention[part] = x * factors.reshape(
                            len(factors), *ones, *factors.shape[1:]
                        )
            params = {**params, stack: {**params[stack], "attention": attention}}
        together = jnp.concatenate(list(largest.values()))
        return params, {
            "qk_clip/max_logit": together.max(),
            "qk_clip/clipped_heads": jnp.sum(together > self.config.optimizer.qk_clip),
        }

    def _factors(self, largest: jax.Array) -> dict[str, jax.Array]:
        """Returns what weights of queries and keys are multiplied by, [layers, heads, width or 1], by their names."""
        bound = self.config.optimizer.qk_clip
        model = self.config.model
        mla = model.mla
        gamma = bound / jnp.maximum(bound, largest)
        if mla.kv_rank:
            plain = jnp.sqrt(gamma)[..., None]
            is_plain = jnp.arange(mla.nope + mla.rope) < mla.nope
            queries = jnp.where(is_plain, plain, gamma[..., None])
            return {"q_up" if mla.q_rank else "q": queries, "k_up": plain}
        by_group = gamma.reshape(len(gamma), model.kv_heads, -1)
        keys = jnp.sqrt(by_group.min(-1, keepdims=True))
        return {"q": (by_group / keys).reshape(*gamma.shape, 1), "k": keys}


def add_maxima(tree: Any, values: Any) -> Any:
    """Returns a tree of weights with one more in each stack of `values`."""
    more = {
        stack: {**tree[stack], "attention": {**tree[stack]["attention"], MAXIMA: value}}
        for stack, value in values.items()
    }
    return {**tree, **more}
