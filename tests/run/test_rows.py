"""metrics.jsonl holds what was measured, line by line, whatever becomes of the disk and of the file."""

import errno
import json
import os
import re
import shutil
from types import SimpleNamespace

import pytest

from meshtrain.run.rows import LONGEST, MetricsFile, RowReader, trim_metrics


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def write(path, steps, tail=b""):
    path.write_bytes(
        b"".join(json.dumps({"step": s, "loss": 1.0}).encode() + b"\n" for s in steps)
        + tail
    )


def steps(path):
    return [json.loads(line)["step"] for line in path.read_bytes().splitlines()]


# --- appending


def test_rows_are_on_disk_at_once_in_full_precision_and_appended_to_those_of_the_run_before(
    path,
):
    for step in (1, 2):
        file = MetricsFile(path)
        file.write({"step": step, "loss": 0.1 + 0.2})
        assert len(steps(path)) == step
        file.close()
    assert (
        steps(path) == [1, 2]
        and json.loads(path.read_text().splitlines()[0])["loss"] == 0.1 + 0.2
    )


def test_numbers_that_are_not_finite_stay_valid_json_and_are_named(path):
    MetricsFile(path).write(
        {
            "step": 3,
            "loss": float("nan"),
            "grad_norm": float("inf"),
            "learning_rate": 0.1,
        }
    )
    row = json.loads(path.read_text(), parse_constant=lambda name: 1 / 0)
    numbers = {"step": 3, "loss": None, "grad_norm": None, "learning_rate": 0.1}
    assert row == numbers | {"not_finite": ["loss", "grad_norm"]}


def full(*_):
    """What a disk without room says."""
    raise OSError(28, "No space left on device")


class Failed:
    """An open file that answers each write with an error, for as long as it is open."""

    def __init__(self, file, number):
        self._file, self._number = file, number

    def write(self, rows):
        raise OSError(self._number, os.strerror(self._number))

    def __getattr__(self, name):
        return getattr(self._file, name)


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EDQUOT, errno.EROFS])
def test_a_handle_that_the_disk_has_failed_loses_no_row(number, path, capsys):
    file = MetricsFile(path)
    file.write({"step": 1})
    file._file = Failed(file._file, number)
    file.write({"step": 2})
    assert file.refused is not None and steps(path) == [1]
    file.write({"step": 3})
    file.close()
    assert file.refused is None and steps(path) == [1, 2, 3]
    said = capsys.readouterr().err
    assert (
        said.count("\n") == 1
        and os.strerror(number).lower() in said
        and "they are kept" in said
    )


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_file_that_takes_no_rows_to_the_end_is_replaced_with_all_of_them(
    number, path, capsys, monkeypatch
):
    file = MetricsFile(path)
    file.write({"step": 1})
    file._file = Failed(file._file, number)
    monkeypatch.setattr(file, "_open_again", lambda: None)
    file.write({"step": 2})
    file.write({"step": 3})
    assert steps(path) == [1]
    assert file.finish() and file.refused is None
    file.close()
    assert steps(path) == [1, 2, 3] and list(path.parent.iterdir()) == [path]
    assert capsys.readouterr().err.count("\n") == 1


def test_a_file_that_cannot_be_replaced_either_keeps_its_rows(
    path, capsys, monkeypatch
):
    file = MetricsFile(path)
    file.write({"step": 1})
    file._file = Failed(file._file, errno.EROFS)
    monkeypatch.setattr(file, "_open_again", lambda: None)
    monkeypatch.setattr("meshtrain.run.rows.write_atomically", full)
    file.write({"step": 2})
    assert not file.finish()
    file.close()
    assert steps(path) == [1] and "the last 1 rows" in capsys.readouterr().err


def test_what_a_disk_refuses_again_and_again_is_said_once(path, capsys, monkeypatch):
    file = MetricsFile(path)
    file._file = Failed(file._file, errno.EIO)
    with monkeypatch.context() as patch:
        patch.setattr(file, "_open_again", full)
        for step in range(1, 9):
            file.write({"step": step})
        assert capsys.readouterr().err.count("\n") == 1
    file.write({"step": 9})
    assert steps(path) == list(range(1, 10))


