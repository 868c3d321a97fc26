"""What a file of the input is, by its name and its first bytes: text, JSON Lines or Parquet, plain or compressed, or no text at all."""

import gzip
import importlib.util
import io
import zlib
from collections.abc import Callable, Iterator
from pathlib import PurePosixPath
from typing import IO, Any, cast

from meshtrain.errors import ConfigError

JSON_LINES = (".jsonl", ".ndjson")
PARQUET = ".parquet"
TEXT = (
    ".txt", ".text", ".md", ".markdown", ".rst", ".tex", ".org", ".adoc", ".html", ".htm", ".xml", ".csv", ".tsv",
    ".py", ".pyi", ".ipynb", ".c", ".h", ".cc", ".cpp", ".cxx", ".hpp", ".hh", ".cu", ".cuh", ".java", ".kt", ".scala",
    ".go", ".rs", ".swift", ".js", ".jsx", ".ts", ".tsx", ".css", ".rb", ".php", ".pl", ".lua", ".r", ".jl", ".m", ".hs",
    ".ml", ".clj", ".ex", ".exs", ".erl", ".sh", ".bash", ".sql", ".proto", ".json", ".yaml", ".yml", ".toml", ".ini", ".cfg",
)  # fmt: skip
GZIP, ZSTD = ".gz", ".zst"
LIBRARIES = {ZSTD: "zstandard", PARQUET: "pyarrow"}  # of the extra `data`
DAMAGE = (OSError, EOFError, zlib.error)  # what reading a file raises that is not whole
HEAD = 8000  # bytes of a file by which it is known; a NUL among them means binary data, as in git

BY_SUFFIX = {
    "a zip archive": (".zip", ".jar", ".whl", ".egg", ".epub"),
    "a tar archive": (".tar", ".tgz"),
    "a compressed file": (".bz2", ".xz", ".lz4", ".br", ".z"),
    "an archive": (".7z", ".rar", ".iso", ".dmg", ".deb", ".rpm"),
    "a PDF": (".pdf",),
    "an Office document": (".doc", ".docx", ".xls", ".xlsx", ".ppt", ".pptx", ".odt", ".ods", ".odp"),
    "an image": (".png", ".jpg", ".jpeg", ".gif", ".webp", ".bmp", ".tif", ".tiff", ".ico"),
    "sound or video": (".mp3", ".wav", ".flac", ".ogg", ".mp4", ".mkv", ".webm", ".avi", ".mov"),
    "arrays or weights": (".npy", ".npz", ".safetensors", ".gguf", ".pt", ".pth", ".ckpt", ".pkl", ".h5", ".hdf5"),
    "a table": (".arrow", ".feather", ".orc", ".sqlite", ".sqlite3"),
    "a program": (".exe", ".dll", ".so", ".dylib", ".class", ".pyc", ".wasm"),
}
BY_FIRST_BYTES = {
    b"PK\x03\x04": "a zip archive",
    b"PK\x05\x06": "a zip archive",
    b"%PDF-": "a PDF",
    b"\x1f\x8b\x08": "gzip data",
    b"\x28\xb5\x2f\xfd": "Zstandard data",
    b"PAR1\x15": "a Parquet file",
    b"\xfd7zXZ\0": "xz data",
    b"7z\xbc\xaf\x27\x1c": "a 7z archive",
    b"Rar!\x1a\x07": "a RAR archive",
    b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1": "an Office document",
    b"\x89PNG\r\n\x1a\n": "an image",
    b"\xff\xd8\xff": "an image",
    b"GIF87a": "an image",
    b"GIF89a": "an image",
    b"\x93NUMPY": "arrays or weights",
    b"\x89HDF\r\n\x1a\n": "arrays or weights",
    b"GGUF\x03\0": "arrays or weights",
    b"ARROW1\0\0": "a table",
    b"SQLite format 3\0": "a table",
    b"\x7fELF": "a program",
}


def compression(name: str) -> str:
    """.gz, .zst or nothing."""
    return next((suffix for suffix in (GZIP, ZSTD) if name.lower().endswith(suffix)), "")


def suffix(name: str) -> str:
    """What stands before the compression, in lower case: .jsonl of a.JSONL.gz."""
    return PurePosixPath(name.lower().removesuffix(compression(name))).suffix


def is_text(name: str) -> bool:
    """Whether a file of a folder is taken: a known kind of text, JSON Lines or Parquet."""
    return suffix(name) in (*TEXT, *JSON_LINES) or name.lower().endswith(PARQUET)


