"""How fast the data comes, beside Grain's plain pipeline and beside what no loader can do without, in one run.

    python experiments/bench_data.py [--gigabytes 2] [--seconds 6] [--directory DIR] [--only floor,loader]

    floor     batches of 32,768 labels beside the same stretches in the same order copied from a bare memory map by a loop, in the same
              turns; processor time, user and system
    loader    tokens a second of batches of 32 x 1024 from shards in the page cache
    mixture   as loader, from 35 directories of shards mixed and from one, with the memory and the threads of each

The corpus is the standard library over and over, each document with a number of its own, as JSON Lines; it and its
shards (2.5 times --gigabytes in all) stay in DIR for the next run.
"""

import argparse
import dataclasses
import itertools
import json
import os
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from experiments import bench
from experiments.bench import Table
from meshtrain.config import Config, load
from meshtrain.data import Loader, open_data
from meshtrain.data.cache import stdlib_files
from meshtrain.data.documents import read, units
from meshtrain.data.input_files import find
from meshtrain.data.manifest import ShardManifest
from meshtrain.data.prepare import prepare
from meshtrain.data.tokenizer import load_tokenizer
from meshtrain.data.unit import PrepareOptions, ShardWriter

LENGTH, ROWS, WORKERS, ROUNDS = 1024, 32, 2, 3
DOMAINS = 35


def main() -> None:
    sections = {
        "floor": floors,
        "loader": loaders,
        "mixture": mixture,
    }
    parser = bench.parser(__doc__)
    parser.add_argument(
        "--gigabytes", type=float, default=2.0, help="size of the shards (default: 2)"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=6.0,
        help="how long each loader runs in a turn (default: 6)",
    )
    parser.add_argument(
        "--directory", type=Path, default=Path("/tmp/meshtrain-bench-data")
    )
    parser.add_argument("--only", default=",".join(sections))
    parser.add_argument("--mix", type=int, help=argparse.SUPPRESS)  # that of `mixture`
    chosen = parser.parse_args()
    if chosen.mix:
        mix(chosen)
        return
    chosen.directory.mkdir(parents=True, exist_ok=True)
    for section in chosen.only.split(","):
        sections[section](chosen)


def config(source: str, batching: str, length: int = LENGTH, **data: Any) -> Config:
    values = {"source": source, "batching": batching, **data}
    return load(
        {
            "data": values,
            "train": {"sequence_length": length, "global_batch_size": ROWS},
        }
    )


# The corpus


def documents() -> list[str]:
    """Returns the standard library's source files."""
    parts = [part for unit in units(stdlib_files().files) for part in unit]
    return [
        document.text
        for part in parts
        for document in read(part, "text")
        if not document.problem
    ]


def shards(chosen: argparse.Namespace) -> Path:
    """Returns shards of the byte tokenizer, two bytes a token, prepared unless they are there.

    Leaves them in the page cache.
    """
    text = chosen.directory / f"text-{chosen.gigabytes}.jsonl"
    output = chosen.directory / "shards"
    if not text.exists():
        written = 0
        with open(chosen.directory / "unfinished", "w") as stream:
            for number, document in enumerate(itertools.cycle(documents())):
                if written >= chosen.gigabytes * 1e9 / 2:
                    break
                written += stream.write(
                    json.dumps({"text": f"# {number}\n{document}"}, ensure_ascii=False)
                    + "\n"
                )
        os.replace(chosen.directory / "unfinished", text)
    prepare(find([str(text)]).files, output, PrepareOptions(), WORKERS)
    for path in output.glob("*.tokens"):
        with open(path, "rb") as stream:
            while stream.read(1 << 24):
                continue
    return output


# Loaders: an iterator of the number of tokens in each batch


def rate(batches: Callable[[], Iterator[int]], seconds: float) -> tuple[float, float]:
    """Millions of tokens a second and a second of processor time, the first 20 batches left out; epoch after epoch."""
    stream = itertools.chain.from_iterable(batches() for _ in itertools.count())
    for _ in range(20):
        next(stream)
    tokens, began, cpu = 0, time.perf_counter(), time.process_time()
    while (spent := time.perf_counter() - began) < seconds:
        tokens += next(stream)
    return tokens / spent / 1e6, tokens / (time.process_time() - cpu) / 1e6


def ours(shards: Path, batching: str) -> Iterator[int]:
    train, _ = open_data(config(str(shards), batching, verify=False))
    loader = Loader(train)
    try:
        for _, batch in loader:
            yield batch["tokens"].size
    finally:
        loader.close()


