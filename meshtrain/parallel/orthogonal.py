"""Muon over a mesh: each matrix is orthogonalized by one rank (see `stacks`).

    momentum, in shards                    whole matrices, of a rank          updates, in shards
    layers x [embed/data, heads/tensor] ──all-to-all──► Newton-Schulz ──all-to-all──► as they lay

Both ways a rank sends its shards once, whatever the number of iterations. The way there moves numbers alone, so its
transpose is the way back. Ranks that have copies of a shard take matrices apart without a message, and gather what
becomes of them.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from meshtrain.optimizers import NEWTON_SCHULZ, NEWTON_SCHULZ_STEPS
from meshtrain.parallel.layout import Layout, shard_spec
from meshtrain.parallel.placement import Placed
from meshtrain.parallel.stacks import Stack, batch_dims, make_stacks

Arrays = dict[str, jax.Array]


def orthogonalizer(
    layout: Layout, weights: Sequence[Placed], eps: float
) -> Callable[[Arrays], Arrays]:
    """Returns the function that orthogonalizes arrays, which lie as the weights whose names they have."""
    if not weights:
        return dict
    stacks = make_stacks(layout.config.mesh, weights)
    specs = {weight.name: shard_spec(weight) for weight in weights}

    def run(arrays: Arrays) -> Arrays:
        found: Arrays = {}
        for stack in stacks:
            members = {weight.name: arrays[weight.name] for weight, _ in stack.members}
            found |= _orthogonalize(stack, members, eps)
        return found

    # JAX cannot know that what is gathered of copies is the same on all of them, so it does not check.
    return jax.shard_map(
        run, mesh=layout.mesh, in_specs=(specs,), out_specs=specs, check_vma=False
    )


def _orthogonalize(stack: Stack, arrays: Arrays, eps: float) -> Arrays:
    """Returns the weights of a stack on a device, orthogonalized; inside shard_map."""
    copies = stack.form.copies
    shards, split = jax.vjp(lambda arrays: _join(stack, arrays), arrays)
    if copies:
        each = len(shards) // lax.axis_size(copies)
        shards = lax.dynamic_slice_in_dim(shards, lax.axis_index(copies) * each, each)
    whole, lay_back = jax.vjp(lambda shards: _lay_out(stack, shards), shards)
    (shards,) = lay_back(_iterate(stack, whole, eps))
    if copies:
        shards = lax.all_gather(shards, copies, tiled=True)
    return split(shards)[0]


def _join(stack: Stack, arrays: Arrays) -> jax.Array:
    """Returns the shards of all matrices of a stack, filled up so that ranks take equally many."""
    turned = []
    for weight, dims in stack.members:
        x = arrays[weight.name].transpose(*batch_dims(weight, dims), *dims)
        turned.append(x.reshape(-1, *x.shape[-len(dims) :]))
    joined = jnp.concatenate(turned)
    fill = stack.ranks * stack.on_rank - len(joined)
    return jnp.pad(joined, [(0, fill), *[(0, 0)] * (joined.ndim - 1)])


def _lay_out(stack: Stack, shards: jax.Array) -> jax.Array:
    """Returns this rank's matrices, whole and without padding, from shards of all of them."""
    form = stack.form
    if form.holders:
        # The barrier keeps XLA's CPU compiler from sending what was joined part by part, in layouts that differ.
        shards = lax.all_to_all(
            lax.optimization_barrier(shards), form.holders, 0, 0, tiled=True
        )
    ranks = [lax.axis_size(axis) for axis in form.holders]
    by_holder = shards.reshape(*ranks, stack.on_rank, *shards.shape[1:])
    # [holders ..., matrix, shard's dimensions ...] -> [matrix, a dimension's holders, its shard, ...]
    held = [dimension for dimension, axes in enumerate(form.over) for _ in axes]
    keys = [*held, -1, *range(len(form.over))]
    by_dimension = by_holder.transpose(sorted(range(len(keys)), key=keys.__getitem__))
    whole = by_dimension.reshape(stack.on_rank, *form.padded)
    return whole[(slice(None), *map(slice, form.sizes))]


def _iterate(stack: Stack, matrices: jax.Array, eps: float) -> jax.Array:
    """Returns matrices with their singular values moved towards 1 (Jordan et al. 2024)."""
    dims = range(-len(stack.form.sizes), 0)
    rows = stack.form.rows
    sides = MuonDimensionNumbers(dims[:rows], dims[rows:])
    # Without momentum, which comes before matrices travel.
    muon = scale_by_muon(
        NEWTON_SCHULZ,
        NEWTON_SCHULZ_STEPS,
        0.0,
        eps,
        nesterov=False,
        weight_dimension_numbers=sides,
    )
    iterate = lambda x: muon.update(x, muon.init(x))[0]
    # XLA sums up the numbers of a matrix in the order in which it does for a layer's weight: one matrix, or experts.
    experts = "experts" in stack.members[0][0].axes
    if experts:
        return iterate(matrices)
    return jax.vmap(iterate)(matrices)
