"""The alerts, each once: when it fires and clears, with the reason, and its query for Prometheus.

    value    ▁▁▂▁▃▂▁▇▇█▇▇▆▅▅▄▃▂▁▁      fires   beyond `fires` for `seconds`
    fires ───────────┬──────────       clears  back behind `clears` for `seconds`: in between nothing changes
    clears ──────────┼────┬─────

Beyond means above where `fires` is the greater of the two (or both are the same), else below. The run judges its own
rows by the table (`signals`, `alerts`). Prometheus (`python -m meshtrain.telemetry rules`) works where the run cannot
say anything any more: its windows are of time where the run's are of rows, and it keeps nothing between `fires` and
`clears`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from meshtrain.survive.detectors import LEAST, TIMES
from meshtrain.survive.heartbeat import HOST, KIND_OF, STEPPING
from meshtrain.survive.stragglers import SLOW
from meshtrain.telemetry.catalogue import BY_NAME, PREFIX

Severity = Literal["critical", "warning"]

# How much a rule looks at.
# rows that are usual, and newest ones held against them
LOSSES = 64
LATEST_LOSSES = 5
RATES = 128
LATEST_RATES = 16
ENOUGH = 32  # rows before which nothing is usual yet
INTERVALS = 32  # between rows, of which the median is
LEAST_INTERVAL = (
    LEAST / TIMES
)  # seconds that steps count as at least, so that quick ones may rest for a minute
# seconds without a row while nobody says what the process does: compiling, evaluating and saving may take so long
UNKNOWN = 1800.0
SAMPLES = 6  # of a rank's phases
HOUR = 3600.0
# Of a disk that is used before its filling is of interest; node_exporter's own alerts have the same
FILLING_FROM = 0.6
# Seconds that a slope is taken from, at least: saves come and go within less
FILLING_OVER = 1800.0
ROOM = 2.0**30  # bytes that rows, logs and traces may need, at least
LEAST_JUDGED = 1800.0  # seconds before which goodput means nothing
# seconds of a query that are compared with those before
RECENT = 120.0
USUAL = 1800.0
STILL = (
    LEAST * TIMES
    # Seconds without a token; a query cannot wait for 10 steps whose length it does not know
)


class Span(NamedTuple):
    """Durations of the queries, all `scale` times as long: a small one tries them in a short while."""

    scale: float = 1.0

    def seconds(self, seconds: float) -> float:
        return seconds * self.scale

    def window(self, seconds: float) -> str:
        """Returns a duration as Prometheus writes it: 90s, 2m, 1h."""
        whole = max(1, round(seconds * self.scale))
        for unit, of in (("h", 3600), ("m", 60)):
            if whole % of == 0:
                return f"{whole // of}{unit}"
        return f"{whole}s"


@dataclass(frozen=True)
class Threshold:
    """One alert. `counts`: what its value is. `seconds`: for how long it must have been so, to fire and to clear."""

    rule: str
    severity: Severity
    counts: str
    fires: float
    clears: float
    seconds: float
    reason: str
    query: Callable[["Threshold", Span], str]  # for Prometheus
    summary: str  # of the query's value

    def is_bad(self, value: float) -> bool:
        return value > self.fires if self.fires >= self.clears else value < self.fires

    def is_good(self, value: float) -> bool:
        if self.fires >= self.clears:
            return value <= self.clears
        return value >= self.clears

    def prometheus_rule(self, span: Span) -> dict[str, Any]:
        # What stands still has no value that grows: it must have stood so for as long.
        seconds = STILL if self.rule == "stalled" else self.seconds
        return {
            "alert": "Meshtrain"
            + "".join(word.capitalize() for word in self.rule.split("_")),
            "expr": self.query(self, span),
            "for": span.window(seconds) if seconds else "0s",
            "labels": {"severity": self.severity, "rule": self.rule},
            "annotations": {
                "summary": self.summary,
                "description": f"{self.counts}: {self.reason}",
            },
        }


def prometheus_rules(scale: float = 1.0) -> dict[str, Any]:
    """Returns the alerts, and what they stand on, as rules that Prometheus reads."""
    span = Span(scale)
    recording = {"record": HOST_SHARE, "expr": _host_share(span)}
    alerts = [threshold.prometheus_rule(span) for threshold in THRESHOLDS]
    return {"groups": [{"name": "meshtrain", "rules": [recording, *alerts]}]}


# --- queries

HOST_SHARE = "meshtrain:host_share"  # a recording rule's name
# Phases of a start, which is not held against a run.
STARTING = "|".join(
    phase for phase, kind in KIND_OF.items() if kind in ("init", "restore", "compile")
)


def _name(metric: str) -> str:
    return BY_NAME[metric].sample


# Of a run's processes the first one's endpoint alone has it.
FIRST = f"and on (instance, job) {_name('step')}"


def _usual(metric: str, quantile: float, span: Span) -> str:
    window = f"[{span.window(USUAL)}] offset {span.window(RECENT)}"
    return f"quantile_over_time({quantile:g}, {_name(metric)}{window})"


def _recent(metric: str, span: Span) -> str:
    return f"quantile_over_time(0.5, {_name(metric)}[{span.window(RECENT)}])"


def _known(metric: str, span: Span) -> str:
    return f"count_over_time({_name(metric)}[{span.window(USUAL)}] offset {span.window(RECENT)}) >= {ENOUGH}"


def _not_finite(_: Threshold, span: Span) -> str:
    loss = _name("loss")
    gradient = _name("grad_norm")
    # float16's loss scale skips steps whose gradient is not finite.
    wrong_gradient = f"(({gradient} != {gradient} or abs({gradient}) == Inf) unless {_name('loss_scale')})"
    return f"{loss} != {loss} or abs({loss}) == Inf or {wrong_gradient}"


def _spike(threshold: Threshold, span: Span) -> str:
    above = f"({_recent('loss', span)} - {_usual('loss', 0.5, span)})"
    # The quartiles of what is normal lie 1.349 standard deviations apart.
    spread = f"({_usual('loss', 0.75, span)} - {_usual('loss', 0.25, span)}) / 1.349"
    least = f"{0.01 * threshold.fires:g} * abs({_usual('loss', 0.5, span)})"
    return f"{above} > {threshold.fires:g} * {spread} and {above} > {least} and {_known('loss', span)}"


def _drop(threshold: Threshold, span: Span) -> str:
    rate = "tokens_per_second"
    ratio = f"{_recent(rate, span)} / {_usual(rate, 0.5, span)}"
    return f"{ratio} < {threshold.fires:g} and {_known(rate, span)}"


def _seconds_in(phases: str, window: str, function: str = "rate") -> str:
    return f"sum without (phase) ({function}({_name('phase_seconds')}{{phase{phases}}}[{window}]))"


def _host_share(span: Span) -> str:
    """Returns the share of each process's steps, with the run's name, so that ranks of one run are compared."""
    window = span.window(300.0)
    host = _seconds_in(f'=~"{"|".join(HOST)}"', window)
    whole = _seconds_in(f'=~"{"|".join(STEPPING)}"', window)
    return f"{host} / {whole} * on (instance, job) group_left (run, rank, host) {PREFIX}process_info"


def _slow(threshold: Threshold, _: Span) -> str:
    return f"1 - ({HOST_SHARE} - on (run) group_left min by (run) ({HOST_SHARE})) < {threshold.fires:g}"


def _device_memory(threshold: Threshold, _: Span) -> str:
    return f"{_name('device_memory_used_bytes')} / {_name('device_memory_limit_bytes')} > {threshold.fires:g}"


def _above(metric: str) -> Callable[[Threshold, Span], str]:
    return lambda threshold, _: f"{_name(metric)} > {threshold.fires:g}"


def _stalled(threshold: Threshold, span: Span) -> str:
    window = span.window(RECENT)
    other = _seconds_in(f'!~"{"|".join(STEPPING)}"', window)
    # Steps that take a tenth of the time or more are left to the run's own alert.
    quick = f"{_name('step_seconds')} < {span.seconds(STILL / threshold.fires):g}"
    return (
        f"increase({_name('tokens')}[{window}]) == 0 and {quick} unless {other} > 0.1"
    )


def _disk_space(_: Threshold, span: Span) -> str:
    free = _name("disk_free_bytes")
    return f"({free} < {ROOM:.0f} or {free} < {_name('checkpoint_bytes')}) {FIRST}"


def _disk_filling(threshold: Threshold, span: Span) -> str:
    ahead = span.seconds(threshold.fires * HOUR)
    free = (
        f"predict_linear({_name('disk_free_bytes')}[{span.window(HOUR)}], {ahead:.0f})"
    )
    return f"({free} < 0 and {_name('disk_used_ratio')} > {FILLING_FROM:g}) {FIRST}"


def goodput_queries(window: str, function: str) -> tuple[str, str]:
    """Returns queries for a process's seconds in steps, and for all of its seconds but those of starts."""
    good = "|".join(phase for phase, kind in KIND_OF.items() if kind == "step")
    return _seconds_in(f'=~"{good}"', window, function), _seconds_in(
        f'!~"{STARTING}"', window, function
    )


