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
    "inspect": "the section model that a directory asks for; 2 where its weights or its tokenizer are not whole",
    "import": "a Hugging Face directory as a checkpoint, which checkpoint.resume and every command take",
    "export": "weights as a directory that transformers loads",
    "merge": "weights with their LoRA adapters added, as a directory that transformers loads",
    "push": "an exported directory to Hugging Face's hub, as one commit",
    "config": "a config of LLaMA-Factory (YAML) or DeepSpeed (JSON), or both, as one of ours",
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
        description="Weights from and to Hugging Face directories.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    parsers = {
        name: commands.add_parser(name, help=text, description=text) for name, text in HELP.items()
    }
    for name in ("inspect", "import"):
        parsers[name].add_argument(
            "directory", type=Path, metavar="HF_DIR", help="config.json and safetensors"
        )
    out = "the run directory that is made; it must not be there yet"
    adapter = "LoRA's adapters of PEFT, kept beside the weights"
    parsers["import"].add_argument("out", type=Path, metavar="OUT", help=out)
    parsers["import"].add_argument("--adapter", type=Path, metavar="PEFT_DIR", help=adapter)
    parsers["import"].add_config(required=False)
    run = "a run directory, one step, or a Hugging Face directory"
    for name in ("export", "merge"):
        parsers[name].add_argument("run", type=Path, metavar="RUN", help=run)
        parsers[name].add_argument(
            "directory",
            type=Path,
            metavar="HF_DIR",
            help="what is written; it must not be there yet",
        )
    parsers["export"].add_argument(
        "--adapter", action="store_true", help="LoRA's adapters alone, as PEFT has them"
    )
    adapter = "adapters of PEFT, for weights without"
    parsers["merge"].add_argument("--adapter", type=Path, metavar="PEFT_DIR", help=adapter)
    dtype = "of the weights (default: as they came, each; of a run that has trained, what it computes in)"
    tokenizer = "where the tokenizer's files are, if not where the weights came from"
    for name in ("export", "merge"):
        newest = "of a run: a number, best (by eval loss) or newest"
        parsers[name].add_argument("--step", type=step, default="newest", help=newest)
        parsers[name].add_argument("--dtype", choices=(*DTYPES, "float8"), help=dtype)
        parsers[name].add_argument("--tokenizer", type=Path, metavar="DIR", help=tokenizer)
        parsers[name].add_trust()
    _add_push(parsers["push"])
    parsers["config"].add_argument(
        "files", type=Path, nargs="+", metavar="FILE", help="what they are read from"
    )
    devices = "devices it is for, which theirs do not say (default: 1)"
    steps = "steps of the run, where a warm-up is given as a share of them"
    parsers["config"].add_argument("--devices", type=whole_number, metavar="N", help=devices)
    parsers["config"].add_argument("--steps", type=whole_number, metavar="N", help=steps)
    return parser


def _add_push(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("directory", type=Path, metavar="HF_DIR", help="what export or merge has written")
    add("name", metavar="ORG/NAME", help="the repository, which is made")
    add("--private", action="store_true", help="makes it a private one")


if __name__ == "__main__":
    sys.exit(main())
