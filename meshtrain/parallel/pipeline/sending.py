"""Runs a table that says when a chunk's weights are gathered over data and its gradient is reduced: G and R, beside the
clocks.

    clocks     0 ..             16 ..                  158 ..           174 ..
    stages     F of chunk 0     F of chunk 1    ...    B of chunk 6     B of chunk 5    ...
    over data   ╰─ G1 ─ ─ ─╯     ╰─ G2 ─ ─ ─╯           ╰─ R7 ─ ─ ─╯     ╰─ R6 ─ ─ ─╯

Both start when a section does (see `schedule.phases`), and are waited for at its end. Gathered weights are written into
those of all chunks then, a reduced gradient beside those of the others. Sections that are alike are one loop, so of
what travels one chunk is there twice. Beside the first gradient travels the head's, which is complete by then.
"""

import copy
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from meshtrain import xla
from meshtrain.compat import varying
from meshtrain.mesh import PIPELINE
from meshtrain.parallel.pipeline.buffers import after, empty, write
from meshtrain.parallel.pipeline.clock import Carry, Execution, rows_of
from meshtrain.parallel.zero import EarlyReduced, Weights
from meshtrain.schedule.phases import ClockSection, sections
from meshtrain.schedule.table import G, R

Tree = Any


class SendState(NamedTuple):
    """The state carried from section to section."""

    carry: Carry
    blocks: Weights  # of all chunks, gathered as far as they have been
    # [chunks, layers, ..]: the gradients of the blocks that have been reduced
    reduced: Tree


