"""A packing for people and for programs: a row a job, the nodes with who lies on them, the strategies side by side."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from string import ascii_letters, digits
from typing import NamedTuple

from rich.console import Group, RenderableType
from rich.style import Style
from rich.text import Text

from meshtrain import units
from meshtrain.plan import report
from meshtrain.plan.estimate import Plan
from meshtrain.plan.jobs.listed import Jobs
from meshtrain.plan.jobs.packing import Packing, PlacedJob
from meshtrain.plan.jobs.requests import JobRequest, Speeds

LETTERS = ascii_letters[26:] + ascii_letters[:26] + digits
FREE = "·"
MESH = "data x tensor x pipeline"
FIGURES = (
    "utilisation",
    "fragmentation",
    "balance",
    "tokens/s",
    "mean end",
    "last end",
)


@dataclass(frozen=True, eq=False)
class Result:
    """The packings of a list of jobs, one of each strategy, of which one was asked for."""

    jobs: Jobs
    packings: dict[str, Packing]
    speeds: Speeds

    @property
    def packing(self) -> Packing:
        return self.packings[self.jobs.strategy]

    @property
    def placed(self) -> dict[str, PlacedJob]:
        """Returns the placements by the name of the job."""
        return {placed.request.job.name: placed for placed in self.packing.placed}

    def slowdown(self, placed: PlacedJob) -> float:
        """Times the step that it would take in the same shape side by side; 1 where nothing is known."""
        alone = self.speeds.side_by_side(placed.shape)
        return placed.plan.seconds / alone.seconds if placed.plan and alone else 1.0


class JobRow(NamedTuple):
    """A job in words; where it has no place, `nodes` says so and the rest is empty."""

    number: int
    name: str
    priority: str
    devices: str
    nodes: str  # and the devices there where they are not all: 0-3; 5: devices 0-3
    mesh: str
    step: str
    tokens: str
    starts: str
    ends: str

    @property
    def letter(self) -> str:
        """The job's letter in a picture; more than 62 jobs share them."""
        return letter(self.number)


def letter(number: int) -> str:
    return LETTERS[number % len(LETTERS)]


def job_rows(result: Result) -> Iterator[JobRow]:
    """Every job, in the order of the file."""
    for number, request in enumerate(result.packing.requests):
        job = request.job
        cells = ["", "waits" if request.shapes else "nowhere", *[""] * 5]
        if placed := result.placed.get(job.name):
            cells = _place_cells(result, placed)
        yield JobRow(number, job.name, str(job.priority), *cells)


def _place_cells(result: Result, placed: PlacedJob) -> list[str]:
    mesh = step = tokens = ""
    if plan := placed.plan:
        shape = plan.config.mesh
        slower = result.slowdown(placed) - 1
        islands = f", {shape.islands} islands" if shape.islands > 1 else ""
        mesh = f"{shape.data} x {shape.tensor} x {shape.pipeline}{islands}"
        step = units.duration(plan.seconds) + (
            f" (+{slower:.1%})" if slower > 0.0005 else ""
        )
        tokens = units.count(plan.tokens_per_second)
    devices = str(placed.shape.devices)
    place = _place(placed, result.packing.cluster.devices_per_node)
    hours = when(placed.start), when(placed.end)
    return [devices, place, mesh, step, tokens, *hours]


def _place(placed: PlacedJob, per_node: int) -> str:
    parts = []
    for devices, group in groupby(
        placed.group_by_node(per_node).items(), key=lambda pair: pair[1]
    ):
        where = (
            ""
            if len(devices) == per_node
            else f": device{'s' * (len(devices) > 1)} {spans(devices)}"
        )
        parts.append(spans([node for node, _ in group]) + where)
    return "; ".join(parts)


def node_rows(packing: Packing) -> Iterator[tuple[str, list[int | None]]]:
    """Numbers of nodes that are the same, neighbours in one row, and the job on each device of one of them now."""
    per_node = packing.cluster.devices_per_node
    grid: list[list[int | None]] = [
        [None] * per_node for _ in range(packing.cluster.nodes)
    ]
    numbers = {
        request.job.name: number for number, request in enumerate(packing.requests)
    }
    for placed in packing.now:
        for device in placed.devices:
            grid[device // per_node][device % per_node] = numbers[
                placed.request.job.name
            ]
    for row, group in groupby(enumerate(grid), key=lambda pair: pair[1]):
        yield spans([node for node, _ in group]), row


