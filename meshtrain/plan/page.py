"""A plan as one self-contained page: memory bars, the waterfall of a step, the pipeline's Gantt chart, scaling curves.

No script and nothing fetched. Pictures are SVG with a view box, so they shrink to the width of a phone; the Gantt chart, which
would be unreadable there, scrolls sideways.
"""

import math
from collections.abc import Sequence
from html import escape

from meshtrain.plan import report
from meshtrain.plan.estimate import PART_NAMES, Plan
from meshtrain.plan.scaling import Point
from meshtrain.schedule.draw import gantt_svg

WIDTH = 400  # of pictures, about a phone's: text in them keeps its size there
KIND_COLOURS = {"parameters": "#3b6fb6", "gradients": "#4f9d69", "optimizer_state": "#c2843a", "activations": "#a2559c"}
PART_COLOURS = {
    "matmul": "#3b6fb6", "attention": "#5b8fd0", "memory": "#8fb3de", "head": "#2f5590", "recompute": "#a2559c",
    "tensor": "#c2843a", "pipeline": "#d6a05c", "data": "#a86a22", "host": "#e6c79a", "bubble": "#b9b9b9", "optimizer": "#4f9d69", "checkpoint": "#86bd98", "reference": "#7d6bb0",
}  # fmt: skip
ROW = 34
MOST_CELLS = 4000  # of a Gantt chart: beyond that it is neither readable nor small

STYLE = """
:root { color-scheme: light; }
body { margin: 0 auto; padding: 16px; max-width: 720px; font: 16px/1.5 system-ui, sans-serif; color: #1d2430; background: #fff; }
h1 { font-size: 1.4em; line-height: 1.25; margin: 0 0 .4em; } h2 { font-size: 1.1em; margin: 1.8em 0 .4em; }
p, ul { margin: .4em 0; } .note { color: #6a5200; } .bad { color: #b3261e; font-weight: 600; } .good { color: #1e7b3a; font-weight: 600; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(138px, 1fr)); gap: 10px; margin: 14px 0; }
.tile { border: 1px solid #d9dee6; border-radius: 10px; padding: 8px 12px; } .tile b { display: block; font-size: 1.3em; }
.tile span { color: #5b6675; font-size: .85em; }
svg { width: 100%; max-width: 560px; height: auto; display: block; } .wide { overflow-x: auto; } .wide svg { width: auto; max-width: none; }
table { border-collapse: collapse; width: 100%; font-size: .85em; } td, th { padding: 3px 6px 3px 0; text-align: left; vertical-align: top; }
td.n, th.n { text-align: right; white-space: nowrap; } tr + tr td { border-top: 1px solid #eef0f4; }
"""


def page(plan: Plan, strong: Sequence[Point], weak: Sequence[Point], notes: Sequence[str] = ()) -> str:
    """The page of a plan with its strong and weak scaling."""
    mesh = plan.config.mesh
    title = f"{report.count(plan.parameters)} parameters on {plan.devices:,} × {plan.cluster.accelerator.name}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        f"<p>{str(mesh).replace(' x ', ' × ')} on {escape(plan.cluster.name)}; {_verdict(plan)}</p>",
        _tiles(plan),
        *[f'<p class="note">{escape(note)}</p>' for note in notes],
        "<h2>What each device holds</h2>",
        f"<p>{escape(report.layers(plan).capitalize())}.</p>",
        memory_bars(plan),
        "<h2>Where a step's time goes</h2>",
        waterfall(plan),
        *_pipeline(plan),
        "<h2>What each device sends in a step</h2>",
        _traffic(plan),
        "<h2>More devices</h2>",
        curves({"strong: same batch": strong, "weak: batch grows": weak}),
        f"<p>Throughput a device, over that on {strong[0].devices if strong else plan.devices:,} devices. The data axis grows; tensor and pipeline stay.</p>",
        "<h2>Failures</h2>",
        f"<p>{escape(report.faults_text(report.faults(plan)))}.</p>",
    ]
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    return f'<!doctype html><html lang="en"><head>{head}<title>{escape(title)}</title><style>{STYLE}</style></head><body>\n{"".join(parts)}\n</body></html>\n'


def _verdict(plan: Plan) -> str:
    usable = plan.cluster.accelerator.usable_bytes
    if plan.fits:
        return f'<span class="good">fits</span>, {report.size(usable - plan.bytes)} to spare'
    return f'<span class="bad">does not fit</span>: {report.size(plan.bytes - usable)} too much'


def _tiles(plan: Plan) -> str:
    tiles = [
        (report.size(plan.bytes), f"of {report.size(plan.cluster.accelerator.usable_bytes)} a device"),
        (report.duration(plan.seconds), f"a step, bound by {plan.time.bound}"),
        (f"{plan.mfu:.1%}", f"MFU, {plan.flops_per_device / 1e12:.3g} TFLOP/s a device"),
        (report.count(plan.tokens_per_second), "tokens a second"),
        (f"{plan.bubble_fraction:.1%}", "pipeline idle"),
    ]
    if plan.cost:
        tiles.append((f"{plan.cost:,.0f}", f"for {plan.config.train.steps:,} steps"))
    boxes = [f'<div class="tile"><b>{escape(value)}</b><span>{escape(what)}</span></div>' for value, what in tiles]
    return f'<div class="tiles">{"".join(boxes)}</div>'


