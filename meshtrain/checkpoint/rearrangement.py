"""Live arrays to global ones and back, where stages pad or reorder the layers or ZeRO pads a size: in host memory, or
on the devices.

In host memory, where one process has every block of the live arrays; nothing is computed on the devices and nothing
waits for them:

    save()      blocked: the live blocks come to the host; on CPU devices they are there, and nothing is copied
    a thread    leaf by leaf, block by block of the global array:

        live, pipeline 2, 2 chunks    0 1 4 5 │ 2 3 6 7
        global                        0 1 2 3   4 5 6 7      a copy for each run of layers that are consecutive in both

On the devices, for several processes and for restoring: an all-to-all first gives each device a shard of a dimension
that does not change, for its shard of those that do. The change itself is then local, and no device ever holds a whole
array (XLA, asked with shardings alone, replicates here):

    live, layers over pipeline         layers whole, d_model over pipeline         global
    stage 0   0 1 ·   |  d d           0 1 · 2 3 4 5 ·  |  d                       0 1 2 3 4 5  |  d
    stage 1   ...     |  d d    ◄──►                              ◄──►
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshtrain.parallel.layout import Layout, shard_spec
from meshtrain.parallel.placement import Placed

Bounds = list[tuple[int, int]]  # begin and end along each dimension
Block = tuple[Bounds, np.ndarray]

# --- in host memory


def host_blocks(live: Mapping[str, jax.Array]) -> dict[str, list[Block]]:
    """Returns the blocks of each array, each once, in host memory; on CPU devices the arrays' own, which a donation
    then leaves alone.
    """
    shards = {
        name: [s for s in x.addressable_shards if s.replica_id == 0]
        for name, x in live.items()
    }
    for shard in itertools.chain(*shards.values()):
        shard.data.copy_to_host_async()
    return {
        name: [(_bounds(s.index, x.shape), np.asarray(s.data)) for s in shards[name]]
        for name, x in live.items()
    }


def assembled(
    blocks: Sequence[Block],
    shape: tuple[int, ...],
    places: np.ndarray,
    to: NamedSharding,
    along: int = 0,
) -> jax.Array:
    """Returns the global array of a shape from live blocks, each of its own blocks on one device of `to`.

    places: where each index of the dimension `along` is in the live array; in the others it is in the same place.
    """

    def block(index: tuple[slice, ...] | None) -> np.ndarray:
        bounds = _bounds(index or (), shape)
        array = np.empty([end - begin for begin, end in bounds], blocks[0][1].dtype)
        for live, data in blocks:
            common = [
                (max(a, c), min(b, d))
                for (a, b), (c, d) in zip(bounds, live, strict=True)
            ]
            if not bounds:
                array[()] = data
            elif all(
                begin < end for d, (begin, end) in enumerate(common) if d != along
            ):
                into = _slices(common, bounds)
                out_of = _slices(common, live)
                for first, place, n in runs(
                    places[slice(*bounds[along])], *live[along]
                ):
                    into[along] = slice(first, first + n)
                    out_of[along] = slice(place, place + n)
                    array[tuple(into)] = data[tuple(out_of)]
        return array

    return jax.make_array_from_callback(shape, _drop_replicas(to), block)


def _slices(part: Bounds, whole: Bounds) -> list[slice]:
    """Returns where a part lies in an array that holds the whole."""
    return [
        slice(begin - start, end - start)
        for (begin, end), (start, _) in zip(part, whole, strict=True)
    ]


def runs(places: np.ndarray, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yields (index, place - begin, how many) of the places in begin .. end, as long as index and place count on
    together.
    """
    inside = np.flatnonzero((places >= begin) & (places < end))
    breaks = np.flatnonzero((np.diff(inside) != 1) | (np.diff(places[inside]) != 1)) + 1
    for run in np.split(inside, breaks):
        if len(run):
            yield int(run[0]), int(places[run[0]]) - begin, len(run)


