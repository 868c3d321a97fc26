"""A plan as one self-contained page: memory bars, the waterfall of a step, the pipeline's Gantt chart, scaling curves.

No script and nothing fetched. Charts are as wide as there is room for; the Gantt chart, which would be unreadable so,
scrolls sideways.
"""

import math
from collections.abc import Sequence
from html import escape

from meshtrain import units
from meshtrain.draw import page as pages
from meshtrain.draw.page import figure, figures
from meshtrain.draw.picture import Picture, block, title
from meshtrain.draw.svg import (
    BAD,
    BLUE,
    EMPTY,
    FIRST,
    GREEN,
    GREY,
    GRID,
    GROUND,
    ORANGE,
    PURPLE,
    SECOND,
    WIDTH,
    bar_row,
    chart,
    image,
    keys,
    scale,
    small,
    widths,
)
from meshtrain.plan import report
from meshtrain.plan.estimate import PART_NAMES, Plan
from meshtrain.plan.scaling import Point
from meshtrain.schedule import draw

# of the curves
LEFT = 46
TOP = 24
HEIGHT = 190
KIND_COLOURS = {
    "parameters": BLUE,
    "gradients": GREEN,
    "optimizer_state": ORANGE,
    "activations": PURPLE,
}
KINDS_OF_TIME = {
    "compute": (BLUE, ("matmul", "attention", "memory", "head", "reference", "draw")),
    "recomputation": (PURPLE, ("recompute",)),
    "communication": (
        ORANGE,
        ("tensor", "context", "expert", "pipeline", "data", "host", "synchronise"),
    ),
    "idle": (GREY, ("bubble", "stragglers")),
    "state": (GREEN, ("optimizer", "checkpoint", "evaluation")),
}
PART_COLOURS = {
    part: colour for colour, parts in KINDS_OF_TIME.values() for part in parts
}
ROW = 34
# Pixels of its width, at most: its letters are as large as those of the chart
LEGEND = 520
MOST_CELLS = 4000  # of a Gantt chart: beyond that it is neither readable nor small


def page(
    plan: Plan,
    strong: Sequence[Point],
    weak: Sequence[Point],
    notes: Sequence[str] = (),
) -> str:
    """The page of a plan with its strong and weak scaling."""
    heading = f"{units.count(plan.parameters)} parameters on {plan.devices:,} × {plan.cluster.accelerator.name}"
    usable = plan.cluster.accelerator.usable_bytes
    verdict = f'<span class="bad">does not fit</span>: {units.size(plan.bytes - usable)} too much'
    if plan.fits:
        verdict = f'<span class="good">fits</span>, {units.size(usable - plan.bytes)} to spare'
    first = strong[0].devices if strong else plan.devices
    parts = [
        f"<h1>{escape(heading)}</h1>",
        f"<p>{str(plan.config.mesh).replace(' x ', ' × ')} on {escape(plan.cluster.name)}; {verdict}</p>",
        _tiles(plan),
        *[f'<p class="note">{escape(note)}</p>' for note in notes],
        "<h2>What a device holds, and where a step's time goes</h2>",
        f"<p>{escape(report.layers(plan).capitalize())}.</p>",
        figures(
            [
                figure(
                    "Memory",
                    f"of a device, {units.size(usable)}, by item",
                    memory_bars(plan),
                ),
                figure(
                    "A step",
                    f"of {units.duration(plan.seconds)}, each part where the one before ends",
                    waterfall(plan),
                ),
            ]
        ),
        _pipeline(plan),
        "<h2>What each device sends in a step</h2>",
        _traffic(plan),
        "<h2>More devices, and failures</h2>",
        figures(
            [
                figure(
                    "Throughput a device",
                    f"over that on {first:,}; the data axis grows, tensor and pipeline stay",
                    curves({"strong: same batch": strong, "weak: batch grows": weak}),
                ),
                figure(
                    "Failures",
                    "",
                    f"<p>{pages.sentence(report.faults_text(report.faults(plan)))}.</p>",
                ),
            ]
        ),
    ]
    return pages.page(heading, parts)