def is_chat(name: str) -> bool:
    """Whether a file of a folder is taken for conversations: JSON Lines, JSON or Parquet."""
    return suffix(name) in (*JSON_LINES, ".json") or name.lower().endswith(PARQUET)


def wanted_for(contents: str) -> Callable[[str], bool]:
    """Which files of a folder hold documents of a `data.format`."""
    return is_text if contents == "text" else is_chat


def no_text(name: str, head: bytes) -> str | None:
    """What a file is that is no text, by its name or the first bytes of what it holds."""
    for what, suffixes in BY_SUFFIX.items():
        if suffix(name) in suffixes:
            return what
    for first, what in BY_FIRST_BYTES.items():
        if head.startswith(first):
            return what
    if head[257:262] == b"ustar":
        return "a tar archive"
    if head[:3] == b"BZh" and head[4:10] == b"1AY&SY":
        return "bzip2 data"
    if head[8:10] == b'{"' and head[4:8] == bytes(4):
        # safetensors: the length of the header, and the header.
        return "arrays or weights"
    return None


def require_libraries(name: str) -> None:
    """ConfigError for a file that only a library of the extra `data` reads, where that is not installed."""
    for ending, library in LIBRARIES.items():
        if name.lower().endswith(ending) and importlib.util.find_spec(library) is None:
            what = "compressed with Zstandard" if ending == ZSTD else "a Parquet file"
            raise ConfigError(
                f"{name} is {what}, which the {library} library reads; it is not installed: pip install 'meshtrain[data]'."
            )


def open_plain(path: str) -> IO[bytes]:
    """The bytes of a file, decompressed as its name says; reading raises one of DAMAGE where they are not whole."""
    if compression(path) == GZIP:
        return cast(IO[bytes], gzip.open(path))
    if compression(path) == ZSTD:
        return io.BufferedReader(_Zstandard(path), 1 << 17)
    return open(path, "rb")


class _Zstandard(io.RawIOBase):
    """The frames of a file, one after the other. The library's own reader takes the end of a file within a frame for its end."""

    def __init__(self, path: str) -> None:
        import zstandard

        self._library = zstandard
        self._file = io.FileIO(path)
        self._decoder: Any = None  # within a frame
        self._compressed, self._ready = b"", memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        while not self._ready:
            self._compressed = self._compressed or self._file.read(1 << 14)
            if not self._compressed:
                if self._decoder is not None:
                    raise EOFError("it ends within a frame")
                return 0
            if self._decoder is None:
                self._decoder = self._library.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
            try:
                self._ready = memoryview(self._decoder.decompress(self._compressed))
            except self._library.ZstdError as error:
                raise OSError(str(error)) from None
            self._compressed = self._decoder.unused_data
            if self._decoder.eof:
                self._decoder = None
        n = min(len(into), len(self._ready))
        into[:n], self._ready = self._ready[:n], self._ready[n:]
        return n

    def close(self) -> None:
        self._file.close()
        super().close()


def parquet_column(path: str, field: str) -> Iterator[list[bytes | None]]:
    """The rows of a column of strings, some at a time; KeyError if there is none of this name. OSError: the file is damaged."""
    import pyarrow
    from pyarrow import parquet, types

    try:
        with parquet.ParquetFile(path, page_checksum_verification=True) as file:
            names = file.schema_arrow.names
            kind = file.schema_arrow.field(field).type if names.count(field) == 1 else None
            if kind is not None and types.is_dictionary(kind):
                kind = kind.value_type
            strings = (types.is_string, types.is_large_string, types.is_binary)
            if kind is None or not any(is_one(kind) for is_one in strings):
                raise KeyError(field)
            for batch in file.iter_batches(batch_size=1024, columns=[field]):
                # As bytes: a string that is not UTF-8 is one bad row.
                yield batch.column(0).cast(kind).cast(pyarrow.large_binary()).to_pylist()
    except pyarrow.ArrowException as error:
        raise OSError(str(error)) from None


def parquet_records(path: str) -> Iterator[dict[str, Any]]:
    """The rows of a file with all their columns; a field that is null is left out. OSError: the file is damaged."""
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path, page_checksum_verification=True) as file:
            for batch in file.iter_batches(batch_size=256):
                yield from (_present(row) for row in batch.to_pylist())
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise OSError(str(error)) from None


def _present(value: Any) -> Any:
    """Without the fields that are null: in a column every message has all fields that any has."""
    if isinstance(value, dict):
        return {name: _present(each) for name, each in value.items() if each is not None}
    return [_present(each) for each in value] if isinstance(value, list) else value
