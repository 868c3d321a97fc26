"""A plan as one self-contained page: memory bars, the waterfall of a step, the pipeline's Gantt chart, scaling curves.

No script and nothing fetched. Pictures are SVG with a view box, so they shrink to the width of a phone; the Gantt chart, which
would be unreadable there, scrolls sideways.
"""

import math
from collections.abc import Sequence
from html import escape

from meshtrain import units
from meshtrain.draw import page as pages
from meshtrain.draw.picture import Picture, block, title
from meshtrain.draw.svg import EMPTY, FIRST, GRID, SECOND, THIRD, WIDTH, bar_row, chart, image, key
from meshtrain.plan import report
from meshtrain.plan.estimate import PART_NAMES, Plan
from meshtrain.plan.scaling import Point
from meshtrain.schedule.draw import gantt_svg

KIND_COLOURS = {"parameters": FIRST, "gradients": THIRD, "optimizer_state": SECOND, "activations": "#a2559c"}
PART_COLOURS = {
    "matmul": "#3b6fb6", "attention": "#5b8fd0", "memory": "#8fb3de", "head": "#2f5590", "recompute": "#a2559c",
    "tensor": "#c2843a", "context": "#d9b382", "pipeline": "#d6a05c", "data": "#a86a22", "host": "#e6c79a", "bubble": "#b9b9b9", "optimizer": "#4f9d69", "checkpoint": "#86bd98", "reference": "#7d6bb0", "stragglers": "#999081",
}  # fmt: skip
ROW = 34
MOST_CELLS = 4000  # of a Gantt chart: beyond that it is neither readable nor small


def page(plan: Plan, strong: Sequence[Point], weak: Sequence[Point], notes: Sequence[str] = ()) -> str:
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
        "<h2>What each device holds</h2>",
        f"<p>{escape(report.layers(plan).capitalize())}.</p>",
        memory_bars(plan),
        "<h2>Where a step's time goes</h2>",
        waterfall(plan),
        _pipeline(plan),
        "<h2>What each device sends in a step</h2>",
        _traffic(plan),
        "<h2>More devices</h2>",
        curves({"strong: same batch": strong, "weak: batch grows": weak}),
        f"<p>Throughput a device, over that on {first:,} devices. The data axis grows; tensor and pipeline stay.</p>",
        "<h2>Failures</h2>",
        f"<p>{escape(report.faults_text(report.faults(plan)))}.</p>",
    ]
    return pages.page(heading, parts)


def picture(plan: Plan) -> Picture:
    """The headline of a plan, and the pictures of its page: ink on white, whatever the notebook's theme."""
    first, *rest = report.headline(plan).splitlines()
    style = f"width:{WIDTH}px;background:#fff;padding:8px;display:inline-block"
    cells = [
        f'<td style="vertical-align:top;text-align:left">{title(name)}<br/>{image(drawing, name, style)}</td>'
        for name, drawing in (("each device holds", memory_bars(plan)), ("a step takes", waterfall(plan)))
    ]
    lines = "".join(f"<div>{escape(line)}</div>" for line in rest)
    return Picture(block(title(first), lines, f"<table><tr>{''.join(cells)}</tr></table>"), report.headline(plan))


def _tiles(plan: Plan) -> str:
    tiles = [
        (units.size(plan.bytes), f"of {units.size(plan.cluster.accelerator.usable_bytes)} a device"),
        (units.duration(plan.seconds), f"a step, bound by {plan.time.bound}"),
        (f"{plan.mfu:.1%}", f"MFU, {plan.flops_per_device / 1e12:.3g} TFLOP/s a device"),
        (units.count(plan.tokens_per_second), "tokens a second"),
        (f"{plan.bubble_fraction:.1%}", "pipeline idle"),
    ]
    if plan.cost:
        tiles.append((f"{plan.cost:,.0f}", f"for {plan.config.train.steps:,} steps"))
    return pages.tiles(tiles)


