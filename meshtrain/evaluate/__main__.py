"""python -m meshtrain.evaluate RUN: how well a trained or imported model foresees text, answers others' tasks, or names images.

Without --text, --tasks and --images the run's own held-out data is taken, and the loss is that of its evaluations. Exit codes: 0 done;
2 wrong usage or input (one sentence).
"""

import argparse
import json
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshtrain.adopt.beside import run_of
from meshtrain.cli import DONE, Parser, command, whole_number
from meshtrain.config import Config
from meshtrain.config.model import positions_of
from meshtrain.data.inputs import find
from meshtrain.data.prepare import describe_skipped
from meshtrain.data.unit import Options
from meshtrain.errors import ConfigError, say, short
from meshtrain.evaluate.held_out import evaluated, held_out_of
from meshtrain.evaluate.images import images_of, named
from meshtrain.evaluate.perplexity import Reading, begin_of, documents, perplexity
from meshtrain.evaluate.progress import Progress
from meshtrain.evaluate.scoring import Scorer
from meshtrain.evaluate.tasks import SHOWN, run_tasks, table
from meshtrain.families import FAMILIES
from meshtrain.generate.opened import Opened, on_mesh, open_asked
from meshtrain.reader import read_config

USUAL = 1024  # tokens of a row, where the model takes as many


@command
def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    _check(options)
    record, lines = _asked(options)
    print(json.dumps(_finite(record), indent=2) if options.json else "\n".join(lines))
    return DONE


def _parser() -> Parser:
    parser = Parser(prog="python -m meshtrain.evaluate", description=__doc__)
    parser.add_model()
    asked = parser.add_mutually_exclusive_group()
    asked.add_argument(
        "--text", nargs="+", metavar="PATH", help="files or folders: perplexity of the documents in them"
    )
    asked.add_argument(
        "--tasks", type=_names, metavar="NAME,...", help="tasks of lm-evaluation-harness (extra evaluate)"
    )
    asked.add_argument("--images", metavar="PATH", help="a folder or arrays of images: accuracy of a model of them")
    of_text = parser.add_argument_group("text")
    field = "field of a JSON Lines record, or column of Parquet, that holds the text (default: %(default)s)"
    of_text.add_argument("--text-field", default=Options.text_field, help=field)
    apart = "tokens from one row of a document to the next (half the length)"
    of_text.add_argument("--stride", type=whole_number, metavar="N", help=apart)
    of_tasks = parser.add_argument_group("tasks")
    of_tasks.add_argument("--include-path", type=Path, metavar="DIR", help="where tasks of your own are, YAML files")
    of_tasks.add_argument("--shots", type=_from_0, metavar="N", help="examples before each question (the task's own)")
    of_tasks.add_argument("--limit", type=whole_number, metavar="N", help="questions of each task (all)")
    of_tasks.add_argument("--chat", action="store_true", default=None, help="ask by the model's own chat template")
    held = f"tokens of a row (what the model was made for; of text at most {USUAL})"
    parser.add_argument("--length", type=whole_number, metavar="N", help=held)
    parser.add_argument(
        "--batch", type=whole_number, default=8, metavar="N", help="rows at once (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="the result as one JSON object")
    return parser


def _names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.split(",")))


def _from_0(text: str) -> int:
    if not re.fullmatch("[0-9]{1,4}", text):
        raise argparse.ArgumentTypeError(f"{short(repr(text))} is not a whole number from 0 to 9999")
    return int(text)


def _check(options: argparse.Namespace) -> None:
    """ConfigError for options of what is not asked for."""
    belongs = {
        "--stride": "--text",
        "--include-path": "--tasks",
        "--shots": "--tasks",
        "--limit": "--tasks",
        "--chat": "--tasks",
    }
    value = lambda name: getattr(options, name[2:].replace("-", "_"))  # noqa: E731
    for name, asked in belongs.items():
        if value(name) is not None and value(asked) is None:
            raise ConfigError(f"{name} is given without {asked}, to which it belongs.")
    if options.length is not None and options.text is None and options.tasks is None:
        raise ConfigError(
            "--length is given without --text or --tasks; what a run holds out has rows of its train.sequence_length."
        )
    if options.length is not None and (options.stride or 0) > options.length:
        raise ConfigError(
            f"--stride is {options.stride}, but --length {options.length}: what lies between two rows would not be scored."
        )


def _asked(options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """For --json, and for people: what was asked for of the model."""
    config = read_config(options.path, options.step, options.precision)
    if FAMILIES[config.model.family].images:
        return _images(options, config)
    if options.images is not None:
        raise ConfigError(
            f"--images is for models of images, but {short(options.path)} is one of text (family {config.model.family})."
        )
    opened = open_asked(options, options.batch, options.length or USUAL)
    asked = _tasks if options.tasks else _text if options.text else _own
    record, lines = asked(opened, options)
    return {"model": opened.name, "step": opened.model.step} | record, lines


def _own(opened: Opened, options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """The run's own held-out text."""
    with Progress("evaluating", "batches") as progress:
        found = evaluated(opened.model, held_out_of(options.path, opened.model), options.batch, progress)
    return found.record(), found.describe()


def _text(opened: Opened, options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Text that was named."""
    found = find(options.text)
    length = options.length or min(opened.longest, USUAL)
    stride = min(options.stride or max(length // 2, 1), length)
    reading = Reading(opened.tokenizer, begin_of(opened.tokenizer), length, stride)
    size = None if any(file.compression or file.parquet for file in found.files) else found.size
    with Progress("scoring", "bytes") as progress:
        counts = perplexity(
            Scorer(opened.model, options.batch), reading, documents(found, options.text_field),
            lambda counts: progress(counts.bytes, size),
        )  # fmt: skip
    if counts.skipped:
        say(f"{describe_skipped(counts.skipped)}.")
    rows = f"rows                  of {length:,} tokens, {stride:,} apart"
    return {"length": length, "stride": stride, **counts.record()}, [*counts.describe(), rows]


def _tasks(opened: Opened, options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Tasks of lm-evaluation-harness."""
    results = run_tasks(
        opened, options.tasks, include=options.include_path, shots=options.shots, limit=options.limit,
        chat=bool(options.chat), rows=options.batch, longest=options.length,
    )  # fmt: skip
    return {name: results[name] for name in SHOWN if name in results}, [table(results)]


def _images(options: argparse.Namespace, config: Config) -> tuple[dict[str, Any], list[str]]:
    """Images, those of the run or others."""
    if options.text or options.tasks:
        raise ConfigError(f"--text and --tasks are for models of text, but {short(options.path)} is one of images.")
    model = on_mesh(
        options.path, config, options.mesh, options.batch, positions_of(config.model),
        step=options.step, adapter=options.adapter, precision=options.precision,
    )  # fmt: skip
    with Progress("evaluating", "batches") as progress:
        found = named(model, *images_of(options.path, model.config, options.images), options.batch, progress)
    return {"model": run_of(options.path).name, "step": model.step} | found.record(), found.describe()


def _finite(value: Any) -> Any:
    """null for a number that JSON has not."""
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


if __name__ == "__main__":
    sys.exit(main())
