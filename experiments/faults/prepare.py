"""python -m meshtrain.data: inputs of odd kinds, shards that lie in the way, every option out of bounds."""

import bz2
import gzip
import json
import lzma
import os
import zipfile
from collections.abc import Callable
from pathlib import Path

from experiments.faults.bases import folder, text
from experiments.faults.harness import (
    DAMAGE,
    Ended,
    Place,
    Silent,
    Unclear,
    contains,
    done,
    fault,
    kind,
    last_line,
    refused,
    truncate,
)

ROOM = "prepare"
OUTPUT = ("--output", "shards", "--workers", "1")


def prepare(p: Place, *inputs: str, more: tuple[str, ...] = ()) -> Ended:
    return p.command("data.__main__", "prepare", "--input", *inputs, *OUTPUT, *more)


def documents(p: Place) -> int:
    values = json.loads((p.dir / "shards/manifest.json").read_bytes())
    return sum(shard["documents"] for split in values["shards"].values() for shard in split)


# --- inputs that are refused
kind(
    "input-refused",
    "data/test_input_files.py::test_what_is_no_input_is_reported_as_what_it_is",
    "data/test_input_files.py::test_nothing_to_read_is_refused",
    "data/test_documents.py::test_a_bad_document_is_reported_by_name_and_kind",
    "data/test_prepare.py::test_an_input_of_bad_documents_alone_is_refused",
    "data/test_documents.py::test_of_a_damaged_compressed_file_no_line_is_taken",
)


def input_refused(
    name: str, arrange: Callable[[Place], object], *words: str, path: str = "input", point: str = ""
) -> None:
    @fault(ROOM, f"an input {name}", point)
    def _(p: Place) -> None:
        arrange(p)
        refused(prepare(p, path), *words)


def zipped(p: Place) -> Path:
    path = p.dir / "input.zip"
    with zipfile.ZipFile(path, "w") as archive:  # stored: its bytes are ASCII
        archive.writestr("a.txt", text(1))
    return path


PDF = b"%PDF-1.4\n1 0 obj\n<< /Type /Catalog >>\nendobj\ntrailer\n<< /Root 1 0 R >>\n%%EOF\n" * 5

input_refused("that is not there", lambda p: None, "input")
input_refused("that is an empty directory", lambda p: (p.dir / "input").mkdir(), "input")
input_refused(
    "that is a dangling link", lambda p: (p.dir / "input").symlink_to("gone"), "input", point="13"
)
input_refused(
    "that is a link to itself", lambda p: (p.dir / "input").symlink_to("input"), "input", point="13"
)
input_refused("that is a FIFO", lambda p: os.mkfifo(p.dir / "input"), "input")
input_refused("that is /dev/null", lambda p: None, "/dev/null", path="/dev/null", point="13")
input_refused("that is a .zip whose bytes are ASCII", zipped, "zip", path="input.zip", point="7")
input_refused(
    "that is a .pdf whose bytes are ASCII",
    lambda p: p.file("input.pdf", PDF),
    "pdf",
    path="input.pdf",
    point="7",
)
input_refused(
    "that is a .docx",
    lambda p: zipped(p).rename(p.dir / "input.docx"),
    "docx|zip",
    path="input.docx",
)
input_refused("that is a .tar.gz", lambda p: tarball(p), "tar", path="input.tar.gz")
input_refused(
    "that is an .xz",
    lambda p: p.file("input.txt.xz", lzma.compress(text(1).encode())),
    "xz",
    path="input.txt.xz",
)
input_refused(
    "that is a .bz2",
    lambda p: p.file("input.txt.bz2", bz2.compress(text(1).encode())),
    "bz2",
    path="input.txt.bz2",
)
input_refused(
    "that is a .gz and holds no gzip",
    lambda p: p.file("input.txt.gz", text(1)),
    "gz",
    path="input.txt.gz",
)
input_refused(
    "that is gzip cut in half",
    lambda p: truncate(p.file("input.txt.gz", gzip.compress(os.urandom(5000)))),
    "input.txt.gz|end",
    path="input.txt.gz",
)
input_refused(
    "of nothing but white space in JSON Lines",
    lambda p: p.file("input.jsonl", "\n \n"),
    "document",
    path="input.jsonl",
)
input_refused(
    "whose lines have another text field",
    lambda p: p.file("input.jsonl", '{"body": "x"}\n'),
    "text",
    path="input.jsonl",
)
input_refused("with a NUL in its name", lambda p: None, "NUL|null|x00", path="a\0b", point="11")
input_refused("with a name of 5,000 characters", lambda p: None, path="x" * 5000, point="13")