def svg(height: float, body: Sequence[str], label: str) -> str:
    """A picture `WIDTH` wide, as wide as its place in a page; `label` says what it shows to whoever does not see it."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(label)}" font-family="system-ui, sans-serif" '
        f'font-size="13" fill="#1d2430">{"".join(body)}</svg>'
    )


def bar_row(y: float, name: str, value: str, start: float, share: float, colour: str) -> list[str]:
    """A line of text, and under it a bar from `start` as long as `share` of the width."""
    x, width = start * WIDTH, max(share * WIDTH, 1.5)
    return [
        f'<text x="0" y="{y + 13}">{escape(name)}</text><text x="{WIDTH}" y="{y + 13}" text-anchor="end">{escape(value)}</text>',
        f'<rect x="0" y="{y + 18}" width="{WIDTH}" height="9" rx="2" fill="#f3f5f8"/>',
        f'<rect x="{min(x, WIDTH - 1.5):.1f}" y="{y + 18}" width="{width:.1f}" height="9" rx="2" fill="{colour}"/>',
    ]


def memory_bars(plan: Plan) -> str:
    """A bar an item, largest first, with the device's memory as the full width."""
    usable = max(plan.cluster.accelerator.usable_bytes, plan.bytes)
    items = sorted(plan.memory, key=lambda item: -item.nbytes)
    body, start = [f'<rect x="0" y="4" width="{WIDTH}" height="22" rx="4" fill="#eef0f4"/>'], 0.0
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
        bar = (0.0, item.nbytes / items[0].nbytes, KIND_COLOURS[item.kind])
        body += bar_row(y, item.name, report.size(item.nbytes), *bar)
        y += ROW
    x = 0.0
    for kind, colour in KIND_COLOURS.items():
        body.append(f'<rect x="{x:.0f}" y="{y + 8}" width="12" height="12" rx="2" fill="{colour}"/>')
        body.append(f'<text x="{x + 15:.0f}" y="{y + 19}" font-size="12">{kind.replace("_", " ")}</text>')
        x += 28 + 6.6 * len(kind)
    return svg(y + 30, body, "memory of one device by item")


def waterfall(plan: Plan) -> str:
    """Each part of a step begins where the one before ends."""
    body: list[str] = []
    y, done = 0, 0.0
    for name, seconds in plan.time.parts():
        share = seconds / plan.seconds
        if share >= 0.0005:
            body += bar_row(
                y, PART_NAMES[name], f"{report.duration(seconds)}  {share:.1%}", done, share, PART_COLOURS[name]
            )
            y, done = y + ROW, done + share
    return svg(y + 4, body, "time of a step by part")


def _pipeline(plan: Plan) -> list[str]:
    line = plan.timeline
    if line is None:
        return []
    heading = f"<h2>The pipeline: {escape(plan.config.parallel.schedule)}</h2>"
    if len(line.kind) > MOST_CELLS:
        return [heading, f"<p>{len(line.kind):,} cells are too many to draw here; --gantt FILE draws them.</p>"]
    return [heading, f'<div class="wide">{gantt_svg(line)}</div>']


def _traffic(plan: Plan) -> str:
    rows = [
        f'<tr><td>{flow.axis}</td><td>{escape(flow.what)}<br>{flow.kind}, {report.algorithm(plan, flow)}</td><td class="n">{flow.times} × {report.size(flow.nbytes)}</td>'
        f'<td class="n">{report.size(flow.sent)}</td></tr>'
        for flow in plan.flows
    ]
    head = '<tr><th>axis</th><th>what</th><th class="n">arrays</th><th class="n">sent</th></tr>'
    return f"<table>{head}{''.join(rows)}</table>" if rows else "<p>Nothing: there is one device.</p>"


def curves(lines: dict[str, Sequence[Point]]) -> str:
    """Efficiency over the number of devices, on a logarithmic axis."""
    drawn = {name: points for name, points in lines.items() if points}
    counts = sorted({point.devices for points in drawn.values() for point in points})
    if not counts:
        return ""
    left, top, width, height = 46, 14, WIDTH - 72, 190
    low, high = math.log2(counts[0]), max(math.log2(counts[-1]), math.log2(counts[0]) + 1)

    def x(devices: int) -> float:
        return left + (math.log2(devices) - low) / (high - low) * width

    most = max(1.0, *(point.efficiency for points in drawn.values() for point in points))

    def y(efficiency: float) -> float:
        return top + height * (1 - efficiency / most)

    body = []
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        body.append(
            f'<line x1="{left}" x2="{left + width}" y1="{y(tick):.1f}" y2="{y(tick):.1f}" stroke="#e3e7ee"/>'
            f'<text x="{left - 8}" y="{y(tick) + 5:.1f}" text-anchor="end">{tick:.0%}</text>'
        )
    step = math.ceil(len(counts) / 5)
    for devices in counts[::step]:
        body.append(f'<text x="{x(devices):.1f}" y="{top + height + 20}" text-anchor="middle">{devices:,}</text>')
    for points, colour, dash in zip(drawn.values(), ("#3b6fb6", "#c2843a"), ("", "6 4"), strict=False):
        path = " ".join(f"{x(p.devices):.1f},{y(p.efficiency):.1f}" for p in points)
        body.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2.5" stroke-dasharray="{dash}"/>'
        )
        body += [f'<circle cx="{x(p.devices):.1f}" cy="{y(p.efficiency):.1f}" r="3.5" fill="{colour}"><title>{p.devices:,} devices: {p.efficiency:.1%}, step {report.duration(p.plan.seconds)}</title></circle>' for p in points]  # fmt: skip
    for i, (name, colour) in enumerate(zip(drawn, ("#3b6fb6", "#c2843a"), strict=False)):
        body.append(f'<rect x="{i * 180}" y="{top + height + 34}" width="12" height="12" rx="2" fill="{colour}"/>')
        body.append(f'<text x="{17 + i * 180}" y="{top + height + 45}">{escape(name)}</text>')
    return svg(top + height + 56, body, "efficiency by number of devices")
