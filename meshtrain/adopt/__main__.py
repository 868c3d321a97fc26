"""python -m meshtrain.adopt inspect | import | export | merge | push | config: weights, adapters and configs from and
to others.
"""

import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from typing import get_args, get_type_hints

from meshtrain.cli import Parser, command, step, whole_number
from meshtrain.config import PrecisionConfig

# What each command does.
HELP = {
    "inspect": "shows the section `model` for a directory; exit code 2 if its weights or tokenizer are incomplete",
    "import": "turns a Hugging Face directory into a checkpoint for checkpoint.resume and every command",
    "export": "writes weights as a directory that transformers loads",
    "merge": "adds LoRA adapters to the weights, and writes a directory that transformers loads",
    "push": "uploads an exported directory to the Hugging Face hub, as one commit",
    "config": "converts a config of LLaMA-Factory (YAML) or DeepSpeed (JSON), or both",
}

DTYPES = get_args(get_type_hints(PrecisionConfig)["compute"])


@command
def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    # whoever asks for --help does not wait for JAX
    from meshtrain.adopt import command as commands

    functions = {
        "inspect": commands.run_inspect,
        "import": commands.run_import,
        "export": commands.run_export,
        "merge": commands.run_export,
        "push": commands.run_push,
        "config": commands.run_config,
    }
    return functions[options.command](options)


def parser() -> Parser:
    parser = Parser(
        prog="python -m meshtrain.adopt",
        description="Converts weights from and to Hugging Face directories.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    parsers = {
        name: commands.add_parser(name, help=text, description=text)
        for name, text in HELP.items()
    }
    for name in ("inspect", "import"):
        parsers[name].add_argument(
            "directory", type=Path, metavar="HF_DIR", help="config.json and safetensors"
        )
    out = "the run directory that is made; it must not be there yet"
    adapter = "LoRA's adapters of PEFT, kept beside the weights"
    parsers["import"].add_argument("out", type=Path, metavar="OUT", help=out)
    parsers["import"].add_argument(
        "--adapter", type=Path, metavar="PEFT_DIR", help=adapter
    )
    parsers["import"].add_config(required=False)
    run = "a run directory, one step, or a Hugging Face directory"
    for name in ("export", "merge"):
        parsers[name].add_argument("run", type=Path, metavar="RUN", help=run)
        parsers[name].add_argument(
            "directory",
            type=Path,
            metavar="HF_DIR",
            help="the directory to write, which must not exist yet",
        )
    parsers["export"].add_argument(
        "--adapter",
        action="store_true",
        help="writes only the LoRA adapters, in PEFT's format",
    )
    adapter = "PEFT adapters to add to plain weights"
    parsers["merge"].add_argument(
        "--adapter", type=Path, metavar="PEFT_DIR", help=adapter
    )
    dtype = "dtype of the weights (default: each as it was read; of a trained run, its compute dtype)"
    tokenizer = "where the tokenizer's files are, if not where the weights came from"
    for name in ("export", "merge"):
        newest = "of a run: a number, best (by eval loss) or newest"
        parsers[name].add_argument("--step", type=step, default="newest", help=newest)
        parsers[name].add_argument("--dtype", choices=(*DTYPES, "float8"), help=dtype)
        parsers[name].add_argument(
            "--tokenizer", type=Path, metavar="DIR", help=tokenizer
        )
        parsers[name].add_trust()
    _add_push(parsers["push"])
    parsers["config"].add_argument(
        "files", type=Path, nargs="+", metavar="FILE", help="what they are read from"
    )
    devices = "devices it is for, which theirs do not say (default: 1)"
    steps = "steps of the run, where a warm-up is given as a share of them"
    parsers["config"].add_argument(
        "--devices", type=whole_number, metavar="N", help=devices
    )
    parsers["config"].add_argument(
        "--steps", type=whole_number, metavar="N", help=steps
    )
    return parser


def _add_push(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "directory",
        type=Path,
        metavar="HF_DIR",
        help="what export or merge has written",
    )
    add("name", metavar="ORG/NAME", help="the repository, which is made")
    add("--private", action="store_true", help="makes it a private one")


if __name__ == "__main__":
    sys.exit(main())
