"""The life of a run as a picture: a row for each node over wall time, faults with their kinds, and the steps beneath.

Colours differ in lightness too and the rarer kinds are hatched, so that it is readable in black and white, on white and on black. Pointing
at a stretch shows its figures.
"""

from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

from meshtrain.schedule.draw import GREY, INK
from meshtrain.survive import history as histories
from meshtrain.survive.history import History
from meshtrain.survive.ledger import COUNTED, Generation, Ledger, ledger
from meshtrain.survive.life import Row, dominant, lives, took, word
from meshtrain.survive.reliability import Failure, failures

# From dark to light; what is drawn with a hatch has its second colour.
FILL = {
    "step": ("#3b6fb6", ""), "compile": ("#7b4fa3", "#c9a6e6"), "init": ("#8a929c", ""), "checkpoint": ("#ffe08a", ""), "eval": ("#4aa888", "#c9efe2"),
    "restore": ("#1f7a63", "#9fe0cd"), "data": ("#f2a7a0", ""), "lost": ("#b3261e", "#ffd9d6"), "other": ("#d5dae0", ""),
}  # fmt: skip
LEFT, RIGHT, CURVE, NARROW = 84, 46, 90, 220  # pixels: margins, height of the curve, and least width of the rows
FEW = 24  # rows of full height
LETTER_WIDTH = 6.2


def svg(run: Path, width: float = 960) -> str:
    """The picture of `run`'s life, `width` pixels wide; ConfigError if it is no run under supervision."""
    history = histories.read(run)
    return drawn(history, ledger(history), width)


def drawn(history: History, told: Ledger, width: float = 960) -> str:
    """The picture of a history with its ledger."""
    rows, found = lives(history, told), failures(history)
    plot = max(width - LEFT - RIGHT, NARROW)
    width = plot + LEFT + RIGHT
    scale = plot / (told.wall or 1.0)
    legend, after = _legend(told, width)
    title, facts = _title(history, told, len(rows), len(found))
    words = list(_wrapped(facts, width))
    top = 30 + 16 * len(words) + after + 12
    marks = list(_marks(found, told, scale, plot))
    top += max((mark.height for mark in marks), default=0.0)
    row = 22 if len(rows) <= FEW else max(6, 560 // len(rows))
    bottom = top + row * len(rows)
    height = bottom + 40 + CURVE + 26
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'font-family="system-ui,sans-serif" font-size="12" fill="{GREY}">',
        f"<defs>{''.join(_hatches())}",
        *(
            f'<g id="{_id(told, g, scale)}">{_strip(g, g.began, g.ended, told, scale, row)}</g>'
            for g in told.generations
        ),
        "</defs>",
        f'<text x="12" y="20" font-size="15" font-weight="600">{escape(_cut(title, (width - 24) / 8.2))}</text>',
        *(f'<text x="12" y="{38 + 16 * i}">{escape(line)}</text>' for i, line in enumerate(words)),
        f'<g transform="translate(12 {26 + 16 * len(words)})">{"".join(legend)}</g>',
        *_rows(rows, told, scale, top, row),
        *(mark.at(top, bottom) for mark in marks),
        *_steps(told, scale, bottom + 34, plot),
        "</svg>",
    ]
    return "\n".join(out) + "\n"


def _title(history: History, told: Ledger, nodes: int, faults: int) -> tuple[str, list[str]]:
    began = histories.date(told.began)
    end = history.plans[-1].reason if history.over else None
    title = f"{'over' if history.over else 'going on'}: {histories.text(end)}" if end else "going on"
    generations = len(told.generations)
    facts = [
        f"{generations} generation{'' if generations == 1 else 's'} on {nodes} node{'' if nodes == 1 else 's'}",
        f"{faults} fault{'' if faults == 1 else 's'}",
        f"goodput {told.goodput:.1%}",
        f"since {began:%Y-%m-%d %H:%M:%S} UTC",
    ]
    return title, facts


def _wrapped(facts: Sequence[str], width: float) -> Iterator[str]:
    """Facts with semicolons between them, in lines."""
    line = ""
    for fact in facts:
        longer = f"{line}; {fact}" if line else fact
        if line and len(longer) * LETTER_WIDTH > width - 24:
            yield line
            longer = fact
        line = longer
    if line:
        yield line


