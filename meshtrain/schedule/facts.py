"""What planning needs to know of a table, whatever its name: how often each slot is computed, how deep the buffers are, and
which ticks the compiler sees alone.

A segment of one tick is no loop: XLA compiles the tick by itself, and what is made there lives beside what the loops make.
Where that counts was found by compiling the named schedules for described GPUs (`experiments/bench_planner.py --compile h100`):

    1f1b, 2 stages       F      | 8 x FHB      | B             the last B is alone after the steady segment
    v_1f1b               7 x F  | 15 x (FHB FB) | FHB | 7 x B  so is this FHB; and in each turn one tick stands beside another
    gpipe                3 x F  | 7 x FH | FHB | 10 x B        no segment is steady: forwards turn to backwards in one tick
    zb_interleaved       15 x F | 7 x FHB | FHBW | 8 x FBW ... alone between steady segments: XLA holds no more for it
"""

import itertools
from typing import NamedTuple

from meshtrain.schedule.buffers import Depths, depths
from meshtrain.schedule.executed import executed
from meshtrain.schedule.segments import Segment, Work, segments, work_per_tick
from meshtrain.schedule.simulate import Durations
from meshtrain.schedule.table import Table


class Facts(NamedTuple):
    """Of one table. The first five are numbers of ticks: those in which all devices compute that, some of them idly."""

    forward: int
    head: int
    backward: int
    weight: int
    together: int  # with both a forward and a backward
    depths: Depths
    split: bool  # the backward, into I and W
    spare: Depths = Depths(0)  # places more, where idle slots are computed too (see `executed`)
    alone: int = 0  # ticks with a backward that stand alone after the last steady segment
    beside: int = 0  # ticks with a backward beside another in one turn of a segment
    turns: bool = False  # forwards become backwards in one tick that stands alone: no segment is steady

    def seconds(self, durations: Durations) -> float:
        """Of all microbatches in lockstep, stages being of equal length, messages taking no time, and one stage doing `head`."""
        whole = 0.0 if self.split else durations.weight_grad
        backward = self.backward * (durations.input_grad + whole) + self.weight * durations.weight_grad
        return float(self.forward * durations.forward + self.head * durations.head + backward)


ONE_STAGE = Facts(0, 0, 0, 0, 0, Depths(1), split=False)


def facts(table: Table) -> Facts:
    """The facts of a legal table."""
    found = segments(table)
    work = work_per_tick(found)
    forward, head, backward, weight, *_ = work.sum(axis=0).tolist()
    together = int((work[:, 0] & work[:, 2]).sum())
    steady = [i for i, segment in enumerate(found) if not _is_tick(segment) and any(_both(w) for _, w in segment.body)]
    if steady:
        alone = sum(_is_tick(segment) and segment.body[0][1].backward for segment in found[steady[-1] + 1 :])
        beside, turns = max(map(_beside, found)), False
    else:
        alone, beside, turns = 0, _in_a_row(found), _turns(found)
    held = depths(table)
    spare = Depths(*(more - least for more, least in zip(executed(table, work).depths, held, strict=True)))
    return Facts(forward, head, backward, weight, together, held, table.split, spare, alone, beside, turns)


def _is_tick(segment: Segment) -> bool:
    return segment.repeats * segment.period == 1


def _both(work: Work) -> bool:
    return work.forward and work.backward


def _beside(segment: Segment) -> int:
    backward = sum(ticks == 1 and work.backward for ticks, work in segment.body)
    return max(0, backward - 1) if segment.repeats > 1 else 0


def _in_a_row(found: list[Segment]) -> int:
    """Of a table too short for a steady segment: single ticks that go both ways, next to one that does the same but for the head."""
    slots = [w.weight if _is_tick(segment) and _both(w := segment.body[0][1]) else None for segment in found]
    longest = row = 0
    for before, this in itertools.pairwise(slots):
        row = row + 1 if this is not None and this == before else 0
        longest = max(longest, row)
    return longest


def _turns(found: list[Segment]) -> bool:
    """A single tick goes both ways, after a segment whose heads have left their cotangents."""
    for before, segment in itertools.pairwise(found):
        waits = not _is_tick(before) and any(work.head and not work.backward for _, work in before.body)
        if waits and _is_tick(segment) and _both(segment.body[0][1]):
            return True
    return False
