"""Expert parallelism: the experts of a layer lie over the mesh axis `expert`, and rows travel to those that they chose.

    all_gather    all rows of the P ranks to each, whose experts compute those that chose them; a reduce-scatter brings the sums back
                  sent by a rank, of n tokens of D numbers:   (P - 1) n D        each way
    all_to_all    each row to the ranks of its experts, and back (GShard: Lepikhin et al. 2020, section 3)
                  of n top_k rows in an even load:            (P - 1) / P n top_k D capacity     each way

Shapes are static: a rank has `room` for so many rows. Without a capacity these are all that could come, so that nothing is dropped; then
all_to_all would send more than all_gather. With one, what is more than `capacity` times an even load is dropped, and counted.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

from meshtrain.config.schema import ExpertsConfig
from meshtrain.mesh import EXPERT
from meshtrain.model.experts import Compute, collected, inverse_of, ranks_within, spread


def dispatched(
    config: ExpertsConfig, ranks: int, compute: Compute, experts: int, rows_ND: jax.Array, chosen_NK: jax.Array, weights_NK: jax.Array
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """What the chosen ones of all `experts` make of this rank's rows [N, D], and the pairs of a row and an expert that this rank dropped."""
    if ranks > 1:
        by = by_all_to_all if config.dispatch == "all_to_all" else by_all_gather
        return by(compute, experts, config.capacity, rows_ND, chosen_NK, weights_NK)
    pairs = chosen_NK.size
    room = pairs if config.capacity is None else min(pairs, math.ceil(config.capacity * pairs))
    return compute(rows_ND, chosen_NK, weights_NK, room)


def by_all_gather(
    compute: Compute,
    experts: int,
    capacity: float | None,
    rows_ND: jax.Array,
    chosen_NK: jax.Array,
    weights_NK: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """All rows to all ranks. Dropped is what came to this rank and had no room."""
    ranks = lax.axis_size(EXPERT)
    here, pairs = experts // ranks, chosen_NK.size
    rows, chosen, weights = (lax.all_gather(x, EXPERT, tiled=True) for x in (rows_ND, chosen_NK, weights_NK))
    chosen = chosen - lax.axis_index(EXPERT) * here
    most = ranks * len(rows_ND) * min(chosen.shape[1], here)
    room = most if capacity is None else min(most, math.ceil(capacity * pairs))
    y, dropped = compute(rows, jnp.where((chosen >= 0) & (chosen < here), chosen, here), weights, room)
    return lax.psum_scatter(y, EXPERT, scatter_dimension=0, tiled=True), dropped


def by_all_to_all(
    compute: Compute,
    experts: int,
    capacity: float | None,
    rows_ND: jax.Array,
    chosen_NK: jax.Array,
    weights_NK: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Each row to the ranks of its experts. Dropped is what this rank could not send."""
    ranks, width = lax.axis_size(EXPERT), chosen_NK.shape[1]
    here, pairs = experts // ranks, chosen_NK.reshape(-1)
    most = len(rows_ND) * min(width, here)
    room = most if capacity is None else min(most, math.ceil(capacity * len(pairs) / ranks))
    # The rank of each pair's expert (`ranks`: none), and its place in what is sent there.
    to = pairs // here
    place, _ = ranks_within(to, ranks)
    places = jnp.where((to < ranks) & (place < room), to * room + place, ranks * room)
    sent = inverse_of(places, ranks * room)
    places_NK = places.reshape(chosen_NK.shape)

    def exchanged(x: jax.Array) -> jax.Array:
        return lax.all_to_all(x, EXPERT, split_axis=0, concat_axis=0, tiled=True)

    rows = exchanged(spread(rows_ND, sent // width, places_NK))
    weights = exchanged(spread(weights_NK.reshape(-1, 1), sent, places.reshape(-1, 1)))
    chosen = jnp.take(jnp.where(to < ranks, pairs % here, here), sent, mode="fill", fill_value=here)
    y, _ = compute(rows, exchanged(chosen)[:, None], weights, ranks * room)
    return collected(exchanged(y), sent // width, places_NK), jnp.sum((to < ranks) & (place >= room))
