"""Every metric once: its name, kind, unit, labels, where it comes from and what it means.

    catalogue ─┬─► rows of metrics.jsonl and of resources/RANK.jsonl (names)   ─► report, monitor, diagnosis, trackers
               ├─► the endpoint (kind, unit, labels, meaning)                   ─► Prometheus
               └─► dashboard, alert rules, the table in `python -m meshtrain.telemetry catalogue`

A value that is not known is left out of a row, and of what the endpoint says: never 0. Names end on their unit, as
Prometheus asks for (https://prometheus.io/docs/practices/naming): seconds, bytes, ratio (0 to 1), per_second.
"""

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

PREFIX = "meshtrain_"
PROCESSES_RANK = PREFIX + "processes_rank"
RECENT_ROWS = 50  # of metrics.jsonl: how a run is now

# gauge: the newest value counts. counter: what has come together since the run's process began, in the endpoint with
# _total.
Kind = Literal["gauge", "counter"]
# step: a row of metrics.jsonl, the same on all processes. process: a row of resources/RANK.jsonl, of one process and
# its machine.
Source = Literal["step", "process"]


@dataclass(frozen=True)
class Metric:
    """One metric.

    `name` is its key in a row; each label's value stands in the row as a mapping {label value: number}.
    """

    name: str
    source: Source
    kind: Kind
    unit: str  # "" for plain numbers
    meaning: str
    labels: tuple[str, ...] = ()

    @property
    def exposed(self) -> str:
        """The name in the endpoint, without a counter's _total (which the exposition adds to its samples)."""
        return PREFIX + self.name.replace("/", "_")

    @property
    def sample(self) -> str:
        """The name that a query uses."""
        return self.exposed + ("_total" if self.kind == "counter" else "")

    @property
    def processes_name(self) -> str:
        """The name, on the first process's endpoint, of a process metric's least, median and greatest value over all
        processes.

        Its label `over` is min, median or max; PROCESSES_RANK has the process that it is of. It has no label
        for a device.
        """
        return f"{PREFIX}processes_{self.name.replace('/', '_')}"


def recent_mfu(values: Iterable[float]) -> float | None:
    """Returns the MFU of a run by that of each of its rows (NaN where a row does not say): the one that all who show it
    show.
    """
    known = [value for value in list(values)[-RECENT_ROWS:] if math.isfinite(value)]
    return float(statistics.median(known)) if known else None


def _step(
    name: str,
    unit: str,
    meaning: str,
    kind: Kind = "gauge",
    labels: tuple[str, ...] = (),
) -> Metric:
    return Metric(name, "step", kind, unit, meaning, labels)


def _process(
    name: str,
    unit: str,
    meaning: str,
    kind: Kind = "gauge",
    labels: tuple[str, ...] = (),
) -> Metric:
    return Metric(name, "process", kind, unit, meaning, labels)


