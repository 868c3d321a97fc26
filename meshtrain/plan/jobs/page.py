"""A packing as one self-contained page: a row a node, a cell a device, a colour and a letter a job. No script, nothing fetched."""

import math
from collections.abc import Sequence
from html import escape
from itertools import groupby

from meshtrain.draw import page as pages
from meshtrain.draw.svg import EMPTY, WIDTH, chart
from meshtrain.plan import report as planned
from meshtrain.plan.jobs import report
from meshtrain.plan.jobs.report import Result
from meshtrain.plan.jobs.requests import JobRequest

ROW, LABEL = 26, 64  # units of the picture: a node's height, the width of its name


def page(result: Result, reasons: Sequence[str]) -> str:
    """The page of a result, with the sentences on jobs that do not run now."""
    title = report.headline(result)
    parts = [
        f"<h1>{escape(title)}</h1>",
        _tiles(result),
        *[f'<p class="note">{escape(reason)}</p>' for reason in reasons],
        "<h2>The devices of each node now</h2>",
        picture(result),
        "<h2>The jobs</h2>",
        _jobs(result),
        *[f"<p>{escape(line)}.</p>" for request in result.packing.requests if (line := report.choices(request))],
        "<h2>The strategies</h2>",
        _strategies(result),
    ]
    return pages.page(title, parts)


def picture(result: Result) -> str:
    """Nodes as rows, neighbours that are the same in one; the devices of one job that lie side by side as one box."""
    rows = list(report.node_rows(result.packing))
    width = (WIDTH - LABEL) / result.packing.cluster.devices_per_node
    body = []
    for place, (nodes, row) in enumerate(rows):
        y, x = place * ROW, float(LABEL)
        body.append(f'<text x="{LABEL - 8}" y="{y + 17}" text-anchor="end">{escape(nodes)}</text>')
        for number, group in groupby(row):
            count = len(list(group))
            body += _box(x, y, width, count, number, result)
            x += count * width
    return chart(len(rows) * ROW, body, "devices of each node by job", size=12)


def _box(x: float, y: float, width: float, count: int, number: int | None, result: Result) -> list[str]:
    """`count` devices side by side with the job's letter, and its name where there is room."""
    colour = EMPTY if number is None else _colour(number)
    cells = [
        f'<rect x="{x + i * width + 0.5:.1f}" y="{y + 2}" width="{width - 1:.1f}" height="{ROW - 4}" rx="2" fill="{colour}"/>'
        for i in range(count)
    ]
    if number is None:
        return cells
    name = result.packing.requests[number].job.name
    # A letter takes about 7 units.
    shown = f" {escape(name)}" if len(name) * 7 < count * width - 22 else ""
    text = f'<tspan font-weight="700">{report.letter(number)}</tspan>{shown}'
    return [*cells, f'<text x="{x + 6:.1f}" y="{y + 17}">{text}<title>{escape(name)}</title></text>']


def _colour(number: int) -> str:
    return f"hsl({report.hue(number)}, 60%, {78 if number % 2 else 70}%)"


def _tiles(result: Result) -> str:
    packing = result.packing
    tiles = [
        (f"{packing.utilisation:.1%}", "of the devices are busy now"),
        (f"{len(packing.now)} of {len(packing.requests)}", "jobs run now"),
        (f"{packing.fragmentation:.2f}", "fragmentation: 1 - largest free block / free"),
        (f"{packing.balance:.2f}", "balance: 1 - std / mean of the nodes' load"),
        (planned.count(packing.tokens_per_second), "tokens a second"),
        (report.when(packing.last_hours), "until all are done"),
    ]
    return pages.tiles(tiles)


def _jobs(result: Result) -> str:
    """Four columns, which a phone has room for."""
    rows = []
    for number, request in enumerate(result.packing.requests):
        badge = f'<b style="background:{_colour(number)};padding:0 5px;border-radius:3px">{report.letter(number)}</b>'
        rows.append((f"{badge} {escape(request.job.name)}", *_where(result, request)))
    return pages.table(("job", "where", "a step", "time"), rows)


def _where(result: Result, request: JobRequest) -> tuple[str, str, str]:
    """Where a job lies, what a step takes, and from when to when it runs."""
    placed = result.placed.get(request.job.name)
    if placed is None:
        return ("waits" if request.shapes else "nowhere"), "", ""
    place = report.place(placed, result.packing.cluster.devices_per_node)
    node = "node" if placed.shape.nodes == 1 else "nodes"
    where = f"{placed.shape.devices} × {result.packing.cluster.accelerator.name}, {node} {place}" + (
        f"<br>{report.MESH}: {report.mesh(placed.shape.config)}" if placed.plan else ""
    )
    time = (
        report.when(placed.start)
        if math.isinf(placed.end)
        else f"{report.when(placed.start)} to {report.when(placed.end)}"
    )
    return where, report.step(result, placed), time


def _strategies(result: Result) -> str:
    """A column a strategy, the chosen one bold."""
    columns = dict(report.figures(result))
    chosen = result.jobs.strategy
    heads = [f"{report.words(name)}{' ✓' if name == chosen else ''}" for name in columns]
    rows = [(name, *map(escape, values)) for name, *values in zip(report.FIGURES, *columns.values(), strict=True)]
    return pages.table(("", *heads), rows, numbers=range(1, len(heads) + 1))
