"""Expert parallelism: the experts of a layer lie over the mesh axis `expert`, and rows travel to those that they chose.

    all_gather    all rows of the P ranks to each, whose experts compute those that chose them; the sums come back by a
                  reduce-scatter
                  sent by a rank, of n tokens of D numbers:   (P - 1) n D        each way
    all_to_all    each row to the ranks of its experts, and back (GShard: Lepikhin et al. 2020, section 3)
                  of n top_k rows in an even load:            (P - 1) / P n top_k D capacity     each way

Shapes are static: a rank has `room` for so many rows. Without a capacity these are all that could come, so that nothing
is dropped; then all_to_all would send more than all_gather. With one, what is more than `capacity` times an even load
is dropped, and counted.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshtrain.config import Config
from meshtrain.config.follow import expert_room
from meshtrain.mesh import EXPERT, TENSOR
from meshtrain.model.experts import Compute
from meshtrain.model.slots import collected, inverse_of, ranks_within, spread
from meshtrain.parallel.context import ContextCollectives
from meshtrain.parallel.placement import expert_axes, expert_ranks
from meshtrain.parallel.tensor import SEQUENCE


class ExpertCollectives(ContextCollectives):
    """Collectives of a model with experts, on a mesh with or without context parallelism."""

    def __init__(self, config: Config, platform: str) -> None:
        super().__init__(config, platform)
        self.experts = config.parallel.experts
        self.expert_axes = expert_axes(config)
        self.expert_ranks = expert_ranks(config)

    def dispatch(
        self, compute: Any, experts: int, rows: jax.Array, chosen: jax.Array, weights: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        here = experts // self.expert_ranks
        room = expert_room(self.experts, self.expert_ranks, here, *chosen.shape)
        if self.expert_ranks == 1:
            return compute(rows, chosen, weights, room)
        sends = self.experts.dispatch == "all_to_all"
        share = self.send_chosen_rows if sends else self.share_all_rows
        return share(compute, here, room, rows, chosen, weights)

    def expert_collectives(self) -> ContextCollectives:
        return PartsOfSequences(self) if TENSOR in self.expert_axes else self

    def share_all_rows(
        self,
        compute: Compute,
        here: int,
        room: int,
        rows_ND: jax.Array,
        chosen_NK: jax.Array,
        weights_NK: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        """Gathers all rows on all ranks, of which this one has `here` experts.

        Dropped is what came to it and had no room.
        """
        rows, chosen, weights = (
            lax.all_gather(x, EXPERT, tiled=True) for x in (rows_ND, chosen_NK, weights_NK)
        )
        chosen = chosen - lax.axis_index(EXPERT) * here
        y, dropped = compute(
            rows, jnp.where((chosen >= 0) & (chosen < here), chosen, here), weights, room
        )
        return lax.psum_scatter(y, EXPERT, scatter_dimension=0, tiled=True), dropped

    def send_chosen_rows(
        self,
        compute: Compute,
        here: int,
        room: int,
        rows_ND: jax.Array,
        chosen_NK: jax.Array,
        weights_NK: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        """Sends each row to the ranks of its experts. Dropped is what this rank could not send."""
        axes = self.expert_axes
        ranks = self.expert_ranks
        width = chosen_NK.shape[1]
        pairs = chosen_NK.reshape(-1)
        each = room // ranks  # for what one rank sends to another
        # The rank of each pair's expert (`ranks`: none), and its place in what is sent there.
        to = pairs // here
        place, _ = ranks_within(to, ranks)
        places = jnp.where((to < ranks) & (place < each), to * each + place, room)
        sent = inverse_of(places, room)
        places_NK = places.reshape(chosen_NK.shape)

        def exchanged(x: jax.Array) -> jax.Array:
            return lax.all_to_all(x, axes, split_axis=0, concat_axis=0, tiled=True)

        rows = exchanged(spread(rows_ND, sent // width, places_NK))
        weights = exchanged(spread(weights_NK.reshape(-1, 1), sent, places.reshape(-1, 1)))
        chosen = jnp.take(
            jnp.where(to < ranks, pairs % here, here), sent, mode="fill", fill_value=here
        )
        y, _ = compute(rows, exchanged(chosen)[:, None], weights, room)
        return collected(exchanged(y), sent // width, places_NK), jnp.sum(
            (to < ranks) & (place >= each)
        )


class PartsOfSequences(ExpertCollectives):
    """Collectives for experts that lie over tensor too: nothing is gathered and summed over tensor, since a rank's
    router has its own part of the sequence.
    """

    def __init__(self, of: ExpertCollectives) -> None:
        vars(self).update(vars(of))

    def leave(self, y_BTD: jax.Array) -> jax.Array:
        return y_BTD

    def share(self, weight: jax.Array) -> jax.Array:
        return weight

    def once(self, x: jax.Array) -> jax.Array:
        return x

    def row_sum(self, x: jax.Array) -> jax.Array:
        return super().row_sum(lax.psum(x, TENSOR))

    def own_part(self, x_BT: jax.Array) -> jax.Array:
        length = x_BT.shape[SEQUENCE] // self.ranks
        return lax.dynamic_slice_in_dim(x_BT, lax.axis_index(TENSOR) * length, length, SEQUENCE)
