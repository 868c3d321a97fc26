"""From files to token shards: in parallel, to be interrupted and run again, the same bytes whatever the number of
workers.

Each unit of the input (documents.units) becomes one shard of each split. A finished unit leaves a record, so that a
later run skips it; the manifest comes last, and its presence says that all is there.

    DIR/plan.json              input, tokenizer and options of the shards: a later run goes on only with the same
    DIR/units/                 the records of finished units (unit.py)
    DIR/skipped.log            the documents that they skipped
"""

import contextlib
import hashlib
import json
import math
import multiprocessing
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from dataclasses import asdict, replace
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

from meshtrain.data.boundaries import companion_files
from meshtrain.data.documents import RULES, Part, units
from meshtrain.data.examples import NOTED
from meshtrain.data.input_files import InputFile
from meshtrain.data.manifest import (
    COUNTED,
    MANIFEST,
    RECIPE,
    SPLITS,
    UNITS,
    ShardManifest,
)
from meshtrain.data.template import JINJA, OF_TOOLS, find_template
from meshtrain.data.tokenizer import Tokenizer, use_one_thread
from meshtrain.data.unit import (
    Encoder,
    PrepareOptions,
    Unit,
    UnitRecord,
    encoded,
    open_encoder,
    read_record,
)
from meshtrain.errors import ConfigError, refusal, short
from meshtrain.files import locked, remove_temporaries, write_atomically

SKIPPED = "skipped.log"
STOPPING = (signal.SIGINT, signal.SIGTERM)


def fingerprint(
    files: Sequence[InputFile], options: PrepareOptions, tokenizer: Tokenizer
) -> dict[str, str]:
    """Names what a preparation is made from: two of the same are the same."""
    listing = "\n".join(f"{f.name}\t{f.size}\t{f.modified}" for f in files)
    apart = (
        "tokenizer",
        "template",
        "begin",
        "end",
        *(("contents",) if options.contents == "text" else ()),
    )
    chosen = {k: v for k, v in asdict(options).items() if k not in apart}
    begin = tokenizer.begin if options.contents == "text" else ()
    recipe = {
        "input": hashlib.sha256(encoded(listing)).hexdigest(),
        "tokenizer": tokenizer.digest,
        "options": json.dumps(chosen, sort_keys=True),
        "rules of reading": str(RULES),
    }
    if (begin, tokenizer.end_of_document) != ((), tokenizer.usual_end):
        recipe["beginning and end of documents"] = json.dumps(
            [begin, tokenizer.end_of_document]
        )
    if options.contents != "text":
        template = find_template(options.template, options.tokenizer)
        recipe["chat template"] = json.dumps(
            [template.digest, template.special], sort_keys=True
        )
    return recipe


def last_change(files: Sequence[InputFile]) -> float:
    """The time that chat templates see, seconds since 1970, so that the same input makes the same shards on any day."""
    return max((file.modified for file in files), default=0) / 1e9


