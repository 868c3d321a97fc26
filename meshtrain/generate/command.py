"""The command: prompts, which run together and are written in their order, or a conversation, a line a message.

The answer to the first prompt is written as it comes. In a conversation all that was said is part of the next prompt.
"""

import argparse
import contextlib
import queue
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np

from meshtrain.cli import DONE, FAILED
from meshtrain.data.messages import ASSISTANT, SYSTEM, USER
from meshtrain.errors import ConfigError, say, short
from meshtrain.families import FAMILIES
from meshtrain.generate.engine import Engine
from meshtrain.generate.opened import Opened, open_asked, parse_mesh
from meshtrain.generate.request import Piece, Request, Sampling
from meshtrain.generate.text import describe_length, text_tokens

MOST_SLOTS = 8  # prompts that run at once; more wait
READY = "> "  # on a terminal, where a message is waited for
# An answer has this part of the positions at least, as long as what was said earlier can be left out
ROOM = 4
Messages = list[dict[str, Any]]


class PrintedAnswer:
    """Waits for what an engine tells of a request."""

    def __init__(self) -> None:
        self._pieces: queue.SimpleQueue[Piece] = queue.SimpleQueue()
        self.hear = self._pieces.put
        self.last: Piece | None = None

    def __iter__(self) -> Iterator[str]:
        """Yields its text, as it comes; `last` is then how it ended."""
        while self.last is None:
            piece = self._pieces.get()
            yield piece.text
            if piece.finish is not None:
                self.last = piece


def run(options: argparse.Namespace) -> int:
    """Returns the exit code: 1 if an answer ended with an error."""
    try:
        # all of it, without the newline at its end, which a shell puts there
        texts = options.prompt or [sys.stdin.buffer.read().decode().removesuffix("\n")]
    except UnicodeDecodeError:
        raise ConfigError("standard input is not text in UTF-8.") from None
    slots = min(len(texts), MOST_SLOTS)
    if options.mesh is not None:
        slots += -slots % parse_mesh(options.mesh).data
    opened = open_for(options, slots)
    most = options.length or opened.longest
    tokens = [_tokens(opened, text, most) for text in texts]
    longest = max(map(len, tokens))
    check_fits(opened, longest, most)
    # as many positions as the prompts and their answers need, or as --length says
    length = options.length or min(opened.longest, longest + options.tokens)
    answers = [PrintedAnswer() for _ in texts]
    with Engine(opened, slots, length, waiting=len(texts), keep=False) as engine:
        say_note(engine)
        for prompt, answer in zip(tokens, answers, strict=True):
            engine.submit(request(options, opened, prompt), answer.hear)
        codes = [
            _write(text, answer, len(texts) > 1)
            for text, answer in zip(texts, answers, strict=True)
        ]
        say_drafts(engine)
        return max(codes)


def open_for(options: argparse.Namespace, slots: int) -> Opened:
    """Returns the model that a command line asks for, and says what there is to say of it."""
    with warnings.catch_warnings(record=True) as caught:
        opened = open_asked(options, slots, options.length)
    for warning in caught:
        if issubclass(warning.category, UserWarning):
            say(warning.message)
    for sentence in opened.asks:
        say(sentence)
    return opened


def say_note(engine: Engine) -> None:
    if engine.note:
        say(engine.note)


def say_drafts(engine: Engine) -> None:
    """Says how many drafts were accepted, and how many steps they saved."""
    status = engine.status
    if drafts := status.drafts:
        acceptance = f"{status.accepted_drafts} of {drafts} drafts accepted ({status.accepted_drafts / drafts:.1%})"
        say(f"{acceptance}: {drafts} steps in the place of {drafts + status.saved}.")


def check_fits(opened: Opened, prompt: int, length: int) -> None:
    """ConfigError for a prompt that leaves no position for an answer."""
    if prompt < length:
        return
    if length < opened.longest:
        positions = f"--length is {length}, of the {opened.longest} positions that the model has"
    elif FAMILIES[opened.model.config.model.family].positions == "learned":
        positions = f"the model has learned {opened.longest} positions"
    elif length == opened.longest:
        positions = f"the model was made for {length} positions; --length N takes more, which it may not be good at"
    else:
        positions = f"--length is {length}"
    raise ConfigError(
        f"the prompt is {describe_length(prompt, length)} tokens long, and {positions}."
    )