def _cut(text: str, letters: float) -> str:
    return text if len(text) <= letters else text[: max(int(letters) - 1, 1)] + "…"


def _hatches() -> Iterator[str]:
    for kind, (colour, second) in FILL.items():
        if second:
            turned = {"lost": -45, "compile": 45, "restore": 0, "eval": 90}[kind]
            yield (
                f'<pattern id="life-{kind}" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate({turned})">'
                f'<rect width="5" height="5" fill="{second}"/><rect width="2.5" height="5" fill="{colour}"/></pattern>'
            )


def _fill(kind: str) -> str:
    return f"url(#life-{kind})" if FILL[kind][1] else FILL[kind][0]


def _legend(told: Ledger, width: float) -> tuple[list[str], float]:
    """The kinds that there are, with their share; and the height that it takes."""
    out, x, y = [], 0.0, 0.0
    for kind, seconds in told.seconds.items():
        if round(seconds / (told.wall or 1.0), 3) <= 0:
            continue
        label = f"{word(kind)} {seconds / told.wall:.1%}"
        wide = 22 + LETTER_WIDTH * len(label) + 8
        if x and x + wide > width - 24:
            x, y = 0.0, y + 18
        box = f'fill="{_fill(kind)}"' if kind in FILL else f'fill="none" stroke="{GREY}"'
        out.append(
            f'<rect x="{x:.1f}" y="{y:.0f}" width="12" height="12" {box}/><text x="{x + 17:.1f}" y="{y + 10:.0f}">{label}</text>'
        )
        x += wide
    return out, y + 18


def _rows(rows: Sequence[Row], told: Ledger, scale: float, top: float, height: float) -> Iterator[str]:
    of = {g.number: g for g in told.generations}
    every = max(1, round(14 / height + 0.49))
    for i, row in enumerate(rows):
        y, middle = top + i * height, top + (i + 0.5) * height
        if i % every == 0:
            yield f'<text x="{LEFT - 8}" y="{middle + 4:.1f}" text-anchor="end">{escape(_cut(row.name, 11))}<title>{escape(row.name)}</title></text>'
        for first, last in row.there:
            x = LEFT + (max(first, told.began) - told.began) * scale
            yield f'<path d="M{x:.1f} {middle:.1f}H{LEFT + (last - told.began) * scale:.1f}" stroke="{GREY}" stroke-opacity="0.6"/>'
        for generation, rank, began, ended in row.processes:
            if generation in of:
                yield from _process(of[generation], rank, began, ended, told, scale, y, height)


def _process(
    generation: Generation, rank: int, began: float, ended: float, told: Ledger, scale: float, y: float, height: float
) -> Iterator[str]:
    """A rank's stretch of a generation: as rank 0 spent it, since in SPMD all do the same at once."""
    yield f"<g><title>generation {generation.number}, rank {rank}: {took(ended - began)}, {_spent(generation)}</title>"
    if abs(began - generation.began) * scale < 1 and abs(ended - generation.ended) * scale < 1:
        yield f'<use href="#{_id(told, generation, scale)}" y="{y:.1f}"/></g>'
    else:
        yield f'<g transform="translate(0 {y:.1f})">{_strip(generation, began, ended, told, scale, height)}</g></g>'


def _strip(generation: Generation, began: float, ended: float, told: Ledger, scale: float, height: float) -> str:
    """What a generation did between two times, at the top of the picture; half a pixel is drawn as what most of it is."""
    gap, out = min(2.0, height / 5), []
    begins, ends = max(began, generation.began), max(ended, generation.began)
    x, inside = LEFT + (begins - told.began) * scale, height - 2 * gap
    columns = dominant(generation.pieces, begins, ends, max(round((ends - begins) * scale * 2), 1))
    wide = (ends - begins) * scale / len(columns)
    for kind, same in groupby(columns):
        length = len(list(same)) * wide
        if kind:
            out.append(
                f'<rect x="{x:.2f}" y="{gap:.1f}" width="{max(length, 0.3):.2f}" height="{inside:.1f}" fill="{_fill(kind)}"/>'
            )
        x += length
    began_at = LEFT + (begins - told.began) * scale
    return "".join(out) + f'<path d="M{began_at:.2f} {gap:.1f}v{inside:.1f}" stroke="{INK}" stroke-width="0.7"/>'


