"""A pipeline schedule as data: which stage does what, of which microbatch and chunk, in which clock.

A clock, one step of the schedule, has three slots, and every stage runs them in this order: F (forward), B (backward),
W (weight gradient). A neighbour can read what a slot of clock t sends to it from clock t + 1 on. In a table of pairs, F
and B run at once.

        clock  0    1    2     3     4     5         1F1B, 3 stages, 2 microbatches
    stage 0    F0   F1               B0    B1
    stage 1         F0   F1    B0    B1
    stage 2              F0 B0 F1 B1

With `split=True` the B slot computes the gradient of the stage's *input* only and is written I; the gradient of its
weights is left to the W slot, which nobody waits for and which may therefore fill holes
(Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 2).

A stage holds `chunks` parts of the model. Counted in the order of the data flow these are the *virtual stages*
k = 0 .. stages * chunks - 1, assigned to the stages by `placement`:

    loop    0 1 2 3 | 4 5 6 7    stage 0 holds 0 and 4   (Narayanan et al. 2021, "Efficient Large-Scale ...", 2.2)
    v       0 1 2 3 | 7 6 5 4    stage 0 holds 0 and 7   (Qi et al. 2024, "... with Controllable Memory")

Collectives over data may stand in the table too, on all stages at once: G gathers the weights of a chunk, R reduces
its gradient. Either begins with its clock and travels beside what the stages do from there on, on a lane of its own:
until the next one begins or, of a G, until the chunk's first F. A chunk without a G is gathered before all clocks, one
without an R is reduced after them.

    interleaved, 2 stages, 2 microbatches, 2 chunks:

        clock  0        1     2     3          4          5     6        7
    stage 0    F0.0 G1  F1.0  F0.1  F1.1       B0.1       B1.1  B0.0 R1  B1.0
    stage 1         G1  F0.0  F1.0  F0.1 B0.1  F1.1 B1.1  B0.0  B1.0 R1
"""

import csv
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from meshtrain.errors import ConfigError, nearest, short
from meshtrain.files import read_text
from meshtrain.registry import Shown

F = 0
B = 1
W = 2
PLACEMENTS = ("loop", "v")
_LETTERS = {False: "FB", True: "FIW"}  # of a table that is split or not
# collectives over data, and their letters: a chunk's weights gathered, its gradient reduced
G = 0
R = 1
SENT = "GR"
MAX_ENTRIES = 2**20  # stages x clocks of a schedule: a plan of so many takes 10 s
# Arrays over a table's clocks; inside the step, those of one clock
Numbers = TypeVar("Numbers")


class IllegalTable(ConfigError):
    """A schedule that cannot be run; the message names the place and the reason."""


class Op(NamedTuple):
    clock: int
    stage: int
    slot: int
    microbatch: int
    chunk: int


@dataclass(frozen=True, eq=False)
class Slot(Generic[Numbers]):
    """The task of F, B or W, and the places of the stage's buffers that it reads and writes."""

    active: Numbers  # bool: False where the slot is idle, and all else is 0
    microbatch: Numbers
    chunk: Numbers
    stash: Numbers  # where F leaves what the backward needs; where B and W read it
    # Numbers too, or None in a slot without:
    # Where F reads its input (but on virtual stage 0), and B the cotangent of the chunk's output
    inbox: Any = None
    cot: Any = None  # cotangent stash: where I leaves what W needs, and W reads it


def turned(placement, stages, chunk, stage):
    """Stage that holds the virtual stage which is number `stage` of a chunk (integers or integer arrays).

    In a V every odd chunk runs backwards over the stages. The map is its own inverse.
    """
    if placement == "loop":
        return stage
    return stage + (chunk % 2) * (stages - 1 - 2 * stage)


