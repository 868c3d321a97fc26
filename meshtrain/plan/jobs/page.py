"""A packing as one self-contained page: a row a node, a cell a device, a colour and a letter a job.

No script, nothing fetched.
"""

from collections.abc import Sequence
from html import escape
from itertools import groupby

from meshtrain.draw import page as pages
from meshtrain.draw.svg import EMPTY, INK, WIDTH, chart, small
from meshtrain.plan.jobs import report
from meshtrain.plan.jobs.report import JobRow, Result
from meshtrain.units import count

# units of the picture: a node's height, the width of its name
ROW = 26
LABEL = 64


def page(result: Result, reasons: Sequence[str]) -> str:
    """The page of a result, with the sentences on jobs that do not run now."""
    title = report.headline(result)
    packing = result.packing
    device = packing.cluster.accelerator.name
    strategies = dict(report.figures(result))
    heads = [
        f"{report.words(name)}{' ✓' if name == result.jobs.strategy else ''}"
        for name in strategies
    ]
    figures = [
        (name, *map(escape, values))
        for name, *values in zip(report.FIGURES, *strategies.values(), strict=True)
    ]
    tiles = [
        (f"{packing.utilisation:.1%}", "of the devices are busy now"),
        (f"{len(packing.now)} of {len(packing.requests)}", "jobs run now"),
        (
            f"{packing.fragmentation:.2f}",
            "fragmentation: 1 - largest free block / free",
        ),
        (f"{packing.balance:.2f}", "balance: 1 - std / mean of the nodes' load"),
        (count(packing.tokens_per_second), "tokens a second"),
        (report.when(packing.last_hours), "until all are done"),
    ]
    waits = (
        "".join(f'<p class="note">{escape(reason)}</p>' for reason in reasons)
        or "<p>None.</p>"
    )
    # Four columns, which a phone has room for.
    jobs = pages.table(
        ("job", "where", "a step", "time"),
        [_job(row, device) for row in report.job_rows(result)],
    )
    parts = [
        f"<h1>{escape(title)}</h1>",
        pages.tiles(tiles),
        pages.figures([
            pages.figure("The devices now", "of each node", picture(result)),
            pages.figure("Jobs that wait", "and for what", waits),
        ]),
        "<h2>The jobs</h2>",
        jobs,
        *[f"<p>{escape(line)}.</p>" for line in report.choices(result)],
        "<h2>The strategies</h2>",
        pages.table(("", *heads), figures),
    ]  # fmt: skip
    return pages.page(title, parts)


def picture(result: Result) -> str:
    """Nodes as rows, neighbours that are the same in one; the devices of one job that lie side by side as one box."""
    rows = list(report.node_rows(result.packing))
    width = (WIDTH - LABEL) / result.packing.cluster.devices_per_node
    body = [small(LABEL - 8, 12, "node", "end"), small(LABEL, 12, "devices")]
    for place, (nodes, devices) in enumerate(rows):
        y = place * ROW + 18
        x = float(LABEL)
        body.append(
            f'<text x="{LABEL - 8}" y="{y + 17}" text-anchor="end">{escape(nodes)}</text>'
        )
        for number, group in groupby(devices):
            cells = len(list(group))
            name = "" if number is None else result.packing.requests[number].job.name
            body += _box(x, y, width, cells, number, name)
            x += cells * width
    return chart(len(rows) * ROW + 18, body, "devices of each node by job", size=12)


def _box(
    x: float, y: float, width: float, count: int, number: int | None, name: str
) -> list[str]:
    """`count` devices side by side with the job's letter, and its name where there is room."""
    colour = EMPTY if number is None else _colour(number)
    cells = [
        f'<rect x="{x + i * width + 0.5:.1f}" y="{y + 2}" width="{width - 1:.1f}" height="{ROW - 4}" rx="2" '
        f'fill="{colour}"/>'
        for i in range(count)
    ]
    if number is None:
        return cells
    # A letter takes about 7 units.
    shown = f" {escape(name)}" if len(name) * 7 < count * width - 22 else ""
    text = f'<tspan font-weight="700">{report.letter(number)}</tspan>{shown}'
    return [
        *cells,
        f'<text x="{x + 6:.1f}" y="{y + 17}" fill="{INK}">{text}<title>{escape(name)}</title></text>',
    ]


def _colour(number: int) -> str:
    """Neighbours are a golden angle apart, so that they differ."""
    return f"hsl({round(number * 137.508) % 360}, 60%, {78 if number % 2 else 70}%)"


def _job(row: JobRow, device: str) -> tuple[str, str, str, str]:
    badge = f'<b class="chip" style="background:{_colour(row.number)}">{row.letter}</b>'
    name = f"{badge} {escape(row.name)}"
    if not row.devices:
        return name, row.nodes, "", ""
    node = (
        "node"
        if row.nodes.partition(":")[0].isdigit() and ";" not in row.nodes
        else "nodes"
    )
    where = f"{row.devices} × {device}, {node} {row.nodes}" + (
        f"<br>{report.MESH}: {row.mesh}" if row.mesh else ""
    )
    return (
        name,
        where,
        row.step,
        row.starts if row.ends == "not known" else f"{row.starts} to {row.ends}",
    )
