"""What goes on in a run now: the newest decision, who takes part, where each rank is, and which nodes give no sign of life."""

import time
from collections.abc import Callable
from pathlib import Path

from meshtrain.draw.picture import columns
from meshtrain.survive import history as histories
from meshtrain.survive.history import History, number, text
from meshtrain.survive.records import Node
from meshtrain.survive.stats import torn
from meshtrain.survive.stragglers import own_share
from meshtrain.units import duration

WATCH = 2.5  # seconds in which every supervisor writes something
LATELY = 5  # reasons that are shown


def show(run: Path, watch: float = WATCH, sleep: Callable[[float], None] = time.sleep) -> str:
    """Returns what goes on in `run`, whose records are watched for at most `watch` seconds; ConfigError if it is no run under supervision.

    Whether a node lives is seen by whether it writes: neither its clock nor a file's time, which another machine has set, shows it.
    """

    def signs() -> dict[str, tuple[str, int]]:
        return {name: (node.incarnation, node.sequence) for name, node in histories.read_records(run)[0].items()}

    first, alive = signs(), set[str]()
    began, waiting = time.monotonic(), not histories.read(run).over
    while waiting and len(alive) < len(first) and time.monotonic() - began < watch:
        sleep(0.1)
        alive |= {name for name, sign in signs().items() if sign != first.get(name)}
    history = histories.read(run)
    waited = time.monotonic() - began
    parts = [_headline(history), _nodes(history, alive, waited if waiting else None), _lately(history)]
    parts += [torn(history.torn)] if history.torn else []
    return "\n\n".join(part for part in parts if part) + "\n"


def _headline(history: History) -> str:
    if not history.plans:
        return "waiting for nodes: nothing is decided yet"
    plan = history.plans[-1]
    leader, why = f"leader {text(plan.leader)}", text(plan.reason) or text(plan.kind)
    if plan.state == "over":
        return f"over, exit code {plan.code}: {why}\n{leader}"
    lines = [f"generation {plan.generation} {text(plan.state)}: {why}"]
    if plan.mesh:
        sizes = " x ".join(f"{text(axis)} {size}" for axis, size in plan.mesh.items())
        lines.append(f"mesh {sizes}, {plan.microbatches} microbatches")
    coordinator = f"; coordinator {text(plan.coordinator)}" if plan.coordinator else ""
    idle = [name for name, node in history.records.items() if node.state == "idle" and not node.leaving]
    spares = ", ".join(sorted(name for name in idle if name not in plan.members))
    lines.append(leader + coordinator + (f"; spare {spares}" if spares else ""))
    for name, until in plan.quarantined.items():
        left = (number(until) or 0.0) - history.ahead.get(plan.leader, 0.0) - history.newest
        if left > 0:
            lines.append(f"{text(name)} is left out for another {duration(left)}")
    return "\n".join(lines)


def _nodes(history: History, alive: set[str], waited: float | None) -> str:
    """Returns a row for each node, in the order of ranks; `waited`: how long they were watched, None where there is nothing to wait for."""
    members = history.plans[-1].members if history.plans else []
    order = {name: i for i, name in enumerate(members)}
    rows = [["node", "rank", "host", "state", "step", "phase", "a step", "not waiting", "sign of life"]]
    for name in sorted({*history.records, *members}, key=lambda name: (order.get(name, len(order)), name)):
        node = history.records.get(name)
        if node is None:
            rows.append([text(name), "-", "", "", "-", "-", "-", "-", "none"])
            continue
        about = ["-", "-", "-", "-", "-"]
        if (rank := node.rank) is not None and node.state != "idle":
            since = f" for {_seconds(rank.phase_age)}" if node.state == "running" else ""
            share = own_share(rank.phases or {})
            about = [
                str(rank.number), str(rank.step), text(rank.phase) + since, _seconds(rank.pace),
                "-" if share is None else f"{share:.0%}",
            ]  # fmt: skip
        life = "now" if name in alive else f"{histories.date(node.wall):%Y-%m-%d %H:%M:%S} UTC"
        if name not in alive and waited is not None:
            life = f"none in {duration(waited)}; the last says {life}"
        rows.append([text(name), about[0], text(node.host), _state(node), *about[1:], life])
    return columns(rows) if len(rows) > 1 else ""


def _state(node: Node) -> str:
    if node.state == "ended" and node.end is not None:
        return f"ended: {text(node.end.sentence) or text(node.end.kind)}"
    return "leaving" if node.leaving else text(node.state)


def _lately(history: History) -> str:
    lines: list[str] = []
    for plan in history.plans:
        if plan.state != "running" and plan.reason:
            blamed = f" (blamed: {text(', '.join(plan.blamed))})" if plan.blamed else ""
            at = f"{histories.date(plan.wall):%H:%M:%S}"
            lines.append(f"  {at}  generation {plan.generation} {text(plan.state)}: {text(plan.reason)}{blamed}")
    return "\n".join(["lately", *lines[-LATELY:]]) if lines else ""


def _seconds(value: object) -> str:
    seconds = number(value)
    return "-" if seconds is None else duration(seconds)
