"""Sends rows of metrics.jsonl to trackers: TensorBoard, Weights & Biases, MLflow, each behind two functions.

    tensorboard   RUN/tensorboard/                     tensorboard --logdir RUN
    wandb         RUN/wandb/, and its server           WANDB_MODE=offline keeps it here, `wandb sync` sends it later
    mlflow        MLFLOW_TRACKING_URI, or RUN/mlruns/

Each finds its key, project and server in the usual environment variables. A run that is resumed continues the same run
there: their numbers are in trackers.json. An error of a tracker is reported once, and training goes
on.

TensorBoard's event files need no TensorBoard: length and CRC around each protobuf message, of which we need seven
fields.

    TFRecord        uint64 length │ masked CRC-32C of it │ message │ masked CRC-32C of it
    Event           1 wall_time (double)  2 step (int64)  3 file_version  5 summary  7 session_log
    Summary.value   1 tag  2 simple_value (float)

They are described in tensorflow/core: lib/io/record_writer.h, util/event.proto and framework/summary.proto.

Numbers are float32 there. A run that goes on from an earlier step begins with a session's start, at which TensorBoard
drops the steps that will come once more.
"""

import contextlib
import importlib
import json
import math
import os
import socket
import struct
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import yaml

from meshtrain.config import Config, to_yaml
from meshtrain.errors import install_command
from meshtrain.files import write_atomically
from meshtrain.run.directory import TRACKERS
from meshtrain.run.hooks import Listener, Row, RowSource

PROJECT = "meshtrain"


class Tracker(Protocol):
    def row(self, step: int, values: Mapping[str, float]) -> None:
        """Takes the numbers of a row, its `time` in unix seconds among them, but for `step`."""

    def close(self) -> None: ...


class Tracked(Listener):
    """A listener of the hub for one tracker, which is opened on the hub's thread at its first row: that may take a
    network's time.
    """

    def __init__(self, name: str, config: Config, directory: Path) -> None:
        self.name = f"the tracker {name}"
        self._open: Callable[[], Tracker] = lambda: TRACKERS_BY_NAME[name](
            config, directory
        )
        self._tracker: Tracker | None = None

    def on_row(self, row: Row, source: RowSource) -> None:
        if source != "step":
            return
        if self._tracker is None:
            self._tracker = self._open()
        # true is no number, though Python counts it as one.
        numbers = {
            key: value for key, value in row.items() if type(value) in (int, float)
        }
        self._tracker.row(int(numbers.pop("step")), numbers)

    def close(self) -> None:
        if self._tracker is not None:
            self._tracker.close()


class _Wandb:
    def __init__(self, config: Config, directory: Path) -> None:
        wandb = _imported("wandb")
        # Its own loop over the machine, and what it reads of the terminal, are not asked for. A question on a terminal
        # would wait for ever.
        settings = wandb.Settings(
            console="off", quiet=True, x_disable_stats=True, login_timeout=1
        )
        self._run = wandb.init(
            dir=str(directory),
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=directory.name,
            resume="allow",
            id=remembered(directory, "wandb", lambda: uuid.uuid4().hex[:8]),
            config=yaml.safe_load(to_yaml(config)),
            settings=settings,
        )
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
        entities = importlib.import_module("mlflow.entities")
        self._metric = entities.Metric
        self._client = mlflow.MlflowClient(tracking_uri=where)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        known = self._client.get_experiment_by_name(name)
        experiment = (
            known.experiment_id if known else self._client.create_experiment(name)
        )

        def begin() -> str:
            run = self._client.create_run(
                experiment, run_name=directory.name
            ).info.run_id
            sections = yaml.safe_load(to_yaml(config)).items()
            parameters = [
                entities.Param(f"{section}.{key}", str(value))
                for section, keys in sections
                for key, value in keys.items()
            ]
            self._client.log_batch(run, params=parameters)
            return run

        self._run = remembered(directory, "mlflow", begin)
        self._client.update_run(self._run, status="RUNNING")

    def row(self, step: int, values: Mapping[str, float]) -> None:
        when = int(values["time"] * 1000)
        metrics = [
            self._metric(name, value, when, step) for name, value in values.items()
        ]
        self._client.log_batch(self._run, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self._run)


TRACKERS_BY_NAME: dict[str, Callable[[Config, Path], Tracker]] = {
    "tensorboard": lambda _, directory: EventFile(directory / "tensorboard"),
    "wandb": _Wandb,
    "mlflow": _Mlflow,
}


def _imported(name: str) -> Any:
    try:
        # Not at the top: few runs need it, and it takes a second.
        return importlib.import_module(name)
    except ImportError:
        raise RuntimeError(
            f"{name} is not installed: {install_command(name)}."
        ) from None


def remembered(directory: Path, tracker: str, make: Callable[[], str]) -> str:
    """Returns the tracker's number of this run: that of the first time."""
    path = directory / TRACKERS
    known = dict[str, str]()
    with contextlib.suppress(OSError, ValueError):
        known = dict(json.loads(path.read_text()))
    if tracker not in known:
        known[tracker] = make()
        write_atomically(path, json.dumps(known).encode() + b"\n")
    return known[tracker]


# --- TensorBoard

POLYNOMIAL = 0x82F63B78  # CRC-32C (Castagnoli), bits reversed
START = 1  # SessionLog.SessionStatus


def _table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ POLYNOMIAL * (byte & 1)
        table.append(byte)
    return tuple(table)


TABLE = _table()


def masked_crc(data: bytes) -> int:
    """Returns the CRC-32C, turned and shifted so that a CRC of data with CRCs in it stays a good one."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def record(message: bytes) -> bytes:
    length = struct.pack("<Q", len(message))
    return (
        length
        + struct.pack("<I", masked_crc(length))
        + message
        + struct.pack("<I", masked_crc(message))
    )


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*encoded, number])


def _nested(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _event(wall_time: float, step: int, rest: bytes) -> bytes:
    return record(
        b"\x09" + struct.pack("<d", wall_time) + b"\x10" + _varint(step) + rest
    )


class EventFile:
    """A tracker: one event a row, with a value for each number, in a file of this process's own."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        now = time.time()
        name = f"events.out.tfevents.{now:.0f}.{socket.gethostname()}.{os.getpid()}.{time.monotonic_ns()}"
        # Unbuffered, so that a killed run loses nothing.
        self._file = (directory / name).open("xb", buffering=0)
        self._file.write(_event(now, 0, _nested(3, b"brain.Event:2")))
        self._begun = False

    def row(self, step: int, values: Mapping[str, float]) -> None:
        when = values.get("time", time.time())
        start = (
            b""
            if self._begun
            else _event(when, step, _nested(7, b"\x08" + _varint(START)))
        )
        self._begun = True
        summary = b"".join(
            _nested(1, _nested(1, tag.encode()) + _simple_value(value))
            for tag, value in values.items()
        )
        self._file.write(start + _event(when, step, _nested(5, summary)))

    def close(self) -> None:
        self._file.close()


def _simple_value(value: float) -> bytes:
    try:
        return b"\x15" + struct.pack("<f", value)
    # What is too large for float32 becomes infinite, as in NumPy.
    except OverflowError:
        return b"\x15" + struct.pack("<f", math.copysign(math.inf, value))
