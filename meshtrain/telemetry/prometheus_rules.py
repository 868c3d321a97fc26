"""Alert rules for Prometheus, from the same table of thresholds as the run's own alerts: python -m meshtrain.telemetry rules

They work where the run itself cannot say anything any more. Windows are of time here, where the run's own are of rows; what lies
between `fires` and `clears` is not kept apart.
"""

from collections.abc import Callable, Mapping
from typing import Any

from meshtrain.survive.detectors import LEAST, TIMES
from meshtrain.survive.heartbeat import HOST, KIND_OF, STEPPING
from meshtrain.telemetry.catalogue import BY_NAME, PREFIX
from meshtrain.telemetry.thresholds import ENOUGH, FILLING_FROM, HOUR, LEAST_JUDGED, ROOM, THRESHOLDS, Threshold

RECENT, USUAL = 120.0, 1800.0  # seconds that are held against those before
STILL = LEAST * TIMES  # seconds without a token; a rule cannot wait for 10 steps whose length it does not know
HOST_SHARE = "meshtrain:host_share"  # a recording rule's name

# Phases of a start, which is not held against a run.
STARTING = "|".join(phase for phase, kind in KIND_OF.items() if kind in ("init", "restore", "compile"))
# Of a run's processes the first one's endpoint alone has it.
FIRST = f"and on (instance, job) {BY_NAME['step'].sample}"

Span = Callable[[float], float]


def document(scale: float = 1.0) -> dict[str, Any]:
    """The rules as Prometheus reads them. With a `scale` all durations are so many times as long, to try them in a short while."""

    def span(seconds: float) -> float:
        return seconds * scale

    recording = {"record": HOST_SHARE, "expr": _host_share(span)}
    alerts = [_alert(threshold, span) for threshold in THRESHOLDS]
    return {"groups": [{"name": "meshtrain", "rules": [recording, *alerts]}]}


def duration(seconds: float) -> str:
    """As Prometheus writes it: 90s, 2m, 1h."""
    whole = max(1, round(seconds))
    for unit, of in (("h", 3600), ("m", 60)):
        if whole % of == 0:
            return f"{whole // of}{unit}"
    return f"{whole}s"


def _window(span: Span, seconds: float) -> str:
    return duration(span(seconds))


def _alert(threshold: Threshold, span: Span) -> dict[str, Any]:
    expression, summary = RULES[threshold.rule]
    # What stands still has no value that grows: it must have stood so for as long.
    seconds = STILL if threshold.rule == "stalled" else threshold.seconds
    return {
        "alert": "Meshtrain" + "".join(word.capitalize() for word in threshold.rule.split("_")),
        "expr": expression(threshold, span),
        "for": duration(span(seconds)) if seconds else "0s",
        "labels": {"severity": threshold.severity, "rule": threshold.rule},
        "annotations": {"summary": summary, "description": f"{threshold.counts}: {threshold.reason}"},
    }


def _name(metric: str) -> str:
    return BY_NAME[metric].sample


def _usual(metric: str, quantile: float, span: Span) -> str:
    return f"quantile_over_time({quantile:g}, {_name(metric)}[{_window(span, USUAL)}] offset {_window(span, RECENT)})"


def _recent(metric: str, span: Span) -> str:
    return f"quantile_over_time(0.5, {_name(metric)}[{_window(span, RECENT)}])"


def _known(metric: str, span: Span) -> str:
    return f"count_over_time({_name(metric)}[{_window(span, USUAL)}] offset {_window(span, RECENT)}) >= {ENOUGH}"


def _not_finite(_: Threshold, span: Span) -> str:
    loss, gradient = _name("loss"), _name("grad_norm")
    # float16's loss scale skips steps whose gradient is not finite.
    return f"{loss} != {loss} or abs({loss}) == Inf or (({gradient} != {gradient} or abs({gradient}) == Inf) unless {_name('loss_scale')})"


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
    """Of each process's steps, with the run's name, so that ranks of one run are compared."""
    window = _window(span, 300.0)
    host, whole = _seconds_in(f'=~"{"|".join(HOST)}"', window), _seconds_in(f'=~"{"|".join(STEPPING)}"', window)
    return f"{host} / {whole} * on (instance, job) group_left (run, rank, host) {PREFIX}process_info"


