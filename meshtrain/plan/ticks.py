"""What the planner asks of the pipeline's table: ticks, buffer depths and time, by formula where there is one."""

import functools
import math
from dataclasses import dataclass

import numpy as np

from meshtrain.config import Config
from meshtrain.parallel.placement import stages
from meshtrain.plan.compute import OURS, Practice
from meshtrain.plan.memory import ONE_STAGE, Depths
from meshtrain.plan.seconds import Pieces
from meshtrain.plan.traffic import Trips
from meshtrain.schedule import closed_form
from meshtrain.schedule.buffers import allocate
from meshtrain.schedule.generators import make_table
from meshtrain.schedule.segments import loops, work_per_tick
from meshtrain.schedule.simulate import Durations, PerChunk, Timeline, simulate
from meshtrain.schedule.table import Table


@functools.lru_cache(maxsize=512)
def _table(schedule: str, stages: int, microbatches: int, chunks: int) -> Table:
    return make_table(schedule, stages, microbatches, chunks)


def table(config: Config) -> Table:
    """The table of a config's schedule."""
    return _table(config.parallel.schedule, config.mesh.pipeline, config.parallel.microbatches, stages(config).chunks)  # fmt: skip


@functools.lru_cache(maxsize=512)
def _depths(schedule: str, stages: int, microbatches: int, chunks: int) -> Depths:
    found = allocate(_table(schedule, stages, microbatches, chunks))
    return Depths(found.stash, found.f_inbox, found.b_inbox, found.cot)


def depths(config: Config) -> Depths:
    """Entries of each buffer, from the table itself."""
    if config.mesh.pipeline == 1:
        return ONE_STAGE
    return _depths(config.parallel.schedule, config.mesh.pipeline, config.parallel.microbatches, stages(config).chunks)  # fmt: skip


def quick_depths(config: Config) -> Depths:
    """Buffer depths by formula, for searches: exact where stages divide microbatches, never too small for the stash."""
    p, m, v = config.mesh.pipeline, config.parallel.microbatches, stages(config).chunks
    schedule = config.parallel.schedule
    if p == 1:
        return ONE_STAGE
    if schedule in ("gpipe", "looped_bfs"):
        return Depths(v * m, f_inbox=max(1, m - p + 1) if v > 1 else 1, b_inbox=m)
    if schedule == "v_1f1b":
        return Depths(min(2 * m, 2 * p), 1, 1)
    group = p if v == 1 else max(p, _group(p, m))
    split = schedule.startswith("zb_")
    waits = 1 + (group - p) * (v - 1)
    return Depths(min(v * m, v * group + p - 1), waits, waits, cot=min(p, m) if split else 0)


