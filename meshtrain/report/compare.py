"""Two runs held against each other, with intervals.

Equal runs differ by chance; only what is beyond that is a difference.

Seconds of neighbouring steps depend on each other (the machine was busy for a while), so that as many steps do not tell
as much as they seem to. They are taken in blocks, each of which has one median. A block is three times as long as steps
remember: the integrated autocorrelation time, with the window of Sokal 1997, "Monte Carlo methods in statistical
mechanics", section 3. The medians are compared by Welch's test (1947, "The generalization of Student's problem when
several different population variances are involved").

    seconds a token  ─ warmed up ─ blocks ─ log of the median ─ mean ─┬─► the second over the first, with an interval
    loss             ─ mean of each stretch of the same tokens ───────┴─► the second minus the first, last quarter

An interval does not tell how another hour, machine or seed would have been. Runs of two seeds are two runs.

Tried on noise of 10% that remembers for 1 to 65 steps, 200 pairs of runs each: of equal runs at most 5% differ (6% of
those with fewer steps than they remember); a run that is slower by a tenth is found always from 1,000 steps on where
they remember for 3, and in 94% of runs of 150.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from meshtrain.config import short
from meshtrain.config.follow import differences
from meshtrain.report import text
from meshtrain.report.facts import RunFacts
from meshtrain.report.measured import tokens_by_row, warmed_up
from meshtrain.report.rows import Columns
from meshtrain.report.sections import Grid, Section, findings
from meshtrain.report.summary import setting_text, summarise
from meshtrain.survive import history as histories
from meshtrain.telemetry.catalogue import RECENT_ROWS

SURE = 0.99  # of an interval: several things are compared
# blocks
FEWEST = 4
MOST = 64
# Blocks below which it is not sure how long steps remember: intervals are twice as wide
FEW = 8
REMEMBERED = 3  # times the autocorrelation time, the length of a block
NEGLIGIBLE = 0.002  # share by which seconds or losses differ that is nothing to anybody
# Half an interval's width, as a logarithm or a share of the loss, beyond which it says nothing
VAGUE = 0.5
STRETCHES = 400  # of the tokens that both have read


@dataclass(frozen=True)
class Interval:
    """A difference, and what it is between with certainty `SURE`."""

    value: float
    least: float
    most: float
    negligible: float  # below this it is nothing to anybody

    @property
    def differs(self) -> bool:
        return not self.least <= 0 <= self.most and abs(self.value) >= self.negligible


@dataclass(frozen=True)
class Comparison:
    """The second run against the first. None: it cannot be told, and `cannot_tell` says why."""

    names: tuple[str, str]
    # Seconds a token, as a share of the first's: 0.1 is 10% slower
    time: Interval | None
    # The second's minus the first's, over the last quarter of the tokens that both have read
    loss: Interval | None
    # Rows of the same step, if their losses are the same bit by bit; else 0
    identical: int
    tokens: float  # that both have read
    config: tuple[tuple[str, Any, Any], ...]
    figures: tuple[tuple[str, ...], ...]  # name, the first's, the second's
    cannot_tell: tuple[str, ...]

    @property
    def verdict(self) -> str:
        """Says in a few words whether the runs differ."""
        if not self.same:
            return "they differ"
        if self.time is None and self.loss is None:
            return "it cannot be told whether they differ"
        return f"no difference beyond chance{', as far as can be told' if self.cannot_tell else ''}"

    @property
    def same(self) -> bool:
        """Nothing that could be compared differs."""
        return not any(
            interval is not None and interval.differs
            for interval in (self.time, self.loss)
        )

    def as_json(self) -> dict[str, Any]:
        content = asdict(self) | {"same": self.same, "verdict": self.verdict}
        for name in ("time", "loss"):
            if (interval := getattr(self, name)) is not None:
                content[name]["differs"] = interval.differs
        return histories.plain(content)


def compare(first: RunFacts, second: RunFacts) -> Comparison:
    """Returns what differs between two runs."""
    why: list[str] = []
    time = _time(first.steps, second.steps, why)
    loss, identical, tokens = _loss(first.steps, second.steps, why)
    configs = [asdict(run.config) if run.config else {} for run in (first, second)]
    changed = tuple(
        setting for setting in differences(*configs) if setting[0] != "run.directory"
    )
    names = (short(first.name), short(second.name))
    if names[0] == names[1]:
        names = (short(first.directory), short(second.directory))
    return Comparison(
        names,
        time,
        loss,
        identical,
        tokens,
        changed,
        tuple(_figures(first, second)),
        tuple(why),
    )


def _time(a: Columns, b: Columns, why: list[str]) -> Interval | None:
    masks = [warmed_up(run) for run in (a, b)]
    tokens = [run["tokens"][mask] for run, mask in zip((a, b), masks, strict=True)]
    seconds = [
        run["step_seconds"][mask] for run, mask in zip((a, b), masks, strict=True)
    ]
    # Where a run does not say how many tokens a step has, steps are compared.
    if all(np.all(read >= 1) for read in tokens):
        seconds = [spent / read for spent, read in zip(seconds, tokens, strict=True)]
    medians = [blocks(np.log(spent)) for spent in seconds]
    if any(sample.size < FEWEST for sample in medians):
        why.append(
            "speed: it cannot be told apart, since of one run there are too few steps that do not depend on each other."
        )
        return None
    value, half = _interval(*medians)
    interval = Interval(
        math.expm1(value),
        math.expm1(value - half),
        math.expm1(value + half),
        NEGLIGIBLE,
    )
    if not interval.differs and half > VAGUE:
        why.append(
            "speed: it cannot be told apart, since the steps of a run take too different times; let both take more."
        )
        return None
    return interval


def _loss(a: Columns, b: Columns, why: list[str]) -> tuple[Interval | None, int, float]:
    both, i, j = np.intersect1d(a["step"], b["step"], return_indices=True)
    tokens = tokens_by_row(a), tokens_by_row(b)
    if not a.known("loss").size or not b.known("loss").size:
        why.append("loss: it cannot be compared, since one run has none.")
        return None, 0, 0.0
    common = float(min(tokens[0][-1], tokens[1][-1]))
    same = both.size > 0 and np.array_equal(a["loss"][i], b["loss"][j], equal_nan=True)
    if same and np.array_equal(tokens[0][i], tokens[1][j]):
        return Interval(0.0, 0.0, 0.0, 0.0), int(both.size), common
    count = int(min(STRETCHES, a.known("loss").size, b.known("loss").size))
    if not common:
        why.append(
            "loss: it cannot be compared, since one run's rows tell of no tokens."
        )
        return None, 0, 0.0
    edges = np.linspace(0.0, common, count + 1)
    means = [
        _mean_by_tokens(read, run["loss"], edges)
        for read, run in zip(tokens, (a, b), strict=True)
    ]
    difference = (means[1] - means[0])[count * 3 // 4 :]
    # How the difference changes on the way is no noise about what it is in the mean.
    medians = blocks(_detrended(difference[np.isfinite(difference)]))
    if medians.size < FEWEST:
        why.append(
            "loss: it cannot be told apart, since the runs have read too few of the same tokens."
        )
        return None, 0, common
    value, half = _interval(medians)
    level = float(np.nanmean(means[0][count * 3 // 4 :]))
    if abs(value) <= half and half > VAGUE * abs(level):
        why.append(
            "loss: it cannot be told apart, since the losses go up and down too much; let both runs take more steps."
        )
        return None, 0, common
    return (
        Interval(value, value - half, value + half, NEGLIGIBLE * abs(level)),
        0,
        common,
    )


def _detrended(values: np.ndarray) -> np.ndarray:
    place = np.arange(values.size) - (values.size - 1) / 2
    return values - place * (place @ values) / max(place @ place, 1.0)


def _mean_by_tokens(
    read: np.ndarray, values: np.ndarray, edges: np.ndarray
) -> np.ndarray:
    """Mean of `values` between each two `edges` of the tokens read; NaN where there is none."""
    known = np.isfinite(values) & (read <= edges[-1] * (1 + 1e-9))
    # A row is of the tokens up to it.
    place = np.clip(
        np.searchsorted(edges, read[known] * (1 - 1e-9), "right") - 1, 0, len(edges) - 2
    )
    sums = np.bincount(place, values[known], minlength=len(edges) - 1)
    counts = np.bincount(place, minlength=len(edges) - 1)
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def blocks(values: np.ndarray) -> np.ndarray:
    """The medians of blocks that hardly depend on each other: at most `MOST`, fewer where values remember for long."""
    if values.size < FEWEST:
        return np.empty(0)
    length = max(math.ceil(REMEMBERED * memory(values)), math.ceil(values.size / MOST))
    count = values.size // length
    # What is left over is at the begin.
    if count:
        return np.median(
            values[values.size - count * length :].reshape(count, length), axis=1
        )
    return np.empty(0)


def memory(values: np.ndarray) -> float:
    """Integrated autocorrelation time, in values: about so many neighbours tell what one independent value would.

    At least 1.
    """
    centre = np.median(values)
    spread = np.median(np.abs(values - centre)) or np.std(values)
    if not spread:
        return 1.0
    # A save now and then says nothing of how long a machine stays slow.
    x = np.clip((values - centre) / spread, -8, 8)
    x = x - x.mean()
    n = x.size
    power = np.abs(np.fft.rfft(x, 2 * n)) ** 2
    correlation = np.fft.irfft(power)[:n]
    if correlation[0] <= 0:
        return 1.0
    times = 2 * np.cumsum(correlation / correlation[0]) - 1
    enough = np.arange(n) >= 5 * times
    return max(1.0, float(times[int(np.argmax(enough)) if enough.any() else n - 1]))


def _interval(a: np.ndarray, b: np.ndarray | None = None) -> tuple[float, float]:
    """The mean of a, or of b less that of a, and half the width of its interval."""
    samples = [a] if b is None else [a, b]
    value = a.mean() if b is None else b.mean() - a.mean()
    errors = [x.var(ddof=1) / x.size for x in samples]
    if not (error := math.sqrt(sum(errors))):
        return float(value), 0.0
    freedom = sum(errors) ** 2 / sum(
        e**2 / (x.size - 1) for e, x in zip(errors, samples, strict=True)
    )
    wider = 2.0 if min(x.size for x in samples) < FEW else 1.0
    return float(value), wider * student(freedom) * error


def student(freedom: float) -> float:
    """Returns the bound that a value of Student's distribution exceeds on neither side with certainty `SURE`."""
    # Takes a second to import.
    from scipy.stats import t

    return float(t.ppf((1 + SURE) / 2, freedom))


