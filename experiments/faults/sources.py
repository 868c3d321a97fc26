"""What a run reads: text, prepared shards, caches, tokenizers, mixtures; changed or damaged between two runs."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from experiments.faults.bases import WORDS, folder, text
from experiments.faults.harness import (
    DAMAGE,
    LAST,
    NO_FILE,
    NotTried,
    Place,
    done,
    fault,
    goes_on,
    kind,
    nothing,
    refused,
    refuses,
    resumed,
    told_or_done,
    with_settings,
)

# --- changed under an unchanged name
kind("data-changed")


def touch(p: Place) -> None:
    for path in (p.dir / "text").iterdir():
        os.utime(path, (2_000_000_000, 2_000_000_000))


def move(p: Place) -> None:
    (p.dir / "volume").mkdir()
    os.rename(p.dir / "text", p.dir / "volume/text")
    (p.dir / "text").symlink_to("volume/text")


def no_cache(p: Place) -> None:
    shutil.rmtree(p.dir / "cache")


goes_on("between two runs: files touched, and nothing else", touch, base="text")
goes_on("between two runs: the text moved, a link in its place", move, base="text")
goes_on("between two runs: the cache deleted", no_cache, base="text")


@fault("between two runs: the tokenizer trained again, of the same size")
def other_tokenizer(p: Place) -> None:
    def learn(source: str) -> None:
        words = ("--input", source, "--vocab-size", "300", "--output", "tokenizer.json")
        ended = p.command("data", "train-tokenizer", *words)
        if "tokenizers library" in ended.err:
            raise NotTried("the tokenizers library is not installed")
        done(ended)

    folder(p)
    learn("text")
    settings = (
        "data.source=text",
        "data.tokenizer=tokenizer.json",
        "model.vocab_size=400",
    )
    done(p.train(*settings, "train.steps=4"))
    p.file("more.txt", " ".join(reversed(WORDS)) * 50 + "zq zq zq zq" * 40)
    learn("more.txt")
    before = p.digests(p.run)
    refused(p.train(*settings), "tokenizer|data")
    p.survive(before)


# --- caches
kind("cache-damaged")


def lengths_file(p: Place) -> Path:
    return p.largest("cache/meshtrain/lengths", "**/*")


def every_length(path: Path) -> None:
    content = bytearray(path.read_bytes())
    # Behind the counts of each length 0 .. 16
    for at in range(17 * 8, len(content) - 7, 8):
        content[at] ^= 1
    path.write_bytes(content)


def cached(
    name: str, base: str, find: Callable[[Place], Path], act: Callable[[Path], object]
) -> None:
    """A cache is the program's own: it makes it again, or says in one sentence what to remove.

    Batches are never others.
    """

    @fault(name)
    def _(p: Place) -> None:
        p.base(base)
        act(find(p))
        ended = p.train()
        if told_or_done(ended, "cache|again|lengths|shard|altered|remove"):
            resumed(ended, LAST)
            p.undisturbed(base)


for way, act in DAMAGE.items():
    cached(f"the cached table of document lengths {way}", "packed", lengths_file, act)
for way in NO_FILE:
    for file in ("train-*.tokens", "manifest.json"):
        cached(
            f"the cached {file} {way}",
            "text",
            lambda p, file=file: p.largest("cache", f"**/{file}"),
            DAMAGE[way],
        )
cached(
    "the cached table of document lengths with every piece moved by one",
    "packed",
    lengths_file,
    every_length,
)

kind("cache-path")


def cache_path(name: str, make: Callable[[Path], object]) -> None:
    def arrange(p: Place) -> None:
        no_cache(p)
        make(p.dir / "cache")

    words = "XDG_CACHE_HOME|cache"
    refuses(
        f"the cache directory is {name}",
        with_settings(),
        words,
        base="text",
        arrange=arrange,
    )


cache_path("a file", lambda path: path.write_text("x"))
cache_path("a dangling link", lambda path: path.symlink_to("/nonexistent/place"))

kind("two-at-once")


@fault("two runs fill the same cache at once")
def both_prepare(p: Place) -> None:
    p.base("packed", interrupted=False)
    no_cache(p)
    shutil.rmtree(p.run)
    for running in [p.training(), p.training("run.directory=second")]:
        done(running.end().checked())
    p.undisturbed("packed")


# --- prepared shards
kind("shard-damaged")


def shard(pattern: str, way: str) -> None:
    def arrange(p: Place) -> None:
        DAMAGE[way](p.largest("shards", pattern))

    for name, command, words in (
        ("train", with_settings(), ("shard", "prepare|manifest")),
        ("verify", ("data", "verify", "shards"), ()),
    ):
        refuses(
            f"prepared shards: {pattern} {way}: {name}",
            command,
            *words,
            base="shards",
            arrange=arrange,
        )


for way in ("become a directory", "become a dangling link", "become a FIFO"):
    shard("train-*.tokens", way)
for way in ("become a directory", "become a link to itself", "become a FIFO"):
    shard("manifest.json", way)

# --- what data.source may name
kind("source-path")


def source(
    name: str,
    *words: str,
    arrange: Callable[[Place], object] = nothing,
    by: tuple[str, ...] = ("data.source=source",),
) -> None:
    refuses(f"data.source {name}", with_settings(*by), *words, arrange=arrange)


def holds(name: str, content: str | bytes) -> Callable[[Place], object]:
    return lambda p: p.file(name, content)


def at(name: str, make: Callable[[Path], object]) -> Callable[[Place], object]:
    return lambda p: make(p.dir / name)


def half_prepared(p: Place) -> None:
    p.file("source/plan.json", "{}")
    (p.dir / "source/units").mkdir()


source("names nothing", "source")
source("is an empty directory", "source", arrange=at("source", Path.mkdir))
source("is an empty file", "source|document", arrange=holds("source", ""))
source(
    "holds files of other kinds alone",
    "source",
    ".exe",
    arrange=holds("source/a.exe", "x"),
)
source(
    "is a dangling link",
    "source",
    arrange=at("source", lambda path: path.symlink_to("gone")),
)
source(
    "is a link to itself",
    "source",
    arrange=at("source", lambda path: path.symlink_to(path)),
)
source("is a FIFO", "source", arrange=at("source", os.mkfifo))
source(
    "is a file of bytes that are not UTF-8",
    "source",
    arrange=holds("source", os.urandom(3000)),
)
source("holds less than a sequence", "source", arrange=holds("source/a.txt", "short"))
source(
    "is text in UTF-16",
    "source",
    "UTF-8",
    arrange=holds("source/a.txt", text(1).encode("utf-16")),
)
source("is a preparation that was not finished", "not finished", arrange=half_prepared)
for name, value, word in (
    ("has a slip of the pen", "synthetc", "did you mean synthetic"),
    ("is /dev/null", "/dev/null", "/dev/null"),
    ("is /dev/zero", "/dev/zero", "/dev/zero"),
    ("has a NUL in it", '"a\\0b"', "data.source"),
    ("has half of a surrogate pair in it", '"a\\ud800"', "data.source"),
    ("is a name of 300 characters", "x" * 300, "source"),
    ("is a path of 5,000 characters", "x/" * 2500, "source"),
    ("is a mixture that names nothing", "mixture", "mixture"),
):
    source(name, word, by=(f"data.source={value}",))
for name, word, setting in (
    ("needs a tokenizer that is not there", "tokenizer", "data.tokenizer=gone.json"),
    ("has held-out text that is not there", "gone", "data.validation_source=gone"),
):
    source(name, word, arrange=folder, by=("data.source=text", setting))
source(
    "is a mixture whose second source is not there",
    "gone",
    arrange=folder,
    by=("data.source=mixture", "data.mixture=[text, gone]", "data.weights=[1, 1]"),
)
source(
    "has no held-out text though eval.every asks for it",
    "eval.every",
    arrange=holds("text/a.txt", text(1)),
    by=("data.source=text", "eval.every=2"),
)


def read_anyway(name: str, arrange: Callable[[Place], object]) -> None:
    """Text that can be read must be: the run ends well."""

    @fault(f"data.source {name}")
    def _(p: Place) -> None:
        folder(p)
        arrange(p)
        done(p.train("data.source=text"))


kind("source-odd")
read_anyway(
    "has a file name that is not UTF-8",
    lambda p: Path(os.fsdecode(os.fsencode(p.dir) + b"/text/\xff.txt")).write_text(
        text(50)
    ),
)
read_anyway("has a file name with a line end in it", holds("text/a\nb.txt", text(50)))
read_anyway(
    "has text with a byte order mark, NULs and Windows line ends",
    holds("text/x.txt", b"\xef\xbb\xbfa\0b\r\n" * 50),
)
read_anyway("has a FIFO with a name like text", at("text/z.txt", os.mkfifo))
read_anyway(
    "has a link to its own folder", at("text/self", lambda path: path.symlink_to("."))
)
read_anyway(
    "has a dangling link", at("text/z.txt", lambda path: path.symlink_to("gone"))
)
read_anyway("has one line of a megabyte", holds("text/z.txt", "x" * 1_000_000))

# --- tokenizers
kind("tokenizer-file")


def tokenizer_file(name: str, make: Callable[[Path], object]) -> None:
    def arrange(p: Place) -> None:
        folder(p)
        make(p.dir / "tokenizer.json")

    command = with_settings("data.source=text", "data.tokenizer=tokenizer.json")
    refuses(f"a tokenizer.json that {name}", command, "tokenizer", arrange=arrange)


def model(**values: object) -> str:
    return json.dumps(
        {
            "version": "1.0",
            "model": {"type": "BPE", "vocab": {"a": 0}, "merges": [], **values},
        }
    )


for name, content in (
    ("is empty", ""),
    ("is not JSON", "{"),
    ("is a list", "[]"),
    ("is null", "null"),
    ("has no model", "{}"),
    ("is nested 100,000 deep", "[" * 100_000),
    ("has an id below zero", model(vocab={"a": -1})),
    ("has an id of 4 billion", model(vocab={"a": 4294967295})),
    ("has merges of what is not in it", model(merges=["x y"])),
    ("has an empty vocabulary", model(vocab={})),
    ("knows none of the text", model(vocab={"é": 0})),
):
    tokenizer_file(name, lambda path, content=content: path.write_text(content))
tokenizer_file("is not UTF-8", lambda path: path.write_bytes(b"\xff\xfe\xfd"))
tokenizer_file("is a directory", Path.mkdir)
tokenizer_file("is a FIFO", os.mkfifo)
tokenizer_file("is a link to itself", lambda path: path.symlink_to(path))
tokenizer_file("is a dangling link", lambda path: path.symlink_to("gone"))
