"""What is written aside is whole under its name, or not there, and a second try works."""

import errno
import fcntl
import os

import pytest

from meshtrain.adopt.aside import LOCK, WRITING, written_aside
from meshtrain.errors import ConfigError


def write(to):
    with written_aside(to) as aside:
        (aside / "held").mkdir()
        (aside / "held" / "file").write_text("all of it")
        assert not to.exists()


def left_by_a_killed_process(to):
    aside = to.with_name(to.name + WRITING)
    (aside / "held").mkdir(parents=True)
    (aside / LOCK).touch()
    (aside / "half").write_text("ha")
    return aside


def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path):
    left_by_a_killed_process(tmp_path / "out")
    write(tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["held"]


def test_what_somebody_else_has_there_stays(tmp_path):
    (tmp_path / f"out{WRITING}").mkdir()
    (tmp_path / f"out{WRITING}" / "diary").write_text("dear")
    with pytest.raises(ConfigError, match="it is somebody's, so move it away"):
        write(tmp_path / "out")
    assert (tmp_path / f"out{WRITING}" / "diary").read_text() == "dear"


def test_two_processes_do_not_write_the_same(tmp_path):
    aside = left_by_a_killed_process(tmp_path / "out")
    with open(aside / LOCK) as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another process is writing"):
            write(tmp_path / "out")
    assert (aside / "half").exists()


@pytest.mark.parametrize("name", ["", "a file"])
def test_nothing_is_written_over(tmp_path, name):
    (tmp_path / "out").write_text("mine") if name else (tmp_path / "out").mkdir()
    with pytest.raises(ConfigError, match="is there already"):
        write(tmp_path / "out")


def full(_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def full_as_safetensors_says_it(aside):
    class SafetensorError(Exception):
        pass

    raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


@pytest.mark.parametrize("fails", [full, full_as_safetensors_says_it])
def test_a_full_disk_is_one_sentence_and_leaves_nothing(tmp_path, fails):
    said = r"out cannot be written: no space left on device\.$"
    with pytest.raises(ConfigError, match=said), written_aside(tmp_path / "out") as aside:
        (aside / "half").write_text("ha")
        fails(aside)
    assert not list(tmp_path.iterdir())
    write(tmp_path / "out")
