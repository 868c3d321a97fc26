"""python -m meshtrain.evaluate RUN: the perplexity of a trained or imported model on text, its scores on tasks, or
its accuracy on images.

Without --text, --tasks and --images it prints the loss on the run's own validation data.
Exit codes: 0 done; 2 wrong usage or input (one sentence).
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from meshtrain.cli import DONE, Parser, command, number_from, whole_number
from meshtrain.data.unit import PrepareOptions
from meshtrain.errors import ConfigError
from meshtrain.evaluate import USUAL


@command
def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    _check(options)
    # whoever asks for --help does not wait for JAX
    from meshtrain.evaluate.command import evaluate, finite

    record, lines = evaluate(options)
    print(json.dumps(finite(record), indent=2) if options.json else "\n".join(lines))
    return DONE


def parser() -> Parser:
    parser = Parser(prog="python -m meshtrain.evaluate", description=__doc__)
    parser.add_model()
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--text",
        nargs="+",
        metavar="PATH",
        help="files or folders: perplexity of the documents in them",
    )
    source.add_argument(
        "--tasks",
        type=lambda text: tuple(filter(None, text.split(","))),
        metavar="NAME,...",
        help="tasks of lm-evaluation-harness (extra evaluate)",
    )
    source.add_argument(
        "--images",
        metavar="PATH",
        help="a folder or arrays of images: accuracy of a model of them",
    )
    of_text = parser.add_argument_group("text")
    field = "field of a JSON Lines record, or column of Parquet, that holds the text"
    of_text.add_argument("--text-field", default=PrepareOptions.text_field, help=field)
    apart = (
        "tokens between the starts of two rows of a document (default: half the length)"
    )
    of_text.add_argument("--stride", type=whole_number, metavar="N", help=apart)
    of_tasks = parser.add_argument_group("tasks")
    of_tasks.add_argument(
        "--include-path",
        type=Path,
        metavar="DIR",
        help="a directory of YAML files with tasks of your own",
    )
    examples = "examples before each question (default: the task's own)"
    of_tasks.add_argument(
        "--shots", type=number_from(0, 9999, int), metavar="N", help=examples
    )
    of_tasks.add_argument(
        "--limit",
        type=whole_number,
        metavar="N",
        help="questions of each task (default: all)",
    )
    of_tasks.add_argument(
        "--chat",
        action="store_true",
        default=None,
        help="asks with the model's own chat template",
    )
    places = f"tokens per row (default: as many as the model was made for; for text at most {USUAL})"
    parser.add_argument("--length", type=whole_number, metavar="N", help=places)
    parser.add_argument(
        "--batch", type=whole_number, default=8, metavar="N", help="rows at once"
    )
    parser.add_argument(
        "--json", action="store_true", help="the result as one JSON object"
    )
    return parser


def _check(options: argparse.Namespace) -> None:
    belongs = {
        "stride": "text",
        "include_path": "tasks",
        "shots": "tasks",
        "limit": "tasks",
        "chat": "tasks",
    }
    for name, owner in belongs.items():
        if getattr(options, name) is not None and getattr(options, owner) is None:
            raise ConfigError(
                f"--{name.replace('_', '-')} is given without --{owner}, to which it belongs."
            )
    if options.length is not None and options.text is None and options.tasks is None:
        raise ConfigError(
            "--length is given without --text or --tasks; what a run holds out has rows of its train.sequence_length."
        )
    if options.length is not None and (options.stride or 0) > options.length:
        raise ConfigError(
            f"--stride is {options.stride}, but --length {options.length}: what lies between two rows would not be "
            "scored."
        )


if __name__ == "__main__":
    sys.exit(main())
