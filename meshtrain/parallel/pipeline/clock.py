"""One execution of a table inside shard_map: what goes from clock to clock, the ops of a clock, what travels under
what.

    clock t      F  H  B  W
                 ╰──y──►
    clock t + 1  F  H  B  W
               ──►  the gx of clock t

An activation leaves after F and is waited for after B. A cotangent leaves at the start of the next clock that has a B,
and is waited for after its F. A table of pairs has F and B in one loop, and sends what both made behind it.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from meshtrain import xla
from meshtrain.compat import vary, varying
from meshtrain.inputs import inputs
from meshtrain.mesh import PIPELINE
from meshtrain.parallel.forward import LabelLosses, Totals, added
from meshtrain.parallel.pipeline.buffers import empty, read, write
from meshtrain.parallel.pipeline.paired import Pair, PairSlots, run_pair
from meshtrain.parallel.pipeline.stage import Slot, Stage
from meshtrain.schedule.buffers import Executed
from meshtrain.schedule.phases import Ops, Phase
from meshtrain.schedule.table import B, F, Table

Tree = Any
Row = dict[
    str, Any
]  # this stage's entry of every array of Buffers, for one clock; `arrivals`: (active, place) of each
Messages = dict[int, Array]  # by the number of the arrival


class Carry(NamedTuple):
    """The state carried from clock to clock: every buffer's first axis counts its places."""

    forward_received: Array
    backward_received: Array
    embedded: Array  # the embedding that the next F on virtual stage 0 takes
    gx: Array  # the cotangent that the last B made, not yet sent
    stash: Tree  # [places, layers, ..]: of each layer (its input, residuals)
    w_residuals: Tree  # [places, layers, ..]: what I leaves for W
    loss: Array | LabelLosses  # summed; of a forward alone those of all labels, [M, b, T] each
    measured: dict[str, Array]  # beside the loss, summed
    blocks: Tree  # sums of gradients; None in a forward alone
    edge: Tree  # those of embedding and head


def rows_of(buffers: Executed, phase: Phase, later: np.ndarray | int = 0) -> list[Row]:
    """Returns this stage's instructions of a phase, for each loop of its body: arrays [repeats, clocks].

    With `later`, int [n], those of n phases that begin so many clocks later: [n, repeats, clocks].
    """
    rows = []
    first = np.asarray(later)[..., None, None] + phase.first
    for clocks, _ in phase.body:
        periods = np.arange(phase.repeats)[:, None] * phase.period
        rows.append(row_of(buffers, first + periods + np.arange(clocks)))
        first += clocks
    return rows


def row_of(buffers: Executed, clocks: np.ndarray) -> Row:
    """Returns this stage's instructions of the given clocks."""
    stage = lax.axis_index(PIPELINE)

    def take_stage(array: np.ndarray) -> Array:
        chosen = jnp.asarray(array[clocks])
        return (
            lax.dynamic_index_in_dim(chosen, stage, clocks.ndim, False)
            if array.ndim == 2
            else chosen
        )

    arrays = {name: array for name, array in vars(buffers).items() if isinstance(array, np.ndarray)}
    row: Row = {name: take_stage(array) for name, array in arrays.items()}
    return row | {
        "arrivals": [(take_stage(a.active), take_stage(a.place)) for a in buffers.arrivals]
    }


