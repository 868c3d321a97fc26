"""What planning needs to know of a schedule: how often each slot is computed, how deep the buffers are, and how long stages idle.

Of any table it is counted; of the named schedules formulas say the same without a table, for searches over thousands of plans.
p stages, m microbatches, v chunks a stage; F, I, W what a whole stage needs for one microbatch, B = I + W; c one message.
With chunks, r = p - 1 + (v-1) max(0, p-m): fewer microbatches than stages leave the ring partly empty on every round.

    schedule                     asynchronous                             lockstep, c = 0
    gpipe                        (p-1)(F+B+2c)                            (p-1)(F+B)
    1f1b                         (p-1)(F+B+2c)       if c <= (F+B)/2      (p-1)(F+B)
    zb_h1                        (p-1)(F+I+2c) - nW  if c <= (F+I)/2,     (p-1)(F+I)
                                                     W <= F and W <= I
    interleaved, looped_bfs      r (F+B)/v           if c = 0             r (F+B)/v
    zb_interleaved               ((p-1)(F+I) - nW)/v if c = 0, m >= p,    r (F+I)/v
                                                     W <= F and W <= I
    v_1f1b                       (p-1) max(F, B)     if c = 0, m >= p     (p-1)(F+B)

n = min(m, p) - 1, so that with m >= p the two zero-bubble schedules have the (p-1)(F+I-W) of Qi et al. 2023. A W longer
than an I stands in the way of the chain of I at the end, and one longer than an F can hold up the chain of F: then the
idle time is longer. All stages are taken to be equally long, and the asynchronous formulas have no loss head.

In lockstep the idle time follows from the facts: from how many clocks have an F, a B and a W.
"""

import functools
import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from meshtrain.schedule.buffers import Depths, depths, executed
from meshtrain.schedule.generators import SCHEDULES, Schedule, make_table, stamp
from meshtrain.schedule.phases import ops_per_clock, phases
from meshtrain.schedule.simulate import EXECUTIONS, Durations
from meshtrain.schedule.table import Table


class ScheduleFacts(NamedTuple):
    """Counts of one table. The first five are numbers of clocks: those in which all devices compute that, some of them idly."""

    forward: int
    head: int
    backward: int
    weight: int
    together: int  # with both a forward and a backward
    depths: Depths
    split: bool  # the backward, into I and W
    spare: Depths = Depths(0)  # places more, where idle slots are computed too: see `executed`

    def seconds(self, durations: Durations) -> float:
        """Returns the time of all microbatches in lockstep, with stages of equal length, messages that take no time, and one stage doing `head`."""
        weight_grad = 0.0 if self.split else durations.weight_grad
        backward = self.backward * (durations.input_grad + weight_grad) + self.weight * durations.weight_grad
        return float(self.forward * durations.forward + self.head * durations.head + backward)


ONE_STAGE = ScheduleFacts(0, 0, 0, 0, 0, Depths(1), split=False)


def facts(table: Table) -> ScheduleFacts:
    """Returns the facts of a legal table."""
    ops = ops_per_clock(phases(table))
    forward, head, backward, weight, *_ = ops.sum(axis=0).tolist()
    together = int((ops[:, 0] & ops[:, 2]).sum())
    exact = depths(table)
    spare = Depths(*(more - least for more, least in zip(executed(table, ops).depths, exact, strict=True)))
    return ScheduleFacts(forward, head, backward, weight, together, exact, table.split, spare)


class NotExact(ValueError):
    """Raised where no formula is exact, and the case must be simulated. The message says why."""


class Formulas(NamedTuple):
    """Of a schedule, for p stages, m microbatches and v chunks."""

    facts: Callable[[int, int, int], ScheduleFacts]  # (p, m, v), for all sizes
    # (p, m, v, F, I, W, c) -> idle time of every stage, each running on its own; NotExact where that is not exact
    idle: Callable[[int, int, int, float, float, float, float], float] | None = None


def whole_stage(durations: Durations, chunks: int) -> tuple[float, float, float]:
    """F, I and W of a whole stage; NotExact where virtual stages differ."""
    parts = (durations.forward, durations.input_grad, durations.weight_grad)
    if any(np.ndim(part) for part in parts):
        raise NotExact("the formulas are for stages of equal length, and durations are given for each virtual stage")
    forward, input_grad, weight_grad = (float(part) * chunks for part in parts)
    return forward, input_grad, weight_grad


def facts_of(schedule: str, stages: int, microbatches: int, chunks: int = 1) -> ScheduleFacts:
    """Returns the facts of the table that `make_table` gives, by formula where there is one: the table need not be made."""
    entry = SCHEDULES.get(schedule)
    if entry and entry.formulas:
        return FORMULAS[entry.formulas].facts(stages, microbatches, chunks)
    return _facts_of_table(schedule, stages, microbatches, chunks, stamp(schedule))


@functools.lru_cache(maxsize=512)
def _facts_of_table(
    schedule: str, stages: int, microbatches: int, chunks: int, stamp: tuple[int, int] | None
) -> ScheduleFacts:
    sizes = stages, microbatches, chunks
    # A proof takes 50 times as long as the facts, and a search asks for hundreds: what it proposes is proved.
    return facts(SCHEDULES[schedule].table(*sizes) if schedule in SCHEDULES else make_table(schedule, *sizes))


