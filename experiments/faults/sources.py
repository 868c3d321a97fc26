"""What a run reads: text, prepared shards, caches, tokenizers, mixtures; changed or damaged between two runs."""

import json
import os
import re
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
    Silent,
    done,
    fault,
    kind,
    refused,
    resumed,
    told_or_done,
)

ROOM = "sources"


# --- changed under an unchanged name (point 2)


def changed(
    name: str, act: Callable[[Place], object], base: str = "text", point: str = "2"
) -> None:
    @fault(ROOM, f"between two runs: {name}", point)
    def _(p: Place) -> None:
        p.base(base)
        act(p)
        before = p.digests(p.run)
        refused(p.train(), "data", "checkpoint.allow|run.directory|set it back|prepare")
        p.survive(before)

    @fault(ROOM, f"between two runs: {name}; allowed, it goes on and says so", point)
    def _(p: Place) -> None:
        p.base(base)
        act(p)
        named = re.search(r"checkpoint\.allow: \[([^\]]*)\]", p.train().err)
        if not named:
            raise Silent("it was not refused")
        p.base(base)
        act(p)
        ended = p.train(f"checkpoint.allow=[{named.group(1)}]")
        done(ended)
        resumed(ended, LAST)
        if not any(re.search("data|digest", line) for line in ended.sentences):
            raise Silent("it goes on with other data without a word")


def half(p: Place) -> None:
    for k in range(0, 16, 2):
        (p.dir / f"text/{k:02d}.txt").unlink()


def reprepare(p: Place) -> None:
    shutil.rmtree(p.dir / "shards")
    p.file("text/99.txt", text(99))
    done(
        p.command(
            "data.__main__", "prepare", "--input", "text", "--output", "shards", "--workers", "1"
        )
    )


kind(
    "data-changed",
    "checkpoint/test_training.py::test_a_run_whose_text_has_changed_goes_on_only_when_that_is_allowed",
    "checkpoint/test_restoring.py::test_data_that_changed_are_refused_with_the_ways_out",
    "checkpoint/test_restoring.py::test_data_that_changed_and_are_allowed_to_or_are_held_out_are_reported",
)
changed("half of the files deleted", half)
changed("a file edited", lambda p: p.file("text/03.txt", text(77)))
changed("a file added", lambda p: p.file("text/16.txt", text(16)))
changed(
    "a file renamed to the end of the order",
    lambda p: os.rename(p.dir / "text/00.txt", p.dir / "text/zz.txt"),
)
changed("the shards prepared again from other text", reprepare, base="shards")


def packed_half(p: Place) -> None:
    half(p)


changed("half of the files deleted, packed", packed_half, base="packed")


kind("data-changed")


@fault(ROOM, "between two runs: files touched, and nothing else")
def touched(p: Place) -> None:
    p.base("text")
    for path in (p.dir / "text").iterdir():
        os.utime(path, (2_000_000_000, 2_000_000_000))
    ended = p.train()
    done(ended)
    resumed(ended, LAST)
    p.undisturbed("text")


@fault(ROOM, "between two runs: the text moved to another volume, a link in its place")
def moved(p: Place) -> None:
    p.base("text")
    (p.dir / "volume").mkdir()
    os.rename(p.dir / "text", p.dir / "volume/text")
    (p.dir / "text").symlink_to("volume/text")
    ended = p.train()
    done(ended)
    resumed(ended, LAST)
    p.undisturbed("text")


@fault(ROOM, "between two runs: the cache deleted")
def no_cache(p: Place) -> None:
    p.base("text")
    shutil.rmtree(p.dir / "cache")
    ended = p.train()
    done(ended)
    resumed(ended, LAST)
    p.undisturbed("text")


@fault(ROOM, "between two runs: the tokenizer trained again, of the same size", "2")
def other_tokenizer(p: Place) -> None:
    folder(p)
    tokenizer(p, 300, "tokenizer.json")
    settings = ("data.source=text", "data.tokenizer=tokenizer.json", "model.vocab_size=400")
    done(p.train(*settings, "train.steps=4"))
    p.file("more.txt", " ".join(reversed(WORDS)) * 50 + "zq zq zq zq" * 40)
    tokenizer(p, 300, "tokenizer.json", "more.txt")
    before = p.digests(p.run)
    ended = p.train(*settings)
    refused(ended, "tokenizer|data")
    p.survive(before)


def tokenizer(p: Place, size: int, name: str, source: str = "text") -> None:
    ended = p.command(
        "data.__main__",
        "train-tokenizer",
        "--input",
        source,
        "--vocab-size",
        str(size),
        "--output",
        name,
    )
    if "tokenizers library" in ended.err:
        raise NotTried("the tokenizers library is not installed")
    done(ended)


# --- caches (point 4)
kind("cache-damaged")


