"""python -m meshtrain.data: prepares token shards from text or conversations, shows which tokens count in
the loss, trains a tokenizer, verifies shards.

Exit codes: 0 done; 2 wrong usage or input (one sentence); 1 failed while running; 75 stopped early (run again to go
on).
"""

import argparse
import errno
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import get_args

from meshtrain.cli import (
    DONE,
    FAILED,
    STOPPED,
    Parser,
    command,
    number_from,
    whole_number,
)
from meshtrain.data import show
from meshtrain.data.cache import stdlib_files
from meshtrain.data.documents import documents
from meshtrain.data.formats import wanted_for
from meshtrain.data.hub_datasets import files_of
from meshtrain.data.input_files import InputFile, find
from meshtrain.data.manifest import SPLITS, Contents, ShardManifest, read_manifest
from meshtrain.data.prepare import (
    SKIPPED,
    describe_skipped,
    last_change,
    prepare,
    refusal_at,
)
from meshtrain.data.shards import open_corpus
from meshtrain.data.tokenizer import load_tokenizer
from meshtrain.data.tokenizer_file import train_bpe
from meshtrain.data.unit import PrepareOptions, open_encoder
from meshtrain.errors import ConfigError, say, short
from meshtrain.run.early import Stopped


class Failed(Exception):
    """A failure while it ran, in one sentence."""


def _stop(*_: object) -> None:
    raise Stopped