def test_a_file_of_which_a_server_says_once_that_it_is_stale_is_not_set_aside(
    path, monkeypatch
):
    file, stat, left = MetricsFile(path), os.stat, [1]
    file.write({"step": 1})

    def stale(at, **named):
        if str(at) == str(path) and left[0]:
            left[0] -= 1
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return stat(at, **named)

    monkeypatch.setattr("os.stat", stale)
    file.write({"step": 2})
    assert (
        steps(path) == [1, 2]
        and not left[0]
        and [p.name for p in path.parent.iterdir()] == [path.name]
    )


def test_rows_that_a_full_disk_refuses_are_written_when_it_has_room_again(
    path, monkeypatch
):
    file = MetricsFile(path)
    with monkeypatch.context() as patch:
        patch.setattr(file, "is_there", lambda: True)
        patch.setattr(file, "_bytes", lambda: 0)
        patch.setattr(file, "_file", SimpleNamespace(write=full))
        patch.setattr(file, "_open_again", full)
        file.write({"step": 1})
        file.write({"step": 2})
    assert file.refused is not None
    file.write({"step": 3})
    file.close()
    assert file.refused is None and steps(path) == [1, 2, 3]


def test_rows_that_never_found_room_are_reported(path, monkeypatch, capsys):
    file = MetricsFile(path)
    monkeypatch.setattr(file, "_write_again", full)
    path.unlink()
    file.write({"step": 1})
    file.close()
    assert re.search(
        f"the last 1 rows of {path} .*: no space left", capsys.readouterr().err
    )


# --- removed under the run


