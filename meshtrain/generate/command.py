"""The command: prompts, which run together and are written in their order, or a conversation, a line a message.

What follows the first prompt is written as it comes. In a conversation all that was said is part of the next prompt.
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
from meshtrain.data.chat import ASSISTANT, SYSTEM, USER
from meshtrain.errors import ConfigError, say, short
from meshtrain.families import FAMILIES
from meshtrain.generate.engine import Engine
from meshtrain.generate.opened import Opened, open_asked, parse_mesh
from meshtrain.generate.request import Piece, Request, Sampling
from meshtrain.generate.text import text_tokens

MOST_SLOTS = 8  # prompts that run at once; more wait


class Answer:
    """What an engine tells of a request, for one who waits for it."""

    def __init__(self) -> None:
        self._pieces: queue.SimpleQueue[Piece] = queue.SimpleQueue()
        self.hear = self._pieces.put
        self.last: Piece | None = None

    def __iter__(self) -> Iterator[str]:
        """Its text, as it comes; `last` is then how it ended."""
        while self.last is None:
            piece = self._pieces.get()
            yield piece.text
            if piece.finish is not None:
                self.last = piece


def run(options: argparse.Namespace) -> int:
    """The exit code: 1 if an answer ended with an error."""
    texts = options.prompt or [_standard_input()]
    slots = min(len(texts), MOST_SLOTS)
    opened = opened_for(options, slots)
    tokens = [_tokens(opened, text) for text in texts]
    engine = engine_for(options, opened, slots, max(map(len, tokens)), waiting=len(tokens))
    answers = []
    with engine:
        for each in tokens:
            answers.append(Answer())
            engine.submit(request(options, opened, each), answers[-1].hear)
        return max([_written(text, answer, len(texts) > 1) for text, answer in zip(texts, answers, strict=True)])


def opened_for(options: argparse.Namespace, slots: int) -> Opened:
    """The model that a command line asks for."""
    with warnings.catch_warnings(record=True) as warned:
        opened = open_asked(options, _filled(options, slots), options.length)
    for warning in warned:
        if issubclass(warning.category, UserWarning):
            say(warning.message)
    for sentence in opened.asks:
        say(sentence)
    return opened


def _filled(options: argparse.Namespace, slots: int) -> int:
    """As many slots, and as many more as data ranks need."""
    return slots if options.mesh is None else slots + -slots % parse_mesh(options.mesh).data


def engine_for(options: argparse.Namespace, opened: Opened, slots: int, prompt: int, waiting: int = 1) -> Engine:
    """An engine with as many positions as a prompt of so many tokens and its answer need, or as --length says."""
    if options.length is None:
        length = min(opened.longest, prompt + options.tokens)
        check_fits(opened, prompt, opened.longest)
    else:
        length = options.length
        check_fits(opened, prompt, length)
    return Engine(opened, _filled(options, slots), length, waiting, keep=False)


def check_fits(opened: Opened, prompt: int, length: int) -> None:
    """ConfigError for a prompt that leaves no position for an answer."""
    if prompt >= length:
        raise ConfigError(f"the prompt is {prompt} tokens long, and {_positions(opened, length)}.")


def _positions(opened: Opened, length: int) -> str:
    if length < opened.longest:
        return f"--length is {length}, of the {opened.longest} positions that the model has"
    if FAMILIES[opened.model.config.model.family].positions == "learned":
        return f"the model has learned {opened.longest} positions"
    if length == opened.longest:
        return f"the model was made for {length} positions; --length N takes more, which it may not be good at"
    return f"--length is {length}"


def sampling(options: argparse.Namespace, usual: Sampling) -> Sampling:
    """How tokens are chosen: who asks for a share of them, or names a seed, does not want the likeliest alone."""
    drawn = any(given is not None for given in (options.top_k, options.top_p, options.seed))
    unasked = usual.temperature or (1.0 if drawn else 0.0)
    temperature = unasked if options.temperature is None else options.temperature
    top_p = usual.top_p if options.top_p is None else options.top_p
    return Sampling(temperature, options.top_k or usual.top_k, top_p, options.seed or 0)


def request(options: argparse.Namespace, opened: Opened, tokens: np.ndarray) -> Request:
    return Request(tokens, options.tokens, sampling(options, opened.sampling or Sampling()), tuple(options.stop))


def show(text: str) -> None:
    """To standard output at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def ended(answer: Answer) -> int:
    """Says what is to say about how an answer ended; the exit code."""
    assert answer.last is not None
    if answer.last.finish == "error":
        say(answer.last.problem)
        return FAILED
    return DONE


def _written(text: str, answer: Answer, several: bool) -> int:
    if several:
        say(f"{short(repr(text))} goes on:")
    last = ""
    for piece in answer:
        show(piece)
        last = piece or last
    if not last.endswith("\n"):
        show("\n")
    return ended(answer)


def _tokens(opened: Opened, text: str) -> np.ndarray:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"the prompt {short(repr(text))} is no text in UTF-8.") from None
    return text_tokens(opened.tokenizer, text)


def _standard_input() -> str:
    """All of it, without the newline at its end, which a shell puts there."""
    try:
        text = sys.stdin.buffer.read().decode()
    except UnicodeDecodeError:
        raise ConfigError("standard input is no text in UTF-8.") from None
    return text.removesuffix("\n")


READY = "> "  # on a terminal, where a message is waited for
ROOM = 4  # an answer has this part of the positions at least, as long as what was said earlier can be left out


def run_chat(options: argparse.Namespace) -> int:
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
    asked = [*said, {"role": USER, "content": line}]
    try:
        kept, tokens = _prompt(engine.opened, asked, engine.length, min(options.tokens, engine.length // ROOM))
    except ConfigError as error:
        say(error)
        return DONE
    if left_out := len(asked) - len(kept):
        say(f"the oldest {left_out} messages do not fit the {engine.length} positions any more, and are left out.")
    answer, text = Answer(), ""
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