@dataclass(frozen=True, eq=False, repr=False)
class Table(Shown):
    """A schedule. `cells[clock, stage, slot]` is (microbatch, chunk), or (-1, -1) where the slot is idle.

    `sends[G or R, chunk]` is the clock with which that collective of a chunk begins, -1 where it has no cell; None:
    none has one.
    """

    name: str
    stages: int
    microbatches: int
    chunks: int
    split: bool
    placement: str
    cells: np.ndarray
    # Whether F and B of a clock run at once, and I and W where no stage has an F
    paired: bool = False
    sends: np.ndarray = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if len(self.name.split()) != 1:
            raise IllegalTable(
                f"a schedule's name must be one word, and '{self.name}' is not"
            )
        for key in ("stages", "microbatches", "chunks"):
            if getattr(self, key) < 1:
                raise IllegalTable(
                    f"schedule {self.name}: {key} is {getattr(self, key)}, and must be at least 1"
                )
        if self.placement not in PLACEMENTS:
            raise IllegalTable(
                f"schedule {self.name}: placement is '{self.placement}', and must be one of {', '.join(PLACEMENTS)}"
            )
        cells = np.array(self.cells, np.int32)
        if cells.ndim != 4 or cells.shape[1:] != (self.stages, 3, 2):
            raise IllegalTable(
                f"schedule {self.name}: cells have shape {cells.shape}, and must have (clocks, {self.stages}, 3, 2)"
            )
        if self.sends is None:
            sends = np.full((2, self.chunks), -1)
        else:
            sends = self.sends
        for name, array in (("cells", cells), ("sends", np.array(sends, np.int32))):
            array.setflags(write=False)
            object.__setattr__(self, name, array)
        f, b, w = np.moveaxis(cells[..., 0] >= 0, 2, 0)
        in_pair = b & np.where(f.any(axis=1, keepdims=True), f, w)
        object.__setattr__(self, "paired", self.paired and bool(in_pair.any()))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Table):
            return self._key() == other._key()
        return NotImplemented

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple:
        sizes = self.stages, self.microbatches, self.chunks
        return (
            self.name,
            *sizes,
            self.split,
            self.placement,
            self.paired,
            self.cells.tobytes(),
            self.sends.tobytes(),
        )

    @property
    def clocks(self) -> int:
        return self.cells.shape[0]

    @property
    def has_sends(self) -> bool:
        """Says whether a G or an R stands in the table."""
        return bool((self.sends >= 0).any())

    def drop_sends(self) -> "Table":
        """The table without G and R."""
        return replace(self, sends=np.full((2, self.chunks), -1))

    @property
    def virtual_stages(self) -> int:
        return self.stages * self.chunks

    @property
    def letters(self) -> str:
        """Returns how the three slots are written."""
        return _LETTERS[self.split]

    def chunk_of(self, virtual):
        """Chunk that virtual stage `virtual` (an integer or an integer array) is on its stage."""
        return virtual // self.stages

    def stage_of(self, virtual):
        """Stage that holds virtual stage `virtual` (an integer or an integer array)."""
        return self._turn(self.chunk_of(virtual), virtual % self.stages)

    def virtual(self, stage, chunk):
        """Virtual stage that is chunk `chunk` of stage `stage` (integers or integer arrays)."""
        return chunk * self.stages + self._turn(chunk, stage)

    def _turn(self, chunk, stage):
        return turned(self.placement, self.stages, chunk, stage)

    def ops(self) -> Iterator[Op]:
        """Everything that is done, in the order (clock, slot, stage), which is an order in which it can be done."""
        is_used = self.cells[..., 0].transpose(0, 2, 1) >= 0
        for clock, slot, stage in np.argwhere(is_used).tolist():
            microbatch, chunk = self.cells[clock, stage, slot].tolist()
            yield Op(clock, stage, slot, microbatch, chunk)

    def when(self) -> np.ndarray:
        """Clock of each op, int32 [slot, virtual stage, microbatch]; -1 for what is not in the table."""
        clocks = np.full((3, self.virtual_stages, self.microbatches), -1, np.int32)
        clock, stage, slot = np.nonzero(self.cells[..., 0] >= 0)
        microbatch, chunk = self.cells[clock, stage, slot].T
        clocks[slot, self.virtual(stage, chunk), microbatch] = clock
        return clocks

    @staticmethod
    def place(
        when: np.ndarray,
        *,
        name: str,
        stages: int,
        chunks: int = 1,
        split: bool = False,
        placement: str = "loop",
        paired: bool = False,
    ) -> "Table":
        """The table that does each op at the clock given by `when`: the inverse of `Table.when`.

        Raises IllegalTable where two ops would share a slot.
        """
        clocks = int(when.max()) + 1
        empty = Table(
            name,
            stages,
            when.shape[2],
            chunks,
            split,
            placement,
            np.full((clocks, stages, 3, 2), -1),
        )
        slot, virtual, microbatch = np.nonzero(when >= 0)
        clock = when[slot, virtual, microbatch]
        stage = empty.stage_of(virtual)
        chunk = empty.chunk_of(virtual)
        place = np.ravel_multi_index((clock, stage, slot), (clocks, stages, 3))
        if np.bincount(place).max() > 1:
            raise IllegalTable(
                f"schedule {name}: two ops share one slot of one clock and stage"
            )
        cells = empty.cells.copy()
        cells[clock, stage, slot] = np.stack([microbatch, chunk], axis=-1)
        return Table(
            name, stages, when.shape[2], chunks, split, placement, cells, paired
        )

    def entry_text(self, microbatch: int, chunk: int) -> str:
        """A microbatch of a chunk as it is written: '3', with chunks '3.1'."""
        if self.chunks > 1:
            return f"{microbatch}.{chunk}"
        return f"{microbatch}"

    def cell_text(self, clock: int, stage: int) -> str:
        """Returns the ops of a stage in a clock as CSV writes them: 'F3 B1', a pair 'F3+B1', with chunks
        'F3.1 I2.0 W1.0', '' when idle.
        """
        words = []
        for slot, letter in enumerate(self.letters):
            microbatch, chunk = self.cells[clock, stage, slot]
            if microbatch >= 0:
                words.append(f"{letter}{self.entry_text(microbatch, chunk)}")
        if self.paired:
            used = self.cells[clock, :, :, 0] >= 0
            pair = [F, B] if used[:, F].any() else [B, W]
            if used[stage, pair].all():
                words[:2] = ["+".join(words[:2])]
        sent = [
            f"{SENT[kind]}{chunk}"
            for kind, chunk in np.argwhere(self.sends == clock).tolist()
        ]
        return " ".join([*words, *sent])

    def to_csv(self) -> str:
        """The table as CSV for people: a title, a line of stage names, then one row a clock.

            # schedule=1f1b stages=2 microbatches=2 chunks=1 split=no placement=loop
            stage 0,stage 1
            F0,
            F1,F0 B0
            B0,F1 B1
            B1,

        The title's keys may stand in any order: `stages` and `microbatches` must, `chunks` (1), `split` (no),
        `placement` (loop) and `schedule`, its name, may be left out. A cell is empty where the stage is idle in that
        clock; else it has one op of each kind at most, in the order F B, or F I W if split: letter, microbatch, and
        with chunks a dot and the chunk; then, in all cells of a row alike, at most one G and one R, each with its
        chunk. A message sent in a clock can be read from the next on; the last virtual stage may do B in the clock of
        its F. A table of pairs joins F and B of a cell, which run at once, as in F1+B0; and I and W in a clock without
        any F. Neither may be in the clock of what it needs. `read_csv` takes it back, with the line ends, quotes,
        spaces and byte order mark that a spreadsheet leaves.
        """
        title = f"# schedule={self.name} stages={self.stages} microbatches={self.microbatches} chunks={self.chunks}"
        lines = [
            f"{title} split={'yes' if self.split else 'no'} placement={self.placement}"
        ]
        lines.append(",".join(f"stage {s}" for s in range(self.stages)))
        lines += [
            ",".join(self.cell_text(t, s) for s in range(self.stages))
            for t in range(self.clocks)
        ]
        return "\n".join(lines) + "\n"


