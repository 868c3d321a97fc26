"""What goes on in a run now: the newest decision, who takes part, where each is, and who has not been heard of."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from meshtrain.pictures.picture import columns
from meshtrain.survive import history as histories
from meshtrain.survive.history import Fields, History, Plan, number, text, whole
from meshtrain.survive.life import took
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
            if name not in alive and _sign(record) != _sign(first.get(name, {})):
                alive[name] = time.monotonic() - began
    history = histories.read(run)
    waited = time.monotonic() - began
    parts = [_headline(history), _nodes(history, alive, waited if waiting else None), _lately(history)]
    parts += [torn(history.torn)] if history.torn else []
    return "\n\n".join(part for part in parts if part) + "\n"


def _sign(record: Fields) -> tuple[object, object]:
    return record.get("incarnation"), record.get("sequence")


def _headline(history: History) -> str:
    if not history.plans:
        return "waiting for nodes: nothing is decided yet"
    plan = history.plans[-1]
    lines = [f"{_state(plan)}: {text(plan.fields.get('reason')) or plan.kind}"]
    if _mesh(plan) and plan.state != "over":
        lines.append(_mesh(plan))
    facts = [f"leader {text(plan.fields.get('leader'))}"]
    if coordinator := text(plan.fields.get("coordinator")):
        facts.append(f"coordinator {coordinator}")
    spares = sorted(_spares(history, plan))
    if spares:
        facts.append(f"spare {', '.join(spares)}")
    lines.append("; ".join(facts))
    until = plan.fields.get("quarantined")
    for name, wall in until.items() if isinstance(until, dict) else ():
        left = (number(wall) or 0.0) - (number(plan.fields.get("wall")) or 0.0) - (history.newest - plan.time)
        if histories.is_name(name) and left > 0 and plan.state != "over":
            lines.append(f"{name} is left out for another {took(left)}")
    return "\n".join(lines)


def _state(plan: Plan) -> str:
    if plan.state == "over":
        return f"over, exit code {whole(plan.fields.get('code')) or 0}"
    return f"generation {plan.generation} {plan.state}"


def _mesh(plan: Plan) -> str:
    mesh = plan.fields.get("mesh")
    if not isinstance(mesh, Mapping) or not mesh:
        return ""
    sizes = " x ".join(f"{axis} {whole(mesh.get(axis)) or 1}" for axis in ("data", "tensor", "pipeline"))
    return f"mesh {sizes}, {whole(plan.fields.get('microbatches')) or 1} microbatches"


def _spares(history: History, plan: Plan) -> set[str]:
    members = histories.names(plan.fields.get("members"))
    idle = (
        name for name, record in history.records.items() if record.get("state") == "idle" and not record.get("leaving")
    )
    return set() if plan.state == "over" else set(idle) - set(members)


def _nodes(history: History, alive: Mapping[str, float], waited: float | None) -> str:
    """A row for each node, in the order of ranks; `waited` is how long they were watched, none where there is nothing to wait for."""
    plan = history.plans[-1] if history.plans else None
    members = histories.names(plan.fields.get("members")) if plan else ()
    order = {name: i for i, name in enumerate(members)}
    rows = [["node", "rank", "host", "state", "step", "phase", "a step", "of it host", "sign of life"]]
    for name in sorted({*history.records, *members}, key=lambda name: (order.get(name, len(order)), name)):
        record = history.records.get(name, {})
        rank = record.get("rank")
        rank = rank if isinstance(rank, Mapping) and record.get("state") != "idle" else {}
        phase, age = text(rank.get("phase")), number(rank.get("phase_age"))
        rows.append([
            name, _shown(whole(rank.get("number"))), text(record.get("host")), _node_state(record), _shown(whole(rank.get("step"))),
            f"{phase} for {took(age)}" if phase and age is not None else phase, _seconds(rank.get("pace")), _seconds(rank.get("host")),
            _life(name, record, history, alive, waited),
        ])  # fmt: skip
    return columns(rows) if len(rows) > 1 else ""


def _node_state(record: Fields) -> str:
    end = record.get("end")
    if record.get("state") == "ended" and isinstance(end, Mapping):
        return f"ended: {text(end.get('sentence')) or text(end.get('kind'))}"
    return "leaving" if record.get("leaving") is True else text(record.get("state"))


def _life(name: str, record: Fields, history: History, alive: Mapping[str, float], waited: float | None) -> str:
    wall = number(record.get("wall"))
    if name in alive:
        return "now"
    at = "" if wall is None else f"{histories.date(wall - history.ahead.get(name, 0.0)):%Y-%m-%d %H:%M:%S} UTC"
    if waited is None or not at:
        return at or "none"
    return f"none in {took(waited)}; the last says {at}"


def _lately(history: History) -> str:
    """The last decisions that have a reason, each once."""
    told: list[str] = []
    for plan in history.plans:
        reason = text(plan.fields.get("reason"))
        if not reason or plan.state == "running":
            continue
        blamed = f" (blamed: {', '.join(plan.blamed)})" if plan.blamed else ""
        told.append(
            f"{histories.date(plan.time):%H:%M:%S}  generation {plan.generation} {plan.state}: {reason}{blamed}"
        )
    return "\n".join(["lately", *(f"  {one}" for one in told[-LATELY:])]) if told else ""


def _shown(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _seconds(value: object) -> str:
    seconds = number(value)
    return "-" if seconds is None else took(seconds)
