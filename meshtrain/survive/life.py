"""The life of a run: when each node was there and had a process, and what the run did in each stretch of time, for a terminal."""

from collections.abc import Sequence
from typing import NamedTuple

from meshtrain.survive.history import History
from meshtrain.survive.ledger import Ledger, Piece
from meshtrain.survive.reliability import failures

LETTER = {
    "init": "i", "restore": "r", "compile": "c", "data": "d", "step": "S", "eval": "e", "checkpoint": "k", "lost": "x", "down": ".", "other": "?",
}  # fmt: skip
WORD = {"checkpoint": "save", "init": "start, end", "other": "not counted", "data": "waiting for data"}


class Row(NamedTuple):
    """A node: since when it is seen to be there, until when, and the times of its processes."""

    name: str
    there: list[tuple[float, float]]
    processes: list[tuple[int, int, float, float]]  # generation, rank, began, ended


def lives(history: History, told: Ledger) -> list[Row]:
    """Every node that is heard of, in the order of its name's numbers."""
    ends = {g.number: g.ended for g in told.generations}
    names = {e.node for e in history.events} | set(history.records)
    rows = {name: Row(name, [], []) for name in sorted(names, key=_natural)}
    begun: dict[str, tuple[int, int, float]] = {}
    heard: dict[str, float] = {}

    def close(node: str, time: float) -> None:
        if node in begun:
            generation, rank, began = begun.pop(node)
            rows[node].processes.append((generation, rank, began, max(began, min(time, ends.get(generation, time)))))

    for event in history.events:
        row, generation = rows[event.node], event.whole("generation")
        if event.name == "join" or not row.there:
            row.there.append((event.time, event.time))
            close(event.node, heard.get(event.node, event.time))
        row.there[-1] = (row.there[-1][0], event.time)
        if event.name == "started" and generation is not None:
            close(event.node, event.time)
            begun[event.node] = (generation, event.whole("rank") or 0, event.time)
        elif event.name == "ended":
            ends.setdefault(generation or 0, event.time)
            close(event.node, event.time)
        heard[event.node] = event.time
    for node in list(begun):
        close(node, told.ended)
    for name, record in history.records.items():
        if rows[name].there:
            first, last = rows[name].there[-1]
            rows[name].there[-1] = (first, max(last, min(record.wall, told.ended)))
    return list(rows.values())


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """n2 before n10."""
    digits = "".join(c if c.isdecimal() else " " for c in name).split()
    return [(False, 0, name.rstrip("0123456789")), *((True, int(d[:18]), "") for d in digits)]


def line(history: History, told: Ledger, width: int = 100) -> list[str]:
    """A run's life for a terminal: what rank 0 mostly did in each stretch of time, faults beneath, and what the letters mean."""
    pieces = [piece for generation in told.generations for piece in generation.pieces]
    columns, seconds = dominant(pieces, told.began, told.ended, max(width, 20)), told.wall / max(width, 20) or 1.0
    faults = [" "] * len(columns)
    for failure in failures(history):
        i = min(max(int((failure.time - told.began) / seconds), 0), len(columns) - 1)
        faults[i] = "!" if faults[i] == " " else "‼"
    letters = "".join(LETTER[kind or "down"] for kind in columns)
    legend = ", ".join(f"{letter} {word(kind)}" for kind, letter in LETTER.items() if letter in letters)
    legend += f"; a letter is {took(seconds)}"
    marked = "".join(faults).rstrip()
    return [letters, marked, f"{legend}; ! a fault"] if marked else [letters, legend]


def dominant(pieces: Sequence[Piece], began: float, ended: float, columns: int) -> list[str]:
    """What was done most in each of `columns` equal parts of a time; '' where that is nothing."""
    seconds = (ended - began) / columns or 1.0
    spent: list[dict[str, float]] = [{} for _ in range(columns)]
    for piece in pieces:
        kind = "lost" if piece.lost else piece.kind
        for i in range(
            max(int((piece.began - began) / seconds), 0), min(int((piece.ended - began) / seconds) + 1, columns)
        ):
            begins = began + i * seconds
            share = min(piece.ended, begins + seconds) - max(piece.began, begins)
            spent[i][kind] = spent[i].get(kind, 0.0) + max(share, 0.0)
    for column in spent:
        column[""] = seconds - sum(column.values())
    return [max(column, key=lambda kind: column[kind]) for column in spent]


def word(kind: str) -> str:
    """A kind of seconds as people call it."""
    return WORD.get(kind, kind)


def took(seconds: float) -> str:
    """Seconds for people: 2.5 s, 3:20 min, 2:05 h, 1.5 days."""
    if seconds < 100:
        return f"{seconds:.3g} s"
    whole = round(seconds)
    if whole < 5400:
        return f"{whole // 60}:{whole % 60:02} min"
    if whole < 100 * 3600:
        return f"{whole // 3600}:{whole % 3600 // 60:02} h"
    return f"{seconds / 86400:.1f} days"