def memory_bars(plan: Plan) -> str:
    """A bar an item, largest first, with the device's memory as the full width."""
    usable = max(plan.cluster.accelerator.usable_bytes, plan.bytes)
    items = report.by_size(plan)
    body, start = [f'<rect x="0" y="4" width="{WIDTH}" height="22" rx="4" fill="{EMPTY}"/>'], 0.0
    for item in items:
        width = item.nbytes / usable * WIDTH
        body.append(
            f'<rect x="{start:.2f}" y="4" width="{width:.2f}" height="22" fill="{KIND_COLOURS[item.kind]}" stroke="#fff" stroke-width="0.7"/>'
        )
        start += width
    limit = plan.cluster.accelerator.usable_bytes / usable * WIDTH - 1
    body.append(f'<line x1="{limit:.1f}" x2="{limit:.1f}" y1="0" y2="30" stroke="#b3261e" stroke-width="2"/>')
    y = 40
    for item in items:
        share = item.nbytes / items[0].nbytes
        body += bar_row(y, item.name, units.size(item.nbytes), 0.0, share, KIND_COLOURS[item.kind])
        y += ROW
    x = 0.0
    for kind, colour in KIND_COLOURS.items():
        body.append(key(x, y + 8, colour, kind.replace("_", " ")))
        x += 28 + 6.6 * len(kind)
    return chart(y + 30, body, "memory of one device by item")


def waterfall(plan: Plan) -> str:
    """Each part of a step begins where the one before ends."""
    rows = [row for row in report.waterfall(plan) if row[-1] >= 0.0005]
    body: list[str] = []
    for i, (name, seconds, start, share) in enumerate(rows):
        value = f"{units.duration(seconds)}  {share:.1%}"
        body += bar_row(i * ROW, PART_NAMES[name], value, start, share, PART_COLOURS[name])
    return chart(len(rows) * ROW + 4, body, "time of a step by part")


def _pipeline(plan: Plan) -> str:
    line = plan.timeline
    if line is None:
        return ""
    drawing = f'<div class="wide">{gantt_svg(line)}</div>'
    if len(line.kind) > MOST_CELLS:
        drawing = f"<p>{len(line.kind):,} cells are too many to draw here; --gantt FILE draws them.</p>"
    return f"<h2>The pipeline: {escape(plan.config.parallel.schedule)}</h2>{drawing}"


def _traffic(plan: Plan) -> str:
    if not plan.transfers:
        return "<p>Nothing: there is one device.</p>"
    rows = []
    for t in plan.transfers:
        what = f"{escape(t.what)}<br>{t.kind}, {report.algorithm(plan, t)}"
        rows.append((t.axis, what, f"{t.times} × {units.size(t.nbytes)}", units.size(t.sent)))
    return pages.table(("axis", "what", "arrays", "sent"), rows, numbers=(2, 3))


def curves(lines: dict[str, Sequence[Point]]) -> str:
    """Efficiency over the number of devices, on a logarithmic axis."""
    drawn = {name: points for name, points in lines.items() if points}
    counts = sorted({point.devices for points in drawn.values() for point in points})
    if not counts:
        return ""
    left, top, width, height = 46, 14, WIDTH - 72, 190
    low, high = math.log2(counts[0]), max(math.log2(counts[-1]), math.log2(counts[0]) + 1)
    most = max(1.0, *(point.efficiency for points in drawn.values() for point in points))

    def x(devices: int) -> float:
        return left + (math.log2(devices) - low) / (high - low) * width

    def y(efficiency: float) -> float:
        return top + height * (1 - efficiency / most)

    body = []
    for mark in (0.0, 0.25, 0.5, 0.75, 1.0):
        body.append(
            f'<line x1="{left}" x2="{left + width}" y1="{y(mark):.1f}" y2="{y(mark):.1f}" stroke="{GRID}"/>'
            f'<text x="{left - 8}" y="{y(mark) + 5:.1f}" text-anchor="end">{mark:.0%}</text>'
        )
    for devices in counts[:: math.ceil(len(counts) / 5)]:
        body.append(f'<text x="{x(devices):.1f}" y="{top + height + 20}" text-anchor="middle">{devices:,}</text>')
    for points, colour, dash in zip(drawn.values(), (FIRST, SECOND), ("", "6 4"), strict=False):
        path = " ".join(f"{x(p.devices):.1f},{y(p.efficiency):.1f}" for p in points)
        body.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2.5" stroke-dasharray="{dash}"/>'
        )
        body += [f'<circle cx="{x(p.devices):.1f}" cy="{y(p.efficiency):.1f}" r="3.5" fill="{colour}"><title>{p.devices:,} devices: {p.efficiency:.1%}, step {units.duration(p.plan.seconds)}</title></circle>' for p in points]  # fmt: skip
    for i, (name, colour) in enumerate(zip(drawn, (FIRST, SECOND), strict=False)):
        body.append(key(i * 180, top + height + 34, colour, name, 13))
    return chart(top + height + 56, body, "efficiency by number of devices")