def _drop_replicas(sharding: NamedSharding) -> NamedSharding:
    used = {axis for axes in sharding.spec for axis in _axes(axes)}
    mesh = sharding.mesh
    devices = mesh.devices[
        tuple(slice(None) if axis in used else slice(1) for axis in mesh.axis_names)
    ]
    return NamedSharding(
        Mesh(devices, mesh.axis_names), sharding.spec, memory_kind=sharding.memory_kind
    )


def _bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> Bounds:
    return [s.indices(n)[:2] for s, n in zip(index, shape, strict=True)]


# --- on the devices


@dataclasses.dataclass(frozen=True)
class Move:
    """A mesh axis that splits dimension `before`, and from then on `after`; None: the dimension is gathered over it."""

    axis: str
    before: int
    after: int | None


@dataclasses.dataclass(frozen=True)
class Rearrangement:
    """Converts one leaf; `make_global` and `make_live` run inside a shard_map on a device's own blocks."""

    layout: Layout
    leaf: Placed
    changing: tuple[int, ...]  # dimensions that differ between live and global
    moves: tuple[Move, ...]
    spec: PartitionSpec  # of the global array

    def make_global(self, x: jax.Array) -> jax.Array:
        for move in self.moves:
            if move.after is None:
                x = lax.all_gather(x, move.axis, axis=move.before, tiled=True)
            else:
                x = lax.all_to_all(
                    x,
                    move.axis,
                    split_axis=move.after,
                    concat_axis=move.before,
                    tiled=True,
                )
        return self.layout.canonical_leaf(self._local(x.shape), x)

    def make_live(self, x: jax.Array) -> jax.Array:
        x = self.layout.live_leaf(self._local(x.shape), x)
        for move in reversed(self.moves):
            if move.after is None:
                size = x.shape[move.before] // lax.axis_size(move.axis)
                x = lax.dynamic_slice_in_dim(
                    x, lax.axis_index(move.axis) * size, size, move.before
                )
            else:
                x = lax.all_to_all(
                    x,
                    move.axis,
                    split_axis=move.before,
                    concat_axis=move.after,
                    tiled=True,
                )
        return x

    def _local(self, block: Sequence[int]) -> Placed:
        """Returns the leaf as a device has it: dimensions that do not change have the size of its block."""
        keep = [d not in self.changing for d in range(len(block))]
        shape = tuple(
            n if k else m for n, m, k in zip(block, self.leaf.shape, keep, strict=True)
        )
        padded = tuple(
            n if k else m for n, m, k in zip(block, self.leaf.padded, keep, strict=True)
        )
        return dataclasses.replace(self.leaf, shape=shape, padded=padded)


def rearrangement(
    layout: Layout, leaf: Placed, mesh: Mesh, resized: Sequence[int] = ()
) -> Rearrangement:
    """Returns how a leaf becomes global and live again; dimensions in `resized` are made whole as well."""
    changing = [
        d
        for d, (n, m) in enumerate(zip(leaf.shape, leaf.padded, strict=True))
        if n != m or d in resized
    ]
    if leaf.stacked and not layout.stack(leaf).in_order and 0 not in changing:
        changing.append(0)
    split = [list(_axes(axes)) for axes in shard_spec(leaf)]
    split += [[] for _ in range(len(leaf.shape) - len(split))]
    local = [
        n // math.prod(mesh.shape[axis] for axis in axes)
        for n, axes in zip(leaf.padded, split, strict=True)
    ]
    moves = []
    for dimension in changing:
        # The innermost first: its parts are neighbours
        for axis in reversed(split[dimension]):
            degree = mesh.shape[axis]
            fits = [
                d
                for d in range(len(local))
                if d not in changing and local[d] % degree == 0
            ]
            after = max(fits, key=local.__getitem__, default=None)
            if after is not None:
                split[after].append(axis)
                local[after] //= degree
            moves.append(Move(axis, dimension, after))
        split[dimension] = []
    return Rearrangement(
        layout,
        leaf,
        tuple(changing),
        tuple(moves),
        PartitionSpec(*(tuple(a) or None for a in split)),
    )


def _axes(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else entry
