"""How fast the data comes, beside Grain's plain pipeline and Hugging Face datasets, in one run.

    pip install grain datasets tokenizers      # by hand: only this benchmark needs the first two
    python experiments/bench_data.py [--gigabytes 2] [--seconds 6] [--directory DIR] [--only loader,memory]

Every table is a ratio or stands beside its rival in the same run, on the same shards:
  packing   share of places that hold a label, standard library, rows of 1024
  padding   share of places that hold none: random batches, grouped, budget
  reading   random rows of the shards, memory-mapped and by position
  floor     batches of 32,768 labels beside what no loader can do without: the same stretches in the same order copied from a bare
            memory map by a loop, in the same turns; processor time, user and system
  loader    tokens a second of batches of 32 x 1024 from shards in the page cache, each library with its own prefetching; datasets
            reads the first 100,000 rows, copied to its own Arrow file
  watch     share of the loader's time that goes into looking for shards that are altered while they are read
  memory    resident memory over a pass of the whole corpus
  prepare   text to shards against the bare tokenizer, same workers, same text
The corpus is the standard library over and over, each document with a number of its own, as JSON Lines; it and its shards (2.5 times
--gigabytes in all) stay in DIR for the next run.
"""

import argparse
import dataclasses
import itertools
import json
import mmap
import multiprocessing
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from meshtrain.config import Config, load
from meshtrain.data import Loader, open_data
from meshtrain.data.cache import stdlib_files
from meshtrain.data.documents import read, units
from meshtrain.data.input_files import find
from meshtrain.data.manifest import ShardManifest, read_manifest
from meshtrain.data.prepare import prepare
from meshtrain.data.shards import Corpus, open_corpus
from meshtrain.data.tokenizer import load_tokenizer, use_one_thread
from meshtrain.data.tokenizer_file import train_bpe
from meshtrain.data.unit import BATCH_CHARACTERS, PrepareOptions, ShardWriter

LENGTH, ROWS, WORKERS, ROUNDS = 1024, 32, 2, 3
SECTIONS = ("packing", "padding", "reading", "floor", "loader", "watch", "memory", "prepare")
console = Console(width=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="size of the shards (default: 2)")
    parser.add_argument("--seconds", type=float, default=6.0, help="how long each loader runs, in 3 turns (default: 6)")
    parser.add_argument("--directory", type=Path, default=Path("/tmp/meshtrain-bench-data"))
    parser.add_argument("--only", default=",".join(SECTIONS))
    parser.add_argument("--pass-over", help=argparse.SUPPRESS)  # the child process of `memory`
    chosen = parser.parse_args()
    if chosen.pass_over:
        pass_over(chosen.directory / "shards", chosen.pass_over)
        return
    chosen.directory.mkdir(parents=True, exist_ok=True)
    runs = dict(zip(SECTIONS, (packing, padding, reading, floors, loaders, watching, memory, preparation), strict=True))
    for section in chosen.only.split(","):
        runs[section](chosen)


def config(source: str, batching: str, length: int = LENGTH, **data: Any) -> Config:
    values = {"source": source, "batching": batching, **data}
    return load({"data": values, "train": {"sequence_length": length, "global_batch_size": ROWS}})


def table(title: str, *columns: str) -> Table:
    console.print(f"\n{title}")
    made = Table()
    for column in columns:
        made.add_column(column, justify="left" if column == columns[0] else "right")
    return made


# The corpus


def documents() -> list[str]:
    """The standard library's source files."""
    parts = [part for unit in units(stdlib_files().files) for part in unit]
    return [document.text for part in parts for document in read(part, "text") if not document.problem]


def shards(chosen: argparse.Namespace) -> Path:
    """Shards of the byte tokenizer, two bytes a token, prepared unless they are there; says what that took. Leaves them in the page cache."""
    text, output = chosen.directory / f"text-{chosen.gigabytes}.jsonl", chosen.directory / "shards"
    if not text.exists():
        written, wanted = 0, chosen.gigabytes * 1e9 / 2
        with open(chosen.directory / "unfinished", "w") as stream:
            for number, document in enumerate(itertools.cycle(documents())):
                if written >= wanted:
                    break
                written += stream.write(json.dumps({"text": f"# {number}\n{document}"}, ensure_ascii=False) + "\n")
        os.replace(chosen.directory / "unfinished", text)
    began, there = time.perf_counter(), (output / "manifest.json").exists()
    prepare(find([str(text)]).files, output, PrepareOptions(), WORKERS)
    if not there:
        seconds, peak = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e3
        rate = text.stat().st_size / 1e6 / seconds
        console.print(
            f"prepared {text.stat().st_size / 1e6:.0f} MB of JSON Lines: {rate:.0f} MB/s, largest process {peak:.0f} MB"
        )
    for path in output.glob("*.tokens"):
        with open(path, "rb") as stream:
            while stream.read(1 << 24):
                continue
    return output


