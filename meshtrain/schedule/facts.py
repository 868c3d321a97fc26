"""What planning needs to know of a table, whatever its name: how often each slot is computed, how deep the buffers are, and which
ticks the compiler sees alone.

A segment of one tick is no loop: XLA compiles the tick by itself, and what is made there lives beside what the loops make. Where
that counts was found by compiling the named schedules for described H100s (`experiments/bench_planner.py --compile h100`):

    1f1b, 2 stages      F      | 8 x FHB          | B          the last B is alone after the steady segment
    v_1f1b              7 x F  | 15 x (FHB FB)    | FHB | 7 x B    and so is this tick; of two in a turn one is beside the other
    gpipe               3 x F  | 7 x FH | FHB     | 10 x B     no segment is steady: one tick turns from forward to backward
    zb_interleaved      15 x F | 7 x FHB | FHBW | 8 x FBW ...  alone between steady segments: XLA holds no more for it
"""

import itertools
from typing import NamedTuple

from meshtrain.schedule.buffers import Depths, depths
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
    alone: int = 0  # ticks with a backward that stand alone after the last steady segment
    beside: int = 0  # ticks with a backward beside another in one turn of a segment
    turns: bool = False  # forwards become backwards in one tick that stands alone: no segment is steady

    def seconds(self, durations: Durations) -> float:
        """Of all microbatches in lockstep, with stages of equal length and messages that take no time; `head` as one stage does it."""
        whole = 0.0 if self.split else durations.weight_grad
        backward = self.backward * (durations.input_grad + whole) + self.weight * durations.weight_grad
        return float(self.forward * durations.forward + self.head * durations.head + backward)


ONE_STAGE = Facts(0, 0, 0, 0, 0, Depths(1), split=False)


def facts(table: Table) -> Facts:
    """The facts of a legal table."""
    found = segments(table)
    work = work_per_tick(found)
    steady = [i for i, segment in enumerate(found) if not _alone(segment) and any(map(_both, _bodies(segment)))]
    after = found[steady[-1] + 1 :] if steady else []
    forward, head, backward, weight = work.sum(axis=0).tolist()
    return Facts(
        forward,
        head,
        backward,
        weight,
        together=int((work[:, 0] & work[:, 2]).sum()),
        depths=depths(table),
        split=table.split,
        alone=sum(_alone(segment) and does_b for segment in after for _, _, does_b, _ in _bodies(segment)),
        beside=max(map(_beside, found)) if steady else _in_a_row(found),
        turns=not steady and _turns(found),
    )


def _alone(segment: Segment) -> bool:
    return segment.repeats * segment.period == 1


def _bodies(segment: Segment) -> list[Work]:
    return [work for _, work in segment.body]


def _both(work: Work) -> bool:
    return work[0] and work[2]


def _beside(segment: Segment) -> int:
    backward = sum(ticks == 1 and work[2] for ticks, work in segment.body)
    return max(0, backward - 1) if segment.repeats > 1 else 0


def _in_a_row(found: list[Segment]) -> int:
    """Of a table too short for a steady segment: neighbours that are alone, go both ways and do the same but for the head."""
    slots = [(w[2], w[3]) if _alone(segment) and _both(w := _bodies(segment)[0]) else None for segment in found]
    longest = row = 0
    for this, before in zip(slots, [None, *slots], strict=False):
        row = row + 1 if this and this == before else 0
        longest = max(longest, row)
    return longest


def _turns(found: list[Segment]) -> bool:
    """A tick that is alone goes both ways, after a segment whose heads have left their cotangents."""
    for before, segment in itertools.pairwise(found):
        waits = not _alone(before) and any(head and not backward for _, head, backward, _ in _bodies(before))
        if waits and _alone(segment) and _both(_bodies(segment)[0]):
            return True
    return False
