"""Muon over a mesh: each matrix is orthogonalized by one rank (see `stacks`).

    momentum, in shards                    whole matrices, of a rank          updates, in shards
    layers x [embed/data, heads/tensor] ──all-to-all──► Newton-Schulz ──all-to-all──► as they lay

Both ways a rank sends its shards once, whatever the number of iterations. Ranks that have copies of a shard take
matrices apart without a message, and gather what becomes of them.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from meshtrain.optimizers import NEWTON_SCHULZ, NEWTON_SCHULZ_STEPS
from meshtrain.parallel.layout import Layout, shard_spec
from meshtrain.parallel.per_matrix import Tree, divide, join
from meshtrain.parallel.placement import Placed
from meshtrain.parallel.stacks import Stack, batch_dims, make_stacks

Orthogonalize = Callable[[list[jax.Array]], list[jax.Array]]


def spread_matrices(
    make: Callable[..., optax.GradientTransformation], layout: Layout
) -> optax.GradientTransformation:
    """Returns the optimizer whose parts, layers and the rest, are `make(weights, of)`, where `of(weights, eps)` is the
    function that orthogonalizes arrays of such weights.
    """
    parts: list[Tree] = list(divide(layout.updated))
    return join(*(make(part, partial(orthogonalizer, layout)) for part in parts))


def orthogonalizer(layout: Layout, weights: Sequence[Placed], eps: float) -> Orthogonalize:
    """Returns the function that orthogonalizes the matrices of arrays, which lie as these weights do."""
    if not weights:
        return list
    stacks = make_stacks(layout.config.mesh, weights)
    specs = [shard_spec(weight) for weight in weights]

    def run(arrays: list[jax.Array]) -> list[jax.Array]:
        local = dict(zip((weight.name for weight in weights), arrays, strict=True))
        for stack in stacks:
            names = [weight.name for weight, _ in stack.members]
            local |= zip(names, _orthogonalize(stack, [local[n] for n in names], eps), strict=True)
        return [local[weight.name] for weight in weights]

    # JAX cannot know that what is gathered of copies is the same on all of them, so it does not check.
    return jax.shard_map(run, mesh=layout.mesh, in_specs=(specs,), out_specs=specs, check_vma=False)


def newton_schulz(x: jax.Array, eps: float) -> jax.Array:
    """Returns matrices [..., m, n] with their singular values moved towards 1 (Jordan et al. 2024)."""
    if x.shape[-2] > x.shape[-1]:
        return newton_schulz(x.mT, eps).mT
    x = x / (jnp.linalg.norm(x, axis=(-2, -1), keepdims=True) + eps)
    a, b, c = jnp.asarray(NEWTON_SCHULZ, x.dtype)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def _orthogonalize(stack: Stack, arrays: list[jax.Array], eps: float) -> list[jax.Array]:
    """Returns the weights of a stack on a device, orthogonalized; inside shard_map."""
    form = stack.form
    orders = [(*batch_dims(weight, dims), *dims) for weight, dims in stack.members]
    turned = [x.transpose(order) for x, order in zip(arrays, orders, strict=True)]
    rank = len(form.sizes)
    local = turned[0].shape[-rank:]
    joined = jnp.concatenate([x.reshape(-1, *local) for x in turned])
    filled = stack.ranks * stack.on_rank - len(joined)
    padded = _lay_out(stack, _pad(joined, (len(joined) + filled, *local)))
    whole = padded[(slice(None), *map(slice, form.sizes))]
    # A layer's batch of one: so XLA sums up the numbers of a matrix in the order in which it does for a single one.
    ones = () if "experts" in stack.members[0][0].axes else (1,)
    iterated = newton_schulz(whole.reshape(-1, *ones, *form.sides), eps)
    back = _lay_back(stack, _pad(iterated.reshape(whole.shape), padded.shape), local)
    ends = np.cumsum([math.prod(x.shape[:-rank]) for x in turned])
    parts = jnp.split(back[: ends[-1]], ends[:-1])
    return [
        part.reshape(x.shape).transpose(np.argsort(order))
        for part, x, order in zip(parts, turned, orders, strict=True)
    ]


def _pad(x: jax.Array, shape: Sequence[int]) -> jax.Array:
    return jnp.pad(x, [(0, to - n) for n, to in zip(x.shape, shape, strict=True)])


def _lay_out(stack: Stack, shards: jax.Array) -> jax.Array:
    """Returns this rank's matrices, whole, from shards of all of them."""
    form = stack.form
    local = shards.shape[1:]
    if form.copies:
        each = len(shards) // lax.axis_size(form.copies)
        shards = lax.dynamic_slice_in_dim(shards, lax.axis_index(form.copies) * each, each)
    shards = _exchange(stack, shards)
    split = [lax.axis_size(axis) for axis in form.holders]
    by_holder = shards.reshape(*split, stack.on_rank, *local)
    return by_holder.transpose(_order_by_dimension(stack)).reshape(stack.on_rank, *form.padded)


def _lay_back(stack: Stack, matrices: jax.Array, local: Sequence[int]) -> jax.Array:
    """Returns shards of all matrices from those of this rank."""
    form = stack.form
    split = [
        n
        for axes, shard in zip(form.over, local, strict=True)
        for n in (*(lax.axis_size(axis) for axis in axes), shard)
    ]
    by_dimension = matrices.reshape(stack.on_rank, *split)
    shards = by_dimension.transpose(np.argsort(_order_by_dimension(stack))).reshape(-1, *local)
    shards = _exchange(stack, shards)
    return lax.all_gather(shards, form.copies, tiled=True) if form.copies else shards


def _exchange(stack: Stack, shards: jax.Array) -> jax.Array:
    """Returns what the holders of a stack's matrices send this rank, an equal part of the shards each."""
    if not stack.form.holders:
        return shards
    # The barrier keeps XLA's CPU compiler from sending what was joined part by part, in layouts that differ.
    together = lax.optimization_barrier(shards)
    return lax.all_to_all(together, stack.form.holders, 0, 0, tiled=True)


def _order_by_dimension(stack: Stack) -> list[int]:
    """Returns the order in which [holders ..., matrix, shard's dimensions ...] has each dimension whole: [matrix, a
    dimension's holders, its shard, ...].
    """
    over = stack.form.over
    matrix = len(stack.form.holders)
    order = [matrix]
    holder = 0
    for dimension, axes in enumerate(over):
        order += [*range(holder, holder + len(axes)), matrix + 1 + dimension]
        holder += len(axes)
    return order