class Sending:
    """One execution of a table with G and R, whose stage comes with shards of the blocks."""

    def __init__(self, execution: Execution) -> None:
        self.execution = execution
        self.table = execution.table
        self.sends = self.table.sends
        self.zero = execution.stage.model.zero
        self.place_of = execution.stage.place_of
        self.shards = execution.stage.blocks

    def run(self) -> Carry:
        """The carry after all clocks, its gradients of blocks and head as `zero.reduce_early` leaves them."""
        blocks = empty((), jax.eval_shape(self.zero.gather_layers, self.shards))
        for chunk in np.flatnonzero(self.sends[G] < 0):
            blocks = self.written(blocks, self.gathered(self.shards, chunk), chunk)
        carry = self.replace_blocks(blocks).start()
        like = jax.eval_shape(
            lambda blocks: self.reduced(self.slice_chunk(blocks, 0)), carry.blocks
        )
        state = SendState(carry, blocks, empty((self.table.chunks,), like))
        head = None
        for section in sections(self.table, self.execution.compiled.phases):
            if section.reduces and head is None:
                head = self.reduced(
                    {"head": after(state.carry.edge["head"], state.carry.gx)}
                )
            state = self.run_section(section, state)
        carry = self.replace_blocks(state.blocks).end(state.carry)
        reduced = state.reduced
        # XLA joins what is sent at one moment, and would have what travels wait for the embedding.
        edge = after(carry.edge, carry.blocks)
        for chunk in np.flatnonzero(self.sends[R] < 0):
            reduced = write(
                reduced,
                self.reduced(self.slice_chunk(carry.blocks, chunk)),
                jnp.int32(chunk),
            )
        stacked = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), reduced)
        stacked = {
            stack: self.move_to_places(stack, tree) for stack, tree in stacked.items()
        }
        return carry._replace(blocks=stacked, edge={**edge, **(head or {})})

    def run_section(self, section: ClockSection, state: SendState) -> SendState:
        later = np.arange(section.repeats) * section.clocks
        rows = [
            rows_of(self.execution.compiled, phase, later) for phase in section.phases
        ]
        chunks = [
            jnp.asarray(sent or [0] * section.repeats, jnp.int32)
            for sent in (section.gathers, section.reduces)
        ]
        turn = partial(self.turn, section)
        if section.repeats > 1:
            return lax.scan(turn, state, (rows, *chunks))[0]
        return turn(state, jax.tree.map(lambda a: a[0], (rows, *chunks)))[0]

    def turn(
        self, section: ClockSection, state: SendState, at: tuple[Any, Array, Array]
    ) -> tuple[SendState, None]:
        """A section's clocks once, with the chunks that travel beside them."""
        (carry, blocks, reduced) = state
        (rows, gathers, reduces) = at
        if section.gathers:
            weights = self.gathered(
                after(self.shards, blocks, carry.forward_received), gathers
            )
        if section.reduces:
            complete = self.slice_chunk(carry.blocks, reduces)
            gradients = self.reduced(after(complete, carry.gx))
            # Read before the clocks add to the others, or XLA would copy all chunks to have both.
            carry = carry._replace(blocks=after(carry.blocks, complete))
        carry = self.replace_blocks(blocks).run(section.phases, carry, rows)
        if section.gathers:
            # Something has to stand behind the loop that needs its result, else XLA waits before it (see `after`).
            carry = carry._replace(
                forward_received=jnp.where(gathers >= 0, carry.forward_received, 0)
            )
            blocks = self.written(
                blocks, after(weights, carry.forward_received), gathers
            )
        if section.reduces:
            over = varying(carry.gx)
            late = jax.tree.map(
                lambda g: after(g, carry.gx) if varying(g) >= over else g, gradients
            )
            reduced = write(reduced, late, reduces)
            # and what comes next after it: gradients of the other chunks, and of the embedding as far as types allow
            gx = after(
                carry.gx, [g for g in jax.tree.leaves(gradients) if varying(g) <= over]
            )
            carry = carry._replace(blocks=after(carry.blocks, gradients), gx=gx)
        return SendState(carry, blocks, reduced), None

    def replace_blocks(self, blocks: Weights) -> Execution:
        """Returns the execution over other weights of the blocks."""
        execution = copy.copy(self.execution)
        execution.stage = copy.copy(execution.stage)
        execution.stage.blocks = blocks
        return execution

    @jax.named_scope(xla.ZERO)
    def gathered(self, shards: Weights, chunk: Any) -> Weights:
        return self.zero.gather_layers(self.slice_chunk(shards, chunk))

    @jax.named_scope(xla.ZERO)
    def reduced(self, gradients: Tree) -> Tree:
        return self.zero.reduce_early(gradients)

    def slice_chunk(self, stacks: Any, chunk: Any) -> Any:
        """Returns the layers of a chunk, of arrays [layers of all chunks, ..] by their stacks."""
        if isinstance(stacks, Weights):
            return Weights(*(self.slice_chunk(tree, chunk) for tree in stacks))

        def own(stack: str, a: Array) -> Array:
            if stack in self.place_of:
                return _taken(a, self.slots(self.place_of[stack], chunk))
            return self.slots(a, chunk)

        return {
            stack: jax.tree.map(partial(own, stack), tree)
            for stack, tree in stacks.items()
        }

    def slots(self, a: Array, chunk: Any) -> Array:
        """Returns what is in the slots of a chunk, of an array [slots of all chunks, ..]."""
        n = len(a) // self.table.chunks
        return lax.dynamic_slice_in_dim(a, chunk * n, n)

    def move_to_places(self, stack: str, tree: Tree) -> Tree:
        """Returns reduced gradients [slots of all chunks, ..] in the places of the layers."""
        if stack not in self.place_of:
            return tree
        slot_of = jnp.asarray(self.execution.stage.model.layout.stacks[stack].slot_of)
        here = slot_of[lax.axis_index(PIPELINE)]

        def moved(g: Any) -> Any:
            if isinstance(g, EarlyReduced):
                return g._replace(shard=_taken(g.shard, here))
            return _taken(g, here)

        return jax.tree.map(moved, tree, is_leaf=lambda g: isinstance(g, EarlyReduced))

    def written(self, blocks: Weights, weights: Weights, chunk: Any) -> Weights:
        """`blocks` with the `weights` of a chunk's layers."""

        def place(stack: str, a: Array, b: Array) -> Array:
            if stack in self.place_of:
                return a.at[self.slots(self.place_of[stack], chunk)].set(b, mode="drop")
            return lax.dynamic_update_slice_in_dim(a, b, chunk * len(b), axis=0)

        return Weights(
            *(
                {
                    stack: jax.tree.map(partial(place, stack), old[stack], new[stack])
                    for stack in old
                }
                for old, new in zip(blocks, weights, strict=True)
            )
        )


def _taken(a: Array, at: Array) -> Array:
    """Returns the entries `at` of the first axis, zeros one past the last."""
    return a.at[at].get(mode="fill", fill_value=0)
