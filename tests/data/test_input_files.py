"""Finding the files of an input: each once, in an order of its own, and what is left out is reported."""

import os
import socket
from pathlib import Path

import pytest
from refusals import tells

from meshtrain.config import ConfigError
from meshtrain.data.input_files import InputFiles, find
from meshtrain.data.prepare import prepare
from meshtrain.data.unit import PrepareOptions


def names(found: InputFiles) -> list[str]:
    return [file.name for file in found.files]


def write(folder: Path, *paths: str) -> None:
    for path in paths:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(path)


def test_a_folder_gives_its_text_sorted_by_name_and_counts_the_rest(tmp_path):
    taken = "b.md", "a.txt", "c/d.py", "c/e.jsonl.gz"
    write(
        tmp_path,
        *taken,
        "picture.png",
        ".git/config.txt",
        "__pycache__/x.py",
        ".hidden.txt",
    )
    found = find([str(tmp_path)])
    root = tmp_path.name
    assert [file.name for file in found.files] == [
        f"{root}/{name}" for name in sorted(taken)
    ]
    assert found.ignored == {".png": 1}


def test_suffixes_in_capitals_are_taken_as_those_in_small_letters(tmp_path):
    write(tmp_path, "A.TXT", "B.JSONL", "C.Md.GZ", "D.PNG", "e.png")
    found = find([str(tmp_path)])
    assert names(found) == [
        f"{tmp_path.name}/{name}" for name in ("A.TXT", "B.JSONL", "C.Md.GZ")
    ]
    assert (
        found.ignored == {".png": 2}
        and found.files[1].json_lines
        and found.files[2].compression == ".gz"
    )


def test_nothing_to_read_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    write(tmp_path, "pictures/a.png")
    for what, said in {
        "missing": "there is no file or directory",
        "empty": "it has no files",
        "pictures": r"other kinds \(1 \.png\)",
    }.items():
        with pytest.raises(ConfigError, match=said):
            find([str(tmp_path / what)])


def test_links_are_followed_and_what_they_reach_again_is_read_once(tmp_path):
    text, other = tmp_path / "text", tmp_path / "other"
    write(text, "a/one.txt", "b/two.txt")
    write(other, "three.txt", "deep/four.txt")
    (text / "a" / "loop").symlink_to(text)
    (text / "a" / "again").symlink_to("../b")
    (text / "0.txt").symlink_to("b/two.txt")  # before the file itself in order
    (text / "linked").symlink_to(other)
    (text / "linked too").symlink_to(other / "deep")
    (text / "nowhere.txt").symlink_to("missing")
    (text / "circle.txt").symlink_to("circle.txt")
    (text / "five.txt").symlink_to(tmp_path / "five.md")
    write(tmp_path, "five.md")
    found = find([str(text)])
    files = (
        "a/one.txt",
        "b/two.txt",
        "five.txt",
        "linked/deep/four.txt",
        "linked/three.txt",
    )
    assert names(found) == [f"text/{file}" for file in files]
    assert {reason: sorted(paths) for reason, paths in found.left_out.items()} == {
        "links that lead nowhere": ["text/circle.txt", "text/nowhere.txt"],
        "reached twice": [
            "text/0.txt",
            "text/a/again",
            "text/a/loop",
            "text/linked too",
        ],
    }
    assert found.describe_left_out() == (
        "links that lead nowhere: 2 (text/circle.txt, text/nowhere.txt); "
        "reached twice: 4 (text/0.txt, text/a/again, text/a/loop, ...)"
    )


def test_an_input_named_twice_is_read_once(tmp_path):
    write(tmp_path, "text/a.txt", "text/b.txt")
    text, file = str(tmp_path / "text"), str(tmp_path / "text" / "a.txt")
    assert names(find([text, file, text + "/."])) == ["text/a.txt", "text/b.txt"]
    found = find([file, text])
    assert names(found) == ["a.txt", "text/b.txt"] and found.left_out == {
        "reached twice": ["text/a.txt"]
    }


def test_two_names_of_one_file_that_are_no_links_are_two_documents(tmp_path):
    write(tmp_path, "a.txt")
    os.link(tmp_path / "a.txt", tmp_path / "b.txt")
    assert len(find([str(tmp_path)]).files) == 2


def test_pipes_sockets_and_prepared_shards_are_left_out_and_reported(
    tmp_path, monkeypatch
):
    write(tmp_path, "a.txt")
    os.mkfifo(tmp_path / "pipe.txt")
    monkeypatch.chdir(tmp_path)  # the names of sockets must be short
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("socket.txt")
        prepare(
            find([str(tmp_path / "a.txt")]).files,
            tmp_path / "shards",
            PrepareOptions(validation=0.0),
        )
        found = find([str(tmp_path)])
    root = tmp_path.name
    assert names(found) == [f"{root}/a.txt"]
    assert {reason: sorted(paths) for reason, paths in found.left_out.items()} == {
        "neither files nor directories": [f"{root}/pipe.txt", f"{root}/socket.txt"],
        "directories of prepared shards": [f"{root}/shards"],
    }
    with pytest.raises(ConfigError, match="shards holds prepared shards, no text"):
        find([str(tmp_path / "shards")])


def test_what_is_no_input_is_reported_as_what_it_is(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "circle").symlink_to("circle")
    (tmp_path / "nowhere").symlink_to("missing")
    for given, said in {
        "": "a file or directory ... is empty.",
        "/dev/null": "/dev/null ... neither a file ... write",
        str(tmp_path / "pipe"): f"{tmp_path}/pipe ... neither a file ... write",
        str(
            tmp_path / "circle"
        ): f"{tmp_path}/circle cannot be read: ... symbolic links.",
        str(
            tmp_path / "nowhere"
        ): f"{tmp_path}/nowhere is a link ... nowhere (missing).",
        "no\nsuch\0": r"no file or directory no\nsuch\x00 ...",
        "x" * 5000: f"{'x' * 140}…{'x' * 60} cannot be read: ... too long.",
    }.items():
        with pytest.raises(ConfigError) as error:
            find([given])
        assert tells(str(error.value), said)


@pytest.mark.skipif(os.getuid() == 0, reason="root may read everything")
def test_a_directory_that_may_not_be_read_is_reported(tmp_path):
    write(tmp_path, "a.txt", "secret/b.txt")
    for mode in (0, 0o600):
        (tmp_path / "secret").chmod(mode)
        with pytest.raises(
            ConfigError, match="secret cannot be read: permission denied"
        ):
            find([str(tmp_path)])
    (tmp_path / "secret").chmod(0o700)
