"""Rows to the slots of their experts and back.

    slots     0 0 0 · │ 1 1 · · │ 1 1 1 1 │ 3 · · ·        blocks of equal length, each of one expert; ·: a row of zeros

Suffixes: N tokens, K chosen experts of each, S slots.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from meshtrain.compat import vary, varying
from meshtrain.model.weights import EXPERT_BLOCK


class ExpertSlots(NamedTuple):
    """The places of each expert's rows."""

    # int32 [N, K]: the slot of each pair of a token and an expert; the number of slots: none
    places: jax.Array
    pairs: jax.Array  # int32 [S]: the pair in each slot; the number of pairs: none
    expert_of_block: jax.Array  # int32 [S / block]
    blocks: jax.Array  # int32: how many are in use
    dropped: jax.Array  # int32: pairs for which there was no room


def slots_of(
    chosen_NK: jax.Array, experts: int, room: int, skipped: jax.Array | int = 0
) -> ExpertSlots:
    """Assigns slots to the pairs whose expert is one of `experts`, in their order, to at most `room` of them behind the
    first `skipped`.
    """
    chosen = chosen_NK.reshape(-1)
    pairs = chosen_NK.size
    dropped = jnp.zeros((), jnp.int32)
    if room < pairs:
        here = chosen < experts
        number = jnp.cumsum(here) - skipped
        chosen = jnp.where((number > 0) & (number <= room), chosen, experts)
        dropped = jnp.sum(here & (number > room))
    block = min(
        EXPERT_BLOCK, max(16, 1 << max(1, room // experts // 2).bit_length() - 1)
    )
    count = -(-(room + experts * (block - 1)) // block)
    within, sizes = ranks_within(chosen, experts)
    ends = jnp.cumsum(-(-sizes // block))
    starts = jnp.concatenate([jnp.zeros(1, ends.dtype), ends]) * block
    places = jnp.where(chosen < experts, starts[chosen] + within, count * block)
    expert_of_block = jnp.minimum(
        jnp.searchsorted(ends, jnp.arange(count), side="right"), experts - 1
    )
    inverse = inverse_of(places, count * block)
    return ExpertSlots(
        places.reshape(chosen_NK.shape),
        inverse,
        expert_of_block.astype(jnp.int32),
        ends[-1].astype(jnp.int32),
        dropped,
    )


def ranks_within(group_M: jax.Array, groups: int) -> tuple[jax.Array, jax.Array]:
    """Counts, for each element, the earlier ones of the same group; returns the groups' sizes too. The number of groups
    means none.
    """
    order = jnp.argsort(group_M, stable=True)
    sizes = jnp.bincount(group_M, length=groups + 1)
    first = jnp.cumsum(sizes) - sizes
    sorted_group = group_M[order]
    in_order = jnp.arange(len(group_M)) - first[sorted_group]
    return jnp.zeros_like(group_M).at[order].set(
        in_order.astype(group_M.dtype), unique_indices=True
    ), sizes[:groups]


def inverse_of(places_M: jax.Array, slots: int) -> jax.Array:
    """Returns the content of each slot; the length of `places` for an empty slot."""
    empty = vary(jnp.full(slots, len(places_M), jnp.int32), varying(places_M))
    return empty.at[places_M].set(
        jnp.arange(len(places_M), dtype=jnp.int32), mode="drop", unique_indices=True
    )


@jax.custom_vjp
def spread(x: jax.Array, source_S: jax.Array, places_NK: jax.Array) -> jax.Array:
    """x [N, ...] to its slots [S, ...], zeros where `source` is N. Its transpose gathers too: no sum is scattered."""
    return taken(x, source_S)


def taken(x: jax.Array, index: jax.Array) -> jax.Array:
    return jnp.take(x, index, axis=0, mode="fill", fill_value=0)


def summed(slots: jax.Array, places_NK: jax.Array) -> jax.Array:
    """The sum over K of the slots at `places`, in their order."""
    total = sum(
        taken(slots, places_NK[:, k]).astype(jnp.float32)
        for k in range(places_NK.shape[1])
    )
    return jnp.asarray(total).astype(slots.dtype)


spread.defvjp(
    lambda x, source, places: (taken(x, source), places),
    lambda places, g: (summed(g, places), None, None),
)


@jax.custom_vjp
def collected(slots: jax.Array, source_S: jax.Array, places_NK: jax.Array) -> jax.Array:
    """The transpose of `spread`: slots [S, ...] to the sum over what each of N has there."""
    return summed(slots, places_NK)


collected.defvjp(
    lambda slots, source, places: (summed(slots, places), source),
    lambda source, g: (taken(g, source), None, None),
)
