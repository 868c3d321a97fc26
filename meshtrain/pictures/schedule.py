"""A schedule as its table, tick by tick, and a simulated one as a Gantt chart."""

from collections.abc import Iterator

import numpy as np

from meshtrain.pictures.picture import Picture, block, columns, faint, image, svg, title
from meshtrain.schedule.draw import GREY, INK, figures, fill, gantt_svg, gantt_text
from meshtrain.schedule.simulate import Timeline
from meshtrain.schedule.table import IllegalTable, Table
from meshtrain.schedule.validate import validate

MOST_CELLS = 4000  # stages x ticks that are drawn
_ROW, _LETTER, _LEFT = 22, 6.5, 58


def picture(schedule: Table | Timeline) -> Picture:
    if isinstance(schedule, Timeline):
        drawn = image(gantt_svg(schedule), figures(schedule)[0])
        return Picture(f'<div style="overflow-x:auto">{drawn}</div>', gantt_text(schedule))
    return _table(schedule)


def _table(table: Table) -> Picture:
    """A row a stage, a column a tick, and whether it can be run."""
    chunks = f", {table.chunks} chunks a stage" if table.chunks > 1 else ""
    head = f"{table.name}: {table.stages} stages, {table.microbatches} microbatches{chunks}, {table.ticks} ticks"
    verdict = _verdict(table)
    if table.stages * table.ticks > MOST_CELLS:
        return Picture(block(title(head), faint(verdict)), f"{head}\n{verdict}")
    texts = [[table.cell_text(tick, stage) for tick in range(table.ticks)] for stage in range(table.stages)]
    ticks = ["tick", *map(str, range(table.ticks))]
    rows = [ticks, *([f"stage {stage}", *cells] for stage, cells in enumerate(texts))]
    widths = [max(3, *(len(texts[s][t]) for s in range(table.stages))) * _LETTER + 6 for t in range(table.ticks)]
    drawn = svg(_LEFT + sum(widths) + 2, 18 + table.stages * _ROW, _cells(table, widths), head)
    return Picture(
        block(title(head), f'<div style="overflow-x:auto">{drawn}</div>', faint(verdict)),
        f"{head}\n{columns(rows)}\n{verdict}",
    )


def _verdict(table: Table) -> str:
    """Whether the table can be run, and how long each stage works; or what is wrong with it."""
    try:
        validate(table)
    except IllegalTable as error:
        return f"it cannot be run: {error}"
    words = dict(zip(table.letters, ("forward", "input gradient" if table.split else "backward", "weight gradient"), strict=False))  # fmt: skip
    return f"legal; {', '.join(f'{letter} {word}' for letter, word in words.items())}"


def _cells(table: Table, widths: list[float]) -> Iterator[str]:
    x = np.concatenate([[0.0], np.cumsum(widths)]) + _LEFT
    for tick in range(table.ticks):
        yield f'<text x="{(x[tick] + x[tick + 1]) / 2:.0f}" y="11" text-anchor="middle" font-size="9">{tick}</text>'
    for stage in range(table.stages):
        y = 16 + stage * _ROW
        yield f'<text x="0" y="{y + 15}">stage {stage}</text>'
        for tick in range(table.ticks):
            wide = widths[tick] - 2
            yield f'<rect x="{x[tick]:.1f}" y="{y}" width="{wide:.1f}" height="{_ROW - 2}" rx="2" fill="{GREY}" fill-opacity="0.12"/>'
            # in the order in which the stage does them
            done = [slot for slot in range(len(table.letters)) if table.cells[tick, stage, slot, 0] >= 0]
            for i, slot in enumerate(done):
                microbatch, chunk = table.cells[tick, stage, slot].tolist()
                part, left = wide / len(done), x[tick] + i * wide / len(done)
                word = f"{table.letters[slot]}{table.entry_text(microbatch, chunk)}"
                yield (
                    f'<rect x="{left:.1f}" y="{y}" width="{part:.1f}" height="{_ROW - 2}" rx="2" fill="{fill(slot, chunk, table.chunks)}"/>'
                    f'<text x="{left + part / 2:.1f}" y="{y + 14}" text-anchor="middle" font-size="10" fill="{INK}">{word}</text>'
                )
