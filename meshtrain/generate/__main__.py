"""python -m meshtrain.generate RUN [--prompt TEXT | --chat]: texts gone on with, or a conversation, on the terminal.

Standard output holds what the model says and nothing else, as it comes; what there is to say about it goes to standard
error.
"""

import sys
from collections.abc import Sequence

from meshtrain.cli import Parser, command, number_from, whole_number
from meshtrain.errors import ConfigError


@command
def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    if options.system is not None and not options.chat:
        raise ConfigError(
            "--system is given, but it begins a conversation; give --chat too."
        )
    if options.chat and options.prompt:
        raise ConfigError(
            "--prompt and --chat are given; a conversation is typed line by line, or comes from standard input."
        )
    if (
        not options.chat
        and not options.prompt
        and (sys.stdin is None or sys.stdin.isatty())
    ):
        raise ConfigError(
            "there is nothing to go on with; give --prompt TEXT, --chat, or a text on standard input."
        )
    # whoever asks for --help does not wait for JAX
    from meshtrain.generate import command as commands

    return commands.run_chat(options) if options.chat else commands.run(options)


def parser() -> Parser:
    parser = Parser(
        prog="python -m meshtrain.generate",
        description="Continues prompts, or chats. Standard output holds the generated text and nothing else.",
        epilog="In a chat, Ctrl-C stops an answer and Ctrl-D ends the conversation.",
    )
    parser.add_model(drafts=True)
    add = parser.add_argument
    add(
        "--prompt",
        action="append",
        default=[],
        metavar="TEXT",
        help="the text to continue; repeated prompts run together (default: standard input)",
    )
    add(
        "--chat",
        action="store_true",
        help="chat with the model's own chat template; each line of standard input is a message",
    )
    add("--system", metavar="TEXT", help="system prompt of the conversation")
    add(
        "--tokens",
        type=whole_number,
        default=256,
        metavar="N",
        help="maximum number of new tokens",
    )
    add(
        "--temperature",
        type=number_from(0),
        metavar="T",
        help="sampling temperature, 0: greedy (default: from generation_config.json, else 0, or 1 with --top-k, "
        "--top-p or --seed)",
    )
    add(
        "--top-k",
        type=whole_number,
        metavar="K",
        help="sample from the K most likely tokens",
    )
    add(
        "--top-p",
        type=number_from(0, 1),
        metavar="P",
        help="nucleus sampling: sample from the smallest set with total probability P",
    )
    add(
        "--seed",
        type=number_from(0, kind=int),
        metavar="S",
        help="random seed; the same seed gives the same tokens (default: 0)",
    )
    add(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="ends the answer before this text; may be repeated",
    )
    add(
        "--length",
        type=whole_number,
        metavar="N",
        help="most tokens of prompt and answer together (default: as many as the model has positions)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