def cache_file(p: Place, pattern: str) -> Path:
    found = sorted((p.dir / "cache").rglob(pattern))
    assert found, f"no {pattern} in the cache"
    return max(found, key=lambda path: path.stat().st_size)


def lengths_file(p: Place) -> Path:
    found = [
        f
        for f in (p.dir / "cache/meshtrain/lengths").rglob("*")
        if f.is_file() and "train" in str(f)
    ]
    return max(found, key=lambda path: path.stat().st_size)


def cached(what: str, base: str, find: Callable[[Place], Path], way: str, point: str = "") -> None:
    """A cache is the program's own: it makes it again, or says in one sentence what to remove.

    Batches are never others.
    """

    @fault(ROOM, f"{what} {way}", point)
    def _(p: Place) -> None:
        p.base(base)
        DAMAGE[way](find(p))
        ended = p.train()
        if told_or_done(ended, "cache|again|lengths|shard|altered|remove"):
            resumed(ended, LAST)
            p.undisturbed(base)


for way in DAMAGE:
    cached(
        "the cached table of document lengths",
        "packed",
        lengths_file,
        way,
        "4" if way in ("with a bit flipped", "truncated") else "",
    )
for way in NO_FILE:
    cached("the cached tokens", "text", lambda p: cache_file(p, "train-*.tokens"), way)
    cached("the cached manifest", "text", lambda p: cache_file(p, "manifest.json"), way)


@fault(ROOM, "the cached table of document lengths with every piece moved by one", "4")
def all_lengths(p: Place) -> None:
    p.base("packed")
    path = lengths_file(p)
    content = bytearray(path.read_bytes())
    for at in range(17 * 8, len(content) - 7, 8):  # behind the counts of each length 0 .. 16
        content[at] ^= 1
    path.write_bytes(content)
    ended = p.train()
    if told_or_done(ended):
        p.undisturbed("packed")


kind(
    "cache-damaged",
    "data/test_cache.py::test_cached_shards_that_are_damaged_are_reported_and_made_again",
)
for way in ("with a bit flipped", "truncated", "removed", "emptied"):
    cached("the cached tokens", "text", lambda p: cache_file(p, "train-*.tokens"), way)
    cached("the cached offsets", "packed", lambda p: cache_file(p, "train-*.offsets"), way)
    cached("the cached manifest", "text", lambda p: cache_file(p, "manifest.json"), way)


kind("cache-path")


@fault(ROOM, "the cache directory is a file")
def cache_is_file(p: Place) -> None:
    p.base("text")
    shutil.rmtree(p.dir / "cache")
    p.file("cache", "x")
    refused(p.train(), "XDG_CACHE_HOME|cache")


@fault(ROOM, "the cache directory is a dangling link")
def cache_dangles(p: Place) -> None:
    p.base("text")
    shutil.rmtree(p.dir / "cache")
    (p.dir / "cache").symlink_to("/nonexistent/place")
    refused(p.train(), "XDG_CACHE_HOME|cache")


kind("two-at-once")


@fault(ROOM, "two runs fill the same cache at once")
def both_prepare(p: Place) -> None:
    p.base("packed", interrupted=False)
    shutil.rmtree(p.dir / "cache")
    shutil.rmtree(p.run)
    first, second = p.training(), p.training("run.directory=second")
    done(first.end().checked())
    done(second.end().checked())
    p.undisturbed("packed")


# --- prepared shards


def shard(what: str, pattern: str, way: str) -> None:
    @fault(ROOM, f"prepared shards: {what} {way}")
    def _(p: Place) -> None:
        p.base("shards")
        path = max((p.dir / "shards").glob(pattern), key=lambda f: f.stat().st_size)
        DAMAGE[way](path)
        before = p.digests(p.run)
        refused(p.train(), "shard", "prepare|manifest")
        p.survive(before)

    @fault(ROOM, f"prepared shards: {what} {way}: verify says so")
    def _(p: Place) -> None:
        p.base("shards")
        path = max((p.dir / "shards").glob(pattern), key=lambda f: f.stat().st_size)
        DAMAGE[way](path)
        refused(p.command("data.__main__", "verify", "shards"))


kind(
    "shard-damaged",
    "data/test_shards.py::test_a_damaged_shard_is_refused_by_name_and_one_of_another_size_even_without_digests",
    "data/test_shards.py::test_a_directory_without_a_manifest_of_ours_is_refused",
    "data/test_data_command.py::test_prepare_then_verify_then_damage",
)
for way in ("with a bit flipped", "truncated", "emptied", "doubled", "removed", "become zeros"):
    shard("the tokens", "train-*.tokens", way)
for way in ("with a bit flipped", "truncated", "doubled"):
    shard("the offsets", "train-*.offsets", way)
