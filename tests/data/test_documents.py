"""Finding files, cutting them into units, reading documents good and bad."""

import gzip
import itertools
import json
from pathlib import Path

import pytest

from meshtrain.config import ConfigError
from meshtrain.data import documents
from meshtrain.data.documents import Document, Part, read, units
from meshtrain.data.inputs import File, find


def read_file(path: Path, field: str = "text") -> list[Document]:
    return [document for unit in units(find([str(path)]).files) for part in unit for document in read(part, field)]


def test_a_folder_gives_its_text_sorted_by_name_and_counts_the_rest(tmp_path: Path) -> None:
    for name in (
        "b.md",
        "a.txt",
        "c/d.py",
        "c/e.jsonl.gz",
        "picture.png",
        ".git/config.txt",
        "__pycache__/x.py",
        ".hidden.txt",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    found = find([str(tmp_path)])
    root = tmp_path.name
    assert [file.name for file in found.files] == [
        f"{root}/a.txt",
        f"{root}/b.md",
        f"{root}/c/d.py",
        f"{root}/c/e.jsonl.gz",
    ]
    assert found.ignored == {".png": 1}


def test_a_file_named_itself_is_read_whatever_its_suffix(tmp_path: Path) -> None:
    (tmp_path / "notes.xyz").write_text("words")
    assert read_file(tmp_path / "notes.xyz") == [Document("notes.xyz", "words")]


@pytest.mark.parametrize("what", ["missing", "empty", "pictures"])
def test_nothing_to_read_is_refused(tmp_path: Path, what: str) -> None:
    said = {
        "missing": "there is no file or directory",
        "empty": "no file at all",
        "pictures": r"other kinds \(1 \.png\)",
    }
    path = tmp_path / what
    if what != "missing":
        path.mkdir()
    if what == "pictures":
        (path / "a.png").write_bytes(b"x")
    with pytest.raises(ConfigError, match=said[what]):
        find([str(path)])


def test_gzipped_text_reads_as_the_text_itself(tmp_path: Path) -> None:
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress("zipped ü".encode()))
    assert read_file(tmp_path / "a.txt.gz") == [Document("a.txt.gz", "zipped ü")]


def test_a_byte_order_mark_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfwords")
    assert read_file(tmp_path / "a.txt")[0].text == "words"


@pytest.mark.parametrize("zipped", [False, True])
def test_json_lines_give_a_document_a_line_named_by_where_it_begins(tmp_path: Path, zipped: bool) -> None:
    lines = b'{"body": "one"}\n\n{"body": "two\\nlines"}\n{"body": "last"}'
    path = tmp_path / ("a.jsonl.gz" if zipped else "a.jsonl")
    path.write_bytes(gzip.compress(lines) if zipped else lines)
    assert [(d.name, d.text) for d in read_file(path, "body")] == [
        (f"{path.name}#0", "one"),
        (f"{path.name}#17", "two\nlines"),
        (f"{path.name}#40", "last"),
    ]


@pytest.mark.parametrize(
    ("name", "data", "kind"),
    [
        ("a.txt", b"good \xff bad", "not UTF-8"),
        ("a.txt", b"", "empty"),
        ("a.txt.gz", b"not gzip", "unreadable"),
        ("a.txt.gz", gzip.compress(b"cut off" * 99)[:-9], "unreadable"),
        ("a.txt.gz", gzip.compress(b"altered" * 99)[:12] + b"\xff" * 9, "unreadable"),
        ("a.jsonl", b"{broken", "not JSON"),
        ("a.jsonl", b'{"text": "\xff"}', "not UTF-8"),
        ("a.jsonl", b'{"content": "x"}', "without text"),
        ("a.jsonl", b'{"text": 3}', "without text"),
        ("a.jsonl", b'["text"]', "without text"),
        ("a.jsonl", b'{"text": ""}', "empty"),
        ("a.jsonl", b'{"text": "\\ud800"}', "not Unicode"),
    ],
)
def test_a_bad_document_is_told_by_name_and_kind(tmp_path: Path, name: str, data: bytes, kind: str) -> None:
    (tmp_path / name).write_bytes(data)
    (document,) = read_file(tmp_path / name)
    assert document.name.startswith(name) and document.text == "" and document.kind == kind


def test_json_lines_cut_anywhere_give_each_line_to_exactly_one_part(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": "x" * n}) + "\n" for n in range(1, 40)))
    whole = read_file(path)
    file = find([str(path)]).files[0]
    assert len(whole) == 39
    for size in (1, 7, 15, 100, file.size):
        parts = [Part(file, at, min(at + size, file.size)) for at in range(0, file.size, size)]
        assert [document for part in parts for document in read(part, "text")] == whole


def test_units_cover_every_byte_once_and_only_json_lines_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "LEAST_UNIT", 100)
    sizes = {"a.txt": 30, "b.txt": 80, "c.jsonl": 950, "d.txt": 500, "e.txt.gz": 90, "f.jsonl.gz": 300, "g.txt": 0}
    files = [File(name, name, size, 0) for name, size in sizes.items()]
    found = units(files)
    for file in files:
        spans = [(part.begin, part.end) for unit in found for part in unit if part.file == file]
        assert spans[0][0] == 0 and spans[-1][1] == file.size
        assert all(one[1] == two[0] for one, two in itertools.pairwise(spans))
        assert len(spans) == (10 if file.name == "c.jsonl" else 1)
    assert len(found) > 10