def bubble(schedule: Schedule, p: int, m: int, v: int, durations: Durations, execution: str) -> float:
    """See `Schedule.bubble`."""
    if execution not in EXECUTIONS:
        raise ValueError(f"execution '{execution}' is not one of {', '.join(EXECUTIONS)}")
    f, i, w = whole_stage(durations, v)
    if execution == "lockstep":
        if durations.message and p > 1:
            raise NotExact("in lockstep the formulas are for messages that take no time")
        alone = Durations(durations.forward, durations.input_grad, durations.weight_grad)
        return facts_of(schedule.name, p, m, v).seconds(alone) - m * (f + i + w)
    idle = FORMULAS[schedule.formulas].idle if schedule.formulas else None
    if idle is None:
        raise NotExact(f"there is no formula for schedule '{schedule.name}'")
    if durations.head:
        raise NotExact("stages that run on their own wait for the loss head in ways that no formula here describes")
    return idle(p, m, v, f, i, w, durations.message)


def makespan(schedule: Schedule, p: int, m: int, v: int, durations: Durations, execution: str) -> float:
    """See `Schedule.makespan`."""
    idle = bubble(schedule, p, m, v, durations, execution)
    head = durations.head / (p if durations.head_spread else 1)
    return m * (sum(whole_stage(durations, v)) + head) + idle + durations.optimizer


def _all_forward_first(p: int, m: int, v: int) -> ScheduleFacts:
    waits = max(m, p) - p + 1  # clocks that a microbatch which came around the ring waits for its next chunk
    inbox = waits if v > 1 else int(p > 1)
    clocks = v * m + _rounds(p, m, v)
    return ScheduleFacts(clocks, m, clocks, 0, 1, Depths(v * m, inbox, m), split=False, spare=Depths(1))


def _all_forward_first_idle(p: int, m: int, v: int, f: float, i: float, w: float, c: float) -> float:
    _no_messages_between_chunks(v, c)
    return _rounds(p, m, v) * (f + i + w) / v + 2 * (p - 1) * c


def _one_forward_one_backward(p: int, m: int, v: int, split: bool = False) -> ScheduleFacts:
    groups = max(1, m // p)
    largest = math.ceil(m / groups)  # group of microbatches, see `generators`
    waits = max(largest, p) - p + 1  # clocks that a microbatch which came around the ring waits for its next chunk
    f_inbox, b_inbox = (waits, waits) if v > 1 else (int(p > 1), 1)
    if v > 1 and m % groups:  # in a smaller group the heads' cotangents wait v - 1 clocks for their turn
        b_inbox = max(waits, min(v, waits + largest - 1))
    stash = min(v * m, (v - 1) * max(largest, p) + 2 * p - 1)
    clocks = v * m + _rounds(p, m, v)
    together = clocks - (v - 1) * max(largest, p) - (p - 1)
    return ScheduleFacts(
        forward=clocks,
        head=m,
        backward=clocks,
        weight=v * m if split else 0,
        together=together,
        depths=Depths(stash, f_inbox, b_inbox, min(p, m) if split else 0),
        split=split,
        spare=Depths(int(m <= 2 * (p - 1)), cot=int(split and m < p)),
    )


def _one_forward_one_backward_idle(p: int, m: int, v: int, f: float, i: float, w: float, c: float) -> float:
    _no_messages_between_chunks(v, c)
    _short_messages(c, f + i + w)
    return _rounds(p, m, v) * (f + i + w) / v + 2 * (p - 1) * c


def _zero_bubble_idle(p: int, m: int, v: int, f: float, i: float, w: float, c: float) -> float:
    if w > min(f, i):
        raise NotExact(
            "the zero-bubble formulas are for a weight gradient no longer than a forward or an input gradient"
        )
    _enough_microbatches(p, m, v)
    _no_messages_between_chunks(v, c)
    _short_messages(c, f + i)
    return ((p - 1) * (f + i) - (min(p, m) - 1) * w) / v + 2 * (p - 1) * c


def _in_v(p: int, m: int, v: int) -> ScheduleFacts:
    clocks, depths = 2 * m + 2 * (p - 1), Depths(min(2 * m, 2 * p), 1, 1)
    return ScheduleFacts(clocks, m, clocks, 0, 2 * m - 1, depths, split=False, spare=Depths(int(m < p)))


def _in_v_idle(p: int, m: int, v: int, f: float, i: float, w: float, c: float) -> float:
    _enough_microbatches(p, m, v)
    _no_messages_between_chunks(v, c)
    return (p - 1) * max(f, i + w)


def _rounds(p: int, m: int, v: int) -> int:
    """In which a stage is idle, each as long as one chunk."""
    return p - 1 + (v - 1) * max(0, p - m)


def _no_messages_between_chunks(v: int, c: float) -> None:
    if c and v > 1:
        raise NotExact("with several chunks the formulas are for messages that take no time")


def _short_messages(c: float, chain: float) -> None:
    """`chain`: what stages wait for, one after the other."""
    if c > chain / 2:
        raise NotExact("the formula is only for messages up to half of F+B (of F+I where the backward is split)")


def _enough_microbatches(p: int, m: int, v: int) -> None:
    if v > 1 and m < p:
        raise NotExact("the formula is only for at least as many microbatches as stages")


FORMULAS = {
    "all_forward_first": Formulas(_all_forward_first, _all_forward_first_idle),
    "one_forward_one_backward": Formulas(_one_forward_one_backward, _one_forward_one_backward_idle),
    "zero_bubble": Formulas(partial(_one_forward_one_backward, split=True), _zero_bubble_idle),
    "in_v": Formulas(_in_v, _in_v_idle),
}
