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
from dataclasses import dataclass, fields
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
from meshtrain.parallel.pipeline.stage import Stage
from meshtrain.schedule.buffers import Arrival, CompiledTable
from meshtrain.schedule.phases import Ops, Phase
from meshtrain.schedule.table import B, F, Slot

Tree = Any
Messages = dict[int, Array]  # by the number of the arrival


class Carry(NamedTuple):
    """The state carried from clock to clock: every buffer's first axis counts its places."""

    forward_received: Array
    backward_received: Array
    embedded: Array  # the embedding that the next F on virtual stage 0 takes
    gx: Array  # the cotangent that the last B made, not yet sent
    stash: Tree  # [places, layers, ..]: of each layer (its input, residuals)
    w_residuals: Tree  # [places, layers, ..]: what I leaves for W
    # Summed; of a forward alone those of all labels, [M, b, T] each
    loss: Array | LabelLosses
    measured: dict[str, Array]  # beside the loss, summed
    blocks: Tree  # sums of gradients; None in a forward alone
    edge: Tree  # those of embedding and head

    @property
    def forward_only(self) -> bool:
        return self.edge is None


@dataclass(frozen=True)
class ClockRow:
    """This stage's instructions for one clock: traced numbers, so that one program serves all stages and clocks."""

    f: Slot[Array]
    b: Slot[Array]
    w: Slot[Array]
    first: Array  # this F is virtual stage 0
    last: Array  # this F is the last virtual stage
    head_out: Array  # place in the backward inbox where the head leaves its cotangent
    # Three microbatches, the same for all stages; -1: none.
    exit: Array  # whose loss is computed, from what F made on the last virtual stage
    entering: Array  # that is embedded, for the next F on virtual stage 0
    # whose embedding's gradient is computed, from what the last B on virtual stage 0 made
    leaving: Array
    arrivals: list[Arrival[Array]]


def _register(kind: type, static: tuple[str, ...] = ()) -> None:
    """Makes a class of numbers a pytree, with its leaves sorted by name: whoever orders its fields anew changes no
    compiled program.
    """
    names = sorted({field.name for field in fields(kind)}.difference(static))
    jax.tree_util.register_dataclass(kind, data_fields=names, meta_fields=static)


_register(Slot)
_register(ClockRow)
_register(Arrival, static=("slot", "shift"))


def rows_of(
    compiled: CompiledTable, phase: Phase, later: np.ndarray | int = 0
) -> list[ClockRow]:
    """Returns this stage's instructions of a phase, for each loop of its body: arrays [repeats, clocks].

    With `later`, int [n], those of n phases that begin so many clocks later: [n, repeats, clocks].
    """
    rows = []
    first = np.asarray(later)[..., None, None] + phase.first
    for clocks, _ in phase.body:
        periods = np.arange(phase.repeats)[:, None] * phase.period
        rows.append(row_of(compiled, first + periods + np.arange(clocks)))
        first += clocks
    return rows


def row_of(compiled: CompiledTable, clocks: np.ndarray) -> ClockRow:
    """Returns this stage's instructions of the given clocks."""
    stage = lax.axis_index(PIPELINE)

    def take(array: Any) -> Any:
        if array is None:
            return None
        chosen = jnp.asarray(array[clocks])
        if array.ndim == 1:  # the same for all stages
            return chosen
        return lax.dynamic_index_in_dim(chosen, stage, clocks.ndim, False)

    def take_slot(slot: Slot[np.ndarray]) -> Slot[Array]:
        return Slot(
            active=take(slot.active),
            microbatch=take(slot.microbatch),
            chunk=take(slot.chunk),
            inbox=take(slot.inbox),
            stash=take(slot.stash),
            cot=take(slot.cot),
        )

    return ClockRow(
        f=take_slot(compiled.f),
        b=take_slot(compiled.b),
        w=take_slot(compiled.w),
        first=take(compiled.first),
        last=take(compiled.last),
        exit=take(compiled.exit),
        head_out=take(compiled.head_out),
        entering=take(compiled.entering),
        leaving=take(compiled.leaving),
        arrivals=[
            Arrival(
                arrival.slot, arrival.shift, take(arrival.active), take(arrival.place)
            )
            for arrival in compiled.arrivals
        ],
    )


