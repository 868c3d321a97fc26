"""Schedules by name: each is a formula for the tick of every op.

Notation as in the papers: p stages, m microbatches, v chunks a stage; F, B, I, W the time that a whole stage needs for
the forward, the backward, its input half and its weight half of one microbatch (B = I + W).

    schedule         chunks   most entries in flight     idle time a stage, every stage
                              (of 1/v stage each)        running on its own        in lockstep
    gpipe            1        m                          (p-1)(F+B)                (p-1)(F+B)
    looped_bfs       v        v m                        (p-1)(F+B)/v              (p-1)(F+B)/v
    1f1b             1        2p - 1                     (p-1)(F+B)                (p-1)(F+B)
    interleaved      v        (v+1) p - 1                (p-1)(F+B)/v              (p-1)(F+B)/v
    zb_h1            1        2p - 1                     (p-1)(F+I-W)              (p-1)(F+I)
    zb_interleaved   v        (v+1) p - 1                (p-1)(F+I-W)/v            (p-1)(F+I)/v
    v_1f1b           2        2p                         (p-1) max(F,B)            (p-1)(F+B)

In lockstep no table with v chunks is idle less than zb_interleaved: the last stage cannot begin before tick p - 1, so there
are at least m v + p - 1 ticks with an F, as many with an I, and m v with a W. v_1f1b holds least: half of what 1f1b holds.

The figures are for p dividing m; the conditions under which each idle time is exact, and what holds otherwise, stand in
`closed_form`. Every schedule is legal for all p, m, v >= 1.

1F1B holds 2(p-1-s) + 1 microbatches on stage s and not p - s as on machines that run at their own pace (Narayanan et
al. 2019, "PipeDream"): a tick of the compiled program is a forward *and* a backward, a message needs a tick for a hop,
and so a microbatch comes back to stage s 2(p-1-s) ticks after it left. For the same price a message as long as
(F+B)/2 costs nothing.
"""

import difflib
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from meshtrain.errors import short
from meshtrain.schedule.table import IllegalTable, Table, read_csv
from meshtrain.schedule.validate import validate

# Ticks of F and of B, each int [virtual stage, microbatch].
Ticks = tuple[np.ndarray, np.ndarray]


def make_table(schedule: str, stages: int, microbatches: int, chunks: int = 1) -> Table:
    """The table of a schedule: one of `SCHEDULES`, or the path of a CSV file (see `Table.to_csv`).

    `chunks` is the number of model chunks (virtual stages) that each stage holds.
    Raises ValueError, in one sentence, for an unknown name or numbers that the schedule cannot have; and IllegalTable
    for a file that is not legal or is for other numbers.
    """
    if schedule.endswith(".csv"):
        return _from_file(schedule, stages, microbatches, chunks)
    if schedule not in SCHEDULES:
        near = difflib.get_close_matches(schedule, SCHEDULES, 1)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        raise ValueError(f"schedule '{schedule}' is not one of {', '.join(SCHEDULES)} or a path ending in .csv{hint}")
    for what, value in (("stages", stages), ("microbatches", microbatches), ("chunks", chunks)):
        if value < 1:
            raise ValueError(f"schedule {schedule}: {what} is {value}, and must be at least 1")
    kind = _GENERATORS[schedule]
    if kind.chunks is not None and chunks != kind.chunks:
        many = [name for name, other in _GENERATORS.items() if other.chunks in (None, chunks)]
        raise ValueError(
            f"schedule {schedule} has {kind.chunks} model chunk{'s' if kind.chunks > 1 else ''} a stage, "
            f"and {chunks} asked for; with {chunks} there are {', '.join(many)}"
        )
    f, b = kind.ticks(stages, microbatches, chunks)
    w = _weights_together(b, stages) if kind.split else np.full_like(b, -1)
    return Table.at(
        np.stack([f, b, w]), name=schedule, stages=stages, chunks=chunks, split=kind.split, placement=kind.placement
    )


def _from_file(path: str, stages: int, microbatches: int, chunks: int) -> Table:
    try:
        table = read_csv(path)
        for what, asked, given in (
            ("stages", stages, table.stages),
            ("microbatches", microbatches, table.microbatches),
            ("chunks", chunks, table.chunks),
        ):
            if asked != given:
                raise IllegalTable(f"{short(path)} is for {what}={given}, and {what}={asked} is asked for")
        validate(table)
    except IllegalTable as error:
        where = "" if str(error).startswith(short(path)) else f"{short(path)}: "
        raise IllegalTable(f"parallel.schedule cannot run: {where}{error}.") from None
    return table


