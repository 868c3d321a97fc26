"""The arrays of a model on a mesh, as `placement` has them, and the way between their canonical and their live layout.

The canonical layout (what is saved, and what every mesh can be restored to) has all layers stacked in order. The live
one has the layers of one stage side by side, each virtual stage padded to the longest:

    canonical   0 1 2 3 4            5 layers
    live        0 1 2 │ 3 4 ·        2 stages; · is padding, skipped by the stage and zero for ever
    live, 2 chunks per stage         0 1 3 · │ 2 · 4 ·   virtual stage k lies on stage k mod S, or where the schedule's
                                                         table says

Where layers are of several kinds, each kind's weights lie so in a stack of their own (`StackLayers`). If a stage has
fewer layers of a kind than its chunks have slots for, its layers alone have places, in the order of the slots.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from meshtrain.config import Config
from meshtrain.config.follow import has_rings, runs_table
from meshtrain.config.stacks import layers_of_stacks
from meshtrain.model.decoder import Decoder
from meshtrain.model.weights import parameters
from meshtrain.parallel.placement import (
    Placed,
    all_placed,
    slots_of_stages,
    stages,
    table,
)
from meshtrain.parallel.reduce.reduction import gather
from meshtrain.registry import Shown
from meshtrain.schedule.table import Table

Tree = Any


class Storage:
    """How a state holds weights: as arrays, in the dtype that trains or computes."""

    def notes(self) -> list[str]:
        """Returns sentences on what the storage costs, or does not do though it is asked for."""
        return []

    def rounds(self, weight: Placed) -> bool:
        """Returns whether a state has a weight in float8."""
        return False

    def shapes(self, weight: Placed, array: jax.ShapeDtypeStruct) -> Any:
        """Returns the ShapeDtypeStructs of a live weight in a state, with shardings."""
        return array

    def store(self, weight: Placed, x: jax.Array, array: jax.ShapeDtypeStruct) -> Any:
        """Returns a live weight, its layers stacked, as a state has it."""
        return x

    def load(self, weight: Placed, stored: Any, dtype: jnp.dtype) -> jax.Array:
        """Returns the live weight of what a state has of it, or a layer's."""
        return stored

    def gather(self, weight: Placed, shard: Any) -> Any:
        """Gathers a weight's shards, as a state has them, inside shard_map."""
        return gather(weight, shard)

    def round_once(
        self,
        layout: "Layout",
        weight: Placed,
        shard: Any,
        gathers: bool,
    ) -> Any:
        """Returns a stacked weight in float8 for a whole step, of its shard in the compute dtype, whose shards it
        `gathers`; None where it is multiplied as it is, or rounded where it is multiplied.
        """

    def wide(self, constant: Any) -> Any:
        """Returns the weight itself, of what a step only reads of it; None where nothing reads it."""
        return constant

    def prepare(
        self,
        block: Any,
        zero: Any,
        weights: Any,
        slot: "SlotKind",
        index: jax.Array,
    ) -> None:
        """Has the modules of layer `index` multiply as the `products` of its slot say: in the compute dtype."""


def shard_spec(placed: Placed) -> PartitionSpec:
    """Returns the sharding of fp32 master weights, optimizer state and reduced gradients."""
    return PartitionSpec(*(axes or None for axes in placed.shard_over))


def is_placed(x: Any) -> bool:
    """For trees of Placed, whose leaves JAX does not know."""
    return isinstance(x, Placed)


class SlotKind(NamedTuple):
    """The kind of a slot of a chunk, which is the same on all stages."""

    stack: str
    # Compute, float8, or either: a stage has a layer of the one kind there, and another one of the other
    products: str
    padded: bool = False  # some virtual stage has padding there
    # A stage that has it does not compute it, on any platform: most stages lack layers of that kind.
    skipped: bool = False


class Segment(NamedTuple):
    """Neighbouring slots of a chunk, of one kind or of a period of kinds that comes over and over:

        slots      dense   linear linear full   linear linear full
        segments   ──┬──   ────────────────┬───────────────────
             1 turn of [dense]     2 turns of [linear, linear, full]

    A segment is one loop, whose body has a layer of each kind of its period.
    """

    first: int  # slot
    behind: int
    period: tuple[SlotKind, ...]

    @property
    def turns(self) -> int:
        return (self.behind - self.first) // len(self.period)

    @property
    def stacks(self) -> list[str]:
        """The stack of each layer of its period."""
        return [kind.stack for kind in self.period]

    def turn(self, slot: int) -> int:
        """Returns the turn that begins at a slot, counted from the first slot on."""
        return self.first + (slot - self.first) // len(self.period)


