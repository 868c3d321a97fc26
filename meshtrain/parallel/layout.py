"""The arrays of a model on a mesh, as `placement` has them, and the way between their canonical and their live layout.

The canonical layout (what is saved, and what every mesh can be restored to) has all layers stacked in order. The live
one has the layers of one stage side by side, each virtual stage padded to the longest:

    canonical   0 1 2 3 4            5 layers
    live        0 1 2 │ 3 4 ·        2 stages; · is padding, skipped by the stage and zero for ever
    live, 2 chunks per stage         0 1 3 · │ 2 · 4 ·   virtual stage k lies on stage k mod S, or where the schedule's
                                                         table says
"""

import itertools
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from meshtrain.config import Config
from meshtrain.config.follow import runs_table
from meshtrain.model.decoder import Decoder
from meshtrain.model.weights import parameters
from meshtrain.parallel.placement import Placed, all_placed, stages, table
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

    def prepare(self, block: Any, zero: Any, weights: Any, products: str, index: jax.Array) -> None:
        """Has the modules of layer `index` multiply as the `products` of its segment say: in the compute dtype."""


def shard_spec(placed: Placed) -> PartitionSpec:
    """Returns the sharding of fp32 master weights, optimizer state and reduced gradients."""
    return PartitionSpec(*(axes or None for axes in placed.shard_over))


def is_placed(x: Any) -> bool:
    """For trees of Placed, whose leaves JAX does not know."""
    return isinstance(x, Placed)


class Segment(NamedTuple):
    """Neighbouring layers of a chunk whose products are of one kind on all stages."""

    first: int
    behind: int
    products: str  # compute, float8, or either: a stage has a layer of the one kind there, and another one of the other


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
        """The canonical layer in each live place, -1 for padding: int [pipeline, chunks, most layers of a virtual
        stage].
        """
        layers = self.stages.counts
        first = np.concatenate([[0], np.cumsum(layers)])
        layer_at = np.full((self.pipeline, self.chunks, max(layers)), -1)
        for stage in range(self.pipeline):
            for chunk in range(self.chunks):
                k = self.table.virtual(stage, chunk) if self.table else 0
                layer_at[stage, chunk, : layers[k]] = np.arange(first[k], first[k + 1])
        return layer_at

    @cached_property
    def places(self) -> np.ndarray:
        """The live place of each canonical layer."""
        layers = self.layer_at.reshape(-1)
        return np.argsort(np.where(layers < 0, layers.size, layers))[: self.config.model.layers]

    @cached_property
    def segments(self) -> list[Segment]:
        """The layers of a chunk, from the first to behind the last."""
        precision = self.config.precision
        layer_at = self.layer_at.reshape(-1, self.layer_at.shape[-1])
        if precision.matmul == "compute":
            return [Segment(0, layer_at.shape[-1], "compute")]
        first, last = precision.float8_skip
        skipped = (layer_at < first) | (layer_at >= self.config.model.layers - last)
        rounds = np.any(~skipped & (layer_at >= 0), axis=0)
        kinds = np.where(
            rounds,
            np.where(np.any(skipped & (layer_at >= 0), axis=0), "either", "float8"),
            "compute",
        )
        changes = np.flatnonzero(kinds[1:] != kinds[:-1])
        starts = [0, *(changes + 1), len(kinds)]
        return [Segment(int(a), int(b), str(kinds[a])) for a, b in itertools.pairwise(starts)]

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

    @cached_property
    def even(self) -> bool:
        """No stage has padding."""
        return bool((self.layer_at >= 0).all())

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
        return self.map(lambda weight, new, old: new if weight.trained else old, trained, whole)

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
            weight.padded, self.dtype(weight), sharding=NamedSharding(self.mesh, shard_spec(weight))
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

    def init(self, key: jax.Array) -> Tree:
        """Live weights, equal on every mesh; call it under jit with `masters`' shardings as output."""
        drawn = nnx.to_pure_dict(
            nnx.state(Decoder(self.config.model, nnx.Rngs(params=key), self.config.lora))
        )
        return self.map(
            lambda weight, x: self.stored(weight, x.astype(self.dtype(weight))), self.live(drawn)
        )

    def live(self, canonical: Tree) -> Tree:
        """Canonical to live: layers to their places, zeros in the padding."""
        return self.map(self.live_leaf, canonical)

    def canonical(self, live: Tree) -> Tree:
        """Live to canonical: padding off, layers in order."""
        return self.map(self.canonical_leaf, live)

    def live_leaf(self, weight: Placed, x: jax.Array) -> jax.Array:
        if weight.stacked and not self.in_order:
            places = self.layer_at.reshape(-1)
            holds_layer = jnp.asarray(places >= 0).reshape((-1,) + (1,) * (x.ndim - 1))
            x = jnp.where(holds_layer, x[jnp.asarray(np.maximum(places, 0))], 0)
        return jnp.pad(x, [(0, to - n) for n, to in zip(x.shape, weight.padded, strict=True)])

    def canonical_leaf(self, weight: Placed, x: jax.Array) -> jax.Array:
        if weight.stacked and not self.in_order:
            x = x[jnp.asarray(self.places[: weight.shape[0]])]
        return x[tuple(slice(n) for n in weight.shape)]

    @cached_property
    def in_order(self) -> bool:
        """The live order of the layers is the canonical one."""
        return bool(np.array_equal(self.layer_at.reshape(-1), np.arange(self.config.model.layers)))
