"""A run's history as text: what goes on in it now; what became of its time, how often it failed and why; and the same
as JSON.
"""

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from meshtrain.draw.picture import columns
from meshtrain.survive import history as histories
from meshtrain.survive.history import History, date, number, text
from meshtrain.survive.ledger import Ledger, dominant, ledger, word
from meshtrain.survive.records import Node
from meshtrain.survive.reliability import (
    SURE,
    Reliability,
    by_kind,
    by_node,
    failures,
    reliability,
)
from meshtrain.survive.stragglers import own_share
from meshtrain.units import counted, duration

BAR = 30  # letters of the longest bar
LETTER = {
    "init": "i",
    "restore": "r",
    "compile": "c",
    "data": "d",
    "step": "S",
    "eval": "e",
    "checkpoint": "k",
    "lost": "x",
    "down": ".",
    "other": "?",
}
WATCH = 2.5  # seconds in which every supervisor writes something
LATELY = 5  # reasons that are shown


# --- now


def show_status(
    run: Path, watch: float = WATCH, sleep: Callable[[float], None] = time.sleep
) -> str:
    """Returns what goes on in `run`, whose records are watched for at most `watch` seconds; ConfigError if it is not a
    supervised run.
    """
    history, alive, waited = _watched(run, watch, sleep)
    return _joined(
        _decision(history),
        _nodes(history, alive, waited),
        _lately(history),
        _torn(history),
    )


def status_json(run: Path, watch: float = WATCH) -> dict[str, Any]:
    """Returns the same for programs: the newest decision, and each node's record with whether it was seen to live."""
    history, alive, _ = _watched(run, watch, time.sleep)
    plan = asdict(history.plans[-1]) if history.plans else None
    nodes = [
        asdict(node) | {"alive": name in alive}
        for name, node in sorted(history.records.items())
    ]
    return histories.plain(
        {"over": history.over, "decision": plan, "nodes": nodes, "torn": history.torn}
    )  # type: ignore[no-any-return]


def _watched(
    run: Path, watch: float, sleep: Callable[[float], None]
) -> tuple[History, set[str], float | None]:
    """Returns the history of `run`, the nodes that live, and for how long they were watched, None where the run is
    over.

    Whether a node lives is seen by whether it writes: neither its clock nor a file's time, which another machine has
    set, shows it.
    """

    def signs() -> dict[str, tuple[str, int]]:
        return {
            name: (node.incarnation, node.sequence)
            for name, node in histories.read_records(run)[0].items()
        }

    first = signs()
    alive = set[str]()
    began = time.monotonic()
    waiting = not histories.read(run).over
    while waiting and len(alive) < len(first) and time.monotonic() - began < watch:
        sleep(0.1)
        alive |= {name for name, sign in signs().items() if sign != first.get(name)}
    return histories.read(run), alive, time.monotonic() - began if waiting else None


def _decision(history: History) -> str:
    if not history.plans:
        return "waiting for nodes: nothing is decided yet"
    plan = history.plans[-1]
    leader = f"leader {text(plan.leader)}"
    why = text(plan.reason) or text(plan.kind)
    if plan.state == "over":
        return f"over, exit code {plan.code}: {why}\n{leader}"
    lines = [f"generation {plan.generation} {text(plan.state)}: {why}"]
    if plan.mesh:
        sizes = " x ".join(f"{text(axis)} {size}" for axis, size in plan.mesh.items())
        lines.append(f"mesh {sizes}, {plan.microbatches} microbatches")
    coordinator = f"; coordinator {text(plan.coordinator)}" if plan.coordinator else ""
    idle = {
        name
        for name, node in history.records.items()
        if node.state == "idle" and not node.leaving
    }
    spares = ", ".join(sorted(idle - set(plan.members)))
    lines.append(leader + coordinator + (f"; spare {spares}" if spares else ""))
    for name, until in plan.quarantined.items():
        left = (
            (number(until) or 0.0)
            - history.ahead.get(plan.leader, 0.0)
            - history.newest
        )
        if left > 0:
            lines.append(f"{text(name)} is left out for another {duration(left)}")
    return "\n".join(lines)


