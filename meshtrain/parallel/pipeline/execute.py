"""Runs any legal schedule table inside the fully manual shard_map: one scan over ticks, four slots a tick.

    tick t   F: stage input → output, residuals to the stash      (this stage's row of the table says which microbatch)
             H: loss head on what left the last virtual stage      (all stages, where they share the vocabulary)
             B: cotangent + stash → input gradient, weight gradient (only the former where the table splits them)
             W: weight gradient

Messages travel while the device computes. An activation leaves after F and travels during H, B and W; a cotangent leaves at the
start of the next tick that has a B, and travels during its F:

    tick t       F  H  B  W
                  ╰──y────►
    tick t + 1   F  H  B  W
               ──►  the gx of tick t

Every device runs the same program. On CPU idle slots are skipped (lax.cond). Elsewhere a predicate would be waited for, so a slot
that any stage uses is computed by all and masked where idle; `loops` groups the ticks so that little is.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshtrain.compat import vary, varying
from meshtrain.mesh import AXES, PIPELINE
from meshtrain.parallel.forward import Batch, Forward
from meshtrain.parallel.pipeline.stage import Stage
from meshtrain.parallel.pipeline.storage import read, ring, write
from meshtrain.parallel.zero import Weights
from meshtrain.schedule.buffers import Buffers, allocate
from meshtrain.schedule.segments import Loop, Work, loops, work_per_tick
from meshtrain.schedule.table import Table

Tree = Any
Row = dict[str, jax.Array]  # this stage's entry of every array of Buffers, for one tick


class Carry(NamedTuple):
    """What goes from tick to tick: every buffer's first axis counts its slots."""

    f_inbox: jax.Array
    b_inbox: jax.Array
    gx: jax.Array  # the cotangent that the last B made, not yet sent
    stash: Tree  # (stage inputs, residuals)
    cotangents: Tree  # what I leaves for W
    loss: jax.Array
    blocks: Tree  # float32 gradients, first axis: chunks
    edge: Tree  # float32 gradients of embedding and head


class Executor:
    """One table over one model: call `train` or `evaluate` inside shard_map."""

    def __init__(self, forward: Forward, table: Table) -> None:
        self.forward, self.table = forward, table
        self.skips = forward.skips
        self.loops = _loops(table, self.skips)
        self.buffers = _received_late(allocate(table), work_per_tick(self.loops)[:, 2])

    # --- the two programs

    def train(self, weights: Weights, batches: Batch, key: jax.Array | None, seed: jax.Array) -> tuple[jax.Array, Tree]:
        """Loss summed over the microbatches [M, b, T] (on each data rank), and `seed` times its gradient in float32."""
        carry = self.run(weights, batches, key, seed)
        blocks = jax.tree.map(lambda g: g.reshape((-1, *g.shape[2:])), carry.blocks)
        return self._total(carry.loss), {**carry.edge, "blocks": blocks}

    def run(self, weights: Weights, batches: Batch, key: jax.Array | None, seed: jax.Array) -> Carry:
        """All ticks; what the buffers hold after the last one is in the carry."""
        step = _Step(self, Stage(self.forward, self.table.chunks, weights, batches, key), seed)
        carry = step.start()
        for loop in self.loops:
            carry = self._loop(step, loop.first, loop.repeats, loop.body, carry)
        return carry

    def evaluate(self, weights: Weights, batches: Batch) -> jax.Array:
        """Summed loss: the table's forward slots alone."""
        step = _Step(self, Stage(self.forward, self.table.chunks, weights, batches, None), jnp.zeros(()))
        carry = step.start(forward_only=True)
        busy = np.flatnonzero(self.buffers.f_active.any(axis=1))
        rows = self._rows(busy)
        return self._total(_scan(step, (True, True, False, False), carry, rows).loss)

    def _total(self, loss: jax.Array) -> jax.Array:
        return lax.psum(loss, PIPELINE) if PIPELINE in varying(loss) else loss

    def _loop(self, step: "_Step", first: int, repeats: int, body: Iterable[tuple[int, Work]], carry: Carry) -> Carry:
        parts, at = [], 0
        period = sum(ticks for ticks, _ in body)
        for ticks, work in body:
            places = first + at + np.arange(repeats)[:, None] * period + np.arange(ticks)
            parts.append((self._rows(places), work))
            at += ticks

        def once(carry: Carry, rows: list[Row]) -> tuple[Carry, None]:
            for row, (_, work) in zip(rows, parts, strict=True):
                carry = _scan(step, work, carry, row)
            return carry, None

        rows = [row for row, _ in parts]
        if repeats == 1:
            return once(carry, jax.tree.map(lambda a: a[0], rows))[0]
        return lax.scan(once, carry, rows)[0]

    def _rows(self, ticks: np.ndarray) -> Row:
        """This stage's instructions of the given ticks."""
        stage = lax.axis_index(PIPELINE)
        rows = {}
        for field in dataclasses.fields(self.buffers):
            array = getattr(self.buffers, field.name)
            if isinstance(array, np.ndarray):
                chosen = jnp.asarray(array[ticks])
                per_stage = array.ndim == 2
                rows[field.name] = lax.dynamic_index_in_dim(chosen, stage, ticks.ndim, False) if per_stage else chosen
        return rows


