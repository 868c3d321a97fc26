"""Trackers: what each of them keeps is what metrics.jsonl says; what one raises ends no run."""

import json
import struct
import sys
import time

import pytest
from refusals import tells

from meshtrain.config import Config
from meshtrain.errors import install_command
from meshtrain.run.rows import MetricsFile
from meshtrain.telemetry import trackers
from meshtrain.telemetry.hub import Hub
from meshtrain.telemetry.trackers import Tracked, remembered

ROWS = [
    {
        "step": step,
        "loss": 5.623963356018066 / step,
        "tokens": 2048,
        "step_seconds": 0.1 * step,
        "time": 1795361828.5 + step,
    }
    for step in range(1, 6)
]
ROWS[2]["eval_loss"] = 4.786746978759766


def tracked(directory, name, rows=ROWS):
    """Rows go to metrics.jsonl and to the tracker, as in a run; what metrics.jsonl says, by step and name."""
    file = MetricsFile(directory / "metrics.jsonl")
    with Hub(Config(), directory) as hub:
        hub.listen(Tracked(name, Config(), directory))
        for row in rows:
            file.write(row)
            hub.after_metrics(row, due=True)
    file.close()
    written = [
        json.loads(line)
        for line in (directory / "metrics.jsonl").read_text().splitlines()
    ]
    return {
        (row["step"], name): value
        for row in written
        for name, value in row.items()
        if name != "step"
    }


def wandb_numbers(directory):
    """What the offline runs of a directory hold: LevelDB's log of protobuf messages, see wandb's core/pkg/leveldb."""
    messages = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    found, runs = {}, []
    for path in sorted(directory.glob("wandb/offline-run-*/*.wandb")):
        content, at, whole = path.read_bytes(), 7, b""
        while at + 7 <= len(content):
            if 32768 - at % 32768 < 7:
                at += 32768 - at % 32768
                continue
            size, kind = struct.unpack("<HB", content[at + 4 : at + 7])
            whole += content[at + 7 : at + 7 + size]
            at += 7 + size
            if kind in (1, 4):
                record, whole = messages.Record.FromString(whole), b""
                runs += [record.run.run_id] if record.HasField("run") else []
                items = {
                    item.key or item.nested_key[0]: json.loads(item.value_json)
                    for item in record.history.item
                }
                named = [name for name in items if name != "step" and name[0] != "_"]
                found |= {(items["step"], name): items[name] for name in named}
    return found, runs


def until(holds, seconds=20):
    """Its own process writes, and may still do so when the run has ended."""
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.05)
    return holds()


def test_wandb_offline_has_what_the_rows_say_and_goes_on_in_the_same_run(
    tmp_path, monkeypatch, capfd
):
    wandb = pytest.importorskip("wandb")
    wandb.teardown()
    monkeypatch.setenv("WANDB_MODE", "offline")
    written = tracked(tmp_path, "wandb")
    assert until(lambda: wandb_numbers(tmp_path)[0] == written)
    runs = wandb_numbers(tmp_path)[1]
    tracked(tmp_path, "wandb", [row | {"step": row["step"] + 3} for row in ROWS])
    assert until(
        lambda: (
            {(step, "loss") for step in range(1, 9)}
            <= wandb_numbers(tmp_path)[0].keys()
        )
    )
    assert set(wandb_numbers(tmp_path)[1]) == set(runs) and len(set(runs)) == 1
    assert "left out" not in capfd.readouterr().err


def test_wandb_without_a_key_is_a_sentence(tmp_path, monkeypatch, capsys):
    wandb = pytest.importorskip("wandb")
    # What it knows of the environment is of its first run in a process.
    wandb.teardown()
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    tracked(tmp_path, "wandb")
    assert capsys.readouterr().err.count("tracker wandb is left out of") == 1


def test_mlflow_has_what_the_rows_say_and_goes_on_in_the_same_run(
    tmp_path, monkeypatch
):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    written = tracked(tmp_path, "mlflow")
    client = mlflow.MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())

    def kept():
        (run,) = client.search_runs(
            [client.get_experiment_by_name("meshtrain").experiment_id]
        )
        history = {
            name: client.get_metric_history(run.info.run_id, name)
            for name in run.data.metrics
        }
        return run, {
            (one.step, name): one.value
            for name, values in history.items()
            for one in values
        }

    run, found = kept()
    assert found == written
    assert run.info.status == "FINISHED" and run.data.params["mesh.tensor"] == "1"
    tracked(tmp_path, "mlflow", [row | {"step": row["step"] + 3} for row in ROWS])
    assert kept()[1].keys() >= {(step, "loss") for step in range(1, 9)}


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_tracker_that_is_not_installed_says_how_it_is_had_once(
    name, tmp_path, monkeypatch, capsys
):
    monkeypatch.setitem(sys.modules, name, None)
    tracked(tmp_path, name)
    (said,) = capsys.readouterr().err.splitlines()
    assert tells(said, f"{name} is not installed", install_command(name))


def test_what_a_tracker_is_given_is_numbers_only(tmp_path, monkeypatch):
    given = []

    class Tracker:
        def row(self, step, values):
            given.append((step, values))

        def close(self):
            given.append("closed")

    monkeypatch.setitem(
        trackers.TRACKERS_BY_NAME, "mine", lambda config, directory: Tracker()
    )
    listener = Tracked("mine", Config(), tmp_path)
    listener.on_row(
        {"step": 3, "loss": 2.5, "note": "text", "odd": None, "flag": True}, "step"
    )
    listener.on_row({"step": 3, "cpu_ratio": 0.5}, "process")
    listener.close()
    assert given == [(3, {"loss": 2.5}), "closed"]


def test_a_runs_number_is_made_once_and_a_damaged_file_is_made_again(tmp_path):
    assert (
        remembered(tmp_path, "wandb", lambda: "a")
        == remembered(tmp_path, "wandb", lambda: "b")
        == "a"
    )
    assert (
        remembered(tmp_path, "mlflow", lambda: "m") == "m"
        and remembered(tmp_path, "wandb", lambda: "b") == "a"
    )
    (tmp_path / "trackers.json").write_text("{")
    assert remembered(tmp_path, "wandb", lambda: "c") == "c"