def picture(plan: Plan) -> Picture:
    """The headline of a plan, and the pictures of its page."""
    first, *rest = report.headline(plan).splitlines()
    style = f"width:{WIDTH}px;padding:8px;display:inline-block"
    cells = [
        f'<td style="vertical-align:top;text-align:left">{title(name)}<br/>{image(drawing, name, style)}</td>'
        for name, drawing in (
            ("each device holds", memory_bars(plan)),
            ("a step takes", waterfall(plan)),
        )
    ]
    lines = "".join(f"<div>{escape(line)}</div>" for line in rest)
    return Picture(
        block(title(first), lines, f"<table><tr>{''.join(cells)}</tr></table>"),
        report.headline(plan),
    )


def _tiles(plan: Plan) -> str:
    tiles = [
        (
            units.size(plan.bytes),
            f"of {units.size(plan.cluster.accelerator.usable_bytes)} a device",
        ),
        (units.duration(plan.seconds), f"a step, bound by {plan.time.bound}"),
        (
            f"{plan.mfu:.1%}",
            f"MFU, {plan.flops_per_device / 1e12:.3g} TFLOP/s a device",
        ),
        (units.count(plan.tokens_per_second), "tokens a second"),
        (f"{plan.bubble_fraction:.1%}", "pipeline idle"),
    ]
    if plan.cost:
        tiles.append((f"{plan.cost:,.0f}", f"for {plan.config.train.steps:,} steps"))
    return pages.tiles(tiles)


def memory_bars(plan: Plan) -> str:
    """A bar an item, largest first, with the device's memory as the full width."""
    usable = max(plan.cluster.accelerator.usable_bytes, plan.bytes)
    items = report.sort_items(plan)
    body = [f'<rect x="0" y="4" width="{WIDTH}" height="22" rx="4" fill="{EMPTY}"/>']
    start = 0.0
    for item in items:
        width = item.nbytes / usable * WIDTH
        body.append(
            f'<rect x="{start:.2f}" y="4" width="{width:.2f}" height="22" fill="{KIND_COLOURS[item.kind]}" '
            f'stroke="{GROUND}" stroke-width="0.7"/>'
        )
        start += width
    limit = plan.cluster.accelerator.usable_bytes / usable * WIDTH - 1
    body.append(
        f'<line x1="{limit:.1f}" x2="{limit:.1f}" y1="0" y2="30" stroke="{BAD}" stroke-width="2"/>'
    )
    body.append(scale(42, "memory of a device", units.size(usable)))
    y = 52
    columns = widths([units.size(item.nbytes)] for item in items)
    for item in items:
        share = item.nbytes / items[0].nbytes
        body += bar_row(
            y,
            item.name,
            [units.size(item.nbytes)],
            columns,
            0.0,
            share,
            KIND_COLOURS[item.kind],
        )
        y += ROW
    body.append(scale(y + 8, "bytes of an item", units.size(items[0].nbytes)))
    y += 12
    held = [(colour, kind.replace("_", " ")) for kind, colour in KIND_COLOURS.items()]
    legend, end = keys([*held, (BAD, "limit")], y=y + 8)
    return chart(end, [*body, *legend], "memory of one device by item")


def waterfall(plan: Plan) -> str:
    """Each part of a step begins where the one before ends."""
    rows = [row for row in report.waterfall(plan) if row[-1] >= 0.0005]
    values = [
        (units.duration(seconds), f"{share:.1%}") for _, seconds, _, share in rows
    ]
    columns = widths(values)
    body = list[str]()
    for i, ((name, _, start, share), value) in enumerate(
        zip(rows, values, strict=True)
    ):
        body += bar_row(
            i * ROW, PART_NAMES[name], value, columns, start, share, PART_COLOURS[name]
        )
    y = len(rows) * ROW + 8
    body.append(scale(y, "time in the step", units.duration(plan.seconds)))
    drawn = {PART_COLOURS[row[0]] for row in rows}
    legend, end = keys(
        [(c, kind) for kind, (c, _) in KINDS_OF_TIME.items() if c in drawn], y=y + 12
    )
    return chart(end, [*body, *legend], "time of a step by part")


