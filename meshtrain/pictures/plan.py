"""A plan: its headline, and the pictures of its page, ink on white whatever the notebook's theme."""

from html import escape

from meshtrain.pictures.picture import Picture, block, image, title
from meshtrain.plan.estimate import Plan
from meshtrain.plan.page import WIDTH, memory_bars, waterfall
from meshtrain.plan.report import headline


def picture(plan: Plan) -> Picture:
    text = headline(plan)
    first, *rest = text.splitlines()
    style = f"width:{WIDTH}px;background:#fff;padding:8px;display:inline-block"
    drawn = [("each device holds", memory_bars(plan)), ("a step takes", waterfall(plan))]
    cells = [
        f'<td style="vertical-align:top;text-align:left">{title(what)}<br/>{image(svg, what, style)}</td>'
        for what, svg in drawn
    ]
    lines = "".join(f"<div>{escape(line)}</div>" for line in rest)
    return Picture(block(title(first), lines, f"<table><tr>{''.join(cells)}</tr></table>"), text)