@pytest.mark.parametrize("what", ["the file", "the directory"])
def test_a_file_that_is_removed_is_written_again_with_all_of_its_rows(what, tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    path.parent.mkdir()
    write(path, [1])
    file = MetricsFile(path)
    file.write({"step": 2})
    if what == "the file":
        path.unlink()
    else:
        shutil.rmtree(path.parent)
    assert not file.is_there()
    file.write({"step": 3})
    assert file.is_there() and steps(path) == [1, 2, 3]
    file.write({"step": 4})
    file.close()
    assert steps(path) == [1, 2, 3, 4]


def test_a_file_in_its_place_is_set_aside(path):
    file = MetricsFile(path)
    file.write({"step": 1})
    path.rename(path.with_name("kept.jsonl"))
    path.write_text("somebody's\n")
    file.write({"step": 2})
    file.close()
    assert steps(path) == [1, 2]
    assert (path.parent / "earlier-1" / "metrics.jsonl").read_text() == "somebody's\n"


def test_rows_that_somebody_cuts_off_are_reported_once(path, capsys):
    file = MetricsFile(path)
    file.write({"step": 1})
    path.write_bytes(b"")
    for step in (2, 3):
        file.write({"step": step})
    file.close()
    assert steps(path) == [2, 3]
    assert re.fullmatch(
        f"meshtrain: 12 bytes .*{path} .*\\.\n", capsys.readouterr().err
    )


# --- before a resume


@pytest.mark.parametrize("ends", [b"\n", b"\r\n"])
@pytest.mark.parametrize("before", [range(1, 9), [1, 2, 3, 4, 5, 1, 2]])
def test_rows_after_the_step_are_dropped_and_each_step_is_kept_once(path, before, ends):
    write(path, before)
    path.write_bytes(path.read_bytes().replace(b"\n", ends))
    trim_metrics(path, 5)
    assert steps(path) == [1, 2, 3, 4, 5]


def test_a_row_that_is_lost_costs_no_other(path):
    write(path, [1, 2, 4, 5, 6])
    trim_metrics(path, 5)
    assert steps(path) == [1, 2, 4, 5]


def test_a_step_keeps_its_last_row_of_each_kind(path):
    rows = [
        (1, "best"),
        (1, "worst"),
        (2, "best"),
        (2, "worst"),
        (2, "best"),
        (3, "best"),
    ]
    lines = [
        {"step": step, "kind": kind, "n": n} for n, (step, kind) in enumerate(rows)
    ]
    path.write_text(
        "".join(json.dumps(line) + "\n" for line in lines) + '{"step": 2, "ki'
    )
    trim_metrics(path, 2)
    kept = [json.loads(line) for line in path.read_text().splitlines()]
    assert sorted(line["n"] for line in kept) == [0, 1, 3, 4]


def test_a_torn_last_row_is_dropped_even_if_its_step_counts(path):
    odd = (
        b'{"step": 3, "x"}\n',
        b"\x00\x00\n",
        b'{"step": "3"}\n',
        b"[" * 100000 + b"\n",
        b'{"step": ' + b"9" * 10_000 + b"}\n",
    )
    for tail in (b'{"step": 3, "lo', b'{"step": 3}', *odd):
        write(path, [1, 2], tail)
        trim_metrics(path, 9)
        assert steps(path) == [1, 2]
        assert path.read_bytes().endswith(b"\n")


def test_nothing_is_rewritten_when_nothing_is_dropped_and_no_file_is_no_error(path):
    trim_metrics(path, 0)
    assert not path.exists()
    write(path, [1, 2])
    before = path.stat().st_ino
    trim_metrics(path, 2)
    assert path.stat().st_ino == before


def test_what_a_full_disk_does_not_let_trim_stays_whole(path, monkeypatch):
    write(path, [1, 2, 3])
    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        trim_metrics(path, 1)
    assert steps(path) == [1, 2, 3] and list(path.parent.iterdir()) == [path]


def test_a_link_to_the_rows_is_followed(path, tmp_path):
    write(tmp_path / "elsewhere", [1, 2, 3])
    path.symlink_to("elsewhere")
    trim_metrics(path, 1)
    assert path.is_symlink() and steps(tmp_path / "elsewhere") == [1]


# --- reading


def lines(*rows):
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def test_a_row_that_is_half_written_waits_for_its_end(path):
    path.write_bytes(lines({"step": 1}) + b'{"step": 2, "lo')
    reader = RowReader(path)
    assert [row["step"] for row in reader.new()] == [1] and list(reader.new()) == []
    with path.open("ab") as file:
        file.write(b'ss": 2.5}\n')
    assert list(reader.new()) == [{"step": 2, "loss": 2.5}] and reader.torn == 0


def test_a_file_that_took_the_place_of_another_is_read_from_its_begin(path):
    path.write_bytes(lines({"step": 1}, {"step": 2}))
    reader = RowReader(path)
    list(reader.new())
    os.replace(path, path.with_suffix(".old"))
    assert list(reader.new()) == []
    path.write_bytes(lines({"step": 1, "loss": 9.0}))
    assert list(reader.new()) == [{"step": 1, "loss": 9.0}]
    path.write_bytes(b"")
    assert list(reader.new()) == []
    path.write_bytes(lines({"step": 3, "loss": 1.0}, {"step": 4}))
    assert [row["step"] for row in reader.new()] == [3, 4]
    path.write_bytes(lines({"step": 5}))
    assert [row["step"] for row in reader.new()] == [5]


def test_who_asks_for_the_end_gets_whole_rows_of_it(path):
    path.write_bytes(lines(*({"step": k} for k in range(1000))))
    reader = RowReader(path, last=200)
    found = [row["step"] for row in reader.new()]
    assert reader.torn == 0
    assert 5 < len(found) < 20 and found[-1] == 999 and found == sorted(found)
    assert len(list(RowReader(path, last=1 << 20).new())) == 1000


def test_a_line_without_end_costs_no_memory_and_is_no_row(path):
    path.write_bytes(b"x" * (3 * LONGEST) + b"\n" + lines({"step": 1}))
    reader = RowReader(path)
    assert list(reader.new()) == [{"step": 1}] and reader.torn == 1


def test_what_is_no_file_has_no_rows(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "missing", "."):
        assert list(RowReader(tmp_path / name).new()) == []
