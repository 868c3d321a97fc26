"""A whole run that is watched: what is left of it, and that nothing which watches changes or ends it."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request

import pytest
from free_port import free_port
from training_processes import Trainer, rows, settings


def samples(run, rank=0):
    return [
        json.loads(line)
        for line in (run / "resources" / f"{rank}.jsonl").read_text().splitlines()
    ]


@pytest.mark.thorough
def test_what_ends_a_run_is_told_before_it_ends(tmp_path):
    optimizer = {
        "name": "sgd",
        "learning_rate": 1e30,
        "warmup_steps": 1,
        "grad_clip": 0,
    }
    trainer = Trainer(
        settings(
            tmp_path,
            20,
            0,
            optimizer=optimizer,
            telemetry={"trackers": ["tensorboard"]},
        )
    )
    assert trainer.end() == 1, trainer.log.read_text()
    (alert,) = [
        json.loads(line)
        for line in (trainer.run / "alerts.jsonl").read_text().splitlines()
    ]
    assert (alert["rule"], alert["step"]) == (
        "loss_not_finite",
        rows(trainer.run)[-1]["step"],
    )
    assert trainer.log.read_text().count("the gradient norm of step ") == 1, (
        "the run itself says it"
    )
    assert samples(trainer.run)[-1]["step"] == alert["step"], "sampled once more, too"


@pytest.mark.thorough
def test_losses_are_the_same_bits_with_everything_on_and_off(tmp_path):
    """Traced, sampled without pause, served, tracked."""
    found, mesh = (
        {},
        {
            "mesh": {"data": 2, "tensor": 2, "pipeline": 2},
            "parallel": {"microbatches": 2},
        },
    )
    mesh |= {"eval": {"every": 4, "batches": 1}}
    everything = {
        "every": 0.01,
        "endpoint": free_port(),
        "trackers": ["tensorboard"],
        "trace_at": [3],
    }
    everything |= {"alerts": ["log", "file"]}
    for name, telemetry in (("off", {"every": 0, "alerts": []}), ("on", everything)):
        (tmp_path / name).mkdir()
        trainer = Trainer(settings(tmp_path / name, 8, 4, telemetry=telemetry, **mesh))
        assert trainer.end() == 0, trainer.log.read_text()
        found[name] = [
            (row["loss"], row["grad_norm"], row.get("eval_loss"))
            for row in rows(trainer.run)
        ]
        # Writing a trace is no waiting.
        assert all(
            row["wait_seconds"] <= row["step_seconds"] for row in rows(trainer.run)
        )
    assert found["on"] == found["off"]
    run = tmp_path / "on" / "run"
    assert (run / "traces/3/trace.json").is_file() and samples(run), "all of it was on"
    assert (
        not (tmp_path / "off/run/resources").exists()
        and not (tmp_path / "off/run/alerts.jsonl").exists()
    )


@pytest.mark.thorough
def test_a_short_run_is_sampled_and_served(tmp_path):
    port = free_port()
    page = f"http://127.0.0.1:{port}/metrics"
    trainer = Trainer(
        settings(tmp_path, 500, 0, telemetry={"endpoint": port, "every": 0.2})
    )

    def served():
        try:
            return (
                "\nmeshtrain_loss "
                in urllib.request.urlopen(page, timeout=5).read().decode()
            )
        except OSError:
            return False

    assert trainer.until(served), trainer.log.read_text()
    assert trainer.end() == 0, trainer.log.read_text()
    found = samples(trainer.run)
    assert len(found) >= 2 and found[-1]["step"] == 500, "once more at the end"
    spent = sum(row["phase_seconds"].get("compile", 0) for row in found)
    assert spent > 0 and {"time", "rank", "host"} <= found[0].keys()
    row = rows(trainer.run)[0]
    assert {
        "time",
        "dispatch_seconds",
        "wait_seconds",
        "compiles",
        "compile_seconds",
    } <= row.keys()
    assert row["dispatch_seconds"] + row["wait_seconds"] <= row["step_seconds"] * 1.01


@pytest.mark.thorough
def test_each_of_two_processes_has_its_own_samples_and_port_and_the_first_tells_of_both(
    tmp_path,
):
    port = free_port()
    telemetry = {"endpoint": port, "every": 0.2, "trackers": ["tensorboard"]}
    config = settings(tmp_path, 3000, 0, telemetry=telemetry, mesh={"data": 2})
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("XLA_FLAGS", "PJRT_NPROC")
    }
    kept |= {
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}",
        "JAX_NUM_PROCESSES": "2",
        "PYTHONPATH": os.getcwd(),
    }
    line = [sys.executable, "-m", "meshtrain.train", "--config", str(config)]
    ranks = [
        subprocess.Popen(
            line,
            env=kept | {"JAX_PROCESS_ID": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        pages = ["", ""]
        deadline = time.monotonic() + 120
        wanted = "meshtrain_processes_cpu_ratio", "\nmeshtrain_loss "
        while (
            time.monotonic() < deadline
            and not all(name in pages[0] for name in wanted)
            and ranks[0].poll() is None
        ):
            time.sleep(0.2)
            for rank in range(2):
                with contextlib.suppress(OSError):
                    page = urllib.request.urlopen(
                        f"http://127.0.0.1:{port + rank}/metrics", timeout=5
                    )
                    pages[rank] = page.read().decode()
        assert 'processes_rank{metric="process_rss_bytes",over="max"} ' in pages[0], (
            ranks[0].communicate()[0]
        )
        assert 'rank="1"' in pages[1] and "\nmeshtrain_cpu_ratio " in pages[1]
        assert "\nmeshtrain_loss " in pages[0] and "\nmeshtrain_loss " not in pages[1]
    finally:
        for rank in ranks:
            rank.send_signal(signal.SIGTERM)
        said = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [75, 75], said
    run = tmp_path / "run"
    assert [{row["rank"] for row in samples(run, rank)} for rank in range(2)] == [
        {0},
        {1},
    ]
    assert len(list((run / "tensorboard").iterdir())) == 1, "of the first process"
