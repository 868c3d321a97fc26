"""The planner's questions to the pipeline's table: facts, time, and how often a device computes and sends."""

import functools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from meshtrain.config import Config
from meshtrain.config.follow import runs_table
from meshtrain.config.rl import has_reference
from meshtrain.parallel.placement import stages, table
from meshtrain.plan.compute import DEFAULT_PROFILE, FrameworkProfile
from meshtrain.plan.gradient_traffic import Iterations
from meshtrain.plan.layer_costs import LayerCost
from meshtrain.plan.seconds import MicrobatchCosts
from meshtrain.schedule.buffers import compile_table
from meshtrain.schedule.facts import ONE_STAGE, ScheduleFacts, facts_of
from meshtrain.schedule.phases import ops_per_clock, table_ops
from meshtrain.schedule.simulation import Durations, PerChunk, Timeline, simulate
from meshtrain.schedule.table import B, F, Table


def facts(config: Config) -> ScheduleFacts:
    """The facts of a config's schedule, by formula where there is one: searches ask for thousands."""
    parallel = config.parallel
    sizes = config.mesh.pipeline, parallel.microbatches, stages(config).chunks
    return facts_of(parallel.schedule, *sizes) if runs_table(config) else ONE_STAGE


def iterations(config: Config, skips: bool = False) -> Iterations:
    """Returns how often a device computes each slot of the table, idly or not.

    If the program `skips` idle work (on CPU), it computes only when it has work. Messages go in every clock all the
    same.
    """
    m = config.parallel.microbatches
    v = stages(config).chunks
    if not runs_table(config):
        return Iterations(m, m, m)
    if skips:
        clocks = table(config).clocks
        return Iterations(
            m * v, m, m * v, embedding=m, unembedding=m, down=clocks, up=clocks
        )
    return _iterations(table(config))


def reference_iterations(config: Config, skips: bool = False) -> Iterations | None:
    """`iterations` of dpo's forward without adapters, which takes the table's forwards alone."""
    if not has_reference(config):
        return None
    m = config.parallel.microbatches
    v = stages(config).chunks
    if not runs_table(config):
        return Iterations(m, m, 0, unhead=0)
    busy = int(table_ops(table(config))[:, 0].sum())
    if skips:
        return Iterations(m * v, m, 0, embedding=m, unhead=0, down=busy)
    return replace(
        _iterations(table(config)), backward=0, unembedding=None, unhead=0, up=None
    )


@functools.lru_cache(maxsize=32)
def _iterations(table: Table) -> Iterations:
    """Counts the iterations phase by phase: a clock does the same in all turns of a phase.

    In a clock that is compiled alone, XLA leaves out what the table has no use for: embeddings of no microbatch, and
    messages that nobody keeps.
    """
    program = compile_table(table)
    work = ops_per_clock(program.phases)
    forward, head, backward, *_ = work.sum(axis=0).tolist()
    alone = np.zeros(table.clocks, bool)
    alone[
        [phase.first for phase in program.phases if phase.repeats * phase.period == 1]
    ] = True

    def times(kind: int, used: np.ndarray) -> int:
        return int((work[:, kind] & (~alone | used)).sum())

    def messages(slot: int, kind: int) -> int:
        """Every way that the table uses at all."""
        arrivals = (a for a in program.arrivals if a.slot == slot and a.shift)
        return sum(times(kind, np.asarray(a.active.any(axis=1))) for a in arrivals)

    return Iterations(
        forward,
        head,
        backward,
        # The first before all clocks, the last after them.
        embedding=1 + times(4, program.entering >= 0),
        unembedding=times(5, program.leaving >= 0) + (program.leaves_last >= 0),
        down=messages(F, 0),
        up=messages(B, 2),
    )


