"""Schedules by name: each is a formula for the clock of every op.

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
    paired           v        (v+1) p                    (p-1)(F+B)/v              (p-1)(F+B)/v
    zb_paired        v        (v+1) p + 1                (p-1)(F+I-W)/v            (p-1)(F+I)/v

The last two are interleaved and zb_interleaved with every backward one clock later, and every W one more: F and B of a
clock are then of different microbatches on the last stage too, and run at once, as a pair; so do I and W where no stage
has an F.

In lockstep no table with v chunks is idle less than zb_interleaved. The last stage cannot begin before clock p - 1, and
the last microbatch not before clock m - 1. That leaves at least m v + p - 1 and v p + m - 1 clocks with an F, as many
with an I, and m v with a W. So ZB-V and V-Half (Qi et al. 2024, "Pipeline Parallelism with Controllable Memory"), which
beat it where each stage runs on its
own, cannot here: their stages go forward while others go backward, and a clock costs both. v_1f1b holds least: half of
what 1f1b holds.

The figures are for p dividing m, stages of equal length and messages that take no time; of zero bubble for a W no
longer than an F or an I. `simulate` finds what holds otherwise. Every schedule is legal for all p, m, v >= 1.

A schedule from outside: `SCHEDULES.register(Schedule("mine", clocks))` makes `parallel.schedule: mine` legal, trained,
planned, drawn and searched; formulas only make searches faster.

1F1B holds 2(p-1-s) + 1 microbatches on stage s and not p - s as on machines that run at their own pace (Narayanan et
al. 2019, "PipeDream"). A clock of the compiled program is a forward *and* a backward, and a message needs a clock for a
hop. So a microbatch comes back to stage s 2(p-1-s) clocks after it left. For the same price a message as long as
(F+B)/2 costs nothing.
"""

import functools
import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from meshtrain.errors import nearest, short
from meshtrain.registry import NotImported, Registry, Unimported
from meshtrain.schedule.table import (
    MAX_ENTRIES,
    B,
    F,
    G,
    IllegalTable,
    R,
    Table,
    W,
    read_csv,
)
from meshtrain.schedule.validate import validate

PAIRED = "paired"
# That a search tries and `chosen_chunks` takes: an eighth of the idle time of one chunk is left
MOST_CHUNKS = 8

# Clocks of F, of B and, where B is split into I and W, of W: each int [virtual stage, microbatch].
Clocks = tuple[np.ndarray, ...]


@dataclass(frozen=True)
class Schedule:
    """A schedule's one entry: `clocks(stages, microbatches, chunks)` says when each op is done.

    Its formulas, if it has any, must say what the table says. Without them every table is proved legal when it is made.
    """

    name: str
    clocks: Callable[[int, int, int], Clocks]
    chunks: int | None = 1  # model chunks that a stage must have; None for any number
    placement: str = "loop"
    formulas: str | None = None  # their name in `facts.FORMULAS`
    paired: bool = False  # see `Table`

    def table(self, stages: int, microbatches: int, chunks: int) -> Table:
        when = list(self.clocks(stages, microbatches, chunks))
        split = len(when) == 3
        shape = (stages * chunks, microbatches)
        if [np.shape(clocks) for clocks in when] != [shape] * (2 + split):
            raise IllegalTable(
                f"schedule {self.name}: it must give the clocks of F, of B and perhaps of W, each {shape}"
            )
        if not split:
            when.append(np.full(shape, -1))
        at = np.stack(when)
        return Table.place(
            at,
            name=self.name,
            stages=stages,
            chunks=chunks,
            split=split,
            placement=self.placement,
            paired=self.paired,
        )


def make_table(schedule: str, stages: int, microbatches: int, chunks: int = 1) -> Table:
    """The table of a schedule: one of `SCHEDULES`, or the path of a CSV file (see `Table.to_csv`).

    `chunks` is the number of model chunks (virtual stages) that each stage holds. Made once, or once a state of the
    file. Raises ValueError, in one sentence, for an unknown name or numbers that the schedule cannot have; and
    IllegalTable for a file that is not legal or is for other numbers.
    """
    return _made(schedule, stages, microbatches, chunks, stamp(schedule))


def with_sends(table: Table) -> Table:
    """Returns the table with G and R where most work stands beside them: a chunk's weights are gathered while the chunk
    that is needed before it goes forward first, its gradient is reduced from the clock after its last addition on.
    Nothing could hide the first G and the last R, which have no cell, nor what several chunks need at once.
    """
    when = table.when()
    shape = (table.chunks, -1)
    complete = when[W if table.split else B].reshape(shape).max(axis=1) + 1
    sends = np.full((2, table.chunks), -1)
    first = when[F].reshape(shape).min(axis=1)
    for before, c in itertools.pairwise(np.argsort(first, kind="stable").tolist()):
        if first[before] < first[c]:
            sends[G, c] = first[before]
    clocks, chunks = np.unique(complete, return_index=True)
    sends[R, chunks] = np.where(clocks < table.clocks, clocks, -1)
    return replace(table, sends=sends)