def _pipeline(plan: Plan) -> str:
    line = plan.timeline
    if line is None:
        return ""
    drawing = f'<figure style="max-width:{LEGEND}px">{draw.legend_svg(line)}</figure>'
    drawing += pages.wide(draw.gantt_svg(line, units.duration, headed=False))
    if len(line.kind) > MOST_CELLS:
        drawing = f"<p>{len(line.kind):,} cells are too many to draw here; --gantt FILE draws them.</p>"
    head, *rest = draw.figures(line, units.duration)
    words = f"<p>{pages.sentence(head)}; {escape('; '.join(rest))}.</p>"
    return f"<h2>The pipeline: {escape(plan.config.parallel.schedule)}</h2>{words}{drawing}"


def _traffic(plan: Plan) -> str:
    if not plan.transfers:
        return "<p>Nothing: there is one device.</p>"
    rows = []
    for t in plan.transfers:
        about = f"{t.axis}: {t.kind}, {report.algorithm(plan, t)}"
        what = f'{escape(t.what)}<br><span class="about">{escape(about)}</span>'
        rows.append((what, f"{t.times}", units.size(t.nbytes), units.size(t.sent)))
    return pages.table(("what, over which axis", "times", "size", "sent"), rows)


def curves(lines: dict[str, Sequence[Point]]) -> str:
    """Efficiency over the number of devices, on a logarithmic axis."""
    drawn = {name: points for name, points in lines.items() if points}
    counts = sorted({point.devices for points in drawn.values() for point in points})
    if not counts:
        return ""
    width = WIDTH - 72
    low, high = (
        math.log2(counts[0]),
        max(math.log2(counts[-1]), math.log2(counts[0]) + 1),
    )
    most = max(
        1.0, *(point.efficiency for points in drawn.values() for point in points)
    )

    def x(devices: int) -> float:
        return LEFT + (math.log2(devices) - low) / (high - low) * width

    def y(efficiency: float) -> float:
        return TOP + HEIGHT * (1 - efficiency / most)

    body = []
    for mark in (0.0, 0.25, 0.5, 0.75, 1.0):
        body.append(
            f'<line x1="{LEFT}" x2="{LEFT + width}" y1="{y(mark):.1f}" y2="{y(mark):.1f}" stroke="{GRID}"/>'
            f'<text x="{LEFT - 8}" y="{y(mark) + 5:.1f}" text-anchor="end">{mark:.0%}</text>'
        )
    for devices in counts[:: math.ceil(len(counts) / 5)]:
        body.append(
            f'<text x="{x(devices):.1f}" y="{TOP + HEIGHT + 20}" text-anchor="middle">{devices:,}</text>'
        )
    body.append(small(0, 11, "throughput a device, % of the first"))
    body.append(small(WIDTH, TOP + HEIGHT + 38, "devices", "end"))
    for points, colour, dash in zip(
        drawn.values(), (FIRST, SECOND), ("", "6 4"), strict=False
    ):
        places = [(x(point.devices), y(point.efficiency)) for point in points]
        path = " ".join(f"{left:.1f},{top:.1f}" for left, top in places)
        body.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2.5" stroke-dasharray="{dash}"/>'
        )
        body += [
            f'<circle cx="{left:.1f}" cy="{top:.1f}" r="3.5" fill="{colour}"><title>{_title(point)}</title></circle>'
            for point, (left, top) in zip(points, places, strict=True)
        ]
    legend, end = keys(zip((FIRST, SECOND), drawn, strict=False), y=TOP + HEIGHT + 50)
    return chart(end, [*body, *legend], "efficiency by number of devices")


def _title(point: Point) -> str:
    """Returns the words that a point of a curve shows."""
    step = units.duration(point.plan.seconds)
    return f"{point.devices:,} devices: {point.efficiency:.1%}, step {step}"
