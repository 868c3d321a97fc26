"""Runs any legal schedule table inside the fully manual shard_map: one scan over clocks, three slots a clock and the loss head.

    clock t  F: stage input → output, residuals to the stash      (this stage's row of the table says which microbatch)
             H: loss head on what left the last virtual stage      (all stages, where they share the vocabulary)
             B: cotangent + stash → input gradient, weight gradient (only the former where the table splits them)
             W: weight gradient

Messages travel while the device computes. An activation leaves after F and is waited for after B; a cotangent leaves at the start
of the next clock that has a B, and is waited for after its F. So does the vocabulary: see `schedule.buffers`.

    clock t      F  H  B  W
                 ╰──y──►
    clock t + 1  F  H  B  W
               ──►  the gx of clock t

A table of pairs has F and B in one loop, and sends what both made behind it.

Every device runs the same program. On CPU idle slots are skipped (lax.cond). Elsewhere a predicate would be waited for, so a slot
that any stage uses is computed by all, and an idle one's results go where nobody reads; `phases` groups the clocks so that little is.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshtrain import xla
from meshtrain.compat import vary, varying
from meshtrain.inputs import inputs
from meshtrain.mesh import PIPELINE
from meshtrain.parallel.forward import Batch, Forward, LabelLosses, LossAndGradients, Totals, added, sum_at_once
from meshtrain.parallel.pipeline.stage import Slot, Stage, empty, read, write
from meshtrain.parallel.zero import Weights
from meshtrain.schedule.buffers import executed
from meshtrain.schedule.phases import Ops, Phase, forward_only_phases, ops_per_clock, phases
from meshtrain.schedule.table import B, F, Table

Tree = Any
Row = dict[str, Any]  # this stage's entry of every array of Buffers, for one clock; `arrivals`: (active, place) of each
Messages = dict[int, jax.Array]  # by the number of the arrival


class Carry(NamedTuple):
    """What goes from clock to clock: every buffer's first axis counts its places."""

    forward_received: jax.Array
    backward_received: jax.Array
    embedded: jax.Array  # the embedding that the next F on virtual stage 0 takes
    gx: jax.Array  # the cotangent that the last B made, not yet sent
    stash: Tree  # [places, layers, ..]: of each layer (its input, residuals)
    w_residuals: Tree  # [places, layers, ..]: what I leaves for W
    loss: jax.Array | LabelLosses  # summed; of a forward alone those of all labels, [M, b, T] each
    measured: dict[str, jax.Array]  # beside the loss, summed
    blocks: Tree  # sums of gradients; None in a forward alone
    edge: Tree  # those of embedding and head


