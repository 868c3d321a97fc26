"""Where rows of metrics.jsonl may go besides: TensorBoard, Weights & Biases, MLflow, each behind two functions.

    tensorboard   RUN/tensorboard/                     tensorboard --logdir RUN
    wandb         RUN/wandb/, and its server           WANDB_MODE=offline keeps it here, `wandb sync` sends it later
    mlflow        MLFLOW_TRACKING_URI, or RUN/mlruns/

What each of them needs else (a key, a project, a server) it finds in variables of the environment, as anywhere. A run that goes on goes
on in the same run there: their numbers are in trackers.json. What a tracker raises is said once, and training goes on.
"""

import contextlib
import json
import os
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import yaml

from meshtrain.config import Config, to_yaml
from meshtrain.files import write_atomically
from meshtrain.run.directory import TRACKERS
from meshtrain.telemetry.catalogue import Source
from meshtrain.telemetry.tensorboard import EventFile

PROJECT = "meshtrain"


class Tracker(Protocol):
    def row(self, step: int, values: Mapping[str, float]) -> None:
        """The numbers of a row, its `time` in unix seconds among them, but for `step`."""

    def close(self) -> None: ...


class Tracked:
    """A listener of the hub for one tracker, which is opened on the hub's thread at its first row: that may take a network's time."""

    def __init__(self, name: str, config: Config, directory: Path) -> None:
        self.name = f"the tracker {name}"
        self._open: Callable[[], Tracker] = lambda: TRACKERS_BY_NAME[name](config, directory)
        self._tracker: Tracker | None = None

    def __call__(self, row: Mapping[str, Any], source: Source) -> None:
        if source != "step":
            return
        if self._tracker is None:
            self._tracker = self._open()
        # true is no number, though Python counts it as one.
        numbers = {
            name: value
            for name, value in row.items()
            if isinstance(value, (int, float)) and not isinstance(value, bool)
        }
        self._tracker.row(int(numbers.pop("step")), numbers)

    def close(self) -> None:
        if self._tracker is not None:
            self._tracker.close()


def _tensorboard(config: Config, directory: Path) -> Tracker:
    return EventFile(directory / "tensorboard")


class _Wandb:
    def __init__(self, config: Config, directory: Path) -> None:
        wandb = _imported("wandb")
        # Its own loop over the machine, and what it reads of the terminal, are not asked for. A question on a terminal would wait for ever.
        settings = wandb.Settings(console="off", quiet=True, x_disable_stats=True, login_timeout=1)
        self._run = wandb.init(
            dir=str(directory), project=os.environ.get("WANDB_PROJECT", PROJECT), name=directory.name,
            id=remembered(directory, "wandb", lambda: uuid.uuid4().hex[:8]), resume="allow", config=_settings(config), settings=settings,
        )  # fmt: skip
        # Its own count of steps never goes back, as a run that goes on from a checkpoint does.
        self._run.define_metric("*", step_metric="step")

    def row(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def close(self) -> None:
        self._run.finish()


class _Mlflow:
    def __init__(self, config: Config, directory: Path) -> None:
        where = os.environ.get("MLFLOW_TRACKING_URI")
        if where is None:
            # Files, because mlflow-skinny has no database; newer versions want to be asked for them.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            where = (directory / "mlruns").as_uri()
        mlflow = _imported("mlflow")
        self._metric = mlflow.entities.Metric
        self._client = mlflow.MlflowClient(tracking_uri=where)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        known = self._client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else self._client.create_experiment(name)

        def begin() -> str:
            run = self._client.create_run(experiment, run_name=directory.name).info.run_id
            given = [mlflow.entities.Param(key, str(value)) for key, value in _flat(_settings(config)).items()]
            self._client.log_batch(run, params=given)
            return run

        self._run = remembered(directory, "mlflow", begin)
        self._client.update_run(self._run, status="RUNNING")

    def row(self, step: int, values: Mapping[str, float]) -> None:
        when = int(values["time"] * 1000)
        self._client.log_batch(
            self._run, metrics=[self._metric(name, value, when, step) for name, value in values.items()]
        )

    def close(self) -> None:
        self._client.set_terminated(self._run)


TRACKERS_BY_NAME: dict[str, Callable[[Config, Path], Tracker]] = {
    "tensorboard": _tensorboard,
    "wandb": _Wandb,
    "mlflow": _Mlflow,
}


def _imported(name: str) -> Any:
    """A tracker's library; RuntimeError that says how it is had."""
    try:
        # Not at the top: few runs need it, and it takes a second.
        if name == "wandb":
            import wandb as library
        else:
            import mlflow as library
            import mlflow.entities
    except ImportError:
        raise RuntimeError(f"{name} is not installed; pip install 'meshtrain[{name}]'.") from None
    return library


def remembered(directory: Path, tracker: str, make: Callable[[], str]) -> str:
    """The tracker's number of this run: that of the first time."""
    path, known = directory / TRACKERS, dict[str, str]()
    with contextlib.suppress(OSError, ValueError):
        known = dict(json.loads(path.read_text()))
    if tracker not in known:
        known[tracker] = make()
        write_atomically(path, json.dumps(known).encode() + b"\n")
    return known[tracker]


def _settings(config: Config) -> dict[str, Any]:
    """The resolved config as plain values."""
    return yaml.safe_load(to_yaml(config))


def _flat(sections: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {f"{section}.{key}": value for section, keys in sections.items() for key, value in keys.items()}
