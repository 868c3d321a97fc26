"""Pictures of a schedule: its table, clock by clock; of a simulated one a Gantt chart, as SVG and as text for a
terminal.
"""

from collections.abc import Callable, Iterator
from html import escape

import numpy as np

from meshtrain.draw.picture import Picture, block, columns, faint, scrolled, title
from meshtrain.draw.svg import (
    GREEN,
    GREY,
    INK,
    PURPLE,
    RULE,
    SKY,
    YELLOW,
    chart,
    image,
    keys,
    mixed,
    small,
    stage_hue,
    svg,
    ticks,
)
from meshtrain.schedule.simulation import HEAD, OPTIMIZER, Timeline
from meshtrain.schedule.table import SENT, B, F, G, IllegalTable, R, Table, W
from meshtrain.schedule.validate import validate

MOST_ENTRIES = 4000  # stages x clocks of a table that is drawn
_FILL = {F: SKY, B: GREEN, W: YELLOW, HEAD: PURPLE, OPTIMIZER: GREY}
_SENT = {
    G: (mixed(SKY, INK, 0.5), "weights gathered over data (G)"),
    R: (mixed(GREEN, INK, 0.5), "gradient reduced over data (R)"),
}
# heights of a row, a cell; margins; height of the curve
_ROW = 30
_CELL = 26
_LEFT = 64
_RIGHT = 150
_CURVE = 110
# of a table: height of a row, width of a letter, of a stage's name
_STAGE = 22
_LETTER = 6.5
_NAME = 58


def picture(schedule: Table | Timeline) -> Picture:
    """The picture of a table, with a row for each stage, a column for each clock and whether it can be run; or of a
    timeline.
    """
    if isinstance(schedule, Timeline):
        return Picture(
            scrolled(image(gantt_svg(schedule), figures(schedule)[0])),
            gantt_text(schedule),
        )
    table = schedule
    chunks = f", {table.chunks} chunks a stage" if table.chunks > 1 else ""
    head = f"{table.name}: {table.stages} stages, {table.microbatches} microbatches{chunks}, {table.clocks} clocks"
    verdict = _verdict(table)
    if table.stages * table.clocks > MOST_ENTRIES:
        return Picture(block(title(head), faint(verdict)), f"{head}\n{verdict}")
    texts = [
        [table.cell_text(clock, stage) for clock in range(table.clocks)]
        for stage in range(table.stages)
    ]
    clocks = ["clock", *map(str, range(table.clocks))]
    rows = [clocks, *([f"stage {stage}", *cells] for stage, cells in enumerate(texts))]
    widths = [
        max(3, *(len(texts[s][t]) for s in range(table.stages))) * _LETTER + 6
        for t in range(table.clocks)
    ]
    height = 18 + (table.stages + table.has_sends) * _STAGE
    drawing = svg(_NAME + sum(widths) + 2, height, _entries(table, widths), head)
    html = block(title(head), scrolled(image(drawing, head)), faint(verdict))
    return Picture(html, f"{head}\n{columns(rows)}\n{verdict}")


def _verdict(table: Table) -> str:
    """Says that the table can be run and how long each stage works, or what is wrong with it."""
    try:
        validate(table)
    except IllegalTable as error:
        return f"it cannot be run: {error}"
    words = dict(
        zip(
            table.letters,
            (
                "forward",
                "input gradient" if table.split else "backward",
                "weight gradient",
            ),
            strict=False,
        )
    )
    words |= (
        {"G": "weights gathered", "R": "gradient reduced"} if table.has_sends else {}
    )
    pairs = (
        f"; {'+'.join(table.letters[:2])} a pair, both at once" if table.paired else ""
    )
    return f"legal; {', '.join(f'{letter} {word}' for letter, word in words.items())}{pairs}"