METRICS: tuple[Metric, ...] = (
    _step("step", "", "optimizer steps taken"),
    _step(
        "loss",
        "",
        "training loss of the step, a mean over its tokens (dpo: over its pairs)",
    ),
    _step(
        "nll",
        "",
        "negative log-likelihood of the step's tokens, where loss holds label smoothing or z-loss too",
    ),
    _step(
        "eval_loss",
        "",
        "mean loss over validation data: negative log-likelihood (dpo: the loss of pairs), without label smoothing "
        "and z-loss",
    ),
    _step(
        "eval_regularized_loss",
        "",
        "the same with the label smoothing and z-loss that are trained with",
    ),
    _step(
        "eval_accuracy",
        "",
        "images: share of the validation ones whose argmax class is theirs",
    ),
    _step(
        "rewards_chosen",
        "",
        "dpo: beta times the log of how much likelier than the reference, of chosen answers",
    ),
    _step("rewards_rejected", "", "the same of rejected answers"),
    _step(
        "rewards_margins",
        "",
        "reward of the chosen answer over that of the rejected one, a mean over pairs",
    ),
    _step(
        "rewards_accuracies",
        "",
        "share of the pairs whose chosen answer has the greater reward",
    ),
    _step("rl/reward", "", "grpo: mean reward of the step's answers"),
    _step("rl/reward_std", "", "grpo: standard deviation of these rewards"),
    _step(
        "rl/flat_groups",
        "",
        "grpo: share of the prompts whose answers all have one reward",
    ),
    _step("rl/answer_tokens", "", "grpo: tokens of an answer, on average"),
    _step(
        "rl/ended",
        "",
        "grpo: share of the answers that an end token ended, not rl.answers",
    ),
    _step(
        "rl/rewards_failed", "", "grpo: calls of rewards that failed, whose reward is 0"
    ),
    _step(
        "rl/draw_seconds",
        "seconds",
        "grpo: weights laid out for decoding, and answers drawn",
    ),
    _step("rl/reward_seconds", "seconds", "grpo: answers scored"),
    _step(
        "rl/gap_max",
        "",
        "grpo: largest difference of a token's log-probability between drawing and training",
    ),
    _step("rl/gap_mean", "", "grpo: the mean of these differences"),
    _step("rl/clipped", "", "grpo: share of the tokens whose ratio is clipped"),
    _step(
        "rl/entropy",
        "",
        "grpo: mean of -log pi of the drawn tokens, an estimate of the entropy",
    ),
    _step("rl/kl", "", "grpo: distance (k3) from the reference"),
    _step(
        "rl/teacher_kl",
        "",
        "grpo: KL divergence from rl.teacher, a mean over drawn tokens",
    ),
    _step("grad_norm", "", "global norm of the gradient before clipping"),
    _step("learning_rate", "", "learning rate of the step"),
    _step("loss_scale", "", "float16: the loss scale"),
    _step(
        "skipped",
        "",
        "float16: steps skipped so far because their gradient overflowed; of islands by themselves the most of any",
    ),
    _step(
        "reduce_bytes",
        "bytes",
        "compressed gradients: bytes that a device sends in a step to sum them",
    ),
    _step("reduce_ratio", "", "the bytes of float32 gradients over those"),
    _step(
        "reduce_error",
        "",
        "norm of what compression left out of the gradients, over theirs; not where each microbatch scatters them",
    ),
    _step(
        "residual_norm",
        "",
        "error feedback: norm of all that is left out so far, to be sent in later steps",
    ),
    _step(
        "sync_bytes",
        "bytes",
        "islands brought together: bytes that a device sent across for it",
    ),
    _step(
        "sync_drift",
        "",
        "norm of the mean of what islands moved since they were brought together before (of the fragment)",
    ),
    _step(
        "sync_islands", "", "islands that took part: those whose weights were finite"
    ),
    _step(
        "qk_clip/max_logit",
        "",
        "optimizer.qk_clip: the largest attention logit of all heads",
    ),
    _step(
        "qk_clip/clipped_heads",
        "",
        "the same: heads whose weights were shrunk, of all layers",
    ),
    _step(
        "expert_load",
        "",
        "experts: tokens of the fullest over the mean, in the worst layer",
    ),
    _step(
        "router_entropy",
        "",
        "experts: entropy of the routers' probabilities in nats, a mean over tokens and layers",
    ),
    _step(
        "dropped_rows",
        "",
        "experts: rows of the step that a capacity had no room for, of all layers",
    ),
    _step(
        "expert_rounds",
        "",
        "experts, without a capacity: rounds in which rows go to their experts, a mean over tokens and layers",
    ),
    _step(
        "layer_expert_load",
        "",
        "telemetry.experts_every: expert_load of each layer",
        labels=("layer",),
    ),
    _step(
        "layer_router_entropy",
        "",
        "the same: router_entropy of each layer",
        labels=("layer",),
    ),
    _step(
        "layer_dropped_rows",
        "",
        "the same: dropped_rows of each layer",
        labels=("layer",),
    ),
    _step(
        "layer_expert_rounds",
        "",
        "the same: expert_rounds of each layer",
        labels=("layer",),
    ),
    _step(
        "tokens",
        "tokens",
        "tokens of the step, padding left out; in the endpoint of all steps",
        "counter",
    ),
    _step(
        "padding_tokens",
        "tokens",
        "positions of the step that hold no token; in the endpoint of all steps",
        "counter",
    ),
    _step(
        "tokens_per_second",
        "",
        "tokens of the step over its seconds, all devices; padding left out",
    ),
    _step(
        "step_seconds",
        "seconds",
        "from one step's metrics to the next one's, without compiling and evaluating",
    ),
    _step("data_wait_seconds", "seconds", "of these, waiting for the loader"),
    _step(
        "dispatch_seconds",
        "seconds",
        "of these, handing the step to the devices, on the first process",
    ),
    _step(
        "wait_seconds", "seconds", "of these, the first process waited for its devices"
    ),
    _step(
        "mfu",
        "",
        "model FLOPs utilisation: tokens a second over those at the devices' peak (PaLM, appendix B), of the row; "
        f"the endpoint, monitor and report have the median of the last {RECENT_ROWS} rows",
    ),
    _step(
        "compiles",
        "",
        "programs compiled since the row before, or taken from the cache",
        "counter",
    ),
    _step("compile_seconds", "seconds", "seconds that XLA took for them", "counter"),
    _step(
        "memory_in_use_bytes",
        "bytes",
        "memory that is taken on the fullest device of the first process",
    ),
    _step("memory_peak_bytes", "bytes", "the most that was taken there at once so far"),
    _step("checkpoint_seconds", "seconds", "a save from its begin until it is on disk"),
    _step(
        "checkpoint_blocked_seconds", "seconds", "of these, the step loop stood still"
    ),
    _step("checkpoint_bytes", "bytes", "bytes written by the save, all processes"),
    _process(
        "cpu_ratio",
        "ratio",
        "processor time of the process, over that of the cores that it may use",
    ),
    _process(
        "machine_cpu_ratio",
        "ratio",
        "processor time of everything on the machine, over that of its cores",
    ),
    _process("process_rss_bytes", "bytes", "memory of the process that is in RAM"),
    _process(
        "memory_used_ratio",
        "ratio",
        "memory of the machine that nothing new could have",
    ),
    _process(
        "memory_limit_bytes",
        "bytes",
        "memory that the process is allowed: telemetry.memory_limit, or its cgroup's",
    ),
    _process(
        "memory_limit_used_ratio",
        "ratio",
        "how much of that is used: by the process, or by all of the cgroup",
    ),
    _process("swap_used_bytes", "bytes", "swap that the machine uses"),
    _process(
        "pressure_cpu_ratio",
        "ratio",
        "share of the last 10 s in which something waited for a core (PSI)",
    ),
    _process(
        "pressure_memory_ratio",
        "ratio",
        "share of the last 10 s in which something waited for memory (PSI)",
    ),
    _process(
        "pressure_io_ratio",
        "ratio",
        "share of the last 10 s in which something waited for a disk (PSI)",
    ),
    _process(
        "disk_free_bytes", "bytes", "room on the file system of the run directory"
    ),
    _process("disk_used_ratio", "ratio", "how full that file system is"),
    _process("disk_read_bytes_per_second", "", "read from the machine's disks"),
    _process("disk_written_bytes_per_second", "", "written to the machine's disks"),
    _process(
        "network_sent_bytes_per_second",
        "",
        "sent by the machine's network cards; InfiniBand is not counted",
    ),
    _process("network_received_bytes_per_second", "", "received by them"),
    _process(
        "device_memory_used_bytes",
        "bytes",
        "device memory that is taken: by JAX's count, else by NVML's",
        labels=("device",),
    ),
    _process(
        "device_memory_limit_bytes",
        "bytes",
        "device memory that there is to take",
        labels=("device",),
    ),
    _process(
        "device_load_ratio",
        "ratio",
        "share of the time in which some kernel ran, one that waits included",
        labels=("device",),
    ),
    _process(
        "device_power_watts", "watts", "power that the board takes", labels=("device",)
    ),
    _process(
        "device_temperature_celsius",
        "celsius",
        "temperature of the chip",
        labels=("device",),
    ),
    _process(
        "device_memory_temperature_celsius",
        "celsius",
        "temperature of its memory",
        labels=("device",),
    ),
    _process(
        "device_throttled",
        "",
        "1: the clock is held down for this reason",
        labels=("device", "reason"),
    ),
    _process(
        "phase_seconds",
        "seconds",
        "of this process's main thread, since the sample before; stopped, queued: while it waited, but the process "
        "did not run",
        "counter",
        ("phase",),
    ),
)

BY_NAME = {metric.name: metric for metric in METRICS}
