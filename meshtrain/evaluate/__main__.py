"""python -m meshtrain.evaluate RUN: perplexity of a trained or imported model on text, its results on tasks, or its accuracy on images.

Without --text, --tasks and --images the run's own validation data is taken, and the loss is that of its evaluations. Exit codes: 0 done;
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

from meshtrain.adopt.extra_files import run_of
from meshtrain.cli import DONE, Parser, command, whole_number
from meshtrain.config import Config
from meshtrain.config.model import positions_of
from meshtrain.data.documents import documents
from meshtrain.data.input_files import find
from meshtrain.data.prepare import describe_skipped
from meshtrain.data.unit import PrepareOptions
from meshtrain.errors import ConfigError, say, short
from meshtrain.evaluate.harness import SHOWN, run_tasks, table
from meshtrain.evaluate.perplexity import TEXT_LINES, described, perplexity
from meshtrain.evaluate.scoring import Scorer
from meshtrain.evaluate.validation import (
    describe_images,
    describe_text,
    evaluate_images,
    evaluate_text,
    validation_images,
    validation_text,
)
from meshtrain.families import FAMILIES
from meshtrain.generate.opened import Opened, on_mesh, open_asked
from meshtrain.reader import read_config
from meshtrain.telemetry.progress import EvaluationProgress

USUAL = 1024  # tokens of a row, where the model takes as many


@command
def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    _check(options)
    record, lines = _evaluate(options)
    print(json.dumps(_finite(record), indent=2) if options.json else "\n".join(lines))
    return DONE


def _parser() -> Parser:
    parser = Parser(prog="python -m meshtrain.evaluate", description=__doc__)
    parser.add_model()
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--text", nargs="+", metavar="PATH", help="files or folders: perplexity of the documents in them"
    )
    source.add_argument(
        "--tasks",
        type=lambda text: tuple(filter(None, text.split(","))),
        metavar="NAME,...",
        help="tasks of lm-evaluation-harness (extra evaluate)",
    )
    source.add_argument("--images", metavar="PATH", help="a folder or arrays of images: accuracy of a model of them")
    of_text = parser.add_argument_group("text")
    field = "field of a JSON Lines record, or column of Parquet, that holds the text (default: %(default)s)"
    of_text.add_argument("--text-field", default=PrepareOptions.text_field, help=field)
    apart = "tokens from one row of a document to the next (half the length)"
    of_text.add_argument("--stride", type=whole_number, metavar="N", help=apart)
    of_tasks = parser.add_argument_group("tasks")
    of_tasks.add_argument("--include-path", type=Path, metavar="DIR", help="where tasks of your own are, YAML files")
    of_tasks.add_argument("--shots", type=_from_0, metavar="N", help="examples before each question (the task's own)")
    of_tasks.add_argument("--limit", type=whole_number, metavar="N", help="questions of each task (all)")
    of_tasks.add_argument("--chat", action="store_true", default=None, help="ask by the model's own chat template")
    places = f"tokens of a row (what the model was made for; of text at most {USUAL})"
    parser.add_argument("--length", type=whole_number, metavar="N", help=places)
    parser.add_argument(
        "--batch", type=whole_number, default=8, metavar="N", help="rows at once (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="the result as one JSON object")
    return parser


def _from_0(text: str) -> int:
    if not re.fullmatch("[0-9]{1,4}", text):
        raise argparse.ArgumentTypeError(f"{short(repr(text))} is not a whole number from 0 to 9999")
    return int(text)


def _check(options: argparse.Namespace) -> None:
    belongs = {"stride": "text", "include_path": "tasks", "shots": "tasks", "limit": "tasks", "chat": "tasks"}
    for name, owner in belongs.items():
        if getattr(options, name) is not None and getattr(options, owner) is None:
            raise ConfigError(f"--{name.replace('_', '-')} is given without --{owner}, to which it belongs.")
    if options.length is not None and options.text is None and options.tasks is None:
        raise ConfigError(
            "--length is given without --text or --tasks; what a run holds out has rows of its train.sequence_length."
        )
    if options.length is not None and (options.stride or 0) > options.length:
        raise ConfigError(
            f"--stride is {options.stride}, but --length {options.length}: what lies between two rows would not be scored."
        )


def _evaluate(options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    config = read_config(options.path, options.step, options.precision)
    if FAMILIES[config.model.family].images:
        return _images(options, config)
    if options.images is not None:
        raise ConfigError(
            f"--images is for models of images, but {short(options.path)} is one of text (family {config.model.family})."
        )
    opened = open_asked(options, options.batch, options.length or USUAL)
    evaluate = _tasks if options.tasks else _text if options.text else _validation
    record, lines = evaluate(opened, options)
    return {"model": opened.name, "step": opened.model.step} | record, lines


def _validation(opened: Opened, options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    with EvaluationProgress("evaluating", "batches") as progress:
        validation = validation_text(options.path, opened.model)
        record = evaluate_text(opened.model, validation, options.batch, progress)
    return record, describe_text(record)


def _text(opened: Opened, options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    inputs = find(options.text)
    length = options.length or min(opened.longest, USUAL)
    stride = min(options.stride or max(length // 2, 1), length)
    size = None if any(file.compression or file.parquet for file in inputs.files) else inputs.size
    texts = documents(inputs.files, options.text_field)
    with EvaluationProgress("scoring", "bytes") as progress:
        show = lambda counts: progress(counts.bytes, size)  # noqa: E731
        counts = perplexity(Scorer(opened.model, options.batch), opened.tokenizer, texts, length, stride, show)
    if counts.skipped:
        say(f"{describe_skipped(counts.skipped)}.")
    record = counts.record()
    rows = f"rows                  of {length:,} tokens, {stride:,} apart"
    return {"length": length, "stride": stride, **record}, [*described(record, TEXT_LINES), rows]


def _tasks(opened: Opened, options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    results = run_tasks(
        opened, options.tasks, include=options.include_path, shots=options.shots, limit=options.limit,
        chat=bool(options.chat), rows=options.batch, longest=options.length,
    )  # fmt: skip
    return {name: results[name] for name in SHOWN if name in results}, [table(results)]


def _images(options: argparse.Namespace, config: Config) -> tuple[dict[str, Any], list[str]]:
    if options.text or options.tasks:
        raise ConfigError(f"--text and --tasks are for models of text, but {short(options.path)} is one of images.")
    model = on_mesh(
        options.path, config, options.mesh, options.batch, positions_of(config.model),
        step=options.step, adapter=options.adapter, precision=options.precision,
    )  # fmt: skip
    with EvaluationProgress("evaluating", "batches") as progress:
        validation, batches = validation_images(options.path, model.config, options.images)
        record = evaluate_images(model, validation, batches, options.batch, progress)
    return {"model": run_of(options.path).name, "step": model.step} | record, describe_images(record)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(entry) for name, entry in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


if __name__ == "__main__":
    sys.exit(main())