def loaders(chosen: argparse.Namespace) -> None:
    where = shards(chosen)
    title = f"batches of {ROWS} x {LENGTH}, {os.cpu_count()} cores; millions of tokens"
    made = Table("batching", "a second", "a CPU second", title=title)
    for batching in ("window", "packed", "grouped"):
        turns = [
            rate(lambda batching=batching: ours(where, batching), chosen.seconds)
            for _ in range(ROUNDS)
        ]
        # the least disturbed
        made.row(batching, *(f"{max(rates):.1f}" for rates in zip(*turns, strict=True)))


# The floor

# How long documents are: the mean of a log-normal distribution, and its sigma
LENGTHS = {
    "short, 80": (80, 0.8),
    "code, 8,000": (8_000, 1.2),
    "long, 40,000": (40_000, 1.0),
}
FLOOR_TOKENS, FLOOR_SHARDS, FLOOR_BATCHES, FLOOR_ROUNDS, LABELS = (
    120_000_000,
    4,
    200,
    5,
    32_768,
)


def floors(chosen: argparse.Namespace) -> None:
    # glibc, having seen it freed, keeps blocks of a batch's size: as in a process that trains.
    np.ones(24 << 20, np.uint8)
    title = (
        f"batches of {LABELS:,} labels, millions of them a CPU second, the best of {FLOOR_ROUNDS} turns; map 2: "
        "tokens and labels alone, "
        "map all: all arrays of a batch; Loader: ours on its thread, with nobody computing"
    )
    heads = ("pieces", "map 2", "map all", "ours", "/ map 2", "/ map all", "Loader")
    made = Table("documents   ", "rows of", "batching", *heads, title=title)
    for name, (mean, sigma) in LENGTHS.items():
        shards = drawn(chosen.directory / f"floor-{mean}", mean, sigma)
        for length, batching in itertools.product((1024, 8192), ("window", "packed")):
            settings = config(str(shards), batching, length, verify=False)
            size = LABELS // length
            values = dataclasses.replace(
                settings,
                train=dataclasses.replace(settings.train, global_batch_size=size),
            )
            train, _ = open_data(values)
            places = train.batches.rows.locate(np.arange(FLOOR_BATCHES * size))  # type: ignore[union-attr]
            stretches = list(
                zip(places.first.tolist(), places.lengths.tolist(), strict=True)
            )
            packed = batching == "packed"
            runs = {
                "two": partial(mapped_batches, train, stretches, length, False),
                "all": partial(mapped_batches, train, stretches, length, packed),
                "ours": partial(read_batches, train),
                "loader": partial(load_batches, train),
            }
            times = bench.turns(runs, FLOOR_ROUNDS, warm=0)
            rates = {
                run: FLOOR_BATCHES
                * LABELS
                / min(one.processor for one in times[run])
                / 1e6
                for run in runs
            }
            cells = [
                f"{len(stretches) / FLOOR_BATCHES:.0f}",
                *(f"{rates[run]:.0f}" for run in ("two", "all", "ours")),
            ]
            cells += [f"{rates['ours'] / rates[run]:.2f}" for run in ("two", "all")]
            made.row(name, length, batching, *cells, f"{rates['loader']:.0f}")


def drawn(directory: Path, mean: int, sigma: float) -> Path:
    """Shards of random documents, prepared unless they are there."""
    if (directory / "manifest.json").exists():
        return directory
    directory.mkdir(parents=True)
    draw, written = np.random.default_rng(0), []
    for number in range(FLOOR_SHARDS):
        writer = ShardWriter(directory, f"train-{number:05d}", 256, np.dtype("<u2"))
        while writer.tokens < FLOOR_TOKENS // FLOOR_SHARDS:
            for n in (
                np.ceil(draw.lognormal(np.log(mean) - sigma**2 / 2, sigma, 1000))
                .astype(int)
                .tolist()
            ):
                writer.add(draw.integers(0, 256, n, np.uint16))
                writer.end_document()
            writer.flush()
        written.append(writer.close())
    splits = {"train": tuple(filter(None, written)), "validation": ()}
    manifest = ShardManifest(
        "byte", load_tokenizer("byte").digest, 257, 256, "uint16", 0.0, splits, {}
    )
    (directory / "manifest.json").write_text(manifest.to_json())
    return directory