class _Step:
    """One execution of the table."""

    def __init__(self, executor: Executor, stage: Stage, seed: jax.Array) -> None:
        self.buffers, self.table, self.skips = executor.buffers, executor.table, executor.skips
        self.stage, self.seed = stage, seed
        self.shared_vocabulary = PIPELINE in executor.forward.collectives.vocabulary

    def start(self, forward_only: bool = False) -> Carry:
        buffers, stage, x = self.buffers, self.stage, self.stage.zeros()
        zero = jnp.zeros((), jnp.int32)
        loss = jax.eval_shape(lambda x: stage.loss(stage.edge, x, zero, jnp.array(True)), x)
        kept: Tree = []
        cotangents: Tree = []
        gradients: tuple[Tree, Tree] = (None, None)
        if not forward_only:
            kept = jax.eval_shape(lambda x: stage.forward(x, zero, zero)[1], x)
            if self.table.split:
                first = lambda x, kept: stage.split(x, kept, x, zero, zero).first(x, kept, x)[1]  # noqa: E731
                cotangents = jax.eval_shape(first, x, kept)
            f32 = lambda w: vary(jnp.zeros(w.shape, jnp.float32), AXES)  # noqa: E731
            gradients = (jax.tree.map(f32, stage.blocks), jax.tree.map(f32, stage.edge))
        return Carry(
            f_inbox=ring(buffers.f_inbox, x),
            b_inbox=ring(buffers.b_inbox, x),
            gx=x,
            stash=ring(buffers.stash, (x, kept)) if not forward_only else [],
            cotangents=ring(buffers.cot, cotangents),
            loss=vary(jnp.zeros(()), varying(loss)),
            blocks=gradients[0],
            edge=gradients[1],
        )

    # --- one tick

    def tick(self, work: Work, carry: Carry, row: Row) -> Carry:
        does_f, does_head, does_b, does_w = work
        if does_b:
            arriving_b = self.send("recv_b", carry.gx)
        if does_f:
            carry, y = self.do_forward(carry, row, stash=carry.blocks is not None)
            if (
                does_b
            ):  # what comes is here when F is done: so the scheduler has it travel while F computes, not after it
                y, arriving_b = lax.optimization_barrier((y, arriving_b))
            arriving_f = self.send("recv_f", y)
            if does_head:
                carry = self.do_head(carry, row, y)
        if does_b:
            carry = carry._replace(b_inbox=self.keep(carry.b_inbox, arriving_b, row))
            carry = self.do_backward(carry, row)
        if does_w:
            carry = self.do_weight(carry, row)
        if does_f:
            carry = carry._replace(f_inbox=self.keep(carry.f_inbox, arriving_f, row))
        return carry

    def do_forward(self, carry: Carry, row: Row, stash: bool) -> tuple[Carry, jax.Array]:
        x = lax.dynamic_index_in_dim(carry.f_inbox, row["f_in"], 0, keepdims=False)
        enters = row["enter"] >= 0 if self.shared_vocabulary else row["first"]

        def embed(x: jax.Array) -> jax.Array:
            return jnp.where(row["first"], self.stage.embed(self.stage.edge, row["enter"]), x)

        x = self.when(enters, embed, lambda x: x, x)

        def run(rings: Tree) -> tuple[jax.Array, Tree]:
            if not stash:
                return self.stage.run(x, row["f_microbatch"], row["f_chunk"]), rings
            y, kept = self.stage.forward(x, row["f_microbatch"], row["f_chunk"])
            return y, write(rings, row["f_stash"], (x, kept), self.mask(row["f_active"]))

        y, rings = self.when(row["f_active"], run, lambda rings: (self.stage.zeros(), rings), carry.stash, masked=True)
        return carry._replace(stash=rings), y

    def do_head(self, carry: Carry, row: Row, y: jax.Array) -> Carry:
        exits = row["exit"] >= 0 if self.shared_vocabulary else row["last"]
        trains = carry.edge is not None

        def run(loss: jax.Array, edge: Tree, b_inbox: jax.Array) -> tuple[jax.Array, Tree, jax.Array]:
            if not trains:
                return loss + self.stage.loss(self.stage.edge, y, row["exit"], row["last"]), edge, b_inbox
            more, vjp = jax.vjp(lambda w, y: self.stage.loss(w, y, row["exit"], row["last"]), self.stage.edge, y)
            gradient, gy = vjp(vary(self.seed, varying(more)))
            b_inbox = write(b_inbox, row["head_out"], gy, row["last"])
            return loss + more, _add(edge, gradient), b_inbox

        loss, edge, b_inbox = self.when(exits, run, lambda *same: same, carry.loss, carry.edge, carry.b_inbox)
        return carry._replace(loss=loss, edge=edge, b_inbox=b_inbox)

    def do_backward(self, carry: Carry, row: Row) -> Carry:
        cotangent = lax.dynamic_index_in_dim(carry.b_inbox, row["b_in"], 0, keepdims=False)

        def run(blocks: Tree, cotangents: Tree) -> tuple[jax.Array, Tree, Tree]:
            x, kept = read(carry.stash, row["b_stash"])
            at = row["b_microbatch"], row["b_chunk"]
            if self.table.split:
                (gx,), left = self.stage.split(x, kept, cotangent, *at).first(x, kept, cotangent)
                return gx, blocks, write(cotangents, row["b_cot"], left, self.mask(row["b_active"]))
            gradient, _, gx = self.stage.backward(x, kept, *at)(cotangent)
            return gx, self.add_chunk(blocks, gradient, row["b_chunk"]), cotangents

        idle = lambda *same: (self.stage.zeros(), *same)  # noqa: E731
        gx, blocks, cotangents = self.when(row["b_active"], run, idle, carry.blocks, carry.cotangents)
        leaves = row["leave"] >= 0
        here = leaves & (lax.axis_index(PIPELINE) == 0)

        def embedding_gradient(edge: Tree) -> Tree:
            _, vjp = jax.vjp(lambda w: self.stage.embed(w, row["leave"]), self.stage.edge)
            return _add(edge, vjp(jnp.where(here, gx, 0))[0])

        edge = self.when(leaves if self.shared_vocabulary else here, embedding_gradient, lambda e: e, carry.edge)
        return carry._replace(gx=gx, blocks=blocks, edge=edge, cotangents=cotangents)

    def do_weight(self, carry: Carry, row: Row) -> Carry:
        def run(blocks: Tree) -> Tree:
            x, kept = read(carry.stash, row["w_stash"])
            left = read(carry.cotangents, row["w_cot"])
            halves = self.stage.split(x, kept, self.stage.zeros(), row["w_microbatch"], row["w_chunk"])
            leaves = halves.second(left, x, kept, None)
            gradient = jax.tree.unflatten(jax.tree.structure(self.stage.blocks), leaves)
            return self.add_chunk(blocks, gradient, row["w_chunk"])

        return carry._replace(blocks=self.when(row["w_active"], run, lambda same: same, carry.blocks))

    # --- helpers

    def add_chunk(self, blocks: Tree, gradient: Tree, chunk: jax.Array) -> Tree:
        if self.table.chunks == 1:
            return jax.tree.map(lambda total, g: total + g[None].astype(jnp.float32), blocks, gradient)
        return jax.tree.map(lambda total, g: total.at[chunk].add(g.astype(jnp.float32)), blocks, gradient)

    def send(self, name: str, message: jax.Array) -> dict[str, jax.Array]:
        """Sends `message` every way that the table uses; what comes in instead, by the array that says where it is kept."""
        stages, arriving = self.table.stages, {}
        shifts = {"": 1, "_up": -1, "_local": 0} if name == "recv_f" else {"": -1, "_down": 1, "_local": 0}
        for way, shift in shifts.items():
            if getattr(self.buffers, f"{name}{way}_active").any():
                around = self.table.chunks > 1 and self.table.placement == "loop"
                pairs = [(s, (s + shift) % stages) for s in range(stages) if around or 0 <= s + shift < stages]
                arriving[f"{name}{way}"] = lax.ppermute(message, PIPELINE, pairs) if shift else message
        return arriving

    def keep(self, inbox: jax.Array, arriving: dict[str, jax.Array], row: Row) -> jax.Array:
        """Messages into the slots that the row says."""
        for place, message in arriving.items():
            inbox = write(inbox, row[place], message, row[f"{place}_active"])
        return inbox

    def mask(self, active: jax.Array) -> jax.Array | None:
        """Inside a slot: the predicate that writes must respect, None where the slot is skipped when idle."""
        return None if self.skips else active

    def when(self, active: jax.Array, run: Callable, idle: Callable, *operands: Tree, masked: bool = False) -> Any:
        """`run(*operands)` where active, else `idle(*operands)`: skipped on CPU, selected elsewhere (`masked`: run does it)."""
        if self.skips:
            return lax.cond(active, run, idle, *operands)
        if masked:
            return run(*operands)
        return jax.tree.map(lambda a, b: jnp.where(active, a, b), run(*operands), idle(*operands))


def _scan(step: _Step, work: Work, carry: Carry, rows: Row) -> Carry:
    """Ticks of the same work, one after the other."""
    return lax.scan(lambda carry, row: (step.tick(work, carry, row), None), carry, rows)[0]


def _loops(table: Table, skips: bool) -> list[Loop]:
    """One loop where idle slots are skipped anyway; else loops whose ticks do the same work."""
    if skips:
        return [Loop(0, 1, ((table.ticks, (True, True, True, table.split)),))]
    return loops(table)


def _received_late(buffers: Buffers, does_b: np.ndarray) -> Buffers:
    """The table's cotangents kept one B later than they are sent: by the next of the ticks in which `does_b` holds."""
    ticks = np.flatnonzero(does_b)
    later = {}
    for field in dataclasses.fields(buffers):
        if field.name.startswith("recv_b"):
            array = getattr(buffers, field.name)
            later[field.name] = np.zeros_like(array)
            later[field.name][ticks[1:]] = array[ticks[:-1]]
    return dataclasses.replace(buffers, **later)


def _add(total: Tree, more: Tree) -> Tree:
    return jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, more)