for way in ("truncated", "emptied", "become zeros"):
    shard("the manifest", "manifest.json", way)
kind("shard-damaged")
for way in ("become a directory", "become a dangling link", "become a FIFO"):
    shard("the tokens", "train-*.tokens", way)
for way in ("become a directory", "become a link to itself", "become a FIFO"):
    shard("the manifest", "manifest.json", way)


def manifest(name: str, change: Callable[[dict], object], *words: str) -> None:
    @fault(ROOM, f"prepared shards: a manifest {name}")
    def _(p: Place) -> None:
        p.base("shards")
        path = p.dir / "shards/manifest.json"
        values = json.loads(path.read_bytes())
        change(values)
        path.write_text(json.dumps(values))
        ended = p.train()
        if told_or_done(ended, "shards", *words):
            p.undisturbed("shards")


kind(
    "shard-manifest",
    "data/test_shards.py::test_a_manifest_whose_values_make_no_sense_is_refused",
    "data/test_shards.py::test_a_directory_without_a_manifest_of_ours_is_refused",
    "data/test_shards.py::test_a_damaged_shard_is_refused_by_name_and_one_of_another_size_even_without_digests",
)
manifest("with a dtype that there is not", lambda v: v.update(dtype="float99"))
manifest("with another dtype", lambda v: v.update(dtype="uint32"))
manifest("with more tokens", lambda v: v["shards"]["train"][0].update(tokens=10**6))
manifest("with tokens that are a word", lambda v: v["shards"]["train"][0].update(tokens="many"))
manifest("with tokens below zero", lambda v: v["shards"]["train"][0].update(tokens=-5))
manifest("of a later format", lambda v: v.update(format=9))
manifest(
    "whose shard is named ../../etc/passwd",
    lambda v: v["shards"]["train"][0].update(name="../../../etc/passwd"),
)
manifest("without shards for training", lambda v: v["shards"].update(train=[]))
manifest("with a key more", lambda v: v.update(novelty=1))
manifest("that is a list", lambda v: v.clear())
manifest("with a name that has a NUL in it", lambda v: v["shards"]["train"][0].update(name="a\0b"))
manifest("with shards that are null", lambda v: v.update(shards=None))


# --- what data.source may name
kind("source-path")


def source(
    name: str,
    arrange: Callable[[Place], object],
    *words: str,
    setting: str = "data.source=source",
    more: tuple[str, ...] = (),
    point: str = "",
) -> None:
    @fault(ROOM, f"data.source {name}", point)
    def _(p: Place) -> None:
        arrange(p)
        refused(p.train(setting, *more), *words)


source("names nothing", lambda p: None, "source")
source(
    "has a slip of the pen",
    lambda p: None,
    "did you mean synthetic",
    setting="data.source=synthetc",
)
source("is an empty directory", lambda p: (p.dir / "source").mkdir(), "source")
source("is an empty file", lambda p: p.file("source", ""), "source|document")
source("holds files of other kinds alone", lambda p: p.file("source/a.exe", "x"), "source", ".exe")
source("is a dangling link", lambda p: (p.dir / "source").symlink_to("gone"), "source", point="13")
source(
    "is a link to itself", lambda p: (p.dir / "source").symlink_to("source"), "source", point="13"
)
source("is a FIFO", lambda p: os.mkfifo(p.dir / "source"), "source")
source("is /dev/null", lambda p: None, "/dev/null", setting="data.source=/dev/null", point="13")
source("is /dev/zero", lambda p: None, "/dev/zero", setting="data.source=/dev/zero")
source("has a NUL in it", lambda p: None, "data.source", setting='data.source="a\\0b"', point="11")
source(
    "has half of a surrogate pair in it",
    lambda p: None,
    "data.source",
    setting='data.source="a\\ud800"',
    point="11",
)
source(
    "is a name of 300 characters",
    lambda p: None,
    "data.source|source",
    setting="data.source=" + "x" * 300,
)
source(
    "is a path of 5,000 characters",
    lambda p: None,
    "data.source|source",
    setting="data.source=" + "x/" * 2500,
    point="13",
)
source(
    "is a file of bytes that are not UTF-8", lambda p: p.file("source", os.urandom(3000)), "source"
)
source("holds less than a sequence", lambda p: p.file("source/a.txt", "short"), "source")
source(
    "is text in UTF-16",
    lambda p: p.file("source/a.txt", text(1).encode("utf-16")),
    "source",
    "UTF-8",
)


def half_prepared(p: Place) -> None:
    p.file("source/plan.json", "{}")
    (p.dir / "source/units").mkdir()