def sampling(options: argparse.Namespace, usual: Sampling) -> Sampling:
    """Returns how tokens are chosen: who asks for a share of them, or names a seed, does not want the most likely
    alone.
    """
    drawn = any(
        given is not None for given in (options.top_k, options.top_p, options.seed)
    )
    unasked = usual.temperature or (1.0 if drawn else 0.0)
    temperature = unasked if options.temperature is None else options.temperature
    top_p = usual.top_p if options.top_p is None else options.top_p
    return Sampling(temperature, options.top_k or usual.top_k, top_p, options.seed or 0)


def request(options: argparse.Namespace, opened: Opened, tokens: np.ndarray) -> Request:
    return Request(
        tokens,
        options.tokens,
        sampling(options, opened.sampling or Sampling()),
        tuple(options.stop),
    )


def show(text: str) -> None:
    """To standard output at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def exit_code(answer: PrintedAnswer) -> int:
    """Returns the exit code of an answer that has ended, and says why it failed."""
    assert answer.last is not None
    if answer.last.finish == "error":
        say(answer.last.problem)
        return FAILED
    return DONE


def _write(text: str, answer: PrintedAnswer, several: bool) -> int:
    if several:
        say(f"{short(repr(text))} goes on:")
    last = ""
    for piece in answer:
        show(piece)
        last = piece or last
    if not last.endswith("\n"):
        show("\n")
    return exit_code(answer)


def _tokens(opened: Opened, text: str, most: int) -> np.ndarray:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError(
            f"the prompt {short(repr(text))} is not text in UTF-8."
        ) from None
    return text_tokens(opened.tokenizer, text, most)


# --- conversations


def run_chat(options: argparse.Namespace) -> int:
    slots = 1 if options.mesh is None else parse_mesh(options.mesh).data
    opened = open_for(options, slots)
    if opened.template is None:
        raise ConfigError(
            f"--chat needs a model that was made for conversations: {opened.without}"
        )
    messages: Messages = (
        [] if options.system is None else [{"role": SYSTEM, "content": options.system}]
    )
    # what the template makes of a system prompt is known before anything is waited for
    _prompt(opened, [*messages, {"role": USER, "content": "Hello"}], opened.length, 1)
    code = DONE
    with Engine(opened, slots, opened.length, waiting=1, keep=False) as engine:
        say_note(engine)
        for line in _lines():
            code = _answer(options, engine, messages, line)
        say_drafts(engine)
    return code


def _answer(
    options: argparse.Namespace, engine: Engine, messages: Messages, line: str
) -> int:
    asked = [*messages, {"role": USER, "content": line}]
    try:
        fitting, tokens = _prompt(
            engine.opened,
            asked,
            engine.length,
            min(options.tokens, engine.length // ROOM),
        )
    except ConfigError as error:
        say(error)
        return DONE
    if left_out := len(asked) - len(fitting):
        say(
            f"the oldest {left_out} messages do not fit the {engine.length} positions any more, and are left out."
        )
    answer = PrintedAnswer()
    text = ""
    ticket = engine.submit(request(options, engine.opened, tokens), answer.hear)
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
    messages[:] = [*fitting, {"role": ASSISTANT, "content": text}]
    return exit_code(answer)


def _prompt(
    opened: Opened, messages: Messages, length: int, room: int
) -> tuple[Messages, np.ndarray]:
    """Returns messages and their tokens, without the oldest where else an answer had not this `room`; ConfigError if
    none is left.
    """
    assert opened.template is not None
    tokens = opened.template.tokens(messages, most=length)
    first = int(messages[0]["role"] == SYSTEM)
    while len(tokens) + room > length and len(messages) > first + 2:
        # a message and its answer
        messages = messages[:first] + messages[first + 2 :]
        tokens = opened.template.tokens(messages, most=length)
    if len(tokens) >= length:
        raise ConfigError(
            f"the message makes the conversation {describe_length(len(tokens), length)} tokens long, and there are "
            f"{length} positions for it and its answer; --length N takes more."
        )
    return messages, tokens


def _lines() -> Iterator[str]:
    """Yields what is typed, or comes from a pipe, line by line until its end, and skips empty lines.

    Ctrl-C forgets the line.
    """
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
            raise ConfigError("standard input is not text in UTF-8.") from None
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
