"""The life of a run as a picture: a row for each node over wall time, faults with their kinds, and the steps beneath.

Colours differ in lightness too, so that it is readable in black and white. Pointing
at a stretch shows its figures.
"""

from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from meshtrain.draw.svg import GREY, INK
from meshtrain.draw.svg import svg as drawing
from meshtrain.survive import history as histories
from meshtrain.survive.history import History
from meshtrain.survive.ledger import COUNTED, GenerationTime, Ledger, NodeLife, dominant, ledger, lives, word
from meshtrain.survive.reliability import Failure, failures
from meshtrain.units import duration

FILL = {
    "step": "#3b6fb6", "compile": "#7b4fa3", "init": "#8a929c", "checkpoint": "#ffe08a", "eval": "#4aa888", "restore": "#1f7a63",
    "data": "#f2a7a0", "lost": "#b3261e", "other": "#d5dae0",
}  # fmt: skip
LEFT, RIGHT, CURVE, NARROW = 84, 46, 90, 220  # pixels: margins, height of the curve, and least width of the rows
FEW = 24  # rows of full height
LETTER_WIDTH = 6.2
RED = "#d0453c"  # of faults


def svg(run: Path, width: float = 960) -> str:
    """Draws the life of a run, `width` pixels wide; ConfigError if it is no run under supervision."""
    history = histories.read(run)
    return drawn(history, ledger(history), width)