source("is a preparation that was not finished", half_prepared, "not finished")
source("is a mixture that names nothing", lambda p: None, "mixture", setting="data.source=mixture")
source(
    "is a mixture whose second source is not there",
    folder,
    "gone",
    setting="data.source=mixture",
    more=("data.mixture=[text, gone]", "data.weights=[1, 1]"),
)
source(
    "needs a tokenizer that is not there",
    folder,
    "tokenizer",
    setting="data.source=text",
    more=("data.tokenizer=gone.json",),
)
source(
    "has held-out text that is not there",
    folder,
    "gone",
    setting="data.source=text",
    more=("data.validation_source=gone",),
)
source(
    "has no held-out text though eval.every asks for it",
    lambda p: p.file("text/a.txt", text(1)),
    "eval.every",
    setting="data.source=text",
    more=("eval.every=2",),
)


def read_anyway(name: str, arrange: Callable[[Place], object], *words: str) -> None:
    """Text that can be read must be: the run ends well and its log names what was left out."""

    @fault(ROOM, f"data.source {name}")
    def _(p: Place) -> None:
        folder(p)
        arrange(p)
        ended = p.train("data.source=text")
        done(ended)


kind("source-odd")
read_anyway(
    "has a file name that is not UTF-8",
    lambda p: Path(os.fsdecode(os.fsencode(p.dir) + b"/text/\xff.txt")).write_text(text(50)),
)
read_anyway("has a file name with a line end in it", lambda p: p.file("text/a\nb.txt", text(50)))
read_anyway(
    "has text with a byte order mark, NULs and Windows line ends",
    lambda p: p.file("text/x.txt", b"\xef\xbb\xbfa\0b\r\n" * 50),
)
read_anyway("has a FIFO with a name like text", lambda p: os.mkfifo(p.dir / "text/z.txt"))
read_anyway("has a link to its own folder", lambda p: (p.dir / "text/self").symlink_to("."))
read_anyway("has a dangling link", lambda p: (p.dir / "text/z.txt").symlink_to("gone"))
read_anyway("has one line of a megabyte", lambda p: p.file("text/z.txt", "x" * 1_000_000))


# --- tokenizers
kind("tokenizer-file")


def tokenizer_file(name: str, content: str | bytes, *words: str) -> None:
    @fault(ROOM, f"a tokenizer.json {name}")
    def _(p: Place) -> None:
        folder(p)
        p.file("tokenizer.json", content)
        refused(p.train("data.source=text", "data.tokenizer=tokenizer.json"), "tokenizer", *words)


MODEL = {"type": "BPE", "vocab": {"a": 0}, "merges": []}
tokenizer_file("that is empty", "")
tokenizer_file("that is not JSON", "{")
tokenizer_file("that is not UTF-8", b"\xff\xfe\xfd")
tokenizer_file("that is a list", "[]")
tokenizer_file("that is null", "null")
tokenizer_file("without a model", "{}")
tokenizer_file("nested 100,000 deep", "[" * 100_000)
tokenizer_file(
    "with an id below zero", json.dumps({"version": "1.0", "model": {**MODEL, "vocab": {"a": -1}}})
)
tokenizer_file(
    "with an id of 4 billion",
    json.dumps({"version": "1.0", "model": {**MODEL, "vocab": {"a": 4294967295}}}),
)
tokenizer_file(
    "with merges of what is not in it",
    json.dumps({"version": "1.0", "model": {**MODEL, "merges": ["x y"]}}),
)


@fault(ROOM, "a tokenizer.json with an empty vocabulary")
def empty_vocabulary(p: Place) -> None:
    folder(p)
    p.file("tokenizer.json", json.dumps({"version": "1.0", "model": {**MODEL, "vocab": {}}}))
    ended = p.train("data.source=text", "data.tokenizer=tokenizer.json")
    if ended.code == 0:
        raise Silent("it trained on documents of nothing")
    refused(ended)


@fault(ROOM, "a tokenizer that knows none of the text")
def knows_nothing(p: Place) -> None:
    folder(p)
    p.file("tokenizer.json", json.dumps({"version": "1.0", "model": {**MODEL, "vocab": {"é": 0}}}))
    ended = p.train("data.source=text", "data.tokenizer=tokenizer.json")
    if ended.code == 0:
        raise Silent("it trained on documents of nothing")
    refused(ended)


for name, arrange in (
    ("is a directory", lambda p: (p.dir / "t.json").mkdir()),
    ("is a FIFO", lambda p: os.mkfifo(p.dir / "t.json")),
    ("is a link to itself", lambda p: (p.dir / "t.json").symlink_to("t.json")),
    ("is a dangling link", lambda p: (p.dir / "t.json").symlink_to("gone")),
):
    source(
        f"has a tokenizer that {name}",
        lambda p, arrange=arrange: (folder(p), arrange(p)),
        "tokenizer",
        setting="data.source=text",
        more=("data.tokenizer=t.json",),
    )