class Execution:
    """One execution of the table."""

    def __init__(self, compiled: CompiledTable, stage: Stage, seed: Array) -> None:
        self.compiled = compiled
        self.table = compiled.table
        self.stage = stage
        self.seed = seed
        self.skips = stage.model.skips
        self.shared_vocabulary = PIPELINE in stage.model.collectives.vocabulary

    def start(self, forward_only: bool = False) -> Carry:
        """The carry before the first clock, with the first embedding."""
        depths = self.compiled.depths
        stage = self.stage
        x = stage.zeros()
        loss, measured = self._no_losses(x, forward_only)
        stash: list[Tree] = []
        w_residuals: list[Tree] = []
        blocks: Tree = None
        edge: Tree = None
        if not forward_only:
            stash, w_residuals = stage.stash_shapes(self.table.split)
            weights = {**stage.edge.differentiated, **stage.blocks.differentiated}
            gradients = stage.model.zero.no_gradients(weights)
            blocks = {stack: gradients.pop(stack) for stack in stage.slots_of}
            edge = gradients
        return Carry(
            forward_received=empty((depths.f_inbox,), x),
            backward_received=empty((depths.b_inbox,), x),
            embedded=self.embed(x, jnp.asarray(self.compiled.enters_first)),
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
            loss = lambda x: stage.loss(x, zero, here, self.seed)[0]
            totals = jax.eval_shape(loss, x)
            return jax.tree.map(lambda like: zeros(like.shape, like), totals)
        microbatches = inputs(stage.batches).shape[0]
        losses = jax.eval_shape(lambda x: stage.label_losses(x, zero, here), x)
        all_zeros = lambda like: zeros((microbatches, *like.shape), like)
        return jax.tree.map(all_zeros, losses), {}

    def end(self, carry: Carry) -> Carry:
        """The carry with the last embedding's gradient."""
        last = self.compiled.leaves_last
        if last >= 0:
            return self.add_embedding_gradient(carry, jnp.asarray(last))
        return carry

    # --- one clock

    def run(
        self,
        phases: Sequence[Phase],
        carry: Carry,
        rows: Iterable[list[ClockRow]] | None = None,
    ) -> Carry:
        """Returns the carry after the clocks of the phases, with what the buffers hold then; `rows` of each phase where
        they are made already.
        """
        if rows is None:
            rows = [rows_of(self.compiled, phase) for phase in phases]
        for phase, of_phase in zip(phases, rows, strict=True):
            loops = [partial(self.run_clock, ops) for _, ops in phase.body]
            if phase.repeats > 1:
                carry, _ = lax.scan(partial(_run_in_turn, loops), carry, of_phase)
                continue
            for run_clock, row in zip(loops, of_phase, strict=True):
                carry, _ = lax.scan(run_clock, carry, jax.tree.map(lambda a: a[0], row))
        return carry

    def run_clock(self, ops: Ops, carry: Carry, row: ClockRow) -> tuple[Carry, None]:
        """Runs the ops that any stage has in this clock. A message travels under what stands beside its line.

            send gx of the clock before ─┐
            F                            │
            wait for gx                 ─┘   ┌─ send y
            H                                │
            B or I                           │
            wait for y                      ─┘
            W

        Messages are put into the inboxes before B, and at the end.

        A table of pairs has a clock of its own (`run_paired_clock`).
        """
        if self.table.paired:
            return self.run_paired_clock(ops, carry, row), None
        clock = Clock(self, ops, row)
        cotangents = clock.send(B, carry.gx if ops.backward else None)
        carry = clock.add_embedding_gradient(carry)
        carry, y = clock.forward(carry)
        y, cotangents = wait_for(cotangents, y)
        activations = clock.send(F, y)
        carry = clock.embed_next(carry)
        carry = clock.head(carry, y)
        carry = clock.receive(B, carry, cotangents)
        carry, gx = clock.backward(carry)
        gx, activations = wait_for(activations, gx)
        carry = clock.keep_cotangent(carry, gx, always=self.skips)
        carry = clock.weight(carry)
        return clock.receive(F, carry, activations), None

    def run_paired_clock(self, ops: Ops, carry: Carry, row: ClockRow) -> Carry:
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

        def run(edge: Tree) -> Tree:
            here = leaves & (lax.axis_index(PIPELINE) == 0)
            gx = jnp.where(here, carry.gx, 0)
            return self.stage.add_embedding_gradient(edge, microbatch, gx)

        add = self.if_active(self.is_embedded(leaves), run, lambda same: same)
        return carry._replace(edge=add(carry.edge))

    def is_embedded(self, here: Array) -> Array:
        """Returns `here` on stage 0, or on all stages where they share the vocabulary; else False."""
        if self.shared_vocabulary:
            return here
        return here & (lax.axis_index(PIPELINE) == 0)

    # --- messages

    def send(self, slot: int, message: Array) -> Messages:
        """Sends what F or B made every way that the table uses; returns what comes in."""
        stages = self.table.stages
        around = self.table.chunks > 1 and self.table.placement == "loop"
        arriving = {}
        for i, arrival in enumerate(self.compiled.arrivals):
            if arrival.slot == slot:
                shift = arrival.shift
                pairs = [
                    (s, (s + shift) % stages)
                    for s in range(stages)
                    if around or 0 <= s + shift < stages
                ]
                arriving[i] = message
                if shift:
                    arriving[i] = lax.ppermute(message, PIPELINE, pairs)
        return arriving

    # --- idle slots

    def if_active(self, active: Array, run: Callable, idle: Callable) -> Callable:
        """`run`, on CPU only where active: elsewhere an idle stage computes what nobody reads (see
        `schedule.buffers`).
        """
        if self.skips:
            return partial(lax.cond, active, run, idle)
        return run

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
        if self.skips:
            return buffers
        return jax.tree.map(lax.optimization_barrier, buffers)


class Clock:
    """The ops of one clock. An op that the phase does not have returns the carry as it was, and None for its result."""

    def __init__(self, execution: Execution, ops: Ops, row: ClockRow) -> None:
        self.execution = execution
        self.stage = execution.stage
        self.split = execution.table.split
        self.ops = ops
        self.row = row

    @jax.named_scope(xla.FORWARD)
    def forward(self, carry: Carry) -> tuple[Carry, Array | None]:
        if not self.ops.forward:
            return carry, None
        slot = self.row.f
        run = self.stage.forward_only if carry.forward_only else self.stage.forward
        forward = partial(run, self.input_of(carry), slot=slot)
        idle = lambda stash: (self.stage.zeros(), stash)
        y, stash = self.execution.if_active(slot.active, forward, idle)(carry.stash)
        return carry._replace(stash=self.execution.settled(stash)), y

    def input_of(self, carry: Carry) -> Array:
        """Returns the input of F: the embedding on virtual stage 0 (which is the only one where nothing is ever
        received), else the received array."""
        if not len(carry.forward_received):
            return carry.embedded
        received = read(carry.forward_received, self.row.f.inbox)
        return jnp.where(self.row.first, carry.embedded, received)

    @jax.named_scope(xla.HEAD)
    def head(self, carry: Carry, y: Array | None) -> Carry:
        if not self.ops.head or y is None:
            return carry
        stage = self.stage
        row = self.row
        exits = row.exit >= 0 if self.execution.shared_vocabulary else row.last
        if carry.forward_only:

            def keep(label_losses: LabelLosses) -> LabelLosses:
                losses = stage.label_losses(y, row.exit, row.last)
                return write(label_losses, losses, row.exit)

            kept = self.execution.when(exits, keep, lambda same: same)(carry.loss)
            return carry._replace(loss=kept)

        def run(
            totals: Totals, edge: Tree, received: Array
        ) -> tuple[Totals, Tree, Array]:
            more, gradient, gy = stage.loss(y, row.exit, row.last, self.execution.seed)
            received = write(received, gy, row.head_out, active=row.last)
            return jax.tree.map(jnp.add, totals, more), added(edge, gradient), received

        before = (carry.loss, carry.measured), carry.edge, carry.backward_received
        after = self.execution.when(exits, run, lambda *same: same)(*before)
        (loss, measured), edge, received = after
        return carry._replace(
            loss=loss, measured=measured, edge=edge, backward_received=received
        )

    @jax.named_scope(xla.BACKWARD)
    def backward(self, carry: Carry) -> tuple[Carry, Array | None]:
        """Runs B, or I where the table splits it."""
        if not self.ops.backward:
            return carry, None
        slot = self.row.b
        cotangent = read(carry.backward_received, slot.inbox)
        idle = lambda same: (carry.gx, same)
        if self.split:
            run = partial(self.stage.input_gradient, carry.stash, cotangent, slot=slot)
            step = self.execution.if_active(slot.active, run, idle)
            gx, left = step(carry.w_residuals)
            return carry._replace(w_residuals=self.execution.settled(left)), gx
        run = partial(self.stage.backward, carry.stash, cotangent, slot=slot)
        gx, blocks = self.execution.if_active(slot.active, run, idle)(carry.blocks)
        return carry._replace(blocks=blocks), gx

    @jax.named_scope(xla.BACKWARD)
    def weight(self, carry: Carry) -> Carry:
        if not self.ops.weight:
            return carry
        slot = self.row.w
        weight_gradient = self.stage.weight_gradient
        run = partial(weight_gradient, carry.stash, carry.w_residuals, slot=slot)
        add = self.execution.if_active(slot.active, run, lambda same: same)
        return carry._replace(blocks=add(carry.blocks))

    def pair(self, carry: Carry) -> tuple[Carry, Array | None, Array | None, bool]:
        """Runs F with B, or I with W, in one loop; returns also whether W is done.

        On CPU, where no message is hidden, the ops follow one another: a loop of both would branch in each layer.
        """
        ops = self.ops
        in_one_loop = ops.backward and not self.execution.skips
        with_weight = in_one_loop and ops.weight and not ops.forward
        if in_one_loop and (ops.forward or with_weight):
            return *self.run_in_one_loop(carry), with_weight
        carry, y = self.forward(carry)
        carry, gx = self.backward(carry)
        return carry, y, gx, False

    def run_in_one_loop(self, carry: Carry) -> tuple[Carry, Array | None, Array]:
        row = self.row
        if self.ops.forward:
            x = self.input_of(carry)
            slots = PairSlots(row.f, row.b, None)
        else:
            x = carry.gx
            slots = PairSlots(None, row.b, row.w)
        cotangent = read(carry.backward_received, row.b.inbox)
        pair = Pair(x, cotangent, carry.stash, carry.w_residuals, carry.blocks)
        pair = run_pair(self.stage, pair, slots, self.split)
        after = carry._replace(
            stash=self.execution.settled(pair.stash),
            w_residuals=self.execution.settled(pair.w_residuals),
            blocks=pair.gradients,
        )
        return after, pair.x if self.ops.forward else None, pair.cotangent

    def embed_next(self, carry: Carry) -> Carry:
        if not self.ops.enter:
            return carry
        embedded = self.execution.embed(carry.embedded, self.row.entering)
        return carry._replace(embedded=embedded)

    def add_embedding_gradient(self, carry: Carry) -> Carry:
        if not self.ops.leave:
            return carry
        return self.execution.add_embedding_gradient(carry, self.row.leaving)

    def keep_cotangent(self, carry: Carry, gx: Array | None, always: bool) -> Carry:
        """Keeps the input gradient to send; unless `always`, an idle stage sends again the one that it sent last."""
        if gx is None:
            return carry
        if not always:
            gx = jnp.where(self.row.b.active, gx, carry.gx)
        return carry._replace(gx=gx)

    def send(self, slot: int, message: Array | None) -> Messages | None:
        if message is None:
            return None
        return self.execution.send(slot, message)

    def receive(self, slot: int, carry: Carry, messages: Messages | None) -> Carry:
        """Returns the carry with the messages at their places in the inbox of F or B."""
        if messages is None:
            return carry
        inbox = carry.forward_received if slot == F else carry.backward_received
        for i, message in messages.items():
            arrival = self.row.arrivals[i]
            inbox = write(inbox, message, arrival.place, active=arrival.active)
        if slot == F:
            return carry._replace(forward_received=inbox)
        return carry._replace(backward_received=inbox)


def wait_for(messages: Tree, result: Tree) -> tuple[Tree, Tree]:
    """Returns `result` and the messages, both behind one barrier: else XLA would transfer the messages after the loop
    of `result`, not under it.
    """
    if result is None or messages is None:
        return result, messages
    return lax.optimization_barrier((result, messages))


def _run_in_turn(
    loops: Sequence[Callable], carry: Carry, rows: list[ClockRow]
) -> tuple[Carry, None]:
    """The clocks of a phase once: a loop for each of its bodies."""
    for run_clock, row in zip(loops, rows, strict=True):
        carry, _ = lax.scan(run_clock, carry, row)
    return carry, None