def prepare(
    files: Sequence[InputFile],
    output: Path,
    options: PrepareOptions,
    workers: int = 1,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> ShardManifest:
    """Writes the shards and their manifest; finished units are kept if they are still as they were, and a second
    process waits for the first.

    progress is called with (bytes of input done, bytes in all). ConfigError: the directory holds another preparation, a
    bad
    document with bad: refuse, no document at all.
    """
    now = last_change(files)
    parts = units(files)
    sizes = [sum(part.end - part.begin for part in unit) for unit in parts]
    encoder = open_encoder(options, now)
    output.mkdir(parents=True, exist_ok=True)
    with locked(output):
        _claim(output, fingerprint(files, options, encoder.tokenizer))
        # Hashing releases the interpreter's lock.
        with ThreadPoolExecutor() as pool:
            before = pool.map(
                lambda i: read_record(output, i, encoder.dtype, verify=True),
                range(len(parts)),
            )
            todo = [i for i, record in enumerate(before) if record is None]
        done = sum(sizes) - sum(sizes[i] for i in todo)
        progress(done, sum(sizes))
        with contextlib.closing(
            _run({i: parts[i] for i in todo}, output, options, encoder, now, workers)
        ) as finished:
            for number in finished:
                done += sizes[number]
                progress(done, sum(sizes))
        records = [read_record(output, i, encoder.dtype) for i in range(len(parts))]
        if options.validation and (again := _choose_held_out(records)) is not None:
            number, share = again
            Unit(number, output, replace(options, validation=share), encoder).run(
                parts[number]
            )
            records[number] = read_record(output, number, encoder.dtype)
        return _finish(output, records, options, encoder)


def _choose_held_out(records: Sequence[UnitRecord | None]) -> tuple[int, float] | None:
    """The unit, and the share that it holds a single one out by, where the share asked for holds out none of the
    conversations.
    """
    if any(record is None or record.shards["validation"] for record in records):
        return None
    first = sorted(
        (place, i)
        for i, record in enumerate(records)
        if record is not None
        for place in record.first
    )
    # The only one is to be learned.
    if len(first) > 1:
        return (first[0][1], math.nextafter(first[0][0] / 2**64, 1))
    return None


def _claim(output: Path, recipe: dict[str, str]) -> None:
    path = output / RECIPE
    if not path.is_file():
        if others := sorted(
            p.name
            for p in output.iterdir()
            if not p.name.startswith(".") and p.name != UNITS
        ):
            raise ConfigError(
                f"{output} is not empty ({short(others[0])}) and holds no preparation of ours; give another --output."
            )
        write_atomically(path, json.dumps(recipe, indent=1).encode())
    (output / UNITS).mkdir(exist_ok=True)
    for directory in (output, output / UNITS):
        remove_temporaries(directory)  # we hold the lock, so nobody is writing
    try:
        before = dict(json.loads(path.read_bytes()))
    except (ValueError, TypeError, RecursionError):
        raise ConfigError(
            f"{path} is damaged, so that nothing tells what {output} was made from; remove that directory."
        ) from None
    if changed := [
        what for what in {**recipe, **before} if before.get(what) != recipe.get(what)
    ]:
        raise ConfigError(
            f"{output} holds shards made from different {' and '.join(changed)}; remove it, or give another --output."
        )


def _run(
    todo: dict[int, tuple[Part, ...]],
    output: Path,
    options: PrepareOptions,
    encoder: Encoder,
    now: float,
    workers: int,
) -> Generator[int, None, None]:
    if min(workers, len(todo)) <= 1:
        for number, parts in todo.items():
            Unit(number, output, options, encoder).run(parts)
            yield number
        return
    # A fork of a process that has threads (JAX) may hang.
    spawn = multiprocessing.get_context("spawn")
    stop = spawn.Event()
    with ProcessPoolExecutor(
        min(workers, len(todo)), spawn, _begin_worker, (options, now, stop)
    ) as pool:
        try:
            # A worker that is interrupted while it starts would print a traceback; the mask is inherited.
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
            try:
                futures = {
                    pool.submit(_work, n, unit, output, options): n
                    for n, unit in todo.items()
                }
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            for future in as_completed(futures):
                future.result()
                yield futures[future]
        except BaseException:
            stop.set()  # so that the others leave their units unfinished
            pool.shutdown(wait=True, cancel_futures=True)
            raise


_worker: dict[
    str, Any
] = {}  # the encoder of a worker process, loaded once, and the event that stops it


def _begin_worker(options: PrepareOptions, now: float, stop: Event) -> None:
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # the parent hears of it too, and says when to stop
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
    # One that waits for work does not see that a killed parent has none.
    threading.Thread(target=_end_with_parent, daemon=True).start()
    use_one_thread()  # the workers are the parallelism
    _worker.update(encoder=open_encoder(options, now), stop=stop)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker has a parent"
    parent.join()
    os._exit(1)


def _work(
    number: int, parts: tuple[Part, ...], output: Path, options: PrepareOptions
) -> None:
    Unit(number, output, options, _worker["encoder"], _worker["stop"]).run(parts)


def _finish(
    output: Path,
    records: Sequence[UnitRecord | None],
    options: PrepareOptions,
    encoder: Encoder,
) -> ShardManifest:
    finished = [record for record in records if record is not None]
    if len(finished) < len(records):
        raise ConfigError(
            f"shards in {output} vanished while others were made; run the same command again."
        )
    logs = [
        (output / UNITS / f"{i:05d}.skipped").read_bytes() for i in range(len(records))
    ]
    manifest = _manifest(finished, options, encoder)
    if not any(manifest.shards.values()):
        first = (
            next(filter(None, logs), b"")
            .decode(errors="surrogateescape")
            .partition("\n")[0]
        )
        name, _, problem = first.partition("\t")
        skipped_too = (
            f": {describe_skipped(manifest.skipped)}; the first, {short(name)}, is {problem}"
            if first
            else ""
        )
        raise ConfigError(f"the input has no documents{skipped_too}.")
    write_atomically(output / SKIPPED, b"".join(logs))
    if options.tokenizer != "byte":
        for name, path in companion_files(
            Path(os.path.expanduser(options.tokenizer))
        ).items():
            write_atomically(output / name, path.read_bytes())
    if encoder.examples:
        template = encoder.examples.template
        write_atomically(output / JINJA, template.source.text.encode())
        if template.source.of_tools is not None:
            (output / OF_TOOLS).parent.mkdir(exist_ok=True)
            write_atomically(output / OF_TOOLS, template.source.of_tools.encode())
    write_atomically(output / MANIFEST, manifest.to_json().encode())
    return manifest


def _manifest(
    records: Sequence[UnitRecord], options: PrepareOptions, encoder: Encoder
) -> ShardManifest:
    """Returns the manifest of all shards, with the counts of all units."""
    tokenizer = encoder.tokenizer
    skipped, counts = (
        sum((Counter(getattr(r, name)) for r in records), Counter())
        for name in ("skipped", "counts")
    )
    template = encoder.examples.template if encoder.examples else None
    return ShardManifest(
        tokenizer=tokenizer.name,
        tokenizer_digest=tokenizer.digest,
        vocab_size=tokenizer.vocab_size,
        end_of_document=tokenizer.end_of_document,
        dtype=encoder.dtype.name,
        validation_fraction=options.validation,
        shards={
            split: tuple(
                s for record in records if (s := record.shards[split]) is not None
            )
            for split in SPLITS
        },
        skipped=dict(sorted(skipped.items())),
        contents=options.contents,
        template_digest=template.source.digest if template else "",
        counts={
            name: counts[name]
            for name in (*COUNTED, *NOTED)
            if name in COUNTED or counts[name]
        }
        if template
        else {},
        begin=encoder.begin,
    )


def refusal_at(error: OSError) -> str:
    """The system's message, with the file where it names one: is a directory: train-00000.tokens."""
    return refusal(error) + (
        f": {short(os.path.basename(error.filename2))}" if error.filename2 else ""
    )


def describe_skipped(skipped: dict[str, int]) -> str:
    """3 skipped: 2 not UTF-8, 1 empty."""
    return f"{sum(skipped.values())} skipped: " + ", ".join(
        f"{count} {reason}" for reason, count in skipped.items()
    )