def durations(
    config: Config, costs: MicrobatchCosts, split: bool, optimizer: float = 0.0
) -> Durations:
    """The simulator's durations from one microbatch's costs, of a table that is `split` or not.

    Virtual stages are as long as they have layers.
    """
    share: PerChunk = 1.0  # of the longest virtual stage's layers
    if len(set(costs.of_stages)) > 1:
        share = np.array(costs.of_stages) / costs.layers
    spread = config.parallel.vocab == "spread"
    return Durations(
        forward=costs.chunk_forward * share,
        input_grad=(
            costs.chunk_backward
            - costs.chunk_weight_grad
            + split * costs.chunk_residuals
        )
        * share,
        weight_grad=costs.chunk_weight_grad * share,
        forward_hidden=costs.layers * costs.layer.forward_hidden * share,
        backward_hidden=costs.layers * costs.layer.backward_hidden * share,
        message=costs.message.overlapped,
        head=costs.edge.total * (config.mesh.pipeline if spread else 1),
        head_spread=spread,
        optimizer=optimizer,
    )


def timeline(
    config: Config,
    costs: MicrobatchCosts,
    profile: FrameworkProfile = DEFAULT_PROFILE,
    optimizer: float = 0.0,
    sent: Sequence[float] = (0.0, 0.0),
) -> Timeline:
    """The step as the simulator plays it; `sent`: seconds of a chunk's gather and reduction over data, where the table
    has them travel.
    """
    of_step = table(config)
    if not any(sent):
        of_step = of_step.drop_sends()
    each = durations(config, costs, of_step.split, optimizer)
    return simulate(
        of_step, replace(each, gather=sent[0], reduce=sent[1]), profile.execution
    )


def hidden(config: Config, layer: LayerCost) -> float:
    """Seconds of a layer's messages that pairs hide, of one microbatch in the mean: in pairs of F and B those of both,
    of I and W those of I.
    """
    known = facts(config)
    count = config.parallel.microbatches * stages(config).chunks
    together = known.paired * known.together / count
    covered = known.covered / count
    return (
        min(1.0, together) * layer.forward_hidden
        + min(1.0, together + covered) * layer.backward_hidden
    )


def quick(config: Config, facts: ScheduleFacts, costs: MicrobatchCosts) -> float:
    """Seconds of all microbatches by the facts alone, for searches: in lockstep, all stages as long as the longest."""
    if not runs_table(config):
        return config.parallel.microbatches * costs.stage + reference(
            config, facts, costs
        )
    weight = costs.chunk_weight_grad
    residuals = costs.chunk_residuals if facts.depths.cot else 0.0
    message = costs.message.overlapped
    each = Durations(
        costs.chunk_forward,
        costs.chunk_backward - weight + residuals,
        weight,
        head=costs.edge.total,
        forward_hidden=costs.layers * costs.layer.forward_hidden,
        backward_hidden=costs.layers * costs.layer.backward_hidden,
    )
    # Where forwards or backwards stand alone nothing hides a message; else a forward hides a cotangent's, a backward an
    # activation's.
    alone = facts.forward + facts.backward - facts.together
    if facts.paired:
        # Both leave at once, with what stands behind the pair to hide them: W, and in some clocks the head.
        shown = alone * max(0.0, message - facts.split * weight)
        shown = max(0.0, shown - facts.head * min(message, costs.edge.total))
    else:
        shown = (alone - facts.together) * message
        for hides in (costs.chunk_forward, costs.chunk_backward):
            shown += facts.together * max(0.0, message - hides)
    return facts.seconds(each) + shown + reference(config, facts, costs)


def reference(config: Config, facts: ScheduleFacts, costs: MicrobatchCosts) -> float:
    """Seconds of dpo's forward without adapters, of all microbatches: there are no backwards that would hide its
    messages.
    """
    if not costs.chunk_reference:
        return 0.0
    return forwards(config, facts, costs, costs.chunk_reference, costs.edge.forward)


def forwards(
    config: Config,
    facts: ScheduleFacts,
    costs: MicrobatchCosts,
    chunk: float,
    edge: float,
) -> float:
    """Seconds of a forward of all microbatches alone, of `chunk` seconds a chunk and `edge` a head."""
    if not runs_table(config):
        return config.parallel.microbatches * (costs.chunks * chunk + edge)
    return facts.forward * (chunk + costs.message.overlapped) + facts.head * edge
