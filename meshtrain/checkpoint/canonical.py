"""A state as named arrays in which no mesh, schedule or ZeRO stage has left a trace, and back.

    live (one mesh)                          canonical (every checkpoint)
    params.blocks.attention.q.kernel         params.blocks.attention.q.kernel   all layers in order, no padding
    optimizer[1][0].mu.blocks...             optimizer.mu.blocks...             as its parameter; no place in a chain
    step, scale.value                        step, scale.value

A leaf whose live layout is the canonical one goes to disk and comes back as it lies. The others (stages that padding fills up,
chunks out of order, sizes that ZeRO pads) are rearranged: on their way to disk in host memory, by the thread that writes, if one
process has them whole; else on the devices, part by part, so that two whole states never exist there.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from meshtrain.checkpoint import arrays, assembling
from meshtrain.checkpoint.rearrange import rearrangement
from meshtrain.mesh import platform
from meshtrain.optim import mirrored_leaves
from meshtrain.parallel.layout import shard_spec
from meshtrain.parallel.placement import Placed
from meshtrain.precision import initial_scale
from meshtrain.step import Program, State

# The parameters are rearranged in so many parts: more cost less memory (bench_checkpoint.py) and more compiling.
PARTS = 3


@dataclasses.dataclass(frozen=True)
class Entry:
    """One array of a state: its canonical name and shape, and how it lies on the mesh."""

    name: str
    shape: tuple[int, ...]
    live: jax.ShapeDtypeStruct
    leaf: Placed | None  # the parameter that it is, or mirrors

    @property
    def parameter(self) -> Placed:
        """The leaf, for an entry that has one."""
        assert self.leaf is not None
        return self.leaf


class Canonical:
    """The way between a program's states and canonical arrays."""

    def __init__(self, program: Program) -> None:
        self.program, self.layout, self.mesh = program, program.layout, program.mesh
        self._compiled: dict[tuple[Any, ...], jax.stages.Compiled] = {}

    @cached_property
    def entries(self) -> list[Entry]:
        """The arrays of a state, in `jax.tree` order."""
        shapes = self.program.state_shapes
        scalars = [None] * len(jax.tree.leaves(shapes.scale))
        mirrored = mirrored_leaves(self.layout, shapes.optimizer)
        # in the order of State: step, params, optimizer, scale
        leaves = [None, *self.layout.flat, *mirrored, *scalars]
        found: dict[str, Entry] = {}
        flat, _ = jax.tree_util.tree_flatten_with_path(shapes)
        for (path, live), leaf in zip(flat, leaves, strict=True):
            name = _name(path, found)
            found[name] = Entry(name, live.shape if leaf is None else leaf.shape, live, leaf)
        return list(found.values())

    def compile(self) -> None:
        """Compiles what `to_write` needs, so that the first save takes no longer than the others."""
        if jax.process_count() > 1:
            for batch in self.batches(self.entries):
                self._compiled_way("canonical", batch)

    # --- to disk

    def to_write(self, state: State) -> Callable[[], dict[str, jax.Array]] | dict[str, jax.Array]:
        """Canonical arrays of a live state; if they take time to make, a function that makes them once, whatever becomes of the state."""
        if jax.process_count() > 1 or not any(self.batches(self.entries)):
            return self.arrays(state)
        blocks = dict(zip((e.name for e in self.entries), assembling.held(jax.tree.leaves(state)), strict=True))
        return lambda: {e.name: self.assembled(e, blocks.pop(e.name)) for e in self.entries}

    def assembled(self, entry: Entry, blocks: Sequence[assembling.Block]) -> jax.Array:
        """The canonical array of live blocks, in host memory."""
        live, leaf = entry.live.sharding, entry.leaf
        spec = live.spec if leaf is None or self._direct(leaf) else self._placed(entry).sharding.spec
        memory = None if platform(self.mesh) == "cpu" else "pinned_host"
        places = self.layout.places if leaf is not None and leaf.stacked else np.arange(*entry.shape[:1] or [0])
        to = NamedSharding(self.mesh, spec, memory_kind=memory)
        return assembling.assembled(blocks, entry.shape, places, to)

    def arrays(self, state: State) -> dict[str, jax.Array]:
        """Canonical arrays of a live state; those that had to be rearranged are copies, in host memory if there is an accelerator."""
        found = dict(zip((e.name for e in self.entries), jax.tree.leaves(state), strict=True))
        for batch in self.batches(self.entries):
            copies = self.rearranged("canonical", batch, [found[e.name] for e in batch])
            for entry, copy in zip(batch, copies, strict=True):
                found[entry.name] = copy if platform(self.mesh) == "cpu" else _to_host(copy)
        return found

    # --- from disk

    def state(self, directory: Path, stored: Collection[str]) -> State:
        """The state on disk, on the program's shardings. A loss scale that is not `stored` starts anew."""
        found = self.read(directory, [e for e in self.entries if e.name in stored])
        if self.program.state_shapes.scale is not None and "scale.value" not in stored:
            fresh = initial_scale(self.program.config.precision)
            placed = jax.device_put(fresh, self.program.state_shardings.scale)
            names = [e.name for e in self.entries if e.name.startswith("scale.")]
            found |= dict(zip(names, jax.tree.leaves(placed), strict=True))
        return jax.tree.unflatten(jax.tree.structure(self.program.state_shapes), [found[e.name] for e in self.entries])

    def read(self, directory: Path, entries: Sequence[Entry]) -> dict[str, jax.Array]:
        """Live arrays by name."""
        as_stored = [e for e in entries if e.leaf is None or self._direct(e.leaf)]
        found = arrays.read(directory, {e.name: e.live for e in as_stored})
        for batch in self.batches(entries):
            read = arrays.read(directory, {e.name: self._placed(e) for e in batch})
            live = self.rearranged("live", batch, [read.pop(e.name) for e in batch])
            # what is offloaded goes to the host
            placed = [jax.device_put(x, e.live.sharding) for x, e in zip(live, batch, strict=True)]
            found |= zip((e.name for e in batch), jax.block_until_ready(placed), strict=True)
        return found

    def into(self, directory: Path, entry: Entry, shape: tuple[int, ...], live: jax.Array) -> jax.Array:
        """A live array with what the checkpoint, where the leaf has another `shape`, has of it; `live`'s memory is reused."""
        resized = [d for d, (n, m) in enumerate(zip(entry.shape, shape, strict=True)) if n != m]
        common = tuple(
            slice(min(n, m)) if d in resized else slice(None)
            for d, (n, m) in enumerate(zip(entry.shape, shape, strict=True))
        )
        way = rearrangement(self.layout, entry.parameter, self.mesh, resized)
        target = jax.ShapeDtypeStruct(shape, entry.live.dtype, sharding=NamedSharding(self.mesh, way.spec))
        stored = arrays.read(directory, {entry.name: target})[entry.name]

        def merge(live: jax.Array, stored: jax.Array) -> jax.Array:
            return way.to_live(way.to_canonical(live).at[common].set(stored[common]))

        shards = shard_spec(entry.parameter)
        mapped = jax.shard_map(merge, mesh=self.mesh, in_specs=(shards, way.spec), out_specs=shards, check_vma=False)
        return jax.block_until_ready(jax.jit(mapped, donate_argnums=0)(live, stored))

    # --- rearranging

    def _direct(self, leaf: Placed) -> bool:
        """The live layout is the canonical one."""
        return leaf.padded == leaf.shape and (not leaf.stacked or self.layout.in_order)

    def batches(self, entries: Sequence[Entry]) -> Iterator[list[Entry]]:
        """The entries to be rearranged, in PARTS of the parameters; the same parts for their moments."""
        sizes = np.cumsum([math.prod(leaf.shape) for leaf in self.layout.flat])
        part = {leaf.name: PARTS * size // (sizes[-1] + 1) for leaf, size in zip(self.layout.flat, sizes, strict=True)}
        wanted = [e for e in entries if e.leaf is not None and not self._direct(e.leaf)]
        copy_and_part = lambda e: (e.name.removesuffix(e.parameter.name), part.get(e.parameter.name))  # noqa: E731
        for _, batch in itertools.groupby(wanted, copy_and_part):
            yield list(batch)

    def _placed(self, entry: Entry) -> jax.ShapeDtypeStruct:
        """The canonical array of an entry that is rearranged."""
        sharding = NamedSharding(self.mesh, rearrangement(self.layout, entry.parameter, self.mesh).spec)
        return jax.ShapeDtypeStruct(entry.shape, entry.live.dtype, sharding=sharding)

    def rearranged(self, way: str, batch: Sequence[Entry], arrays: list[jax.Array]) -> list[jax.Array]:
        """The arrays of a batch, each on its way to `canonical` or to `live`, on the devices."""
        on_device = [jax.device_put(x, NamedSharding(self.mesh, x.sharding.spec)) for x in arrays]  # type: ignore[attr-defined]
        return jax.block_until_ready(self._compiled_way(way, batch)(on_device))

    def _compiled_way(self, way: str, batch: Sequence[Entry]) -> jax.stages.Compiled:
        key = (way, *((e.parameter, e.live.dtype) for e in batch))
        if key not in self._compiled:
            ways = [rearrangement(self.layout, e.parameter, self.mesh) for e in batch]
            live, canonical = [shard_spec(e.parameter) for e in batch], [w.spec for w in ways]
            before, after = (live, canonical) if way == "canonical" else (canonical, live)

            def run(arrays: list[jax.Array]) -> list[jax.Array]:
                return [getattr(w, f"to_{way}")(x) for w, x in zip(ways, arrays, strict=True)]

            shapes = [e.live.shape if way == "canonical" else e.shape for e in batch]
            given = [
                jax.ShapeDtypeStruct(shape, e.live.dtype, sharding=NamedSharding(self.mesh, spec))
                for shape, e, spec in zip(shapes, batch, before, strict=True)
            ]
            mapped = jax.shard_map(run, mesh=self.mesh, in_specs=(before,), out_specs=after, check_vma=False)
            self._compiled[key] = jax.jit(mapped).lower(given).compile()
        return self._compiled[key]


def _to_host(x: jax.Array) -> jax.Array:
    copy = jax.block_until_ready(jax.device_put(x, x.sharding.with_memory_kind("pinned_host")))
    x.delete()
    return copy


def _name(path: tuple[Any, ...], taken: Collection[str]) -> str:
    """The names along a path, without places in tuples; numbered where two parts of an Optax chain have the same."""
    name = ".".join(str(getattr(p, "name", getattr(p, "key", ""))) for p in path if not hasattr(p, "idx"))
    return name if name not in taken else next(n for k in range(2, 99) if (n := f"{name}-{k}") not in taken)
