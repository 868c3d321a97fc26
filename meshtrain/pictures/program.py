"""A program: what is trained, on which devices, what each holds between two steps, the schedule; and what a step
sends.
"""

from collections import Counter
from html import escape

from meshtrain.draw.picture import (
    Picture,
    bar,
    block,
    chip,
    code,
    columns,
    faint,
    table,
    title,
)
from meshtrain.draw.svg import AXES, GREY
from meshtrain.hlo import Collective, CompiledCollectives
from meshtrain.pictures import devices
from meshtrain.reader import Model
from meshtrain.schedule import draw
from meshtrain.step import Program
from meshtrain.units import count, size


def picture(thing: Program | Model | CompiledCollectives) -> Picture:
    if isinstance(thing, CompiledCollectives):
        return _collectives(thing)
    program, end = (
        (thing.program, f"; the weights of step {thing.step}")
        if isinstance(thing, Model)
        else (thing, "")
    )
    config = program.config
    mesh = devices.mesh_picture(program.mesh, program.config.parallel.context_strategy)
    head = (
        f"{config.model.family} with {count(program.layout.parameters)} parameters{end}"
    )
    facts = [
        f"ZeRO-{config.parallel.zero_stage}: {size(program.state_bytes)} of state a device",
        f"{config.train.global_batch_size} x {config.train.sequence_length} tokens a step, {config.precision.compute}",
        *(f"the {kind} is {name}" for kind, name in program.hooks.names.items()),
    ]
    parts = [title(head), mesh.html, faint("; ".join(facts))]
    lines = [head, mesh.text, "; ".join(facts)]
    if program.layout.table is not None:
        schedule = draw.picture(program.layout.table)
        parts.append(schedule.html)
        lines.append(schedule.text)
    return Picture(block(*parts), "\n".join(lines))


def _collectives(collectives: CompiledCollectives) -> Picture:
    """A row for each collective of one kind, size and place in the source, the largest first, without those of one
    device alone.

    Times are those of one step, on average over the devices.
    """
    alike = Counter(c for c in collectives if c.axes)
    rows = sorted(
        ((c.sent * c.times * n, c.times * n, c) for c, n in alike.items()),
        key=lambda row: -row[0],
    )
    most = (rows[0][0] if rows else 0.0) or 1.0
    heads = ("axis", "kind", "array", "times", "a device sends", "", "from")
    html = []
    text = [["axis", "kind", "array", "times", "a device sends", "from"]]
    for sent, times, c in rows:
        cells = [
            f"{c.kind}, backward" if c.backward else c.kind,
            f"{c.dtype} {size(c.bytes)}",
            f"{times:,.4g}",
            size(sent),
        ]
        html.append(
            (
                chip(c.axis),
                *cells,
                bar(sent / most, AXES.get(c.axes[0], GREY)),
                _source(c),
            )
        )
        text.append([c.axis, *cells, c.where])
    sums = [
        f"{axis} {size(sent)}"
        for axis, sent in sorted(collectives.traffic.items(), key=lambda item: -item[1])
    ]
    end = f"a device sends in a step: {', '.join(sums) or 'nothing'}"
    return Picture(block(table(heads, html), faint(end)), f"{columns(text)}\n{end}")


def _source(c: Collective) -> str:
    """The line, and beneath it the one that called it; pointing there shows all that led to it."""
    line, _, caller = c.where.partition(" ← ")
    below = f"<br/>{faint(f'← {caller}')}" if caller else ""
    return f'<span title="{escape(chr(10).join(map(str, c.lines)))}">{code(line)}{below}</span>'