# What is held in the rows


def packing(chosen: argparse.Namespace) -> None:
    made = table(
        "packing: histogram best fit (LPFHP), standard library, byte tokenizer", "rows of", "rows", "full", "wanted"
    )
    for length in (256, 1024, 8192):
        train, _ = open_data(config("stdlib", "packed", length, last="pad"))
        rows: Any = train.batches.rows  # type: ignore[union-attr]
        full = rows.labels / (rows.count * length)
        made.add_row(str(length), str(rows.count), f"{full:.4f}", "0.97" if length == LENGTH else "")
    console.print(made)


def padding(chosen: argparse.Namespace) -> None:
    made = table(
        "padding: share of places without a label, batches of 32",
        "up to",
        "random",
        "grouped",
        "ratio",
        "budget",
        "ratio",
    )
    for length in (1024, 8192, 65536):
        train = {b: open_data(config("stdlib", b, length, last="pad"))[0] for b in ("grouped", "budget")}
        pieces = train["grouped"].batches.pieces  # type: ignore[union-attr]
        shuffled = pieces.lengths(np.random.default_rng(0).permutation(len(pieces.first)))
        drawn = shuffled[: len(shuffled) // ROWS * ROWS].reshape(-1, ROWS)
        at_random = 1 - drawn.sum() / (drawn.max(1) * ROWS).sum()
        cells = [cell for b in train.values() for cell in (f"{b.padding:.4f}", f"{b.padding / at_random:.3f}")]
        made.add_row(str(length), f"{at_random:.4f}", *cells)
    console.print(made)


# Loaders: an iterator of the number of tokens in each batch


class GrainRows:
    """The rows of `window`, for Grain to shuffle and batch."""

    def __init__(self, shards: Path) -> None:
        self.corpus = open_corpus(shards, read_manifest(shards), "train", verify=False)

    def __len__(self) -> int:
        return self.corpus.labels // LENGTH

    def __getitem__(self, row: int) -> dict[str, np.ndarray]:
        return stretch(self.corpus, row * LENGTH, LENGTH)


class GrainDocuments:
    """The pieces of documents, for Grain to shuffle and pack."""

    def __init__(self, shards: Path) -> None:
        train: Any = open_data(config(str(shards), "packed", verify=False))[0].batches
        self.corpus, self.pieces = train.rows.corpus, train.rows.pieces

    def __len__(self) -> int:
        return len(self.pieces.first)

    def __getitem__(self, number: int) -> dict[str, np.ndarray]:
        n = int(self.pieces.lengths(np.array([number]))[0])
        return stretch(self.corpus, int(self.pieces.first[number]), n)


def stretch(corpus: Corpus, first: int, n: int) -> dict[str, np.ndarray]:
    """Tokens and labels of one stretch, as int32."""
    _, firsts, lengths = corpus.cut(np.array([first]), np.array([n]))
    tokens, labels = corpus.read(firsts, lengths)
    return {"tokens": tokens.astype(np.int32), "labels": labels.astype(np.int32)}


def grain_window(shards: Path, threads: int) -> Iterator[int]:
    import grain

    rows = grain.MapDataset.source(GrainRows(shards)).shuffle(seed=0).batch(ROWS)
    options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=threads)
    for batch in rows.to_iter_dataset(options):
        yield batch["tokens"].size


def grain_packed(shards: Path) -> Iterator[int]:
    import grain
    import grain.experimental

    pieces = grain.MapDataset.source(GrainDocuments(shards)).shuffle(seed=0)
    packed = grain.experimental.FirstFitPackIterDataset(
        pieces.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=64)),
        length_struct={"tokens": LENGTH, "labels": LENGTH},
        num_packing_bins=ROWS,
    )
    for batch in packed.batch(ROWS):
        yield batch["tokens"].size


