"""A program's weights as decoding reads them: gathered over every axis but tensor, each layer an array of its own.

    training   layers over pipeline, vocabulary over pipeline x tensor, experts over expert, shards over data, context
       │       cast to the compute dtype, then sent
       ▼
    decoding   all layers and all experts on every device; heads, d_ff and vocabulary over tensor

A device receives its part of the decoding weights once, and nothing besides:

    split over           sent
    ZeRO's axes          an all-gather
    pipeline, expert     an all-gather; layers then leave their live places
    pipeline x tensor    each piece to the rank that is to have it, then an all-gather over pipeline:
                         of the pieces 0 to 3 on 2 stages of 2 tensor ranks the first gets 0 1, the second 2 3
    expert x tensor      an all-to-all over tensor, which swaps experts for d_ff, then an all-gather over expert
"""

import itertools
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from meshtrain.config.stacks import stack_of_layers
from meshtrain.generate import held
from meshtrain.mesh import TENSOR
from meshtrain.parallel.layout import Layout, is_placed, shard_spec
from meshtrain.parallel.placement import Placed
from meshtrain.parallel.reduce.reduction import unpadded


class Parts(NamedTuple):
    """Trees of arrays, or of their PartitionSpecs; also graphs of modules."""

    embedding: Any
    blocks: Any  # a tuple of trees, a layer each
    head: Any
    # the layer that predicts the token after the next; None where nothing is drafted
    drafter: Any = None