def tarball(p: Place) -> None:
    import tarfile

    p.file("a.txt", text(1))
    with tarfile.open(p.dir / "input.tar.gz", "w:gz") as archive:
        archive.add(p.dir / "a.txt", "a.txt")


def compressed(name: str, file: str, content: Callable[[], bytes]) -> None:
    """Read, or refused in a sentence that says what it is."""

    @fault(ROOM, f"an input that is a {name}, named directly", "7")
    def _(p: Place) -> None:
        p.file(file, content())
        ended = prepare(p, file)
        if ended.code:
            refused(ended)
            if "not utf-8" in ended.err.lower():
                raise Unclear(last_line(ended.err))
            contains(ended.err, name.removeprefix("."))


compressed(".zst", "input.jsonl.zst", lambda: bytes.fromhex("28b52ffd") + bytes(40))
compressed(".parquet", "input.parquet", lambda: b"PAR1" + bytes(range(256)) + b"PAR1")


# --- inputs of which a part is bad: the good part is there, the rest is named
kind(
    "input-partly",
    "data/test_documents.py::test_a_bad_document_is_reported_by_name_and_kind",
    "data/test_documents.py::test_what_else_a_line_of_json_holds_does_no_harm",
    "data/test_documents.py::test_of_a_damaged_compressed_file_no_line_is_taken",
    "data/test_documents.py::test_compressed_files_in_several_pieces_are_read_whole",
    "data/test_input_files.py::test_suffixes_in_capitals_are_taken_as_those_in_small_letters",
)


def partly(
    name: str,
    files: dict[str, str | bytes],
    good: int,
    *words: str,
    inputs: tuple[str, ...] = ("input",),
    most: int = 0,
    point: str = "",
) -> None:
    @fault(ROOM, f"an input {name}", point)
    def _(p: Place) -> None:
        for file, content in files.items():
            p.file(f"input/{file}", content)
        ended = prepare(p, *inputs)
        done(ended)
        found = documents(p)
        if found not in range(good, max(good, most) + 1):
            raise Silent(f"{found} documents and not {good}")
        if found == good:
            done(ended, *words)


def lines(*texts: str) -> bytes:
    return b"".join(json.dumps({"text": t}).encode() + b"\n" for t in texts)


def bad_crc() -> bytes:
    content = bytearray(gzip.compress(lines(*(text(k) for k in range(5)))))
    content[-8] ^= 0xFF
    return bytes(content)