def hugging_face(shards: Path, directory: Path, flattened: bool) -> Iterator[int]:
    """Rows of LENGTH + 1 tokens in an Arrow file, memory-mapped; shuffling is a table of indices, unless flattened (written out in order)."""
    import datasets

    folder = directory / "arrow"
    if not folder.exists():
        rows, most = GrainRows(shards), 100_000

        def generate() -> Iterator[dict[str, np.ndarray]]:
            for row in range(min(len(rows), most)):
                found = rows[row]
                yield {"tokens": np.append(found["tokens"], found["labels"][-1]).astype(np.uint16)}

        features = datasets.Features({"tokens": datasets.Sequence(datasets.Value("uint16"), length=LENGTH + 1)})
        datasets.disable_progress_bars()
        datasets.Dataset.from_generator(generate, features=features, cache_dir=str(directory / "hf")).save_to_disk(
            str(folder)
        )
    loaded = datasets.load_from_disk(str(folder)).with_format("numpy")
    for batch in (loaded if flattened else loaded.shuffle(seed=0)).iter(batch_size=ROWS):
        tokens, labels = (
            np.ascontiguousarray(batch["tokens"][:, a:b], np.int32) for a, b in ((0, LENGTH), (1, LENGTH + 1))
        )
        assert labels.shape == tokens.shape
        yield tokens.size


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
    size = sum(path.stat().st_size for path in where.glob("train-*.tokens"))
    runs: dict[str, tuple[str, Callable[[], Iterator[int]]]] = {
        "ours, window": ("window", lambda: ours(where, "window")),
        "Grain, no threads": ("window", lambda: grain_window(where, 0)),
        "Grain, 2 threads": ("window", lambda: grain_window(where, 2)),
        "Grain, 16 threads (its default)": ("window", lambda: grain_window(where, 16)),
        "datasets, in file order": ("window", lambda: hugging_face(where, chosen.directory, True)),
        "datasets, shuffled": ("window", lambda: hugging_face(where, chosen.directory, False)),
        "ours, packed": ("packed", lambda: ours(where, "packed")),
        "Grain, FirstFitPack": ("packed", lambda: grain_packed(where)),
        "ours, grouped": ("grouped", lambda: ours(where, "grouped")),
    }
    rounds = [{name: rate(run, chosen.seconds / ROUNDS) for name, (_, run) in runs.items()} for _ in range(ROUNDS)]
    best = {name: [max(found[name][i] for found in rounds) for i in range(2)] for name in runs}  # the least disturbed
    title = f"loader alone: batches of {ROWS} x {LENGTH} from {size / 1e9:.2f} GB, {os.cpu_count()} cores; millions of tokens"
    made = table(title, "loader", "a second", "wanted", "of ours", "a CPU second", "of ours")
    for name, (batching, _) in runs.items():
        wall, cpu = best[name]
        our_wall, our_cpu = best[f"ours, {batching}"]
        wanted = "20" if name in ("ours, window", "ours, packed") else ""
        made.add_row(name, f"{wall:.1f}", wanted, f"{wall / our_wall:.2f}", f"{cpu:.1f}", f"{cpu / our_cpu:.2f}")
    console.print(made)


def watching(chosen: argparse.Namespace) -> None:
    """Batches one after another as fast as they come,"""
    where = shards(chosen)
    title = "looking for altered shards while batches come as fast as they can: processor time over the clock's"
    made = table(title, "batching", "looks a second", "share")
    for batching in ("window", "packed"):
        train, _ = open_data(config(str(where), batching))
        watch = train.batches.rows.corpus.watch
        look, spent, looks = watch.look, 0.0, 0

        def timed(shards: Any, look: Any = look, watch: Any = watch) -> None:
            nonlocal spent, looks
            if time.monotonic() < watch.due:
                return
            began = time.thread_time()
            look(shards)
            spent += time.thread_time() - began
            looks += 1

        watch.look = timed
        began, k = time.perf_counter(), 0
        while (wall := time.perf_counter() - began) < chosen.seconds:
            train.batches.batch(k % train.batches_per_epoch)
            k += 1
        made.add_row(batching, f"{looks / wall:.0f}", f"{spent / wall:.2%}")
    console.print(made)


