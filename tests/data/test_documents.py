"""Cutting files into units, reading documents good and bad."""

import gzip
import importlib
import itertools
import json
from pathlib import Path

import pytest

from meshtrain.data import documents
from meshtrain.data.documents import Document, Part, read, units
from meshtrain.data.input_files import InputFile, find


def read_file(path: Path, field: str = "text") -> list[Document]:
    return [
        document
        for unit in units(find([str(path)]).files)
        for part in unit
        for document in read(part, field)
    ]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("notes.xyz", "wörds".encode()),
        ("a.txt.gz", gzip.compress("wörds".encode(), mtime=0)),
        ("with a byte order mark.txt", "\ufeffwörds".encode()),
    ],
)
def test_a_file_named_itself_is_read_as_its_text_whatever_its_suffix(
    name, content, tmp_path
):
    (tmp_path / name).write_bytes(content)
    assert read_file(tmp_path / name) == [Document(name, "wörds")]


@pytest.mark.parametrize("zipped", [False, True])
def test_json_lines_give_a_document_a_line_named_by_where_it_begins(tmp_path, zipped):
    lines = b'{"body": "one"}\n\n{"body": "two\\nlines"}\n{"body": "last"}'
    path = tmp_path / ("a.jsonl.gz" if zipped else "a.jsonl")
    path.write_bytes(gzip.compress(lines, mtime=0) if zipped else lines)
    found = [(d.name.removeprefix(path.name), d.text) for d in read_file(path, "body")]
    assert found == [("#0", "one"), ("#17", "two\nlines"), ("#40", "last")]


@pytest.mark.parametrize(
    ("name", "data", "kind"),
    [
        ("a.txt", b"good \xff bad", "not UTF-8"),
        ("a.txt", b"", "empty"),
        ("a.txt.gz", b"not gzip", "unreadable"),
        ("a.txt.gz", gzip.compress(b"cut off" * 99, mtime=0)[:-9], "unreadable"),
        (
            "a.txt.gz",
            gzip.compress(b"altered" * 99, mtime=0)[:12] + b"\xff" * 9,
            "unreadable",
        ),
        ("a.jsonl", b"{broken", "not JSON"),
        ("a.jsonl", b'{"text": "\xff"}', "not UTF-8"),
        ("a.jsonl", b'{"content": "x"}', "without text"),
        ("a.jsonl", b'{"text": 3}', "without text"),
        ("a.jsonl", b'["text"]', "without text"),
        ("a.jsonl", b'{"text": null}', "without text"),
        ("a.jsonl", '{"text": "x"}'.encode("utf-16"), "not UTF-8"),
        ("a.jsonl", b'{"text": ""}', "empty"),
        ("a.jsonl", b'{"text": "\\ud800"}', "not Unicode"),
        ("a.jsonl", b"[" * 100_000, "not JSON"),
        ("a.jsonl", b'{"a":' * 100_000, "not JSON"),
        ("a.jsonl", bytes(1000), "not JSON"),
        ("a.jsonl", b'{"text": "one", "text": "two"}', "ambiguous"),
        ("a.jsonl", b'{"text": ["one"]}', "without text"),
        ("a.jsonl", b'{"meta": {"text": "x"}}', "without text"),
        ("a.JSONL", b"{broken", "not JSON"),
        ("a.txt", b"words" + bytes(1), "not text"),
        ("a.txt", "words".encode("utf-16-le"), "not text"),
        ("a.pdf", b"%PDF-1.4\n1 0 obj\n<< >>\nendobj\n", "not text"),
        ("a.TXT.GZ", b"not gzip", "unreadable"),
    ],
)
def test_a_bad_document_is_reported_by_name_and_kind(tmp_path, name, data, kind):
    (tmp_path / name).write_bytes(data)
    (document,) = read_file(tmp_path / name)
    assert (
        document.name.startswith(name) and document.text == "" and document.kind == kind
    )


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (f'{{"id": {"9" * 5000}, "text": "good"}}', "good"),
        ('{"score": NaN, "text": "good"}', "good"),
        ('{"meta": {"text": "other"}, "text": "good"}', "good"),
        ('{"text": "good", "children": [{"a": 1, "a": 2}]}', "good"),
        ('{"text": "a\\u0000b"}', "a\0b"),
        ('\ufeff{"text": "good"}', "good"),
        ('{"text": "good"}\r', "good"),
        ('{"text": "a\u2028b"}', "a\u2028b"),
    ],
    ids=[
        "a number of 5,000 digits",
        "NaN",
        "a field within",
        "a key twice elsewhere",
        "NUL",
        "byte order mark",
        "a line end of Windows",
        "a line end within a text",
    ],
)
def test_what_else_a_line_of_json_holds_does_no_harm(tmp_path, line, text):
    (tmp_path / "a.jsonl").write_text(line + "\n", encoding="utf-8")
    assert [document.text for document in read_file(tmp_path / "a.jsonl")] == [text]


@pytest.mark.thorough
@pytest.mark.parametrize("ending", [".gz", ".zst"])
@pytest.mark.parametrize("how", ["flipped", "cut", "checksum", "followed by junk"])
def test_of_a_damaged_compressed_file_no_line_is_taken(tmp_path, ending, how):
    data = compress(
        ending, "".join(f'{{"text": "{i}"}}\n' for i in range(20_000)).encode()
    )
    middle = len(data) // 2
    damaged = {
        "flipped": data[:middle] + bytes([data[middle] ^ 16]) + data[middle + 1 :],
        "cut": data[:middle],
        "checksum": data[:-8]
        + bytes([data[-8] ^ 1, data[-7], data[-6], data[-5], data[-4] ^ 1])
        + data[-3:],
        "followed by junk": data + b"junk",
    }
    path = tmp_path / f"a.jsonl{ending}"
    path.write_bytes(data)
    assert len(read_file(path)) == 20_000
    path.write_bytes(damaged[how])
    (document,) = read_file(path)
    assert (document.name, document.text, document.kind) == (
        path.name,
        "",
        "unreadable",
    )