class StackLayers:
    """The layers of a stack: their places on a mesh."""

    def __init__(self, layers: Sequence[int], in_slots: np.ndarray, count: int) -> None:
        """in_slots: the layer in each slot, of those of the model, -1 for padding: int [pipeline, chunks, slots of a
        virtual stage]; count: the places of a device.
        """
        self.layers = layers
        self.in_slots = in_slots
        self.count = count

    @cached_property
    def place_of(self) -> np.ndarray | None:
        """The place of each slot on its device, one past the last for padding: int [pipeline, slots]; None where the
        slots are the places.
        """
        used = self._slots >= 0
        if used[0].size == self.count:
            return None
        return np.where(used, np.cumsum(used, axis=1) - 1, self.count)

    @cached_property
    def slot_of(self) -> np.ndarray:
        """The slot of each place on its device, one past the last for padding: int [pipeline, places]."""
        behind = self._slots.shape[1]
        slots = np.where(self._slots >= 0, np.arange(behind), behind)
        return np.sort(slots, axis=1)[:, : self.count]

    @property
    def _slots(self) -> np.ndarray:
        return self.in_slots.reshape(len(self.in_slots), -1)

    @cached_property
    def index_at(self) -> np.ndarray:
        """The layer in each live place, of those of the model, -1 for padding: int [pipeline, places]."""
        if self.place_of is None:
            return self._slots
        padded = np.pad(self._slots, [(0, 0), (0, 1)], constant_values=-1)
        return np.take_along_axis(padded, self.slot_of, axis=1)

    @cached_property
    def layer_at(self) -> np.ndarray:
        """The layer in each live place likewise, of those of the stack."""
        stacked = np.searchsorted(self.layers, self.index_at)
        return np.where(self.index_at < 0, -1, stacked)

    @cached_property
    def places(self) -> np.ndarray:
        """The live place of each canonical layer."""
        layers = self.layer_at.reshape(-1)
        padding_last = np.where(layers < 0, layers.size, layers)
        return np.argsort(padding_last)[: len(self.layers)]

    @cached_property
    def in_order(self) -> bool:
        """The live order of the layers is the canonical one."""
        return bool(
            np.array_equal(self.layer_at.reshape(-1), np.arange(len(self.layers)))
        )