class Execution:
    """One execution of the table."""

    def __init__(self, table: Table, buffers: Executed, stage: Stage, seed: Array) -> None:
        self.table = table
        self.buffers = buffers
        self.stage = stage
        self.seed = seed
        self.skips = stage.model.skips
        self.shared_vocabulary = PIPELINE in stage.model.collectives.vocabulary

    def start(self, forward_only: bool = False) -> Carry:
        """The carry before the first clock, with the first embedding."""
        depths = self.buffers.depths
        stage = self.stage
        x = stage.zeros()
        loss, measured = self._no_losses(x, forward_only)
        stash: list[Tree] = []
        w_residuals: list[Tree] = []
        blocks: Tree = None
        edge: Tree = None
        if not forward_only:
            stash, w_residuals = stage.stash_shapes(self.table.split)
            edge = stage.model.zero.no_gradients(
                {**stage.edge.differentiated, **stage.blocks.differentiated}
            )
            blocks = {stack: edge.pop(stack) for stack in stage.of_chunk}
        return Carry(
            forward_received=empty((depths.f_inbox,), x),
            backward_received=empty((depths.b_inbox,), x),
            embedded=self.embed(x, jnp.asarray(self.buffers.enters_first)),
            gx=x,
            stash=stage.buffers(depths.stash, stash),
            w_residuals=stage.buffers(depths.cot, w_residuals),
            loss=loss,
            measured=measured,
            blocks=blocks,
            edge=edge,
        )

    def _no_losses(self, x: Array, of_labels: bool) -> tuple[Tree, dict[str, Array]]:
        """Returns zeros for the sum of losses and what is measured beside it; or for the loss of each label."""
        stage = self.stage
        zero = jnp.zeros((), jnp.int32)
        here = jnp.array(True)
        zeros = lambda shape, like: vary(jnp.zeros(shape), varying(like))
        if not of_labels:
            totals = jax.eval_shape(lambda x: stage.loss(x, zero, here, self.seed)[0], x)
            return jax.tree.map(lambda like: zeros(like.shape, like), totals)
        microbatches = inputs(stage.batches).shape[0]
        losses = jax.eval_shape(lambda x: stage.label_losses(x, zero, here), x)
        return jax.tree.map(lambda like: zeros((microbatches, *like.shape), like), losses), {}

    def end(self, carry: Carry) -> Carry:
        """The carry with the last embedding's gradient."""
        last = self.buffers.leaves_last
        return self.add_embedding_gradient(carry, jnp.asarray(last)) if last >= 0 else carry

    # --- one clock

    def run(
        self, phases: Sequence[Phase], carry: Carry, rows: Iterable[list[Row]] | None = None
    ) -> Carry:
        """Returns the carry after the clocks of the phases, with what the buffers hold then; `rows` of each phase where
        they are made already.
        """
        if rows is None:
            rows = [rows_of(self.buffers, phase) for phase in phases]
        for phase, of_phase in zip(phases, rows, strict=True):
            loops = [partial(self.run_clock, ops) for _, ops in phase.body]
            if phase.repeats > 1:
                carry, _ = lax.scan(partial(_run_in_turn, loops), carry, of_phase)
                continue
            for run_clock, row in zip(loops, of_phase, strict=True):
                carry, _ = lax.scan(run_clock, carry, jax.tree.map(lambda a: a[0], row))
        return carry

    def run_clock(self, ops: Ops, carry: Carry, row: Row) -> tuple[Carry, None]:
        """Runs the ops that any stage has in this clock. A message travels under what stands beside its line.

            send gx of the clock before ─┐
            F                            │
            receive gx                  ─┘   ┌─ send y
            H                                │
            B or I                           │
            W                                └─ receive y, from behind B on

        A table of pairs has a clock of its own (`run_paired_clock`).
        """
        if self.table.paired:
            return self.run_paired_clock(ops, carry, row), None
        clock = Clock(self, ops, row)
        cotangents = clock.send(B, carry.gx if ops.backward else None)
        carry = clock.add_embedding_gradient(carry)
        carry, y = clock.forward(carry)
        y, cotangents = arrives_after(y, cotangents)
        activations = clock.send(F, y)
        carry = clock.embed_next(carry)
        carry = clock.head(carry, y)
        carry = clock.receive(B, carry, cotangents)
        carry, gx = clock.backward(carry)
        gx, activations = arrives_after(gx, activations)
        carry = clock.keep_cotangent(carry, gx, always=self.skips)
        carry = clock.weight(carry)
        return clock.receive(F, carry, activations), None

    def run_paired_clock(self, ops: Ops, carry: Carry, row: Row) -> Carry:
        """Runs one clock of a table of pairs: F and B hide their own messages in one loop.

            F+B, or I+W
            send y and gx ─┐
            H              │
            W              │
            receive both  ─┘

        A weight gradient that ran in the loop is not run again.
        """
        clock = Clock(self, ops, row)
        carry, y, gx, weight_is_done = clock.pair(carry)
        activations = clock.send(F, y)
        carry = clock.keep_cotangent(carry, gx, always=False)
        cotangents = clock.send(B, carry.gx if ops.backward else None)
        carry = clock.add_embedding_gradient(carry)
        carry = clock.embed_next(carry)
        carry = clock.head(carry, y)
        if not weight_is_done:
            carry = clock.weight(carry)
        carry = clock.receive(F, carry, activations)
        return clock.receive(B, carry, cotangents)

    def do_pair(self, ops: Ops, carry: Carry, row: Row) -> tuple[Carry, Array, Array]:
        x = self.input_of(carry, row) if ops.forward else carry.gx
        pair = Pair(
            x,
            read(carry.backward_received, row["b_in"]),
            carry.stash,
            carry.w_residuals,
            carry.blocks,
        )
        f, w = (slot_of(row, "f"), None) if ops.forward else (None, slot_of(row, "w"))
        slots = PairSlots(f, slot_of(row, "b"), w, row["b_cot"], row["w_cot"])
        pair = run_pair(self.stage, pair, slots, self.table.split)
        stash = self.settled(pair.stash)
        w_residuals = self.settled(pair.w_residuals)
        return (
            carry._replace(stash=stash, w_residuals=w_residuals, blocks=pair.gradients),
            pair.x,
            pair.cotangent,
        )

    def input_of(self, carry: Carry, row: Row) -> Array:
        """Returns the input of F: the embedding on virtual stage 0 (which is the only one where nothing is ever
        received), else the received array."""
        if not len(carry.forward_received):
            return carry.embedded
        return jnp.where(row["first"], carry.embedded, read(carry.forward_received, row["f_in"]))

    @jax.named_scope(xla.FORWARD)
    def do_forward(self, carry: Carry, row: Row) -> tuple[Carry, Array]:
        x = self.input_of(carry, row)
        slot = slot_of(row, "f")
        forward = self.stage.forward if carry.blocks is not None else self.stage.forward_only
        idle = lambda stash: (self.stage.zeros(), stash)
        y, stash = self.if_active(slot.active, partial(forward, x, slot=slot), idle)(carry.stash)
        return carry._replace(stash=self.settled(stash)), y

    @jax.named_scope(xla.HEAD)
    def do_head(self, carry: Carry, row: Row, y: Array) -> Carry:
        exits = row["exit"] >= 0 if self.shared_vocabulary else row["last"]
        if carry.edge is None:

            def keep(label_losses: LabelLosses) -> LabelLosses:
                return write(
                    label_losses, self.stage.label_losses(y, row["exit"], row["last"]), row["exit"]
                )

            return carry._replace(loss=self.when(exits, keep, lambda same: same)(carry.loss))

        def run(totals: Totals, edge: Tree, received: Array) -> tuple[Totals, Tree, Array]:
            more, gradient, gy = self.stage.loss(y, row["exit"], row["last"], self.seed)
            received = write(received, gy, row["head_out"], active=row["last"])
            return jax.tree.map(jnp.add, totals, more), added(edge, gradient), received

        before = (carry.loss, carry.measured), carry.edge, carry.backward_received
        (loss, measured), edge, received = self.when(exits, run, lambda *same: same)(*before)
        return carry._replace(loss=loss, measured=measured, edge=edge, backward_received=received)

    @jax.named_scope(xla.BACKWARD)
    def do_backward(self, carry: Carry, row: Row) -> tuple[Carry, Array]:
        cotangent = read(carry.backward_received, row["b_in"])
        slot = slot_of(row, "b")

        idle = lambda same: (carry.gx, same)
        if self.table.split:
            run = partial(
                self.stage.input_gradient, carry.stash, cotangent, place=row["b_cot"], slot=slot
            )
            gx, w_residuals = self.if_active(slot.active, run, idle)(carry.w_residuals)
            return carry._replace(w_residuals=self.settled(w_residuals)), gx
        run = partial(self.stage.backward, carry.stash, cotangent, slot=slot)
        gx, blocks = self.if_active(slot.active, run, idle)(carry.blocks)
        return carry._replace(blocks=blocks), gx

    @jax.named_scope(xla.BACKWARD)
    def do_weight(self, carry: Carry, row: Row) -> Carry:
        slot = slot_of(row, "w")

        def run(blocks: Tree) -> Tree:
            return self.stage.weight_gradient(
                carry.stash, carry.w_residuals, blocks, row["w_cot"], slot
            )

        return carry._replace(
            blocks=self.if_active(slot.active, run, lambda same: same)(carry.blocks)
        )

    # --- the vocabulary's other end

    @jax.named_scope(xla.EMBEDDING)
    def embed(self, before: Array, microbatch: Array) -> Array:
        """The embedding of a microbatch, where there is one to come; of use on stage 0."""
        embed = lambda _: self.stage.embed(microbatch)
        return self.when(self.is_embedded(microbatch >= 0), embed, lambda x: x)(before)

    @jax.named_scope(xla.EMBEDDING)
    def add_embedding_gradient(self, carry: Carry, microbatch: Array) -> Carry:
        """Adds the embedding's gradient, from the cotangent that the last B of virtual stage 0 made."""
        if not jax.tree.leaves(carry.edge["embedding"]):
            return carry
        leaves = microbatch >= 0

        def add(edge: Tree) -> Tree:
            here = leaves & (lax.axis_index(PIPELINE) == 0)
            return self.stage.add_embedding_gradient(edge, microbatch, jnp.where(here, carry.gx, 0))

        return carry._replace(
            edge=self.if_active(self.is_embedded(leaves), add, lambda edge: edge)(carry.edge)
        )

    def is_embedded(self, here: Array) -> Array:
        """Returns `here` on stage 0, or on all stages where they share the vocabulary; else False."""
        return here if self.shared_vocabulary else here & (lax.axis_index(PIPELINE) == 0)

    # --- messages

    def send(self, slot: int, message: Array) -> Messages:
        """Sends what F or B made every way that the table uses; returns what comes in."""
        stages = self.table.stages
        around = self.table.chunks > 1 and self.table.placement == "loop"
        arriving = {}
        for i, arrival in enumerate(self.buffers.arrivals):
            if arrival.slot == slot:
                shift = arrival.shift
                pairs = [
                    (s, (s + shift) % stages)
                    for s in range(stages)
                    if around or 0 <= s + shift < stages
                ]
                arriving[i] = lax.ppermute(message, PIPELINE, pairs) if shift else message
        return arriving

    def receive(self, buffer: Array, arriving: Messages, row: Row) -> Array:
        """The receive buffer with the messages at their places."""
        for i, message in arriving.items():
            active, place = row["arrivals"][i]
            buffer = write(buffer, message, place, active=active)
        return buffer

    # --- idle slots

    def if_active(self, active: Array, run: Callable, idle: Callable) -> Callable:
        """`run`, on CPU only where active: elsewhere an idle stage computes what nobody reads (see
        `schedule.buffers`).
        """
        return partial(lax.cond, active, run, idle) if self.skips else run

    def when(self, active: Array, run: Callable, idle: Callable) -> Callable:
        """`run` where active, else `idle`: skipped on CPU, selected elsewhere."""
        if self.skips:
            return partial(lax.cond, active, run, idle)
        select = partial(jnp.where, active)
        return lambda *operands: jax.tree.map(select, run(*operands), idle(*operands))

    def settled(self, buffers: Tree) -> Tree:
        """Writes before the next slot reads. A chunk of one layer has no loop: without this, XLA would let both read
        the old values, and copy the buffer.
        """
        return buffers if self.skips else jax.tree.map(lax.optimization_barrier, buffers)


