"""Weights in float8 on a mesh: as a state has them, as they are gathered, and as the products of a layer take them.

    frozen     the state has them rounded, as bytes and scales: half the bytes of bfloat16 (`precision.float8_frozen`)
    trained    their float32 masters are rounded once a step: shards before they are gathered
               (`precision.float8_gather`), forward and in the groups of the backward

Either way a product has what it would round the whole weight to by itself. It does so itself with ZeRO-3 where shards
are not gathered in float8, where blocks do not fit, and of frozen weights for the backward.
"""

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from meshtrain.compat import vary
from meshtrain.config import Config
from meshtrain.model.float8 import (
    Float8Products,
    Float8Recipe,
    Groups,
    Rounded,
    RoundedWeight,
    rounded,
    widened,
)
from meshtrain.parallel.float8 import MODULES, groups_of, is_held, notes, unsharded
from meshtrain.parallel.layout import Layout, SlotKind, Storage
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
        if isinstance(stored, RoundedWeight):
            return stored.unread(dtype) if stored.wide is None else stored.wide
        if not self.rounds(weight):
            return stored
        return jax.jit(widened, static_argnums=1)(stored, dtype)

    def gather(self, weight: Placed, shard: Any) -> Any:
        if not self.rounds(weight):
            return gather(weight, shard)
        return self._gather_rounded(weight, shard, self._groups(weight))

    def _groups(self, weight: Placed, turned: bool = False) -> Groups | None:
        return groups_of(weight, self.config.precision.float8_recipe, turned)

    def round_once(
        self,
        layout: Layout,
        weight: Placed,
        shard: Any,
        gathers: bool,
    ) -> Any:
        if not weight.stacked or self.rounds(weight):
            return None
        products = layout.products[weight.stack]
        if {"float8", *["either"] * gathers}.isdisjoint(products):
            return None
        chunks = len(shard) // len(products) if gathers else 0
        wide = layout.wide_places(weight.stack, chunks)
        by_shards = self.config.precision.float8_gather and len(wide) < len(shard)
        groups = self._groups(weight) if by_shards else None
        whole = unsharded(weight) if gathers else weight
        if groups is not None:
            q = self._round_shard(weight, shard)
            q = self._gather_rounded(weight, q, groups) if gathers else q
        elif not gathers or self._groups(whole) is None:
            return None
        else:
            shard = gather(weight, shard)
            q = self._round_shard(whole, shard)
        turned = None
        if self._groups(whole) != self._groups(whole, turned=True):
            turned = self._round_shard(whole, widened(q, jnp.float32), turned=True)
        unrounded = None
        if len(wide):
            some = shard if len(wide) == len(shard) else shard[wide]
            unrounded = some if groups is None else gather(weight, some)
        # scales that ranks share too, or layers would have other arrays than these
        return vary(RoundedWeight(q, turned, unrounded), self.config.mesh.axes)

    def _round_shard(
        self, weight: Placed, shard: jax.Array, turned: bool = False
    ) -> Rounded:
        """Rounds stacked shards to bytes; they share the scales of what ZeRO splits."""
        groups = self._groups(weight, turned)
        assert groups is not None
        shared = weight.zero_dim is not None and not groups[weight.zero_dim - 1]
        return rounded(
            shard, (1, *groups), over=weight.zero_axes if shared else ()
        ).packed()

    def wide(self, constant: Any) -> Any:
        return constant.wide if isinstance(constant, RoundedWeight) else constant

    def _gather_rounded(
        self, weight: Placed, q: Rounded, groups: Groups | None
    ) -> Rounded:
        """Gathers a weight's shards; a scale that is that of all shards they have already."""
        split = (
            weight.zero_dim is not None
            and groups is not None
            and groups[weight.zero_dim - 1]
        )
        scale = gather(weight, q.scale) if split else q.scale
        return q._replace(values=gather(weight, q.values), scale=scale)

    def prepare(
        self,
        block: Any,
        zero: "Zero",
        weights: "Weights",
        slot: SlotKind,
        index: jax.Array,
    ) -> None:
        """Has the modules of a layer multiply in float8, by the weights that are there in it."""
        layers = self.config.model.layers
        precision = self.config.precision
        products = slot.products
        first, last = precision.float8_skip
        skip = (
            (index < first) | (index >= layers - last) if products == "either" else None
        )
        how = Float8Recipe(
            precision.float8_recipe, precision.float8_wgrad == "float8", products
        )
        for name, placed in zero.layout.weights[slot.stack].items():
            if name not in MODULES or (module := getattr(block, name)) is None:
                continue
            of_module = weights.constant.get(name) or {}
            there = {
                key: q
                for key, weight in placed.items()
                if not isinstance(weight, dict)  # no norms
                and (
                    q := self._rounded_at_use(
                        weight, of_module.get(key), zero, products
                    )
                )
                is not None
            }
            if there or products != "compute":
                module.float8 = Float8Products(
                    how, skip, there, precision.float8_gather
                )

    def _rounded_at_use(
        self,
        weight: Placed,
        constant: Any,
        zero: "Zero",
        products: str,
    ) -> RoundedWeight | None:
        """Returns a weight of a layer in float8; None where its products round it themselves, or not at all."""
        if self.rounds(weight):
            return RoundedWeight(
                zero.gathered(weight, constant) if zero.gathers_at_use else constant
            )
        if not isinstance(constant, RoundedWeight) or products == "compute":
            return None
        if not zero.gathers_at_use:
            return constant if products == "either" else constant._replace(wide=None)
        if products == "either":
            return None
        forward, turned, _ = constant
        return RoundedWeight(
            self._gather_rounded(weight, forward, self._groups(weight)),
            turned
            and self._gather_rounded(weight, turned, self._groups(weight, turned=True)),
        )