class Executor:
    """One table over one model: call `train` or `label_losses` inside shard_map."""

    def __init__(self, forward: Forward, table: Table) -> None:
        self.forward, self.table = forward, table
        self.skips = forward.skips
        self.sends = forward.overlaps and table.has_sends
        if not self.sends:
            table = self.table = table.without_sends()
        if self.skips:
            # Idle slots are skipped anyway.
            self.phases = [Phase(0, 1, ((table.clocks, Ops(True, True, True, table.split, True, True)),))]
        else:
            self.phases = phases(table)
        self.buffers = executed(table, None if self.skips else ops_per_clock(self.phases))

    # --- the two programs

    def train(self, weights: Weights, batches: Batch, key: jax.Array | None, seed: jax.Array) -> LossAndGradients:
        """Loss summed over the microbatches [M, b, T] (on each data rank), and `seed` times its gradient, in `precision.gradient_sums`."""
        execution = Execution(self, Stage(self.forward, self.table.chunks, weights, batches, key), seed)
        if self.sends:
            from meshtrain.parallel.pipeline.sending import Sending

            carry = Sending(self, execution).run()
        else:
            carry = execution.end(execution.run(self.with_rows(self.phases), execution.start()))
        totals = sum_at_once(_over_stages, (carry.loss, carry.measured))
        return LossAndGradients(totals, {**carry.edge, "blocks": carry.blocks})

    def label_losses(self, weights: Weights, batches: Batch) -> LabelLosses:
        """The labels one by one, [M, b, T] each, on every stage: the table's forward slots alone."""
        stage = Stage(self.forward, self.table.chunks, weights, batches, None)
        execution = Execution(self, stage, jnp.zeros(()))
        carry = execution.start(forward_only=True)
        if self.skips:
            rows = self._rows(np.flatnonzero(self.buffers.f_active.any(axis=1)))
            forward_only = Ops(True, True, False, False, True, False)
            carry = lax.scan(partial(execution.run_clock, forward_only), carry, rows)[0]
        else:
            carry = execution.run(self.with_rows(forward_only_phases(self.phases)), carry)
        return jax.tree.map(_over_stages, carry.loss)

    def with_rows(self, phases: Iterable[Phase]) -> Iterator[tuple[Phase, list[Row]]]:
        return ((phase, self.rows_of(phase)) for phase in phases)

    def rows_of(self, phase: Phase, later: np.ndarray | int = 0) -> list[Row]:
        """This stage's instructions of a phase, for each run of its body [repeats, clocks]; of phases that begin so many clocks `later`,
        int [n], [n, repeats, clocks]."""
        rows, first = [], np.asarray(later)[..., None, None] + phase.first
        for clocks, _ in phase.body:
            rows.append(self._rows(first + np.arange(phase.repeats)[:, None] * phase.period + np.arange(clocks)))
            first += clocks
        return rows

    def _rows(self, clocks: np.ndarray) -> Row:
        """This stage's instructions of the given clocks."""
        stage = lax.axis_index(PIPELINE)

        def of_stage(array: np.ndarray) -> jax.Array:
            chosen = jnp.asarray(array[clocks])
            return lax.dynamic_index_in_dim(chosen, stage, clocks.ndim, False) if array.ndim == 2 else chosen

        arrays = {name: array for name, array in vars(self.buffers).items() if isinstance(array, np.ndarray)}
        rows: Row = {name: of_stage(array) for name, array in arrays.items()}
        return rows | {"arrivals": [(of_stage(a.active), of_stage(a.place)) for a in self.buffers.arrivals]}


def _in_turn(loops: Sequence[Callable], carry: Carry, rows: list[Row]) -> tuple[Carry, None]:
    """The clocks of a phase once: a loop for each of its bodies."""
    for run_clock, row in zip(loops, rows, strict=True):
        carry, _ = lax.scan(run_clock, carry, row)
    return carry, None


def _over_stages(loss: jax.Array) -> jax.Array:
    return lax.psum(loss, PIPELINE) if PIPELINE in varying(loss) else loss