def _places(p: int, m: int, v: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Chunk c and stage s of each virtual stage, as columns; microbatch j as a row."""
    k = np.arange(p * v)[:, None]
    return k // p, k % p, np.arange(m)[None, :]


def _all_forward_first(p: int, m: int, v: int) -> Ticks:
    """All forwards, then all backwards, the last first: GPipe (Huang et al. 2019, figure 2c); with chunks, breadth-first
    (Lamy-Poirier 2023, "Breadth-First Pipeline Parallelism", section 4).

    A round of one chunk takes m ticks, or p where a microbatch would come around the ring only later than that.
    """
    c, s, j = _places(p, m, v)
    round_ = max(m, p)
    f = c * round_ + j + s
    return f, 2 * f.max() - f


def _one_forward_one_backward(p: int, m: int, v: int) -> Ticks:
    """1F1B (Narayanan et al. 2019, "PipeDream", section 3.2); with chunks, interleaved (Narayanan et al. 2021,
    section 2.2).

    Microbatches go in groups: a stage does a group's first chunk, then its second, ..., then the next group. A group of
    n >= p keeps every stage busy, because its first microbatch is around the ring when the last one has entered. So
    where p does not divide m, the groups are made larger than p, as evenly as can be, and no tick is lost. The price is
    memory: (v-1) n + 2p - 1 entries in flight, with n the size of the largest group. With m < p there is one group of
    m and each chunk waits for the ring. With one chunk the groups make no difference.

    The backward is the same in mirror image, started so that the last virtual stage turns a microbatch around at once.
    """
    c, s, j = _places(p, m, v)
    sizes = np.array([len(group) for group in np.array_split(np.arange(m), max(1, m // p))])
    size = np.repeat(sizes, sizes)[None, :]  # of the group of microbatch j
    base = np.repeat(np.cumsum(sizes) - sizes, sizes)[None, :]  # first microbatch of its group
    round_ = np.maximum(size, p)
    start = v * base + (j - base)
    turn = (v - 1) * round_.max() + p - 1  # first tick in which the last virtual stage may go backward for all groups
    return start + c * round_ + s, turn + start + (v - 1 - c) * round_ + (p - 1 - s)


def _one_forward_one_backward_in_v(p: int, m: int, v: int) -> Ticks:
    """1F1B through a V of two chunks (the placement of Qi et al. 2024, section 3): a microbatch enters every other tick.

    A stage's two virtual stages k and 2p-1-k differ by an odd number, so that their ticks never meet. A microbatch is
    held for 2(2p-1-k) + 1 ticks by the one and 2k + 1 by the other: 4p in two ticks, the same on all stages.
    """
    k, j = np.arange(v * p)[:, None], np.arange(m)[None, :]
    return 2 * j + k, 2 * j + 2 * (2 * p - 1) - k


def _weights_together(b: np.ndarray, p: int) -> np.ndarray:
    """Ticks of W when B is split: all stages do the W of a microbatch in the tick in which stage 0 does its I.

    In lockstep a tick costs what any stage does in it: so W costs m v ticks and not m v + p - 1. Running on their own,
    the stages find work to do at the end: stage s has put off s of its W until then, which fills the time in which
    it would wait for nothing (ZB-H1 of Qi et al. 2023, section 2.2). No stage holds more than stage 0 holds anyway.
    """
    chunks = b.reshape(-1, p, b.shape[1])
    return np.broadcast_to(chunks[:, :1], chunks.shape).reshape(b.shape)


class _Generator(NamedTuple):
    ticks: Callable[[int, int, int], Ticks]
    chunks: int | None  # a stage must have; None for any number
    split: bool = False  # B is split into I and W
    placement: str = "loop"


_GENERATORS: dict[str, _Generator] = {
    "gpipe": _Generator(_all_forward_first, 1),
    "1f1b": _Generator(_one_forward_one_backward, 1),
    "interleaved": _Generator(_one_forward_one_backward, None),
    "looped_bfs": _Generator(_all_forward_first, None),
    "zb_h1": _Generator(_one_forward_one_backward, 1, split=True),
    "zb_interleaved": _Generator(_one_forward_one_backward, None, split=True),
    "v_1f1b": _Generator(_one_forward_one_backward_in_v, 2, placement="v"),
}
SCHEDULES: tuple[str, ...] = tuple(_GENERATORS)


def legal_chunks(schedule: str) -> int | None:
    """How many chunks a stage must have under one of `SCHEDULES`; None where any number will do."""
    return _GENERATORS[schedule].chunks