def _entries(table: Table, widths: list[float]) -> Iterator[str]:
    x = np.concatenate([[0.0], np.cumsum(widths)]) + _NAME
    yield small(0, 11, "clock")
    for clock in range(table.clocks):
        yield f'<text x="{(x[clock] + x[clock + 1]) / 2:.0f}" y="11" text-anchor="middle" font-size="9">{clock}</text>'
    for stage in range(table.stages):
        y = 16 + stage * _STAGE
        yield f'<text x="0" y="{y + 15}">stage {stage}</text>'
        for clock in range(table.clocks):
            wide = widths[clock] - 2
            yield (
                f'<rect x="{x[clock]:.1f}" y="{y}" width="{wide:.1f}" height="{_STAGE - 2}" rx="2" fill="{RULE}" '
                'fill-opacity="0.12"/>'
            )
            yield from _ops(table, table.cells[clock, stage], x[clock], wide, y)
    y = 16 + table.stages * _STAGE
    if table.has_sends:
        yield f'<text x="0" y="{y + 15}">over data</text>'
    for kind, chunk in np.argwhere(table.sends >= 0).tolist():
        left = x[table.sends[kind, chunk]] + 2
        yield f'<text x="{left:.1f}" y="{y + 14}" font-size="10" fill="{_SENT[kind][0]}">{SENT[kind]}{chunk}</text>'


def _ops(
    table: Table,
    cell: np.ndarray,
    left: float,
    wide: float,
    y: int,
) -> Iterator[str]:
    """Yields the ops of a cell, each with its part of the width, in the order in which the stage runs them."""
    done = [slot for slot in range(len(table.letters)) if cell[slot, 0] >= 0]
    for i, slot in enumerate(done):
        microbatch, chunk = cell[slot].tolist()
        part = wide / len(done)
        x = left + i * wide / len(done)
        word = f"{table.letters[slot]}{table.entry_text(microbatch, chunk)}"
        yield (
            f'<rect x="{x:.1f}" y="{y}" width="{part:.1f}" height="{_STAGE - 2}" rx="2" '
            f'fill="{_colour(slot, chunk, table.chunks)}"/>'
            f'<text x="{x + part / 2:.1f}" y="{y + 14}" text-anchor="middle" font-size="10" '
            f'fill="{INK}">{word}</text>'
        )


def _plain(time: float) -> str:
    return f"{time:.6g}"


def figures(timeline: Timeline, number: Callable[[float], str] = _plain) -> list[str]:
    """The figures under a picture, one sentence each; `number` writes a time."""
    table = timeline.table
    fullest = int(np.argmax(timeline.peak_in_flight))
    sizes = f"{_count(table.stages, 'stage')}, {_count(table.microbatches, 'microbatch', 'es')}"
    stashed = (
        "kept for the backward"
        if table.chunks == 1
        else f"of 1/{table.chunks} stage each kept for the backward"
    )
    return [
        f"{table.name}: {sizes}, {_count(table.chunks, 'chunk')} a stage, {timeline.execution} execution",
        f"makespan {number(timeline.makespan)}; idle {timeline.bubble_fraction:.1%} of the stages' time",
        f"peak in flight {_count(timeline.peak_in_flight[fullest], 'entr', 'ies', 'y')} {stashed}, on stage {fullest}",
    ]


def _count(number: int, word: str, many: str = "s", one: str = "") -> str:
    return f"{number} {word}{one if number == 1 else many}"


def _words(timeline: Timeline) -> dict[int, str]:
    backward = "input gradient (I)" if timeline.table.split else "backward (B)"
    words = {
        F: "forward (F)",
        B: backward,
        W: "weight gradient (W)",
        HEAD: "loss head (H)",
        OPTIMIZER: "optimizer (O)",
    }
    worked = set(timeline.kind[timeline.end > timeline.start].tolist())
    return {kind: word for kind, word in words.items() if kind in worked}


def _label(timeline: Timeline, i: int) -> str:
    if timeline.kind[i] == OPTIMIZER:
        return ""
    return timeline.table.entry_text(timeline.microbatch[i], timeline.chunk[i])


def _usual(timeline: Timeline) -> float:
    """Length that nearly all cells have at least."""
    took = (timeline.end - timeline.start)[timeline.kind < HEAD]
    if (took > 0).any():
        return float(np.quantile(took[took > 0], 0.1))
    return timeline.makespan or 1.0


