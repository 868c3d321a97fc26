"""A packing as one self-contained page: a row a node, a cell a device, a colour and a letter a job. No script, nothing fetched."""

from collections.abc import Sequence
from html import escape
from itertools import groupby

from meshtrain.plan import report as planned
from meshtrain.plan.jobs import report
from meshtrain.plan.jobs.report import Result
from meshtrain.plan.page import STYLE, WIDTH

ROW, LABEL = 26, 64  # units of the picture: a node's height, the width of its name


def page(result: Result, reasons: Sequence[str]) -> str:
    """The page of a result, with the sentences on jobs that do not run now."""
    title = report.headline(result)
    parts = [
        f"<h1>{escape(title)}</h1>",
        _tiles(result),
        *[f'<p class="note">{escape(reason)}</p>' for reason in reasons],
        "<h2>Where each job lies now</h2>",
        picture(result),
        "<h2>The jobs</h2>",
        f'<div class="wide">{_jobs(result)}</div>',
        *[f"<p>{escape(line)}.</p>" for request in result.packing.requests if (line := report.choices(request))],
        "<h2>The strategies</h2>",
        f'<div class="wide">{_strategies(result)}</div>',
    ]
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    return f'<!doctype html><html lang="en"><head>{head}<title>{escape(title)}</title><style>{STYLE}</style></head><body>\n{"".join(parts)}\n</body></html>\n'


def picture(result: Result) -> str:
    """Nodes as rows, neighbours that are the same in one; the devices of one job that lie side by side as one box."""
    rows = list(report.rows(result.packing))
    width = (WIDTH - LABEL) / result.packing.cluster.devices_per_node
    body = []
    for place, (nodes, row) in enumerate(rows):
        y, x = place * ROW, float(LABEL)
        body.append(f'<text x="{LABEL - 8}" y="{y + 17}" text-anchor="end" font-size="12">{escape(nodes)}</text>')
        for number, group in groupby(row):
            size = len(list(group)) * width
            body += _box(x, y, size, number, result)
            x += size
    label = "devices of each node by job"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {len(rows) * ROW}" role="img" aria-label="{label}" '
        f'font-family="system-ui, sans-serif" fill="#1d2430">{"".join(body)}</svg>'
    )


def _box(x: float, y: float, size: float, number: int | None, result: Result) -> list[str]:
    if number is None:
        return [f'<rect x="{x + 1:.1f}" y="{y + 2}" width="{size - 2:.1f}" height="{ROW - 4}" rx="3" fill="#f3f5f8"/>']
    name = result.packing.requests[number].job.name
    # A letter takes about 7 units.
    shown = name if len(name) * 7 < size - 22 else ""
    return [
        f'<rect x="{x + 1:.1f}" y="{y + 2}" width="{size - 2:.1f}" height="{ROW - 4}" rx="3" fill="{_colour(number)}"><title>{escape(name)}</title></rect>',
        f'<text x="{x + 7:.1f}" y="{y + 17}" font-size="12"><tspan font-weight="700">{report.letter(number)}</tspan> {escape(shown)}</text>',
    ]


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
    boxes = [f'<div class="tile"><b>{escape(value)}</b><span>{escape(what)}</span></div>' for value, what in tiles]
    return f'<div class="tiles">{"".join(boxes)}</div>'


def _jobs(result: Result) -> str:
    head = "<tr><th></th><th>job</th><th>devices</th><th>nodes</th><th>mesh</th><th>a step</th><th>starts</th><th>ends</th></tr>"
    rows, per_node = [], result.packing.cluster.devices_per_node
    for number, request in enumerate(result.packing.requests):
        placed = result.placed.get(request.job.name)
        key = f'<td><span style="background:{_colour(number)};padding:0 5px;border-radius:3px"><b>{report.letter(number)}</b></span></td>'
        values = [request.job.name]
        if placed is None:
            values += ["", "waits" if request.ways else "nowhere", "", "", "", ""]
        else:
            values += [
                str(placed.way.devices), report.place(placed, per_node), report.mesh(placed.way.config), report.step(result, placed),
                report.when(placed.start), report.when(placed.end),
            ]  # fmt: skip
        rows.append(f"<tr>{key}{''.join(f'<td>{escape(value)}</td>' for value in values)}</tr>")
    return f"<table>{head}{''.join(rows)}</table>"


def _strategies(result: Result) -> str:
    names = ("", "utilisation", "fragmentation", "balance", "tokens/s", "mean until done", "all done")
    rows = []
    for name, values in report.figures(result):
        shown = f"<b>{escape(report.words(name))}</b>" if name == result.jobs.strategy else escape(report.words(name))
        cells = "".join(f'<td class="n">{escape(value)}</td>' for value in values)
        rows.append(f"<tr><td>{shown}</td>{cells}</tr>")
    head = "".join(f'<th class="n">{name}</th>' if name else "<th></th>" for name in names)
    return f"<table><tr>{head}</tr>{''.join(rows)}</table>"