def _goodput(threshold: Threshold, span: Span) -> str:
    steps, whole = goodput_queries(span.window(HOUR), "increase")
    return f"({steps} / {whole} < {threshold.fires:g} and {whole} > {span.seconds(LEAST_JUDGED):g}) {FIRST}"


# --- the table

THRESHOLDS: tuple[Threshold, ...] = (
    Threshold(
        "loss_not_finite",
        "critical",
        "rows in a row whose loss or gradient is NaN or infinite",
        0,
        0,
        0,
        "one is one too many: weights that are not finite stay so",
        _not_finite,
        "The loss or gradient on {{ $labels.instance }} is {{ $value }}.",
    ),
    Threshold(
        "loss_spike",
        "warning",
        "how far the median of the newest losses stands above the usual one, in usual deviations",
        6,
        3,
        0,
        "of noise as heavy-tailed as Student's t with 3 degrees of freedom, 3 of 5 rows lie so high once in 3 "
        "million; a spike that "
        "matters lasts (PaLM, section 5.1, went back 100 steps and left out 200 to 500 batches)",
        _spike,
        "The loss on {{ $labels.instance }} is {{ $value | humanize }} above what is usual.",
    ),
    Threshold(
        "throughput_drop",
        "warning",
        "median of the newest rates over the run's usual one",
        0.7,
        0.85,
        60,
        "a third of a cluster is worth a message; a minute of it is more than a save or a neighbour's burst",
        _drop,
        "The run on {{ $labels.instance }} makes {{ $value | humanizePercentage }} of its usual tokens a second.",
    ),
    Threshold(
        "slow_rank",
        "warning",
        "score: 1 less the share of its steps by which a rank waits less for others than the one that waits most",
        SLOW,
        0.85,
        30,
        "NVIDIA's resiliency extension calls a rank slow below 0.75; three samples in a row, as the supervisor asks "
        "for",
        _slow,
        "Rank {{ $labels.rank }} on {{ $labels.host }} keeps the others of {{ $labels.run }} waiting (score {{ $value "
        "| humanize }}).",
    ),
    Threshold(
        "device_memory",
        "warning",
        "memory used over what the device has",
        0.97,
        0.95,
        20,
        "of JAX's pool, what is left is too little for a larger batch; where only NVML tells, a process of ours takes "
        "92% of a GPU at its "
        "start, and NCCL's buffers come to it",
        _device_memory,
        "Device {{ $labels.device }} of {{ $labels.instance }} uses {{ $value | humanizePercentage }} of its memory.",
    ),
    Threshold(
        "memory_limit",
        "critical",
        "memory of the cgroup over its limit",
        0.92,
        0.85,
        20,
        "at 1 the kernel kills; a save holds a copy of the state for a while, so the last twelfth goes quickly",
        _above("memory_limit_used_ratio"),
        "{{ $labels.instance }} uses {{ $value | humanizePercentage }} of the memory that it may use.",
    ),
    Threshold(
        "machine_memory",
        "critical",
        "memory of the machine that is not available",
        0.95,
        0.9,
        20,
        "what is left is page cache that the loader needs; beyond it the kernel kills",
        _above("memory_used_ratio"),
        "The machine of {{ $labels.instance }} has {{ $value | humanizePercentage }} of its memory in use.",
    ),
    Threshold(
        "stalled",
        "critical",
        "time without a row over the usual time between two, compiling, evaluating and saving left out",
        TIMES,
        1,
        0,
        "as survive.step_timeout: 10 median steps, and at least a minute",
        _stalled,
        "The run on {{ $labels.instance }} takes no step.",
    ),
    Threshold(
        "disk_space",
        "critical",
        "free bytes of the run's disk over what the next save takes",
        1,
        1.5,
        0,
        "a save is written before the oldest one is removed",
        _disk_space,
        "The disk of the run on {{ $labels.instance }} has {{ $value | humanize1024 }}B free, less than the next save "
        "takes.",
    ),
    Threshold(
        "disk_filling",
        "warning",
        "hours until the run's disk is full, by its last hour",
        4,
        8,
        60,
        "time to react for who is awake; node_exporter's own alerts call 4 hours critical",
        _disk_filling,
        "The disk of the run on {{ $labels.instance }} is full within hours.",
    ),
    Threshold(
        "goodput_low",
        "warning",
        "share of the last hour that went into steps",
        0.7,
        0.8,
        0,
        "Llama 3 (section 3.3.4) kept above 0.9 on 16,384 GPUs; below 0.7 data, evaluations and saves cost more than "
        "a fault an hour",
        _goodput,
        "{{ $value | humanizePercentage }} of the last hour of the run on {{ $labels.instance }} went into steps.",
    ),
)

BY_RULE = {threshold.rule: threshold for threshold in THRESHOLDS}
