"""The command for prompts: all of them run together, and what follows each is written in their order, the first of them as it comes."""

import argparse
import queue
import signal
import sys
import warnings
from collections.abc import Iterator

import numpy as np

from meshtrain.cli import DONE, FAILED
from meshtrain.errors import ConfigError, say, short
from meshtrain.families import FAMILIES
from meshtrain.generate import prompts
from meshtrain.generate.devices import parsed
from meshtrain.generate.engine import Engine
from meshtrain.generate.opened import Opened, open_asked
from meshtrain.generate.request import Piece, Request, Sampling

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
            engine.submit(request(options, each), answers[-1].hear)
        return max([_written(text, answer, len(texts) > 1) for text, answer in zip(texts, answers, strict=True)])


def opened_for(options: argparse.Namespace, slots: int) -> Opened:
    """The model that a command line asks for. From here on Ctrl-C is an exception, no longer the end of the process."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with warnings.catch_warnings(record=True) as warned:
        opened = open_asked(options, _filled(options, slots), options.length)
    for warning in warned:
        if issubclass(warning.category, UserWarning):
            say(warning.message)
    return opened


def _filled(options: argparse.Namespace, slots: int) -> int:
    """As many slots, and as many more as data ranks need."""
    return slots if options.mesh is None else slots + -slots % parsed(options.mesh).data


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
    """How many there are, why, and what gives more."""
    if length < opened.longest:
        return f"--length is {length}, of the {opened.longest} positions that the model has"
    if FAMILIES[opened.model.config.model.family].positions == "learned":
        return f"the model has learned {opened.longest} positions"
    if length == opened.longest:
        return f"the model was made for {length} positions; --length N takes more, which it may not be good at"
    return f"--length is {length}"


def sampling(options: argparse.Namespace) -> Sampling:
    """How tokens are chosen: who asks for a share of them, or names a seed, does not want the likeliest alone."""
    drawn = any(given is not None for given in (options.top_k, options.top_p, options.seed))
    temperature = (1.0 if drawn else 0.0) if options.temperature is None else options.temperature
    return Sampling(temperature, options.top_k or 0, 1.0 if options.top_p is None else options.top_p, options.seed or 0)


def request(options: argparse.Namespace, tokens: np.ndarray) -> Request:
    return Request(tokens, options.tokens, sampling(options), tuple(options.stop))


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
    return prompts.of_text(opened.tokenizer, text)


def _standard_input() -> str:
    """All of it, without the newline at its end, which a shell puts there."""
    try:
        text = sys.stdin.buffer.read().decode()
    except UnicodeDecodeError:
        raise ConfigError("standard input is no text in UTF-8.") from None
    return text.removesuffix("\n")
