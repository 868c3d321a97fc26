"""How a run is watched: the section `telemetry`. No key here changes what a step computes."""

from dataclasses import dataclass
from typing import Literal

from meshtrain.config.key import Resume, key
from meshtrain.errors import ConfigError
from meshtrain.telemetry import entries

FREE = Resume.FREE

Tracker = Literal["tensorboard", "wandb", "mlflow"]


# A key keeps together what it says.
# fmt: off
@dataclass(frozen=True)
class TelemetryConfig:
    every: float = key(
        10.0, "seconds between two samples of what a process and its machine use; at least 1, of many processes more; 0: none",
        least=0.0, most=86400.0, resume=FREE
    )
    endpoint: int = key(
        0, "port of the first process's page of metrics for Prometheus, the next ones of a machine have the next ports; 0: none",
        least=0, most=65535, resume=FREE
    )
    bind: str = key("127.0.0.1", "address that the endpoint listens on; 0.0.0.0 shows it to everyone, without a password", resume=FREE)
    trackers: tuple[Tracker, ...] = key(
        (), "where rows of metrics also go; wandb and mlflow are extras of these names (pip install 'meshtrain[wandb]')", resume=FREE
    )
    trace_at: tuple[int, ...] = key((), "steps before which the profiler starts; traces/STEP/ then has what it saw", least=1, resume=FREE)
    trace_steps: int = key(3, "steps that one trace takes in", least=1, most=100, resume=FREE)
    memory_limit: float = key(
        0.0, "GiB of host memory that a process is to stay below, for the alert; 0: what its cgroup allows, if anything",
        least=0.0, most=1e6, resume=FREE
    )
    alerts: tuple[str, ...] = key(
        ("log", "file"), "where alerts go: log (stderr), file (alerts.jsonl), webhook:URL, command:WORDS", resume=FREE
    )
# fmt: on


def check(telemetry: TelemetryConfig, steps: float) -> None:
    """ConfigError for keys that contradict each other. `steps`: of the whole run."""
    for entry in telemetry.alerts:
        entries.check(entry)
    for name in ("trackers", "alerts", "trace_at"):
        given = getattr(telemetry, name)
        if twice := [one for k, one in enumerate(given) if one in given[:k]]:
            raise ConfigError(f"telemetry.{name} has {twice[0]} twice; name it once.")
    if late := [step for step in telemetry.trace_at if step > steps]:
        raise ConfigError(f"telemetry.trace_at has {late[0]}, but train.steps is {steps}: that step is never reached.")
