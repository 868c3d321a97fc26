"""When an alert fires and when it is over: one table, with reasons. The rules here and those for Prometheus both stand on it.

    value    ▁▁▂▁▃▂▁▇▇█▇▇▆▅▅▄▃▂▁▁      fires   beyond `fires` for `seconds`
    fires ───────────┬──────────       clears  back behind `clears` for `seconds`: in between nothing changes
    clears ──────────┼────┬─────

Beyond means above where `fires` is the greater of the two (or both are the same), else below.
"""

from dataclasses import dataclass
from typing import Literal

from meshtrain.survive.detectors import LEAST, TIMES
from meshtrain.survive.stragglers import SLOW

Severity = Literal["critical", "warning"]

# How much a rule looks at.
LOSSES, LATEST_LOSSES = 64, 5  # rows that are usual, and newest ones held against them
RATES, LATEST_RATES = 128, 16
ENOUGH = 32  # rows before which nothing is usual yet
INTERVALS = 32  # between rows, of which the median is
LEAST_INTERVAL = LEAST / TIMES  # seconds that steps count as at least, so that quick ones may rest for a minute
UNKNOWN = 1800.0  # seconds without a row while nobody says what the process does: compiling, evaluating and saving may take so long
SAMPLES = 6  # of a rank's phases
HOUR = 3600.0
FILLING_FROM = 0.6  # of a disk that is used before its filling is of interest; node_exporter's own alerts have the same
FILLING_OVER = 1800.0  # seconds that a slope is taken from, at least: saves come and go within less
ROOM = 2.0**30  # bytes that rows, logs and traces may need, at least
LEAST_JUDGED = 1800.0  # seconds before which goodput means nothing


@dataclass(frozen=True)
class Threshold:
    """Of one rule. `counts`: what its value is. `seconds`: for how long it must have been so, to fire and to clear."""

    rule: str
    severity: Severity
    counts: str
    fires: float
    clears: float
    seconds: float
    reason: str

    def is_bad(self, value: float) -> bool:
        return value > self.fires if self.fires >= self.clears else value < self.fires

    def is_good(self, value: float) -> bool:
        return value <= self.clears if self.fires >= self.clears else value >= self.clears


THRESHOLDS: tuple[Threshold, ...] = (
    Threshold(
        "loss_not_finite", "critical", "rows in a row whose loss or gradient is NaN or infinite", 0, 0, 0,
        "one is one too many: weights that are not finite stay so",
    ),
    Threshold(
        "loss_spike", "warning", "how far the median of the newest losses stands above the usual one, in usual deviations", 6, 3, 0,
        "of noise as heavy-tailed as Student's t with 3 degrees of freedom, 3 of 5 rows lie so high once in 3 million; a spike that "
        "matters lasts (PaLM, section 5.1, went back 100 steps and left out 200 to 500 batches)",
    ),
    Threshold(
        "throughput_drop", "warning", "median of the newest rates over the run's usual one", 0.7, 0.85, 60,
        "a third of a cluster is worth a message; a minute of it is more than a save or a neighbour's burst",
    ),
    Threshold(
        "slow_rank", "warning", "score: 1 less the share of its steps by which a rank waits less for others than the one that waits most",
        SLOW, 0.85, 30,
        "NVIDIA's resiliency extension calls a rank slow below 0.75; three samples in a row, as the supervisor asks for",
    ),
    Threshold(
        "device_memory", "warning", "memory used over what the device has", 0.97, 0.95, 20,
        "of JAX's pool, what is left is too little for a larger batch; where only NVML tells, a process of ours takes 92% of a GPU at its "
        "start, and NCCL's buffers come to it",
    ),
    Threshold(
        "memory_limit", "critical", "memory of the cgroup over its limit", 0.92, 0.85, 20,
        "at 1 the kernel kills; a save holds a copy of the state for a while, so the last twelfth goes quickly",
    ),
    Threshold(
        "machine_memory", "critical", "memory of the machine that is not available", 0.95, 0.9, 20,
        "what is left is page cache that the loader needs; beyond it the kernel kills",
    ),
    Threshold(
        "stalled", "critical", "time without a row over the usual time between two, compiling, evaluating and saving left out",
        TIMES, 1, 0,
        "as survive.step_timeout: 10 median steps, and at least a minute",
    ),
    Threshold(
        "disk_space", "critical", "free bytes of the run's disk over what the next save takes", 1, 1.5, 0,
        "a save is written before the oldest one is removed",
    ),
    Threshold(
        "disk_filling", "warning", "hours until the run's disk is full, by its last hour", 4, 8, 60,
        "time to react for who is awake; node_exporter's own alerts call 4 hours critical",
    ),
    Threshold(
        "goodput_low", "warning", "share of the last hour that went into steps", 0.7, 0.8, 0,
        "Llama 3 (section 3.3.4) kept above 0.9 on 16,384 GPUs; below 0.7 data, evaluations and saves cost more than a fault an hour",
    ),
)  # fmt: skip

BY_RULE = {threshold.rule: threshold for threshold in THRESHOLDS}
