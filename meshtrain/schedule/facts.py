"""The facts of a schedule that planning needs: how often each slot is computed, how deep the buffers are, and how long
stages idle.

They are counted in any table. For the named schedules formulas in p stages, m microbatches and v chunks a stage give
the same without a table, for searches over thousands of plans. In lockstep the idle time follows from how many
clocks have an F, a B and a W.
"""

import functools
import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from meshtrain.schedule.buffers import Depths, compile_table, depths
from meshtrain.schedule.generators import SCHEDULES, make_table, stamp
from meshtrain.schedule.phases import ops_per_clock
from meshtrain.schedule.simulation import Durations
from meshtrain.schedule.table import Table


class ScheduleFacts(NamedTuple):
    """Counts of one table.

    The first five are numbers of clocks: those in which all devices compute that, some of them idly.
    """

    forward: int
    head: int
    backward: int
    weight: int
    together: int  # with both a forward and a backward
    depths: Depths
    split: bool  # the backward, into I and W
    # places more, where idle slots are computed too and layers are alike: see `compile_table`
    spare: Depths = Depths(0)
    paired: bool = False  # where both a forward and a backward are, they run at once
    covered: int = 0  # clocks with a pair of I and W

    def seconds(self, durations: Durations) -> float:
        """Returns the time of all microbatches in lockstep, with stages of equal length, messages that take no time,
        and one stage doing `head`.
        """
        weight_grad = 0.0 if self.split else durations.weight_grad
        backward = (
            self.backward * (durations.input_grad + weight_grad)
            + self.weight * durations.weight_grad
        )
        hidden = (
            self.paired
            * self.together
            * (durations.forward_hidden + durations.backward_hidden)
        )
        hidden += self.covered * durations.backward_hidden
        return float(
            self.forward * durations.forward
            + self.head * durations.head
            + backward
            - hidden
        )


ONE_STAGE = ScheduleFacts(0, 0, 0, 0, 0, Depths(1), split=False)


def facts(table: Table) -> ScheduleFacts:
    """Returns the facts of a legal table."""
    compiled = compile_table(table)
    ops = ops_per_clock(compiled.phases)
    forward, head, backward, weight, *_ = ops.sum(axis=0).tolist()
    together = int((ops[:, 0] & ops[:, 2]).sum())
    exact = depths(table)
    pairs = zip(compiled.depths, exact, strict=True)
    spare = Depths(*(more - least for more, least in pairs))
    covered = int((~ops[:, 0] & ops[:, 2] & ops[:, 3]).sum()) * table.paired
    return ScheduleFacts(
        forward,
        head,
        backward,
        weight,
        together,
        exact,
        table.split,
        spare,
        table.paired,
        covered,
    )


def facts_of(
    schedule: str, stages: int, microbatches: int, chunks: int = 1
) -> ScheduleFacts:
    """Returns the facts of the table that `make_table` gives, by formula where there is one: the table need not be
    made.
    """
    entry = SCHEDULES.get(schedule)
    if entry and entry.formulas:
        return FORMULAS[entry.formulas](stages, microbatches, chunks)
    return _facts_of_table(schedule, stages, microbatches, chunks, stamp(schedule))


@functools.lru_cache(maxsize=512)
def _facts_of_table(
    schedule: str,
    stages: int,
    microbatches: int,
    chunks: int,
    stamp: tuple[int, int] | None,
) -> ScheduleFacts:
    sizes = stages, microbatches, chunks
    # A proof takes 50 times as long as the facts, and a search asks for hundreds: what it proposes is proved.
    return facts(
        SCHEDULES[schedule].table(*sizes)
        if schedule in SCHEDULES
        else make_table(schedule, *sizes)
    )


def _all_forward_first(p: int, m: int, v: int) -> ScheduleFacts:
    inbox = _ring_wait(p, m) if v > 1 else int(p > 1)
    clocks = v * m + _rounds(p, m, v)
    return ScheduleFacts(
        clocks, m, clocks, 0, 1, Depths(v * m, inbox, m), split=False, spare=Depths(1)
    )


def _ring_wait(p: int, m: int) -> int:
    """Returns the clocks that a microbatch which came around the ring waits for its next chunk, of a group of `m`."""
    return max(m, p) - p + 1


def _one_forward_one_backward(
    p: int,
    m: int,
    v: int,
    split: bool = False,
    paired: bool = False,
) -> ScheduleFacts:
    groups = max(1, m // p)
    largest = math.ceil(m / groups)  # group of microbatches, see `generators`
    f_inbox = int(p > 1)
    b_inbox = 1
    if v > 1:
        f_inbox = b_inbox = _ring_wait(p, largest)
        # in a smaller group the heads' cotangents wait v - 1 clocks for their turn
        if m % groups:
            b_inbox = max(b_inbox, min(v, b_inbox + largest - 1))
    around = (v - 1) * max(largest, p)
    stash = min(v * m, around + 2 * p - 1 + paired * (1 + split))
    clocks = v * m + _rounds(p, m, v)
    together = clocks - around - (p - 1) - paired
    # Up to how many microbatches all places are held when a stage is idle.
    fewest = 2 * (p - 1) + paired * ((m > 1) + (split and v == 1 < p))
    few = 1 == v < p and m <= p if paired else m < p
    covered = v * m - 1 - max(0, together - p) if split and paired else 0
    waiting = min(p + 1, m + (v > 1)) if paired else min(p, m)
    alternates = paired and not split and m > p * v == 1
    return ScheduleFacts(
        forward=clocks,
        head=m,
        backward=clocks,
        weight=v * m if split else 0,
        together=together,
        depths=Depths(stash, f_inbox, b_inbox, waiting if split else 0),
        split=split,
        spare=Depths(int(m <= fewest) - alternates, cot=int(split and few)),
        paired=paired and together + covered > 0,
        covered=covered,
    )


def _v_shaped(p: int, m: int, v: int) -> ScheduleFacts:
    clocks = 2 * m + 2 * (p - 1)
    depths = Depths(min(2 * m, 2 * p), 1, 1)
    return ScheduleFacts(
        clocks, m, clocks, 0, 2 * m - 1, depths, split=False, spare=Depths(int(m < p))
    )


def _rounds(p: int, m: int, v: int) -> int:
    """Returns the number of rounds in which a stage is idle, each as long as one chunk."""
    return p - 1 + (v - 1) * max(0, p - m)


# (p, m, v) -> facts, for all sizes
FORMULAS: dict[str, Callable[[int, int, int], ScheduleFacts]] = {
    "all_forward_first": _all_forward_first,
    "one_forward_one_backward": _one_forward_one_backward,
    "zero_bubble": partial(_one_forward_one_backward, split=True),
    "paired": partial(_one_forward_one_backward, paired=True),
    "zero_bubble_paired": partial(_one_forward_one_backward, split=True, paired=True),
    "in_v": _v_shaped,
}
