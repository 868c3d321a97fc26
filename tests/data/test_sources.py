"""Text prepared on the fly is cached, made again when it changes, and shared by processes that start at once."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from data_configs import config

from meshtrain.config import ConfigError
from meshtrain.data import open_data
from meshtrain.data.sources import cache_directory

ROOT = Path(__file__).parents[2]


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "meshtrain"


def prepared_in(cache: Path) -> dict[str, int]:
    return {p.parent.name: p.stat().st_mtime_ns for p in cache.glob("*/manifest.json")}


def test_text_is_prepared_once_and_again_when_it_changes(text: Path, tmp_path: Path, own_cache: Path) -> None:
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
    assert second.digest != first.digest and "other" in second.tokenizer.decode(second.batch(0)["tokens"].ravel())


def test_without_xdg_the_cache_lies_in_the_home_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_directory() == tmp_path / ".cache" / "meshtrain"


def test_a_cache_that_cannot_be_written_is_told(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="set XDG_CACHE_HOME to a directory with room"):
        open_data(config(text))


def test_processes_that_start_at_once_share_one_preparation(own_cache: Path) -> None:
    script = "from meshtrain.config import decode; from meshtrain.data import open_data; print(open_data(decode({}))[0].digest)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    processes = [
        subprocess.Popen([sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert len(set(outputs)) == 1 and len(outputs[0]) == 17
    assert len(prepared_in(own_cache)) == 1
    left = [p.name for p in own_cache.rglob(".*") if p.name != ".lock"]
    assert left == []


def test_skipped_documents_are_named_in_a_log(
    tmp_path: Path, own_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "good.txt").write_text("words " * 1000)
    (tmp_path / "text" / "bad.txt").write_bytes(b"\xff")
    with caplog.at_level(logging.WARNING):
        open_data(config(tmp_path / "text", validation=0.0))
    assert "1 skipped: 1 not UTF-8" in caplog.text
    (log,) = own_cache.glob("*/skipped.log")
    assert log.read_text() == "text/bad.txt\tnot UTF-8 at byte 0\n" and str(log) in caplog.text