@command
def main(arguments: Sequence[str] | None = None) -> int:
    chosen = parser().parse_args(arguments)
    before = {
        number: signal.signal(number, _stop)
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        chosen.run(chosen)
    except KeyboardInterrupt:
        say("stopped; run the same command again to go on.")
        return STOPPED
    except (BrokenProcessPool, MemoryError):
        say(
            "memory ran out, or a worker was killed; run the same command again to go on, with fewer --workers."
        )
        return FAILED
    except Failed as error:
        say(error)
        return FAILED
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return DONE


@contextmanager
def _writing(output: Path) -> Iterator[None]:
    """Turns an OSError while the output is written into a sentence; reading the input raises none (documents.read)."""
    try:
        yield
    except OSError as error:
        raise Failed(
            f"{short(str(output))} cannot be written: {refusal_at(error)}; "
            + (
                "make room there"
                if error.errno in (errno.ENOSPC, errno.EDQUOT)
                else "mend that"
            )
            + " and run the same command again, which goes on from what is finished, or give another --output."
        ) from None


def parser() -> Parser:
    parser = Parser(prog="python -m meshtrain.data", description=__doc__)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    prepares = commands.add_parser(
        "prepare", help="turns text or conversations into token shards"
    )
    _add_input(prepares)
    prepares.add_argument(
        "--format", choices=get_args(Contents), default="text", help="as data.format"
    )
    _add_tokenizer(prepares)
    prepares.add_argument(
        "--output", required=True, type=_directory, help="directory of the shards"
    )
    workers = os.cpu_count() or 1
    prepares.add_argument(
        "--workers",
        type=whole_number,
        default=workers,
        help="processes (default: all cores)",
    )
    share = "share of the documents held out"
    prepares.add_argument(
        "--validation",
        type=number_from(0, 0.5),
        default=PrepareOptions.validation,
        help=share,
    )
    bad = "what to do with documents that are empty, damaged, not UTF-8 or without text"
    prepares.add_argument(
        "--bad", choices=("skip", "refuse"), default=PrepareOptions.bad, help=bad
    )
    prepares.set_defaults(run=_prepare)

    shows = commands.add_parser(
        "show",
        help="shows a conversation, with the tokens that count in the loss in colour",
    )
    shows.add_argument(
        "--input",
        required=True,
        nargs="+",
        metavar="PATH",
        help="files or folders of conversations",
    )
    shows.add_argument(
        "--format", choices=("chat", "pairs"), default="chat", help="as data.format"
    )
    _add_tokenizer(shows)
    shows.add_argument(
        "--number", type=whole_number, default=1, help="which example, from 1"
    )
    length = "as train.sequence_length: how much of the example fits into a row"
    shows.add_argument("--length", type=whole_number, help=length)
    shows.add_argument("--json", action="store_true", help="prints JSON, for programs")
    shows.set_defaults(run=_show)

    trains = commands.add_parser(
        "train-tokenizer", help="trains a byte-level BPE tokenizer.json on text"
    )
    _add_input(trains)
    trains.add_argument(
        "--vocab-size",
        required=True,
        type=whole_number,
        help="ids, the end of document among them",
    )
    trains.add_argument(
        "--output", required=True, type=Path, help="the tokenizer.json to write"
    )
    trains.set_defaults(run=_train_tokenizer)

    verifies = commands.add_parser(
        "verify", help="compares prepared shards with their manifest"
    )
    verifies.add_argument("directory", type=Path)
    verifies.add_argument(
        "--json",
        action="store_true",
        help="prints JSON, for programs: documents, tokens and shards of each split",
    )
    verifies.set_defaults(run=_verify)
    return parser


def _add_input(parser: argparse.ArgumentParser) -> None:
    kinds = "files or folders: text, Markdown, source, JSON Lines, each also .gz or .zst; .parquet; "
    kinds += (
        "hf:NAME[:SPLIT[:COLUMN]], a Hugging Face dataset, from the hub or on disk; "
    )
    kinds += "stdlib, the source of Python's standard library"
    parser.add_argument("--input", required=True, nargs="+", metavar="PATH", help=kinds)
    field = "field of a JSON Lines record, or column of Parquet, that holds the text"
    parser.add_argument("--text-field", default=PrepareOptions.text_field, help=field)


def _add_tokenizer(parser: argparse.ArgumentParser) -> None:
    kinds = "byte, or the path of a tokenizer.json"
    parser.add_argument("--tokenizer", default=PrepareOptions.tokenizer, help=kinds)
    parser.add_argument(
        "--template",
        help="a chat template for conversations, instead of the one beside the tokenizer",
    )
    for name in ("begin", "end"):
        parser.add_argument(f"--{name}", metavar="TOKEN", help=f"as data.{name}")


def _directory(text: str) -> Path:
    if os.path.isfile(text):
        raise argparse.ArgumentTypeError(
            f"{short(text)} is a file; the output is a directory"
        )
    return Path(text)


def _find(
    inputs: Sequence[str],
    contents: Contents = "text",
    text_field: str = PrepareOptions.text_field,
) -> list[InputFile]:
    if list(inputs) == ["stdlib"] and contents == "text":
        result = stdlib_files()
    else:
        inputs = [files_of(each, contents, text_field) for each in inputs]
        result = find(inputs, wanted_for(contents))
    print(f"{len(result.files)} files, {result.size / 1e6:.1f} MB", file=sys.stderr)
    if result.ignored:
        print(
            f"Left out {result.ignored.total()} files of other kinds: {result.describe_ignored()}",
            file=sys.stderr,
        )
    if result.left_out:
        print(f"Left out: {result.describe_left_out()}", file=sys.stderr)
    return result.files


def _prepare(chosen: argparse.Namespace) -> None:
    options = PrepareOptions(
        chosen.tokenizer,
        chosen.validation,
        chosen.text_field,
        chosen.bad,
        chosen.format,
        chosen.template,
        chosen.begin,
        chosen.end,
    )
    files = _find(chosen.input, chosen.format, chosen.text_field)
    output = chosen.output
    began = time.perf_counter()
    with _writing(output), _progress_bar() as progress:
        manifest = prepare(files, output, options, chosen.workers, progress)
    seconds = time.perf_counter() - began
    for split, shards in manifest.shards.items():
        documents = manifest.count(split, "documents")
        tokens = manifest.count(split, "tokens")
        print(
            f"{split}: {documents} documents, {tokens} tokens ({manifest.dtype}) in {len(shards)} shards"
        )
    for counted, count in manifest.counts.items():
        print(f"{counted}: {count:,}")
    if options.validation and not manifest.shards["validation"]:
        # Each document's name decides, so that it stays in its split when others come and go: of few there may be none.
        say(
            f"no document is held out, since --validation {options.validation} of so few can be none; give a larger "
            "share and another --output, or train with eval.every=0, or name other text as data.validation_source."
        )
    if manifest.skipped:
        print(
            f"{describe_skipped(manifest.skipped)}; named in {short(str(output / SKIPPED))}"
        )
    print(
        f"{short(str(output))}: tokenizer {manifest.tokenizer}, digest {manifest.digest[:16]}, {seconds:.1f} s"
    )
    boundaries = load_tokenizer(
        chosen.tokenizer, begin=chosen.begin, end=chosen.end
    ).boundaries
    if chosen.format == "text":
        print(boundaries.describe())
    for note in boundaries.notes:
        say(f"{note}.")
    if not manifest.shards["train"]:
        raise ConfigError(
            f"no document is left to train on: of few documents --validation {options.validation} may take all; give "
            "a smaller share and "
            "another --output."
        )


@contextmanager
def _progress_bar() -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal, nothing elsewhere."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    console = Console(stderr=True)
    columns = (
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("preparing", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _show(chosen: argparse.Namespace) -> None:
    options = PrepareOptions(
        chosen.tokenizer,
        contents=chosen.format,
        template=chosen.template,
        begin=chosen.begin,
        end=chosen.end,
    )
    files = _find(chosen.input, chosen.format)
    encoder = open_encoder(options, last_change(files))
    name, tokens, notes = show.nth(files, encoder, chosen.number)
    turn = show.turn_of(encoder)
    if chosen.json:
        show.print_json(name, tokens, encoder.tokenizer, chosen.length, turn)
    else:
        show.draw(name, tokens, encoder.tokenizer, chosen.length)
        show.draw_boundaries(encoder.tokenizer, turn)
    for note in [*encoder.tokenizer.boundaries.notes, *notes]:
        say(f"{note.rstrip('.')}.")


def _train_tokenizer(chosen: argparse.Namespace) -> None:
    files = _find(chosen.input, text_field=chosen.text_field)
    skipped: Counter[str] = Counter()

    def texts() -> Iterator[str]:
        for document in documents(files, chosen.text_field):
            if document.problem:
                skipped[document.kind] += 1
            else:
                yield document.text

    first = next(good := texts(), None)
    if first is None:
        raise ConfigError(
            "the input has no documents"
            + (f": {describe_skipped(skipped)}." if skipped else ".")
        )
    with _writing(chosen.output):
        train_bpe(chain([first], good), chosen.vocab_size, chosen.output)
    if skipped:
        print(describe_skipped(skipped), file=sys.stderr)
    print(short(str(chosen.output)))


def _verify(chosen: argparse.Namespace) -> None:
    manifest = read_manifest(chosen.directory)
    for split in filter(manifest.shards.get, SPLITS):
        open_corpus(chosen.directory, manifest, split, verify=True)
    if chosen.json:
        counts = {split: _counts(manifest, split) for split in manifest.shards}
        print(
            json.dumps(
                {
                    "intact": True,
                    "tokenizer": manifest.tokenizer,
                    "digest": manifest.digest,
                    **counts,
                },
                indent=2,
            )
        )
    else:
        print(
            f"{short(str(chosen.directory))}: every shard is as prepared, digest {manifest.digest[:16]}"
        )


def _counts(manifest: ShardManifest, split: str) -> dict[str, int]:
    return {name: manifest.count(split, name) for name in ("documents", "tokens")} | {
        "shards": len(manifest.shards[split])
    }


if __name__ == "__main__":
    sys.exit(main())