def _group(p: int, m: int) -> int:
    """Most microbatches that go through a stage's chunks together (see `generators._one_forward_one_backward`)."""
    return math.ceil(m / max(1, m // p))


def trips(config: Config, skips: bool = False) -> Trips:
    """How often a device computes each slot of the table, idly or not; where the program `skips` idle work (on CPU), only
    when it has work. Messages go in every tick all the same."""
    p, m, v = config.mesh.pipeline, config.parallel.microbatches, stages(config).chunks
    if p == 1:
        return Trips(m, m, m)
    if skips:
        ticks = table(config).ticks
        return Trips(m * v, m, m * v, embedding=m, unembedding=m, down=ticks, up=ticks)
    return _trips(config.parallel.schedule, p, m, v)


@functools.lru_cache(maxsize=512)
def _trips(schedule: str, stages: int, microbatches: int, chunks: int) -> Trips:
    """What a tick does is the same in all turns of a loop; of one that is compiled alone XLA leaves out what the table has no use for:
    embeddings of no microbatch, and messages that nobody keeps.
    """
    made = _table(schedule, stages, microbatches, chunks)
    found, buffers = loops(made), allocate(made)
    work = work_per_tick(found)
    forward, head, backward, _ = work.sum(axis=0).tolist()
    alone = np.zeros(made.ticks, bool)
    alone[[loop.first for loop in found if loop.repeats * loop.period == 1]] = True

    def messages(ticks: np.ndarray, *ways: np.ndarray, late: int = 0) -> int:
        """In `ticks`, every way that the table uses at all. A cotangent travels `late`, in the next of the ticks."""
        sent = 0
        for way in [np.asarray(way.any(axis=1)) for way in ways if way.any()]:
            needed = np.insert(way[ticks], 0, [False] * late)[: len(ticks)]
            sent += int((~alone[ticks] | needed).sum())
        return sent

    goes, comes = np.flatnonzero(work[:, 0]), np.flatnonzero(work[:, 2])
    return Trips(
        forward,
        head,
        backward,
        embedding=int((~alone[goes] | (buffers.enter[goes] >= 0)).sum()),
        unembedding=int((~alone[comes] | (buffers.leave[comes] >= 0)).sum()),
        down=messages(goes, buffers.recv_f_active, buffers.recv_f_up_active),
        up=messages(comes, buffers.recv_b_active, buffers.recv_b_down_active, late=1),
    )


def durations(config: Config, pieces: Pieces, optimizer: float = 0.0) -> Durations:
    """The simulator's durations from one microbatch's pieces. Layers of each virtual stage as the split has them."""
    stage = stages(config)
    share: PerChunk = 1.0  # of the longest virtual stage's layers
    if len(set(stage.counts)) > 1:
        share = np.array(stage.counts) / stage.longest
    forward, backward, weight = (
        pieces.chunk_forward * share,
        pieces.chunk_backward * share,
        pieces.chunk_weight_grad * share,
    )
    spread = config.parallel.vocab == "spread"
    head = pieces.head_total
    return Durations(
        forward=forward,
        input_grad=backward - weight,
        weight_grad=weight,
        message=pieces.message,
        head=head * (config.mesh.pipeline if spread else 1),
        head_spread=spread,
        optimizer=optimizer,
    )


def timeline(config: Config, pieces: Pieces, practice: Practice = OURS, optimizer: float = 0.0) -> Timeline:
    """The step as the simulator plays it."""
    return simulate(table(config), durations(config, pieces, optimizer), practice.clock)


@dataclass(frozen=True)
class PipelineTime:
    """Seconds of all microbatches: `busy` of them on the longest stage, `idle` waiting for others."""

    busy: float
    idle: float
    ticks: int

    @property
    def total(self) -> float:
        return self.busy + self.idle


def quick(config: Config, pieces: Pieces) -> PipelineTime:
    """By formula (`schedule.closed_form`), for searches: lockstep, all stages as long as the longest."""
    p, m, v = config.mesh.pipeline, config.parallel.microbatches, stages(config).chunks
    weight = pieces.chunk_weight_grad
    each = Durations(pieces.chunk_forward, pieces.chunk_backward - weight, weight)
    busy = m * (v * (pieces.chunk_forward + pieces.chunk_backward) + pieces.head_total)
    if p == 1:
        return PipelineTime(busy, 0.0, m)
    idle = closed_form.bubble(config.parallel.schedule, p, m, v, each)
    rounds = p - 1 + (v - 1) * max(0, p - m)
    ticks = v * m + rounds
    # Where forwards or backwards stand alone nothing hides a message; else a forward hides a cotangent's, a backward an activation's.
    together = config.parallel.schedule not in ("gpipe", "looped_bfs")
    alone = min(ticks, (v - 1) * max(p, _group(p, m)) + p - 1) if together else ticks
    idle += 2 * alone * pieces.message
    steady = max(0, ticks - alone)
    for hides in (pieces.chunk_forward, pieces.chunk_backward):
        idle += steady * max(0.0, pieces.message - hides)
    return PipelineTime(busy, idle, ticks)
