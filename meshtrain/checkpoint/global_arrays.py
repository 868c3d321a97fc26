"""A state as global arrays, which are independent of mesh, schedule and ZeRO stage, and back.

    live (one mesh)                          global (every checkpoint)
    params.blocks.attention.q.kernel         params.blocks.attention.q.kernel   all layers in order, no padding
    optimizer[1][0].mu.blocks...             optimizer.mu.blocks...             as its parameter; no place in a chain
    step, scale.value                        step, scale.value

Where replica groups step locally, an axis of groups stands in front, which is saved as it is (`checkpoint.resharding`).

A leaf whose live layout is the global one goes to disk and comes back as it lies. The others (stages that padding fills
up, chunks out of order, sizes that ZeRO pads) are rearranged (`checkpoint.rearrangement`): on their way to disk in host
memory, by the thread that writes, if one process has all of their blocks; else on the devices, part by part, so that
two full states never exist there.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from meshtrain.checkpoint import arrays, steps
from meshtrain.mesh import ISLAND, platform
from meshtrain.optim import mirrored_leaves
from meshtrain.parallel.layout import shard_spec
from meshtrain.parallel.placement import Placed
from meshtrain.step import Program, State

if TYPE_CHECKING:
    from meshtrain.checkpoint.rearrangement import Block, Rearrangement

Arrays = dict[str, jax.Array]
Tree = Any
Leaves = Mapping[str, Mapping[str, Any]]  # of a manifest
# The parameters are rearranged in so many parts: more cost less memory (bench_checkpoint.py) and more compiling.
PARTS = 3
# How the names of error-feedback residuals begin, and those of the state of replica groups.
REDUCE = "reduce."
ISLANDS = "islands."
GROUP_PARAMS = f"{ISLANDS}params."
COUNTED = f"{ISLANDS}counted"
# The names of arrays with an axis of replica groups in front begin with one of these.
GROUPED = (GROUP_PARAMS, COUNTED, "optimizer", "scale")


@dataclasses.dataclass(frozen=True)
class GlobalArray:
    """One array of a state: its name and global shape, and how it lies on the mesh."""

    name: str
    shape: tuple[int, ...]
    live: jax.ShapeDtypeStruct
    leaf: Placed | None  # the parameter that it is, or mirrors
    # Length of the axis of replica groups in front of it; 0: it has none
    islands: int = 0

    @property
    def parameter(self) -> Placed:
        """The leaf, of an array that has one."""
        assert self.leaf is not None
        return self.leaf

    @property
    def frozen(self) -> bool:
        """True if the array is the same after every step of a run."""
        return self.leaf is not None and not self.leaf.trained

    @property
    def record(self) -> dict[str, Any]:
        """Its record in a manifest."""
        record: dict[str, Any] = {
            "shape": list(self.shape),
            "dtype": str(self.live.dtype),
        }
        record |= {"islands": self.islands} if self.islands else {}
        return {**record, "frozen": True} if self.frozen else record

    def grouped(self, spec: PartitionSpec) -> PartitionSpec:
        """Returns a spec with the axis of replica groups in front, where the array has one."""
        return PartitionSpec(ISLAND, *spec) if self.islands else spec


class GlobalArrays:
    """Converts a program's states to global arrays and back; with `weights_alone` its parameters."""

    def __init__(self, program: Program, weights_alone: bool = False) -> None:
        self.program = program
        self.layout = program.layout
        self.mesh = program.mesh
        self.weights_alone = weights_alone
        self._compiled: dict[tuple[Any, ...], jax.stages.Compiled] = {}

    @cached_property
    def shapes(self) -> State:
        """The state's, each weight an array, as a checkpoint has it."""
        return self.program.state_shapes._replace(
            params=self.layout.map(self.layout.array)
        )

    @cached_property
    def entries(self) -> list[GlobalArray]:
        """The arrays of a state, or of its parameters, in `jax.tree` order."""
        shapes = self.shapes
        grouped: tuple[str, ...] = ()
        optimizer = shapes.optimizer
        if shapes.islands is not None:
            grouped = GROUPED
            optimizer = jax.tree.map(group_array, optimizer)
        # in the order of State: step, params, optimizer, scale, reduce, islands
        leaves = [None, *self.layout.flat, *mirrored_leaves(self.layout, optimizer)]
        leaves += [None] * len(jax.tree.leaves((shapes.scale, shapes.reduce)))
        trained = [leaf for leaf in self.layout.flat if leaf.trained]
        if shapes.islands is not None:
            leaves += trained * (
                len(jax.tree.leaves(shapes.islands._replace(counted=None)))
                // len(trained)
            ) + [None]
        entries: dict[str, GlobalArray] = {}
        flat, _ = jax.tree_util.tree_flatten_with_path(shapes)
        for (path, live), leaf in zip(flat, leaves, strict=True):
            name = _name(path, entries)
            islands = live.shape[0] if name.startswith(grouped) else 0
            shape = live.shape
            if leaf is not None:
                shape = (*live.shape[: islands > 0], *leaf.shape)
            entries[name] = GlobalArray(name, shape, live, leaf, islands)
        return [
            e
            for e in entries.values()
            if not self.weights_alone or e.name.startswith("params.")
        ]

    @property
    def records(self) -> dict[str, dict[str, Any]]:
        """The arrays' records in a manifest, by name."""
        return {e.name: e.record for e in self.entries}

    def compile(self) -> None:
        """Compiles what `prepare` needs, so that the first save takes no longer than the others."""
        if jax.process_count() > 1:
            for batch in self.batches(self.entries):
                self._compile("global", batch)

    # --- to disk

    def prepare(
        self, state: State | Tree, frozen: bool = True
    ) -> Callable[[], Arrays] | Arrays:
        """Returns the global arrays of a live state, with or without the frozen ones.

        If they take time to make, returns a function that makes them once, whatever becomes of the state.
        """
        entries = [e for e in self.entries if frozen or not e.frozen]
        if jax.process_count() > 1 or not any(self.batches(entries)):
            return self.arrays(state, frozen)
        blocks = _rearranging().host_blocks(self._name_arrays(state, entries))
        return lambda: {e.name: self.assembled(e, blocks.pop(e.name)) for e in entries}

    def assembled(self, entry: GlobalArray, blocks: "Sequence[Block]") -> jax.Array:
        """Returns the global array of live blocks, in host memory."""
        memory = None if platform(self.mesh) == "cpu" else "pinned_host"
        along = int(entry.islands > 0 and len(entry.shape) > 1)
        leaf = entry.leaf
        if leaf is not None and leaf.stacked:
            places = self.layout.stack(leaf).places
        else:
            places = np.arange(*entry.shape[along : along + 1] or [0])
        to = NamedSharding(
            self.mesh, self.stored(entry).sharding.spec, memory_kind=memory
        )
        return _rearranging().assembled(blocks, entry.shape, places, to, along)

    def arrays(self, state: State | Tree, frozen: bool = True) -> Arrays:
        """Returns the global arrays of a live state; rearranged ones are copies, in host memory if there is an
        accelerator.
        """
        entries = [e for e in self.entries if frozen or not e.frozen]
        arrays = self._name_arrays(state, entries)
        for batch in self.batches(entries):
            copies = self.rearranged("global", batch, [arrays[e.name] for e in batch])
            for entry, copy in zip(batch, copies, strict=True):
                arrays[entry.name] = (
                    copy if platform(self.mesh) == "cpu" else _move_to_host(copy)
                )
        return arrays

    def _name_arrays(
        self, state: State | Tree, entries: Sequence[GlobalArray]
    ) -> Arrays:
        structure: Any = jax.tree.structure(
            self.shapes.params if self.weights_alone else self.shapes
        )
        stored = dict(
            zip(
                (e.name for e in self.entries),
                structure.flatten_up_to(state),
                strict=True,
            )
        )
        for entry in (e for e in entries if e.frozen):
            x = self.layout.unstored(entry.parameter, stored[entry.name])
            stored[entry.name] = jax.device_put(x, entry.live.sharding)
        return {e.name: stored[e.name] for e in entries}

    # --- from disk: of a step, with its manifest's leaves

    def state(
        self,
        directory: Path,
        leaves: Leaves,
        restored: Mapping[str, jax.Array] = MappingProxyType({}),
    ) -> State:
        """Returns the state on disk, on the program's shardings, but for what is `restored` already.

        A loss scale that is not there is reinitialized.
        """
        present = [
            e for e in self.entries if e.name in leaves and e.name not in restored
        ]
        live = {**restored, **self.read(directory, leaves, present)}
        if self.program.state_shapes.scale is not None and "scale.value" not in leaves:
            names = [e.name for e in self.entries if e.name.startswith("scale.")]
            live |= zip(names, jax.tree.leaves(self.program.init_scale()), strict=True)
        return jax.tree.unflatten(
            jax.tree.structure(self.shapes), [live[e.name] for e in self.entries]
        )

    def read(
        self, directory: Path, leaves: Leaves, entries: Sequence[GlobalArray]
    ) -> Arrays:
        """Returns what a state has, by name.

        The manifest says which folder it is in: what is frozen there may be trained here.
        """
        live_arrays: Arrays = {}
        for place in steps.PLACES:
            here = [e for e in entries if steps.place(leaves[e.name]) == place]
            as_stored = [e for e in here if self.is_global(e)]
            live_arrays |= arrays.read(
                directory / place, {e.name: e.live for e in as_stored if not e.frozen}
            )
            # frozen ones one by one, since there is room for them as the state has them
            for entry in (e for e in as_stored if e.frozen):
                x = arrays.read(directory / place, {entry.name: entry.live})[entry.name]
                live_arrays[entry.name] = self.layout.stored(entry.parameter, x)
            for batch in self.batches(here):
                stored = arrays.read(
                    directory / place, {e.name: self.stored(e) for e in batch}
                )
                live = self.rearranged(
                    "live", batch, [stored.pop(e.name) for e in batch]
                )
                # offloaded ones go to the host
                placed = [
                    jax.device_put(x, e.live.sharding)
                    for x, e in zip(live, batch, strict=True)
                ]
                of_state = [
                    self.layout.stored(e.parameter, x)
                    for x, e in zip(placed, batch, strict=True)
                ]
                live_arrays |= zip(
                    (e.name for e in batch),
                    jax.block_until_ready(of_state),
                    strict=True,
                )
        return live_arrays

    def resized(
        self,
        directory: Path,
        leaves: Leaves,
        entry: GlobalArray,
        live: jax.Array,
    ) -> jax.Array:
        """Returns a live array with the part of it that the checkpoint has, whose leaf has another shape; reuses
        `live`'s memory.
        """
        shape = tuple(leaves[entry.name]["shape"])
        resized = [
            d for d, (n, m) in enumerate(zip(entry.shape, shape, strict=True)) if n != m
        ]
        common = tuple(
            slice(min(n, m)) if n != m else slice(None)
            for n, m in zip(entry.shape, shape, strict=True)
        )
        way = self._rearrangement(entry, resized)
        target = jax.ShapeDtypeStruct(
            shape, entry.live.dtype, sharding=NamedSharding(self.mesh, way.spec)
        )
        stored = arrays.read(
            directory / steps.place(leaves[entry.name]), {entry.name: target}
        )[entry.name]

        def merge(live: jax.Array, stored: jax.Array) -> jax.Array:
            return way.make_live(way.make_global(live).at[common].set(stored[common]))

        shards = shard_spec(entry.parameter)
        mapped = jax.shard_map(
            merge,
            mesh=self.mesh,
            in_specs=(shards, way.spec),
            out_specs=shards,
            check_vma=False,
        )
        return jax.block_until_ready(jax.jit(mapped, donate_argnums=0)(live, stored))

    # --- rearranging on the devices

    def stored(self, entry: GlobalArray) -> jax.ShapeDtypeStruct:
        """Returns the array on disk, on the mesh."""
        if self.is_global(entry):
            return entry.live
        spec = entry.grouped(self._rearrangement(entry).spec)
        return jax.ShapeDtypeStruct(
            entry.shape, entry.live.dtype, sharding=NamedSharding(self.mesh, spec)
        )

    def is_global(self, entry: GlobalArray) -> bool:
        """Returns whether the live layout is the global one."""
        leaf = entry.leaf
        return leaf is None or (
            leaf.padded == leaf.shape
            and (not leaf.stacked or self.layout.stack(leaf).in_order)
        )

    def batches(self, entries: Sequence[GlobalArray]) -> Iterator[list[GlobalArray]]:
        """Yields the arrays to be rearranged, in PARTS of the parameters; the same parts for their moments.

        Frozen ones are apart.
        """
        sizes = np.cumsum([math.prod(leaf.shape) for leaf in self.layout.flat])
        part = {
            leaf.name: PARTS * size // (sizes[-1] + 1)
            for leaf, size in zip(self.layout.flat, sizes, strict=True)
        }
        batch_of = lambda e: (
            e.frozen,
            e.name.removesuffix(e.parameter.name),
            part.get(e.parameter.name),
        )
        changing = sorted(
            (e for e in entries if not self.is_global(e)), key=lambda e: e.frozen
        )
        for _, batch in itertools.groupby(changing, batch_of):
            yield list(batch)

    def _rearrangement(
        self, entry: GlobalArray, resized: Sequence[int] = ()
    ) -> "Rearrangement":
        return _rearranging().rearrangement(
            self.layout, entry.parameter, self.mesh, resized
        )

    def rearranged(
        self, to: str, batch: Sequence[GlobalArray], arrays: list[jax.Array]
    ) -> list[jax.Array]:
        """Returns the arrays of a batch, converted `to` "global" or "live" on the devices."""
        specs = [x.sharding.spec for x in arrays]  # type: ignore[attr-defined]
        shardings = [NamedSharding(self.mesh, spec) for spec in specs]
        on_device = jax.device_put(arrays, shardings)
        return jax.block_until_ready(self._compile(to, batch)(on_device))

    def _compile(self, to: str, batch: Sequence[GlobalArray]) -> jax.stages.Compiled:
        key = (to, *((e.parameter, e.live.dtype, e.islands) for e in batch))
        if key not in self._compiled:
            ways = [self._rearrangement(e) for e in batch]
            live = [e.grouped(shard_spec(e.parameter)) for e in batch]
            stored = [e.grouped(way.spec) for e, way in zip(batch, ways, strict=True)]
            before, after = (live, stored) if to == "global" else (stored, live)

            def run(arrays: list[jax.Array]) -> list[jax.Array]:
                converters = [getattr(way, f"make_{to}") for way in ways]
                # a device has one replica group's part
                return [
                    convert(x[0])[None] if e.islands else convert(x)
                    for convert, e, x in zip(converters, batch, arrays, strict=True)
                ]

            shapes = [e.live.shape if to == "global" else e.shape for e in batch]
            inputs = []
            for shape, e, spec in zip(shapes, batch, before, strict=True):
                sharding = NamedSharding(self.mesh, spec)
                struct = jax.ShapeDtypeStruct(shape, e.live.dtype, sharding=sharding)
                inputs.append(struct)
            mapped = jax.shard_map(
                run,
                mesh=self.mesh,
                in_specs=(before,),
                out_specs=after,
                check_vma=False,
            )
            self._compiled[key] = jax.jit(mapped).lower(inputs).compile()
        return self._compiled[key]


