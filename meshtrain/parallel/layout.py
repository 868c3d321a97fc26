"""How each canonical leaf lies on a mesh: split over tensor and pipeline, padded where sizes don't divide, ZeRO over data.

The canonical layout (what is saved, and what every mesh can be restored to) has all layers stacked in order. The live one has
the layers of one stage side by side, each virtual stage padded to the longest:

    canonical   0 1 2 3 4            5 layers
    live        0 1 2 │ 3 4 ·        2 stages; · is padding, skipped by the stage and zero for ever
    live, 2 chunks per stage         0 1 3 · │ 2 · 4 ·   virtual stage k lies on stage k mod S, or as the schedule's table says
"""

import dataclasses
import math
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from meshtrain.config import Config
from meshtrain.mesh import DATA, rules
from meshtrain.model.decoder import Decoder
from meshtrain.schedule.closed_form import bubble, makespan
from meshtrain.schedule.generators import SCHEDULES, make_table
from meshtrain.schedule.simulate import Durations, simulate
from meshtrain.schedule.table import Table

Tree = Any


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One parameter: its named axes, its canonical and live shapes, and the mesh axes of each dimension."""

    name: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]  # canonical
    whole: tuple[int, ...]  # live, over all devices, as the model uses it
    padded: tuple[int, ...]  # live, as it is held: longer along zero_dim where data does not divide it
    split: tuple[tuple[str, ...], ...]  # per dimension, over tensor and pipeline
    zero_dim: int | None  # the dimension that ZeRO splits further, over data; None: not sharded over data

    @property
    def stacked(self) -> bool:
        """Whether the first axis counts layers."""
        return self.axes[0] == "layers"

    @property
    def whole_spec(self) -> PartitionSpec:
        """Placement of the weight as the model uses it, the same on every data rank."""
        return PartitionSpec(*(axes or None for axes in self.split))

    @property
    def shard_spec(self) -> PartitionSpec:
        """Placement of masters, optimizer state and reduced gradients."""
        split = [(*axes, DATA) if d == self.zero_dim else axes for d, axes in enumerate(self.split)]
        return PartitionSpec(*(axes or None for axes in split))

    @property
    def replicated(self) -> tuple[str, ...]:
        """Model-parallel axes over which the weight is whole, so that partial gradients are summed over them."""
        used = {a for axes in self.split for a in axes}
        return tuple(a for a in ("tensor", "pipeline") if a not in used)

    @property
    def decayed(self) -> bool:
        """Weight decay applies: matrices, not norms or biases."""
        return not self.name.endswith(("scale", "bias"))


class Layout:
    """The leaves of a model on a mesh shape, and the way between canonical and live trees."""

    def __init__(self, config: Config, mesh: Mesh | AbstractMesh) -> None:
        self.config, self.mesh = config, mesh
        self.data = config.mesh.data
        self.stages, self.chunks = (
            config.mesh.pipeline,
            config.parallel.virtual_stages if config.mesh.pipeline > 1 else 1,
        )
        self.abstract = nnx.eval_shape(lambda: Decoder(config.model, nnx.Rngs(0)))
        self.leaves: Tree = self._leaves()

    @cached_property
    def table(self) -> Table | None:
        """The pipeline's schedule, which also places the virtual stages; None on one stage. ConfigError for one that cannot run."""
        if self.stages == 1:
            return None
        parallel = self.config.parallel
        return make_table(parallel.schedule, self.stages, parallel.microbatches, self.chunks)

    @cached_property
    def split(self) -> tuple[int, ...]:
        """Layers of each virtual stage in model order: as asked for, else as even as can be, longer ones first."""
        slots, layers = self.stages * self.chunks, self.config.model.layers
        if self.config.parallel.layer_split is not None and self.stages > 1:
            return self.config.parallel.layer_split
        return tuple(layers // slots + (k < layers % slots) for k in range(slots))

    @cached_property
    def slots(self) -> np.ndarray:
        """The canonical layer in each live place, -1 for padding: int [stages, chunks, layers of the longest virtual stage]."""
        longest, first = max(self.split), np.concatenate([[0], np.cumsum(self.split)])
        slots = np.full((self.stages, self.chunks, longest), -1)
        for stage in range(self.stages):
            for chunk in range(self.chunks):
                k = self.table.virtual(stage, chunk) if self.table else 0
                slots[stage, chunk, : self.split[k]] = np.arange(first[k], first[k + 1])
        return slots

    @cached_property
    def places(self) -> np.ndarray:
        """The live place of each canonical layer."""
        slots = self.slots.reshape(-1)
        return np.argsort(np.where(slots < 0, slots.size, slots))[: self.config.model.layers]

    @cached_property
    def even(self) -> bool:
        """No stage has padding."""
        return bool((self.slots >= 0).all())

    def _leaves(self) -> Tree:
        def leaf(path: tuple, variable: nnx.Variable) -> Leaf:
            name = ".".join(str(getattr(p, "key", p)) for p in path)
            stacked = name.startswith("blocks.")
            axes = (("layers",) if stacked else ()) + tuple(variable.get_metadata()["axes"])
            return self._place(name, axes, tuple(variable.shape))

        state = nnx.state(self.abstract)
        flat, _ = jax.tree_util.tree_flatten_with_path(state, is_leaf=lambda v: isinstance(v, nnx.Variable))
        placed = [leaf(path, variable) for path, variable in flat]
        return jax.tree.unflatten(jax.tree.structure(nnx.to_pure_dict(state)), placed)

    def _place(self, name: str, axes: tuple[str, ...], shape: tuple[int, ...]) -> Leaf:
        table = rules(self.config)
        split = tuple(table.get(axis, ()) for axis in axes)
        ways = [math.prod(self.mesh.shape[a] for a in over) for over in split]
        whole = [
            self.slots.size if axis == "layers" else _up(n, w) for axis, n, w in zip(axes, shape, ways, strict=True)
        ]
        padded, zero_dim = list(whole), None
        if self.config.parallel.zero_stage and self.data > 1:
            local = {d: whole[d] // ways[d] for d in range(len(shape)) if axes[d] != "layers"}
            exact = [d for d in local if local[d] % self.data == 0]
            free = [d for d in local if ways[d] == 1]  # padding inside a tensor rank's share would tear it apart
            if exact:
                zero_dim = max(exact, key=lambda d: local[d])
            elif free:
                zero_dim = min(free, key=lambda d: _up(local[d], self.data) / local[d])
                padded[zero_dim] = _up(local[zero_dim], self.data)
        return Leaf(name, axes, shape, tuple(whole), tuple(padded), split, zero_dim)

    def notes(self) -> list[str]:
        """What leaves stages idle, what ZeRO pads or cannot shard, and what it costs, a sentence each."""
        found = []
        m, p = self.config.parallel.microbatches, self.stages
        if self.table is not None and m < p:
            found.append(
                f"parallel.microbatches {m} is fewer than mesh.pipeline {p}: every stage idles {self._idle(m)} of the step; "
                + (f"{4 * p} would bring that to {self._idle(4 * p)}." if self.named else "more would shorten that.")
            )
        for leaf in jax.tree.leaves(self.leaves, is_leaf=lambda x: isinstance(x, Leaf)):
            held, used = math.prod(leaf.padded), math.prod(leaf.whole)
            if held > used:
                found.append(
                    f"{leaf.name} {leaf.shape} is padded to {leaf.padded} so that data {self.data} divides it: "
                    f"{held / used - 1:.1%} more."
                )
            if leaf.zero_dim is None and self.config.parallel.zero_stage and self.data > 1:
                found.append(
                    f"{leaf.name} {leaf.shape} cannot be sharded over data {self.data}: "
                    f"{4 * used:,} bytes stay on every data rank, for the master and for each optimizer moment."
                )
        return found

    @property
    def named(self) -> bool:
        """The schedule has a name, and so a table for every number of microbatches; a file has one."""
        return self.config.parallel.schedule in SCHEDULES

    def _idle(self, microbatches: int) -> str:
        """The share of a step in which a stage has nothing to do, stages being equally long."""
        if self.named:
            at = (self.config.parallel.schedule, self.stages, microbatches, self.chunks, Durations())
            return f"{bubble(*at) / makespan(*at):.0%}"
        assert self.table is not None and microbatches == self.table.microbatches
        return f"{simulate(self.table, Durations()).bubble_fraction:.0%}"

    # --- trees of leaves

    def map(self, function: Any, *trees: Tree) -> Tree:
        """`function(leaf, *values)` over the parameters."""
        return jax.tree.map(function, self.leaves, *trees, is_leaf=lambda x: isinstance(x, Leaf))

    @cached_property
    def parameters(self) -> int:
        """Parameters of the model, without padding."""
        return sum(
            math.prod(leaf.shape) for leaf in jax.tree.leaves(self.leaves, is_leaf=lambda x: isinstance(x, Leaf))
        )

    @cached_property
    def whole(self) -> Tree:
        """PartitionSpecs of whole weights."""
        return self.map(lambda leaf: leaf.whole_spec)

    @cached_property
    def shards(self) -> Tree:
        """PartitionSpecs of masters, optimizer state and gradients."""
        return self.map(lambda leaf: leaf.shard_spec)

    @cached_property
    def masters(self) -> Tree:
        """ShapeDtypeStructs of the live float32 masters."""
        return self.map(
            lambda leaf: jax.ShapeDtypeStruct(
                leaf.padded, jnp.float32, sharding=NamedSharding(self.mesh, leaf.shard_spec)
            )
        )

    def init(self, key: jax.Array) -> Tree:
        """Live masters, equal on every mesh; call it under jit with `masters`' shardings as output."""
        return self.live(nnx.to_pure_dict(nnx.state(Decoder(self.config.model, nnx.Rngs(params=key)))))

    def live(self, canonical: Tree) -> Tree:
        """Canonical to live: layers to their places, zeros in the padding."""
        return self.map(lambda leaf, x: self.live_leaf(leaf, x), canonical)

    def canonical(self, live: Tree) -> Tree:
        """Live to canonical: padding off, layers in order."""
        return self.map(lambda leaf, x: self.canonical_leaf(leaf, x), live)

    def live_leaf(self, leaf: Leaf, x: jax.Array) -> jax.Array:
        if leaf.stacked and not self.in_order:
            places = self.slots.reshape(-1)
            kept = jnp.asarray(places >= 0).reshape((-1,) + (1,) * (x.ndim - 1))
            x = jnp.where(kept, x[jnp.asarray(np.maximum(places, 0))], 0)
        return jnp.pad(x, [(0, to - n) for n, to in zip(x.shape, leaf.padded, strict=True)])

    def canonical_leaf(self, leaf: Leaf, x: jax.Array) -> jax.Array:
        if leaf.stacked and not self.in_order:
            x = x[jnp.asarray(self.places[: leaf.shape[0]])]
        return x[tuple(slice(n) for n in leaf.shape)]

    @cached_property
    def in_order(self) -> bool:
        """The live order of the layers is the canonical one."""
        return bool(np.array_equal(self.slots.reshape(-1), np.arange(self.config.model.layers)))


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
