"""A sweep checks every combination before it runs one, goes on where it was stopped, and ranks what it trained."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from meshtrain import sweep
from meshtrain.errors import ConfigError

TINY = {
    "run": {"directory": "runs/tiny"},
    "model": {"layers": 1, "d_model": 8, "heads": 1, "kv_heads": 1, "d_ff": 8},
    "train": {"steps": 2, "global_batch_size": 2, "sequence_length": 8},
    "data": {"source": "synthetic"},
}
RATES = "optimizer.learning_rate=1e-3,3e-3"
COMMAND = [sys.executable, "-m", "meshtrain.sweep", "--config", "x.yaml", "--over"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(TINY))
    return tmp_path


@pytest.fixture
def trained(here, monkeypatch):
    """Has a sweep write a run's files in place of training; returns the directories, and the codes to end with."""
    begun: list[str] = []
    codes: list[int] = []

    def supervise(commands):
        (words,) = commands.values()
        overrides = dict(
            word.split("=", 1) for word in words if word.startswith("run.directory=")
        )
        directory = Path(overrides["run.directory"])
        directory.mkdir(parents=True, exist_ok=True)
        begun.append(directory.name)
        rate = float(directory.name.partition("learning_rate=")[2].partition(",")[0])
        row = f'{{"step": 2, "loss": {5 - 100 * rate}}}\n'
        (directory / "metrics.jsonl").write_text(row)
        return codes.pop(0) if codes else 0

    monkeypatch.setattr(sweep, "supervise_all", supervise)
    return begun, codes


def test_a_grid_is_run_in_its_order_and_the_best_run_is_named_first(trained, capsys):
    begun, _ = trained
    assert (
        sweep.main(
            ["--config", "x.yaml", "--over", RATES, "--over", "model.layers=1,2"]
        )
        == 0
    )
    assert begun == [
        f"learning_rate={rate},layers={n}" for rate in ("1e-3", "3e-3") for n in "12"
    ]
    *_, best, _, second, _, last = capsys.readouterr().out.splitlines()
    assert "runs/tiny/learning_rate=3e-3" in last
    assert float(best.split()[1]) <= float(second.split()[1])
    assert "<svg" in Path("runs/tiny/sweep.html").read_text()


def test_typed_again_it_runs_only_what_is_not_done(trained, capsys):
    begun, codes = trained
    codes += [0, 75]
    words = ["--config", "x.yaml", "--over", RATES]
    assert sweep.main(words) == 75
    assert "type it again" in capsys.readouterr().err
    assert sweep.main(words) == 0
    assert begun == ["learning_rate=1e-3", "learning_rate=3e-3", "learning_rate=3e-3"]
    assert sweep.main([*words, "--set", "train.steps=3"]) == 0
    assert len(begun) == 5, "another config is another run"


def test_a_run_that_fails_leaves_the_others_and_is_tried_again(trained, capsys):
    begun, codes = trained
    codes += [1]
    words = ["--config", "x.yaml", "--over", RATES]
    assert sweep.main(words) == 1
    assert "learning_rate=1e-3: failed with exit code 1" in capsys.readouterr().err
    assert sweep.main(words) == 0
    assert begun == ["learning_rate=1e-3", "learning_rate=3e-3", "learning_rate=1e-3"]


def test_a_random_sweep_draws_from_the_grid_by_its_seed(here):
    axes = sweep.axes_of([RATES, "model.layers=1,2,3", "train.steps=4,5,6"])
    every = [run.directory.name for run in sweep.planned("x.yaml", [], axes, None, 0)]
    drawn = [
        [run.directory.name for run in sweep.planned("x.yaml", [], axes, 5, seed)]
        for seed in (0, 0, 1)
    ]
    assert len(every) == 18
    assert drawn[0] == drawn[1] != drawn[2]
    assert all(len(set(names)) == 5 and set(names) < set(every) for names in drawn)
    assert len(sweep.planned("x.yaml", [], axes, 99, 0)) == 18


def test_a_comma_within_a_list_belongs_to_the_value():
    (axis,) = sweep.axes_of(["parallel.remat_names=[qkv,mlp_in],[qkv]"])
    assert axis.values == ("[qkv,mlp_in]", "[qkv]")


@pytest.mark.parametrize(
    ("over", "sentence"),
    [
        (["optimizer.learning_rate"], "write --over section.key=A,B"),
        (["optimizer.learning_rate="], "write --over section.key=A,B"),
        (["optimizer.learning_rate=1,1"], "a value stands there twice"),
        ([RATES, RATES], "optimizer.learning_rate is given twice"),
        (["run.directory=a,b"], "a directory of its own"),
        (
            ["optimizer.learning_rat=1"],
            "learning_rat=1: .*did you mean optimizer.learning_rate",
        ),
        (["model.heads=1,3"], "heads=3: .*d_model"),
        (
            ["train.steps=" + ",".join(map(str, range(1, 5000)))],
            "4,999 runs; at most 4,096",
        ),
    ],
)
def test_a_mistake_is_refused_before_anything_runs(over, sentence, trained):
    begun, _ = trained
    with pytest.raises(ConfigError, match=sentence):
        sweep.planned("x.yaml", [], sweep.axes_of(over), None, 0)
    words = [word for text in over for word in ("--over", text)]
    assert sweep.main(["--config", "x.yaml", *words]) == 2
    assert not begun
    assert not Path("runs").exists()


@pytest.mark.thorough
def test_a_sweep_that_is_killed_goes_on_when_it_is_typed_again(here):
    first = here / "runs" / "tiny" / "learning_rate=1e-3"
    second = here / "runs" / "tiny" / "learning_rate=3e-3"
    killed = subprocess.Popen([*COMMAND, RATES, "--set", "train.steps=40"])
    ends = time.monotonic() + 200
    while not (second / "config.yaml").exists() and time.monotonic() < ends:
        time.sleep(0.1)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    before = (first / "metrics.jsonl").stat().st_mtime_ns
    assert not (second / ".swept").exists()
    again = subprocess.run(
        [*COMMAND, RATES, "--set", "train.steps=40"], capture_output=True, text=True
    )
    assert again.returncode == 0, again.stderr
    assert (first / "metrics.jsonl").stat().st_mtime_ns == before
    assert "learning_rate=1e-3: done already" in again.stdout
    assert again.stdout.count("  40/40  ") == 2
    assert all(len(line) <= 80 for line in again.stdout.splitlines() if "/40" in line)
