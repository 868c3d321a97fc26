"""Expert parallelism: the experts of a layer lie over the mesh axis `expert`, and rows travel to those that they chose.

Where `mesh.expert` asks for more ranks than data has, they lie over the axis `context` too.

    all_gather    all rows of the P ranks to each, whose experts compute those that chose them; the sums come back by a
                  reduce-scatter
                  sent by a rank, of n tokens of D numbers:   (P - 1) n D        each way
    all_to_all    each row to the ranks of its experts, and back (GShard: Lepikhin et al. 2020, section 3)
                  of n top_k rows in an even load:            (P - 1) / P n top_k D capacity     each way
      nodes       with `ranks_per_node`: each row once to each of M nodes, to the rank of the same number, and from
                  there to its experts; sums of a node come back (DeepSeek-V3, section 3.2.2)
                  between nodes:                              (M - 1) n D        each way
                  within one of L ranks:                      (L - 1) / L n top_k D capacity     each way

    rank of the      0 1 2 3 │ 0 1 2 3         gathered over the ranks of one number: 0 and 0, 1 and 1, ...
    node             node 0  │ node 1          then all_to_all among 0 1 2 3

Shapes are static: a rank has `room` for so many rows, 1.25 times an even load or as a capacity says. With a capacity,
rows beyond are dropped, and counted. Without one they take further rounds, of which all P ranks count as many as the
fullest needs: one where loads are even, at most about P. The first stands in the layer, so that its activations may be
kept and its messages hidden; the others are a loop (`parallel.rounds`).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshtrain.config import Config
from meshtrain.config.follow import expert_room, runs_table
from meshtrain.hlo.module import EXPERT_MESSAGES
from meshtrain.mesh import TENSOR
from meshtrain.model.experts import Compute
from meshtrain.model.slots import collected, inverse_of, ranks_within, spread
from meshtrain.parallel.context import ContextCollectives
from meshtrain.parallel.placement import expert_axes, expert_nodes, expert_ranks, table
from meshtrain.parallel.rounds import add_rounds
from meshtrain.parallel.tensor import SEQUENCE

# (number, rows, weights of the choices) -> what the experts give for the rows, and pairs for which there is no room
Round = Callable[..., tuple[jax.Array, jax.Array]]


class ExpertCollectives(ContextCollectives):
    """Collectives of a model with experts, on a mesh with or without context parallelism."""

    def __init__(self, config: Config, platform: str) -> None:
        super().__init__(config, platform)
        self.experts = config.parallel.experts
        self.expert_axes = expert_axes(config)
        self.expert_ranks = expert_ranks(config)
        self.nodes = expert_nodes(config)
        by_node = np.arange(self.expert_ranks).reshape(self.nodes, -1)
        self.of_node = by_node.tolist() if self.nodes > 1 else None
        self.of_number = by_node.T.tolist()
        self.apart = runs_table(config) and table(config).split

    @jax.named_scope(EXPERT_MESSAGES)
    def dispatch(
        self,
        compute: Compute,
        experts: int,
        rows: jax.Array,
        chosen: jax.Array,
        weights: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        here = experts // self.expert_ranks
        ranks = self.expert_ranks // self.nodes
        tokens, top_k = chosen.shape
        room = expert_room(self.experts, ranks, here, tokens, top_k, self.nodes)
        rounds: jax.Array | int = 1
        if self.expert_ranks == 1:
            y, dropped = compute(rows, chosen, weights, room)
        else:
            sends = self.experts.dispatch == "all_to_all"
            share = self.send_chosen_rows if sends else self.share_all_rows
            if self.nodes > 1:
                share = self.send_by_nodes
            one, load = share(compute, here, room, chosen)
            y, dropped = one(0, rows, weights)
            if self.experts.capacity is None:
                rounds = -(-load // (room // ranks if sends else room))
                y = add_rounds(
                    y, lambda *of: one(*of)[0], rounds, self.apart, rows, weights
                )
        if self.experts.capacity is not None:
            return y, dropped
        return y, rounds * jnp.sum(chosen[:, 0] < experts)

    def expert_collectives(self) -> ContextCollectives:
        if TENSOR in self.expert_axes:
            return PartsOfSequences(self)
        return self

    def share_all_rows(
        self,
        compute: Compute,
        here: int,
        room: int,
        chosen_NK: jax.Array,
    ) -> tuple[Round, jax.Array]:
        """Gathers all rows on all ranks, of which this one has `here` experts: returns a round of `room` of those that
        chose them, and the rows of the fullest rank.

        Dropped is what came to it and had no room.
        """
        axes = self.expert_axes
        chosen = lax.all_gather(chosen_NK, axes, tiled=True)
        loads = jnp.bincount(chosen.reshape(-1) // here, length=self.expert_ranks + 1)
        own = chosen - lax.axis_index(axes) * here
        own = jnp.where((own >= 0) & (own < here), own, here)

        def one(number: Any, *local: jax.Array) -> tuple[jax.Array, jax.Array]:
            rows, weights = (lax.all_gather(x, axes, tiled=True) for x in local)
            y, dropped = compute(rows, own, weights, room, number * room)
            return lax.psum_scatter(y, axes, scatter_dimension=0, tiled=True), dropped

        return one, loads[: self.expert_ranks].max()

    def send_by_nodes(
        self,
        compute: Compute,
        here: int,
        room: int,
        chosen_NK: jax.Array,
    ) -> tuple[Round, jax.Array]:
        """Gathers the rows of the ranks of this number in all nodes, and sends those to the ranks of their experts that
        chose any of this node: returns what `send_chosen_rows` does.
        """
        axes = self.expert_axes

        def gathered(x: jax.Array) -> jax.Array:
            return lax.all_gather(x, axes, axis_index_groups=self.of_number, tiled=True)

        of_node = here * len(self.of_number)
        own = (
            gathered(chosen_NK) - lax.axis_index(axes) // len(self.of_number) * of_node
        )
        own = jnp.where((own >= 0) & (own < of_node), own, of_node)
        send, most = self.send_chosen_rows(compute, here, room, own)

        def one(number: Any, *local: jax.Array) -> tuple[jax.Array, jax.Array]:
            y, dropped = send(number, *map(gathered, local))
            y = lax.psum_scatter(y, axes, axis_index_groups=self.of_number, tiled=True)
            return y, dropped

        return one, most

    def send_chosen_rows(
        self,
        compute: Compute,
        here: int,
        room: int,
        chosen_NK: jax.Array,
    ) -> tuple[Round, jax.Array]:
        """Sends each row to the ranks of its experts: returns a round, in which each sends an equal part of `room` to
        each, and the most rows that one sends to another.

        Dropped is what this rank could not send.
        """
        axes = self.expert_axes
        ranks = self.expert_ranks // self.nodes
        width = chosen_NK.shape[1]
        pairs = chosen_NK.reshape(-1)
        each = room // ranks  # for what one rank sends to another
        # The rank of each pair's expert (`ranks`: none), and its place in what is sent there.
        to = pairs // here
        place, loads = ranks_within(to, ranks)

        def exchanged(x: jax.Array) -> jax.Array:
            return lax.all_to_all(
                x, axes, 0, 0, axis_index_groups=self.of_node, tiled=True
            )

        def one(
            number: Any, rows: jax.Array, weights: jax.Array
        ) -> tuple[jax.Array, jax.Array]:
            at = place - number * each
            places = jnp.where(
                (to < ranks) & (at >= 0) & (at < each), to * each + at, room
            )
            sent = inverse_of(places, room)
            places_NK = places.reshape(chosen_NK.shape)
            rows = exchanged(spread(rows, sent // width, places_NK))
            weights = exchanged(
                spread(weights.reshape(-1, 1), sent, places.reshape(-1, 1))
            )
            chosen = jnp.take(
                jnp.where(to < ranks, pairs % here, here),
                sent,
                mode="fill",
                fill_value=here,
            )
            y, _ = compute(rows, exchanged(chosen)[:, None], weights, room)
            dropped = jnp.sum((to < ranks) & (at >= each))
            return collected(exchanged(y), sent // width, places_NK), dropped

        return one, lax.pmax(loads.max(), axes)


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
        return lax.dynamic_slice_in_dim(
            x_BT, lax.axis_index(TENSOR) * length, length, SEQUENCE
        )