class Layout(Shown):
    """The weights of a model on a mesh, and the way between canonical and live trees.

    `masters` False: nothing is trained, so that all of them are held in the dtype that computes.
    """

    def __init__(
        self,
        config: Config,
        mesh: Mesh | AbstractMesh,
        masters: bool = True,
        storage: Storage | None = None,
    ) -> None:
        """`storage` is that of arrays unless given; `parallelize.make_layout` gives a config's."""
        self.config = config
        self.mesh = mesh
        self.has_masters = masters
        self.storage = storage or Storage()
        self.data = config.mesh.shards
        self.pipeline = config.mesh.pipeline
        self.stages = stages(config)
        self.chunks = self.stages.chunks

    @cached_property
    def table(self) -> Table | None:
        """The schedule, which also places the virtual stages; None where microbatches follow one another.

        ConfigError for one that cannot run.
        """
        if not runs_table(self.config):
            return None
        return table(self.config)

    @cached_property
    def layer_at(self) -> np.ndarray:
        """The layer of the model in each slot, -1 for padding: int [pipeline, chunks, slots of a virtual stage]."""
        rows = np.array(slots_of_stages(self.config))
        layer_at = np.full((self.pipeline, self.chunks, rows.shape[1]), -1)
        for stage in range(self.pipeline):
            for chunk in range(self.chunks):
                row = self.table.virtual(stage, chunk) if self.table else 0
                layer_at[stage, chunk] = rows[row]
        return layer_at

    @cached_property
    def stacks(self) -> dict[str, StackLayers]:
        """The places of each stack's layers, by its name."""
        slots = np.array(self.stages.slots)
        return {
            stack: StackLayers(
                layers, self.layer_at[..., slots == stack], self.stages.places(stack)
            )
            for stack, layers in layers_of_stacks(self.config.model).items()
        }

    def stack(self, weight: Placed) -> StackLayers:
        """Returns the stack of a stacked weight."""
        return self.stacks[weight.stack]

    @cached_property
    def segments(self) -> list[Segment]:
        """The slots of a chunk, from the first to behind the last. A table of pairs, which runs one segment forward and
        another backward in one loop, has no periods.
        """
        paired = self.table is not None and self.table.paired
        kinds = self._slot_kinds()
        padding = np.any(self.layer_at < 0, axis=(0, 1))
        skips = len(self.stacks) > 1 and not has_rings(self.config)
        segments = []
        first = 0
        while first < len(kinds):
            length, turns = _most_turns(
                kinds[first:], 1 if paired else len(kinds) - first
            )
            behind = first + length * turns
            padded = [
                bool(padding[first + n : behind : length].any()) for n in range(length)
            ]
            period = [
                kind._replace(padded=some, skipped=some and skips)
                for kind, some in zip(kinds[first:behind], padded, strict=False)
            ]
            segments.append(Segment(first, behind, tuple(period)))
            first = behind
        return segments

    @cached_property
    def products(self) -> dict[str, list[str]]:
        """Returns the kinds of products of the places that each stack's layers have in a chunk."""
        kinds = self._slot_kinds()
        return {
            stack: [kind.products for kind in kinds if kind.stack == stack]
            for stack in self.stacks
        }

    def wide_places(self, stack: str, chunks: int) -> np.ndarray:
        """Returns the places of a stack's layers in so many chunks whose products read weights in the compute dtype."""
        return np.flatnonzero(
            [kind != "float8" for kind in self.products[stack]] * chunks
        )

    def _slot_kinds(self) -> list[SlotKind]:
        return [
            SlotKind(stack, products)
            for stack, products in zip(self.stages.slots, self._products(), strict=True)
        ]

    def _products(self) -> Sequence[str]:
        """Returns the products of each slot."""
        precision = self.config.precision
        layer_at = self.layer_at.reshape(-1, self.layer_at.shape[-1])
        if precision.matmul == "compute":
            return ["compute"] * layer_at.shape[-1]
        first, last = precision.float8_skip
        skipped = (layer_at < first) | (layer_at >= self.config.model.layers - last)
        rounds = np.any(~skipped & (layer_at >= 0), axis=0)
        kinds = np.where(
            rounds,
            np.where(np.any(skipped & (layer_at >= 0), axis=0), "either", "float8"),
            "compute",
        )
        return [str(kind) for kind in kinds]

    @cached_property
    def weights(self) -> Tree:
        """A Placed for every parameter, in the tree of the parameters."""
        tree: dict[str, Any] = {}
        for weight in all_placed(self.config):
            *parents, name = weight.name.split(".")
            at = tree
            for parent in parents:
                at = at.setdefault(parent, {})
            at[name] = weight
        return tree

    @cached_property
    def flat(self) -> list[Placed]:
        """Returns the same in a list, in `jax.tree` order."""
        return jax.tree.leaves(self.weights, is_leaf=is_placed)

    @cached_property
    def updated(self) -> Tree:
        """The tree of Placed of what the optimizer changes, None elsewhere."""
        return self.map(lambda weight: weight if weight.updated else None)

    # --- trees of weights

    def map(self, function: Any, *trees: Tree) -> Tree:
        """`function(weight, *values)` over the parameters."""
        return jax.tree.map(function, self.weights, *trees, is_leaf=is_placed)

    def only_trained(self, tree: Tree) -> Tree:
        """The tree with None in the place of what is frozen."""
        return self.map(lambda weight, x: x if weight.trained else None, tree)

    def only_updated(self, tree: Tree) -> Tree:
        """The tree with None in the place of what the optimizer does not change: what is frozen, and experts' loads."""
        return self.map(lambda weight, x: x if weight.updated else None, tree)

    def add_frozen(self, trained: Tree, whole: Tree) -> Tree:
        """The tree `trained`, with the frozen weights of `whole`."""
        return self.map(
            lambda weight, new, old: new if weight.trained else old, trained, whole
        )

    @property
    def parameters(self) -> int:
        """Parameters of the model, without padding; adapters are none of them."""
        return parameters(self.config.model)

    @cached_property
    def shards(self) -> Tree:
        """PartitionSpecs of `masters`."""
        return jax.tree.map(lambda x: x.sharding.spec, self.masters)

    def dtype(self, weight: Placed) -> jnp.dtype:
        """Returns the dtype of a weight in a state: float32 for a master, the compute dtype for a frozen one."""
        full = weight.float32 or (weight.trained and self.has_masters)
        return jnp.dtype(jnp.float32 if full else self.config.precision.compute)

    def array(self, weight: Placed) -> jax.ShapeDtypeStruct:
        """Returns shape and sharding of a live weight: a float32 master, or a frozen weight in the compute dtype."""
        return jax.ShapeDtypeStruct(
            weight.padded,
            self.dtype(weight),
            sharding=NamedSharding(self.mesh, shard_spec(weight)),
        )

    @cached_property
    def masters(self) -> Tree:
        """ShapeDtypeStructs of the live weights as a state has them."""
        return self.map(self.master)

    def is_rounded(self, weight: Placed) -> bool:
        """Returns whether a state has a weight in float8, see `parallel.float8`."""
        return self.storage.rounds(weight)

    def master(self, weight: Placed) -> Any:
        """Returns the result of `array`, but a `Rounded` of them where a state has the weight in float8."""
        return self.storage.shapes(weight, self.array(weight))

    def stored(self, weight: Placed, x: jax.Array) -> Any:
        """Returns a live weight as a state has it: the array, or its rounded form."""
        return self.storage.store(weight, x, self.array(weight))

    def unstored(self, weight: Placed, stored: Any) -> jax.Array:
        """Returns the live weight of what a state has of it, or a layer's."""
        return self.storage.load(weight, stored, self.dtype(weight))

    def init(
        self, key: jax.Array, begin: Callable[[Placed, Any], Any] | None = None
    ) -> Tree:
        """Live weights, equal on every mesh; call it under jit with `masters`' shardings as output.

        `begin`: (a weight, the drawn values) -> the values that it begins with.
        """
        drawn = nnx.to_pure_dict(
            nnx.state(
                Decoder(self.config.model, nnx.Rngs(params=key), self.config.lora)
            )
        )
        if begin is not None:
            drawn = self.map(begin, drawn)
        return self.map(
            lambda weight, x: self.stored(weight, x.astype(self.dtype(weight))),
            self.live(drawn),
        )

    def live(self, canonical: Tree) -> Tree:
        """Canonical to live: layers to their places, zeros in the padding."""
        return self.map(self.live_leaf, canonical)

    def canonical(self, live: Tree) -> Tree:
        """Live to canonical: padding off, layers in order."""
        return self.map(self.canonical_leaf, live)

    def live_leaf(self, weight: Placed, x: jax.Array) -> jax.Array:
        if weight.stacked and not self.stack(weight).in_order:
            places = self.stack(weight).layer_at.reshape(-1)
            by_layer = (-1,) + (1,) * (x.ndim - 1)
            holds_layer = jnp.asarray(places >= 0).reshape(by_layer)
            x = jnp.where(holds_layer, x[jnp.asarray(np.maximum(places, 0))], 0)
        pairs = zip(x.shape, weight.padded, strict=True)
        return jnp.pad(x, [(0, to - n) for n, to in pairs])

    def canonical_leaf(self, weight: Placed, x: jax.Array) -> jax.Array:
        if weight.stacked and not self.stack(weight).in_order:
            x = x[jnp.asarray(self.stack(weight).places[: weight.shape[0]])]
        return x[tuple(slice(n) for n in weight.shape)]


def _most_turns(kinds: Sequence[SlotKind], longest: int) -> tuple[int, int]:
    """Returns (its length, how often it comes) of the period, no longer than that, which covers the most of the first
    kinds.
    """
    found = []
    for length in range(1, longest + 1):
        turns = 1
        while kinds[turns * length : (turns + 1) * length] == kinds[:length]:
            turns += 1
        found.append((length, turns))
    several = [(length, turns) for length, turns in found if turns > 1 or length == 1]
    return max(several, key=lambda one: one[0] * one[1])
