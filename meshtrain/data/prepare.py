"""From files to token shards: in parallel, to be interrupted and run again, the same bytes whatever the number of workers.

Each unit of the input (documents.units) becomes one shard of each split. A finished unit leaves a note, so that a later run
skips it; the manifest comes last, and its presence says that all is there.

    DIR/plan.json              what the shards are made from (input, tokenizer, options), so that a later run goes on only with the same
    DIR/units/00000.json       the shards of a finished unit, with counts and digests
    DIR/units/00000.skipped    the documents that it skipped, joined in DIR/skipped.log in the end
"""

import contextlib
import hashlib
import json
import multiprocessing
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy as np

from meshtrain.config import ConfigError, refusal
from meshtrain.data.documents import Document, Part, read, units
from meshtrain.data.inputs import File, shown
from meshtrain.data.shards import MANIFEST, PLAN, SPLITS, UNITS, Manifest, Shard, ShardWriter, digest_of_file
from meshtrain.data.tokenizer import Tokenizer, load_tokenizer, use_one_thread
from meshtrain.files import locked, remove_temporaries, write_atomically

SKIPPED = "skipped.log"
ESCAPED = str.maketrans({"\\": r"\\", "\n": r"\n", "\r": r"\r", "\t": r"\t"})  # so that a name is one field of one line
BATCH_CHARACTERS = 1 << 20  # text handed to the tokenizer at once


@dataclass(frozen=True)
class Options:
    """What decides, with the input's content, the bytes that come out."""

    tokenizer: str = "byte"
    validation: float = 0.01  # share of the documents that is held out
    text_field: str = "text"
    bad: str = "skip"  # skip | refuse a document that is none


@dataclass(frozen=True)
class Note:
    """What a finished unit leaves behind."""

    shards: dict[str, Shard | None]
    skipped: dict[str, int]


def held_out(name: str, fraction: float) -> bool:
    """Whether a document belongs to the validation split: by its name alone, so it stays there when others come and go."""
    return int.from_bytes(hashlib.blake2b(encoded(name), digest_size=8).digest()) < fraction * 2**64


def encoded(names: str) -> bytes:
    """Names of files as bytes; Python keeps those that are not UTF-8 as surrogates."""
    return names.encode(errors="surrogateescape")


def fingerprint(files: Sequence[File], options: Options, tokenizer: Tokenizer) -> dict[str, str]:
    """What a preparation was made from, to tell whether another is the same."""
    listing = "\n".join(f"{f.name}\t{f.size}\t{f.modified}" for f in files)
    chosen = {k: v for k, v in asdict(options).items() if k != "tokenizer"}
    return {
        "input": hashlib.sha256(encoded(listing)).hexdigest(),
        "tokenizer": tokenizer.digest,
        "options": json.dumps(chosen, sort_keys=True),
    }