def gantt_svg(
    timeline: Timeline, number: Callable[[float], str] = _plain, headed: bool = True
) -> str:
    """An SVG: a row for each stage, idle time hatched, beneath it how many entries are in flight, and the axis of time.

    It is as wide as it takes to read the microbatch in most cells. Pointing at a cell shows its figures. `number`
    writes a time with its unit; without one, times are in that of the durations. `headed`: with its `figures` and its
    legend at the top.
    """
    table = timeline.table
    makespan = timeline.makespan or 1.0
    letters = len(str(table.microbatches - 1)) + (2 if table.chunks > 1 else 0)
    plot = float(np.clip(makespan / _usual(timeline) * (4 + 6 * letters), 700, 12000))
    scale = plot / makespan
    width = _LEFT + plot + _RIGHT
    legend, end = keys(_colours(timeline), 12, 52, width - 24) if headed else ([], 0)
    top = int(end) + 6
    bottom = top + table.stages * _ROW
    height = bottom + 60 + _CURVE + 44

    out = [
        '<defs><pattern id="idle" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        f'<line x1="0" y1="0" x2="0" y2="6" stroke="{RULE}" stroke-opacity="0.5" stroke-width="1.5"/></pattern></defs>'
    ]
    head, *rest = figures(timeline, number)
    if headed:
        out.append(
            f'<text x="12" y="22" font-size="15" font-weight="600">{escape(head)}</text>'
        )
        out.append(f'<text x="12" y="42">{escape("; ".join(rest))}</text>')
    out += legend
    for stage in range(table.stages):
        y = top + stage * _ROW
        out.append(
            f'<text x="{_LEFT - 8}" y="{y + 17}" text-anchor="end">stage {stage}</text>'
        )
        out.append(
            f'<rect x="{_LEFT}" y="{y}" width="{plot:.2f}" height="{_CELL}" fill="url(#idle)"/>'
        )
        idle = f"idle {timeline.idle[stage] / makespan:.1%}, peak {timeline.peak_in_flight[stage]}"
        out.append(f'<text x="{_LEFT + plot + 8:.2f}" y="{y + 17}">{idle}</text>')
    out += _cells(timeline, scale, top)
    out += _transfers(timeline, scale, top)
    out += _curve(timeline, scale, bottom + 50)
    out += _times(makespan, scale, bottom + 50 + _CURVE, number)
    return svg(width, height, ["\n".join(["", *out, ""])], head, size=12)


def legend_svg(timeline: Timeline) -> str:
    """The legend of a picture that is not `headed`, as an SVG of its own, which stays where it is while the picture
    scrolls.
    """
    legend, end = keys(_colours(timeline))
    return chart(end, legend, "the colours of the schedule", size=12)


def _colours(timeline: Timeline) -> list[tuple[str, str]]:
    """Each colour of a picture, and what it stands for."""
    colours = [
        *((_FILL[kind], word) for kind, word in _words(timeline).items()),
        ("url(#idle)", "idle"),
    ]
    colours += [(RULE, "messages under the other half of a pair")] * bool(
        timeline.hidden.any()
    )
    colours += [
        _SENT[kind] for kind in sorted({sent.kind for sent in timeline.transfers})
    ]
    colours += [(INK, "critical path")] * (timeline.execution == "asynchronous")
    colours += [(mixed(SKY, "#ffffff", 0.5), "paler: an earlier chunk")] * (
        timeline.table.chunks > 1
    )
    return colours


def _times(
    makespan: float, scale: float, top: int, number: Callable[[float], str]
) -> Iterator[str]:
    """The axis of time, and its name."""
    for time in ticks(0.0, makespan, parts=max(makespan * scale / 100, 4)):
        if time <= makespan:
            x = _LEFT + time * scale
            yield f'<path d="M{x:.1f} {top}v4" stroke="{RULE}"/>'
            yield f'<text x="{x:.1f}" y="{top + 18}" text-anchor="middle">{number(time)}</text>'
    unit = ", in the unit of the durations" if number is _plain else ""
    yield f'<text x="{_LEFT}" y="{top + 36}">time{unit}</text>'