def mapped_batches(
    train: Any, stretches: list[tuple[int, int]], length: int, every: bool
) -> None:
    """What a loop over a new memory map needs for the same batches: tokens and labels, or with `every` all five
    arrays.
    """
    corpus = train.batches.rows.corpus
    starts = corpus.starts.tolist()
    maps = [np.asarray(np.memmap(file.path, file.dtype, "r")) for file in corpus.tokens]
    counting, at, segment = np.arange(length, dtype=np.int32), LABELS, 0
    for first, n in stretches:
        if at == LABELS:
            at = 0
            tokens, labels = np.zeros(LABELS, np.int32), np.zeros(LABELS, np.int32)
            if every:
                segments, positions, weights = (
                    np.zeros(LABELS, t) for t in (np.int32, np.int32, np.float32)
                )
        if first >= 0:
            shard = bisect_right(starts, first) - 1
            begin = first - starts[shard]
            tokens[at : at + n] = maps[shard][begin : begin + n]
            labels[at : at + n] = maps[shard][begin + 1 : begin + n + 1]
            if every:
                segment = 1 if at % length == 0 else segment + 1
                segments[at : at + n] = segment
                positions[at : at + n] = counting[:n]
                weights[at : at + n] = 1
        at += n


def read_batches(train: Any) -> None:
    one_by_one(enumerate(map(train.batch, range(FLOOR_BATCHES))))


def load_batches(train: Any) -> None:
    one_by_one(Loader(train))


def one_by_one(batches: Iterator[tuple[int, Any]]) -> None:
    """Takes batches and lets each go before the next comes."""
    for _ in range(FLOOR_BATCHES):
        next(batches)
    if isinstance(batches, Loader):
        batches.close()


# Mixtures


def mixture(chosen: argparse.Namespace) -> None:
    """Prints the loader's rate, memory and threads for one directory of shards and for many."""
    prepare_domains(chosen)
    title = f"batches of {ROWS} x {LENGTH}, packed, the better of {ROUNDS} turns"
    made = Table("sources", "Mtokens/s", "MB resident", "threads", title=title)
    turns: dict[int, list[dict[str, float]]] = {1: [], DOMAINS: []}
    for _ in range(ROUNDS):
        for number, found in turns.items():
            words = ["--directory", chosen.directory, "--seconds", chosen.seconds]
            found.append(
                bench.in_process("experiments.bench_data", *words, "--mix", number)
            )
    for number, found in turns.items():
        best = max(found, key=lambda turn: turn["rate"])
        made.row(
            number,
            f"{best['rate']:.1f}",
            f"{best['memory']:.0f}",
            f"{best['threads']:.0f}",
        )


def domains(directory: Path) -> list[Path]:
    return [directory / f"domain-{number}" for number in range(DOMAINS)]


def prepare_domains(chosen: argparse.Namespace) -> None:
    """Writes the shards, and those of each part of the corpus, unless they are there."""
    shards(chosen)
    outputs = domains(chosen.directory)
    if outputs[-1].exists():
        return
    text = chosen.directory / f"text-{chosen.gigabytes}.jsonl"
    lines = text.read_text().splitlines(keepends=True)
    for number, output in enumerate(outputs):
        part = output.with_suffix(".jsonl")
        part.write_text("".join(lines[number::DOMAINS]))
        prepare(find([str(part)]).files, output, PrepareOptions(), WORKERS)
        part.unlink()


def mix(chosen: argparse.Namespace) -> None:
    """Prints what reading from that many sources takes as JSON: a process of its own, for its memory and threads."""
    mixed = chosen.mix > 1
    source = "mixture" if mixed else str(chosen.directory / "shards")
    parts = [str(directory) for directory in domains(chosen.directory)]
    data: dict[str, Any] = (
        {"mixture": parts, "weights": [1.0] * DOMAINS} if mixed else {}
    )
    most = 0

    def batches() -> Iterator[int]:
        nonlocal most
        train, _ = open_data(config(source, "packed", verify=False, **data))
        loader = Loader(train)
        for _, batch in loader:
            most = max(most, threading.active_count())
            yield batch["tokens"].size

    tokens, _ = rate(batches, chosen.seconds)
    print(json.dumps({"rate": tokens, "memory": resident(), "threads": most}))


def resident() -> float:
    """Resident memory of this process in MB."""
    found = dict(
        line.split(":") for line in Path("/proc/self/status").read_text().splitlines()
    )
    return int(found["VmRSS"].split()[0]) / 1e3


if __name__ == "__main__":
    main()
