"""The life of a run as a picture: a row for each node over wall time, faults with their kinds, and the steps beneath.

Pointing at a stretch shows its figures.
"""

from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from meshtrain.draw.svg import (
    BAD,
    BLUE,
    GREEN,
    INK,
    ORANGE,
    PURPLE,
    RULE,
    SKY,
    VERMILION,
    YELLOW,
    keys,
    small,
)
from meshtrain.draw.svg import svg as drawing
from meshtrain.survive.history import History, date, read, text
from meshtrain.survive.ledger import (
    COUNTED,
    GenerationTime,
    Ledger,
    NodeLife,
    dominant,
    ledger,
    lives,
    word,
)
from meshtrain.survive.reliability import Failure, failures
from meshtrain.units import counted, duration

FILL = {
    "step": BLUE,
    "compile": PURPLE,
    "init": "#6b727c",
    "checkpoint": YELLOW,
    "eval": GREEN,
    "restore": SKY,
    "data": ORANGE,
    "lost": VERMILION,
    "other": "#d5dae0",
}
# pixels: margins, height of the curve, and least width of the rows
LEFT = 84
RIGHT = 46
CURVE = 90
NARROW = 220
FEW = 24  # rows of full height


def svg(run: Path, width: float = 960) -> str:
    """Draws the life of a run, `width` pixels wide; ConfigError if it is not a supervised run."""
    history = read(run)
    return drawn(history, ledger(history), width)