# Reading


def reading(chosen: argparse.Namespace) -> None:
    """Random rows of one large file: mapped, mapped and given back, and by position, as shards.Corpus does."""
    path = max(shards(chosen).glob("train-*.tokens"), key=lambda found: found.stat().st_size)
    path = joined(chosen.directory / "one.tokens", sorted(path.parent.glob("train-*.tokens")))
    count = path.stat().st_size // 2
    title = f"reading random rows of {path.stat().st_size / 1e9:.2f} GB: processor time, and the most memory resident"
    made = table(
        title,
        "rows of",
        *(f"{how} {what}" for how in ("mapped", "mapped, given back", "by position") for what in ("us", "MB")),
    )
    for length in (256, 1024, 4096):
        starts = np.random.default_rng(0).permutation(count // length - 1)[:100_000] * length
        cells = []
        for how in ("mapped", "back", "position"):
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                seconds, peak = pool.apply(read_rows, (path, starts, length, how))
            cells += [f"{seconds / len(starts) * 1e6:.1f}", f"{peak:.0f}"]
        made.add_row(str(length), *cells)
    console.print(made)


def joined(path: Path, parts: list[Path]) -> Path:
    if not path.exists():
        with open(path, "wb") as stream:
            for part in parts:
                stream.write(part.read_bytes())
    return path


def read_rows(path: Path, starts: np.ndarray, length: int, how: str) -> tuple[float, float]:
    """(seconds of processor time, most MB resident) to read the rows once."""
    row, peak = np.empty(length, np.int32), 0.0
    spent = 0.0
    with open(path, "rb") as stream:
        mapped = mmap.mmap(stream.fileno(), 0, prot=mmap.PROT_READ)
        tokens = np.frombuffer(mapped, "<u2")
        for some in np.array_split(starts, len(starts) // 500):
            began = time.process_time()
            for start in some.tolist():
                if how == "position":
                    row[:] = np.frombuffer(os.pread(stream.fileno(), 2 * length, 2 * start), "<u2")
                else:
                    row[:] = tokens[start : start + length]
            spent += time.process_time() - began
            peak = max(peak, resident())
            began = time.process_time()
            if how == "back":
                mapped.madvise(mmap.MADV_DONTNEED)
            spent += time.process_time() - began
    return spent, peak


# The floor

LENGTHS = {  # how long documents are: the mean of a log-normal distribution, and its sigma
    "short, 80": (80, 0.8),
    "code, 8,000": (8_000, 1.2),
    "long, 40,000": (40_000, 1.0),
}
FLOOR_TOKENS, FLOOR_SHARDS, FLOOR_BATCHES, FLOOR_ROUNDS, LABELS = 120_000_000, 4, 200, 5, 32_768


def floors(chosen: argparse.Namespace) -> None:
    np.ones(
        24 << 20, np.uint8
    )  # glibc, having seen it freed, keeps blocks of a batch's size: as in a process that trains
    title = (
        f"floor: batches of {LABELS:,} labels, millions of them a CPU second, the best of {FLOOR_ROUNDS} turns;\n"
        "map 2: tokens and labels alone, map all: all arrays of a batch; Loader: ours on its thread, with nobody computing"
    )
    columns = ("pieces", "map 2", "map all", "ours", "/ map 2", "/ map all", "Loader")
    made = table(title, "documents", "rows of", "batching", *columns)
    for name, (mean, sigma) in LENGTHS.items():
        shards = drawn(chosen.directory / f"floor-{mean}", mean, sigma)
        for length, batching in itertools.product((1024, 8192), ("window", "packed")):
            settings = config(str(shards), batching, length, verify=False)
            size = LABELS // length
            values = dataclasses.replace(settings, train=dataclasses.replace(settings.train, global_batch_size=size))
            train, _ = open_data(values)
            places = train.batches.rows.locate(np.arange(FLOOR_BATCHES * size))  # type: ignore[union-attr]
            stretches = list(zip(places.first.tolist(), places.lengths.tolist(), strict=True))
            runs = {
                "two": lambda: mapped_batches(train, stretches, length, False),  # noqa: B023
                "all": lambda: mapped_batches(train, stretches, length, batching == "packed"),  # noqa: B023
                "ours": lambda: one_by_one(enumerate(map(train.batch, range(FLOOR_BATCHES)))),  # noqa: B023
                "loader": lambda: one_by_one(Loader(train)),  # noqa: B023
            }
            turns = [{run: processor_seconds(function) for run, function in runs.items()} for _ in range(FLOOR_ROUNDS)]
            rates = {run: FLOOR_BATCHES * LABELS / min(turn[run] for turn in turns) / 1e6 for run in runs}
            made.add_row(
                name,
                str(length),
                batching,
                f"{len(stretches) / FLOOR_BATCHES:.0f}",
                *(f"{rates[run]:.0f}" for run in ("two", "all", "ours")),
                f"{rates['ours'] / rates['two']:.2f}",
                f"{rates['ours'] / rates['all']:.2f}",
                f"{rates['loader']:.0f}",
            )
    console.print(made)


def drawn(directory: Path, mean: int, sigma: float) -> Path:
    """Shards of random documents, prepared unless they are there."""
    if (directory / "manifest.json").exists():
        return directory
    directory.mkdir(parents=True)
    draw, written = np.random.default_rng(0), []
    for number in range(FLOOR_SHARDS):
        writer = ShardWriter(directory, f"train-{number:05d}", 256, np.dtype("<u2"))
        while writer.tokens < FLOOR_TOKENS // FLOOR_SHARDS:
            for n in np.ceil(draw.lognormal(np.log(mean) - sigma**2 / 2, sigma, 1000)).astype(int).tolist():
                writer.add(draw.integers(0, 256, n, np.uint16))
                writer.end_document()
            writer.flush()
        written.append(writer.close())
    manifest = ShardManifest(
        "byte",
        load_tokenizer("byte").digest,
        257,
        256,
        "uint16",
        0.0,
        {"train": tuple(filter(None, written)), "validation": ()},
        {},
    )
    (directory / "manifest.json").write_text(manifest.to_json())
    return directory


def mapped_batches(train: Any, stretches: list[tuple[int, int]], length: int, every: bool) -> None:
    """What a loop over a new memory map needs for the same batches: tokens and labels, or with `every` all five arrays."""
    corpus = train.batches.rows.corpus
    starts = corpus.starts.tolist()
    maps = [np.asarray(np.memmap(file.path, file.dtype, "r")) for file in corpus.tokens]
    counting, at, segment = np.arange(length, dtype=np.int32), LABELS, 0
    for first, n in stretches:
        if at == LABELS:
            at = 0
            tokens, labels = np.zeros(LABELS, np.int32), np.zeros(LABELS, np.int32)
            if every:
                segments, positions, weights = (np.zeros(LABELS, t) for t in (np.int32, np.int32, np.float32))
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


def one_by_one(batches: Iterator[tuple[int, Any]]) -> None:
    """Takes batches and lets each go before the next comes."""
    for _ in range(FLOOR_BATCHES):
        next(batches)
    if isinstance(batches, Loader):
        batches.close()


def processor_seconds(function: Callable[[], Any]) -> float:
    """User and system."""
    began = resource.getrusage(resource.RUSAGE_SELF)
    function()
    ended = resource.getrusage(resource.RUSAGE_SELF)
    return ended.ru_utime - began.ru_utime + ended.ru_stime - began.ru_stime


# Memory


def memory(chosen: argparse.Namespace) -> None:
    where = shards(chosen)
    size = sum(path.stat().st_size for path in where.glob("train-*.tokens"))
    title = f"memory over a pass of {size / 1e9:.2f} GB: MB resident after 1%, at most later, at the end"
    made = table(title, "batching", "after 1%", "most", "end", "growth", "Mtokens/s")
    for batching in ("window", "packed", "grouped"):
        command = [sys.executable, __file__, "--directory", str(chosen.directory), "--pass-over", batching]
        told = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        seen = told["memory"]
        cells = [f"{mb:.0f}" for mb in (seen[0], max(seen), seen[-1])]
        made.add_row(batching, *cells, f"{max(seen) - seen[0]:+.0f}", f"{told['rate']:.1f}")
    console.print(made)


def pass_over(shards: Path, batching: str) -> None:
    """One epoch; prints the resident memory after each hundredth of it as JSON."""
    train, _ = open_data(config(str(shards), batching, verify=False))
    last = train.batches_per_epoch - 1
    seen, tokens, began = [], 0, time.perf_counter()
    for k, batch in Loader(train):
        tokens += batch["tokens"].size
        if (k + 1) % (last // 100) == 0:
            seen.append(resident())
        if k == last:
            break
    print(json.dumps({"memory": seen, "rate": tokens / (time.perf_counter() - began) / 1e6}))


def resident() -> float:
    """Resident memory of this process in MB."""
    found = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(found["VmRSS"].split()[0]) / 1e3


# Preparation


def batched(path: Path) -> list[list[str]]:
    """A file's texts in batches as large as `prepare` makes them."""
    batches: list[list[str]] = [[]]
    for document in (d for unit in units(find([str(path)]).files) for part in unit for d in read(part, "text")):
        if sum(map(len, batches[-1])) >= BATCH_CHARACTERS:
            batches.append([])
        batches[-1].append(document.text)
    return batches


def bare(batches: list[list[str]], tokenizer: Path) -> tuple[float, float]:
    """(wall, processor) seconds to tokenize texts that lie in memory, what comes out dropped."""
    library = load_tokenizer(str(tokenizer))._tokenizer  # type: ignore[attr-defined]
    wall, cpu = time.perf_counter(), time.process_time()
    for batch in batches:
        library.encode_batch_fast(batch, add_special_tokens=False)
    return time.perf_counter() - wall, time.process_time() - cpu


def bare_worker(number: int, paths: list[Path], tokenizer: Path, barrier: Any, walls: Any) -> None:
    use_one_thread()
    batches = [batch for path in paths[number::WORKERS] for batch in batched(path)]
    barrier.wait()
    walls[number] = bare(batches, tokenizer)[0]


def preparation(chosen: argparse.Namespace) -> None:
    use_one_thread()
    folder, output = chosen.directory / "text", Path(tempfile.mkdtemp(dir=chosen.directory))
    folder.mkdir(exist_ok=True)
    tokenizer, found = chosen.directory / "tokenizer.json", documents()
    train_bpe(found, 8192, tokenizer)
    paths = [folder / f"{number}.jsonl" for number in range(32)]  # a unit each
    for number, path in enumerate(paths):
        path.write_text("".join(json.dumps({"text": document}) + "\n" for document in found[number % 16 :: 16]))
    size = sum(path.stat().st_size for path in paths) / 1e6
    made = table(
        f"preparation: {size:.0f} MB of JSON Lines, BPE of 8192", "", "bare MB/s", "prepare MB/s", "ratio", "wanted"
    )

    def row(name: str, bare_seconds: float, seconds: float) -> None:
        made.add_row(
            name, f"{size / bare_seconds:.2f}", f"{size / seconds:.2f}", f"{bare_seconds / seconds:.3f}", "0.900"
        )

    spent = np.zeros((2, 2))  # bare, prepare; wall, processor

    def prepare_one(number: int) -> tuple[float, float]:
        wall, cpu = time.perf_counter(), time.process_time()
        prepare(find([str(paths[number])]).files, output / str(number), PrepareOptions(str(tokenizer)))
        return time.perf_counter() - wall, time.process_time() - cpu

    for number, path in enumerate(paths):  # in turns, so that a busy machine slows both
        batches = batched(path)
        if number % 2:
            spent[1] += prepare_one(number)
        spent[0] += bare(batches, tokenizer)
        if number % 2 == 0:
            spent[1] += prepare_one(number)
    row("1 worker, file by file in turns, wall", *spent[:, 0])
    row("the same, processor time", *spent[:, 1])
    spawn = multiprocessing.get_context("spawn")
    barrier, walls = spawn.Barrier(WORKERS), spawn.Array("d", WORKERS)
    workers = [spawn.Process(target=bare_worker, args=(n, paths, tokenizer, barrier, walls)) for n in range(WORKERS)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    began = time.perf_counter()
    prepare(find([str(path) for path in paths]).files, output / "all", PrepareOptions(str(tokenizer)), WORKERS)
    row(f"{WORKERS} workers, wall, theirs with their start", max(walls[:]), time.perf_counter() - began)
    console.print(made)
    shutil.rmtree(output)


if __name__ == "__main__":
    main()
