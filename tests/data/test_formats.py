"""What a file is, known by its name and its first bytes; what needs a library says which."""

import gzip
import importlib.util
import io
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest

from meshtrain.config import ConfigError
from meshtrain.data.documents import Document, read, units
from meshtrain.data.inputs import find


def archive(kind: str) -> bytes:
    """A file of each kind that can be made here, of plain ASCII where the kind allows it."""
    stream = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(stream, "w") as file:
            file.writestr("a.txt", "words")
    elif kind == "tar":
        with tarfile.open(fileobj=stream, mode="w") as file:
            file.addfile(tarfile.TarInfo("a.txt"))
    elif kind == "npy":
        np.save(stream, np.arange(3))
    elif kind == "safetensors":
        stream.write((13).to_bytes(8, "little") + b'{"a":{"b":0}}')
    elif kind == "pdf":
        stream.write(b"%PDF-1.4\n1 0 obj\n<< >>\nendobj\n")
    elif kind == "parquet":
        stream.write(b"PAR1\x15\x04PAR1")
    elif kind == "gzip":
        stream.write(gzip.compress(b"words", mtime=0))
    return stream.getvalue()


@pytest.mark.parametrize(
    ("name", "kind", "what"),
    [
        ("a.zip", "zip", "a zip archive"),
        ("a.docx", "zip", "an Office document"),
        ("a.txt", "zip", "a zip archive"),
        ("a.jsonl", "zip", "a zip archive"),
        ("a.zip", "ascii", "a zip archive"),
        ("A.PDF", "ascii", "a PDF"),
        ("a", "pdf", "a PDF"),
        ("a.tar", "tar", "a tar archive"),
        ("a.md", "tar", "a tar archive"),
        ("a.txt", "gzip", "gzip data"),
        ("a.txt", "npy", "arrays or weights"),
        ("a.txt", "safetensors", "arrays or weights"),
        ("a.txt", "parquet", "a Parquet file"),
    ],
)
def test_what_is_no_text_is_reported_as_what_it_is(tmp_path: Path, name: str, kind: str, what: str) -> None:
    (tmp_path / name).write_bytes(b"ASCII" if kind == "ascii" else archive(kind))
    (((part,),)) = units(find([str(tmp_path / name)]).files)
    assert list(read(part, "text")) == [Document(name, "", "not text", f"but {what}")]


@pytest.mark.parametrize("text", ["PKWARE made it", "BZhang wrote", "PAR1 is a prefix", "GIF is a format", "MZ", "{}"])
def test_text_that_begins_like_another_kind_of_file_is_text(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.txt").write_text(text)
    ((part,),) = units(find([str(tmp_path / "a.txt")]).files)
    assert list(read(part, "text")) == [Document("a.txt", text)]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("a.jsonl.zst", "is compressed with Zstandard, which the zstandard library reads"),
        ("a.parquet", "is a Parquet file, which the pyarrow library reads"),
    ],
)
def test_a_library_that_is_missing_is_named_with_the_extra_that_brings_it(
    tmp_path: Path, name: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda library: None)
    (tmp_path / name).write_bytes(b"x")
    for given in (tmp_path, tmp_path / name):
        with pytest.raises(ConfigError, match=rf"{said}; it is not installed: pip install 'meshtrain\[data\]'"):
            find([str(given)])
