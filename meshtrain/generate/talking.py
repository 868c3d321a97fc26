"""The command for a conversation: a line is a message, its answer is written as it comes, and all that was said is part of the next."""

import argparse
import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from meshtrain.cli import DONE
from meshtrain.data.chat import ASSISTANT, SYSTEM, USER
from meshtrain.errors import ConfigError, say
from meshtrain.generate.asking import Answer, ended, opened_for, request, show
from meshtrain.generate.engine import Engine
from meshtrain.generate.opened import Opened

READY = "> "  # on a terminal, where a message is waited for
ROOM = 4  # an answer has this part of the positions at least, as long as what was said earlier can be left out


def run(options: argparse.Namespace) -> int:
    opened = opened_for(options, slots=1)
    if opened.template is None:
        raise ConfigError(f"--chat needs a model that was made for conversations: {opened.without}")
    mesh = opened.model.config.mesh
    said = [] if options.system is None else [{"role": SYSTEM, "content": options.system}]
    # what the template makes of a system prompt is known before anything is waited for
    _prompt(opened, [*said, {"role": USER, "content": "Hello"}], opened.length, 1)
    code = DONE
    with Engine(opened, mesh.data, opened.length, waiting=1, keep=False) as engine:
        for line in _lines():
            code = _answered(options, engine, said, line)
    return code


def _answered(options: argparse.Namespace, engine: Engine, said: list[dict[str, Any]], line: str) -> int:
    """One message and its answer, which become part of what was said; an exit code."""
    asked = [*said, {"role": USER, "content": line}]
    try:
        kept, tokens = _prompt(engine.opened, asked, engine.length, min(options.tokens, engine.length // ROOM))
    except ConfigError as error:
        say(error)
        return DONE
    if left_out := len(asked) - len(kept):
        say(f"the oldest {left_out} messages do not fit the {engine.length} positions any more, and are left out.")
    answer, text = Answer(), ""
    ticket = engine.submit(request(options, tokens), answer.hear)
    try:
        for piece in answer:
            text += piece
            show(piece)
    except KeyboardInterrupt:
        ticket.cancel()
        # what came meanwhile was not read
        for _ in answer:
            pass
    show("" if text.endswith("\n") else "\n")
    said[:] = [*kept, {"role": ASSISTANT, "content": text}]
    return ended(answer)


def _prompt(
    opened: Opened, said: list[dict[str, Any]], length: int, room: int
) -> tuple[list[dict[str, Any]], np.ndarray]:
    """A conversation and its tokens, without the oldest messages where else an answer had not this `room`; ConfigError if none is left."""
    assert opened.template is not None
    tokens, first = opened.template.tokens(said), int(said[0]["role"] == SYSTEM)
    while len(tokens) + room > length and len(said) > first + 2:
        # a message and its answer
        said = said[:first] + said[first + 2 :]
        tokens = opened.template.tokens(said)
    if len(tokens) >= length:
        raise ConfigError(
            f"the message makes the conversation {len(tokens)} tokens long, and there are {length} positions for it and its answer; "
            "--length N takes more."
        )
    return said, tokens


def _lines() -> Iterator[str]:
    """What is typed, or comes from a pipe, line by line until its end; empty lines are no messages. Ctrl-C forgets the line."""
    typed = sys.stdin is not None and sys.stdin.isatty()
    edited = typed and sys.stdout.isatty()
    if edited:
        # from here on input() has a history, and lines can be edited
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401
        say("Ctrl-C stops an answer, Ctrl-D ends the conversation.")
    while True:
        try:
            line = _line(typed, edited)
        except KeyboardInterrupt:
            if not typed:
                raise
            print(file=sys.stderr)
            continue
        except EOFError:
            if typed:
                print(file=sys.stderr)
            return
        except UnicodeDecodeError:
            raise ConfigError("standard input is no text in UTF-8.") from None
        if line.strip():
            yield line


def _line(typed: bool, edited: bool) -> str:
    if edited:
        return input(READY)
    if typed:
        print(READY, end="", file=sys.stderr, flush=True)
    line = sys.stdin.readline() if sys.stdin is not None else ""
    if not line:
        raise EOFError
    return line.rstrip("\n")
