"""A state as named arrays in which no mesh, schedule or ZeRO stage has left a trace, and back.

    live (one mesh)                          canonical (every checkpoint)
    params.blocks.attention.q.kernel         params.blocks.attention.q.kernel   all layers in order, no padding
    optimizer[1][0].mu.blocks...             optimizer.mu.blocks...             as its parameter; no place in a chain
    step, scale.value                        step, scale.value

Where islands step by themselves an axis of islands stands in front, which is saved as it is (`checkpoint.moved`).

A leaf whose live layout is the canonical one goes to disk and comes back as it lies. The others (stages that padding fills up,
chunks out of order, sizes that ZeRO pads) are rearranged: on their way to disk in host memory, by the thread that writes, if one
process has them whole; else on the devices, part by part, so that two whole states never exist there.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from meshtrain.checkpoint import arrays, assembling, moved, steps
from meshtrain.checkpoint.rearrange import rearrangement
from meshtrain.mesh import ISLAND, platform
from meshtrain.optim import mirrored_leaves
from meshtrain.parallel.layout import shard_spec
from meshtrain.parallel.placement import Placed
from meshtrain.precision import initial_scale
from meshtrain.step import Program, State

Tree = Any
Leaves = Mapping[str, Mapping[str, Any]]  # of a manifest
# The parameters are rearranged in so many parts: more cost less memory (bench_checkpoint.py) and more compiling.
PARTS = 3


@dataclasses.dataclass(frozen=True)
class Entry:
    """One array of a state: its canonical name and shape, and how it lies on the mesh."""

    name: str
    shape: tuple[int, ...]
    live: jax.ShapeDtypeStruct
    leaf: Placed | None  # the parameter that it is, or mirrors
    islands: int = 0  # length of the axis of islands in front of it; 0: it has none

    @property
    def parameter(self) -> Placed:
        """The leaf, for an entry that has one."""
        assert self.leaf is not None
        return self.leaf

    @property
    def frozen(self) -> bool:
        """It is the same after every step of a run."""
        return self.leaf is not None and not self.leaf.trained

    @property
    def record(self) -> dict[str, Any]:
        """What a manifest says of it."""
        shown: dict[str, Any] = {"shape": list(self.shape), "dtype": str(self.live.dtype)}
        shown |= {"islands": self.islands} if self.islands else {}
        return {**shown, "frozen": True} if self.frozen else shown


class Canonical:
    """The way between a program's states and canonical arrays; with `weights_alone` between its parameters and those."""

    def __init__(self, program: Program, weights_alone: bool = False) -> None:
        self.program, self.layout, self.mesh = program, program.layout, program.mesh
        self.weights_alone = weights_alone
        self._compiled: dict[tuple[Any, ...], jax.stages.Compiled] = {}

    @cached_property
    def entries(self) -> list[Entry]:
        """The arrays of a state, or of its parameters, in `jax.tree` order."""
        shapes = self.program.state_shapes
        of_each = moved.of_each_island(self.program)
        one = jax.tree.map(moved.of_one, shapes.optimizer) if of_each else shapes.optimizer
        # in the order of State: step, params, optimizer, scale, reduce, islands
        leaves = [None, *self.layout.flat, *mirrored_leaves(self.layout, one)]
        leaves += [None] * len(jax.tree.leaves((shapes.scale, shapes.reduce)))
        trained = [leaf for leaf in self.layout.flat if leaf.trained]
        leaves += trained * (len(jax.tree.leaves(shapes.islands)) // max(len(trained), 1))
        found: dict[str, Entry] = {}
        flat, _ = jax.tree_util.tree_flatten_with_path(shapes)
        for (path, live), leaf in zip(flat, leaves, strict=True):
            name = _name(path, found)
            islands = live.shape[0] if name.startswith(of_each) else 0
            shape = live.shape if leaf is None else (*live.shape[: islands > 0], *leaf.shape)
            found[name] = Entry(name, shape, live, leaf, islands)
        return [e for e in found.values() if not self.weights_alone or e.name.startswith("params.")]

    def compile(self) -> None:
        """Compiles what `to_write` needs, so that the first save takes no longer than the others."""
        if jax.process_count() > 1:
            for batch in self.batches(self.entries):
                self._compiled_way("canonical", batch)

    # --- to disk

    def to_write(
        self, state: State | Tree, frozen: bool = True
    ) -> Callable[[], dict[str, jax.Array]] | dict[str, jax.Array]:
        """Canonical arrays of a live state, with or without what is frozen; if they take time to make, a function that makes them once,
        whatever becomes of the state.
        """
        entries = [e for e in self.entries if frozen or not e.frozen]
        if jax.process_count() > 1 or not any(self.batches(entries)):
            return self.arrays(state, frozen)
        live = self._by_name(state)
        blocks = dict(zip((e.name for e in entries), assembling.held([live[e.name] for e in entries]), strict=True))
        return lambda: {e.name: self.assembled(e, blocks.pop(e.name)) for e in entries}

    def assembled(self, entry: Entry, blocks: Sequence[assembling.Block]) -> jax.Array:
        """The canonical array of live blocks, in host memory."""
        live, leaf = entry.live.sharding, entry.leaf
        spec = live.spec if leaf is None or self._direct(leaf) else self._placed(entry).sharding.spec
        memory = None if platform(self.mesh) == "cpu" else "pinned_host"
        along = int(entry.islands > 0 and len(entry.shape) > 1)
        here = entry.shape[along : along + 1]
        places = self.layout.places if leaf is not None and leaf.stacked else np.arange(*here or [0])
        to = NamedSharding(self.mesh, spec, memory_kind=memory)
        return assembling.assembled(blocks, entry.shape, places, to, along)

    def arrays(self, state: State | Tree, frozen: bool = True) -> dict[str, jax.Array]:
        """Canonical arrays of a live state; those that had to be rearranged are copies, in host memory if there is an accelerator."""
        entries, live = [e for e in self.entries if frozen or not e.frozen], self._by_name(state)
        found = {e.name: live[e.name] for e in entries}
        for batch in self.batches(entries):
            copies = self.rearranged("canonical", batch, [found[e.name] for e in batch])
            for entry, copy in zip(batch, copies, strict=True):
                found[entry.name] = copy if platform(self.mesh) == "cpu" else _to_host(copy)
        return found

    def _by_name(self, state: State | Tree) -> dict[str, jax.Array]:
        return dict(zip((e.name for e in self.entries), jax.tree.leaves(state), strict=True))

    # --- from disk: of a step, with its manifest's leaves

    def state(self, directory: Path, leaves: Leaves, found: Mapping[str, jax.Array] = MappingProxyType({})) -> State:
        """The state on disk, on the program's shardings, but for what is `found` already. A loss scale that is not there starts anew;
        what other islands kept becomes the mean of theirs.
        """
        there = [e for e in self.entries if e.name in leaves and e.name not in found]
        other = [e for e in there if leaves[e.name].get("islands", 0) != e.islands]
        found = {**found, **self.read(directory, leaves, [e for e in there if e not in other])}
        for entry in other:
            found[entry.name] = moved.from_mean(self, directory, leaves[entry.name], entry)
        if self.program.state_shapes.scale is not None and "scale.value" not in leaves:
            fresh = initial_scale(self.program.config.precision)
            names = [e for e in self.entries if e.name.startswith("scale.")]
            found |= {e.name: moved.placed(x, e) for e, x in zip(names, jax.tree.leaves(fresh), strict=True)}
        found |= moved.begun(self.entries, found)
        return jax.tree.unflatten(jax.tree.structure(self.program.state_shapes), [found[e.name] for e in self.entries])

    def read(self, directory: Path, leaves: Leaves, entries: Sequence[Entry]) -> dict[str, jax.Array]:
        """Live arrays by name. Where each lies is the step's matter: what is frozen in it may be trained by this program."""
        found: dict[str, jax.Array] = {}
        for place in steps.PLACES:
            there = [e for e in entries if steps.place(leaves[e.name]) == place]
            found |= self._read(directory / place, there)
        return found

    def _read(self, directory: Path, entries: Sequence[Entry]) -> dict[str, jax.Array]:
        as_stored = [e for e in entries if e.leaf is None or self._direct(e.leaf)]
        found = arrays.read(directory, {e.name: e.live for e in as_stored})
        for batch in self.batches(entries):
            read = arrays.read(directory, {e.name: self._placed(e) for e in batch})
            live = self.rearranged("live", batch, [read.pop(e.name) for e in batch])
            # what is offloaded goes to the host
            placed = [jax.device_put(x, e.live.sharding) for x, e in zip(live, batch, strict=True)]
            found |= zip((e.name for e in batch), jax.block_until_ready(placed), strict=True)
        return found

    def into(self, directory: Path, leaves: Leaves, entry: Entry, live: jax.Array) -> jax.Array:
        """A live array with what the checkpoint, where the leaf has another shape, has of it; `live`'s memory is reused."""
        shape = tuple(leaves[entry.name]["shape"])
        resized = [d for d, (n, m) in enumerate(zip(entry.shape, shape, strict=True)) if n != m]
        common = tuple(
            slice(min(n, m)) if d in resized else slice(None)
            for d, (n, m) in enumerate(zip(entry.shape, shape, strict=True))
        )
        way = rearrangement(self.layout, entry.parameter, self.mesh, resized)
        target = jax.ShapeDtypeStruct(shape, entry.live.dtype, sharding=NamedSharding(self.mesh, way.spec))
        stored = arrays.read(directory / steps.place(leaves[entry.name]), {entry.name: target})[entry.name]

        def merge(live: jax.Array, stored: jax.Array) -> jax.Array:
            return way.to_live(way.to_canonical(live).at[common].set(stored[common]))

        shards = shard_spec(entry.parameter)
        mapped = jax.shard_map(merge, mesh=self.mesh, in_specs=(shards, way.spec), out_specs=shards, check_vma=False)
        return jax.block_until_ready(jax.jit(mapped, donate_argnums=0)(live, stored))

    # --- rearranging

    def stored(self, entry: Entry) -> jax.ShapeDtypeStruct:
        """The array on disk."""
        return entry.live if entry.leaf is None or self._direct(entry.leaf) else self._placed(entry)

    def as_live(self, entry: Entry, stored: jax.Array) -> jax.Array:
        if entry.leaf is None or self._direct(entry.leaf):
            return stored
        return self.rearranged("live", [entry], [stored])[0]

    def _direct(self, leaf: Placed) -> bool:
        """The live layout is the canonical one."""
        return leaf.padded == leaf.shape and (not leaf.stacked or self.layout.in_order)

    def batches(self, entries: Sequence[Entry]) -> Iterator[list[Entry]]:
        """The entries to be rearranged, in PARTS of the parameters; the same parts for their moments. What is frozen is apart."""
        sizes = np.cumsum([math.prod(leaf.shape) for leaf in self.layout.flat])
        part = {leaf.name: PARTS * size // (sizes[-1] + 1) for leaf, size in zip(self.layout.flat, sizes, strict=True)}
        wanted = [e for e in entries if e.leaf is not None and not self._direct(e.leaf)]
        of_a_batch = lambda e: (e.frozen, e.name.removesuffix(e.parameter.name), part.get(e.parameter.name))  # noqa: E731
        for _, batch in itertools.groupby(sorted(wanted, key=lambda e: e.frozen), of_a_batch):
            yield list(batch)

    def _placed(self, entry: Entry) -> jax.ShapeDtypeStruct:
        """The canonical array of an entry that is rearranged."""
        spec = _of_islands(entry, rearrangement(self.layout, entry.parameter, self.mesh).spec)
        return jax.ShapeDtypeStruct(entry.shape, entry.live.dtype, sharding=NamedSharding(self.mesh, spec))

    def rearranged(self, way: str, batch: Sequence[Entry], arrays: list[jax.Array]) -> list[jax.Array]:
        """The arrays of a batch, each on its way to `canonical` or to `live`, on the devices."""
        on_device = [jax.device_put(x, NamedSharding(self.mesh, x.sharding.spec)) for x in arrays]  # type: ignore[attr-defined]
        return jax.block_until_ready(self._compiled_way(way, batch)(on_device))

    def _compiled_way(self, way: str, batch: Sequence[Entry]) -> jax.stages.Compiled:
        key = (way, *((e.parameter, e.live.dtype, e.islands) for e in batch))
        if key not in self._compiled:
            ways = [rearrangement(self.layout, e.parameter, self.mesh) for e in batch]
            live = [_of_islands(e, shard_spec(e.parameter)) for e in batch]
            canonical = [_of_islands(e, w.spec) for e, w in zip(batch, ways, strict=True)]
            before, after = (live, canonical) if way == "canonical" else (canonical, live)

            def run(arrays: list[jax.Array]) -> list[jax.Array]:
                moves = [getattr(w, f"to_{way}") for w in ways]
                # a device has one island's part
                return [
                    move(x[0])[None] if e.islands else move(x) for move, e, x in zip(moves, batch, arrays, strict=True)
                ]

            shapes = [e.live.shape if way == "canonical" else e.shape for e in batch]
            given = [
                jax.ShapeDtypeStruct(shape, e.live.dtype, sharding=NamedSharding(self.mesh, spec))
                for shape, e, spec in zip(shapes, batch, before, strict=True)
            ]
            mapped = jax.shard_map(run, mesh=self.mesh, in_specs=(before,), out_specs=after, check_vma=False)
            self._compiled[key] = jax.jit(mapped).lower(given).compile()
        return self._compiled[key]


def _of_islands(entry: Entry, spec: PartitionSpec) -> PartitionSpec:
    return PartitionSpec(ISLAND, *spec) if entry.islands else spec


def _to_host(x: jax.Array) -> jax.Array:
    copy = jax.block_until_ready(jax.device_put(x, x.sharding.with_memory_kind("pinned_host")))
    x.delete()
    return copy


def _name(path: tuple[Any, ...], taken: Collection[str]) -> str:
    """The names along a path, without places in tuples; numbered where two parts of an Optax chain have the same."""
    name = ".".join(str(getattr(p, "name", getattr(p, "key", ""))) for p in path if not hasattr(p, "idx"))
    return name if name not in taken else next(n for k in range(2, 99) if (n := f"{name}-{k}") not in taken)