def _cells(timeline: Timeline, scale: float, top: int) -> Iterator[str]:
    """A rectangle for each span, the first chunks lighter than the last."""
    critical = (
        set(timeline.critical_path()) if timeline.execution == "asynchronous" else set()
    )
    words = _words(timeline)
    chunks = timeline.table.chunks
    yield f'<g text-anchor="middle" font-size="10" stroke="{INK}" stroke-width="0">'
    for i in range(len(timeline.kind)):
        kind = int(timeline.kind[i])
        stage = int(timeline.stage[i])
        chunk = int(timeline.chunk[i])
        start = float(timeline.start[i])
        end = float(timeline.end[i])
        x = _LEFT + start * scale
        y = top + stage * _ROW
        w = (end - start) * scale
        if w <= 0:
            continue
        label = _label(timeline, i)
        place = f"stage {stage}, clock {timeline.clock[i]}: {start:.6g} to {end:.6g}"
        yield (
            f'<g><title>{words[kind]} {label}, {place}</title><rect x="{x + 0.25:.2f}" y="{y}" '
            f'width="{max(w - 0.5, 0.3):.2f}" '
            f'height="{_CELL}" rx="1.5" fill="{_colour(kind, chunk, chunks)}"/>'
        )
        if label and w >= 3 + 5.6 * len(label):
            yield f'<text x="{x + w / 2:.2f}" y="{y + 17}" fill="{INK}">{label}</text>'
        if hidden := float(timeline.hidden[i]):
            # Those of F travel under B, which comes next, those of B under F, which came before.
            left = _LEFT + (end if kind == F else start - hidden) * scale
            yield f'<rect x="{left:.2f}" y="{y + _CELL}" width="{hidden * scale:.2f}" height="3" fill="{RULE}"/>'
        if i in critical:
            yield (
                f'<rect x="{x + 0.25:.2f}" y="{y + _CELL - 3}" width="{max(w - 0.5, 0.3):.2f}" height="3" '
                f'fill="{INK}"/>'
            )
        yield "</g>"
    yield "</g>"


def _transfers(timeline: Timeline, scale: float, top: int) -> Iterator[str]:
    """A bar under a stage's row for each collective over data that travels beside it."""
    for kind, chunk, stage, start, end in timeline.transfers:
        x = _LEFT + start * scale
        y = top + stage * _ROW + _CELL
        w = (end - start) * scale
        colour, words = _SENT[kind]
        yield (
            f"<g><title>{words} {chunk}, stage {stage}: {start:.6g} to {end:.6g}</title>"
            f'<rect x="{x:.2f}" y="{y}" width="{max(w, 0.3):.2f}" height="3" fill="{colour}"/></g>'
        )


def _colour(kind: int, chunk: int, chunks: int) -> str:
    """The colour of a kind of work: of the first chunk mixed with white, of the last and of what is of none (-1) as it
    is.
    """
    return mixed(
        _FILL[kind],
        "#ffffff",
        0.5 * (chunks - 1 - chunk) / (chunks - 1) if chunks > 1 and chunk >= 0 else 0,
    )


