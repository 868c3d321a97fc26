"""A model's weights as decoding wants them: in the compute dtype, whole on every data rank, and those of the blocks a tree a layer.

    blocks.attention.q [layers, D, H, K] float32  ──►  layer 0 [D, H, K], layer 1 [D, H, K], ...  bfloat16

A layer cut out of a stacked array is a copy of it, every step, which took as long as all else (experiments/generate/decode.py).
"""

from functools import partial
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding, PartitionSpec

from meshtrain.parallel.layout import Layout, is_placed, shard_spec
from meshtrain.parallel.placement import Placed
from meshtrain.reader import Model

Tree = Any


class Held(NamedTuple):
    """Trees of arrays, or of their PartitionSpecs; also graphs of modules."""

    embedding: Any
    blocks: Any  # a tuple of trees, a layer each
    head: Any


def specs(layout: Layout) -> Held:
    """How `taken_over` splits each."""
    return _by_part(layout, {weight.name: [_spec(weight)] * _layers(weight) for weight in layout.flat})


def taken_over(model: Model, layout: Layout, keep: bool) -> Held:
    """The weights of a model on the mesh of `layout`, one after the other; those of the model are freed unless `keep`."""
    found: dict[str, list[jax.Array]] = {}
    theirs = model.program.layout
    for placed, weight, x in zip(theirs.flat, layout.flat, jax.tree.leaves(model.params), strict=True):

        def cut(x: jax.Array, placed: Placed = placed, weight: Placed = weight) -> list[jax.Array]:
            whole = layout.live_leaf(weight, theirs.canonical_leaf(placed, x)).astype(layout.config.precision.compute)
            return list(whole) if weight.stacked else [whole]

        shardings = [NamedSharding(layout.mesh, _spec(weight))] * _layers(weight)  # type: ignore[arg-type]
        found[weight.name] = jax.block_until_ready(jax.jit(cut, out_shardings=shardings)(x))
        if not keep:
            x.delete()
    return _by_part(layout, found)


def _by_part(layout: Layout, found: dict[str, list[Any]]) -> Held:
    def part(name: str, layer: int = 0) -> Tree:
        return jax.tree.map(lambda weight: found[weight.name][layer], layout.weights[name], is_leaf=is_placed)

    blocks = tuple(map(partial(part, "blocks"), range(layout.config.model.layers)))
    return Held(part("embedding"), blocks, part("head"))


def _spec(weight: Placed) -> PartitionSpec:
    return PartitionSpec(*shard_spec(weight)[weight.stacked :])


def _layers(weight: Placed) -> int:
    return weight.shape[0] if weight.stacked else 1
