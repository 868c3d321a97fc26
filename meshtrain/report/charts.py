"""Curves of any number of points as small SVG: in each bin the least, the greatest and the mean, so that no spike is lost."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape

import numpy as np

from meshtrain.plan.page import WIDTH, svg

HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 172, 52, 8, 8, 24  # of a chart; margins for numbers
FAR = 6  # times what lies between the first and the last tenth of values, above these, is far
BINS = 120  # of a curve over the width of a chart
FIRST, SECOND, THIRD = "#3b6fb6", "#c2843a", "#4f9d69"  # of curves: as the plan's page has them
GRID, FAINT = "#e8ebf0", "#5b6675"


@dataclass(frozen=True)
class Curve:
    """Values [n] at places [n]; what is not finite is left out.

    `dots`: drawn one by one, for few, the lowest with a ring about it. `pale`: in the background of another.
    """

    name: str
    x: np.ndarray
    y: np.ndarray
    colour: str
    dots: bool = False
    pale: bool = False


def chart(
    label: str,
    curves: Sequence[Curve],
    number: Callable[[float], str],
    zero: bool = False,
    base: int = 10,
    spikes: bool = False,
    marks: Sequence[tuple[float, str]] = (),
) -> str:
    """Curves over steps on common axes; `number` writes a value, `zero` begins the axis there. Nothing if there is no point.

    `base`: 2 for bytes, whose round numbers are powers of 2. `spikes`: a few values far beyond all others do not count for the axis.
    `marks`: steps with a line and a name each.

    The axis holds all but the last thousandth of the values on either side: one step that took a minute would flatten all others.
    What is beyond it is drawn at the edge.
    """
    drawn = [_finite(curve) for curve in curves]
    drawn = [curve for curve in drawn if curve.x.size]
    if not drawn:
        return ""
    first, last = min(float(c.x.min()) for c in drawn), max(float(c.x.max()) for c in drawn)
    low, high = _range([c.y for c in drawn], zero, spikes)
    ticks = list(_ticks(low, high, base))
    low, high = min(low, ticks[0]), max(high, ticks[-1])
    wide, tall = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def place(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        across = (x - first) / ((last - first) or 1.0) * wide
        return LEFT + across, TOP + tall * (1 - np.clip((y - low) / (high - low), 0, 1))

    body = [_axes(ticks, low, high, tall, number), *_steps(first, last, wide)]
    body += [_mark(LEFT + (x - first) / ((last - first) or 1.0) * wide, name) for x, name in marks if first < x < last]
    for curve in drawn:
        body += _dots(curve, place) if curve.dots else _band(curve, first, last, place)
    # Of two runs each kind has both colours, and what they stand for is said above all charts.
    if len({curve.name for curve in drawn}) == len(drawn) > 1:
        body.append(_legend(drawn))
    return svg(HEIGHT, body, label)


def _finite(curve: Curve) -> Curve:
    good = np.isfinite(curve.x) & np.isfinite(curve.y)
    return replace(curve, x=curve.x[good], y=curve.y[good])


def _range(values: Sequence[np.ndarray], zero: bool, spikes: bool) -> tuple[float, float]:
    low = min(float(np.quantile(v, 0.001)) for v in values)
    high = max(float(np.quantile(v, 0.999)) for v in values)
    if spikes:
        usual = [np.quantile(v, (0.1, 0.9)) for v in values]
        high = min(high, max(float(q90 + FAR * (q90 - q10)) for q10, q90 in usual))
    if zero:
        low = min(low, 0.0)
    if high - low <= 1e-9 * max(abs(high), abs(low)):
        margin = abs(high) * 0.1 or 1.0
        low, high = (low if zero and low == 0 < high else low - margin), high + margin
    return low, high


def _ticks(low: float, high: float, base: int) -> Iterator[float]:
    """Three to six round numbers that hold the range between them."""
    raw = (high - low) / 4
    if base == 2:
        step = 2.0 ** math.ceil(math.log2(raw))
    else:
        unit = 10.0 ** math.floor(math.log10(raw))
        step = next(factor * unit for factor in (1, 2, 2.5, 5, 10) if factor * unit >= raw * 0.999)
    first, last = math.floor(low / step + 1e-6), math.ceil(high / step - 1e-6)
    yield from (k * step for k in range(first, last + 1))


def _axes(ticks: Sequence[float], low: float, high: float, tall: float, number: Callable[[float], str]) -> str:
    out = []
    for tick in ticks:
        y = TOP + tall * (1 - (tick - low) / (high - low))
        out.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="{GRID}"/>')
        out.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}">{escape(number(tick))}</text>')
    return f'<g text-anchor="end" font-size="11" fill="{FAINT}">{"".join(out)}</g>'


def _steps(first: float, last: float, wide: float) -> Iterator[str]:
    y = HEIGHT - 7
    places = [(first, "start", 0.0), (last, "end", 1.0)] if last > first else [(first, "start", 0.0)]
    if last - first >= 2:
        places.insert(1, (round((first + last) / 2), "middle", 0.5))
    for step, anchor, share in places:
        yield f'<text x="{LEFT + share * wide:.0f}" y="{y}" text-anchor="{anchor}" font-size="11" fill="{FAINT}">{step:,.0f}</text>'


def _mark(x: float, name: str) -> str:
    line = f'<path d="M{x:.1f} {TOP}V{HEIGHT - BOTTOM}" stroke="{FAINT}" stroke-width=".7" stroke-dasharray="2 3"/>'
    # Below the curves, that mostly fall, and the names of these.
    return f'{line}<text x="{x + 3:.1f}" y="{HEIGHT - BOTTOM - 4}" font-size="10" fill="{FAINT}">{escape(name)}</text>'


def _dots(curve: Curve, place: Callable) -> Iterator[str]:
    every = max(1, math.ceil(curve.x.size / BINS))
    xs, ys = place(curve.x[::every], curve.y[::every])
    for x, y in zip(xs, ys, strict=True):
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6" fill="{curve.colour}"/>'
    lowest = int(np.argmin(curve.y))
    (x,), (y,) = place(curve.x[lowest : lowest + 1], curve.y[lowest : lowest + 1])
    yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="none" stroke="{curve.colour}" stroke-width="1.6"/>'


def smoothed(values: np.ndarray, window: int) -> np.ndarray:
    """Of each value [n] the mean of those about it, `window` of them, fewer at the ends."""
    sums, places = np.concatenate([[0.0], np.cumsum(values)]), np.arange(values.size)
    reach = np.minimum(np.minimum(places, places[::-1]), window // 2)
    return (sums[places + reach + 1] - sums[places - reach]) / (2 * reach + 1)


def binned(x: np.ndarray, y: np.ndarray, first: float, last: float, bins: int = BINS) -> tuple[np.ndarray, ...]:
    """Centre, least, mean and greatest of each bin of `x` between `first` and `last` that holds a value."""
    place = np.clip(((x - first) / ((last - first) or 1.0) * bins).astype(int), 0, bins - 1)
    counts = np.bincount(place, minlength=bins)
    least, greatest = np.full(bins, np.inf), np.full(bins, -np.inf)
    np.minimum.at(least, place, y)
    np.maximum.at(greatest, place, y)
    there = counts > 0
    sums, centres = np.bincount(place, y, minlength=bins), np.bincount(place, x, minlength=bins)
    return centres[there] / counts[there], least[there], sums[there] / counts[there], greatest[there]


def _band(curve: Curve, first: float, last: float, place: Callable) -> Iterator[str]:
    centre, least, mean, greatest = binned(curve.x, curve.y, first, last)
    if np.any(greatest > least):
        up, down = place(centre, greatest), place(centre[::-1], least[::-1])
        outline = _path(np.concatenate([up[0], down[0]]), np.concatenate([up[1], down[1]]))
        yield f'<path d="{outline}z" fill="{curve.colour}" fill-opacity=".2"/>'
    xs, ys = place(centre, mean)
    if xs.size == 1:
        yield f'<circle cx="{xs[0]:.1f}" cy="{ys[0]:.1f}" r="2.6" fill="{curve.colour}"/>'
    else:
        how = 'stroke-width="1" stroke-opacity=".4"' if curve.pale else 'stroke-width="1.6"'
        yield f'<path d="{_path(xs, ys)}" fill="none" stroke="{curve.colour}" {how} stroke-linejoin="round"/>'


def _path(xs: np.ndarray, ys: np.ndarray) -> str:
    """Through all points: the first where it is, each other from the one before, in tenths of a pixel."""
    tenths = np.stack([np.rint(xs * 10), np.rint(ys * 10)], axis=1).astype(int)
    moves = np.diff(tenths, axis=0)
    start = f"M{_tenth(tenths[0, 0])} {_tenth(tenths[0, 1])}l"
    return start + " ".join(f"{_tenth(dx)} {_tenth(dy)}" for dx, dy in moves.tolist())


def _tenth(n: int) -> str:
    return f"{n // 10}" if n % 10 == 0 else f"{n / 10:.1f}"


def _legend(curves: Sequence[Curve]) -> str:
    """Names in the upper right corner, on a ground that lets them be read over a curve."""
    widths = [7.0 * len(curve.name) + 22 for curve in curves]
    x = WIDTH - RIGHT - sum(widths)
    out = [f'<rect x="{x - 4:.0f}" y="{TOP}" width="{sum(widths) + 4:.0f}" height="18" fill="#fff" fill-opacity=".8"/>']
    for curve, width in zip(curves, widths, strict=True):
        faint = ' fill-opacity=".4"' if curve.pale else ""
        out.append(f'<rect x="{x:.0f}" y="{TOP + 5}" width="9" height="9" rx="2" fill="{curve.colour}"{faint}/>')
        out.append(f'<text x="{x + 13:.0f}" y="{TOP + 13}" font-size="12">{escape(curve.name)}</text>')
        x += width
    return "".join(out)


def stacked(shares: Sequence[tuple[str, str, float, str]], label: str) -> str:
    """One bar of shares that sum to 1, and under it (name, figure, share, colour) a line each."""
    body, x = [], 0.0
    for _, _, share, colour in shares:
        body.append(
            f'<rect x="{x:.2f}" y="2" width="{share * WIDTH:.2f}" height="20" fill="{colour}" stroke="#fff" stroke-width=".7"/>'
        )
        x += share * WIDTH
    y = 44
    for name, figure, share, colour in shares:
        body.append(f'<rect x="0" y="{y - 10}" width="11" height="11" rx="2" fill="{colour}"/>')
        body.append(f'<text x="18" y="{y}">{escape(name)}</text>')
        body.append(f'<text x="{WIDTH - 62}" y="{y}" text-anchor="end" fill="{FAINT}">{escape(figure)}</text>')
        body.append(f'<text x="{WIDTH}" y="{y}" text-anchor="end">{share:.1%}</text>')
        y += 22
    return svg(y - 8, body, label)
