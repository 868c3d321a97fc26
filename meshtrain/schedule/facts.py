"""What planning needs to know of a table, whatever its name: how often each slot is computed, and how deep the buffers are."""

from typing import NamedTuple

from meshtrain.schedule.buffers import Depths, depths
from meshtrain.schedule.executed import executed
from meshtrain.schedule.segments import segments, work_per_tick
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
    spare: Depths = Depths(0)  # places more, where idle slots are computed too: see `executed`

    def seconds(self, durations: Durations) -> float:
        """Of all microbatches in lockstep, stages being of equal length, messages taking no time, and one stage doing `head`."""
        whole = 0.0 if self.split else durations.weight_grad
        backward = self.backward * (durations.input_grad + whole) + self.weight * durations.weight_grad
        return float(self.forward * durations.forward + self.head * durations.head + backward)


ONE_STAGE = Facts(0, 0, 0, 0, 0, Depths(1), split=False)


def facts(table: Table) -> Facts:
    """The facts of a legal table."""
    work = work_per_tick(segments(table))
    forward, head, backward, weight, *_ = work.sum(axis=0).tolist()
    together = int((work[:, 0] & work[:, 2]).sum())
    held = depths(table)
    spare = Depths(*(more - least for more, least in zip(executed(table, work).depths, held, strict=True)))
    return Facts(forward, head, backward, weight, together, held, table.split, spare)
