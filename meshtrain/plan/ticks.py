"""What the planner asks of the pipeline's table: facts, time, and how often a device computes and sends."""

import functools

import numpy as np

from meshtrain.config import Config
from meshtrain.parallel.placement import stages
from meshtrain.plan.compute import OURS, Practice
from meshtrain.plan.flow import Trips
from meshtrain.plan.seconds import Pieces
from meshtrain.schedule.buffers import allocate
from meshtrain.schedule.facts import ONE_STAGE, Facts
from meshtrain.schedule.generators import facts_of, make_table
from meshtrain.schedule.segments import forward_alone, needed, segments, work_per_tick
from meshtrain.schedule.shifted import one_later
from meshtrain.schedule.simulate import Durations, PerChunk, Timeline, simulate
from meshtrain.schedule.table import B, F, Table


def _sizes(config: Config) -> tuple[str, int, int, int]:
    return config.parallel.schedule, config.mesh.pipeline, config.parallel.microbatches, stages(config).chunks


def table(config: Config) -> Table:
    """The table of a config's schedule."""
    return make_table(*_sizes(config))


def facts(config: Config) -> Facts:
    """The facts of a config's schedule, by formula where there is one: searches ask for thousands."""
    return ONE_STAGE if config.mesh.pipeline == 1 else facts_of(*_sizes(config))


def trips(config: Config, skips: bool = False) -> Trips:
    """How often a device computes each slot of the table, idly or not; where the program `skips` idle work (on CPU), only
    when it has work. Messages go in every tick all the same."""
    p, m, v = config.mesh.pipeline, config.parallel.microbatches, stages(config).chunks
    if p == 1:
        return Trips(m, m, m)
    if skips:
        ticks = table(config).ticks
        return Trips(m * v, m, m * v, embedding=m, unembedding=m, down=ticks, up=ticks)
    return _trips(table(config))


def reference_trips(config: Config, skips: bool = False) -> Trips | None:
    """The same of dpo's forward without adapters, which takes the table's forwards alone."""
    if config.train.objective != "dpo":
        return None
    p, m, v = config.mesh.pipeline, config.parallel.microbatches, stages(config).chunks
    if p == 1:
        return Trips(m, m, 0, unhead=0)
    busy = int(needed(table(config))[:, 0].sum())
    if skips:
        return Trips(m * v, m, 0, embedding=m, unhead=0, down=busy)
    forward, head, _, _, enter, _ = work_per_tick(forward_alone(segments(table(config)))).sum(axis=0).tolist()
    return Trips(forward, head, 0, embedding=1 + enter, unhead=0, down=_trips(table(config)).of("down"))


@functools.lru_cache(maxsize=32)
def _trips(table: Table) -> Trips:
    """What a tick does is the same in all turns of a segment; of one that is compiled alone XLA leaves out what the table has no use
    for: embeddings of no microbatch, and messages that nobody keeps.
    """
    found, buffers = segments(table), allocate(table)
    work = work_per_tick(found)
    forward, head, backward, _, enter, leave = work.sum(axis=0).tolist()
    alone = np.zeros(table.ticks, bool)
    alone[[segment.first for segment in found if segment.repeats * segment.period == 1]] = True

    def messages(slot: int, ticks: np.ndarray) -> int:
        """In `ticks`, every way that the table uses at all. A cotangent travels in the next of them."""
        sent = 0
        for arrival in buffers.arrivals:
            if arrival.slot == slot and arrival.shift:
                needed = np.asarray(arrival.active.any(axis=1))
                needed = one_later(needed, ticks, False) if slot == B else needed
                sent += int((~alone | needed)[ticks].sum())
        return sent

    goes, comes = np.flatnonzero(work[:, 0]), np.flatnonzero(work[:, 2])
    return Trips(
        forward,
        head,
        backward,
        # The first before all ticks, the last after them.
        embedding=1 + enter,
        unembedding=leave + 1,
        down=messages(F, goes),
        up=messages(B, comes),
    )


def durations(config: Config, pieces: Pieces, split: bool, optimizer: float = 0.0) -> Durations:
    """The simulator's durations from one microbatch's pieces, of a table that is `split` or not. Virtual stages are as long as they
    have layers.
    """
    stage = stages(config)
    share: PerChunk = 1.0  # of the longest virtual stage's layers
    if len(set(stage.counts)) > 1:
        share = np.array(stage.counts) / stage.longest
    spread = config.parallel.vocab == "spread"
    return Durations(
        forward=pieces.chunk_forward * share,
        input_grad=(pieces.chunk_backward - pieces.chunk_weight_grad + split * pieces.layers * pieces.leaving) * share,
        weight_grad=pieces.chunk_weight_grad * share,
        message=pieces.message,
        head=pieces.head_total * (config.mesh.pipeline if spread else 1),
        head_spread=spread,
        optimizer=optimizer,
    )


def timeline(config: Config, pieces: Pieces, practice: Practice = OURS, optimizer: float = 0.0) -> Timeline:
    """The step as the simulator plays it."""
    of_step = table(config)
    return simulate(of_step, durations(config, pieces, of_step.split, optimizer), practice.clock)


def quick(config: Config, facts: Facts, pieces: Pieces) -> float:
    """Seconds of all microbatches by the facts alone, for searches: in lockstep, all stages as long as the longest."""
    if config.mesh.pipeline == 1:
        layers = stages(config).chunks * (pieces.chunk_forward + pieces.chunk_backward)
        return config.parallel.microbatches * (layers + pieces.head_total) + reference(config, facts, pieces)
    weight = pieces.chunk_weight_grad
    leaving = pieces.layers * pieces.leaving if facts.depths.cot else 0.0
    each = Durations(pieces.chunk_forward, pieces.chunk_backward - weight + leaving, weight, head=pieces.head_total)
    # Where forwards or backwards stand alone nothing hides a message; else a forward hides a cotangent's, a backward an activation's.
    shown = (facts.forward + facts.backward - 2 * facts.together) * pieces.message
    for hides in (pieces.chunk_forward, pieces.chunk_backward):
        shown += facts.together * max(0.0, pieces.message - hides)
    return facts.seconds(each) + shown + reference(config, facts, pieces)


def reference(config: Config, facts: Facts, pieces: Pieces) -> float:
    """Seconds of dpo's forward without adapters, of all microbatches: there are no backwards that would hide its messages."""
    if config.mesh.pipeline == 1:
        each = stages(config).chunks * pieces.reference + pieces.reference_head
        return config.parallel.microbatches * each
    # without the objective nothing is sent
    message = pieces.message if pieces.reference else 0.0
    return facts.forward * (pieces.reference + message) + facts.head * pieces.reference_head