def check_is_table(given: object, taker: str) -> None:
    """Raises IllegalTable where `taker`, a function's name, was given something else than a table; says how that
    becomes one.
    """
    if isinstance(given, Table):
        return
    if name := _file_named(given):
        raise IllegalTable(
            f"{taker} takes a table, not the name of its file; write mt.schedule.read_csv({name})"
        )
    raise IllegalTable(
        f"{taker} takes a table, not {short(repr(given))}; mt.schedule.make_table, read_csv and parse_csv give one"
    )


def _file_named(given: object) -> str:
    """Returns a path, or a text that ends as the name of a table's file, as Python writes it; nothing for all else."""
    text = os.fspath(given) if isinstance(given, os.PathLike) else given
    named = text is not given or (
        isinstance(text, str) and text.endswith(".csv") and not text.startswith("#")
    )
    return short(repr(text)) if named else ""


_WORD = re.compile(r"([A-Z])([0-9]{1,18})(?:\.([0-9]{1,18}))?")
# A key of the title; its value is all that stands before the next key, less the spaces, commas and semicolons between
# them.
_KEY = re.compile(r"(?<![^\s,;])([^\s,;=]+)\s*=")
_NUMBER = re.compile("[0-9]{1,9}")
_TITLE = ("schedule", "stages", "microbatches", "chunks", "split", "placement")
_TITLE_EXAMPLE = (
    "# schedule=mine stages=2 microbatches=4 chunks=1 split=no placement=loop"
)
_MAX_BYTES = 32 * MAX_ENTRIES


def read_csv(path: str | Path) -> Table:
    """Reads what `Table.to_csv` wrote or a person edited.

    Raises IllegalTable naming file, row, column and what is legal.
    """
    takes = "parallel.schedule takes a CSV file"
    path = os.path.expanduser(path)
    return parse_csv(
        read_text(path, "schedule's table", takes, (".csv",), _MAX_BYTES),
        source=short(path),
    )