def legal_chunks(schedule: str) -> int | None:
    """Returns how many chunks a stage must have; None if any number will do, and for a file, which says itself."""
    entry = SCHEDULES.get(schedule)
    return entry.chunks if entry else None


def has_table(schedule: str, stages: int, microbatches: int) -> bool:
    """Returns whether the microbatches go by a table: on several stages, and on one where the schedule pairs the
    backward of one with the forward of the next; else they follow one another.
    """
    return stages > 1 or (
        microbatches > 1 and schedule in SCHEDULES and SCHEDULES[schedule].paired
    )


def chosen_chunks(
    layers: int, stages: int, microbatches: int, most: int = MOST_CHUNKS
) -> int:
    """Returns how many chunks, at most `most`, a stage has under `parallel.schedule: auto`: interleaved with them, or
    1f1b with one.

    In lockstep v chunks leave 1/v of 1F1B's idle time; with fewer microbatches than stages a larger share, but never
    more than all. They hold at most ((v+1) p - 1)/v microbatches where 1F1B holds 2p - 1. So the largest number that
    divides a stage's layers is taken. One microbatch gains nothing, and layers that the virtual stages do not divide
    must need no more padding than without chunks.
    """
    longest = -(-layers // stages)
    most = min(most, layers // stages, (MAX_ENTRIES // stages - stages) // microbatches)
    if stages == 1 or microbatches == 1:
        return 1
    chunks = range(2, most + 1)
    return max((v for v in chunks if longest % v == 0), default=1)


def stamp(schedule: str) -> tuple[int, int] | None:
    """Returns what changes when the file of a schedule does; None for a name."""
    if not schedule.endswith(".csv"):
        return None
    try:
        status = os.stat(os.path.expanduser(schedule))
    except OSError:  # refused when it is read
        return None
    return status.st_mtime_ns, status.st_size


@functools.lru_cache(maxsize=32)
def _made(
    schedule: str,
    stages: int,
    microbatches: int,
    chunks: int,
    stamp: tuple[int, int] | None,
) -> Table:
    if schedule.endswith(".csv"):
        return _proved(
            short(schedule), lambda: _read_file(schedule, stages, microbatches, chunks)
        )
    if isinstance(schedule, Unimported) and schedule not in SCHEDULES:
        raise NotImported(schedule)
    if schedule not in SCHEDULES:
        known = ", ".join(SCHEDULES)
        raise ValueError(
            f"schedule '{schedule}' is not one of {known} or a path ending in .csv{nearest(schedule, SCHEDULES)}"
        )
    for what, value in (
        ("stages", stages),
        ("microbatches", microbatches),
        ("chunks", chunks),
    ):
        if value < 1:
            raise ValueError(
                f"schedule {schedule}: {what} is {value}, and must be at least 1"
            )
    entry = SCHEDULES[schedule]
    if entry.chunks not in (None, chunks):
        many = [
            name for name, other in SCHEDULES.items() if other.chunks in (None, chunks)
        ]
        raise ValueError(
            f"schedule {schedule} has {entry.chunks} model chunk{'s' if entry.chunks != 1 else ''} a stage, "
            f"and {chunks} asked for; with {chunks} there are {', '.join(many)}"
        )
    if entry.formulas:
        return entry.table(stages, microbatches, chunks)
    return _proved(
        f"schedule {schedule}", lambda: entry.table(stages, microbatches, chunks)
    )


def _proved(where: str, make: Callable[[], Table]) -> Table:
    """The table that is made, if it is legal; else what is wrong, and `where`."""
    try:
        table = make()
        validate(table)
    except IllegalTable as error:
        if str(error).startswith(where):
            reason = str(error)
        else:
            reason = f"{where}: {error}"
        ending = "" if reason.endswith("?") else "."
        raise IllegalTable(f"parallel.schedule cannot run: {reason}{ending}") from None
    return table


def _read_file(path: str, stages: int, microbatches: int, chunks: int) -> Table:
    table = read_csv(path)
    for what, wanted in (
        ("stages", stages),
        ("microbatches", microbatches),
        ("chunks", chunks),
    ):
        if (value := getattr(table, what)) != wanted:
            raise IllegalTable(
                f"{short(path)} is for {what}={value}, and {what}={wanted} is asked for"
            )
    return table


def _places(p: int, m: int, v: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Chunk c and stage s of each virtual stage, as columns; microbatch j as a row."""
    k = np.arange(p * v)[:, None]
    return k // p, k % p, np.arange(m)[None, :]


def _all_forward_first(p: int, m: int, v: int) -> Clocks:
    """All forwards, then all backwards, the last first: GPipe (Huang et al. 2019, figure 2c); with chunks,
    breadth-first (Lamy-Poirier 2023, "Breadth-First Pipeline Parallelism", section 4).

    A round of one chunk takes m clocks, or p where a microbatch would come around the ring only later than that.
    """
    c, s, j = _places(p, m, v)
    round_ = max(m, p)
    f = c * round_ + j + s
    return f, 2 * f.max() - f


def _one_forward_one_backward(p: int, m: int, v: int, waits: int = 0) -> Clocks:
    """1F1B (Narayanan et al. 2019, "PipeDream", section 3.2); with chunks, interleaved (Narayanan et al. 2021,
    section 2.2).

    Microbatches go in groups: a stage does a group's first chunk, then its second, ..., then the next group. A group of
    n >= p keeps every stage busy, because its first microbatch is around the ring when the last one has entered. So
    where p does not divide m, the groups are made larger than p, as evenly as can be, and no clock is lost. The price
    is memory: (v-1) n + 2p - 1 entries in flight, with n the size of the largest group. With m < p there is one group
    of m and each chunk waits for the ring. With one chunk the groups make no difference.

    The backward is the same in mirror image. It starts so that the last virtual stage turns a microbatch around at
    once; if pairs leave no time for its loss between F and B, it `waits` 1 clock.
    """
    c, s, j = _places(p, m, v)
    groups = np.array_split(np.arange(m), max(1, m // p))
    sizes = np.array([len(group) for group in groups])
    size = np.repeat(sizes, sizes)[None, :]  # of the group of microbatch j
    # First microbatch of its group
    base = np.repeat(np.cumsum(sizes) - sizes, sizes)[None, :]
    round_ = np.maximum(size, p)
    start = v * base + (j - base)
    # the first clock in which the last virtual stage may go backward, for all groups
    turn = (v - 1) * round_.max() + p - 1 + waits
    f = start + c * round_ + s
    b = turn + start + (v - 1 - c) * round_ + (p - 1 - s)
    return f, b


def _zero_bubble(p: int, m: int, v: int, waits: int = 0) -> Clocks:
    """1F1B with B split: all stages do the W of a microbatch in the clock in which stage 0 does its I.

    In lockstep a clock costs what any stage does in it: so W costs m v clocks and not m v + p - 1. Running on their
    own, the stages find work to do at the end: stage s has put off s of its W until then, which fills the time in which
    it would be idle (ZB-H1 of Qi et al. 2023, section 2.2). No stage holds more than stage 0 holds anyway.
    """
    f, b = _one_forward_one_backward(p, m, v, waits)
    chunks = b.reshape(v, p, m)
    w = np.broadcast_to(chunks[:, :1] + waits, chunks.shape)
    return f, b, w.reshape(b.shape)


def _one_forward_one_backward_in_v(p: int, m: int, v: int) -> Clocks:
    """1F1B through a V of two chunks (the placement of Qi et al. 2024, section 3): a microbatch enters every other
    clock.

    A stage's two virtual stages k and 2p-1-k differ by an odd number, so that their clocks never meet. A microbatch is
    held for 2(2p-1-k) + 1 clocks by the one and 2k + 1 by the other: 4p in two clocks, the same on all stages.
    """
    k = np.arange(v * p)[:, None]
    j = np.arange(m)[None, :]
    f = 2 * j + k
    b = 2 * j + 2 * (2 * p - 1) - k
    return f, b


SCHEDULES = Registry(
    Schedule("gpipe", _all_forward_first, formulas="all_forward_first"),
    Schedule("1f1b", _one_forward_one_backward, formulas="one_forward_one_backward"),
    Schedule(
        "interleaved",
        _one_forward_one_backward,
        chunks=None,
        formulas="one_forward_one_backward",
    ),
    Schedule(
        "looped_bfs", _all_forward_first, chunks=None, formulas="all_forward_first"
    ),
    Schedule("zb_h1", _zero_bubble, formulas="zero_bubble"),
    Schedule("zb_interleaved", _zero_bubble, chunks=None, formulas="zero_bubble"),
    Schedule(
        "v_1f1b",
        _one_forward_one_backward_in_v,
        chunks=2,
        placement="v",
        formulas="in_v",
    ),
    Schedule(
        PAIRED,
        partial(_one_forward_one_backward, waits=1),
        chunks=None,
        formulas="paired",
        paired=True,
    ),
    Schedule(
        "zb_paired",
        partial(_zero_bubble, waits=1),
        chunks=None,
        formulas="zero_bubble_paired",
        paired=True,
    ),
)
