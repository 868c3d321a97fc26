"""Weights in float8 on a mesh: as a state has them, as they are gathered, and as the products of a layer take them.

    frozen     the state has them rounded, as bytes and scales: half the bytes of bfloat16 (`precision.float8_frozen`)
    trained    their float32 masters are rounded at each use; with ZeRO-3 before they are gathered
               (`precision.float8_gather`)

Either way a product has what it would round the whole weight to by itself.
"""

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from meshtrain.config import Config
from meshtrain.model.float8 import Float8Products, Float8Recipe, Rounded, rounded, widened
from meshtrain.parallel.float8 import MODULES, groups_of, is_held, notes
from meshtrain.parallel.layout import SlotKind, Storage
from meshtrain.parallel.placement import Placed
from meshtrain.parallel.reduce.reduction import gather

if TYPE_CHECKING:
    from meshtrain.parallel.zero import Weights, Zero


class Float8Storage(Storage):
    """How a state holds weights where products are in float8: frozen ones rounded, where `masters` are held.

    A program that trains nothing holds them as it computes with them.
    """

    def __init__(self, config: Config, masters: bool) -> None:
        self.config = config
        self.masters = masters

    def notes(self) -> list[str]:
        return notes(self.config)

    def rounds(self, weight: Placed) -> bool:
        return self.masters and is_held(self.config, weight)

    def shapes(self, weight: Placed, array: jax.ShapeDtypeStruct) -> Any:
        """Returns those of its rounded form: where numbers share a scale it is split as they are."""
        if not self.rounds(weight):
            return array
        q = jax.eval_shape(lambda x: self._round(weight, x), array)
        split = zip(weight.shard_over, q.scale.shape, strict=True)
        spec = PartitionSpec(*(axes if axes and n > 1 else None for axes, n in split))
        shardings = (array.sharding, NamedSharding(array.sharding.mesh, spec))
        values, scale = (
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
            for x, sharding in zip(q, shardings, strict=True)
        )
        return q._replace(values=values, scale=scale)

    def store(self, weight: Placed, x: jax.Array, array: jax.ShapeDtypeStruct) -> Any:
        if not self.rounds(weight):
            return x
        shardings = jax.tree.map(lambda s: s.sharding, self.shapes(weight, array))
        return jax.jit(lambda x: self._round(weight, x), out_shardings=shardings)(x)

    def _round(self, weight: Placed, x: jax.Array) -> Rounded:
        groups = groups_of(weight, self.config.precision.float8_recipe)
        assert groups is not None
        return rounded(x, (1, *groups)).packed()

    def load(self, weight: Placed, stored: Any, dtype: jnp.dtype) -> jax.Array:
        if not self.rounds(weight):
            return stored
        return jax.jit(widened, static_argnums=1)(stored, dtype)

    def gather(self, weight: Placed, shard: Any) -> Any:
        return self._gather_rounded(weight, shard) if self.rounds(weight) else gather(weight, shard)

    def _gather_rounded(self, weight: Placed, q: Rounded) -> Rounded:
        """Gathers a weight's shards; a scale that is that of all shards they have already."""
        groups = groups_of(weight, self.config.precision.float8_recipe)
        split = weight.zero_dim is not None and groups is not None and groups[weight.zero_dim - 1]
        scale = gather(weight, q.scale) if split else q.scale
        return q._replace(values=gather(weight, q.values), scale=scale)

    def prepare(
        self, block: Any, zero: "Zero", weights: "Weights", slot: SlotKind, index: jax.Array
    ) -> None:
        """Has the modules of a layer multiply in float8, by the weights that are there in it."""
        layers = self.config.model.layers
        precision = self.config.precision
        products = slot.products
        first, last = precision.float8_skip
        skip = (index < first) | (index >= layers - last) if products == "either" else None
        how = Float8Recipe(precision.float8_recipe, precision.float8_wgrad == "float8", products)
        for name, placed in zero.layout.weights[slot.stack].items():
            if name not in MODULES or (module := getattr(block, name)) is None:
                continue
            trained, frozen = (tree.get(name) or {} for tree in weights)
            differentiated = {key: x for key, x in trained.items() if x is not None}
            shards = {**frozen, **differentiated}
            there = {
                key: q
                for key, shard in shards.items()
                if not isinstance(shard, dict)  # no norms
                and (q := self._round_at_use(placed[key], shard, zero, how)) is not None
            }
            if there or products != "compute":
                module.float8 = Float8Products(how, skip, there, precision.float8_gather)

    def _round_at_use(
        self, weight: Placed, shard: Any, zero: "Zero", how: Float8Recipe
    ) -> Rounded | None:
        """Returns a weight of a layer in float8; None where its products round it themselves."""
        if self.rounds(weight):
            return zero.gathered(weight, shard) if zero.gathers_at_use else shard
        gathers = how.products == "float8" and self.config.precision.float8_gather
        groups = groups_of(weight, how.recipe) if gathers and zero.gathers_at_use else None
        if groups is None:
            return None
        shared = weight.zero_dim is not None and not groups[weight.zero_dim - 1]
        q = rounded(lax.stop_gradient(shard), groups, over=weight.zero_axes if shared else ())
        return self._gather_rounded(weight, q.packed())