def _nodes(history: History, alive: set[str], waited: float | None) -> str:
    """Returns a row for each node, in the order of ranks; `waited`: how long they were watched, None where there is
    nothing to wait for.
    """
    members = history.plans[-1].members if history.plans else []
    order = {name: i for i, name in enumerate(members)}
    rows = [
        [
            "node",
            "rank",
            "host",
            "state",
            "step",
            "phase",
            "a step",
            "not waiting",
            "sign of life",
        ]
    ]
    for name in sorted(
        {*history.records, *members},
        key=lambda name: (order.get(name, len(order)), name),
    ):
        node = history.records.get(name)
        if node is None:
            rows.append([text(name), "-", "", "", "-", "-", "-", "-", "none"])
            continue
        rank, *about = ["-"] * 5
        if node.rank is not None and node.state != "idle":
            since = (
                f" for {_maybe(number(node.rank.phase_age))}"
                if node.state == "running"
                else ""
            )
            share = own_share(node.rank.phases or {})
            pace = _maybe(number(node.rank.pace))
            rank = str(node.rank.number)
            phase = text(node.rank.phase) + since
            about = [
                str(node.rank.step),
                phase,
                pace,
                "-" if share is None else f"{share:.0%}",
            ]
        life = "now" if name in alive else _last_sign(node, waited)
        rows.append([text(name), rank, text(node.host), _state(node), *about, life])
    return columns(rows) if len(rows) > 1 else ""


def _last_sign(node: Node, waited: float | None) -> str:
    """Returns when a node gave its last sign of life; `waited`: for how long it was watched."""
    last = f"{date(node.wall):%Y-%m-%d %H:%M:%S} UTC"
    if waited is None:
        return last
    return f"none in {duration(waited)}; the last says {last}"


def _state(node: Node) -> str:
    if node.state == "ended" and node.end is not None:
        return f"ended: {text(node.end.sentence) or text(node.end.kind)}"
    return "leaving" if node.leaving else text(node.state)


def _lately(history: History) -> str:
    lines: list[str] = []
    for plan in history.plans:
        if plan.state != "running" and plan.reason:
            blamed = f" (blamed: {text(', '.join(plan.blamed))})" if plan.blamed else ""
            what = f"generation {plan.generation} {text(plan.state)}: {text(plan.reason)}{blamed}"
            lines.append(f"  {date(plan.wall):%H:%M:%S}  {what}")
    return "\n".join(["lately", *lines[-LATELY:]]) if lines else ""


# --- the whole of it


def show(run: Path) -> str:
    """Returns the tables of `run`; ConfigError if it is not a supervised run."""
    history, times, figures = _figures(run)
    life = "\n".join(timeline(history, times))
    tables = _times(times), life, _failures(figures), _formulas(figures, times)
    return _joined(_headline(history, times), *tables, _torn(history))


def to_json(run: Path) -> dict[str, Any]:
    """Returns the same figures under their names. Seconds; times in seconds since 1970; null is what is not known."""
    history, times, figures = _figures(run)
    return histories.plain(
        {
            "over": history.over,
            "began": times.began,
            "ended": times.ended,
            "wall": times.wall,
            "seconds": times.seconds,
            "goodput": times.goodput,
            "effective": times.effective,
            "torn": history.torn,
            "generations": [
                {
                    name: getattr(g, name)
                    for name in (
                        "number",
                        "node",
                        "began",
                        "ended",
                        "start",
                        "step",
                        "exit",
                        "seconds",
                    )
                }
                for g in times.generations
            ],
            "failures_by_kind": dict(by_kind(figures.failures)),
            "failures_by_node": dict(by_node(figures.failures)),
            "reliability": asdict(figures),
        }
    )


def _figures(run: Path) -> tuple[History, Ledger, Reliability]:
    history = histories.read(run)
    return history, (times := ledger(history)), reliability(history, times)


