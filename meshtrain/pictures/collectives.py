"""What a step sends: a row for each collective of one kind, size and place in the source."""

from collections import Counter
from html import escape

from meshtrain.hlo import Collective, Collectives
from meshtrain.pictures.picture import AXES, GREY, Picture, bar, block, chip, code, columns, faint, table
from meshtrain.plan.report import size


def picture(found: Collectives) -> Picture:
    """The largest first, without those of one device alone. Times are those of one step, on average over the devices."""
    alike = Counter(c for c in found if c.axes)
    rows = sorted(((c.sent * c.times * n, c.times * n, c) for c, n in alike.items()), key=lambda row: -row[0])
    most = (rows[0][0] if rows else 0.0) or 1.0
    heads = ("axis", "kind", "array", "times", "a device sends", "", "from")
    html, text = [], [["axis", "kind", "array", "times", "a device sends", "from"]]
    for sent, times, c in rows:
        array = f"{c.dtype} {size(c.bytes)}"
        long = bar(sent / most, AXES.get(c.axes[0], GREY))
        kind = f"{c.kind}, backward" if c.backward else c.kind
        html.append((chip(c.axis), kind, array, f"{times:,.4g}", size(sent), long, _from(c)))
        text.append([c.axis, kind, array, f"{times:,.4g}", size(sent), c.where])
    sums = [f"{axis} {size(sent)}" for axis, sent in sorted(found.traffic.items(), key=lambda item: -item[1])]
    end = f"a device sends in a step: {', '.join(sums) or 'nothing'}"
    return Picture(block(table(heads, html), faint(end)), f"{columns(text)}\n{end}")


def _from(c: Collective) -> str:
    """The line, and beneath it the one that called it; pointing there shows all that led to it."""
    line, _, caller = c.where.partition(" ← ")
    below = f"<br/>{faint(f'← {caller}')}" if caller else ""
    return f'<span title="{escape(chr(10).join(map(str, c.lines)))}">{code(line)}{below}</span>'
