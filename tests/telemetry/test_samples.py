"""resources/RANK.jsonl: whole rows, bounded, and no disk ends a run."""

import errno
import json
import os

import pytest
from refusals import tells

from meshtrain.telemetry import samples
from meshtrain.telemetry.samples import Samples, newest, read_every, write_every


def rows(directory, rank=0):
    return [
        json.loads(line)
        for line in (directory / "resources" / f"{rank}.jsonl").read_text().splitlines()
    ]


def test_rows_are_appended_and_the_newest_is_found(tmp_path):
    for start in (0, 5):
        file = Samples(tmp_path, 3)
        for k in range(start, start + 5):
            file.write(
                {
                    "time": k,
                    "device_power_watts": {"0": 1.5, "1": float("nan")},
                    "cpu_ratio": float("inf"),
                }
            )
    assert [row["time"] for row in rows(tmp_path, 3)] == list(range(10))
    assert newest(tmp_path, 3) == {"time": 9, "device_power_watts": {"0": 1.5}}, (
        "inf is left out"
    )
    assert newest(tmp_path, 4) is None


@pytest.mark.parametrize(
    "torn", [b'{"time": 7, "cp', b'{"time": 7}\n{"time', b'{"time": 7}\n\x00\x00']
)
def test_after_a_torn_row_a_whole_one_follows(tmp_path, torn):
    (tmp_path / "resources").mkdir()
    (tmp_path / "resources/0.jsonl").write_bytes(torn)
    assert newest(tmp_path, 0) == ({"time": 7} if b"\n" in torn else None)
    Samples(tmp_path, 0).write({"time": 8})
    assert newest(tmp_path, 0) == {"time": 8}
    assert (tmp_path / "resources/0.jsonl").read_bytes() == torn + b'\n{"time": 8}\n'


def test_a_full_disk_is_said_once_and_rows_go_on_when_there_is_room(
    tmp_path, monkeypatch, capsys
):
    file, full = Samples(tmp_path, 0), [False]
    write = os.write

    def refused(descriptor, line):
        if full[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, line)

    monkeypatch.setattr(samples.os, "write", refused)
    for step, is_full in enumerate([False, True, True, False, True]):
        full[0] = is_full
        file.write({"step": step})
    assert [row["step"] for row in rows(tmp_path)] == [0, 3]
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2, "once each time it fills"
    assert tells(said[0], "resources/0.jsonl: no space", "training goes on")


def test_a_directory_that_is_removed_is_made_again(tmp_path):
    file = Samples(tmp_path, 0)
    file.write({"step": 1})
    (tmp_path / "resources/0.jsonl").unlink()
    (tmp_path / "resources").rmdir()
    file.write({"step": 2})
    assert rows(tmp_path) == [{"step": 2}]


def test_a_file_stays_small_and_keeps_its_first_and_newest_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(samples, "MOST_BYTES", 2000)
    monkeypatch.setattr(samples, "NEWEST_ROWS", 20)
    file = Samples(tmp_path, 0)
    for step in range(2000):
        file.write({"step": step})
    assert (tmp_path / "resources/0.jsonl").stat().st_size < 2100
    steps = [row["step"] for row in rows(tmp_path)]
    assert (
        steps[0] == 0
        and steps[-20:] == list(range(1980, 2000))
        and steps == sorted(set(steps))
    )


def test_many_processes_write_and_are_read_as_often_as_a_file_system_bears():
    assert write_every(10, 8) == read_every(10, 8) == 10
    assert write_every(10, 8000) == 80 and read_every(10, 8000) == 400