def drawn(history: History, times: Ledger, width: float = 960) -> str:
    """Draws the life of a run from its history and ledger."""
    nodes, faults, scene = lives(history, times), failures(history), _Scene(times, max(width - LEFT - RIGHT, NARROW))
    width = scene.plot + LEFT + RIGHT
    legend, below = _legend(times, width)
    end = history.plans[-1].reason if history.over else None
    title = f"{'over' if history.over else 'going on'}: {histories.text(end)}" if end else "going on"
    marks = list(_marks(faults, scene))
    top = 58 + below + max((mark.height for mark in marks), default=0.0)
    row = 22 if len(nodes) <= FEW else max(6, 560 // len(nodes))
    bottom = top + row * len(nodes)
    body = [
        f'<text x="12" y="20" font-size="15" font-weight="600">{escape(_cut(title, (width - 24) / 8.2))}</text>',
        f'<text x="12" y="38">{escape(_about(history, times, len(nodes), len(faults)))}</text>',
        f'<g transform="translate(12 42)">{"".join(legend)}</g>',
        *_rows(nodes, scene, top, row),
        *(mark.at(top, bottom) for mark in marks),
        *_steps(scene, bottom + 34),
    ]
    return drawing(width, bottom + 66 + CURVE, ["\n".join(["", *body, ""])], size=12) + "\n"


class _Scene(NamedTuple):
    """A ledger on an axis of time `plot` pixels long."""

    times: Ledger
    plot: float

    @property
    def scale(self) -> float:
        return self.plot / (self.times.wall or 1.0)

    def x(self, time: float) -> float:
        return LEFT + (time - self.times.began) * self.scale

    def strip(self, generation: GenerationTime, began: float, ended: float, height: float) -> str:
        """Draws what a generation did between two times, at the top; half a pixel is drawn as what most of it is."""
        gap, out = min(2.0, height / 5), []
        begins, ends = max(began, generation.began), max(ended, generation.began)
        x, inside = self.x(begins), height - 2 * gap
        start = f'<path d="M{x:.2f} {gap:.1f}v{inside:.1f}" stroke="{INK}" stroke-width="0.7"/>'
        columns = dominant(generation.spans, begins, ends, max(round((ends - begins) * self.scale * 2), 1))
        wide = (ends - begins) * self.scale / len(columns)
        for kind, same in groupby(columns):
            length = len(list(same)) * wide
            if kind:
                size = f'width="{max(length, 0.3):.2f}" height="{inside:.1f}"'
                out.append(f'<rect x="{x:.2f}" y="{gap:.1f}" {size} fill="{FILL[kind]}"/>')
            x += length
        return "".join([*out, start])


def _about(history: History, times: Ledger, nodes: int, faults: int) -> str:
    generations = len(times.generations)
    return (
        f"{generations} generation{'' if generations == 1 else 's'} on {nodes} node{'' if nodes == 1 else 's'}; "
        f"{faults} fault{'' if faults == 1 else 's'}; goodput {times.goodput:.1%}; "
        f"since {histories.date(times.began):%Y-%m-%d %H:%M:%S} UTC"
    )


def _cut(text: str, letters: float) -> str:
    return text if len(text) <= letters else text[: max(int(letters) - 1, 1)] + "…"


def _legend(times: Ledger, width: float) -> tuple[list[str], float]:
    out, x, y = [], 0.0, 0.0
    for kind, seconds in times.seconds.items():
        if round(seconds / (times.wall or 1.0), 3) <= 0:
            continue
        label = f"{word(kind)} {seconds / times.wall:.1%}"
        wide = 22 + LETTER_WIDTH * len(label) + 8
        if x and x + wide > width - 24:
            x, y = 0.0, y + 18
        fill = f'fill="{FILL[kind]}"' if kind in FILL else f'fill="none" stroke="{GREY}"'
        box = f'<rect x="{x:.1f}" y="{y:.0f}" width="12" height="12" {fill}/>'
        out.append(f'{box}<text x="{x + 17:.1f}" y="{y + 10:.0f}">{label}</text>')
        x += wide
    return out, y + 18


def _rows(nodes: Sequence[NodeLife], scene: _Scene, top: float, height: float) -> Iterator[str]:
    """A row for each node: a rank's stretch of a generation as rank 0 spent it, since in SPMD all do the same at once."""
    generations = {g.number: g for g in scene.times.generations}
    every = max(1, round(14 / height + 0.49))
    for i, node in enumerate(nodes):
        y, middle = top + i * height, top + (i + 0.5) * height
        if i % every == 0:
            name = f"{escape(_cut(node.name, 11))}<title>{escape(node.name)}</title>"
            yield f'<text x="{LEFT - 8}" y="{middle + 4:.1f}" text-anchor="end">{name}</text>'
        for first, last in node.there:
            line = f"M{scene.x(max(first, scene.times.began)):.1f} {middle:.1f}H{scene.x(last):.1f}"
            yield f'<path d="{line}" stroke="{GREY}" stroke-opacity="0.6"/>'
        for number, rank, began, ended in node.processes:
            if generation := generations.get(number):
                spent = ", ".join(
                    f"{word(k)} {duration(s)}"
                    for k in (*COUNTED, "lost", "other")
                    if (s := generation.seconds.get(k, 0)) > 0
                )
                yield f"<g><title>generation {number}, rank {rank}: {duration(ended - began)}, {spent}</title>"
                yield f'<g transform="translate(0 {y:.1f})">{scene.strip(generation, began, ended, height)}</g></g>'


class FaultMark(NamedTuple):
    """The mark of a fault, or of several that are too near to tell apart."""

    x: float
    label: str
    title: str

    @property
    def height(self) -> float:
        return 14 + 5.2 * len(self.label)

    def at(self, top: float, bottom: float) -> str:
        place = f'transform="translate({self.x + 3:.1f} {top - 8:.1f}) rotate(-55)"'
        return (
            f'<g><title>{escape(self.title)}</title><path d="M{self.x:.1f} {top - 2:.1f}V{bottom:.1f}" stroke="{RED}" stroke-dasharray="3 2"/>'
            f'<path d="M{self.x - 4:.1f} {top - 8:.1f}h8l-4 7z" fill="{RED}"/>'
            f'<text {place} font-size="11" style="fill: {RED}">{escape(self.label)}</text></g>'
        )


def _marks(faults: Sequence[Failure], scene: _Scene) -> Iterator[FaultMark]:
    groups: list[list[Failure]] = []
    for fault in faults:
        if not groups or (fault.time - groups[-1][0].time) * scene.scale >= 15:
            groups.append([])
        groups[-1].append(fault)
    for near in groups:
        kind = near[0].kind if len({f.kind for f in near}) == 1 else "faults"
        lines = [
            f"{duration(f.time - scene.times.began)}: {f.kind}{' of ' + ', '.join(f.blamed) if f.blamed else ''}: {f.reason}"
            for f in near
        ]
        label = kind if len(near) == 1 else f"{len(near)} × {kind}"
        yield FaultMark(min(scene.x(near[0].time), LEFT + scene.plot), _cut(label, 16), "\n".join(lines))


def _steps(scene: _Scene, top: float) -> Iterator[str]:
    """Steps over time: a line for each generation, from the step that it went on from; and the axis of time."""
    times, plot = scene.times, scene.plot
    highest = max((g.step or 0 for g in times.generations), default=0) or 1
    base = top + CURVE
    yield f'<text x="{LEFT - 8}" y="{top - 10}" text-anchor="end">steps</text>'
    for step in (0, highest):
        y = base - CURVE * step / highest
        yield f'<path d="M{LEFT} {y:.1f}h{plot:.1f}" stroke="{GREY}" stroke-opacity="0.3"/>'
        yield f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{step:,}</text>'
    for generation in times.generations:
        stepping = next((span.began for span in generation.spans if span.kind in ("step", "data")), None)
        if stepping is None or generation.start is None:
            continue
        points = [(stepping, generation.start)]
        points += [(save.time, save.step) for save in generation.saves if save.time >= stepping]
        if generation.step is not None and generation.step >= points[-1][1]:
            points.append((max(generation.ended, points[-1][0]), generation.step))
        line = "L".join(f"{scene.x(time):.1f} {base - CURVE * step / highest:.1f}" for time, step in points)
        title = f"<title>generation {generation.number}</title>"
        yield f'<path d="M{line}" fill="none" stroke="{FILL["step"]}" stroke-width="1.6">{title}</path>'
    most = max(1, int(plot / 110))
    for i in range(most + 1):
        anchor = "start" if i == 0 else "end" if i == most else "middle"
        label = duration(times.wall * i / most)
        yield f'<text x="{LEFT + plot * i / most:.1f}" y="{base + 18:.1f}" text-anchor="{anchor}">{label}</text>'
