"""Canonical arrays put together in host memory, where one process has every block of the live ones.

    save()      blocked: the live blocks come to the host; on CPU devices they are there, and nothing is copied
    a thread    leaf by leaf, block by block of the canonical array:

        live, pipeline 2, 2 chunks    0 1 4 5 │ 2 3 6 7
        canonical                     0 1 2 3   4 5 6 7      a copy for each run of layers that follow one another in both

Nothing is computed on the devices and nothing waits for them. Several processes have to trade blocks: rearrange.py.
"""

from collections.abc import Iterator, Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

Bounds = list[tuple[int, int]]  # begin and end along each dimension
Block = tuple[Bounds, np.ndarray]


def held(live: Sequence[jax.Array]) -> list[list[Block]]:
    """The blocks of each array, each once, in host memory. On CPU devices it is the arrays' own, kept from who they are donated to."""
    shards = [[shard for shard in x.addressable_shards if shard.replica_id == 0] for x in live]
    for shard in (shard for of_one in shards for shard in of_one):
        shard.data.copy_to_host_async()
    return [
        [(_bounds(shard.index, x.shape), np.asarray(shard.data)) for shard in of_one]
        for x, of_one in zip(live, shards, strict=True)
    ]


def assembled(
    blocks: Sequence[Block], shape: tuple[int, ...], places: np.ndarray, to: NamedSharding, along: int = 0
) -> jax.Array:
    """The canonical array of a shape from live blocks, each of its own blocks on one device of `to`.

    places: where each index of the dimension `along` is in the live array; in the others it is in the same place.
    """

    def block(index: tuple[slice, ...] | None) -> np.ndarray:
        bounds = _bounds(index or (), shape)
        made = np.empty([end - begin for begin, end in bounds], blocks[0][1].dtype)
        for live, data in blocks:
            common = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(bounds, live, strict=True)]
            if not bounds:
                made[()] = data
            elif all(begin < end for d, (begin, end) in enumerate(common) if d != along):
                into = [slice(begin - a, end - a) for (begin, end), (a, _) in zip(common, bounds, strict=True)]
                out_of = [slice(begin - c, end - c) for (begin, end), (c, _) in zip(common, live, strict=True)]
                for first, place, n in runs(places[slice(*bounds[along])], *live[along]):
                    into[along], out_of[along] = slice(first, first + n), slice(place, place + n)
                    made[tuple(into)] = data[tuple(out_of)]
        return made

    return jax.make_array_from_callback(shape, _once(to), block)


def runs(places: np.ndarray, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    """(index, place - begin, how many) of what lies in begin .. end, as long as both count on together."""
    here = np.flatnonzero((places >= begin) & (places < end))
    breaks = np.flatnonzero((np.diff(here) != 1) | (np.diff(places[here]) != 1)) + 1
    for run in np.split(here, breaks):
        if len(run):
            yield int(run[0]), int(places[run[0]]) - begin, len(run)


def _once(sharding: NamedSharding) -> NamedSharding:
    """The same blocks, each on one device alone."""
    used = {axis for axes in sharding.spec for axis in ((axes,) if isinstance(axes, str) else axes or ())}
    mesh = sharding.mesh
    devices = mesh.devices[tuple(slice(None) if axis in used else slice(1) for axis in mesh.axis_names)]
    return NamedSharding(Mesh(devices, mesh.axis_names), sharding.spec, memory_kind=sharding.memory_kind)


def _bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> Bounds:
    return [s.indices(n)[:2] for s, n in zip(index, shape, strict=True)]
