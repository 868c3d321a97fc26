"""What was measured, as one self-contained page: what is slow, each axis with its algorithms side by side, who talks how fast to whom.

No script and nothing fetched; for a phone and a desk.
"""

from collections.abc import Iterator
from html import escape

import numpy as np

from meshtrain.pictures import pairs
from meshtrain.plan.cluster.cluster import Cluster
from meshtrain.plan.page import STYLE
from meshtrain.plan.report import duration, size
from meshtrain.probe import judge, report
from meshtrain.probe.conventions import XLA
from meshtrain.probe.figures import Probe

MORE_STYLE = """
body { max-width: 1000px; } .table { overflow-x: auto; } th { color: #5b6675; font-weight: normal; } td { white-space: nowrap; }
td { vertical-align: middle; } tr.kind td { padding-top: 10px; font-weight: 600; }
.bar { display: block; height: .6em; border-radius: 2px; background: #3b6fb6; } .program .bar { background: #c2843a; }
.about { color: #5b6675; font-size: .85em; } pre { font-size: .75em; overflow-x: auto; }
"""
WIDEST = 90  # pixels of a bar


def page(probe: Probe, cluster: Cluster | None = None) -> str:
    """The page; with a described cluster also how much of it was reached."""
    title = f"{probe.size} × {probe.kind}"
    body = "\n".join(_body(probe, cluster, title))
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
    style = f"<style>{STYLE}{MORE_STYLE}</style>"
    return f'<!doctype html><html lang="en"><head>{head}<title>{escape(title)}</title>{style}</head><body>\n{body}\n</body></html>\n'


def _body(probe: Probe, cluster: Cluster | None, title: str) -> Iterator[str]:
    yield f"<h1>{escape(title)}</h1>"
    yield f"<p>{escape(report.about(probe, cluster)).replace(' x ', ' × ')}</p>"
    found = judge.findings(probe, cluster)
    yield from (f'<p class="bad">{escape(one.sentence[:1].upper() + one.sentence[1:])}</p>' for one in found)
    if not found:
        yield '<p class="good">No device and no link is slower than its like.</p>'
    for axis in dict.fromkeys(c.axis for c in probe.collectives):
        yield from _axis(probe, axis, cluster)
    if error := report.left_out(probe):
        yield f'<p class="about">{escape(error)}.</p>'
    if probe.pairs:
        yield "<h2>From device to device</h2>"
        yield f'<div class="wide">{pairs.drawing(probe)}</div>'
        if probe.size <= report.MOST_DEVICES:
            yield '<p class="about">Latency in µs, from row to column:</p>'
            yield _matrix(probe.pairs.latency * 1e6)


def _axis(probe: Probe, axis: str, cluster: Cluster | None) -> Iterator[str]:
    found = probe.over(axis)
    fastest = max(c.busbw for c in found)
    sizes = [size(t.nbytes) for t in found[0].timings]
    heads = ["", "latency", "busbw", "", *sizes, "left out", *(["score"] * bool(cluster))]
    yield f"<h2>Over {escape(axis)}, {found[0].devices} devices</h2>"
    yield '<div class="table"><table><tr>' + "".join(f'<th class="n">{head}</th>' for head in heads) + "</tr>"
    for c in found:
        own = c.algorithm == XLA
        cells = [
            duration(c.line.latency),
            report.per_second(c.busbw),
            f'<span class="bar" style="width:{max(WIDEST * c.busbw / fastest, 1):.0f}px"></span>',
            *(duration(t.seconds) for t in c.timings),
            f"{max(map(abs, c.left_out)):.0%}" if c.left_out else "–",
            *([f"{judge.score(cluster, probe, c):.2f}"] if cluster else []),
        ]
        row = f"<td>{escape(c.kind if own else c.algorithm)}</td>" + "".join(
            f'<td class="n">{cell}</td>' for cell in cells
        )
        yield f'<tr class="{"kind" if own else "program"}">{row}</tr>'
    yield "</table></div>"


def _matrix(numbers: np.ndarray) -> str:
    head = "<tr><th></th>" + "".join(f'<th class="n">{i}</th>' for i in range(len(numbers))) + "</tr>"
    rows = (
        f"<tr><th>{i}</th>" + "".join(f'<td class="n">{report.figure(x)}</td>' for x in row) + "</tr>"
        for i, row in enumerate(numbers.tolist())
    )
    return f'<div class="table"><table>{head}{"".join(rows)}</table></div>'