def drawn(history: History, times: Ledger, width: float = 960) -> str:
    """Draws the life of a run from its history and ledger."""
    nodes = lives(history, times)
    faults = failures(history)
    axis = _Axis(times, max(width - LEFT - RIGHT, NARROW))
    width = axis.pixels + LEFT + RIGHT
    legend, below = _legend(times, width)
    about = (
        f"{counted(len(times.generations), 'generation')} on {counted(len(nodes), 'node')}; "
        f"{counted(len(faults), 'fault')}; "
        f"goodput {times.goodput:.1%}; since {date(times.began):%Y-%m-%d %H:%M:%S} UTC"
    )
    marks = list(_marks(faults, axis))
    top = (
        62 + below + max((14 + 5.2 * len(label) for _, label, _ in marks), default=0.0)
    )
    row = 22 if len(nodes) <= FEW else max(6, 560 // len(nodes))
    bottom = top + row * len(nodes)
    title = _cut(_title(history), (width - 24) / 8.2)
    body = [
        f'<text x="12" y="20" font-size="15" font-weight="600">{escape(title)}</text>',
        f'<text x="12" y="38">{escape(about)}</text>',
        f'<g transform="translate(12 47)">{"".join(legend)}</g>',
        small(LEFT - 8, top - 6, "node", "end"),
        *_rows(nodes, axis, top, row),
        *(_mark(x, label, what, top, bottom) for x, label, what in marks),
        *_steps(axis, bottom + 34),
    ]
    label = f"the life of the run: {about}"
    return drawing(
        width, bottom + 84 + CURVE, ["\n".join(["", *body, ""])], label, size=12
    )


def _title(history: History) -> str:
    reason = history.plans[-1].reason if history.over else ""
    return f"over: {text(reason)}" if reason else "going on"


class _Axis(NamedTuple):
    times: Ledger
    pixels: float

    @property
    def scale(self) -> float:
        return self.pixels / (self.times.wall or 1.0)

    def x(self, time: float) -> float:
        return LEFT + (time - self.times.began) * self.scale


def _cut(words: str, letters: float) -> str:
    return words if len(words) <= letters else words[: max(int(letters) - 1, 1)] + "…"


def _legend(times: Ledger, width: float) -> tuple[list[str], float]:
    shares = {
        kind: seconds / (times.wall or 1.0) for kind, seconds in times.seconds.items()
    }
    entries = [
        (FILL.get(kind, "none"), f"{word(kind)} {s:.1%}")
        for kind, s in shares.items()
        if round(s, 3) > 0
    ]
    return keys(entries, room=width - 24)


def _rows(
    nodes: Sequence[NodeLife], axis: _Axis, top: float, height: float
) -> Iterator[str]:
    """Draws a row for each node: a rank's stretch of a generation as rank 0 spent it, since in SPMD all do the same at
    once.
    """
    generations = {g.number: g for g in axis.times.generations}
    every = max(1, round(14 / height + 0.49))
    for i, node in enumerate(nodes):
        y = top + i * height
        middle = top + (i + 0.5) * height
        if i % every == 0:
            name = f"{escape(_cut(node.name, 11))}<title>{escape(node.name)}</title>"
            yield f'<text x="{LEFT - 8}" y="{middle + 4:.1f}" text-anchor="end">{name}</text>'
        for first, last in node.there:
            line = f"M{axis.x(max(first, axis.times.began)):.1f} {middle:.1f}H{axis.x(last):.1f}"
            yield f'<path d="{line}" stroke="{RULE}"/>'
        for number, rank, began, ended in node.processes:
            if generation := generations.get(number):
                seconds = {
                    k: s
                    for k in (*COUNTED, "lost", "other")
                    if (s := generation.seconds.get(k, 0)) > 0
                }
                spent = ", ".join(
                    f"{word(k)} {duration(s)}" for k, s in seconds.items()
                )
                yield f"<g><title>generation {number}, rank {rank}: {duration(ended - began)}, {spent}</title>"
                yield f'<g transform="translate(0 {y:.1f})">{_strip(axis, generation, began, ended, height)}</g></g>'


def _strip(
    axis: _Axis,
    generation: GenerationTime,
    began: float,
    ended: float,
    height: float,
) -> str:
    """Draws what a generation did between two times, at the top; half a pixel is drawn as what most of it is."""
    gap = min(2.0, height / 5)
    out = []
    begins = max(began, generation.began)
    ends = max(ended, generation.began)
    x = axis.x(begins)
    inside = height - 2 * gap
    start = (
        f'<path d="M{x:.2f} {gap:.1f}v{inside:.1f}" stroke="{INK}" stroke-width="0.7"/>'
    )
    columns = dominant(
        generation.spans, begins, ends, max(round((ends - begins) * axis.scale * 2), 1)
    )
    for kind, same in groupby(columns):
        length = len(list(same)) * (ends - begins) * axis.scale / len(columns)
        if kind:
            size = f'width="{max(length, 0.3):.2f}" height="{inside:.1f}"'
            out.append(f'<rect x="{x:.2f}" y="{gap:.1f}" {size} fill="{FILL[kind]}"/>')
        x += length
    return "".join([*out, start])


def _marks(faults: Sequence[Failure], axis: _Axis) -> Iterator[tuple[float, str, str]]:
    """Yields place, label and words of each fault, or of several that are too near to tell apart."""
    groups: list[list[Failure]] = []
    for fault in faults:
        if not groups or (fault.time - groups[-1][0].time) * axis.scale >= 15:
            groups.append([])
        groups[-1].append(fault)
    for near in groups:
        kind = near[0].kind if len({f.kind for f in near}) == 1 else "faults"
        label = kind if len(near) == 1 else f"{len(near)} × {kind}"
        lines = [
            f"{duration(f.time - axis.times.began)}: {f.kind}{' of ' + ', '.join(f.blamed) if f.blamed else ''}: "
            f"{f.reason}"
            for f in near
        ]
        yield (
            min(axis.x(near[0].time), LEFT + axis.pixels),
            _cut(label, 16),
            "\n".join(lines),
        )


def _mark(x: float, label: str, title: str, top: float, bottom: float) -> str:
    return (
        f'<g><title>{escape(title)}</title><path d="M{x:.1f} {top - 2:.1f}V{bottom:.1f}" stroke="{BAD}" '
        'stroke-dasharray="3 2"/>'
        f'<path d="M{x - 4:.1f} {top - 8:.1f}h8l-4 7z" fill="{BAD}"/>'
        f'<text transform="translate({x + 3:.1f} {top - 8:.1f}) rotate(-55)" font-size="11" '
        f'fill="{BAD}">{escape(label)}</text></g>'
    )


def _steps(axis: _Axis, top: float) -> Iterator[str]:
    """Draws steps over time: a line for each generation, from the step that it went on from; and the axis of time."""
    times = axis.times
    plot = axis.pixels
    highest = max((g.step or 0 for g in times.generations), default=0) or 1
    base = top + CURVE
    yield small(LEFT - 8, top - 10, "steps", "end")
    for step in (0, highest):
        y = base - CURVE * step / highest
        yield f'<path d="M{LEFT} {y:.1f}h{plot:.1f}" stroke="{RULE}" stroke-opacity="0.4"/>'
        yield f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{step:,}</text>'
    for generation in times.generations:
        yield from _curve(generation, axis, base, highest)
    most = max(1, int(plot / 110))
    for i in range(most + 1):
        anchor = "start" if i == 0 else "end" if i == most else "middle"
        label = duration(times.wall * i / most)
        yield f'<text x="{LEFT + plot * i / most:.1f}" y="{base + 18:.1f}" text-anchor="{anchor}">{label}</text>'
    yield small(LEFT, base + 36, "time since the start")


def _curve(
    generation: GenerationTime, axis: _Axis, base: float, highest: int
) -> Iterator[str]:
    """Draws the steps of one generation over time, if it took any."""
    stepping = next(
        (span.began for span in generation.spans if span.did in ("step", "data")), None
    )
    if stepping is None or generation.start is None:
        return
    points = [(stepping, generation.start)]
    points += [
        (save.time, save.step) for save in generation.saves if save.time >= stepping
    ]
    if generation.step is not None and generation.step >= points[-1][1]:
        points.append((max(generation.ended, points[-1][0]), generation.step))
    line = "L".join(
        f"{axis.x(time):.1f} {base - CURVE * step / highest:.1f}"
        for time, step in points
    )
    title = f"<title>generation {generation.number}</title>"
    yield f'<path d="M{line}" fill="none" stroke="{FILL["step"]}" stroke-width="1.6">{title}</path>'