def bad_middle() -> bytes:
    content = bytearray(gzip.compress(lines(*(text(k) for k in range(500)))))
    content[len(content) // 2] ^= 0xFF
    return bytes(content)


partly(
    "with gzipped JSON Lines whose CRC fails: none of its lines is kept",
    {"a.jsonl.gz": bad_crc(), "b.txt": text(9)},
    1,
    "unreadable|skipped",
    point="7",
)
partly(
    "with gzipped JSON Lines damaged in the middle",
    {"a.jsonl.gz": bad_middle(), "b.txt": text(9)},
    1,
    "unreadable|skipped",
    point="7",
)
partly(
    "with gzipped text whose CRC fails",
    {"a.txt.gz": bad_crc(), "b.txt": text(9)},
    1,
    "unreadable|skipped",
    point="7",
)
partly(
    "with .JSONL in capitals: a line is a document",
    {"a.JSONL": lines("one", "two", "three")},
    3,
    point="7",
)
partly(
    "with .Jsonl.GZ in capitals",
    {"a.Jsonl.GZ": gzip.compress(lines("one", "two", "three"))},
    3,
    point="7",
)
partly("with .TXT and .Md in capitals", {"a.TXT": "one", "b.Md": "two"}, 2)
partly(
    "with a line nested 100,000 deep",
    {"a.jsonl": lines("one") + b"[" * 100_000 + b"\n" + lines("two")},
    2,
    "not JSON|skipped",
    point="11",
)
partly(
    "with a line nested 1,000,000 deep in an object",
    {"a.jsonl": lines("one") + b'{"text":' * 1_000_000 + b"\n" + lines("two")},
    2,
    "not JSON|skipped",
    point="11",
)
partly(
    "with a number of 10,000 digits",
    {"a.jsonl": lines("one") + b'{"text": "x", "n": ' + b"9" * 10_000 + b"}\n"},
    1,
    "skipped|2",
    most=2,
)
partly("with NaN in a line", {"a.jsonl": lines("one") + b'{"text": "x", "n": NaN}\n'}, 2)
partly(
    "with a half surrogate in a line",
    {"a.jsonl": lines("one") + b'{"text": "\\ud800"}\n'},
    1,
    "not Unicode|skipped",
)
partly(
    "with a line that is not UTF-8",
    {"a.jsonl": lines("one") + b'{"text": "\xff"}\n' + lines("two")},
    2,
    "not UTF-8|skipped",
)
partly(
    "with a byte order mark before JSON Lines",
    {"a.jsonl": b"\xef\xbb\xbf" + lines("one", "two")},
    2,
)
partly(
    "with JSON Lines in UTF-16",
    {"a.jsonl": lines("one").decode().encode("utf-16"), "b.txt": "x"},
    1,
    "skipped",
)
partly("with JSON Lines without a line end at the end", {"a.jsonl": lines("one", "two")[:-1]}, 2)
partly(
    "with JSON Lines ended by Windows", {"a.jsonl": lines("one", "two").replace(b"\n", b"\r\n")}, 2
)
partly(
    "with a line end inside a text (U+2028)",
    {"a.jsonl": '{"text": "a\u2028b"}\n{"text": "c"}\n'.encode()},
    2,
)
partly(
    "with a text that is null, a number, a list",
    {"a.jsonl": b'{"text": null}\n{"text": 3}\n{"text": []}\n{"text": "x"}\n'},
    1,
    "without text|skipped",
)
partly(
    "with a text that stands twice in a line",
    {"a.jsonl": b'{"text": "a", "text": "b"}\n', "b.txt": "x"},
    1,
    "skipped",
    most=2,
)
partly("with an empty file", {"a.txt": "", "b.txt": "x"}, 1, "empty|skipped")
partly(
    "with a file named twice: read twice, or once, as the count says",
    {"a.txt": "x"},
    1,
    "1 file",
    inputs=("input/a.txt", "input/a.txt"),
    most=2,
)
partly("with hidden files", {".hidden.txt": "x", "a.txt": "y"}, 1)
partly(
    "with two gzip members in one file",
    {"a.jsonl.gz": gzip.compress(lines("one")) + gzip.compress(lines("two"))},
    2,
)
partly(
    "with zeros behind a gzip member",
    {"a.jsonl.gz": gzip.compress(lines("one", "two")) + bytes(100)},
    2,
)
partly(
    "with rubbish behind a gzip member",
    {"a.jsonl.gz": gzip.compress(lines("one")) + b"rubbish", "b.txt": "x"},
    1,
    "unreadable|skipped",
)


kind("input-partly")


@fault(ROOM, "an input with a link to a directory: read, or counted as left out", "7")
def linked_directory(p: Place) -> None:
    p.file("elsewhere/b.txt", text(2))
    p.file("input/a.txt", text(1))
    (p.dir / "input/more").symlink_to("../elsewhere")
    ended = prepare(p, "input")
    done(ended)
    if documents(p) == 1:
        done(ended, "link")


@fault(ROOM, "an input with a link to its own folder", "7")
def linked_self(p: Place) -> None:
    p.file("input/a.txt", text(1))
    (p.dir / "input/self").symlink_to(".")
    ended = prepare(p, "input")
    done(ended)
    if documents(p) != 1:
        raise Silent(f"{documents(p)} documents, one file")


@fault(ROOM, "an input with a file that cannot be read, by another user")
def unreadable(p: Place) -> None:
    p.file("input/a.txt", text(1))
    secret = p.file("input/b.txt", text(2))
    user = p.give_to(65534)
    secret.chmod(0)
    ended = p.command("data.__main__", "prepare", "--input", "input", *OUTPUT, user=user)
    done(ended, "skipped|unreadable|cannot be read")


@fault(ROOM, "an input with a folder that cannot be read, by another user")
def unreadable_folder(p: Place) -> None:
    p.file("input/a.txt", text(1))
    p.file("input/deep/b.txt", text(2))
    user = p.give_to(65534)
    (p.dir / "input/deep").chmod(0)
    refused(p.command("data.__main__", "prepare", "--input", "input", *OUTPUT, user=user), "deep")


@fault(ROOM, "an input with bad documents, and --bad refuse")
def refuses_bad(p: Place) -> None:
    p.file("input/a.txt", b"\xff\xfe")
    refused(prepare(p, "input", more=("--bad", "refuse")), "a.txt", "UTF-8")


# --- outputs
kind("output-taken")


def output(
    name: str,
    arrange: Callable[[Place], object],
    *words: str,
    more: tuple[str, ...] = (),
    codes: tuple[int, ...] = (2,),
    point: str = "",
) -> None:
    @fault(ROOM, f"an output {name}", point)
    def _(p: Place) -> None:
        folder(p)
        arrange(p)
        before = p.digests(p.dir / "shards", p.dir / "text")
        ended = p.command("data.__main__", "prepare", "--input", "text", *(more or OUTPUT))
        refused(ended, *words, code=ended.code if ended.code in codes else codes[0])
        p.survive(before)


output("that is a file", lambda p: p.file("shards", "x"), "shards")
output(
    "that holds files of another's", lambda p: p.file("shards/mine.txt", "x"), "shards", "mine.txt"
)
output(
    "that is a dangling link",
    lambda p: (p.dir / "shards").symlink_to("/nonexistent/place"),
    "shards",
    codes=(1, 2),
)
output(
    "that is a link to itself",
    lambda p: (p.dir / "shards").symlink_to("shards"),
    "shards",
    codes=(1, 2),
    point="13",
)
output(
    "under a file",
    lambda p: p.file("file", "x"),
    "file",
    more=("--output", "file/shards"),
    codes=(1, 2),
)
output(
    "with a NUL in its name",
    lambda p: None,
    "NUL|null|output|x00",
    more=("--output", "a\0b"),
    point="11",
)
output(
    "with a name of 300 characters",
    lambda p: None,
    "name",
    more=("--output", "x" * 300),
    codes=(1, 2),
)
output("whose plan is damaged", lambda p: p.file("shards/plan.json", "{"), "shards|plan")
output("whose plan is a list", lambda p: p.file("shards/plan.json", "[]"), "shards|plan")
output(
    "that was made from other text",
    lambda p: (done(prepare(p, "text")), p.file("text/99.txt", "x")),
    "shards",
    "different",
)
output(
    "that is /dev/null",
    lambda p: None,
    "/dev/null",
    more=("--output", "/dev/null"),
    codes=(1, 2),
    point="13",
)


@fault(ROOM, "an output of one document, of which a share is to be held out")
def nothing_to_train_on(p: Place) -> None:
    """The seed decides which document is held out: none of them may be all there is, without a word."""
    for seed in range(12):
        p.file(f"one-{seed}.txt", text(seed))
        arguments = (
            "--input",
            f"one-{seed}.txt",
            "--output",
            f"shards-{seed}",
            "--workers",
            "1",
            "--validation",
            "0.2",
        )
        ended = p.command("data.__main__", "prepare", *arguments)
        if "train: 0 documents" in ended.said and ended.code == 0:
            raise Silent(f"0 documents to train on, exit code 0: {last_line(ended.said)}")


@fault(ROOM, "an output that lies in its input: done, and again", "13")
def output_inside(p: Place) -> None:
    folder(p)
    for _ in range(2):
        done(
            p.command(
                "data.__main__",
                "prepare",
                "--input",
                "text",
                "--output",
                "text/shards",
                "--workers",
                "1",
            )
        )
    values = json.loads((p.dir / "text/shards/manifest.json").read_bytes())
    if sum(shard["documents"] for split in values["shards"].values() for shard in split) != 16:
        raise Silent("it read its own output")


@fault(ROOM, "an output that is the input")
def output_is_input(p: Place) -> None:
    folder(p)
    before = p.digests(p.dir / "text")
    refused(
        p.command(
            "data.__main__", "prepare", "--input", "text", "--output", "text", "--workers", "1"
        ),
        "text",
    )
    p.survive(before)


def again(what: str, pattern: str, way: str) -> None:
    """A preparation that is run again makes whole what is damaged, or says so."""

    @fault(ROOM, f"run again, with {what} {way}")
    def _(p: Place) -> None:
        folder(p)
        done(prepare(p, "text"))
        whole = {
            path.name: path.read_bytes() for path in (p.dir / "shards").iterdir() if path.is_file()
        }
        DAMAGE[way](max((p.dir / "shards").glob(pattern), key=lambda f: f.stat().st_size))
        ended = prepare(p, "text")
        if ended.code == 0:
            if "verify" and p.command("data.__main__", "verify", "shards").code:
                raise Silent("exit code 0, but verify finds the shards altered")
            for name in ("manifest.json", "train-00000.tokens"):
                if (p.dir / "shards" / name).read_bytes() != whole[name]:
                    raise Silent(f"{name} is not what it was")
        else:
            refused(ended, "shards", code=ended.code if ended.code in (1, 2) else 2)


kind(
    "output-damaged",
    "data/test_prepare.py::test_what_was_altered_cut_or_removed_is_made_again_and_what_is_not_ours_is_left",
    "data/test_prepare.py::test_a_directory_in_the_place_of_a_file_is_named",
)
for way in ("with a bit flipped", "truncated", "removed", "emptied", "become a directory"):
    again("the tokens", "train-*.tokens", way)
for way in ("truncated", "removed", "become a directory"):
    again("the note of a unit", "units/*.json", way)
for way in ("truncated", "removed"):
    again("the manifest", "manifest.json", way)


kind("two-at-once")


@fault(ROOM, "two at once into one output")
def both(p: Place) -> None:
    folder(p)
    arguments = ("prepare", "--input", "text", *OUTPUT)
    first, second = (p.start("meshtrain.data.__main__", *arguments) for _ in range(2))
    done(first.end().checked())
    done(second.end().checked())
    done(p.command("data.__main__", "verify", "shards"))


# --- options
kind(
    "prepare-option",
    "data/test_data_command.py::test_wrong_usage_is_one_sentence_and_exit_code_2",
    "test_cli.py::test_wrong_usage_is_one_sentence_and_exit_code_2",
    "data/test_tokenizer.py::test_a_vocabulary_smaller_than_the_bytes_is_refused",
)


def option(name: str, *arguments: str, words: tuple[str, ...] = ()) -> None:
    @fault(ROOM, f"options: {name}")
    def _(p: Place) -> None:
        folder(p)
        refused(p.command("data.__main__", *arguments), *words)


COMMON = ("--input", "text", "--output", "shards")
option("none")
option("a command that there is not", "prepar", words=("prepare",))
option("a slip of the pen", "prepare", "--inptu", "text", "--output", "x", words=("--input",))
option("--workers 0", "prepare", *COMMON, "--workers", "0", words=("workers",))
option("--workers -1", "prepare", *COMMON, "--workers", "-1", words=("workers",))
option("--workers of 5,000 digits", "prepare", *COMMON, "--workers", "9" * 5000, words=("workers",))
option("--validation 0.9", "prepare", *COMMON, "--validation", "0.9", words=("validation",))
option("--validation nan", "prepare", *COMMON, "--validation", "nan", words=("validation",))
option("--vocab-size 10", "train-tokenizer", *COMMON, "--vocab-size", "10", words=("vocab-size",))
option(
    "--vocab-size in Arabic digits",
    "train-tokenizer",
    *COMMON,
    "--vocab-size",
    "٣",
    words=("vocab-size",),
)
option(
    "a tokenizer that is not there",
    "prepare",
    *COMMON,
    "--tokenizer",
    "gone.json",
    words=("gone.json",),
)
option("verify of nothing", "verify", "nowhere", words=("nowhere",))
option("verify of a file", "verify", "text/00.txt", words=("00.txt",))


kind("tokenizer-out")


@fault(ROOM, "train-tokenizer into a directory that is not there, under a file")
def tokenizer_under_file(p: Place) -> None:
    folder(p)
    p.file("file", "x")
    ended = p.command(
        "data.__main__",
        "train-tokenizer",
        "--input",
        "text",
        "--vocab-size",
        "300",
        "--output",
        "file/t.json",
    )
    refused(ended, "file", code=ended.code if ended.code in (1, 2) else 2)


@fault(ROOM, "train-tokenizer over a directory")
def tokenizer_over_directory(p: Place) -> None:
    folder(p)
    (p.dir / "t.json").mkdir()
    ended = p.command(
        "data.__main__",
        "train-tokenizer",
        "--input",
        "text",
        "--vocab-size",
        "300",
        "--output",
        "t.json",
    )
    refused(ended, "t.json", code=ended.code if ended.code in (1, 2) else 2)
