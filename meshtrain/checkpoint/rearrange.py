"""A leaf from its live to its canonical layout and back, when the two differ: stages padded or out of order, sizes padded.

Each device first trades its share of the dimensions that change for a share of one that does not, with an all-to-all, so that
the change itself is local and nothing is ever whole on one device (XLA, asked with shardings alone, replicates here):

    live, layers over pipeline         layers whole, d_model over pipeline         canonical
    stage 0   0 1 ·   |  d d           0 1 · 2 3 4 5 ·  |  d                       0 1 2 3 4 5  |  d
    stage 1   ...     |  d d    ◄──►                              ◄──►
"""

import dataclasses
import math
from collections.abc import Sequence

import jax
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from meshtrain.parallel.layout import Layout, shard_spec
from meshtrain.parallel.placement import Placed


@dataclasses.dataclass(frozen=True)
class Move:
    """A mesh axis that splits dimension `before`, and from then on `after`; None: the dimension is gathered over it."""

    axis: str
    before: int
    after: int | None


@dataclasses.dataclass(frozen=True)
class Rearrangement:
    """The way of one leaf; `to_canonical` and `to_live` run inside a shard_map on a device's own blocks."""

    layout: Layout
    leaf: Placed
    changing: tuple[int, ...]  # dimensions that differ between live and canonical
    moves: tuple[Move, ...]
    spec: PartitionSpec  # of the canonical array

    def to_canonical(self, x: jax.Array) -> jax.Array:
        for move in self.moves:
            if move.after is None:
                x = lax.all_gather(x, move.axis, axis=move.before, tiled=True)
            else:
                x = lax.all_to_all(x, move.axis, split_axis=move.after, concat_axis=move.before, tiled=True)
        return self.layout.canonical_leaf(self._own(x.shape), x)

    def to_live(self, x: jax.Array) -> jax.Array:
        x = self.layout.live_leaf(self._own(x.shape), x)
        for move in reversed(self.moves):
            if move.after is None:
                size = x.shape[move.before] // lax.axis_size(move.axis)
                x = lax.dynamic_slice_in_dim(x, lax.axis_index(move.axis) * size, size, move.before)
            else:
                x = lax.all_to_all(x, move.axis, split_axis=move.before, concat_axis=move.after, tiled=True)
        return x

    def _own(self, block: Sequence[int]) -> Placed:
        """The leaf as a device has it here: dimensions that stay have the size of its block."""
        keep = [d not in self.changing for d in range(len(block))]
        shape = tuple(n if k else m for n, m, k in zip(block, self.leaf.shape, keep, strict=True))
        padded = tuple(n if k else m for n, m, k in zip(block, self.leaf.padded, keep, strict=True))
        return dataclasses.replace(self.leaf, shape=shape, padded=padded)


def rearrangement(layout: Layout, leaf: Placed, mesh: Mesh, resized: Sequence[int] = ()) -> Rearrangement:
    """How a leaf goes to the canonical layout and back; dimensions in `resized` are made whole as well."""
    changing = [d for d, (n, m) in enumerate(zip(leaf.shape, leaf.padded, strict=True)) if n != m or d in resized]
    if leaf.stacked and not layout.in_order and 0 not in changing:
        changing.append(0)
    split = [list(_axes(axes)) for axes in shard_spec(leaf)]
    split += [[] for _ in range(len(leaf.shape) - len(split))]
    local = [n // _ways(axes, mesh) for n, axes in zip(leaf.padded, split, strict=True)]
    moves = []
    for dimension in changing:
        for axis in reversed(split[dimension]):  # the innermost first: its parts are neighbours
            ways = mesh.shape[axis]
            fits = [d for d in range(len(local)) if d not in changing and local[d] % ways == 0]
            after = max(fits, key=local.__getitem__, default=None)
            if after is not None:
                split[after].append(axis)
                local[after] //= ways
            moves.append(Move(axis, dimension, after))
        split[dimension] = []
    return Rearrangement(layout, leaf, tuple(changing), tuple(moves), PartitionSpec(*(tuple(a) or None for a in split)))


def _axes(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else entry


def _ways(axes: Sequence[str], mesh: Mesh) -> int:
    return math.prod(mesh.shape[axis] for axis in axes)