def test_a_long_look_for_damage_can_be_stopped(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(
        gzip.compress(b'{"text": "x"}\n' * 300_000, mtime=0)
    )
    calls = []

    def check() -> None:
        calls.append(None)
        if len(calls) == 3:
            raise KeyboardInterrupt

    (((part,),)) = units(find([str(tmp_path / "a.jsonl.gz")]).files)
    with pytest.raises(KeyboardInterrupt):
        next(read(part, "text", check))


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_compressed_files_in_several_pieces_are_read_whole(tmp_path, ending):
    pieces = [b'{"text": "one"}\n{"te', b"", b'xt": "two"}\n']
    (tmp_path / f"a.jsonl{ending}").write_bytes(
        b"".join(compress(ending, piece) for piece in pieces)
    )
    assert [document.text for document in read_file(tmp_path / f"a.jsonl{ending}")] == [
        "one",
        "two",
    ]
    if ending == ".gz":
        (tmp_path / "b.jsonl.gz").write_bytes(
            compress(ending, b"".join(pieces)) + bytes(100)
        )
        assert len(read_file(tmp_path / "b.jsonl.gz")) == 2, "zeros behind it"
    (tmp_path / f"a.txt{ending}").write_bytes(
        b"".join(compress(ending, piece) for piece in pieces)
    )
    assert read_file(tmp_path / f"a.txt{ending}")[0].text == b"".join(pieces).decode()


def compress(ending: str, data: bytes) -> bytes:
    if ending == ".gz":
        return gzip.compress(data, mtime=0)
    return (
        pytest.importorskip("zstandard")
        .ZstdCompressor(write_checksum=True)
        .compress(data)
    )


@pytest.fixture
def parquet(tmp_path: Path) -> Path:
    """Five rows in row groups of two: three good ones, one without text, one empty."""
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.table(
        {
            "id": range(5),
            "text": ["one", None, "drei ü", "", "last"],
            "number": [1.0] * 5,
        }
    )
    importlib.import_module("pyarrow.parquet").write_table(
        table, tmp_path / "a.parquet", row_group_size=2
    )
    return tmp_path / "a.parquet"


def test_parquet_gives_a_document_a_row_named_by_its_number(parquet):
    rows = [
        ("one", ""),
        ("", "without text"),
        ("drei ü", ""),
        ("", "empty"),
        ("last", ""),
    ]
    found = [(d.name, d.text, d.kind) for d in read_file(parquet)]
    assert found == [(f"a.parquet#{number}", *row) for number, row in enumerate(rows)]


@pytest.mark.parametrize("field", ["body", "number"])
def test_parquet_without_the_column_is_one_bad_document(parquet, field):
    (document,) = read_file(parquet, field)
    assert (document.name, document.problem) == (
        "a.parquet",
        f"without text in a column {field!r}",
    )


def test_parquet_columns_of_every_kind_of_string_are_read(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    for number, kind in enumerate(("string", "large_string", "binary", "dictionary")):
        column = pyarrow.array(["one", "two"]).cast(
            "string" if kind == "dictionary" else kind
        )
        column = column.dictionary_encode() if kind == "dictionary" else column
        path = tmp_path / f"{number}.PARQUET"
        importlib.import_module("pyarrow.parquet").write_table(
            pyarrow.table({"text": column}), path
        )
        assert [document.text for document in read_file(path)] == ["one", "two"]
    bad = pyarrow.array([b"good", b"\xff"], "binary")
    importlib.import_module("pyarrow.parquet").write_table(
        pyarrow.table({"text": bad}), tmp_path / "bad.parquet"
    )
    assert [document.kind for document in read_file(tmp_path / "bad.parquet")] == [
        "",
        "not UTF-8",
    ]


def test_of_a_damaged_parquet_file_no_row_is_taken(parquet):
    data = parquet.read_bytes()
    last = data.rindex(b"last")  # in the last row group
    for damaged in (
        data[:-20],
        data[: last - 20] + bytes(20) + data[last:],
        b"no parquet",
    ):
        parquet.write_bytes(damaged)
        assert [document.kind for document in read_file(parquet)] == ["unreadable"]


def test_json_lines_cut_anywhere_give_each_line_to_exactly_one_part(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": "x" * n}) + "\n" for n in range(1, 40)))
    whole = read_file(path)
    file = find([str(path)]).files[0]
    assert len(whole) == 39
    for size in (1, 7, 15, 100, file.size):
        parts = [
            Part(file, at, min(at + size, file.size))
            for at in range(0, file.size, size)
        ]
        assert [document for part in parts for document in read(part, "text")] == whole


def test_units_cover_every_byte_once_and_only_json_lines_are_cut(monkeypatch):
    monkeypatch.setattr(documents, "LEAST_UNIT", 100)
    sizes = {
        "a.txt": 30,
        "b.txt": 80,
        "c.jsonl": 950,
        "d.txt": 500,
        "e.txt.gz": 90,
        "f.jsonl.gz": 300,
        "g.txt": 0,
    }
    files = [InputFile(name, name, size, 0) for name, size in sizes.items()]
    found = units(files)
    for file in files:
        spans = [
            (part.begin, part.end)
            for unit in found
            for part in unit
            if part.file == file
        ]
        assert spans[0][0] == 0 and spans[-1][1] == file.size
        assert all(one[1] == two[0] for one, two in itertools.pairwise(spans))
        assert len(spans) == (10 if file.name == "c.jsonl" else 1)
    assert len(found) > 10
