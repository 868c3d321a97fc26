"""Kinds of input files, by name: text, JSON Lines or Parquet, plain or compressed; and their bytes."""

import gzip
import importlib.util
import io
import zlib
from collections.abc import Callable, Iterator
from pathlib import PurePosixPath
from typing import IO, Any, cast

from meshtrain.errors import not_installed
from meshtrain.files import is_address
from meshtrain.stores import open_object

JSON_LINES = (".jsonl", ".ndjson")
PARQUET = ".parquet"
TEXT = (
    ".txt", ".text", ".md", ".markdown", ".rst", ".tex", ".org", ".adoc", ".html", ".htm", ".xml", ".csv", ".tsv",
    ".py", ".pyi", ".ipynb", ".c", ".h", ".cc", ".cpp", ".cxx", ".hpp", ".hh", ".cu", ".cuh", ".java", ".kt", ".scala",
    ".go", ".rs", ".swift", ".js", ".jsx", ".ts", ".tsx", ".css", ".rb", ".php", ".pl", ".lua", ".r", ".jl", ".m",
    ".hs", ".ml", ".clj", ".ex", ".exs", ".erl", ".sh", ".bash", ".sql", ".proto", ".json", ".yaml", ".yml", ".toml",
    ".ini", ".cfg",
)  # fmt: skip
GZIP = ".gz"
ZSTD = ".zst"
LIBRARIES = {ZSTD: "zstandard", PARQUET: "pyarrow"}  # of the extra `data`
DAMAGE = (OSError, EOFError, zlib.error)  # what reading a file raises that is not whole
HEAD = 8000  # bytes of a file of which a NUL means binary data, as in git


def compression(name: str) -> str:
    """.gz, .zst or nothing."""
    return next(
        (suffix for suffix in (GZIP, ZSTD) if name.lower().endswith(suffix)), ""
    )


def suffix(name: str) -> str:
    """The suffix before that of the compression, in lower case: .jsonl of a.JSONL.gz."""
    return PurePosixPath(name.lower().removesuffix(compression(name))).suffix


def is_text(name: str) -> bool:
    """Returns whether a file of a folder is read: a known kind of text, JSON Lines or Parquet."""
    return suffix(name) in (*TEXT, *JSON_LINES) or name.lower().endswith(PARQUET)


def is_chat(name: str) -> bool:
    """Returns whether a file of a folder is read for conversations: JSON Lines, JSON or Parquet."""
    return suffix(name) in (*JSON_LINES, ".json") or name.lower().endswith(PARQUET)


def wanted_for(contents: str) -> Callable[[str], bool]:
    """Which files of a folder hold documents of a `data.format`."""
    return is_text if contents == "text" else is_chat


def require_libraries(name: str) -> None:
    """ConfigError for a file that only a library of the extra `data` reads, where that is not installed."""
    for ending, library in LIBRARIES.items():
        if name.lower().endswith(ending) and importlib.util.find_spec(library) is None:
            what = "compressed with Zstandard" if ending == ZSTD else "a Parquet file"
            raise not_installed(
                f"{name} is {what} and needs the {library} library", "data"
            )


def open_plain(path: str) -> IO[bytes]:
    """The bytes of a file, decompressed as its name says; reading raises one of DAMAGE where they are not whole."""
    if compression(path) == GZIP:
        return cast(IO[bytes], gzip.open(_opened(path)))
    if compression(path) == ZSTD:
        return io.BufferedReader(_Chunks(_zstandard(path)), 1 << 17)
    return _opened(path)


def _opened(path: str) -> IO[bytes]:
    if not is_address(path):
        return open(path, "rb")
    return open_object(path)


def _zstandard(path: str) -> Iterator[bytes]:
    """The frames of a file, one after the other.

    The library's own reader takes the end of a file within a frame for its end.
    """
    import zstandard

    decoder: Any = None  # within a frame
    with _opened(path) as file:
        while data := file.read(1 << 14):
            while data:
                decoder = (
                    decoder
                    or zstandard.ZstdDecompressor(
                        max_window_size=1 << 31
                    ).decompressobj()
                )
                try:
                    yield decoder.decompress(data)
                except zstandard.ZstdError as error:
                    raise OSError(str(error)) from None
                data = decoder.unused_data
                decoder = None if decoder.eof else decoder
    if decoder is not None:
        raise EOFError("it ends within a frame")


class _Chunks(io.RawIOBase):
    """Chunks of bytes as a file."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        while not self._ready and (chunk := next(self._chunks, None)) is not None:
            self._ready = memoryview(chunk)
        n = min(len(into), len(self._ready))
        into[:n] = self._ready[:n]
        self._ready = self._ready[n:]
        return n


def parquet_column(path: str, field: str) -> Iterator[list[bytes | None]]:
    """The rows of a column of strings, some at a time; KeyError if there is none of this name.

    OSError: the file is damaged.
    """
    import pyarrow
    from pyarrow import parquet, types

    try:
        with (
            _opened(path) as stream,
            parquet.ParquetFile(stream, page_checksum_verification=True) as file,
        ):
            names = file.schema_arrow.names
            kind = (
                file.schema_arrow.field(field).type if names.count(field) == 1 else None
            )
            if kind is not None and types.is_dictionary(kind):
                kind = kind.value_type
            strings = (types.is_string, types.is_large_string, types.is_binary)
            if kind is None or not any(is_one(kind) for is_one in strings):
                raise KeyError(field)
            for batch in file.iter_batches(batch_size=1024, columns=[field]):
                # As bytes: a string that is not UTF-8 is one bad row.
                yield (
                    batch.column(0).cast(kind).cast(pyarrow.large_binary()).to_pylist()
                )
    except pyarrow.ArrowException as error:
        raise OSError(str(error)) from None


def parquet_records(path: str) -> Iterator[dict[str, Any]]:
    """The rows of a file with all their columns; a field that is null is left out. OSError: the file is damaged."""
    import pyarrow
    from pyarrow import parquet

    try:
        with (
            _opened(path) as stream,
            parquet.ParquetFile(stream, page_checksum_verification=True) as file,
        ):
            for batch in file.iter_batches(batch_size=256):
                yield from (present(row) for row in batch.to_pylist())
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise OSError(str(error)) from None


def present(value: Any) -> Any:
    """The value without fields that are null: in a column every message has all fields that any has."""
    if isinstance(value, dict):
        return {
            name: present(field) for name, field in value.items() if field is not None
        }
    return [present(entry) for entry in value] if isinstance(value, list) else value
