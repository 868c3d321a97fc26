"""python -m meshtrain.train as a user meets it: files, exit codes, one plain sentence for a mistake."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
import yaml
from refusals import tells

from meshtrain import train
from meshtrain.checkpoint import Checkpointer, steps
from meshtrain.config import load
from meshtrain.optim import learning_rate
from meshtrain.plan import memory
from meshtrain.survive import heartbeat
from meshtrain.survive.injector import _changed_at
from meshtrain.survive.supervision import Supervision
from meshtrain.train import main
from meshtrain.units import size

pytestmark = pytest.mark.usefixtures("shared_programs")

TINY = {
    "model": {"layers": 2, "d_model": 16, "heads": 2, "d_ff": 32, "vocab_size": 260},
    "train": {"steps": 4, "global_batch_size": 4, "sequence_length": 16},
    "data": {"source": "synthetic"},
    "optimizer": {"warmup_steps": 1},
}


def write(directory: Path, **sections: dict) -> list[str]:
    """The arguments for a run of TINY with other sections, in a directory of its own."""
    config = {"run": {"directory": str(directory / "run")}, **TINY, **sections}
    (directory / "config.yaml").write_text(yaml.safe_dump(config))
    return ["--config", str(directory / "config.yaml")]


def rows(directory: Path) -> list[dict]:
    return [
        json.loads(line)
        for line in (directory / "run" / "metrics.jsonl").read_text().splitlines()
    ]


def test_a_run_on_all_three_axes_writes_config_metrics_and_checkpoints(
    tmp_path, capsys
):
    mesh = {
        "mesh": {"data": 2, "tensor": 2, "pipeline": 2},
        "parallel": {"microbatches": 2},
    }
    assert (
        main(
            write(
                tmp_path,
                **mesh,
                eval={"every": 2, "batches": 1},
                checkpoint={"every": 2},
            )
        )
        == 0
    )
    assert load(tmp_path / "run" / "config.yaml").mesh.pipeline == 2
    found = rows(tmp_path)
    assert [row["step"] for row in found] == [1, 2, 3, 4]
    needed = {
        "step",
        "loss",
        "grad_norm",
        "learning_rate",
        "tokens",
        "tokens_per_second",
        "step_seconds",
    }
    assert all(needed <= row.keys() for row in found)
    assert [row["step"] for row in found if "eval_loss" in row] == [2, 4]
    assert {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()} >= {
        "2",
        "4",
    }
    state = memory.total(memory.between_steps(load(tmp_path / "run" / "config.yaml")))
    assert f"ZeRO-1: {size(state)} of state a device\n" in capsys.readouterr().out


@pytest.mark.thorough
def test_text_that_must_be_prepared_first_is_announced(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text("words " * 1000)
    arguments = write(
        tmp_path, data={"source": str(tmp_path / "text.txt"), "validation": 0.0}
    )
    assert main([*arguments, "--set", "train.steps=1"]) == 0
    said = capsys.readouterr()
    (line,) = said.err.splitlines()
    assert line.startswith(
        f"meshtrain: preparing {tmp_path}/text.txt (1 files, 0.0 MB) in {tmp_path}/cache/"
    )
    assert f"{tmp_path}/text.txt: 93 batches an epoch of 64 tokens\n" in said.out


COUNTS_HITS = """
import sys
from meshtrain.train import main
import jax
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
hits = []
jax.monitoring.register_event_listener(lambda event, **_: "cache_hits" in event and hits.append(event))
assert main(sys.argv[1:]) == 0
print("hits", len(hits))
"""


@pytest.mark.thorough
def test_a_command_on_one_device_reads_what_the_last_one_compiled_and_removes_the_oldest(
    tmp_path,
):
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}

    def hits(name: str, text: str = COUNTS_HITS) -> int:
        (tmp_path / name).mkdir()
        command = [sys.executable, "-c", text, *write(tmp_path / name)]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True
        )
        return int(done.stdout.rpartition("hits ")[2])

    assert hits("first") == 0
    assert hits("second") > 2
    limited = COUNTS_HITS.replace(
        "import jax", "import jax, meshtrain.train as t; t.CACHE = 0"
    )
    assert hits("third", limited) == 0


@pytest.mark.thorough
def test_a_run_in_64_bits_is_refused_by_the_name_of_the_setting(tmp_path, capsys):
    with jax.enable_x64(True):
        assert main(write(tmp_path)) == 2
    assert tells(capsys.readouterr().err, "JAX_ENABLE_X64", "precision.compute")


def test_a_run_that_is_done_adds_nothing_when_run_again(tmp_path):
    arguments = write(tmp_path)
    assert main(arguments) == 0
    before = rows(tmp_path)
    assert main(arguments) == 0
    assert rows(tmp_path) == before


@pytest.mark.thorough
def test_a_longer_run_goes_on_where_the_shorter_one_ended(tmp_path):
    constant = {"optimizer": {"schedule": "constant", "warmup_steps": 0}}
    assert main([*write(tmp_path, **constant), "--set", "train.steps=2"]) == 0
    assert main(write(tmp_path, **constant)) == 0
    once = tmp_path / "once"
    once.mkdir()
    assert main(write(once, **constant)) == 0
    assert [(row["step"], row["loss"]) for row in rows(tmp_path)] == [
        (row["step"], row["loss"]) for row in rows(once)
    ]


@pytest.mark.thorough
def test_metrics_are_logged_every_so_many_steps_and_at_the_last(tmp_path):
    assert main([*write(tmp_path, log={"every": 3})]) == 0
    assert [row["step"] for row in rows(tmp_path)] == [3, 4]


@pytest.mark.thorough
def test_a_gradient_that_is_not_finite_stops_the_run_with_exit_code_1_and_says_at_which_step(
    tmp_path, capsys
):
    wild = {
        "optimizer": {
            "name": "sgd",
            "learning_rate": 1e30,
            "grad_clip": 0.0,
            "warmup_steps": 0,
        }
    }
    assert main(write(tmp_path, **wild)) == 1
    error = capsys.readouterr().err
    assert (
        tells(error, "gradient norm of step 2 is nan; ")
        and len(error.splitlines()) == 1
    )


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("steps", "optimizer"),
    [(4, {"name": "adamw"}), (1, {"name": "sgd", "grad_clip": 0.0})],
)
def test_weights_that_an_update_made_useless_are_never_saved(
    tmp_path, capsys, steps, optimizer
):
    """At a checkpoint step, at the last one, and when the run is started again."""
    wild = {
        "optimizer": {**optimizer, "learning_rate": 1e30, "warmup_steps": 0},
        "checkpoint": {"every": 1},
    }
    for before in ([], ["no checkpoint was written before"]):
        assert main([*write(tmp_path, **wild), "--set", f"train.steps={steps}"]) == 1
        said = capsys.readouterr().err.splitlines()
        says = [*before, "step 1 left weights or optimizer state"]
        assert len(said) == len(says) and all(
            map(str.startswith, said, (f"meshtrain: {s}" for s in says))
        )
        assert list((tmp_path / "run" / "checkpoints").iterdir()) == []
        assert [row["step"] for row in rows(tmp_path)] == [1]


@pytest.mark.thorough
def test_copies_that_differ_end_a_run_before_they_are_saved(
    tmp_path, capsys, monkeypatch
):
    def flip(self, moment, step=None, given=(None, None)):
        state, batch = given
        return (
            (_changed_at(state, lambda leaf: True, lambda part: part.fill(1)), batch)
            if step == 2 and state
            else given
        )

    monkeypatch.setattr(Supervision, "at", flip)
    mesh = {
        "mesh": {"data": 2},
        "parallel": {"zero_stage": 0},
        "checkpoint": {"every": 2},
    }
    assert main(write(tmp_path, **mesh)) == 1
    said = capsys.readouterr().err
    assert tells(said, "rank 0 holds other bits", "params.", "nothing", "saved.")
    assert steps.committed_in(tmp_path / "run" / "checkpoints") == [2]


@pytest.mark.thorough
def test_float16_rows_tell_of_skipped_steps_and_a_resumed_run_goes_on_counting(
    tmp_path,
):
    half = {
        "precision": {"compute": "float16", "loss_scale": 2.0**23},
        "checkpoint": {"every": 3},
    }
    arguments = [*write(tmp_path, **half), "--set", "train.steps=8"]
    assert main(arguments) == 0
    whole = rows(tmp_path)
    updates, rate = 0, learning_rate(load(arguments[1], ["train.steps=8"]))
    for row in whole:
        assert row["learning_rate"] == pytest.approx(float(rate(updates)), rel=1e-6)
        updates += row["grad_norm"] is not None
        assert (row["step"] - updates, row["tokens"]) == (row["skipped"], 64)
        assert row.get("not_finite") == (None if row["grad_norm"] else ["grad_norm"])
    assert whole[2]["skipped"] == 3 and whole[7]["skipped"] < 8
    for step in (6, 8):  # as if it had been killed after step 3, which was skipped
        steps.remove(tmp_path / "run" / "checkpoints" / str(step))
    assert main(arguments) == 0
    names = ("step", "loss", "grad_norm", "learning_rate", "loss_scale", "skipped")
    assert [[row[name] for name in names] for row in rows(tmp_path)] == [
        [row[name] for name in names] for row in whole
    ]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "by",
    [
        ["train.steps=4"],
        ["train.steps=9", "eval.every=1", "eval.batches=1", "eval.patience=3"],
    ],
)
def test_a_float16_run_that_only_skips_ends_with_exit_code_1(tmp_path, capsys, by):
    half = {
        "precision": {"compute": "float16", "loss_scale": 2.0**32},
        "checkpoint": {"every": 2},
    }
    assert (
        main(
            [*write(tmp_path, **half), *(word for one in by for word in ("--set", one))]
        )
        == 1
    )
    assert tells(capsys.readouterr().err, "none of the 4 steps", "float16")
    assert [row["skipped"] for row in rows(tmp_path)] == [1, 2, 3, 4]


# --- asked to stop where no step is being taken


def test_a_signal_in_the_imports_is_one_sentence_and_code_75(tmp_path):
    hearing = "import meshtrain.run.early as early, os, sys; early.hear(); os.kill(os.getpid(), int(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", hearing, "15"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (
        75,
        "meshtrain: SIGTERM: stopped; nothing is lost, run again to go on.\n",
    )


@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_first_step_compiles_ends_the_process_with_75(
    number, tmp_path
):
    """At its end the interpreter would wait for the compiler, and crash."""
    deep = {
        "model": TINY["model"] | {"layers": 16},
        "mesh": {"data": 2, "pipeline": 4},
        "parallel": {"microbatches": 2},
    }
    command = [
        sys.executable,
        "-u",
        "-m",
        "meshtrain.train",
        *write(tmp_path, **deep),
        "--set",
        "train.steps=100000",
    ]
    # What was compiled before would be there at once.
    environment = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "XDG_CACHE_HOME": str(tmp_path),
    }
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        while "batches an epoch" not in process.stdout.readline():
            assert process.poll() is None
        # Nothing tells when XLA has begun; before or after it the end is the same.
        time.sleep(0.7)
        process.send_signal(number)
        printed, said = process.communicate()
    assert process.returncode == 75
    # A signal that comes in a callback of the garbage collector is swallowed, and Python tells of it: compiling may
    # then end first.
    met = f"meshtrain: {number.name}: stopped before the first step; nothing is lost, run again to go on.\n"
    assert said.endswith(met) or "stopped on request before the first step" in printed
    assert not (tmp_path / "run" / "metrics.jsonl").exists() or rows(tmp_path) == []


def interrupted(monkeypatch, owner, name, number=signal.SIGTERM):
    """Sends this process a signal when `name` is first called."""
    function, sent = getattr(owner, name), []

    def wrapped(*arguments, **keywords):
        if not sent:
            sent.append(number)
            os.kill(os.getpid(), number)
        return function(*arguments, **keywords)

    monkeypatch.setattr(owner, name, wrapped)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "owner, name, number",
    [
        (train, "open_data", signal.SIGTERM),
        (train, "Program", signal.SIGINT),
        (Checkpointer, "restore_or_init", signal.SIGTERM),
        (train.Loop, "compile_step", signal.SIGHUP),
    ],
)
def test_a_signal_before_the_first_step_gives_up_at_once_and_loses_nothing(
    owner, name, number, tmp_path, capsys, monkeypatch
):
    arguments = write(tmp_path)
    with monkeypatch.context() as patch:
        interrupted(patch, owner, name, number)
        assert main(arguments) == 75
    said = capsys.readouterr().err
    # Where the signal comes in a callback of the garbage collector, Python tells of that first.
    assert said.endswith(
        f"meshtrain: {number.name}: stopped before the first step; nothing is lost, run again to go on.\n"
    )
    assert main(arguments) == 0
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4]


@pytest.mark.thorough
def test_the_seconds_of_making_weights_count_as_init_and_those_of_reading_them_as_restore(
    tmp_path, monkeypatch
):
    kinds = []

    def starting(supervision, *arguments):
        kinds.append(
            {
                kind
                for kind, seconds in supervision.heartbeat.values()["seconds"].items()
                if seconds >= slow
            }
        )
        return start(supervision, *arguments)

    def lasting(work):
        return lambda *arguments: ahead.append(slow) or work(*arguments)

    slow, ahead, start = 1000.0, [], Supervision.start
    monkeypatch.setattr(
        heartbeat,
        "time",
        SimpleNamespace(perf_counter=lambda: time.perf_counter() + sum(ahead)),
    )
    monkeypatch.setattr(Supervision, "start", starting)
    for name in ("_init", "_restore"):
        monkeypatch.setattr(Checkpointer, name, lasting(getattr(Checkpointer, name)))
    assert main(write(tmp_path)) == main(write(tmp_path)) == 0
    assert kinds == [{"init"}, {"restore"}]


def test_a_signal_that_something_swallowed_before_the_first_step_still_stops_the_run(
    tmp_path, monkeypatch, capsys
):
    def swallowing(*arguments, **hooks):
        with contextlib.suppress(BaseException):
            os.kill(os.getpid(), signal.SIGTERM)
        return program(*arguments, **hooks)

    program = train.Program
    monkeypatch.setattr(train, "Program", swallowing)
    assert main(write(tmp_path)) == 75
    assert "stopped on request before the first step" in capsys.readouterr().out
    assert rows(tmp_path) == []


@pytest.mark.thorough
def test_a_signal_in_an_evaluation_is_met_by_the_next_step_and_its_checkpoint(
    tmp_path, monkeypatch
):
    arguments = write(tmp_path, eval={"every": 2, "batches": 1})
    with monkeypatch.context() as patch:
        interrupted(patch, train.Loop, "evaluate")
        assert main(arguments) == 75
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3] and "eval_loss" in rows(
        tmp_path
    )[1]
    assert main(arguments) == 0
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4]


@pytest.mark.thorough
def test_a_signal_in_the_last_save_finds_the_run_done(tmp_path, monkeypatch):
    interrupted(monkeypatch, Checkpointer, "wait")
    assert main(write(tmp_path)) == 0
    assert (tmp_path / "run" / "checkpoints" / "4").is_dir()


def test_print_config_prints_yaml_that_loads_to_the_same_config(tmp_path, capsys):
    arguments = write(tmp_path)
    assert main([*arguments, "--set", "mesh.data=2", "--print-config"]) == 0
    (tmp_path / "printed.yaml").write_text(capsys.readouterr().out)
    assert load(tmp_path / "printed.yaml") == load(arguments[1], ["mesh.data=2"])
    assert not (tmp_path / "run").exists()


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    """python -m meshtrain.train in a process of its own, which finds its devices itself."""
    kept = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "PJRT_NPROC")}
    line = [sys.executable, "-m", "meshtrain.train", *arguments]
    return subprocess.run(
        line,
        capture_output=True,
        text=True,
        env=kept | environment,
        timeout=120,
        check=False,
    )


@pytest.mark.thorough
def test_python_that_takes_every_warning_for_an_error_has_none_to_take(tmp_path):
    """From the first import to the last save; in other runs pytest sees to what is deprecated (pyproject.toml)."""
    saves = {"checkpoint": {"every": 1}, "eval": {"every": 1, "batches": 1}}
    done = command(
        *write(tmp_path, **saves), "--set", "train.steps=2", PYTHONWARNINGS="error"
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--set", "mseh.data=2"], ["mseh", "mean mesh?"]),
        (["--set", "mesh.data=3"], ["mesh.data 3", "train.global_batch_size 4"]),
        (
            ["--set", "run.directory=/proc/nowhere"],
            ["run.directory /proc/nowhere cannot be written"],
        ),
        (["--set", "data.source=/no/such/text"], ["/no/such/text"]),
    ],
)
def test_a_mistake_gets_one_sentence_and_exit_code_2(tmp_path, capsys, arguments, says):
    assert main([*write(tmp_path), *arguments]) == 2
    said = capsys.readouterr().err
    assert (
        tells(said, *says)
        and len(said.strip().splitlines()) == 1
        and "Traceback" not in said
    )


@pytest.mark.thorough
def test_too_few_devices_get_one_sentence_and_exit_code_2_from_the_command_itself(
    tmp_path,
):
    done = command(
        *write(tmp_path), "--set", "mesh.data=4", "--set", "run.fake_devices=2"
    )
    assert done.returncode == 2
    assert "needs 4 devices, but there are 2" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1 and "Traceback" not in done.stderr


REFUSED = {
    "data.source=nowhere": "data.source",
    "model.weights=nowhere": "nowhere",
    "data.tokenizer=nowhere.json": "tokenizer",
    "checkpoint.resume=nowhere": "checkpoint.resume",
    "checkpoint.allow=[nope]": "checkpoint.allow",
}


@pytest.mark.thorough
@pytest.mark.parametrize("setting", REFUSED)
def test_a_run_that_is_refused_leaves_no_directory(
    setting, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    words = [
        "--config",
        "quickstart",
        "--set",
        "run.directory=runs/deep/x",
        "--set",
        setting,
    ]
    assert main(words) == 2 and REFUSED[setting] in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "runs").mkdir()
    assert main(words) == 2
    assert list(tmp_path.rglob("*")) == [tmp_path / "runs"]  # which was there before


@pytest.mark.thorough
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_cpus_that_stand_in_for_accelerators_are_named(compute, tmp_path, capsys):
    settings = (
        f"run.directory={tmp_path / 'x'}",
        "train.steps=1",
        f"precision.compute={compute}",
    )
    assert (
        main(
            [
                "--config",
                "quickstart",
                *(word for each in settings for word in ("--set", each)),
            ]
        )
        == 0
    )
    said = "".join(capsys.readouterr())
    assert ("no accelerator" in said and "bfloat16" in said) == (compute == "bfloat16")
