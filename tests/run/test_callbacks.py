"""run.callbacks: functions that a config names are called with each row, and what is no such function is refused."""

import json
import subprocess
import sys

import pytest
import yaml

import meshtrain as mt
from meshtrain.run.hooks import callbacks_of

MINE = """
import json
from pathlib import Path

def log(row):
    with open(Path(__file__).with_name("seen"), "a") as file:
        print(json.dumps(row["step"]), file=file)

def fail(row):
    raise ValueError("enough of it")

def pair(row, other):
    pass
"""
TINY = {
    "mesh": {"data": 1},
    "model": {"layers": 1, "d_model": 8, "heads": 1, "kv_heads": 1, "d_ff": 8},
    "train": {"steps": 2, "global_batch_size": 2, "sequence_length": 8},
    "data": {"source": "synthetic"},
}


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Writes a tiny config with callbacks beside the file that defines them."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)

    def write(*callbacks):
        run = {"directory": "run", "imports": ["mine.py"], "callbacks": list(callbacks)}
        (tmp_path / "x.yaml").write_text(yaml.safe_dump({"run": run, **TINY}))
        return "x.yaml"

    return write


@pytest.mark.parametrize(
    "command", ["train", pytest.param("survive", marks=pytest.mark.thorough)]
)
def test_each_row_reaches_it_under_every_command_that_trains(
    command, written, tmp_path
):
    words = [
        sys.executable,
        "-m",
        f"meshtrain.{command}",
        "--config",
        written("mine:log"),
    ]
    ended = subprocess.run(words, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    seen = [json.loads(line) for line in (tmp_path / "seen").read_text().splitlines()]
    assert seen == [1, 2]


@pytest.mark.thorough
def test_an_exception_ends_the_run_and_names_the_function(written):
    words = [sys.executable, "-m", "meshtrain.train", "--config", written("mine:fail")]
    ended = subprocess.run(words, capture_output=True, text=True)
    assert ended.returncode == 1
    assert "in fail" in ended.stderr
    assert "enough of it" in ended.stderr


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("mine:lag", "run.callbacks: mine has no function lag; did you mean log?"),
        ("other:log", r"run.callbacks is 'other:log'; write MODULE:FUNCTION, .*mine"),
        (
            "mine:pair",
            r"run.callbacks: mine:pair takes \(row, other\); it is called with \(row\)",
        ),
    ],
)
def test_what_is_no_callback_is_refused(name, sentence, written):
    with pytest.raises(mt.ConfigError, match=sentence):
        callbacks_of(mt.load(written(name)))


def test_a_command_that_reads_a_strangers_run_neither_imports_nor_calls_it(
    written, tmp_path
):
    run = tmp_path / "run"
    (run / "imports").mkdir(parents=True)
    (run / "checkpoints").mkdir()
    (run / "imports" / "mine.py").write_text("raise SystemExit('this ran')")
    (run / "config.yaml").write_text((tmp_path / written("mine:log")).read_text())
    assert mt.load(run / "config.yaml", reading=True).run.callbacks == ("mine:log",)