class Execution:
    """One execution of the table."""

    def __init__(self, executor: Executor, stage: Stage, seed: jax.Array) -> None:
        self.buffers, self.table, self.skips = executor.buffers, executor.table, executor.skips
        self.stage, self.seed = stage, seed
        self.shared_vocabulary = PIPELINE in executor.forward.collectives.vocabulary

    def start(self, forward_only: bool = False) -> Carry:
        """The carry before the first clock, with the first embedding."""
        depths, stage, x = self.buffers.depths, self.stage, self.stage.zeros()
        zero = jnp.zeros((), jnp.int32)
        here, microbatches = jnp.array(True), inputs(stage.batches).shape[0]
        zeros = lambda shape, like: vary(jnp.zeros(shape), varying(like))  # noqa: E731
        stash: list[Tree] = []
        w_residuals: list[Tree] = []
        blocks: Tree = None
        edge: Tree = None
        if forward_only:
            label_losses = jax.eval_shape(lambda x: stage.label_losses(x, zero, here), x)
            loss, measured = jax.tree.map(lambda like: zeros((microbatches, *like.shape), like), label_losses), {}
        else:
            totals = jax.eval_shape(lambda x: stage.loss(x, zero, here, self.seed)[0], x)
            loss, measured = jax.tree.map(lambda like: zeros((), like), totals)
            stash, w_residuals = stage.stash_shapes(self.table.split)
            edge = stage.model.zero.no_gradients({**stage.edge, "blocks": stage.blocks.differentiated})
            blocks = edge.pop("blocks")
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

    def end(self, carry: Carry) -> Carry:
        """The carry with the last embedding's gradient."""
        last = self.buffers.leaves_last
        return self.add_embedding_gradient(carry, jnp.asarray(last)) if last >= 0 else carry

    # --- one clock

    def run(self, phases: Iterable[tuple[Phase, list[Row]]], carry: Carry) -> Carry:
        """The clocks of the phases; what the buffers hold after the last one is in the carry."""
        for phase, rows in phases:
            loops = [partial(self.run_clock, ops) for _, ops in phase.body]
            if phase.repeats > 1:
                carry, _ = lax.scan(partial(_in_turn, loops), carry, rows)
                continue
            for run_clock, row in zip(loops, rows, strict=True):
                carry, _ = lax.scan(run_clock, carry, jax.tree.map(lambda a: a[0], row))
        return carry

    def run_clock(self, ops: Ops, carry: Carry, row: Row) -> tuple[Carry, None]:
        """The slots that any stage has in this clock: F, the loss head, B or I, W; messages travel beside them."""
        if self.table.paired:
            return self.run_paired_clock(ops, carry, row), None
        if ops.backward:
            cotangents = self.send(B, carry.gx)
        if ops.leave:
            carry = self.add_embedding_gradient(carry, row["leaving"])
        if ops.forward:
            carry, y = self.do_forward(carry, row)
            if ops.backward:
                # Barrier: XLA would otherwise transfer the cotangents after the forward's loop, not during it.
                y, cotangents = lax.optimization_barrier((y, cotangents))
            activations = self.send(F, y)
            if ops.enter:
                carry = carry._replace(embedded=self.embed(carry.embedded, row["entering"]))
            if ops.head:
                carry = self.do_head(carry, row, y)
        if ops.backward:
            carry = carry._replace(backward_received=self.receive(carry.backward_received, cotangents, row))
            carry, gx = self.do_backward(carry, row)
            if ops.forward:
                # Barrier: XLA would otherwise delay this transfer until after the backward's loop.
                gx, activations = lax.optimization_barrier((gx, activations))
            # An idle stage sends what it sent last, again.
            carry = carry._replace(gx=gx if self.skips else jnp.where(row["b_active"], gx, carry.gx))
        if ops.weight:
            carry = self.do_weight(carry, row)
        if ops.forward:
            carry = carry._replace(forward_received=self.receive(carry.forward_received, activations, row))
        return carry, None

    def run_paired_clock(self, ops: Ops, carry: Carry, row: Row) -> Carry:
        """The same of a table of pairs: F and B at once, and what they send travels while the loss head or W works; or B and W at once. On
        CPU one after the other, each where it is active: nothing would travel under either, and a loop of both would be branches in each layer."""
        with_weight = ops.backward and ops.weight and not ops.forward and not self.skips
        if ops.backward and (ops.forward or with_weight) and not self.skips:
            carry, y, gx = self.do_pair(ops, carry, row)
        else:
            if ops.forward:
                carry, y = self.do_forward(carry, row)
            if ops.backward:
                carry, gx = self.do_backward(carry, row)
        if ops.forward:
            activations = self.send(F, y)
        if ops.backward:
            carry = carry._replace(gx=jnp.where(row["b_active"], gx, carry.gx))
            cotangents = self.send(B, carry.gx)
        if ops.leave:
            carry = self.add_embedding_gradient(carry, row["leaving"])
        if ops.enter:
            carry = carry._replace(embedded=self.embed(carry.embedded, row["entering"]))
        if ops.head:
            carry = self.do_head(carry, row, y)
        if ops.weight and not with_weight:
            carry = self.do_weight(carry, row)
        if ops.forward:
            carry = carry._replace(forward_received=self.receive(carry.forward_received, activations, row))
        if ops.backward:
            carry = carry._replace(backward_received=self.receive(carry.backward_received, cotangents, row))
        return carry

    def do_pair(self, ops: Ops, carry: Carry, row: Row) -> tuple[Carry, jax.Array, jax.Array]:
        from meshtrain.parallel.pipeline.paired import Pair, PairSlots, run_pair

        x = self.input_of(carry, row) if ops.forward else carry.gx
        pair = Pair(x, read(carry.backward_received, row["b_in"]), carry.stash, carry.w_residuals, carry.blocks)
        f, w = (slot_of(row, "f"), None) if ops.forward else (None, slot_of(row, "w"))
        slots = PairSlots(f, slot_of(row, "b"), w, row["b_cot"], row["w_cot"])
        pair = run_pair(self.stage, pair, slots, self.table.split)
        stash, w_residuals = self.settled(pair.stash), self.settled(pair.w_residuals)
        return carry._replace(stash=stash, w_residuals=w_residuals, blocks=pair.gradients), pair.x, pair.cotangent

    def input_of(self, carry: Carry, row: Row) -> jax.Array:
        """What F takes: the embedding on virtual stage 0 (which is the only one where nothing is ever received), else what was received."""
        if not len(carry.forward_received):
            return carry.embedded
        return jnp.where(row["first"], carry.embedded, read(carry.forward_received, row["f_in"]))

    @jax.named_scope(xla.FORWARD)
    def do_forward(self, carry: Carry, row: Row) -> tuple[Carry, jax.Array]:
        x, slot = self.input_of(carry, row), slot_of(row, "f")
        forward = self.stage.forward if carry.blocks is not None else self.stage.forward_only
        idle = lambda stash: (self.stage.zeros(), stash)  # noqa: E731
        y, stash = self.if_active(slot.active, partial(forward, x, slot=slot), idle)(carry.stash)
        return carry._replace(stash=self.settled(stash)), y

    @jax.named_scope(xla.HEAD)
    def do_head(self, carry: Carry, row: Row, y: jax.Array) -> Carry:
        exits = row["exit"] >= 0 if self.shared_vocabulary else row["last"]
        if carry.edge is None:

            def keep(label_losses: LabelLosses) -> LabelLosses:
                return write(label_losses, self.stage.label_losses(y, row["exit"], row["last"]), row["exit"])

            return carry._replace(loss=self.when(exits, keep, lambda same: same)(carry.loss))

        def run(totals: Totals, edge: Tree, received: jax.Array) -> tuple[Totals, Tree, jax.Array]:
            more, gradient, gy = self.stage.loss(y, row["exit"], row["last"], self.seed)
            received = write(received, gy, row["head_out"], active=row["last"])
            return jax.tree.map(jnp.add, totals, more), added(edge, gradient), received

        before = (carry.loss, carry.measured), carry.edge, carry.backward_received
        (loss, measured), edge, received = self.when(exits, run, lambda *same: same)(*before)
        return carry._replace(loss=loss, measured=measured, edge=edge, backward_received=received)

    @jax.named_scope(xla.BACKWARD)
    def do_backward(self, carry: Carry, row: Row) -> tuple[Carry, jax.Array]:
        cotangent, slot = read(carry.backward_received, row["b_in"]), slot_of(row, "b")

        idle = lambda same: (carry.gx, same)  # noqa: E731
        if self.table.split:
            run = partial(self.stage.input_gradient, carry.stash, cotangent, place=row["b_cot"], slot=slot)
            gx, w_residuals = self.if_active(slot.active, run, idle)(carry.w_residuals)
            return carry._replace(w_residuals=self.settled(w_residuals)), gx
        run = partial(self.stage.backward, carry.stash, cotangent, slot=slot)
        gx, blocks = self.if_active(slot.active, run, idle)(carry.blocks)
        return carry._replace(blocks=blocks), gx

    @jax.named_scope(xla.BACKWARD)
    def do_weight(self, carry: Carry, row: Row) -> Carry:
        slot = slot_of(row, "w")

        def run(blocks: Tree) -> Tree:
            return self.stage.weight_gradient(carry.stash, carry.w_residuals, blocks, row["w_cot"], slot)

        return carry._replace(blocks=self.if_active(slot.active, run, lambda same: same)(carry.blocks))

    # --- the vocabulary's other end

    @jax.named_scope(xla.EMBEDDING)
    def embed(self, before: jax.Array, microbatch: jax.Array) -> jax.Array:
        """The embedding of a microbatch, where there is one to come; of use on stage 0."""
        embed = lambda _: self.stage.embed(self.stage.edge, microbatch)  # noqa: E731
        return self.when(self.at_first_stage(microbatch >= 0), embed, lambda x: x)(before)

    @jax.named_scope(xla.EMBEDDING)
    def add_embedding_gradient(self, carry: Carry, microbatch: jax.Array) -> Carry:
        """Adds the embedding's gradient, from the cotangent that the last B of virtual stage 0 made."""
        if not jax.tree.leaves(carry.edge["embedding"]):
            return carry
        leaves = microbatch >= 0

        def add(edge: Tree) -> Tree:
            here = leaves & (lax.axis_index(PIPELINE) == 0)
            return self.stage.add_embedding_gradient(edge, microbatch, jnp.where(here, carry.gx, 0))

        return carry._replace(edge=self.if_active(self.at_first_stage(leaves), add, lambda edge: edge)(carry.edge))

    def at_first_stage(self, here: jax.Array) -> jax.Array:
        """On stage 0, or on all stages where they share the vocabulary."""
        return here if self.shared_vocabulary else here & (lax.axis_index(PIPELINE) == 0)

    # --- messages

    def send(self, slot: int, message: jax.Array) -> Messages:
        """Sends what F or B made every way that the table uses; returns what comes in."""
        stages, around = self.table.stages, self.table.chunks > 1 and self.table.placement == "loop"
        arriving = {}
        for i, arrival in enumerate(self.buffers.arrivals):
            if arrival.slot == slot:
                shift = arrival.shift
                pairs = [(s, (s + shift) % stages) for s in range(stages) if around or 0 <= s + shift < stages]
                arriving[i] = lax.ppermute(message, PIPELINE, pairs) if shift else message
        return arriving

    def receive(self, buffer: jax.Array, arriving: Messages, row: Row) -> jax.Array:
        """The receive buffer with the messages at their places."""
        for i, message in arriving.items():
            active, place = row["arrivals"][i]
            buffer = write(buffer, message, place, active=active)
        return buffer

    # --- idle slots

    def if_active(self, active: jax.Array, run: Callable, idle: Callable) -> Callable:
        """`run`, on CPU only where active: elsewhere an idle stage computes what nobody reads (see `schedule.buffers`)."""
        return partial(lax.cond, active, run, idle) if self.skips else run

    def when(self, active: jax.Array, run: Callable, idle: Callable) -> Callable:
        """`run` where active, else `idle`: skipped on CPU, selected elsewhere."""
        if self.skips:
            return partial(lax.cond, active, run, idle)
        select = partial(jnp.where, active)
        return lambda *operands: jax.tree.map(select, run(*operands), idle(*operands))

    def settled(self, buffers: Tree) -> Tree:
        """Written before the next slot reads: of a chunk of one layer, which is no loop, XLA would have both read what was there before,
        and copy the buffer for that."""
        return buffers if self.skips else jax.tree.map(lax.optimization_barrier, buffers)


def slot_of(row: Row, letter: str) -> Slot:
    """The instructions of a slot (f, b, w) of this clock."""
    return Slot(*(row[f"{letter}_{name}"] for name in ("active", "microbatch", "chunk", "stash")))