def slot_of(row: Row, letter: str) -> Slot:
    """The instructions of a slot (f, b, w) of this clock."""
    return Slot(*(row[f"{letter}_{name}"] for name in ("active", "microbatch", "chunk", "stash")))


class Clock:
    """The ops of one clock. An op that the phase does not have returns the carry as it was, and None for its result."""

    def __init__(self, execution: "Execution", ops: Ops, row: Row) -> None:
        self.execution = execution
        self.ops = ops
        self.row = row

    def forward(self, carry: Carry) -> tuple[Carry, Array | None]:
        return self.execution.do_forward(carry, self.row) if self.ops.forward else (carry, None)

    def backward(self, carry: Carry) -> tuple[Carry, Array | None]:
        return self.execution.do_backward(carry, self.row) if self.ops.backward else (carry, None)

    def weight(self, carry: Carry) -> Carry:
        return self.execution.do_weight(carry, self.row) if self.ops.weight else carry

    def head(self, carry: Carry, y: Array | None) -> Carry:
        return (
            self.execution.do_head(carry, self.row, y) if self.ops.head and y is not None else carry
        )

    def embed_next(self, carry: Carry) -> Carry:
        if not self.ops.enter:
            return carry
        return carry._replace(embedded=self.execution.embed(carry.embedded, self.row["entering"]))

    def add_embedding_gradient(self, carry: Carry) -> Carry:
        return (
            self.execution.add_embedding_gradient(carry, self.row["leaving"])
            if self.ops.leave
            else carry
        )

    def pair(self, carry: Carry) -> tuple[Carry, Array | None, Array | None, bool]:
        """Runs F with B, or I with W, in one loop; returns also whether W is done.

        On CPU, where no message is hidden, the ops follow one another: a loop of both would branch in each layer.
        """
        ops = self.ops
        in_one_loop = ops.backward and not self.execution.skips
        with_weight = in_one_loop and ops.weight and not ops.forward
        if in_one_loop and (ops.forward or with_weight):
            carry, y, gx = self.execution.do_pair(ops, carry, self.row)
            return carry, y if ops.forward else None, gx, with_weight
        carry, activation = self.forward(carry)
        carry, cotangent = self.backward(carry)
        return carry, activation, cotangent, False

    def keep_cotangent(self, carry: Carry, gx: Array | None, always: bool) -> Carry:
        """Keeps the input gradient to send; unless `always`, an idle stage sends again the one that it sent last."""
        if gx is None:
            return carry
        return carry._replace(gx=gx if always else jnp.where(self.row["b_active"], gx, carry.gx))

    def send(self, slot: int, message: Array | None) -> Messages | None:
        return None if message is None else self.execution.send(slot, message)

    def receive(self, slot: int, carry: Carry, messages: Messages | None) -> Carry:
        if messages is None:
            return carry
        if slot == F:
            return carry._replace(
                forward_received=self.execution.receive(carry.forward_received, messages, self.row)
            )
        return carry._replace(
            backward_received=self.execution.receive(carry.backward_received, messages, self.row)
        )


def arrives_after(result: Tree, messages: Tree) -> tuple[Tree, Tree]:
    """Returns both behind a barrier: XLA would otherwise transfer the messages after the loop of `result`, not under
    it.
    """
    return (
        (result, messages)
        if result is None or messages is None
        else lax.optimization_barrier((result, messages))
    )


def _run_in_turn(loops: Sequence[Callable], carry: Carry, rows: list[Row]) -> tuple[Carry, None]:
    """The clocks of a phase once: a loop for each of its bodies."""
    for run_clock, row in zip(loops, rows, strict=True):
        carry, _ = lax.scan(run_clock, carry, row)
    return carry, None