def parse_csv(text: str, source: str = "csv") -> Table:
    """Like `read_csv`, from a string; `source` stands for the file in messages.

    Rows are counted from 1, as editors do.
    """
    if name := _file_named(text):
        raise IllegalTable(
            f"parse_csv takes a table's text, not the name of its file; write mt.schedule.read_csv({name})"
        )
    lines = text.rstrip().splitlines()
    title = _read_title(lines[0].strip('", ') if lines else "", source)
    stages = title["stages"]
    reader = csv.reader(lines)
    try:
        _check_names([next(reader, []) for _ in range(2)][1], title, source)
        _check_rows(len(lines) - 2, title, source)
        rows = [[cell.strip() for cell in row] for row in reader]
    except csv.Error as error:
        raise IllegalTable(f"{source} is not CSV: {error}") from None
    table = Table(cells=np.full((len(rows), stages, 3, 2), -1), **title)
    cells = table.cells.copy()
    sends = table.sends.copy()
    paired = any("+" in cell for row in rows for cell in row)
    for clock, row in enumerate(rows):
        where = f"{source}, row {clock + 3}"
        if row and len(row) != stages:  # an empty row is a clock in which all are idle
            raise IllegalTable(
                f"{where}: {len(row)} columns, and there must be {stages}, one a stage, empty where idle"
            )
        sent = _read_row(row, table, cells[clock], sends, where)
        for kind, chunk in sent.items():
            sends[kind, chunk] = clock
    table = Table(cells=cells, paired=paired, sends=sends, **title)
    if paired:
        _check_pairs(table, rows, source)
    return table


def _read_row(
    row: list[str],
    table: Table,
    cells: np.ndarray,
    sends: np.ndarray,
    where: str,
) -> dict[int, int]:
    """Writes the ops of a row into `cells` and returns its chunks by kind of collective; `sends`: of rows before."""
    sent: list[dict[int, int]] = []
    for stage, cell in enumerate(row):
        try:
            cells[stage], chunks = _read_cell(cell, table)
            sent.append(chunks)
            _check_sent(cell, sent, sends)
        except IllegalTable as error:
            raise IllegalTable(
                f"{where}, column {stage + 1} (stage {stage}): {error}"
            ) from None
    if sent:
        return sent[0]
    return {}


def _check_pairs(table: Table, rows: list[list[str]], source: str) -> None:
    for clock, row in enumerate(rows):
        for stage, cell in enumerate(row):
            as_pair = table.cell_text(clock, stage)
            if re.sub(r"\s*\+\s*", "+", " ".join(cell.split())) != as_pair:
                raise IllegalTable(
                    f"{source}, row {clock + 3}, column {stage + 1} (stage {stage}): '{short(cell)}' must be "
                    f"'{as_pair}' in a table with pairs"
                )


def _check_sent(cell: str, sent: list[dict[int, int]], sends: np.ndarray) -> None:
    """Checks the G and R of a cell beside those of the stages before it, `sent`, and of the clocks before, `sends`."""
    if sent[-1] != sent[0]:
        raise IllegalTable(
            f"'{short(cell)}' must have the same G and R as the row's other stages: all send together"
        )
    for kind, chunk in sent[-1].items():
        if sends[kind, chunk] >= 0:
            raise IllegalTable(
                f"'{SENT[kind]}{chunk}' stands in row {sends[kind, chunk] + 3} already"
            )


def _check_names(names: list[str], title: dict, source: str) -> None:
    """Checks the row above clock 0.

    Where it was left out, clock 0 would be taken for it, and its ops be missed much later.
    """
    stages = title["stages"]
    letters = _LETTERS[title["split"]] + SENT
    matches = [_WORD.fullmatch(word) for name in names for word in name.split()]
    if matches and all(match and match[1] in letters for match in matches):
        example = ",".join(f"stage {stage}" for stage in range(min(stages, 4))) + (
            ",..." if stages > 4 else ""
        )
        raise IllegalTable(
            f"{source}, row 2: must be the stages' names, as in '{example}', and '{short(','.join(names))}' holds ops"
        )
    if len(names) != stages:
        raise IllegalTable(
            f"{source}, row 2: there must be {stages} comma-separated stage names, for stages={stages}"
        )


