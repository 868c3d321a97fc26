"""python -m meshtrain.serve RUN: a model behind OpenAI's API; RUN is a run directory, a checkpoint or a Hugging Face
directory.
"""

import argparse
import importlib.util
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from meshtrain.cli import Parser, command, number_from, whole_number
from meshtrain.errors import ConfigError, not_installed, short

KEY = "MESHTRAIN_API_KEY"


@command
def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    options.key = _key(options.key_env)
    _check(options)
    missing = [
        name
        for name in ("starlette", "uvicorn")
        if importlib.util.find_spec(name) is None
    ]
    if missing:
        raise not_installed(
            f"a server needs {' and '.join(missing)}", "serve", len(missing)
        )
    # whoever asks for --help does not wait for JAX
    from meshtrain.serve.listening import run

    return run(options)


def parser() -> Parser:
    meaning = "Serves a model through OpenAI's API (completions, chat completions), to try it with existing clients."
    ending = (
        f"Clients must send the key that the environment variable {KEY} holds, if there is one. /health and /metrics "
        "need none. "
        "SIGTERM ends it: first /health says so, then what runs is finished."
    )
    parser = Parser(
        prog="python -m meshtrain.serve", description=meaning, epilog=ending
    )
    parser.add_model(drafts=True)
    parser.add_argument(
        "others",
        nargs="*",
        type=Path,
        metavar="RUN",
        help="further models: the request's `model` chooses",
    )
    add = parser.add_argument
    seconds = number_from(0, 1e9)
    add(
        "--host",
        default="127.0.0.1",
        help="the address to listen on; 127.0.0.1 takes requests of this machine only",
    )
    add(
        "--port",
        type=number_from(0, 65535, int),
        default=8000,
        help="the port to listen on; 0 picks a free one",
    )
    add(
        "--name",
        action="append",
        help="the model's name for clients (default: the run's); with several models, one each",
    )
    add(
        "--resident",
        type=whole_number,
        default=1,
        metavar="N",
        help="how many of several models are loaded at once",
    )
    add(
        "--slots",
        type=whole_number,
        default=8,
        metavar="N",
        help="how many sequences are decoded at once",
    )
    add(
        "--length",
        type=whole_number,
        metavar="N",
        help="most tokens of prompt and answer together (default: the model's)",
    )
    add(
        "--queue",
        type=whole_number,
        default=64,
        metavar="N",
        help="how many requests may wait for a slot; more get 429",
    )
    add(
        "--cache",
        type=number_from(0, 1 << 20, int),
        default=0,
        metavar="MIB",
        help="memory for cached answers to requests with temperature 0 or a seed",
    )
    add(
        "--cache-seconds",
        type=seconds,
        default=3600.0,
        metavar="S",
        help="how long an answer is cached",
    )
    add(
        "--key-env",
        metavar="NAME",
        help=f"the environment variable that holds the key (default: {KEY})",
    )
    add(
        "--request-timeout",
        type=seconds,
        default=600.0,
        metavar="S",
        help="how long a request may take, waiting included",
    )
    add(
        "--stuck-after",
        type=seconds,
        default=60.0,
        metavar="S",
        help="how long requests may see no step before /health says so",
    )
    add(
        "--notice",
        type=seconds,
        default=3.0,
        metavar="S",
        help="how long requests are still taken after SIGTERM, while /health says that it ends",
    )
    add(
        "--drain",
        type=seconds,
        default=30.0,
        metavar="S",
        help="how long running requests may then take to finish",
    )
    add("--access-log", action="store_true", help="logs one line per request to stderr")
    return parser


def _check(options: argparse.Namespace) -> None:
    number = 1 + len(options.others)
    names = options.name or []
    if names and len(names) != number:
        raise ConfigError(
            f"--name is given {len(names)} times for {number} models; give one for each, or none."
        )
    if number > 1 and options.adapter is not None:
        raise ConfigError(
            "--adapter is given with several models, but it belongs to one; serve it by itself, or merge it "
            "(meshtrain adopt merge)."
        )


def _key(variable: str | None) -> str | None:
    """Returns what clients must show; never part of a sentence."""
    key = os.environ.get(variable or KEY, "").strip()
    if variable is not None and not key:
        raise ConfigError(
            f"--key-env names {short(variable)}, but the environment has no such variable, or an empty one."
        )
    if not re.fullmatch("[!-~]*", key):
        raise ConfigError(
            f"the key in {short(variable or KEY)} must be of printable ASCII characters, without spaces."
        )
    return key or None


if __name__ == "__main__":
    sys.exit(main())
