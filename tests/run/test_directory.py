"""A run directory is refused before anything else happens, or everything in it can be written."""

import os
import re
import tempfile
from pathlib import Path

import pytest

from meshtrain.config import ConfigError, load
from meshtrain.run.directory import (
    NEWEST,
    note_checkpoint,
    noted_checkpoint,
    run_directory,
    set_aside,
)

NOBODY = 65534


def entered(directory):
    return run_directory(load({"run": {"directory": str(directory)}}))


def test_a_directory_and_the_metrics_of_a_run_before_are_taken(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    assert entered(tmp_path) == tmp_path
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize(
    "name, make, says",
    [
        ("metrics.jsonl", Path.mkdir, "is not a file"),
        ("answers.jsonl", Path.mkdir, "is not a file"),
        ("metrics.jsonl", os.mkfifo, "is not a file"),
        (
            "metrics.jsonl",
            lambda path: path.symlink_to("gone/rows"),
            "is a link to gone/rows, .*",
        ),
        (
            "metrics.jsonl",
            lambda path: path.symlink_to(path.name),
            ".*: too many levels of symbolic links",
        ),
        ("config.yaml", Path.mkdir, "is a directory"),
    ],
)
def test_metrics_that_are_no_file_are_refused(name, make, says, tmp_path):
    make(tmp_path / name)
    with pytest.raises(ConfigError) as refused:
        entered(tmp_path)
    assert re.match(f"{tmp_path}/{re.escape(name)} {says}; ", str(refused.value))


def test_what_is_no_directory_is_refused(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "gone").symlink_to("/nonexistent/place")
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "pipe")
    names = ("file", "file/run", "gone", "loop", "pipe", "x" * 300, "y/" * 2500)
    for name in (*names, "/dev/null", "/proc/nowhere", "a\0b", "a\ud800b"):
        with pytest.raises(ConfigError, match=r"run\.directory") as refused:
            entered(tmp_path / name)
        sentence = str(refused.value)
        assert sentence.isprintable() and len(sentence) < 700, sentence


@pytest.mark.parametrize("name", ["a b'\"😀", "."])
def test_any_other_name_is_a_directorys(name, tmp_path):
    assert entered(tmp_path / name).is_dir()


def test_metrics_of_another_user_are_refused():
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "metrics.jsonl"
        path.write_text("{}\n")
        path.chmod(0o444)
        Path(name).chmod(0o777)
        # Modes do not bind root.
        root = os.geteuid() == 0
        if root:
            os.seteuid(NOBODY)
        try:
            with pytest.raises(
                ConfigError, match=r"metrics\.jsonl .*: permission denied; "
            ):
                entered(Path(name))
        finally:
            if root:
                os.seteuid(0)


def test_what_is_set_aside_never_meets_what_was_before_and_a_link_leads_where_it_led(
    tmp_path,
):
    run, volume = tmp_path / "run", tmp_path / "volume"
    run.mkdir()
    volume.mkdir()
    for k, content in enumerate(("first", "second"), 1):
        (run / "metrics.jsonl").write_text(content)
        (run / "checkpoints").symlink_to("../volume")
        earlier = set_aside(run, ["metrics.jsonl", "checkpoints", "config.yaml"])
        assert earlier == run / f"earlier-{k}" and (earlier / "checkpoints").samefile(
            volume
        )
        assert not any(
            os.path.lexists(run / name) for name in ("metrics.jsonl", "checkpoints")
        )
    assert [(run / f"earlier-{k}" / "metrics.jsonl").read_text() for k in (1, 2)] == [
        "first",
        "second",
    ]


def test_a_checkpoint_is_remembered_by_its_note_or_by_the_rows_that_mention_it(
    tmp_path,
):
    assert noted_checkpoint(tmp_path) is None
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    assert noted_checkpoint(tmp_path) is None
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1}\n{"step": 2, "checkpoint_bytes": 7}\n'
    )
    assert noted_checkpoint(tmp_path) == "unknown"
    note_checkpoint(tmp_path, 20)
    assert noted_checkpoint(tmp_path) == "20"
    (tmp_path / NEWEST).write_text("")
    assert noted_checkpoint(tmp_path) == ""


@pytest.mark.parametrize("name", [NEWEST, "metrics.jsonl"])
def test_a_pipe_in_the_place_of_a_note_is_no_note(name, tmp_path):
    os.mkfifo(tmp_path / name)
    assert noted_checkpoint(tmp_path) is None
