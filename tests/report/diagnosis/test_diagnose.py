"""`report RUN --diagnose` on run directories: what is read, what is said, what is left behind."""

import json
import random
import shutil

import pytest
from refusals import tells
from synthetic_history import Synthetic

from meshtrain.config import ConfigError, load, to_yaml
from meshtrain.report.diagnosis import diagnose, tracing
from meshtrain.report.facts import gather
from meshtrain.report.summary import summarise
from meshtrain.report.text import render
from meshtrain.report.trace.attribution import Attribution
from meshtrain.survive import history
from meshtrain.survive.ledger import ledger

CONFIG = (
    "run.fake_devices=2", "mesh.data=2", "model.layers=1", "model.d_model=32", "model.heads=2", "model.vocab_size=260",
    "train.global_batch_size=4", "train.sequence_length=16", "train.steps=3", "data.source=synthetic",
)  # fmt: skip
ALONE = {"cpu_ratio": 0.9, "machine_cpu_ratio": 0.92, "memory_used_ratio": 0.3}


@pytest.fixture
def run(tmp_path):
    """A run of two processes that waited for data half of the time."""
    directory = tmp_path / "run"
    (directory / "resources").mkdir(parents=True)
    (directory / "config.yaml").write_text(
        to_yaml(load({}, [*CONFIG, f"run.directory={directory}"]))
    )
    rows = [
        {"step": s, "time": 100.0 + s, "step_seconds": 1.0, "data_wait_seconds": 0.5}
        for s in range(1, 9)
    ]
    (directory / "metrics.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows) + '{"step": 9, "da'
    )
    for rank in range(2):
        half = ALONE | {
            "rank": rank,
            "host": f"h{rank}",
            "phase_seconds": {"data": 0.5, "wait": 0.5},
        }
        lines = [json.dumps({"time": 101.0 + k} | half) for k in range(4)]
        (directory / "resources" / f"{rank}.jsonl").write_text(
            "\n".join(["not json", *lines]) + "\n"
        )
    return directory


@pytest.fixture
def no_trace(monkeypatch):
    """Nothing is traced; the config that would have been."""
    asked = []

    def trace(config):
        asked.append(config)
        return Attribution("cpu", 2, 3, 1.0, {"forward": 0.4, "backward": 0.6})

    monkeypatch.setattr(diagnose, "trace_beside", trace)
    return asked


def test_a_run_is_read_and_its_findings_are_said_and_kept(run, no_trace):
    found = diagnose.run(run)
    assert found.first == "loader" and found.findings[0].value == pytest.approx(0.5)
    assert json.loads((run / "findings.json").read_text()) == json.loads(
        json.dumps(found.as_json())
    )
    facts = gather(run)
    said = render(facts, summarise(facts))
    assert (
        tells(said, "1. The devices wait for data 50%") and "waiting for data" in said
    )
    (layers,) = (line for line in said.splitlines() if line.startswith("    layers"))
    assert "500 ms 50%" in layers


def test_what_samples_of_both_ranks_say_is_read(run):
    evidence = diagnose.read(run)
    assert evidence.hosts == {0: "h0", 1: "h1"} and evidence.rows == 7
    nothing = dict.fromkeys(("dispatch", "log", "stopped", "queued"), 0.0)
    assert evidence.phases()[1] == {"data": 0.5, "wait": 0.5} | nothing


def test_time_that_faults_took_is_read_of_a_supervised_run(run):
    assert diagnose.read(run).lost is None
    Synthetic(random.Random(1), nodes=2, faults=6).play().write(run)
    evidence = diagnose.read(run)
    told = ledger(history.read(run))
    assert (
        evidence.lost
        == pytest.approx((told.seconds["lost"] + told.seconds["down"]) / told.wall)
        and evidence.lost > 0
    )


def test_a_trace_that_fails_leaves_the_other_findings_and_says_why(run, monkeypatch):
    def failing(config):
        raise RuntimeError("no such device.")

    monkeypatch.setattr(diagnose, "trace_beside", failing)
    found = diagnose.run(run)
    assert found.first == "loader"
    assert any("no such device" in sentence for sentence in found.cannot_tell)


def test_a_run_that_goes_on_is_not_disturbed_by_a_trace(run, no_trace, monkeypatch):
    monkeypatch.setattr(diagnose, "in_use", lambda directory: True)
    found = diagnose.run(run)
    assert not no_trace and any(
        "telemetry.trace_at" in sentence for sentence in found.cannot_tell
    )


def test_a_directory_that_may_not_be_written_is_diagnosed_all_the_same(
    run, no_trace, monkeypatch, capsys
):
    def refused(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(diagnose, "write_atomically", refused)
    assert diagnose.run(run).first == "loader"
    assert "findings.json cannot be written: permission" in capsys.readouterr().err


def test_a_directory_that_is_no_run_is_refused_in_a_sentence(tmp_path):
    with pytest.raises(ConfigError, match="not a run directory"):
        diagnose.run(tmp_path)


def test_runs_on_gpus_are_held_against_a_named_cluster_alone(run, no_trace):
    path = run / "resources" / "0.jsonl"
    path.write_text(
        path.read_text()
        + json.dumps({"time": 105.0, "device_memory_used_bytes": {"0": 5e9}})
        + "\n"
    )
    assert any("--cluster" in sentence for sentence in diagnose.run(run).cannot_tell)
    assert diagnose.run(run, "h100").cluster == "dgx-h100"
    with pytest.raises(ConfigError, match="no such file or accelerator"):
        diagnose.run(run, "h10")


def test_a_run_of_which_no_file_tells_the_devices_is_held_against_no_plan(run):
    config = load({}, [*CONFIG, "run.fake_devices=0", f"run.directory={run}"])
    (run / "config.yaml").write_text(to_yaml(config))
    assert diagnose.read(run).plan.cluster.accelerator.name == "cpu"
    shutil.rmtree(run / "resources")
    assert diagnose.read(run).plan is None


@pytest.mark.thorough
def test_a_child_that_cannot_train_is_told_in_its_own_words(tmp_path, capfd):
    config = load({}, [*CONFIG, f"data.source={tmp_path}/gone"])
    with pytest.raises(RuntimeError, match="gone"):
        tracing.trace_beside(config)


@pytest.mark.thorough
def test_a_run_without_a_trace_is_traced_beside_and_left_as_it_was(run, capfd):
    before = sorted(path.name for path in run.rglob("*"))
    found = diagnose.run(run)
    measured = {part.name: part.seconds for part in found.parts}
    assert measured["layers"] > 0 and found.first == "loader"
    assert sorted(path.name for path in run.rglob("*")) == sorted(
        [*before, "findings.json"]
    )
    assert "steps of its config are taken" in capfd.readouterr().err