def _check_rows(clocks: int, title: dict, source: str) -> None:
    """A stage has one forward a clock; and in more clocks than there are ops, some have none."""
    least = title["microbatches"] * title["chunks"]
    most = min(
        least * title["stages"] * (3 if title["split"] else 2),
        MAX_ENTRIES // title["stages"],
    )
    if least > most:
        raise IllegalTable(
            f"{source}, row 1: so many microbatches, chunks and stages make more than the {MAX_ENTRIES} cells that a "
            "table can have"
        )
    if not least <= clocks <= most:
        raise IllegalTable(
            f"{source}: {clocks} rows after the first two, one a clock; for these microbatches, chunks and stages "
            "legal are "
            f"{least} to {most}"
        )


def _read_words(line: str, source: str) -> dict[str, str]:
    """Returns the values of a title by their keys, as they stand there."""
    if not line.startswith("#"):
        raise IllegalTable(
            f"{source}, row 1: must begin with '#' and say what the table is for, as in '{_TITLE_EXAMPLE}'"
        )
    words: dict[str, str] = {}
    line = line.lstrip("#")
    keys = list(_KEY.finditer(line))
    for match, end in zip(
        keys, [*(after.start() for after in keys[1:]), len(line)], strict=True
    ):
        key = match[1]
        value = line[match.end() : end].strip(",; \t")
        if key not in _TITLE:
            ending = nearest(key, _TITLE) or f"; legal are {', '.join(_TITLE)}"
            raise IllegalTable(f"{source}, row 1: there is no {short(key)}{ending}")
        if key in words:
            raise IllegalTable(f"{source}, row 1: says {key} twice")
        words[key] = value
    for key in ("stages", "microbatches"):
        if key not in words:
            raise IllegalTable(
                f"{source}, row 1: does not say {key}; it must be as in '{_TITLE_EXAMPLE}'"
            )
    return words


def _read_title(line: str, source: str) -> dict:
    words = _read_words(line, source)
    title: dict = {
        "name": short("_".join((words.get("schedule") or Path(source).stem).split())),
        "placement": words.get("placement", "loop"),
    }
    for key in ("stages", "microbatches", "chunks"):
        value = words.get(key, "1")
        if not _NUMBER.fullmatch(value) or int(value) < 1:
            raise IllegalTable(
                f"{source}, row 1: {key} is '{short(value)}', and must be a whole number, at least 1 and below a "
                "billion"
            )
        title[key] = int(value)
    split = words.get("split", "no")
    if split not in ("yes", "no"):
        raise IllegalTable(
            f"{source}, row 1: split is '{short(split)}', and must be yes or no"
        )
    if title["placement"] not in PLACEMENTS:
        raise IllegalTable(
            f"{source}, row 1: placement is '{short(title['placement'])}', and must be {' or '.join(PLACEMENTS)}"
        )
    return title | {"split": split == "yes"}


def _match_word(word: str, table: Table) -> re.Match[str]:
    """Returns the match of a letter, a microbatch or chunk, and perhaps a dot and a chunk."""
    match = _WORD.fullmatch(word)
    if match is None or match[1] not in table.letters + SENT:
        example = "F3" if table.chunks == 1 else "F3.1"
        raise IllegalTable(
            f"'{short(word)}' must be one of the letters {', '.join(table.letters)} and a microbatch, as '{example}', "
            f"or {' or '.join(SENT)} and a chunk"
        )
    return match


def _read_cell(text: str, table: Table) -> tuple[np.ndarray, dict[int, int]]:
    cell = np.full((3, 2), -1, np.int32)
    sent = {}
    done = -1
    letters = table.letters + SENT
    for word in text.replace("+", " ").split():
        match = _match_word(word, table)
        slot = letters.index(match[1])
        microbatch = int(match[2])
        chunk = int(match[3] or 0)
        if slot <= done:
            raise IllegalTable(
                f"'{short(text)}' must have each letter once, in the order {' '.join(letters)}"
            )
        done = slot
        if match[1] in SENT:
            if match[3] is not None or microbatch >= table.chunks:
                raise IllegalTable(
                    f"'{word}' must be {match[1]} and a chunk, and chunks are 0 to {table.chunks - 1}"
                )
            sent[SENT.index(match[1])] = microbatch
            continue
        if match[3] is None and table.chunks > 1:
            raise IllegalTable(
                f"'{word}' must name its chunk too, as '{word}.0', because chunks={table.chunks}"
            )
        if microbatch >= table.microbatches:
            raise IllegalTable(
                f"'{word}': microbatches are 0 to {table.microbatches - 1}"
            )
        if chunk >= table.chunks:
            raise IllegalTable(f"'{word}': chunks are 0 to {table.chunks - 1}")
        cell[slot] = microbatch, chunk
    return cell, sent
