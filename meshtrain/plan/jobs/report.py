"""A packing for people and for programs: a row a job, the nodes with who lies on them, the strategies side by side."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from string import ascii_letters, digits

from rich.console import Group, RenderableType
from rich.style import Style
from rich.table import Table
from rich.text import Text

from meshtrain import units
from meshtrain.config import Config
from meshtrain.plan import report
from meshtrain.plan.estimate import Plan
from meshtrain.plan.jobs.listed import Jobs
from meshtrain.plan.jobs.packing import Packing, PlacedJob
from meshtrain.plan.jobs.requests import JobRequest, Speeds

LETTERS = ascii_letters[26:] + ascii_letters[:26] + digits
FREE = "·"
MESH = "data x tensor x pipeline"
FIGURES = ("utilisation", "fragmentation", "balance", "tokens/s", "mean until done", "all done")


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
        """By the name of the job."""
        return {placed.request.job.name: placed for placed in self.packing.placed}

    def slowdown(self, placed: PlacedJob) -> float:
        """Times the step that it would take in the same shape side by side; 1 where nothing is known."""
        alone = self.speeds.side_by_side(placed.shape)
        return placed.plan.seconds / alone.seconds if placed.plan and alone else 1.0


def letter(number: int) -> str:
    """The letter of a job in a picture; more than 62 jobs share them."""
    return LETTERS[number % len(LETTERS)]


def hue(number: int) -> int:
    """Degrees of a job's colour: neighbours are a golden angle apart, so that they differ."""
    return round(number * 137.508) % 360


def cells(packing: Packing) -> list[list[int | None]]:
    """Node by node, device by device: the number of the job that is there now."""
    grid: list[list[int | None]] = [[None] * packing.cluster.devices_per_node for _ in range(packing.cluster.nodes)]
    numbers = {request.job.name: number for number, request in enumerate(packing.requests)}
    for placed in packing.now:
        for node, devices in placed.by_node(packing.cluster.devices_per_node).items():
            for device in devices:
                grid[node][device] = numbers[placed.request.job.name]
    return grid


def node_rows(packing: Packing) -> Iterator[tuple[str, list[int | None]]]:
    """The cells of nodes, neighbours that are the same in one row: their numbers, and the cells of one."""
    for row, group in groupby(enumerate(cells(packing)), key=lambda pair: pair[1]):
        nodes = [node for node, _ in group]
        yield spans(nodes), row