def prepare(
    files: Sequence[File],
    output: Path,
    options: Options,
    workers: int = 1,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Manifest:
    """Writes the shards and their manifest; finished units are kept if they are still as they were, and a second process waits for the first.

    progress is called with (bytes of input done, bytes in all). ConfigError: the directory holds another preparation, a bad
    document with bad: refuse, no document at all.
    """
    tokenizer = load_tokenizer(options.tokenizer)
    plan, parts = fingerprint(files, options, tokenizer), units(files)
    sizes = [sum(part.end - part.begin for part in unit) for unit in parts]
    output.mkdir(parents=True, exist_ok=True)
    with locked(output):
        _claim(output, plan)
        with ThreadPoolExecutor() as pool:  # hashing releases the interpreter's lock
            whole = pool.map(
                lambda i: _note(output, i, dtype_of(tokenizer), verify=True) is not None, range(len(parts))
            )
            todo = [i for i, is_whole in enumerate(whole) if not is_whole]
        done = sum(sizes) - sum(sizes[i] for i in todo)
        progress(done, sum(sizes))
        with contextlib.closing(_run(parts, todo, output, options, tokenizer, workers)) as finished:
            for number in finished:
                done += sizes[number]
                progress(done, sum(sizes))
        return _finish(output, len(parts), options, tokenizer)


def _claim(output: Path, plan: dict[str, str]) -> None:
    """Refuses a directory that holds something else."""
    path = output / PLAN
    if not path.is_file():
        others = sorted(p.name for p in output.iterdir() if not p.name.startswith("."))
        if others and (
            others != [UNITS] or any((output / UNITS).iterdir())
        ):  # as a run leaves it that is killed just here
            raise ConfigError(
                f"{output} is not empty ({shown(others[0])}) and holds no preparation of ours; give another --output."
            )
        (output / UNITS).mkdir(exist_ok=True)
        write_atomically(path, json.dumps(plan, indent=1).encode())
    (output / UNITS).mkdir(exist_ok=True)
    for directory in (output, output / UNITS):
        remove_temporaries(directory)  # none is at work, since we hold the lock
    try:
        before = dict(json.loads(path.read_bytes()))
    except (ValueError, TypeError, RecursionError):
        raise ConfigError(
            f"{path} is damaged, so that nothing tells what {output} was made from; remove that directory."
        ) from None
    changed = [what for what in plan if before.get(what) != plan[what]]
    if changed:
        raise ConfigError(
            f"{output} holds shards made from different {' and '.join(changed)}; remove it, or give another --output."
        )


def _run(
    parts: list[tuple[Part, ...]], todo: list[int], output: Path, options: Options, tokenizer: Tokenizer, workers: int
) -> Generator[int, None, None]:
    """The numbers of the units as they are finished."""
    if min(workers, len(todo)) <= 1:
        for number in todo:
            _Unit(number, output, options, tokenizer).run(parts[number])
            yield number
        return
    spawn = multiprocessing.get_context("spawn")  # a fork of a process that has threads (JAX) may hang
    stop = spawn.Event()
    with ProcessPoolExecutor(min(workers, len(todo)), spawn, _begin_worker, (options.tokenizer, stop)) as pool:
        try:
            with _signals_held():  # a worker whose start is interrupted dies with a traceback
                futures = {pool.submit(_work, n, parts[n], output, options): n for n in todo}
            for future in as_completed(futures):
                future.result()
                yield futures[future]
        except BaseException:
            stop.set()  # the others leave their units unfinished
            pool.shutdown(wait=True, cancel_futures=True)
            raise


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """Signals that Python handles (jax.distributed's SIGTERM is not one) and that arrive meanwhile are raised at the end."""
    if threading.current_thread() is not threading.main_thread():  # which alone hears of signals
        yield
        return
    handlers = {s: handler for s in (signal.SIGINT, signal.SIGTERM) if callable(handler := signal.getsignal(s))}
    arrived: list[int] = []
    for number in handlers:
        signal.signal(number, lambda number, _: arrived.append(number))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    for each in arrived:
        signal.raise_signal(each)


_worker: dict[str, Any] = {}  # the worker process's tokenizer, loaded once, and what tells it to stop


def _begin_worker(tokenizer: str, stop: Event) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears of it too, and says when to stop
    use_one_thread()  # the workers are the parallelism
    _worker.update(tokenizer=load_tokenizer(tokenizer), stop=stop)


def _work(number: int, parts: tuple[Part, ...], output: Path, options: Options) -> None:
    _Unit(number, output, options, _worker["tokenizer"], _worker["stop"]).run(parts)


class _Unit:
    """Reads, tokenizes and writes one unit, and leaves its note."""

    def __init__(
        self, number: int, output: Path, options: Options, tokenizer: Tokenizer, stop: Event | None = None
    ) -> None:
        self.number, self.output, self.options, self.tokenizer, self.stop = number, output, options, tokenizer, stop
        end, dtype = tokenizer.end_of_document, dtype_of(tokenizer)
        self.writers = {split: ShardWriter(output, f"{split}-{number:05d}", end, dtype) for split in SPLITS}
        self.skipped: Counter[str] = Counter()
        self.named: list[str] = []

    def run(self, parts: tuple[Part, ...]) -> None:
        try:
            self._run(parts)
        finally:
            for writer in self.writers.values():
                writer.discard()  # of a unit that was not finished; a full disk needs the room

    def _run(self, parts: tuple[Part, ...]) -> None:
        batch: list[tuple[str, str | None]] = []  # (split, text); None: there the document ends
        characters = 0
        for part in parts:
            for document in read(part, self.options.text_field):
                if document.problem:
                    self._skip(document)
                    continue
                split = "validation" if held_out(document.name, self.options.validation) else "train"
                for text in cut(document.text):
                    batch.append((split, text))
                    characters += len(text)
                    if characters >= BATCH_CHARACTERS:
                        self._write(batch)
                        batch, characters = [], 0
                batch.append((split, None))
        self._write(batch)
        note = Note({split: writer.close() for split, writer in self.writers.items()}, dict(self.skipped))
        path = self.output / UNITS / f"{self.number:05d}"
        write_atomically(path.with_suffix(".skipped"), encoded("".join(self.named)))
        write_atomically(path.with_suffix(".json"), json.dumps(asdict(note)).encode())

    def _skip(self, document: Document) -> None:
        if self.options.bad == "refuse":
            raise ConfigError(
                f"the document {shown(document.name)} is {document.problem}; mend it, or have bad documents skipped."
            )
        self.skipped[document.kind] += 1
        self.named.append(f"{document.name.translate(ESCAPED)}\t{document.problem}\n")

    def _write(self, batch: list[tuple[str, str | None]]) -> None:
        if self.stop is not None and self.stop.is_set():
            raise InterruptedError
        encoded = iter(self.tokenizer.encode([text for _, text in batch if text is not None]))
        for split, text in batch:
            if text is None:
                self.writers[split].end_document()
            else:
                self.writers[split].add(next(encoded))
        for writer in self.writers.values():
            writer.flush()


def cut(text: str, longest: int = BATCH_CHARACTERS) -> Iterator[str]:
    """A long text in pieces, each to the end of a line where it can: tokenizers need memory many times their text."""
    at = 0
    while len(text) - at > longest:
        end = text.rfind("\n", at, at + longest) + 1 or at + longest
        yield text[at:end]
        at = end
    yield text[at:]


def dtype_of(tokenizer: Tokenizer) -> np.dtype:
    """The smallest of uint16 and uint32 that holds every id, little-endian."""
    return np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")


def _note(output: Path, number: int, dtype: np.dtype, verify: bool = False) -> Note | None:
    """The note of a unit whose shards are all there in full length and (with verify) unaltered."""
    path = output / UNITS / f"{number:05d}.json"
    try:
        if not path.is_file() or not path.with_suffix(".skipped").is_file():
            return None
        values = json.loads(path.read_bytes())
        shards = {split: Shard(**values["shards"][split]) if values["shards"][split] else None for split in SPLITS}
        for shard in filter(None, shards.values()):
            tokens, offsets = output / f"{shard.name}.tokens", output / f"{shard.name}.offsets"
            if tokens.stat().st_size != shard.tokens * dtype.itemsize:
                return None
            if offsets.stat().st_size != (shard.documents + 1) * 8:
                return None
            if verify and (digest_of_file(tokens), digest_of_file(offsets)) != (
                shard.tokens_digest,
                shard.offsets_digest,
            ):
                return None
        return Note(shards, dict(values["skipped"]))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None  # not there, or not whole: the unit is done again


def _finish(output: Path, count: int, options: Options, tokenizer: Tokenizer) -> Manifest:
    notes = [note for i in range(count) if (note := _note(output, i, dtype_of(tokenizer))) is not None]
    if len(notes) < count:
        raise ConfigError(f"shards in {output} vanished while others were made; run the same command again.")
    logs = [(output / UNITS / f"{i:05d}.skipped").read_bytes() for i in range(count)]
    skipped: Counter[str] = Counter()
    for note in notes:
        skipped.update(note.skipped)
    manifest = Manifest(
        tokenizer=tokenizer.name,
        tokenizer_digest=tokenizer.digest,
        vocab_size=tokenizer.vocab_size,
        end_of_document=tokenizer.end_of_document,
        dtype=dtype_of(tokenizer).name,
        validation_fraction=options.validation,
        shards={split: tuple(s for note in notes if (s := note.shards[split]) is not None) for split in SPLITS},
        skipped=dict(sorted(skipped.items())),
    )
    if not any(manifest.shards.values()):
        first = next(filter(None, logs), b"").decode(errors="surrogateescape").partition("\n")[0]
        name, _, problem = first.partition("\t")
        skipped_too = f": {describe_skipped(manifest.skipped)}; the first, {shown(name)}, is {problem}" if first else ""
        raise ConfigError(f"the input holds no document{skipped_too}.")
    write_atomically(output / SKIPPED, b"".join(logs))
    if options.tokenizer != "byte":
        write_atomically(output / "tokenizer.json", Path(os.path.expanduser(options.tokenizer)).read_bytes())
    write_atomically(output / MANIFEST, manifest.to_json().encode())
    return manifest


def refusal_at(error: OSError) -> str:
    """What the system said, and of which file where it said that: is a directory: train-00000.tokens."""
    return refusal(error) + (f": {shown(os.path.basename(error.filename2))}" if error.filename2 else "")


def describe_skipped(skipped: dict[str, int]) -> str:
    """3 skipped: 2 not UTF-8, 1 empty."""
    return f"{sum(skipped.values())} skipped: " + ", ".join(f"{count} {reason}" for reason, count in skipped.items())
