"""What goes on in a run now: the newest decision, who takes part, where each is, and who has not been heard of."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from meshtrain.pictures.picture import columns
from meshtrain.survive import history as histories
from meshtrain.survive.history import History, number, text
from meshtrain.survive.life import took
from meshtrain.survive.records import Node
from meshtrain.survive.stats import torn

WATCH = 2.5  # seconds in which every supervisor says something
LATELY = 5  # reasons that are told


def show(run: Path, watch: float = WATCH, sleep: Callable[[float], None] = time.sleep) -> str:
    """What goes on in `run`, whose records are watched for at most `watch` seconds; ConfigError if it is no run under supervision.

    Whether a node lives is seen by whether it writes: neither its clock nor a file's time, which another machine has set, says so.
    """
    first, _ = histories.read_records(run)
    began, alive, waiting = time.monotonic(), dict[str, float](), not histories.read(run).over
    while waiting and len(alive) < len(first) and time.monotonic() - began < watch:
        sleep(0.1)
        for name, record in histories.read_records(run)[0].items():
            if name not in alive and _sign(record) != _sign(first.get(name)):
                alive[name] = time.monotonic() - began
    history = histories.read(run)
    waited = time.monotonic() - began
    parts = [_headline(history), _nodes(history, alive, waited if waiting else None), _lately(history)]
    parts += [torn(history.torn)] if history.torn else []
    return "\n\n".join(part for part in parts if part) + "\n"


def _sign(record: Node | None) -> tuple[str, int] | None:
    return None if record is None else (record.incarnation, record.sequence)


def _headline(history: History) -> str:
    if not history.plans:
        return "waiting for nodes: nothing is decided yet"
    plan = history.plans[-1]
    over = plan.state == "over"
    state = f"over, exit code {plan.code}" if over else f"generation {plan.generation} {text(plan.state)}"
    lines = [f"{state}: {text(plan.reason) or text(plan.kind)}"]
    facts = [f"leader {text(plan.leader)}"]
    if not over:
        if plan.mesh:
            sizes = " x ".join(f"{text(axis)} {size}" for axis, size in plan.mesh.items())
            lines.append(f"mesh {sizes}, {plan.microbatches} microbatches")
        spares = [
            name
            for name, node in history.records.items()
            if node.state == "idle" and not node.leaving and name not in plan.members
        ]
        facts += [f"coordinator {text(plan.coordinator)}"] if plan.coordinator else []
        facts += [f"spare {', '.join(sorted(spares))}"] if spares else []
    lines.append("; ".join(facts))
    for name, until in plan.quarantined.items() if not over else ():
        left = (number(until) or 0.0) - history.ahead.get(plan.leader, 0.0) - history.newest
        if left > 0:
            lines.append(f"{text(name)} is left out for another {took(left)}")
    return "\n".join(lines)


def _nodes(history: History, alive: Mapping[str, float], waited: float | None) -> str:
    """A row for each node, in the order of ranks; `waited` is how long they were watched, none where there is nothing to wait for."""
    members = history.plans[-1].members if history.plans else []
    order = {name: i for i, name in enumerate(members)}
    rows = [["node", "rank", "host", "state", "step", "phase", "a step", "of it host", "sign of life"]]
    for name in sorted({*history.records, *members}, key=lambda name: (order.get(name, len(order)), name)):
        node = history.records.get(name, Node(name))
        rank = node.rank if node.state != "idle" else None
        about = ["-", "-", "-", "-", "-"]
        if rank is not None:
            since = f" for {_seconds(rank.phase_age)}" if node.state == "running" else ""
            phase = text(rank.phase) + since
            about = [str(rank.number), str(rank.step), phase, _seconds(rank.pace), _seconds(rank.host)]
        seen = name in history.records
        rows.append([
            text(name), about[0], text(node.host), _state(node) if seen else "", *about[1:],
            _life(node, name in alive, waited) if seen else "none",
        ])  # fmt: skip
    return columns(rows) if len(rows) > 1 else ""


def _state(node: Node) -> str:
    if node.state == "ended" and node.end is not None:
        return f"ended: {text(node.end.sentence) or text(node.end.kind)}"
    return "leaving" if node.leaving else text(node.state)


def _life(node: Node, alive: bool, waited: float | None) -> str:
    if alive:
        return "now"
    at = f"{histories.date(node.wall):%Y-%m-%d %H:%M:%S} UTC"
    return at if waited is None else f"none in {took(waited)}; the last says {at}"


def _lately(history: History) -> str:
    """The last decisions that have a reason, each once."""
    told: list[str] = []
    for plan in history.plans:
        if plan.state != "running" and plan.reason:
            blamed = f" (blamed: {text(', '.join(plan.blamed))})" if plan.blamed else ""
            at = f"{histories.date(plan.wall):%H:%M:%S}"
            told.append(f"{at}  generation {plan.generation} {text(plan.state)}: {text(plan.reason)}{blamed}")
    return "\n".join(["lately", *(f"  {one}" for one in told[-LATELY:])]) if told else ""


def _seconds(value: object) -> str:
    seconds = number(value)
    return "-" if seconds is None else took(seconds)
