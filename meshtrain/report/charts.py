"""The charts of a report's page: what the rows say of steps, and the samples of all processes, each over the steps of
the run.

Curves of any number of points are small SVG: each bin keeps the least, the greatest and the mean, so that no spike is
lost.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import NamedTuple

import numpy as np

from meshtrain import units
from meshtrain.config import Config
from meshtrain.draw import svg
from meshtrain.draw.svg import FAINT, FIRST, GRID, GROUND, PALE, SECOND, WIDTH
from meshtrain.report.facts import RunFacts
from meshtrain.report.rows import Columns

# of a chart; margins for numbers
HEIGHT = 200
LEFT = 52
RIGHT = 8
TOP = 22
BOTTOM = 38
# Times what lies between the first and the last tenth of values, above these, is far
FAR = 6
BINS = 120  # of a curve over the width of a chart
SMOOTH = 50  # a smoothed curve is of means of so many parts of a run
# names of curves that are not of values
LIMIT = "limit"
DEVIATION = "deviation"


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


class MetricChart(NamedTuple):
    """A chart: its title, the metric, how its numbers are written, and whether its axis begins at 0.

    The title names the axis too, with the unit of numbers that are written without.
    """

    title: str
    metric: str
    number: Callable[[float], str]
    zero: bool = True
    dots: str = ""  # a second metric, drawn as dots
    smooth: bool = False  # a mean of neighbours before it
    spikes: bool = False  # a few values may be far beyond all others
    # A second metric: how far to either side of this one pale lines are
    deviation: str = ""
    log: bool = False  # the axis has powers of 10
    limit: Callable[[Config], float] | None = None  # a line


def _plain(value: float) -> str:
    return f"{value:.4g}"


def _short(value: float) -> str:
    return units.count(value) if abs(value) >= 1000 else f"{value:.4g}"


def _percent(value: float) -> str:
    return f"{value:.3g}%" if (value := value * 100) < 10 else f"{value:.0f}%"


def _seconds(value: float) -> str:
    return "0" if value == 0 else units.duration(value)


def _bytes(value: float) -> str:
    return "0" if value == 0 else units.size(value)


OF_STEPS = (
    MetricChart(
        "Loss, nats", "loss", _plain, zero=False, dots="eval_loss", smooth=True
    ),
    MetricChart("Learning rate", "learning_rate", _plain),
    MetricChart("Gradient norm", "grad_norm", _plain),
    MetricChart("Seconds a step", "step_seconds", _seconds, spikes=True),
    MetricChart("Tokens a second", "tokens_per_second", _short),
    MetricChart("MFU", "mfu", _percent),
    MetricChart(
        "Reward, pale: a deviation to either side",
        "rl/reward",
        _plain,
        deviation="rl/reward_std",
    ),
    MetricChart(
        "Gap between drawing and training, nats",
        "rl/gap_max",
        _plain,
        zero=False,
        log=True,
        limit=lambda config: config.rl.gap_limit,
    ),
    MetricChart("Distance from the teacher, nats a token", "rl/teacher_kl", _plain),
    MetricChart("Length of an answer, tokens", "rl/answer_tokens", _plain),
    MetricChart("Answers that ended", "rl/ended", _percent),
    MetricChart("Entropy of answers, nats a token", "rl/entropy", _plain),
    MetricChart("Groups with one reward for all answers", "rl/flat_groups", _percent),
    MetricChart("Tokens with a clipped ratio", "rl/clipped", _percent),
    MetricChart("Rewards that failed", "rl/rewards_failed", _short),
    MetricChart("Waiting for data", "data_wait_seconds", _seconds, spikes=True),
    MetricChart("Loss scale", "loss_scale", _short),
    MetricChart("Fullest expert over the mean", "expert_load", _plain),
    MetricChart("Entropy of the routers, nats", "router_entropy", _plain),
    MetricChart("Rows dropped", "dropped_rows", _short),
    MetricChart("Rounds of rows to their experts", "expert_rounds", _plain),
    MetricChart("Memory of a device", "memory_in_use_bytes", _bytes),
)
OF_PROCESSES = (
    MetricChart("CPU of the machines", "machine_cpu_ratio", _percent),
    MetricChart("CPU pressure", "pressure_cpu_ratio", _percent),
    MetricChart("Memory of a process", "process_rss_bytes", _bytes),
    MetricChart("Memory of the devices", "device_memory_used_bytes", _bytes),
    MetricChart("Load of the devices", "device_load_ratio", _percent),
    MetricChart(
        "Temperature of the devices, °C",
        "device_temperature_celsius",
        _plain,
        zero=False,
    ),
    MetricChart("Power of the devices, W", "device_power_watts", _plain),
)


def figures(facts: Sequence[RunFacts]) -> list[tuple[str, str, str]]:
    """Returns (title, range of its values, drawing) of each chart for which a run has values; two runs share each,
    FIRST and SECOND.
    """
    runs = list(zip(facts, (FIRST, SECOND), strict=False))
    charts = []
    for spec in OF_STEPS:
        curves = [
            curve
            for run, colour in runs
            for curve in _curves(
                spec, run, colour, SECOND if len(facts) == 1 else colour
            )
        ]
        charts.append(_figure(spec, curves))
    for spec in OF_PROCESSES:
        curves = [
            Curve("", *_sampled(run.samples.values(), spec.metric), colour)
            for run, colour in runs
        ]
        charts.append(_figure(spec, curves))
    return [drawn for drawn in charts if drawn is not None]


def _curves(
    spec: MetricChart, run: RunFacts, colour: str, dots: str
) -> Iterator[Curve]:
    steps = run.steps["step"]
    values = run.steps[spec.metric]
    known = np.isfinite(values)
    # Means of neighbours, unless values are too few for them.
    window = int(known.sum()) // SMOOTH if spec.smooth else 0
    yield Curve("training", steps, values, colour, pale=window > 1)
    if window > 1:
        yield Curve("smoothed", steps[known], smoothed(values[known], window), colour)
    if spec.dots and run.steps.known(spec.dots).size:
        yield Curve("validation text", steps, run.steps[spec.dots], dots, dots=True)
    if spec.deviation:
        for side in (-1, 1):
            beside = values + side * run.steps[spec.deviation]
            yield Curve(DEVIATION, steps, beside, colour, pale=True)
    if spec.limit and run.config and known.any():
        yield Curve(
            LIMIT, steps[known][[0, -1]], np.full(2, spec.limit(run.config)), SECOND
        )


def _figure(spec: MetricChart, curves: Sequence[Curve]) -> tuple[str, str, str] | None:
    number = spec.number
    base = 2 if number is _bytes else 10
    if spec.log:
        curves = [replace(c, y=_exponents(c.y)) for c in curves]
        number = lambda exponent: spec.number(10.0**exponent)
        base = 1
    lines, dotted = (
        [_finite(c) for c in curves if c.dots is dots] for dots in (False, True)
    )
    values = np.concatenate([c.y for c in lines if c.name not in (LIMIT, DEVIATION)])
    # A curve of zeros says no more than its absence.
    if not (values.size if spec.log else values.any()):
        return None
    low = values.min()
    high = values.max()
    about = (
        f"{number(low)} to {number(high)}" if high > low else f"always {number(high)}"
    )
    if len(dots := [c for c in dotted if c.y.size]) == 1:
        lowest = int(np.argmin(dots[0].y))
        about += f"; of {dots[0].name} lowest {dots[0].y[lowest]:.4f}, step {dots[0].x[lowest]:,.0f}"
    if any(curve.name == "smoothed" for curve in lines):
        about += f"; smoothed: each point is the mean of about 1/{SMOOTH} of the run"
    return (
        spec.title,
        about,
        chart(spec.title, curves, number, spec.zero, base, spec.spikes),
    )


def _exponents(values: np.ndarray) -> np.ndarray:
    """Returns the decimal logarithms of values; NaN of those that have none."""
    return np.log10(np.where(values > 0, values, math.nan))


def _sampled(samples: Iterable[Columns], metric: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of a metric of all processes and of all of its labels, one after the other."""
    xs = [np.empty(0)]
    ys = [np.empty(0)]
    for columns in samples:
        for name in columns.names(metric):
            if name == metric or name.startswith(f"{metric}."):
                xs.append(columns["step"])
                ys.append(columns[name])
    return np.concatenate(xs), np.concatenate(ys)


