"""What a run writes beside its checkpoints stays there, or is made again with a word."""

import json
import re
import shutil

import pytest

from meshtrain.config import load
from meshtrain.run.lock import RunLock
from meshtrain.run.processes import RunFailure
from meshtrain.run.record import RunRecord


@pytest.fixture
def directory(tmp_path):
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


@pytest.fixture
def record(directory):
    config = load({"run": {"directory": str(directory)}})
    lock = RunLock(directory)
    record = RunRecord(directory, config, 0, lock)
    record.after_metrics({"step": 1}, due=True)
    yield record
    record.close()
    lock.release()


def steps(directory):
    return [
        json.loads(line)["step"]
        for line in (directory / "metrics.jsonl").read_text().splitlines()
    ]


@pytest.mark.parametrize("fault", ["removed", "renamed", "emptied"])
def test_a_directory_that_goes_away_is_made_again_locked_and_reported_once(
    fault, directory, record, capsys
):
    if fault == "removed":
        shutil.rmtree(directory)
    else:
        directory.rename(directory.with_name("away"))
    if fault == "emptied":
        directory.mkdir()
    record.after_metrics({"step": 2}, due=True)
    record.after_metrics({"step": 3}, due=True)
    assert steps(directory) == [1, 2, 3] and load(
        directory / "config.yaml"
    ).run.directory == str(directory)
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f".lock and config.yaml and metrics.jsonl of {directory} " in said
    assert re.search("checkpoints .* are not", said)
    with pytest.raises(Exception, match="is in use by process"):
        RunLock(directory)


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.yaml"])
def test_a_file_that_goes_away_is_made_again(name, directory, record, capsys):
    record.after_metrics({"step": 2}, due=True)
    assert capsys.readouterr().err == "" and steps(directory) == [1, 2]
    before = (directory / name).read_text()
    (directory / name).unlink()
    record.after_metrics({"step": 3}, due=True)
    assert (directory / name).read_text().startswith(before)
    said = capsys.readouterr().err
    assert re.fullmatch(f"meshtrain: {name} of {directory} .* made again\\.\n", said)


def test_a_run_ends_where_another_has_taken_its_directory(directory, record):
    shutil.rmtree(directory)
    directory.mkdir()
    # That one may have ended since.
    (directory / ".lock").write_text("process 7 on elsewhere")
    with pytest.raises(RunFailure, match="process 7 on elsewhere has begun another"):
        record.after_metrics({"step": 2}, due=True)
    record.close()
    assert [path.name for path in directory.iterdir()] == [".lock"]


def test_a_directory_that_cannot_be_made_again_is_reported_and_its_rows_wait(
    directory, record, capsys
):
    shutil.rmtree(directory)
    directory.write_text("a file in its place")
    record.after_metrics({"step": 2}, due=True)
    assert "made again yet: file exists" in capsys.readouterr().err
    assert not record.finish()
    directory.unlink()
    record.after_metrics({"step": 3}, due=True)
    assert record.finish() and steps(directory) == [1, 2, 3]
