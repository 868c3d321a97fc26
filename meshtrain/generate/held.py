"""Weights of the layers' products in 8 bits: half the bytes of bfloat16, a quarter of float32's.

    W [in, out] ──► values, int8 or e4m3 [in, out]  x  scale, float32 [1, out]  ──widened in the product──► bfloat16

Each output has a scale of its own, and so has each output of each expert. A weight that splits over tensor has the
scales of the whole weight, so that every mesh multiplies by the same numbers. Embedding, head, norms, routers, biases
and adapters stay as they are.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from meshtrain.model.float8 import Groups, Rounded, rounded, widened
from meshtrain.parallel.float8 import groups_of
from meshtrain.parallel.layout import shard_spec
from meshtrain.parallel.placement import Placed
from meshtrain.reader import Model
from meshtrain.units import size

KINDS = ("float8", "int8")
TOP = 127  # the largest int8 whose negative is one too


def groups(weight: Placed) -> Groups | None:
    """Returns how many numbers of a layer's weight share a scale along each dimension, 0: all; None of what is not held
    in 8 bits.
    """
    return groups_of(weight, "rowwise")


def held(kind: str, x: jax.Array, by: Groups) -> Rounded:
    """Rounds an array to 8 bits."""
    if kind == "float8":
        return rounded(x, by).packed()
    shared = tuple(d for d, numbers in enumerate(by) if not numbers)
    wide = x.astype(jnp.float32)
    scale = jnp.maximum(
        jnp.max(jnp.abs(wide), shared, keepdims=True) / TOP, jnp.finfo(jnp.float32).tiny
    )
    return Rounded(jnp.round(wide / scale).astype(jnp.int8), scale)


def is_rounded(x: Any) -> bool:
    return isinstance(x, Rounded)


def multiplied(tree: Any, dtype: Any) -> Any:
    """Returns a tree of weights as products take them."""
    return jax.tree.map(
        lambda x: widened(x, dtype) if is_rounded(x) else x, tree, is_leaf=is_rounded
    )


def spec(weight: Placed, kind: str | None) -> Any:
    """Returns the PartitionSpec of one layer of a weight, or a `Rounded` of two."""
    axes = shard_spec(weight)[weight.stacked :]
    by = groups(weight) if kind else None
    values = PartitionSpec(*axes)
    if by is None:
        return values
    scales = PartitionSpec(
        *(of if numbers else None for of, numbers in zip(axes, by, strict=True))
    )
    return Rounded(values, scales)  # type: ignore[arg-type]


def round_weights(model: Model, kind: str) -> None:
    """Rounds a model's weights to what they would be held as; `held` then changes none of them."""

    def rounded_leaf(weight: Placed, x: jax.Array) -> jax.Array:
        if (by := groups(weight)) is None:
            return x
        run = jax.jit(
            lambda x: widened(held(kind, x, (1, *by)), x.dtype),
            out_shardings=x.sharding,
            donate_argnums=0,
        )
        return run(x)

    model.params = model.program.layout.map(rounded_leaf, model.params)


def note(kind: str, tree: Any, dtype: Any) -> str:
    """Returns a sentence on the bytes of weights that are held in 8 bits."""
    leaves = jax.tree.leaves(tree, is_leaf=is_rounded)
    now = sum(x.nbytes for x in jax.tree.leaves(tree))
    wide = sum(
        x.values.size * jnp.dtype(dtype).itemsize if is_rounded(x) else x.nbytes
        for x in leaves
    )
    return f"weights held in {kind} take {size(now)} in place of {size(wide)} in {jnp.dtype(dtype).name}."
