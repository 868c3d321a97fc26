"""Runs any legal schedule table inside the fully manual shard_map: one scan over ticks, three slots a tick and the loss head.

    tick t   F: stage input → output, residuals to the stash      (this stage's row of the table says which microbatch)
             H: loss head on what left the last virtual stage      (all stages, where they share the vocabulary)
             B: cotangent + stash → input gradient, weight gradient (only the former where the table splits them)
             W: weight gradient

Messages travel while the device computes. An activation leaves after F and is waited for after B; a cotangent leaves at the start
of the next tick that has a B, and is waited for after its F. So does the vocabulary: see `schedule.executed`.

    tick t       F  H  B  W
                  ╰──y──►
    tick t + 1   F  H  B  W
               ──►  the gx of tick t

Every device runs the same program. On CPU idle slots are skipped (lax.cond). Elsewhere a predicate would be waited for, so a slot
that any stage uses is computed by all, and an idle one's results go where nobody reads; `segments` groups the ticks so that little is.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshtrain import scopes
from meshtrain.compat import vary, varying
from meshtrain.inputs import inputs
from meshtrain.mesh import PIPELINE
from meshtrain.parallel.forward import Batch, Forward, Judged, Totals
from meshtrain.parallel.pipeline.stage import Slot, Stage
from meshtrain.parallel.pipeline.storage import empty, read, write
from meshtrain.parallel.zero import Weights
from meshtrain.schedule.executed import executed
from meshtrain.schedule.segments import Segment, Work, forward_alone, segments, work_per_tick
from meshtrain.schedule.table import B, F, Table

Tree = Any
Row = dict[str, Any]  # this stage's entry of every array of Buffers, for one tick; `arrivals`: (active, place) of each
Messages = dict[int, jax.Array]  # by the number of the arrival


class Carry(NamedTuple):
    """What goes from tick to tick: every buffer's first axis counts its places."""

    f_inbox: jax.Array
    b_inbox: jax.Array
    entering: jax.Array  # the embedding that the next F on virtual stage 0 takes
    gx: jax.Array  # the cotangent that the last B made, not yet sent
    stash: Tree  # [places, layers, ..]: of each layer (its input, residuals)
    left: Tree  # [places, layers, ..]: what I leaves for W
    loss: jax.Array | Judged  # summed; of a forward alone what all labels came to, [M, b, T] each
    measured: dict[str, jax.Array]  # beside the loss, summed
    blocks: Tree  # float32 gradients; None in a forward alone
    edge: Tree  # float32 gradients of embedding and head


class Executor:
    """One table over one model: call `train` or `judged` inside shard_map."""

    def __init__(self, forward: Forward, table: Table) -> None:
        self.forward, self.table = forward, table
        self.skips = forward.skips
        self.segments = _segments(table, self.skips)
        self.buffers = executed(table, None if self.skips else work_per_tick(self.segments))

    # --- the two programs

    def train(self, weights: Weights, batches: Batch, key: jax.Array | None, seed: jax.Array) -> tuple[Totals, Tree]:
        """Loss summed over the microbatches [M, b, T] (on each data rank), and `seed` times its gradient in float32."""
        carry = self.run(weights, batches, key, seed)
        totals = jax.tree.map(self._total, (carry.loss, carry.measured))
        return totals, {**carry.edge, "blocks": carry.blocks}

    def run(self, weights: Weights, batches: Batch, key: jax.Array | None, seed: jax.Array) -> Carry:
        """All ticks; what the buffers hold after the last one is in the carry."""
        step = _Step(self, Stage(self.forward, self.table.chunks, weights, batches, key), seed)
        carry = step.start()
        for segment in self.segments:
            carry = self._segment(step, segment, carry)
        return step.end(carry)

    def judged(self, weights: Weights, batches: Batch) -> Judged:
        """The labels one by one, [M, b, T] each, on every stage: the table's forward slots alone."""
        step = _Step(self, Stage(self.forward, self.table.chunks, weights, batches, None), jnp.zeros(()))
        carry = step.start(forward_only=True)
        if self.skips:
            rows = self._rows(np.flatnonzero(self.buffers.f_active.any(axis=1)))
            carry = _scan(step, Work(True, True, False, False, True, False), carry, rows)
        else:
            for segment in forward_alone(self.segments):
                carry = self._segment(step, segment, carry)
        return jax.tree.map(self._total, carry.loss)

    def _total(self, loss: jax.Array) -> jax.Array:
        return lax.psum(loss, PIPELINE) if PIPELINE in varying(loss) else loss

    def _segment(self, step: "_Step", segment: Segment, carry: Carry) -> Carry:
        rows, first = [], segment.first
        for ticks, _ in segment.body:
            rows.append(self._rows(first + np.arange(segment.repeats)[:, None] * segment.period + np.arange(ticks)))
            first += ticks

        def once(carry: Carry, rows: list[Row]) -> tuple[Carry, None]:
            for row, (_, work) in zip(rows, segment.body, strict=True):
                carry = _scan(step, work, carry, row)
            return carry, None

        if segment.repeats == 1:
            return once(carry, jax.tree.map(lambda a: a[0], rows))[0]
        return lax.scan(once, carry, rows)[0]

    def _rows(self, ticks: np.ndarray) -> Row:
        """This stage's instructions of the given ticks."""
        stage = lax.axis_index(PIPELINE)

        def own(array: np.ndarray) -> jax.Array:
            chosen = jnp.asarray(array[ticks])
            return lax.dynamic_index_in_dim(chosen, stage, ticks.ndim, False) if array.ndim == 2 else chosen

        rows: Row = {name: own(array) for name, array in vars(self.buffers).items() if isinstance(array, np.ndarray)}
        return rows | {"arrivals": [(own(a.active), own(a.place)) for a in self.buffers.arrivals]}