def spans(numbers: Sequence[int]) -> str:
    """Numbers in words: 0-3, 7."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(
        f"{first}" if first == last else f"{first}-{last}" for first, last in runs
    )


def headline(result: Result) -> str:
    cluster = result.packing.cluster
    return (
        f"{len(result.packing.requests)} jobs on {cluster.name}, {cluster.nodes} x {cluster.devices_per_node} "
        f"{cluster.accelerator.name}: {words(result.jobs.strategy)} for {result.jobs.goal}"
    )


def words(strategy: str) -> str:
    return strategy.replace("_", " ")


def when(hours: float) -> str:
    if math.isinf(hours):
        return "not known"
    return units.duration(hours * 3600) if hours else "now"


def reason(result: Result, request: JobRequest) -> str:
    """Why a job does not run now, in one sentence; empty where it does."""
    name = request.job.name
    free = result.packing.free
    devices = result.packing.cluster.devices
    placed = result.placed.get(name)
    if not request.shapes:
        return f"{name} does not fit: {request.reason}."
    if placed and not placed.start:
        return ""
    least = min(request.shapes, key=lambda shape: (shape.devices, shape.nodes))
    needs = "1 device" if least.each == 1 else f"{least.each} devices"
    if least.nodes > 1:
        needs = (
            f"{least.nodes} nodes with {needs} each"
            + ", all in one block of links" * request.job.together
        )
    waits = (
        f"waits {when(placed.start)}"
        if placed
        else "waits for others to end, and nobody knows when"
    )
    there = f"all {devices} devices are taken"
    if any(free):
        there = f"{sum(free)} of {devices} devices are free, at most {max(free)} on one node"
    return f"{name} {waits}: it needs {needs}; {there}."


def choices(result: Result) -> list[str]:
    """The speeds on each number of devices, of jobs that any of several will do for."""
    return [
        f"{request.job.name}: "
        + ", ".join(
            f"{p.devices} devices {units.count(p.tokens_per_second)} tokens/s"
            for p in request.plans
        )
        for request in result.packing.requests
        if len(request.plans) > 1
    ]


def figures(result: Result) -> Iterator[tuple[str, list[str]]]:
    """Each strategy and its `FIGURES` in words."""
    for name, packing in result.packings.items():
        shares = (
            f"{packing.utilisation:.1%}",
            f"{packing.fragmentation:.2f}",
            f"{packing.balance:.2f}",
        )
        tokens = units.count(packing.tokens_per_second)
        yield (
            name,
            [*shares, tokens, when(packing.mean_hours), when(packing.last_hours)],
        )


def render(result: Result) -> RenderableType:
    """The whole report for a `rich` console."""
    jobs = report.table(
        "", "", "job", ">priority", ">devices", "nodes", ">starts", ">ends"
    )
    speeds = report.table("", "", "job", MESH, ">a step", ">tokens/s")
    for row in job_rows(result):
        of_job = Text(row.letter, _style(row.number))
        style = "" if row.devices else "yellow"
        jobs.add_row(
            of_job,
            row.name,
            row.priority,
            row.devices,
            row.nodes,
            row.starts,
            row.ends,
            style=style,
        )
        if row.step:
            speeds.add_row(of_job, row.name, row.mesh, row.step, row.tokens)
    nodes = report.table("", ">node", "devices now")
    for name, devices in node_rows(result.packing):
        text = Text()
        for number in devices:
            text.append(FREE if number is None else letter(number), _style(number))
        nodes.add_row(name, text)
    strategies = report.table("", "", *(f">{name}" for name in FIGURES))
    for name, values in figures(result):
        strategies.add_row(
            words(name), *values, style="bold" if name == result.jobs.strategy else ""
        )
    title = Text(headline(result), style="bold")
    timed = (Text(), speeds) if speeds.row_count else ()
    return Group(
        title,
        jobs,
        *timed,
        *map(Text, choices(result)),
        Text(),
        nodes,
        Text(),
        strategies,
    )


def _style(number: int | None) -> Style:
    if number is None:
        return Style(dim=True)
    # A terminal's 6 x 6 x 6 colours; without colours the letters say it.
    red, green, blue = (
        (number * step + start) % 4 for step, start in ((1, 1), (3, 2), (2, 0))
    )
    return Style(
        color="black",
        bgcolor=f"color({16 + 36 * (red + 2) + 6 * (green + 2) + blue + 2})",
    )


def as_json(result: Result) -> dict:
    """The object that `--jobs FILE --json` prints. Times in seconds; null: not known."""
    packing = result.packing
    cluster = result.packing.cluster
    return {
        "cluster": cluster.name,
        "accelerator": cluster.accelerator.name,
        "nodes": cluster.nodes,
        "devices_per_node": cluster.devices_per_node,
        "strategy": result.jobs.strategy,
        "goal": result.jobs.goal,
        "jobs": [_job_json(result, request) for request in packing.requests],
        **_figures_json(packing),
        "strategies": {
            name: _figures_json(other) for name, other in result.packings.items()
        },
    }


def _job_json(result: Result, request: JobRequest) -> dict:
    placed = result.placed.get(request.job.name)
    per_node = result.packing.cluster.devices_per_node
    plan, nodes = (
        (placed.plan, placed.group_by_node(per_node)) if placed else (None, {})
    )
    return {
        "name": request.job.name,
        "priority": request.job.priority,
        "runs_now": bool(placed and not placed.start),
        "reason": reason(result, request) or None,
        "choices": [
            _plan_json(plan) | {"devices": plan.devices} for plan in request.plans
        ],
        "devices": placed.shape.devices if placed else None,
        "nodes": [
            {"node": node, "devices": list(devices)} for node, devices in nodes.items()
        ],
        "starts_seconds": placed.start * 3600 if placed else None,
        "ends_seconds": _known(placed.end * 3600) if placed else None,
        **_plan_json(plan),
        "slowdown": result.slowdown(placed) if placed and plan else None,
    }


def _plan_json(plan: Plan | None) -> dict:
    if plan is None:
        return {"mesh": None, "step_seconds": None, "tokens_per_second": None}
    shape = plan.config.mesh
    axes = ("data", "tensor", "pipeline", *["islands"] * (shape.islands > 1))
    return {
        "mesh": {axis: getattr(shape, axis) for axis in axes},
        "step_seconds": plan.seconds,
        "tokens_per_second": plan.tokens_per_second,
    }


def _figures_json(packing: Packing) -> dict:
    return {
        "utilisation": packing.utilisation,
        "fragmentation": packing.fragmentation,
        "balance": packing.balance,
        "tokens_per_second": packing.tokens_per_second,
        "mean_seconds_until_done": _known(packing.mean_hours * 3600),
        "seconds_until_all_done": _known(packing.last_hours * 3600),
    }


def _known(seconds: float) -> float | None:
    """JSON has no infinity."""
    return None if math.isinf(seconds) else seconds