def timeline(history: History, times: Ledger, width: int = 100) -> list[str]:
    """Returns lines for a terminal: what rank 0 mostly did in each stretch of time, faults beneath, and what the
    letters mean.
    """
    spans = [span for generation in times.generations for span in generation.spans]
    width = max(width, 20)
    parts = dominant(spans, times.began, times.ended, width)
    seconds = times.wall / width or 1.0
    marks = [" "] * width
    for failure in failures(history):
        i = min(max(int((failure.time - times.began) / seconds), 0), width - 1)
        marks[i] = "!" if marks[i] == " " else "‼"
    letters = "".join(LETTER[kind or "down"] for kind in parts)
    marked = "".join(marks).rstrip()
    legend = ", ".join(
        f"{letter} {word(kind)}" for kind, letter in LETTER.items() if letter in letters
    )
    legend += f"; a letter is {duration(seconds)}"
    return [letters, marked, f"{legend}; ! a fault"] if marked else [letters, legend]


def _headline(history: History, times: Ledger) -> str:
    nodes = len({e.node for e in history.events})
    state = f"over, {text(history.plans[-1].reason)}" if history.over else "not over"
    counts = (
        f"{counted(len(times.generations), 'generation')} on {counted(nodes, 'node')}"
    )
    return f"{counts}; {duration(times.wall)} since {date(times.began):%Y-%m-%d %H:%M:%S} UTC; {state}"


def _times(times: Ledger) -> str:
    rows = [["kind", "seconds", "share", ""]]
    top = max(times.seconds.values(), default=0.0) or 1.0
    for kind, seconds in [*times.seconds.items(), ("together", times.wall)]:
        if seconds or kind == "together":
            bar = "" if kind == "together" else "█" * max(round(BAR * seconds / top), 1)
            share = f"{seconds / times.wall:.1%}" if times.wall else "-"
            rows.append([word(kind), f"{seconds:,.1f}", share, bar])
    good = (
        f"goodput {times.goodput:.1%}, in steps that count; effective {times.effective:.1%}, with their data, "
        "evaluations and saves"
    )
    return f"{_right(rows, 1, 2)}\n{good}"


def _failures(figures: Reliability) -> str:
    hours = figures.exposed / 3600
    events = figures.failures
    if not events:
        return ""

    def table(head: str, counts: Iterable[tuple[str, int]]) -> str:
        rows = [[head, "failures", "an hour"]]
        rows += [
            [text(name) or "nobody", str(n), f"{n / hours:.3g}" if hours else "-"]
            for name, n in counts
        ]
        return _right(rows, 1, 2)

    often = counted(len(events), "failure") + (
        f", {len(events) / hours:.3g} an hour" if hours else ""
    )
    return "\n\n".join(
        (often, table("kind", by_kind(events)), table("node", by_node(events)))
    )


def _formulas(figures: Reliability, times: Ledger) -> str:
    least = _maybe(figures.between_least)
    most = _maybe(figures.between_most)
    rows = [
        ("", "measured", "by formula"),
        ("mean time between failures", _maybe(figures.between), ""),
        (
            f"  {SURE:.0%} sure",
            f"{least} to {most}" if figures.failures else f"over {least}",
            "",
        ),
        ("last progress to verdict", _maybe(figures.noticed), ""),
        ("verdict to first step again", _maybe(figures.restart), ""),
        ("a save stops training for", _maybe(figures.write), ""),
        (
            "checkpoint.every",
            _maybe(figures.interval_steps, "{:.3g} steps"),
            _maybe(figures.advised, "{:,} steps"),
        ),
        ("goodput", f"{times.goodput:.1%}", _maybe(figures.expected, "{:.1%}")),
    ]
    return f"{columns(rows)}\nthe formulas take failures to be memoryless"


def _maybe(value: float | None, form: str = "") -> str:
    """Returns a number as text, seconds where it has no form; a dash where it is not known."""
    if value is None:
        return "-"
    if form:
        return form.format(value)
    return "any" if math.isinf(value) else duration(value)


def _right(rows: list[list[str]], *numbers: int) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return columns(
        [
            [
                cell.rjust(widths[i]) if i in numbers else cell
                for i, cell in enumerate(row)
            ]
            for row in rows
        ]
    )


def _torn(history: History) -> str:
    if not history.torn:
        return ""
    lines = "line was" if history.torn == 1 else "lines were"
    return f"{history.torn} torn {lines} left out: cut off, or not what a supervisor writes."


def _joined(*parts: str) -> str:
    return "\n\n".join(part for part in parts if part) + "\n"
