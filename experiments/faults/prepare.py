"""python -m meshtrain.data: inputs of other kinds or another user's, outputs that lie in the way."""

import bz2
import io
import json
import lzma
import os
import tarfile
import zipfile
from collections.abc import Callable

from experiments.faults.bases import PREPARE, folder, text
from experiments.faults.harness import (
    NOBODY,
    Ended,
    Place,
    Silent,
    done,
    fault,
    kind,
    last_line,
    nothing,
    refused,
    refuses,
)


def prepare(
    p: Place,
    given: str = "input",
    output: str = "shards",
    more: tuple[str, ...] = (),
    **how: int,
) -> Ended:
    words = ("--input", given, "--output", output, "--workers", "1", *more)
    return p.command("data", "prepare", *words, **how)


def documents(p: Place, output: str = "shards") -> int:
    values = json.loads((p.dir / output / "manifest.json").read_bytes())
    return sum(
        shard["documents"] for split in values["shards"].values() for shard in split
    )


# --- inputs that are refused
kind("input-refused")


def zipped() -> bytes:
    """An archive whose bytes are ASCII, since what is in it is stored."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("a.txt", text(1))
    return content.getvalue()


def tarball() -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as archive:
        archive.addfile(tarfile.TarInfo("a.txt"))
    return content.getvalue()


def input_refused(name: str, content: bytes, *words: str) -> None:
    command = (
        "data",
        "prepare",
        "--input",
        name,
        "--output",
        "shards",
        "--workers",
        "1",
    )
    refuses(
        f"an input {name}", command, *words, arrange=lambda p: p.file(name, content)
    )


input_refused("a.zip", zipped(), "zip")
input_refused("a.docx", zipped(), "docx|zip")
input_refused("a.tar.gz", tarball(), "tar")
input_refused("a.txt.xz", lzma.compress(text(1).encode()), "xz")
input_refused("a.txt.bz2", bz2.compress(text(1).encode()), "bz2")
input_refused("a.parquet", b"PAR1" + bytes(range(256)) + b"PAR1", "parquet")

# --- inputs of which a part is bad: the good part is there, the rest is named
kind("input-partly")


@fault("an input with a link to a directory: read, or counted as left out")
def linked_directory(p: Place) -> None:
    p.file("elsewhere/b.txt", text(2))
    p.file("input/a.txt", text(1))
    (p.dir / "input/more").symlink_to("../elsewhere")
    ended = prepare(p)
    done(ended)
    if documents(p) == 1:
        done(ended, "link")


@fault("an input with a link to its own folder")
def linked_self(p: Place) -> None:
    p.file("input/a.txt", text(1))
    (p.dir / "input/self").symlink_to(".")
    done(prepare(p))
    if documents(p) != 1:
        raise Silent(f"{documents(p)} documents, one file")


@fault("an input with a file that cannot be read, by another user")
def unreadable(p: Place) -> None:
    p.file("input/a.txt", text(1))
    secret = p.file("input/b.txt", text(2))
    user = p.give_to(NOBODY)
    secret.chmod(0)
    done(prepare(p, user=user), "skipped|unreadable|cannot be read")


@fault("an input with a folder that cannot be read, by another user")
def unreadable_folder(p: Place) -> None:
    p.file("input/a.txt", text(1))
    secret = p.file("input/deep/b.txt", text(2))
    user = p.give_to(NOBODY)
    secret.parent.chmod(0)
    refused(prepare(p, user=user), "deep")


@fault("an input with bad documents, and --bad refuse")
def refuses_bad(p: Place) -> None:
    p.file("input/a.txt", b"\xff\xfe")
    refused(prepare(p, more=("--bad", "refuse")), "a.txt", "UTF-8")


# --- outputs
kind("output-taken")


def output(
    name: str,
    *words: str,
    to: str = "shards",
    arrange: Callable[[Place], object] = nothing,
    codes: tuple[int, ...] = (1, 2),
) -> None:
    def arranged(p: Place) -> None:
        folder(p)
        arrange(p)

    command = ("data", "prepare", "--input", "text", "--output", to, "--workers", "1")
    refuses(f"an output {name}", command, *words, arrange=arranged, codes=codes)


def holds(name: str, content: str) -> Callable[[Place], object]:
    return lambda p: p.file(name, content)


def link(to: str) -> Callable[[Place], object]:
    return lambda p: (p.dir / "shards").symlink_to(to)


def other_text(p: Place) -> None:
    done(prepare(p, "text"))
    p.file("text/99.txt", "x")


output("that is a file", "shards", arrange=holds("shards", "x"), codes=(2,))
output(
    "that holds another's files",
    "mine.txt",
    arrange=holds("shards/mine.txt", "x"),
    codes=(2,),
)
output(
    "whose plan is damaged",
    "shards|plan",
    arrange=holds("shards/plan.json", "{"),
    codes=(2,),
)
output(
    "whose plan is a list",
    "shards|plan",
    arrange=holds("shards/plan.json", "[]"),
    codes=(2,),
)
output(
    "that was made from other text",
    "shards",
    "different",
    arrange=other_text,
    codes=(2,),
)
output("with a NUL in its name", "NUL|null|output|x00", to="a\0b", codes=(2,))
output("that is the input", "text", to="text", codes=(2,))
output("that is a dangling link", "shards", arrange=link("/nonexistent/place"))
output("that is a link to itself", "shards", arrange=link("shards"))
output("under a file", "file", to="file/shards", arrange=holds("file", "x"))
output("with a name of 300 characters", "name", to="x" * 300)
output("that is /dev/null", "/dev/null", to="/dev/null")


@fault("an output of one document, of which a share is to be held out")
def nothing_to_train_on(p: Place) -> None:
    """The seed decides which document is held out: none of them may be all there is, without a word."""
    for seed in range(12):
        p.file(f"one-{seed}.txt", text(seed))
        ended = prepare(
            p, f"one-{seed}.txt", f"shards-{seed}", more=("--validation", "0.2")
        )
        if "train: 0 documents" in ended.said and ended.code == 0:
            raise Silent(
                f"0 documents to train on, exit code 0: {last_line(ended.said)}"
            )


@fault("an output that lies in its input: done, and again")
def output_inside(p: Place) -> None:
    folder(p)
    for _ in range(2):
        done(prepare(p, "text", "text/shards"))
    if documents(p, "text/shards") != 16:
        raise Silent("it read its own output")


kind("two-at-once")


@fault("two at once into one output")
def both(p: Place) -> None:
    folder(p)
    for running in [p.start("meshtrain.data.__main__", *PREPARE) for _ in range(2)]:
        done(running.end().checked())
    done(p.command("data", "verify", "shards"))


kind("tokenizer-out")


def tokenizer(
    name: str, to: str, word: str, arrange: Callable[[Place], object]
) -> None:
    def arranged(p: Place) -> None:
        folder(p)
        arrange(p)

    words = ("--input", "text", "--vocab-size", "300", "--output", to)
    command = ("data", "train-tokenizer", *words)
    refuses(f"train-tokenizer {name}", command, word, arrange=arranged, codes=(1, 2))


tokenizer("under a file", "file/t.json", "file", holds("file", "x"))
tokenizer("over a directory", "t.json", "t.json", lambda p: os.mkdir(p.dir / "t.json"))
