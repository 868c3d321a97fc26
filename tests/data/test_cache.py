"""Text prepared on the fly is cached, made again when it changes, and shared by processes that start at once."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from data_configs import config

from meshtrain.config import ConfigError
from meshtrain.data import cache as user_cache
from meshtrain.data import open_data
from meshtrain.data.cache import cache_directory

ROOT = Path(__file__).parents[2]


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "meshtrain"


def prepared_in(cache: Path) -> dict[str, int]:
    return {p.parent.name: p.stat().st_mtime_ns for p in cache.glob("*/manifest.json")}


def test_text_is_prepared_once_and_again_when_it_changes(text, tmp_path, own_cache):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "a.txt").write_text("words " * 1000)
    first, _ = open_data(config(folder, validation=0.0))
    made = prepared_in(own_cache)
    open_data(config(folder, validation=0.0))
    assert prepared_in(own_cache) == made and len(made) == 1
    (folder / "a.txt").write_text("other " * 1000)
    second, _ = open_data(config(folder, validation=0.0))
    assert len(prepared_in(own_cache)) == 2
    assert second.digest != first.digest and "other" in second.tokenizer.decode(
        second.batch(0)["tokens"].ravel()
    )


def test_without_xdg_the_cache_lies_in_the_home_directory(monkeypatch, tmp_path):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_directory() == tmp_path / ".cache" / "meshtrain"


def test_a_cache_that_cannot_be_written_is_reported(text, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(
        ConfigError, match="set XDG_CACHE_HOME to a directory with room"
    ):
        open_data(config(text))


@pytest.mark.thorough
def test_processes_that_start_at_once_share_one_preparation(own_cache):
    imports = "from meshtrain.config import load; from meshtrain.data import open_data"
    command = [
        sys.executable,
        "-c",
        f"{imports}; print(open_data(load({{}}))[0].digest)",
    ]
    how = {
        "env": {**os.environ, "PYTHONPATH": str(ROOT)},
        "stdout": subprocess.PIPE,
        "text": True,
    }
    processes = [subprocess.Popen(command, **how) for _ in range(3)]
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert len(set(outputs)) == 1 and len(outputs[0]) == 17
    assert len(prepared_in(own_cache)) == 1
    left = [p.name for p in own_cache.rglob(".*") if p.name != ".lock"]
    assert left == []


def test_skipped_documents_are_named_in_a_log(tmp_path, own_cache, caplog):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "good.txt").write_text("words " * 1000)
    (tmp_path / "text" / "bad.txt").write_bytes(b"\xff")
    with caplog.at_level(logging.WARNING):
        open_data(config(tmp_path / "text", validation=0.0))
    assert "1 skipped: 1 not UTF-8" in caplog.text
    (log,) = own_cache.glob("*/skipped.log")
    assert (
        log.read_text() == "text/bad.txt\tnot UTF-8 at byte 0\n"
        and str(log) in caplog.text
    )


@pytest.mark.thorough
def test_preparing_text_is_logged_with_how_far_it_is(
    tmp_path, own_cache, caplog, monkeypatch
):
    # Two units of 4 MiB.
    (tmp_path / "text.jsonl").write_text(f'{{"text": "{"." * 100}"}}\n' * 50_000)
    monkeypatch.setattr(user_cache, "SILENCE", 0)
    with caplog.at_level(logging.INFO, "meshtrain"):
        for _ in range(2):
            open_data(config(tmp_path / "text.jsonl", validation=0.0))
    (directory,) = (p.parent for p in own_cache.glob("*/manifest.json"))
    name = str(tmp_path / "text.jsonl")
    assert caplog.messages == [
        f"preparing {name} (1 files, 5.7 MB) in {directory}",
        *(f"prepared {done} of 6 MB of {name}" for done in (0, 4, 6)),
    ]


def damage(directory: Path, how: str) -> None:
    tokens = directory / "train-00000.tokens"
    if how == "missing":
        tokens.unlink()
    elif how == "truncated":
        tokens.write_bytes(tokens.read_bytes()[:-2])
    elif how == "altered":
        tokens.write_bytes(b"\1\0" + tokens.read_bytes()[2:])
    elif how == "offsets":
        (directory / "train-00000.offsets").write_bytes(b"")
    elif how == "manifest":
        (directory / "manifest.json").write_bytes(b"{}")
    elif how == "no file":
        tokens.unlink()
        os.mkfifo(tokens)
    elif how == "note":
        (directory / "units" / "00000.json").write_bytes(b"[" * 100_000)
        tokens.unlink()


@pytest.mark.parametrize(
    "how",
    ["missing", "truncated", "altered", "offsets", "manifest", "note", "no file"],
)
def test_cached_shards_that_are_damaged_are_reported_and_made_again(
    how, text, own_cache, caplog
):
    before = open_data(config(text))[0]
    rows = [before.batch(k)["tokens"].tobytes() for k in range(3)]
    (directory,) = (p.parent for p in own_cache.glob("*/manifest.json"))
    damage(directory, how)
    after = open_data(config(text))[0]
    assert (
        after.digest == before.digest
        and [after.batch(k)["tokens"].tobytes() for k in range(3)] == rows
    )
    (said,) = caplog.messages
    assert str(directory) in said and said.endswith("It is made again.")
    open_data(config(text))
    assert len(caplog.messages) == 1


def test_a_folder_of_text_may_hold_a_manifest_of_somebody_elses(tmp_path, own_cache):
    (tmp_path / "manifest.json").write_text('{"name": "an extension"}' * 100)
    (tmp_path / "plan.json").write_text('{"monday": "walk"}')
    assert open_data(config(tmp_path, validation=0.0))[0].batches_per_epoch > 0


def test_a_user_without_a_home_hears_of_the_cache(text, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(
        Path,
        "home",
        classmethod(lambda cls: (_ for _ in ()).throw(RuntimeError("no home"))),
    )
    with pytest.raises(ConfigError, match="no home directory; set XDG_CACHE_HOME"):
        open_data(config(text))


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("~nobody-of-that-name/text", r"nobody.* no such file or directory"),
        ("x" * 1000, r"x…x{60} cannot be read: .* too long"),
        ("/dev/null", "/dev/null .*neither .*; write the text"),
    ],
)
def test_a_source_that_cannot_be_read_is_reported_in_a_sentence(source, said):
    with pytest.raises(ConfigError, match=said):
        open_data(config(source))


def test_what_is_left_out_of_text_is_reported_when_it_is_prepared(
    tmp_path, own_cache, caplog
):
    (tmp_path / "a.txt").write_text("words " * 1000)
    (tmp_path / "loop").symlink_to(tmp_path)
    open_data(config(tmp_path, validation=0.0))
    (said,) = caplog.messages
    assert f"left out: reached twice: 1 ({tmp_path.name}/loop)" in said