def _curve(timeline: Timeline, scale: float, top: int) -> Iterator[str]:
    """Entries in flight over time: a step line for each stage, from blue (the first) to orange (the last)."""
    highest = int(timeline.peak_in_flight.max())
    yield f'<text x="{_LEFT}" y="{top - 8}">in flight: entries kept for the backward, by stage</text>'
    end = _LEFT + timeline.makespan * scale
    for entries in sorted({0, (highest + 1) // 2, highest}):
        level = top + _CURVE * (1 - entries / highest)
        yield f'<path d="M{_LEFT} {level:.2f}H{end:.2f}" stroke="{RULE}" stroke-opacity="0.4"/>'
        yield f'<text x="{_LEFT - 8}" y="{level + 4:.2f}" text-anchor="end">{entries}</text>'
    stages = timeline.table.stages
    for stage in range(stages):
        times, counts = timeline.count_in_flight(stage)
        across = _LEFT + times * scale
        down = top + _CURVE * (1 - counts / highest)
        steps = "".join(
            f"H{x:.2f}V{y:.2f}"
            for x, y in zip(across.tolist(), down.tolist(), strict=True)
        )
        hue = f"hsl({stage_hue(stage, stages):.0f}, 65%, 52%)"
        yield f'<path d="M{_LEFT} {top + _CURVE}{steps}" fill="none" stroke="{hue}" stroke-width="1.5">'
        yield f"<title>stage {stage}, at most {timeline.peak_in_flight[stage]}</title></path>"
        if stages <= 8 or stage in (0, stages - 1):
            y = top + 12 + 14 * (stage if stages <= 8 else stage > 0)
            yield (
                f'<path d="M{end + 8:.2f} {y - 4}h14" stroke="{hue}" stroke-width="3"/><text x="{end + 28:.2f}" '
                f'y="{y}">stage {stage}</text>'
            )


def gantt_text(timeline: Timeline, width: int = 120) -> str:
    """Draws the table for a terminal, `width` characters wide: a row for each stage, '.' where it is idle.

    A cell is its letter and microbatch where there is room, otherwise its letter; '-' fills it up. Where there is too
    much to tell cells apart, beginning and end are shown, and the middle is left out.
    """
    rows = [f"stage {stage} " for stage in range(timeline.table.stages)]
    left = max(len(row) for row in [*rows, "in flight "])
    columns = max(width - left, 10)
    scale = max(columns, timeline.makespan / _usual(timeline) * 3) / (
        timeline.makespan or 1.0
    )
    letters = {F: "F", B: timeline.table.letters[1], W: "W", HEAD: "H", OPTIMIZER: "O"}
    lines = [["."] * round(timeline.makespan * scale) for _ in rows]
    for i in np.argsort(timeline.start, kind="stable").tolist():
        first = round(timeline.start[i] * scale)
        end = round(timeline.end[i] * scale)
        letter = letters[int(timeline.kind[i])]
        word = letter + _label(timeline, i)
        if len(word) > end - first:
            word = letter
        lines[int(timeline.stage[i])][first:end] = word[: end - first].ljust(
            end - first, "-"
        )
    rows += ["over data "] if timeline.transfers else []
    lines += [["."] * len(lines[0])] if timeline.transfers else []
    for kind, chunk, stage, start, end in timeline.transfers:
        first = round(start * scale)
        behind = round(end * scale)
        if stage == 0:
            lines[-1][first:behind] = f"{SENT[kind]}{chunk}"[: behind - first].ljust(
                behind - first, "-"
            )
    out = [
        row.ljust(left) + _fit("".join(line), columns)
        for row, line in zip(rows, lines, strict=True)
    ]
    out.append(
        "in flight ".ljust(left) + _fit(_sparkline(timeline, len(lines[0])), columns)
    )
    words = [
        *_words(timeline).values(),
        *(
            _SENT[kind][1]
            for kind in sorted({sent.kind for sent in timeline.transfers})
        ),
    ]
    return (
        "\n".join([*out, "", *figures(timeline), "; ".join(words) + "; . idle"]) + "\n"
    )


def _fit(line: str, columns: int) -> str:
    half = (columns - 3) // 2
    if len(line) <= columns:
        return line
    return f"{line[: columns - 3 - half]} … {line[-half:]}"


def _sparkline(timeline: Timeline, columns: int) -> str:
    """Entries in flight on the fullest stage: the most in each column, in eighths of the peak."""
    fullest = int(np.argmax(timeline.peak_in_flight))
    times, counts = timeline.count_in_flight(fullest)
    edges = np.linspace(0, timeline.makespan, columns + 1)
    first = np.searchsorted(
        times, edges[:-1], side="right"
    )  # number of events up to where a column begins
    end = np.searchsorted(times, edges[1:], side="left")  # and before it ends
    bars = " ▁▂▃▄▅▆▇█"
    counts = np.append(0, counts)
    most = [int(counts[a : b + 1].max()) for a, b in zip(first, end, strict=True)]
    return "".join(bars[int(np.ceil(8 * count / counts.max()))] for count in most)
