"""Which curves a report has: what the rows say of steps, and the samples of all processes, each over the steps of the run."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from meshtrain.plan import report
from meshtrain.report.charts import FIRST, SECOND, Curve, chart, smoothed
from meshtrain.report.facts import Facts
from meshtrain.report.rows import Columns

SMOOTH = 50  # a smoothed curve is of means of so many parts of a run
MOST_EPOCHS = 10  # that are marked


class Wanted(NamedTuple):
    """A chart: its title, the metric, how its numbers are written, and whether its axis begins at 0."""

    title: str
    metric: str
    number: Callable[[float], str]
    zero: bool = True
    dots: str = ""  # a second metric, drawn as dots
    smooth: bool = False  # a mean of neighbours before it, and the epochs marked
    spikes: bool = False  # a few values may be far beyond all others


def _plain(value: float) -> str:
    return f"{value:.4g}"


def _short(value: float) -> str:
    return report.count(value) if abs(value) >= 1000 else f"{value:.4g}"


def _percent(value: float) -> str:
    return f"{value:.3g}%" if (value := value * 100) < 10 else f"{value:.0f}%"


def _seconds(value: float) -> str:
    return "0" if value == 0 else report.duration(value)


def _bytes(value: float) -> str:
    return "0" if value == 0 else report.size(value)


OF_STEPS = (
    Wanted("Loss", "loss", _plain, zero=False, dots="eval_loss", smooth=True),
    Wanted("Learning rate", "learning_rate", _plain),
    Wanted("Gradient norm", "grad_norm", _plain),
    Wanted("Seconds a step", "step_seconds", _seconds, spikes=True),
    Wanted("Tokens a second", "tokens_per_second", _short),
    Wanted("MFU", "mfu", _percent),
    Wanted("Waiting for data", "data_wait_seconds", _seconds, spikes=True),
    Wanted("Loss scale", "loss_scale", _short),
    Wanted("Memory of a device", "memory_in_use_bytes", _bytes),
)
OF_PROCESSES = (
    Wanted("CPU of the machines", "machine_cpu_ratio", _percent),
    Wanted("CPU pressure", "pressure_cpu_ratio", _percent),
    Wanted("Memory of a process", "process_rss_bytes", _bytes),
    Wanted("Memory of the devices", "device_memory_used_bytes", _bytes),
    Wanted("Load of the devices", "device_load_ratio", _percent),
    Wanted("Temperature of the devices, °C", "device_temperature_celsius", _plain, zero=False),
    Wanted("Power of the devices, W", "device_power_watts", _plain),
)


def figures(facts: Sequence[Facts]) -> list[tuple[str, str, str]]:
    """(title, what its values are, drawing) of each chart for which a run has values; of two runs both in one, FIRST and SECOND."""
    found = []
    for wanted in OF_STEPS:
        curves = []
        for one, colour in zip(facts, (FIRST, SECOND), strict=False):
            steps, values = one.steps["step"], one.steps[wanted.metric]
            smooth = _smooth(steps, values, colour) if wanted.smooth else None
            curves.append(Curve("training", steps, values, colour, pale=smooth is not None))
            curves += [smooth] if smooth is not None else []
            if wanted.dots and one.steps.known(wanted.dots).size:
                dots = SECOND if len(facts) == 1 else colour
                curves.append(Curve("held-out text", steps, one.steps[wanted.dots], dots, dots=True))
        found += _figure(wanted, curves, _epochs(facts[0]) if wanted.smooth and len(facts) == 1 else ())
    for wanted in OF_PROCESSES:
        curves = [
            Curve("", *_sampled(one.samples.values(), wanted.metric), colour)
            for one, colour in zip(facts, (FIRST, SECOND), strict=False)
        ]
        found += _figure(wanted, curves)
    return found


def _smooth(steps: np.ndarray, values: np.ndarray, colour: str) -> Curve | None:
    """The means of neighbours; nothing of values that are too few for it."""
    good = np.isfinite(values)
    window = int(good.sum()) // SMOOTH
    return Curve("smoothed", steps[good], smoothed(values[good], window), colour) if window > 1 else None


def _epochs(facts: Facts) -> Sequence[tuple[float, str]]:
    """Where an epoch ends, of a run that was asked for epochs."""
    train = facts.config.train if facts.config is not None else None
    if train is None or not train.epochs:
        return ()
    every, last = train.steps / train.epochs, math.ceil(train.epochs)
    apart = math.ceil((last - 1) / MOST_EPOCHS) or 1
    return [(k * every, f"{k}") for k in range(apart, last, apart)]


def _figure(
    wanted: Wanted, curves: Sequence[Curve], marks: Sequence[tuple[float, str]] = ()
) -> list[tuple[str, str, str]]:
    values = [c.y[np.isfinite(c.y)] for c in curves if not c.dots]
    values = [v for v in values if v.size]
    # A curve that is nothing but 0 tells nothing that its absence would not.
    if not any(v.any() for v in values):
        return []
    low, high = min(v.min() for v in values), max(v.max() for v in values)
    about = f"{wanted.number(low)} to {wanted.number(high)}" if high > low else f"always {wanted.number(high)}"
    if len(dots := [c for c in curves if c.dots and np.isfinite(c.y).any()]) == 1:
        lowest = int(np.nanargmin(np.where(np.isfinite(dots[0].y), dots[0].y, np.nan)))
        about += f"; of {dots[0].name} lowest {dots[0].y[lowest]:.4f}, step {dots[0].x[lowest]:,.0f}"
    if marks:
        about += "; dotted: ends of epochs"
    base, label = 2 if wanted.number is _bytes else 10, f"{wanted.title.lower()} over steps"
    return [(wanted.title, about, chart(label, curves, wanted.number, wanted.zero, base, wanted.spikes, marks))]


def _sampled(samples: Iterable[Columns], metric: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of a metric of all processes and of all of its labels, one after the other."""
    xs, ys = [np.empty(0)], [np.empty(0)]
    for columns in samples:
        for name in columns.names(metric):
            if name == metric or name.startswith(f"{metric}."):
                xs.append(columns["step"])
                ys.append(columns[name])
    return np.concatenate(xs), np.concatenate(ys)