def _slow(threshold: Threshold, span: Span) -> str:
    return f"1 - ({HOST_SHARE} - on (run) group_left min by (run) ({HOST_SHARE})) < {threshold.fires:g}"


def _device_memory(threshold: Threshold, span: Span) -> str:
    return f"{_name('device_memory_used_bytes')} / {_name('device_memory_limit_bytes')} > {threshold.fires:g}"


def _above(metric: str) -> Callable[[Threshold, Span], str]:
    return lambda threshold, span: f"{_name(metric)} > {threshold.fires:g}"


def _stalled(threshold: Threshold, span: Span) -> str:
    window = _window(span, RECENT)
    other = _seconds_in(f'!~"{"|".join(STEPPING)}"', window)
    # Steps that take a tenth of the time or more are left to the run's own alert.
    quick = f"{_name('step_seconds')} < {span(STILL / threshold.fires):g}"
    return f"increase({_name('tokens')}[{window}]) == 0 and {quick} unless {other} > 0.1"


def _disk_space(threshold: Threshold, span: Span) -> str:
    free = _name("disk_free_bytes")
    return f"({free} < {ROOM:.0f} or {free} < {_name('checkpoint_bytes')}) {FIRST}"


def _disk_filling(threshold: Threshold, span: Span) -> str:
    ahead = f"predict_linear({_name('disk_free_bytes')}[{_window(span, HOUR)}], {span(threshold.fires * HOUR):.0f})"
    return f"({ahead} < 0 and {_name('disk_used_ratio')} > {FILLING_FROM:g}) {FIRST}"


def goodput(window: str, function: str) -> tuple[str, str]:
    """Queries for a process's seconds in steps, and for all of its seconds but those of starts."""
    good = "|".join(phase for phase, kind in KIND_OF.items() if kind == "step")
    return _seconds_in(f'=~"{good}"', window, function), _seconds_in(f'!~"{STARTING}"', window, function)


def _goodput(threshold: Threshold, span: Span) -> str:
    steps, whole = goodput(_window(span, HOUR), "increase")
    return f"({steps} / {whole} < {threshold.fires:g} and {whole} > {span(LEAST_JUDGED):g}) {FIRST}"


# Of each rule: its expression, and a sentence on its value.
RULES: Mapping[str, tuple[Callable[[Threshold, Span], str], str]] = {
    "loss_not_finite": (_not_finite, "The loss or gradient on {{ $labels.instance }} is {{ $value }}."),
    "loss_spike": (_spike, "The loss on {{ $labels.instance }} is {{ $value | humanize }} above what is usual."),
    "throughput_drop": (_drop, "The run on {{ $labels.instance }} makes {{ $value | humanizePercentage }} of its usual tokens a second."),
    "slow_rank": (_slow, "Rank {{ $labels.rank }} on {{ $labels.host }} keeps the others of {{ $labels.run }} waiting (score {{ $value | humanize }})."),
    "device_memory": (_device_memory, "Device {{ $labels.device }} of {{ $labels.instance }} uses {{ $value | humanizePercentage }} of its memory."),
    "memory_limit": (_above("memory_limit_used_ratio"), "{{ $labels.instance }} uses {{ $value | humanizePercentage }} of the memory that it may use."),
    "machine_memory": (_above("memory_used_ratio"), "The machine of {{ $labels.instance }} has {{ $value | humanizePercentage }} of its memory in use."),
    "stalled": (_stalled, "The run on {{ $labels.instance }} takes no step."),
    "disk_space": (_disk_space, "The disk of the run on {{ $labels.instance }} has {{ $value | humanize1024 }}B free, less than the next save takes."),
    "disk_filling": (_disk_filling, "The disk of the run on {{ $labels.instance }} is full within hours."),
    "goodput_low": (_goodput, "{{ $value | humanizePercentage }} of the last hour of the run on {{ $labels.instance }} went into steps."),
}  # fmt: skip