def chart(
    name: str,
    curves: Sequence[Curve],
    number: Callable[[float], str],
    zero: bool = False,
    base: int = 10,
    spikes: bool = False,
) -> str:
    """Draws curves over steps on common axes; `name` is that of their values' axis, `number` writes a value, `zero`
    begins the axis there.

    Nothing if there is no point.

    `base`: 2 for bytes, whose round numbers are powers of 2; 1 for exponents. `spikes`: a few values far beyond all
    others do not count for the axis.

    The axis holds all but the last thousandth of the values on either side: one step that took a minute would flatten
    all others. Values beyond the axis are drawn at its edge.
    """
    drawn = [_finite(curve) for curve in curves]
    drawn = [curve for curve in drawn if curve.x.size]
    if not drawn:
        return ""
    first, last = (
        min(float(c.x.min()) for c in drawn),
        max(float(c.x.max()) for c in drawn),
    )
    low, high = _range([c.y for c in drawn], zero, spikes)
    ticks = list(svg.ticks(low, high, base))
    low, high = min(low, ticks[0]), max(high, ticks[-1])
    wide = WIDTH - LEFT - RIGHT
    tall = HEIGHT - TOP - BOTTOM

    def place(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        across = (x - first) / ((last - first) or 1.0) * wide
        return LEFT + across, TOP + tall * (1 - np.clip((y - low) / (high - low), 0, 1))

    body = [_axes(ticks, low, high, tall, number), *_steps(first, last, wide)]
    body += [
        svg.small(0, 11, name),
        svg.small(WIDTH - RIGHT, HEIGHT - 4, "step", "end"),
    ]
    for curve in drawn:
        body += _dots(curve, place) if curve.dots else _band(curve, first, last, place)
    # Of two runs each kind has both colours, and what they stand for is said above all charts.
    if len({curve.name for curve in drawn}) == len(drawn) > 1:
        body.append(_legend(drawn))
    return svg.chart(HEIGHT, body, f"{name.partition(', ')[0].lower()} over steps")


def _finite(curve: Curve) -> Curve:
    known = np.isfinite(curve.x) & np.isfinite(curve.y)
    return replace(curve, x=curve.x[known], y=curve.y[known])


def _range(
    values: Sequence[np.ndarray], zero: bool, spikes: bool
) -> tuple[float, float]:
    low = min(float(np.quantile(v, 0.001)) for v in values)
    high = max(float(np.quantile(v, 0.999)) for v in values)
    if spikes:
        usual = [np.quantile(v, (0.1, 0.9)) for v in values]
        high = min(high, max(float(q90 + FAR * (q90 - q10)) for q10, q90 in usual))
    if zero:
        low = min(low, 0.0)
    if high - low <= 1e-9 * max(abs(high), abs(low)):
        margin = abs(high) * 0.1 or 1.0
        low = low if zero and low == 0 < high else low - margin
        high = high + margin
    return low, high


def _axes(
    ticks: Sequence[float],
    low: float,
    high: float,
    tall: float,
    number: Callable[[float], str],
) -> str:
    out = []
    for tick in ticks:
        y = TOP + tall * (1 - (tick - low) / (high - low))
        out.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="{GRID}"/>')
        out.append(
            f'<text x="{LEFT - 6}" y="{y + 4:.1f}">{escape(number(tick))}</text>'
        )
    return f'<g text-anchor="end" font-size="11" fill="{FAINT}">{"".join(out)}</g>'


def _steps(first: float, last: float, wide: float) -> Iterator[str]:
    places = [(first, "start", 0.0)]
    if last - first >= 2:
        places.append((round((first + last) / 2), "middle", 0.5))
    if last > first:
        places.append((last, "end", 1.0))
    for step, anchor, share in places:
        yield svg.small(
            LEFT + share * wide, HEIGHT - BOTTOM + 17, f"{step:,.0f}", anchor
        )


def _dots(curve: Curve, place: Callable) -> Iterator[str]:
    every = max(1, math.ceil(curve.x.size / BINS))
    xs, ys = place(curve.x[::every], curve.y[::every])
    for x, y in zip(xs, ys, strict=True):
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6" fill="{curve.colour}"/>'
    lowest = int(np.argmin(curve.y))
    (x,), (y,) = place(curve.x[lowest : lowest + 1], curve.y[lowest : lowest + 1])
    yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="none" stroke="{curve.colour}" stroke-width="1.6"/>'


def smoothed(values: np.ndarray, window: int) -> np.ndarray:
    """Returns the moving mean of values [n] over `window` neighbours, fewer at the ends."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    places = np.arange(values.size)
    reach = np.minimum(np.minimum(places, places[::-1]), window // 2)
    return (sums[places + reach + 1] - sums[places - reach]) / (2 * reach + 1)


def binned(
    x: np.ndarray,
    y: np.ndarray,
    first: float,
    last: float,
    bins: int = BINS,
) -> tuple[np.ndarray, ...]:
    """Centre, least, mean and greatest of each bin of `x` between `first` and `last` that holds a value."""
    place = np.clip(
        ((x - first) / ((last - first) or 1.0) * bins).astype(int), 0, bins - 1
    )
    counts = np.bincount(place, minlength=bins)
    least = np.full(bins, np.inf)
    greatest = np.full(bins, -np.inf)
    np.minimum.at(least, place, y)
    np.maximum.at(greatest, place, y)
    there = counts > 0
    sums = np.bincount(place, y, minlength=bins)
    centres = np.bincount(place, x, minlength=bins)
    return (
        centres[there] / counts[there],
        least[there],
        sums[there] / counts[there],
        greatest[there],
    )


def _band(curve: Curve, first: float, last: float, place: Callable) -> Iterator[str]:
    centre, least, mean, greatest = binned(curve.x, curve.y, first, last)
    if np.any(greatest > least):
        up = place(centre, greatest)
        down = place(centre[::-1], least[::-1])
        outline = _path(
            np.concatenate([up[0], down[0]]), np.concatenate([up[1], down[1]])
        )
        yield f'<path d="{outline}z" fill="{curve.colour}" fill-opacity=".2"/>'
    xs, ys = place(centre, mean)
    if xs.size == 1:
        yield f'<circle cx="{xs[0]:.1f}" cy="{ys[0]:.1f}" r="2.6" fill="{curve.colour}"/>'
    else:
        how = (
            'stroke-width="1" stroke-opacity=".4"'
            if curve.pale
            else 'stroke-width="1.6"'
        )
        yield f'<path d="{_path(xs, ys)}" fill="none" stroke="{curve.colour}" {how} stroke-linejoin="round"/>'


def _path(xs: np.ndarray, ys: np.ndarray) -> str:
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
    out = [
        f'<rect x="{x - 4:.0f}" y="{TOP}" width="{sum(widths) + 4:.0f}" height="18" fill="{GROUND}" fill-opacity=".8"/>'
    ]
    for curve, width in zip(curves, widths, strict=True):
        faint = ' fill-opacity=".4"' if curve.pale else ""
        out.append(
            f'<rect x="{x:.0f}" y="{TOP + 5}" width="9" height="9" rx="2" fill="{curve.colour}"{faint}/>'
        )
        out.append(
            f'<text x="{x + 13:.0f}" y="{TOP + 13}" font-size="12">{escape(curve.name)}</text>'
        )
        x += width
    return "".join(out)


class Row(NamedTuple):
    """A line of a figure: what it is of, its figures, and a bar: a share of the width, the planned one pale beneath
    it.
    """

    name: str
    figures: tuple[str, ...]
    bar: float
    colour: str = FIRST
    planned: float | None = None


def bars(rows: Sequence[Row], label: str) -> str:
    """Draws a line of text for each row, and its bar under it."""
    body: list[str] = []
    tall = 34 if all(row.planned is None for row in rows) else 42
    columns = svg.widths(row.figures for row in rows)
    for i, row in enumerate(rows):
        body += svg.bar_row(
            i * tall, row.name, row.figures, columns, 0.0, row.bar, row.colour
        )
        if row.planned is not None:
            width = row.planned * WIDTH
            body.append(
                f'<rect x="0" y="{i * tall + 29}" width="{width:.1f}" height="4" rx="2" fill="{PALE}"/>'
            )
    return svg.chart(tall * len(rows), body, label)


def stacked(rows: Sequence[Row], label: str) -> str:
    """Draws one bar of shares that sum to 1, and under it a line for each row with its two figures."""
    body = []
    x = 0.0
    for row in rows:
        place = f'x="{x:.2f}" y="2" width="{row.bar * WIDTH:.2f}" height="20"'
        body.append(
            f'<rect {place} fill="{row.colour}" stroke="{GROUND}" stroke-width=".7"/>'
        )
        x += row.bar * WIDTH
    y = 44
    columns = svg.widths(row.figures for row in rows)
    for row in rows:
        body.append(
            f'<rect x="0" y="{y - 10}" width="11" height="11" rx="2" fill="{row.colour}"/>'
        )
        body.append(f'<text x="18" y="{y}">{escape(row.name)}</text>')
        body.append(svg.figures(y, row.figures, columns))
        y += 22
    return svg.chart(y - 8, body, label)