class Resharding:
    """The way from the weights of one layout to those of another on the same mesh that splits over tensor alone.

    `kind`: weights of products are held in it, see `generate.held`. `drafts`: the drafter is one of the parts.
    """

    def __init__(
        self,
        trained: Layout,
        decoded: Layout,
        kind: str | None = None,
        drafts: bool = False,
    ) -> None:
        self.trained = trained
        self.decoded = decoded
        self.kind = kind
        self.drafts = drafts

    @property
    def specs(self) -> Parts:
        """The PartitionSpecs of the weights that decoding reads."""
        return self._parts([self._specs(weight) for weight in self.decoded.flat])

    @cached_property
    def program(self) -> Any:
        """The compiled program (params) -> Parts, for weights that change from step to step."""

        def reshard(params: Any) -> Parts:
            pairs = zip(self._pairs, self._leaves(params), strict=True)
            return self._parts([self._resharded(*pair, x) for pair, x in pairs])

        return jax.jit(reshard, out_shardings=self.shardings(self.specs))

    def take_over(self, params: Any, keep: bool) -> Parts:
        """Returns the weights, one after the other; those that are given are freed unless `keep`."""
        by_weight = []
        for (trained, decoded), stored in zip(
            self._pairs, self._leaves(params), strict=True
        ):

            def reshard(
                x: Any, trained: Placed = trained, decoded: Placed = decoded
            ) -> list[Any]:
                return self._resharded(trained, decoded, x)

            run = jax.jit(reshard, out_shardings=self.shardings(self._specs(decoded)))
            by_weight.append(jax.block_until_ready(run(stored)))
            if not keep:
                jax.tree.map(lambda x: x.delete(), stored)
        return self._parts(by_weight)

    def differing(self, params: Any, held: Parts) -> list[Placed]:
        """Returns the weights of which `held` has other values than `params`, compared as canonical arrays: nothing
        here is what resharded them.
        """
        names = self._parts(
            [[weight.name] * self._layers(weight) for weight in self.decoded.flat]
        )
        layers: dict[str, list[jax.Array]] = {
            weight.name: [] for weight in self.decoded.flat
        }
        for name, x in zip(jax.tree.leaves(names), jax.tree.leaves(held), strict=True):
            layers[name].append(x)

        def are_equal(weight: Placed, stored: Any, held: list[jax.Array]) -> jax.Array:
            wanted = self.trained.canonical_leaf(
                weight, self.trained.unstored(weight, stored)
            )
            there = jnp.stack(held) if weight.stacked else held[0]
            there = there[tuple(slice(n) for n in weight.shape)]
            return jnp.array_equal(wanted.astype(there.dtype), there)

        compare = jax.jit(are_equal, static_argnums=0)
        pairs = zip(self.trained.flat, self._leaves(params), strict=True)
        return [
            weight
            for weight, stored in pairs
            if not compare(weight, stored, layers[weight.name])
        ]

    @property
    def _pairs(self) -> list[tuple[Placed, Placed]]:
        return list(zip(self.trained.flat, self.decoded.flat, strict=True))

    def _leaves(self, params: Any) -> list[Any]:
        """Returns what a state has of each weight, one in float8 as a `Rounded`."""
        tree: Any = jax.tree.structure(self.trained.weights, is_leaf=is_placed)
        return tree.flatten_up_to(params)

    def _specs(self, weight: Placed) -> list[Any]:
        return [held.spec(weight, self.kind)] * self._layers(weight)

    @staticmethod
    def _layers(weight: Placed) -> int:
        return weight.shape[0] if weight.stacked else 1

    def shardings(self, specs: Any) -> Any:
        """Returns the NamedShardings of a tree of PartitionSpecs on the mesh."""
        return jax.tree.map(lambda spec: NamedSharding(self.decoded.mesh, spec), specs)

    def _parts(self, by_weight: list[list[Any]]) -> Parts:
        layout = self.decoded
        by_name = dict(
            zip((weight.name for weight in layout.flat), by_weight, strict=True)
        )

        def part(name: str, layer: int = 0) -> Any:
            return jax.tree.map(
                lambda weight: by_name[weight.name][layer],
                layout.weights[name],
                is_leaf=is_placed,
            )

        taken = {stack: itertools.count() for stack in layout.stacks}
        stacks = stack_of_layers(layout.config.model)
        blocks = tuple(part(stack, next(taken[stack])) for stack in stacks)
        drafter = part("mtp")["depth_0"] if self.drafts else None
        return Parts(part("embedding"), blocks, part("head"), drafter)

    def _resharded(self, trained: Placed, decoded: Placed, stored: Any) -> list[Any]:
        """Returns the layers of a weight, or the weight alone, as decoding has them. Traceable."""
        axes = shard_spec(decoded)
        out = [PartitionSpec(*axes[decoded.stacked :])] * self._layers(decoded)
        send = jax.shard_map(
            lambda x: self._send(trained, decoded, x),
            mesh=self.decoded.mesh,
            in_specs=shard_spec(trained),
            out_specs=out,
        )
        arrays = send(self.trained.unstored(trained, stored))
        by = held.groups(decoded) if self.kind else None
        if by is None:
            return arrays
        return [held.held(str(self.kind), x, by) for x in arrays]

    def _send(self, trained: Placed, decoded: Placed, x: jax.Array) -> list[jax.Array]:
        """Gathers a device's part of a weight, inside shard_map, and gives its layers."""
        if not trained.float32:
            x = x.astype(self.decoded.config.precision.compute)
        moved = [
            d
            for d, axes in enumerate(trained.over)
            if TENSOR in axes and axes != (TENSOR,)
        ]
        split = [d for d, axes in enumerate(decoded.over) if TENSOR in axes]
        swaps = split if moved != split else []
        # What moves to another tensor rank moves while it is a shard, unless the shards are of what is to be split.
        early = bool(moved) and trained.zero_dim not in swaps
        if early:
            x = self._move(trained, decoded, x, moved[0])
        if trained.zero_dim is not None:
            x = unpadded(trained, _gathered(x, trained.zero_axes, trained.zero_dim))
        if moved and not early:
            x = self._move(trained, decoded, x, moved[0])
        for dim, axes in enumerate(trained.over):
            x = _gathered(x, tuple(axis for axis in axes if axis != TENSOR), dim)
        if not decoded.stacked:
            return [x]
        return [
            x[place] for place in self.trained.stack(trained).places[: decoded.shape[0]]
        ]

    def _move(
        self,
        trained: Placed,
        decoded: Placed,
        x: jax.Array,
        dim: int,
    ) -> jax.Array:
        """Gives each tensor rank the pieces of `dim` that it is to have, or of the dimension that is split in its
        place; if none is, it gathers `dim` over tensor.
        """
        if TENSOR in decoded.over[dim]:
            return self._put_in_order(x, trained.over[dim])
        split = [d for d, axes in enumerate(decoded.over) if TENSOR in axes]
        if not split:
            return _gathered(x, (TENSOR,), dim)
        padding = [(0, 0)] * x.ndim
        padding[split[0]] = (0, decoded.whole[split[0]] - trained.whole[split[0]])
        return lax.all_to_all(jnp.pad(x, padding), TENSOR, split[0], dim, tiled=True)

    def _put_in_order(self, x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
        """Sends each piece to the tensor rank that is to have it, whose pieces the other axes then hold one each."""
        ranks = self.decoded.mesh.shape[TENSOR]
        pieces = ranks
        for axis in axes[:-1]:
            pieces *= self.decoded.mesh.shape[axis]
        each = pieces // ranks
        moves = [
            (piece, piece % each * ranks + piece // each) for piece in range(pieces)
        ]
        if all(source == target for source, target in moves):
            return x
        return lax.ppermute(x, axes, moves)


def _gathered(x: jax.Array, axes: tuple[str, ...], dim: int) -> jax.Array:
    return lax.all_gather(x, axes, axis=dim, tiled=True, to="invarying") if axes else x