def _figures(first: RunFacts, second: RunFacts) -> Iterator[tuple[str, ...]]:
    summaries = [summarise(run) for run in (first, second)]
    yield "verdict", *(summary.verdict for summary in summaries)
    labels = {
        "tokens/s": "tokens/s",
        "MFU": f"MFU, last {RECENT_ROWS} rows",
        "loss": "loss at the end",
        "reward": "reward at the end",
        "lowest eval loss": "eval loss, at best",
        "eval accuracy": "eval accuracy at the end",
        "goodput": "goodput",
    }
    for name, label in labels.items():
        values = [summary.figures.get(name, "-") for summary in summaries]
        if name == "loss" or any(value != "-" for value in values):
            yield label, *values


def sentences(comparison: Comparison) -> list[str]:
    """Returns what differs, in words."""
    time = comparison.time
    loss = comparison.loss
    name = comparison.names[1]
    lines = []
    if time:
        bounds = f"between {time.least:+.1%} and {time.most:+.1%}"
        if math.log1p(time.most) - math.log1p(time.least) > 2 * VAGUE:
            bounds = f"at least {time.least if time.value > 0 else time.most:+.1%}"
        between = f"{time.value:+.1%} of time a token, {bounds} ({SURE:.0%} sure)"
        what = (
            f"{name} is {'slower' if time.value > 0 else 'faster'}"
            if time.differs
            else "no difference beyond chance"
        )
        lines.append(f"speed: {what}, {between}.")
    if comparison.identical:
        lines.append(
            f"loss: the same, bit by bit, at all {comparison.identical:,} steps that both have logged."
        )
    elif loss:
        between = (
            f"{loss.value:+.4f} at the same tokens, between {loss.least:+.4f} and {loss.most:+.4f} ({SURE:.0%} "
            "sure)"
        )
        higher = f"{name} has the {'higher' if loss.value > 0 else 'lower'} one"
        lines.append(
            f"loss: {higher if loss.differs else 'no difference beyond chance'}, {between}."
        )
    return lines + list(comparison.cannot_tell)


def tables(comparison: Comparison) -> list[Section]:
    """Returns the figures of both runs, and the keys in which their configs differ."""
    changed = [
        (path, setting_text(a), setting_text(b)) for path, a, b in comparison.config
    ]
    keys = Section(
        "What differs in the config",
        table=Grid(("key", *comparison.names), changed, "keys", newest=False),
    )
    figures = Section("", table=Grid(("", *comparison.names), comparison.figures))
    return [figures, keys if changed else Section("", ("Their configs are the same.",))]


def render(comparison: Comparison, diagnosed: Sequence[RunFacts] = ()) -> str:
    """Returns the comparison for a terminal; with the findings of runs that were just diagnosed."""
    first, second = comparison.names
    parts = [
        f"{first} and {second}: {comparison.verdict}",
        "\n".join(sentences(comparison)),
    ]
    parts += [text.section_text(section).strip("\n") for section in tables(comparison)]
    for name, run in zip(comparison.names, diagnosed, strict=False):
        if (section := findings(run.diagnosis)) is not None:
            parts.append(f"{name}\n{text.section_text(section)}")
    return "\n\n".join(parts) + "\n"
