"""Tensor and sequence parallelism: `model.collectives` as explicit collectives inside a fully manual shard_map.

With check_vma the backward collectives follow from the types, none is written by hand. Per block, forward / backward:

                          tensor parallel (Shoeybi et al. 2019)        + sequence parallel (Korthikanti et al. 2022)
    enter  (twice)        nothing       / all-reduce                   all-gather     / reduce-scatter
    leave  (twice)        all-reduce    / nothing                      reduce-scatter / all-gather
"""

import math
from typing import Any

import jax
from jax import lax

from meshtrain.compat import vary, varying
from meshtrain.config import Config
from meshtrain.mesh import CONTEXT, PIPELINE, TENSOR
from meshtrain.model.collectives import Collectives, VocabularyShards
from meshtrain.parallel.placement import expert_axes, expert_ranks, splits

SEQUENCE = 1  # the dimension of [B, T, D] that sequence parallelism splits


class MeshCollectives(VocabularyShards):
    """`model.collectives` on a mesh. Weights vary over every mesh axis; gradients come out as partial sums."""

    def __init__(self, config: Config, platform: str) -> None:
        self.platform = platform
        self.ranks = config.mesh.tensor
        self.sequence_parallel = config.parallel.sequence_parallel and self.ranks > 1
        self.context = config.mesh.context
        strategy = config.parallel.context_strategy
        self.by_heads = strategy == "ulysses"
        self.rings = strategy == "ring"
        self.experts = config.parallel.experts
        self.expert_axes = expert_axes(config)
        self.expert_ranks = expert_ranks(config)
        vocabulary = splits(config.model, config.mesh, config.parallel.vocab)["vocab"]
        super().__init__(vocabulary, math.prod(getattr(config.mesh, axis) for axis in vocabulary))
        self.others = tuple(a for a in self.vocabulary if a != TENSOR)

    def enter(self, x_BTD: jax.Array) -> jax.Array:
        if self.sequence_parallel:
            return lax.all_gather(x_BTD, TENSOR, axis=SEQUENCE, tiled=True)
        return vary(
            x_BTD, (TENSOR,)
        )  # after a norm it does already: the norm's scale does (see layers.Norm)

    def leave(self, y_BTD: jax.Array) -> jax.Array:
        if self.sequence_parallel:
            return lax.psum_scatter(y_BTD, TENSOR, scatter_dimension=SEQUENCE, tiled=True)
        return lax.psum(y_BTD, TENSOR)

    def enter_head(self, x_BTD: jax.Array) -> jax.Array:
        return self.enter(x_BTD)

    def leave_embedding(self, x_BTD: jax.Array) -> jax.Array:
        if not self.sequence_parallel:
            return lax.psum(x_BTD, self.vocabulary)
        x_BTD = self.leave(x_BTD)  # first, so that the other stages need only send a part
        return lax.psum(x_BTD, self.others) if self.others else x_BTD

    def share(self, weight: jax.Array) -> jax.Array:
        return weight / self.ranks

    def share_embedding(self, weight: jax.Array) -> jax.Array:
        return weight / self.vocabulary_ranks

    def share_stream(self, weight: jax.Array) -> jax.Array:
        # The first rank's for all, so that its gradient is counted once; of a few numbers, [D].
        first = lax.axis_index(TENSOR) == 0
        return (
            weight
            if self.sequence_parallel
            else lax.psum(jax.numpy.where(first, weight, 0), TENSOR)
        )

    def mean_over_heads(self, x: jax.Array) -> jax.Array:
        return lax.pmean(x, TENSOR)

    def first_head(self, heads: int) -> jax.Array:
        return lax.axis_index(TENSOR) * heads

    def first_position(self, length: int) -> jax.Array | int:
        first = lax.axis_index(TENSOR) * length if self.sequence_parallel else 0
        if self.context == 1:
            return first
        positions = self.positions(length * self.ranks if self.sequence_parallel else length)
        return lax.dynamic_slice_in_dim(positions, first, length) - jax.numpy.arange(length)

    def positions(self, length: int) -> jax.Array:
        if self.context == 1:
            return super().positions(length)
        from meshtrain.parallel.context import positions

        return positions(length, self.context, self.by_heads)

    def attend_in_zigzag(
        self,
        kernel: Any,
        scoring: Any,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        masks: Any,
        sinks: Any = None,
    ) -> jax.Array:
        from meshtrain.parallel.context import zigzag_attention

        return zigzag_attention(kernel, scoring, self.rings, q, k, v, masks, sinks)

    def attend_by_heads(
        self,
        attend: Any,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        segments: Any,
        dropout: Any,
        sinks: Any = None,
    ) -> jax.Array:
        from meshtrain.parallel.context import by_heads

        return by_heads(attend, q, k, v, segments, self, dropout, sinks)

    def dispatch(
        self, compute: Any, experts: int, rows: jax.Array, chosen: jax.Array, weights: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        from meshtrain.parallel.experts import dispatched

        return dispatched(self, compute, experts, rows, chosen, weights)

    def of_experts(self) -> Collectives:
        if TENSOR not in self.expert_axes:
            return self
        from meshtrain.parallel.experts import PartsOfSequences

        return PartsOfSequences(self)

    def once(self, x: jax.Array) -> jax.Array:
        return jax.numpy.where(lax.axis_index(TENSOR) == 0, x, 0) if self.ranks > 1 else x

    def row_sum(self, x: jax.Array) -> jax.Array:
        return lax.psum(x, CONTEXT) if self.context > 1 else x

    def row_max(self, x: jax.Array) -> jax.Array:
        return lax.pmax(x, CONTEXT) if self.context > 1 else x

    def vocabulary_max(self, x: jax.Array) -> jax.Array:
        return super().vocabulary_max(vary(x, self.vocabulary))

    def stream_axes(self) -> tuple[str, ...]:
        return (TENSOR,) if self.sequence_parallel else ()

    def from_last_stage(self, y: jax.Array, here: jax.Array) -> jax.Array:
        """The value of `y` where `here` is true, on every stage that shares the vocabulary; its gradient flows back to
        there.
        """
        if PIPELINE not in self.vocabulary:
            return y
        return lax.psum(lax.select(here, y, vary(jax.numpy.zeros_like(y), varying(y))), PIPELINE)
