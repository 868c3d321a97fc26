"""python -m meshtrain.evaluate RUN: how well a trained or imported model foresees text, or answers the tasks of lm-evaluation-harness.

Without --text and --tasks the run's own held-out text is taken, and the loss is that of its evaluations. Exit codes: 0 done; 2 wrong
usage or input (one sentence).
"""

import argparse
import json
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshtrain.cli import DONE, Parser, command, whole_number
from meshtrain.data.inputs import find
from meshtrain.data.prepare import describe_skipped
from meshtrain.data.unit import Options
from meshtrain.errors import ConfigError, say, short
from meshtrain.evaluate.held_out import evaluated, held_out_of
from meshtrain.evaluate.perplexity import Reading, begin_of, documents, perplexity
from meshtrain.evaluate.progress import Progress
from meshtrain.evaluate.scoring import Scorer
from meshtrain.evaluate.tasks import SHOWN, run_tasks, table
from meshtrain.generate.opened import Opened, open_model

USUAL = 1024  # tokens of a row, where the model takes as many


@command
def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    _check(options)
    opened = open_model(
        options.path, mesh=options.mesh, precision=options.precision, step=options.step, adapter=options.adapter
    )
    asked = _tasks if options.tasks else _text if options.text else _own
    record, lines = asked(opened, options)
    if options.json:
        print(json.dumps(_finite({"model": opened.name, "step": opened.model.step} | record), indent=2))
    else:
        print("\n".join(lines))
    return DONE


def _parser() -> Parser:
    parser = Parser(prog="python -m meshtrain.evaluate", description=__doc__)
    parser.add_argument("path", type=Path, metavar="RUN", help="a run directory, a checkpoint, or a Hugging Face directory")
    asked = parser.add_mutually_exclusive_group()
    asked.add_argument("--text", nargs="+", metavar="PATH", help="files or folders: perplexity of the documents in them")
    asked.add_argument("--tasks", type=_names, metavar="NAME,...", help="tasks of lm-evaluation-harness (extra evaluate)")
    of_text = parser.add_argument_group("text")
    field = "field of a JSON Lines record, or column of Parquet, that holds the text (default: %(default)s)"
    of_text.add_argument("--text-field", default=Options.text_field, help=field)
    of_text.add_argument("--stride", type=whole_number, metavar="N", help="tokens between two rows of a document (half the length)")
    of_tasks = parser.add_argument_group("tasks")
    of_tasks.add_argument("--include-path", type=Path, metavar="DIR", help="where tasks of your own are, YAML files")
    of_tasks.add_argument("--shots", type=_from_0, metavar="N", help="examples before each question (the task's own)")
    of_tasks.add_argument("--limit", type=whole_number, metavar="N", help="questions of each task (all)")
    of_tasks.add_argument("--chat", action="store_true", help="ask by the model's own chat template")
    parser.add_argument("--length", type=whole_number, metavar="N", help=f"tokens of a row (the model's own; of text at most {USUAL})")
    parser.add_argument("--batch", type=whole_number, default=8, metavar="N", help="rows at once (default: %(default)s)")
    parser.add_argument("--mesh", metavar="AXIS=N,...", help="as in data=2,tensor=2 (the fewest devices that hold the model)")
    parser.add_argument("--precision", help="float32, bfloat16 or float16 (what the run computes in)")
    parser.add_argument("--step", type=step, default="newest", help="of a run: a number, best (by eval loss) or newest")
    parser.add_argument("--adapter", type=Path, metavar="DIR", help="LoRA's adapters of PEFT, for a Hugging Face directory")
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
    of_text = {"--stride": options.stride}
    of_tasks = {"--include-path": options.include_path, "--shots": options.shots, "--limit": options.limit, "--chat": options.chat or None}
    for given, asked, options_of in ((options.text, "--text", of_text), (options.tasks, "--tasks", of_tasks)):
        for name, value in options_of.items():
            if value is not None and not given:
                raise ConfigError(f"{name} is given without {asked}, to which it belongs.")
    if options.length is not None and not (options.text or options.tasks):
        raise ConfigError("--length is given without --text or --tasks; a run's own held-out text has rows of its train.sequence_length.")
    if options.stride is not None and options.length is not None and options.stride > options.length:
        raise ConfigError(f"--stride is {options.stride}, but --length {options.length}: what lies between two rows would never be scored.")


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
    rows = f"rows of {length:,} tokens, {stride:,} apart"
    return {"length": length, "stride": stride, **counts.record()}, [*counts.describe(), rows]


def _tasks(opened: Opened, options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Tasks of lm-evaluation-harness."""
    results = run_tasks(
        opened, options.tasks, include=options.include_path, shots=options.shots, limit=options.limit, chat=options.chat,
        rows=options.batch, longest=options.length,
    )  # fmt: skip
    return {name: results[name] for name in SHOWN if name in results}, [table(results)]


def _finite(value: Any) -> Any:
    """null for a number that JSON has not."""
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


if __name__ == "__main__":
    sys.exit(main())