def spans(numbers: Sequence[int]) -> str:
    """Numbers in words: 0-3, 7."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)


def headline(result: Result) -> str:
    cluster = result.packing.cluster
    return (
        f"{len(result.packing.requests)} jobs on {cluster.name}, {cluster.nodes} x {cluster.devices_per_node} "
        f"{cluster.accelerator.name}: {words(result.jobs.strategy)} for {result.jobs.goal}"
    )


def words(strategy: str) -> str:
    return strategy.replace("_", " ")


def mesh(config: Config | None) -> str:
    """Data x tensor x pipeline, and in how many islands."""
    if config is None:
        return ""
    shape = config.mesh
    islands = f", {shape.islands} islands" if shape.islands > 1 else ""
    return f"{shape.data} x {shape.tensor} x {shape.pipeline}{islands}"


def place(placed: PlacedJob, per_node: int) -> str:
    """Nodes, and the devices there where they are not all: 0-3; 5: devices 0-3."""
    by_node = placed.by_node(per_node)
    parts = []
    for devices, group in groupby(by_node.items(), key=lambda pair: pair[1]):
        where = "" if len(devices) == per_node else f": device{'s' * (len(devices) > 1)} {spans(devices)}"
        parts.append(spans([node for node, _ in group]) + where)
    return "; ".join(parts)


def when(hours: float) -> str:
    return "not known" if math.isinf(hours) else units.duration(hours * 3600) if hours else "now"


def step(result: Result, placed: PlacedJob) -> str:
    if placed.plan is None:
        return ""
    slower = result.slowdown(placed) - 1
    return units.duration(placed.plan.seconds) + (f" (+{slower:.1%})" if slower > 0.0005 else "")


def reason(result: Result, request: JobRequest) -> str:
    """Why a job does not run now, in one sentence; empty where it does."""
    packing, name = result.packing, request.job.name
    placed = result.placed.get(name)
    if not request.shapes:
        return f"{name} does not fit: {request.reason}."
    if placed and not placed.start:
        return ""
    least = min(request.shapes, key=lambda shape: (shape.devices, shape.nodes))
    devices = "1 device" if least.each == 1 else f"{least.each} devices"
    needs = devices if least.nodes == 1 else f"{least.nodes} nodes with {devices} each"
    free, all_of = packing.free, packing.cluster.devices
    together = ", all in one block of links" if request.job.together and least.nodes > 1 else ""
    waits = f"waits {when(placed.start)}" if placed else "waits for others to end, and nobody knows when"
    there = (
        f"{sum(free)} of {all_of} devices are free, at most {max(free)} on one node"
        if any(free)
        else f"all {all_of} devices are taken"
    )
    return f"{name} {waits}: it needs {needs}{together}; {there}."


def choices(request: JobRequest) -> str:
    """The speeds on each number of devices, of a job that any of several will do for."""
    if len(request.plans) < 2:
        return ""
    plans = [f"{plan.devices} devices {units.count(plan.tokens_per_second)} tokens/s" for plan in request.plans]
    return f"{request.job.name}: {', '.join(plans)}"


def render(result: Result) -> RenderableType:
    """The whole report for a `rich` console."""
    title = Text(headline(result), style="bold")
    lines = [Text(line) for request in result.packing.requests if (line := choices(request))]
    return Group(title, _jobs(result), *lines, Text(), _picture(result), Text(), _strategies(result))


def _jobs(result: Result) -> Table:
    table = report.table(
        "", "", "job", ">priority", ">devices", "nodes", MESH, ">a step", ">tokens/s", ">starts", ">ends"
    )
    per_node = result.packing.cluster.devices_per_node
    for number, request in enumerate(result.packing.requests):
        job, placed = request.job, result.placed.get(request.job.name)
        named = (Text(letter(number), style=_style(number)), job.name, str(job.priority))
        if placed is None:
            table.add_row(*named, "", "nowhere" if not request.shapes else "waits", style="yellow")
            continue
        tokens = units.count(placed.plan.tokens_per_second) if placed.plan else ""
        table.add_row(
            *named, str(placed.shape.devices), place(placed, per_node), mesh(placed.shape.config), step(result, placed), tokens, when(placed.start), when(placed.end),
        )  # fmt: skip
    return table


def _style(number: int | None) -> Style:
    if number is None:
        return Style(dim=True)
    # A terminal's 6 x 6 x 6 colours; without colours the letters say it.
    red, green, blue = ((number * step + start) % 4 for step, start in ((1, 1), (3, 2), (2, 0)))
    return Style(color="black", bgcolor=f"color({16 + 36 * (red + 2) + 6 * (green + 2) + blue + 2})")


def _picture(result: Result) -> Table:
    table = report.table("", ">node", "devices now")
    for nodes, row in node_rows(result.packing):
        text = Text()
        for number in row:
            text.append(FREE if number is None else letter(number), _style(number))
        table.add_row(nodes, text)
    return table


def _strategies(result: Result) -> Table:
    table = report.table("", "", *(f">{name}" for name in FIGURES))
    for name, values in figures(result):
        table.add_row(words(name), *values, style="bold" if name == result.jobs.strategy else "")
    return table


def figures(result: Result) -> Iterator[tuple[str, list[str]]]:
    """A row of `strategies` for people."""
    for name, packing in result.packings.items():
        yield (
            name,
            [
                f"{packing.utilisation:.1%}",
                f"{packing.fragmentation:.2f}",
                f"{packing.balance:.2f}",
                units.count(packing.tokens_per_second),
                when(packing.mean_hours),
                when(packing.last_hours),
            ],
        )


def as_json(result: Result) -> dict:
    """The object that `--jobs FILE --json` prints. Times in seconds; null: not known."""
    packing, cluster = result.packing, result.packing.cluster
    return {
        "cluster": cluster.name,
        "accelerator": cluster.accelerator.name,
        "nodes": cluster.nodes,
        "devices_per_node": cluster.devices_per_node,
        "strategy": result.jobs.strategy,
        "goal": result.jobs.goal,
        "jobs": [_job_json(result, request) for request in packing.requests],
        **_figures_json(packing),
        "strategies": {name: _figures_json(other) for name, other in result.packings.items()},
    }


def _job_json(result: Result, request: JobRequest) -> dict:
    placed, per_node = result.placed.get(request.job.name), result.packing.cluster.devices_per_node
    plan, nodes = (placed.plan, placed.by_node(per_node)) if placed else (None, {})
    return {
        "name": request.job.name,
        "priority": request.job.priority,
        "runs_now": bool(placed and not placed.start),
        "reason": reason(result, request) or None,
        "choices": [_plan_json(plan) | {"devices": plan.devices} for plan in request.plans],
        "devices": placed.shape.devices if placed else None,
        "nodes": [{"node": node, "devices": list(devices)} for node, devices in nodes.items()],
        "starts_seconds": placed.start * 3600 if placed else None,
        "ends_seconds": _known(placed.end * 3600) if placed else None,
        **_plan_json(plan),
        "slowdown": result.slowdown(placed) if placed and plan else None,
    }


def _plan_json(plan: Plan | None) -> dict:
    if plan is None:
        return {"mesh": None, "step_seconds": None, "tokens_per_second": None}
    shape = plan.config.mesh
    return {
        "mesh": {"data": shape.data, "tensor": shape.tensor, "pipeline": shape.pipeline}
        | ({"islands": shape.islands} if shape.islands > 1 else {}),
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