def _rearranging() -> ModuleType:
    """Returns `checkpoint.rearrangement`, which only layouts with arrays to rearrange need."""
    from meshtrain.checkpoint import rearrangement

    return rearrangement


def group_array(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Returns the array of one replica group, from the array with an axis of groups in front."""
    assert isinstance(x.sharding, NamedSharding)
    sharding = NamedSharding(
        x.sharding.mesh,
        PartitionSpec(*x.sharding.spec[1:]),
        memory_kind=x.sharding.memory_kind,
    )
    return jax.ShapeDtypeStruct(x.shape[1:], x.dtype, sharding=sharding)


def _move_to_host(x: jax.Array) -> jax.Array:
    copy = jax.block_until_ready(
        jax.device_put(x, x.sharding.with_memory_kind("pinned_host"))
    )
    x.delete()
    return copy


def _name(path: tuple[Any, ...], taken: Collection[str]) -> str:
    """Returns the names along a path, without places in tuples; numbered where two parts of an Optax chain have the
    same.
    """
    name = ".".join(
        str(getattr(p, "name", getattr(p, "key", "")))
        for p in path
        if not hasattr(p, "idx")
    )
    if name not in taken:
        return name
    return next(n for k in range(2, 99) if (n := f"{name}-{k}") not in taken)
