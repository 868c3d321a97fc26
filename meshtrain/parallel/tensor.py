"""Tensor and sequence parallelism: `model.collectives` as explicit collectives inside a fully manual shard_map.

With check_vma the backward collectives follow from the types, none is written by hand. Per block, forward / backward:

                          tensor parallel (Shoeybi et al. 2019)        + sequence parallel (Korthikanti et al. 2022)
    enter  (twice)        nothing       / all-reduce                   all-gather     / reduce-scatter
    leave  (twice)        all-reduce    / nothing                      reduce-scatter / all-gather
"""

import math

import jax
from jax import lax

from meshtrain.compat import vary, varying
from meshtrain.config import Config
from meshtrain.mesh import CONTEXT, PIPELINE, TENSOR
from meshtrain.model.collectives import VocabularyShards
from meshtrain.parallel.placement import splits

SEQUENCE = 1  # the dimension of [B, T, D] that sequence parallelism splits


class MeshCollectives(VocabularyShards):
    """`model.collectives` on a mesh. Weights vary over every mesh axis; gradients come out as partial sums."""

    def __init__(self, config: Config, platform: str) -> None:
        self.platform = platform
        self.ranks = config.mesh.tensor
        self.sequence_parallel = config.parallel.sequence_parallel and self.ranks > 1
        self.context = config.mesh.context
        vocabulary = splits(config.model, config.mesh, config.parallel.vocab)["vocab"]
        super().__init__(
            vocabulary, math.prod(getattr(config.mesh, axis) for axis in vocabulary)
        )
        self.others = tuple(a for a in self.vocabulary if a != TENSOR)

    def enter(self, x_BTD: jax.Array) -> jax.Array:
        if self.sequence_parallel:
            return lax.all_gather(x_BTD, TENSOR, axis=SEQUENCE, tiled=True)
        # After a norm it does already: the norm's scale does (see layers.Norm).
        return vary(x_BTD, (TENSOR,))

    def leave(self, y_BTD: jax.Array) -> jax.Array:
        if self.sequence_parallel:
            return lax.psum_scatter(
                y_BTD, TENSOR, scatter_dimension=SEQUENCE, tiled=True
            )
        return lax.psum(y_BTD, TENSOR)

    def enter_head(self, x_BTD: jax.Array) -> jax.Array:
        return self.enter(x_BTD)

    def leave_embedding(self, x_BTD: jax.Array) -> jax.Array:
        if not self.sequence_parallel:
            return lax.psum(x_BTD, self.vocabulary)
        # First, so that the other stages need only send a part
        x_BTD = self.leave(x_BTD)
        if self.others:
            return lax.psum(x_BTD, self.others)
        return x_BTD

    def share(self, weight: jax.Array) -> jax.Array:
        return weight / self.ranks

    def share_embedding(self, weight: jax.Array) -> jax.Array:
        return weight / self.vocabulary_ranks

    def share_stream(self, weight: jax.Array) -> jax.Array:
        # The first rank's for all, so that its gradient is counted once; of a few numbers, [D].
        first = lax.axis_index(TENSOR) == 0
        if self.sequence_parallel:
            return weight
        return lax.psum(jax.numpy.where(first, weight, 0), TENSOR)

    def mean_over_heads(self, x: jax.Array) -> jax.Array:
        return lax.pmean(x, TENSOR)

    def first_head(self, heads: int) -> jax.Array:
        return lax.axis_index(TENSOR) * heads

    def first_position(self, length: int) -> jax.Array | int:
        if self.sequence_parallel:
            return lax.axis_index(TENSOR) * length
        return 0

    def once(self, x: jax.Array) -> jax.Array:
        if self.ranks > 1:
            return jax.numpy.where(lax.axis_index(TENSOR) == 0, x, 0)
        return x

    def row_sum(self, x: jax.Array) -> jax.Array:
        if self.context > 1:
            return lax.psum(x, CONTEXT)
        return x

    def row_max(self, x: jax.Array) -> jax.Array:
        if self.context > 1:
            return lax.pmax(x, CONTEXT)
        return x

    def vocabulary_max(self, x: jax.Array) -> jax.Array:
        return super().vocabulary_max(vary(x, self.vocabulary))

    def stream_axes(self) -> tuple[str, ...]:
        if self.sequence_parallel:
            return (TENSOR,)
        return ()

    def share_last_stage(self, y: jax.Array, here: jax.Array) -> jax.Array:
        """Returns the value of `y` where `here` is true, on every stage that shares the vocabulary; its gradient flows
        back to there.
        """
        if PIPELINE not in self.vocabulary:
            return y
        zeros = vary(jax.numpy.zeros_like(y), varying(y))
        return lax.psum(lax.select(here, y, zeros), PIPELINE)