def _id(told: Ledger, generation: Generation, scale: float) -> str:
    """Of a strip, which other pictures in the same page do not have."""
    return f"g{crc32(repr((told.began, told.ended, scale)).encode()):x}-{generation.number}"


def _spent(generation: Generation) -> str:
    spent = [
        f"{word(k)} {took(generation.seconds[k])}"
        for k in (*COUNTED, "lost", "other")
        if generation.seconds.get(k, 0) > 0
    ]
    return ", ".join(spent)


class Mark(NamedTuple):
    """A fault's, or several that are too near to tell apart."""

    x: float
    label: str
    whole: str
    height: float

    def at(self, top: float, bottom: float) -> str:
        text = f'<text transform="translate({self.x + 3:.1f} {top - 8:.1f}) rotate(-55)" font-size="11" style="fill: #d0453c">{escape(self.label)}</text>'
        return (
            f'<g><title>{escape(self.whole)}</title><path d="M{self.x:.1f} {top - 2:.1f}V{bottom:.1f}" stroke="#d0453c" stroke-dasharray="3 2"/>'
            f'<path d="M{self.x - 4:.1f} {top - 8:.1f}h8l-4 7z" fill="#d0453c"/>{text}</g>'
        )


def _marks(found: Sequence[Failure], told: Ledger, scale: float, plot: float) -> Iterator[Mark]:
    """A mark for each fault; where they are too dense to read, one for those that are near each other."""
    near: list[Failure] = []

    def mark() -> Mark:
        x = LEFT + min((near[0].time - told.began) * scale, plot)
        label = (
            near[0].kind
            if len(near) == 1
            else f"{len(near)} × {near[0].kind if len({f.kind for f in near}) == 1 else 'faults'}"
        )
        label = _cut(label, 16)
        whole = "\n".join(
            f"{took(f.time - told.began)}: {f.kind}{' of ' + ', '.join(f.blamed) if f.blamed else ''}: {f.reason}"
            for f in near
        )
        return Mark(x, label, whole, 14 + 5.2 * len(label))

    for failure in found:
        if near and (failure.time - near[0].time) * scale >= 15:
            yield mark()
            near = []
        near.append(failure)
    if near:
        yield mark()


def _steps(told: Ledger, scale: float, top: float, plot: float) -> Iterator[str]:
    """Steps over time: a line for each generation, from the step that it went on from; and the axis of time."""
    highest = max((g.step or 0 for g in told.generations), default=0) or 1
    base = top + CURVE

    def point(time: float, step: float) -> str:
        return f"{LEFT + (time - told.began) * scale:.1f} {base - CURVE * step / highest:.1f}"

    yield f'<text x="{LEFT - 8}" y="{top - 10}" text-anchor="end">steps</text>'
    for step in (0, highest):
        yield f'<path d="M{LEFT} {base - CURVE * step / highest:.1f}h{plot:.1f}" stroke="{GREY}" stroke-opacity="0.3"/>'
        yield f'<text x="{LEFT - 8}" y="{base - CURVE * step / highest + 4:.1f}" text-anchor="end">{step:,}</text>'
    for generation in told.generations:
        stepping = next((p.began for p in generation.pieces if p.kind in ("step", "data")), None)
        if stepping is None or generation.start is None:
            continue
        points = [(stepping, generation.start)]
        points += [(save.time, save.step) for save in generation.saves if save.time >= stepping]
        if generation.step is not None and generation.step >= points[-1][1]:
            points.append((max(generation.ended, points[-1][0]), generation.step))
        line = "L".join(point(*p) for p in points)
        yield f'<path d="M{line}" fill="none" stroke="{FILL["step"][0]}" stroke-width="1.6"><title>generation {generation.number}</title></path>'
    most = max(1, int(plot / 110))
    for i in range(most + 1):
        x = LEFT + plot * i / most
        anchor = "start" if i == 0 else "end" if i == most else "middle"
        yield f'<text x="{x:.1f}" y="{base + 18:.1f}" text-anchor="{anchor}">{took(told.wall * i / most)}</text>'