class _Step:
    """One execution of the table."""

    def __init__(self, executor: Executor, stage: Stage, seed: jax.Array) -> None:
        self.buffers, self.table, self.skips = executor.buffers, executor.table, executor.skips
        self.stage, self.seed = stage, seed
        self.shared_vocabulary = PIPELINE in executor.forward.collectives.vocabulary

    def start(self, forward_only: bool = False) -> Carry:
        depths, stage, x = self.buffers.depths, self.stage, self.stage.zeros()
        zero = jnp.zeros((), jnp.int32)
        here, microbatches = jnp.array(True), inputs(stage.batches).shape[0]
        zeros = lambda shape, like: vary(jnp.zeros(shape), varying(like))  # noqa: E731
        stash: Tree = []
        left: Tree = []
        gradients: tuple[Tree, Tree] = (None, None)
        if forward_only:
            judged = jax.eval_shape(lambda x: stage.judged(x, zero, here), x)
            loss, measured = jax.tree.map(lambda like: zeros((microbatches, *like.shape), like), judged), {}
        else:
            totals = jax.eval_shape(lambda x: stage.loss(stage.edge, x, zero, here), x)
            loss, measured = jax.tree.map(lambda like: zeros((), like), totals)
            stash, left = stage.stashed(self.table.split)
            f32 = lambda w: vary(jnp.zeros(w.shape, jnp.float32), stage.model.config.mesh.axes)  # noqa: E731
            gradients = (jax.tree.map(f32, stage.blocks.differentiated), jax.tree.map(f32, stage.edge))
        return Carry(
            f_inbox=empty((depths.f_inbox,), x),
            b_inbox=empty((depths.b_inbox,), x),
            entering=self.enter(x, jnp.asarray(self.buffers.enters_first)),
            gx=x,
            stash=empty((depths.stash, stage.layers), stash),
            left=empty((depths.cot, stage.layers), left),
            loss=loss,
            measured=measured,
            blocks=gradients[0],
            edge=gradients[1],
        )

    def end(self, carry: Carry) -> Carry:
        return self.leave(carry, jnp.asarray(self.buffers.leaves_last)) if self.buffers.leaves_last >= 0 else carry

    # --- one tick

    def tick(self, work: Work, carry: Carry, row: Row) -> Carry:
        does_f, does_head, does_b, does_w, enters, leaves = work
        if does_b:
            arriving_b = self.send(B, carry.gx)
        if leaves:
            carry = self.leave(carry, row["leaving"])
        if does_f:
            carry, y = self.do_forward(carry, row, trains=carry.blocks is not None)
            if does_b:
                # What comes is here when F is done: so the scheduler has it travel while F computes, not after it.
                y, arriving_b = lax.optimization_barrier((y, arriving_b))
            arriving_f = self.send(F, y)
            if enters:
                carry = carry._replace(entering=self.enter(carry.entering, row["entering"]))
            if does_head:
                carry = self.do_head(carry, row, y)
        if does_b:
            carry = carry._replace(b_inbox=self.keep(carry.b_inbox, arriving_b, row))
            carry, gx = self.do_backward(carry, row)
            if does_f:
                # With nothing between B's loop and this, or what comes would be sent after the loop: the scheduler takes any work for enough.
                gx, arriving_f = lax.optimization_barrier((gx, arriving_f))
            # What was sent last is what leaves next, however long that takes.
            carry = carry._replace(gx=gx if self.skips else jnp.where(row["b_active"], gx, carry.gx))
        if does_w:
            carry = self.do_weight(carry, row)
        if does_f:
            carry = carry._replace(f_inbox=self.keep(carry.f_inbox, arriving_f, row))
        return carry

    @jax.named_scope(scopes.FORWARD)
    def do_forward(self, carry: Carry, row: Row, trains: bool) -> tuple[Carry, jax.Array]:
        x = read(carry.f_inbox, row["f_in"])
        x = jnp.where(row["first"], carry.entering, x)
        slot = of_row(row, "f")

        def run(stash: Tree) -> tuple[jax.Array, Tree]:
            if not trains:
                return self.stage.run(x, slot.microbatch, slot.chunk), stash
            return self.stage.forward(x, stash, slot)

        y, stash = self.if_active(slot.active, run, lambda stash: (self.stage.zeros(), stash), carry.stash)
        return carry._replace(stash=self.settled(stash)), y

    @jax.named_scope(scopes.HEAD)
    def do_head(self, carry: Carry, row: Row, y: jax.Array) -> Carry:
        exits = row["exit"] >= 0 if self.shared_vocabulary else row["last"]
        if carry.edge is None:

            def keep(judged: Judged) -> Judged:
                return write(judged, self.stage.judged(y, row["exit"], row["last"]), row["exit"])

            return carry._replace(loss=self.when(exits, keep, lambda same: same, carry.loss))

        def run(totals: Totals, edge: Tree, b_inbox: jax.Array) -> tuple[Totals, Tree, jax.Array]:
            of = lambda w, y: self.stage.loss(w, y, row["exit"], row["last"])  # noqa: E731
            more, vjp, measured = jax.vjp(of, self.stage.edge, y, has_aux=True)
            gradient, gy = vjp(vary(self.seed, varying(more)))
            b_inbox = write(b_inbox, gy, row["head_out"], active=row["last"])
            return jax.tree.map(jnp.add, totals, (more, measured)), _add(edge, gradient), b_inbox

        before = (carry.loss, carry.measured), carry.edge, carry.b_inbox
        (loss, measured), edge, b_inbox = self.when(exits, run, lambda *same: same, *before)
        return carry._replace(loss=loss, measured=measured, edge=edge, b_inbox=b_inbox)

    @jax.named_scope(scopes.BACKWARD)
    def do_backward(self, carry: Carry, row: Row) -> tuple[Carry, jax.Array]:
        cotangent, slot = read(carry.b_inbox, row["b_in"]), of_row(row, "b")

        def run(blocks: Tree, left: Tree) -> tuple[jax.Array, Tree, Tree]:
            if self.table.split:
                gx, left = self.stage.input_gradient(carry.stash, cotangent, left, row["b_cot"], slot)
                return gx, blocks, left
            return *self.stage.backward(carry.stash, cotangent, blocks, slot), left

        idle = lambda *same: (carry.gx, *same)  # noqa: E731
        gx, blocks, left = self.if_active(slot.active, run, idle, carry.blocks, carry.left)
        return carry._replace(blocks=blocks, left=self.settled(left)), gx

    @jax.named_scope(scopes.BACKWARD)
    def do_weight(self, carry: Carry, row: Row) -> Carry:
        slot = of_row(row, "w")

        def run(blocks: Tree) -> Tree:
            return self.stage.weight_gradient(carry.stash, carry.left, blocks, row["w_cot"], slot)

        return carry._replace(blocks=self.if_active(slot.active, run, lambda same: same, carry.blocks))

    # --- the vocabulary's other end

    @jax.named_scope(scopes.EMBEDDING)
    def enter(self, before: jax.Array, microbatch: jax.Array) -> jax.Array:
        """The embedding of a microbatch, where there is one to come; of use on stage 0."""
        return self.when(
            self.at_first_stage(microbatch >= 0), lambda _: self.stage.embed(self.stage.edge, microbatch), lambda x: x, before,
        )  # fmt: skip

    @jax.named_scope(scopes.EMBEDDING)
    def leave(self, carry: Carry, microbatch: jax.Array) -> Carry:
        """What the last B of virtual stage 0 made is the embedding's gradient."""
        if not jax.tree.leaves(carry.edge["embedding"]):
            return carry
        leaves = microbatch >= 0

        def embedding_gradient(edge: Tree) -> Tree:
            here = leaves & (lax.axis_index(PIPELINE) == 0)
            return self.stage.add_embedding_gradient(edge, microbatch, jnp.where(here, carry.gx, 0))

        edge = self.if_active(self.at_first_stage(leaves), embedding_gradient, lambda edge: edge, carry.edge)
        return carry._replace(edge=edge)

    def at_first_stage(self, here: jax.Array) -> jax.Array:
        """On stage 0, or on all stages where they share the vocabulary."""
        return here if self.shared_vocabulary else here & (lax.axis_index(PIPELINE) == 0)

    # --- helpers

    def send(self, slot: int, message: jax.Array) -> Messages:
        """Sends what F or B made every way that the table uses; what comes in instead."""
        stages, around = self.table.stages, self.table.chunks > 1 and self.table.placement == "loop"
        arriving = {}
        for i, arrival in enumerate(self.buffers.arrivals):
            if arrival.slot == slot:
                shift = arrival.shift
                pairs = [(s, (s + shift) % stages) for s in range(stages) if around or 0 <= s + shift < stages]
                arriving[i] = lax.ppermute(message, PIPELINE, pairs) if shift else message
        return arriving

    def keep(self, inbox: jax.Array, arriving: Messages, row: Row) -> jax.Array:
        for i, message in arriving.items():
            active, place = row["arrivals"][i]
            inbox = write(inbox, message, place, active=active)
        return inbox

    def if_active(self, active: jax.Array, run: Callable, idle: Callable, *operands: Tree) -> Any:
        """`run(*operands)`, on CPU only where active: elsewhere an idle stage computes what nobody reads (see `schedule.executed`)."""
        return lax.cond(active, run, idle, *operands) if self.skips else run(*operands)

    def settled(self, buffers: Tree) -> Tree:
        """Written before the next slot reads: of a chunk of one layer, which is no loop, XLA would have both read what was there before,
        and copy the buffer for that."""
        return buffers if self.skips else jax.tree.map(lax.optimization_barrier, buffers)

    def when(self, active: jax.Array, run: Callable, idle: Callable, *operands: Tree) -> Any:
        """`run(*operands)` where active, else `idle(*operands)`: skipped on CPU, selected elsewhere."""
        if self.skips:
            return lax.cond(active, run, idle, *operands)
        return jax.tree.map(lambda a, b: jnp.where(active, a, b), run(*operands), idle(*operands))


def of_row(row: Row, letter: str) -> Slot:
    """What a slot (f, b, w) of this tick does."""
    return Slot(*(row[f"{letter}_{name}"] for name in ("active", "microbatch", "chunk", "stash")))


def _scan(step: _Step, work: Work, carry: Carry, rows: Row) -> Carry:
    """Ticks of the same work, one after the other."""
    return lax.scan(lambda carry, row: (step.tick(work, carry, row), None), carry, rows)[0]


def _segments(table: Table, skips: bool) -> list[Segment]:
    """One where idle slots are skipped anyway; else those whose ticks do the same work."""
    if skips:
        return [Segment(0, 1, ((table.ticks, Work(True, True, True, table.split, True, True)),))]
    return segments(table)


def _add(total: Tree, more: Tree) -> Tree:
    return jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, more)
