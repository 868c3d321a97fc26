"""Prints an example as the model will see it, with what is learned of it in colour, or between marks where there are no
colours:

    on a terminal   learned tokens green, of a rejected answer red; the others as they are
    elsewhere       <|user|>2+2?<|end|><|assistant|>[[4<|end|>]]      of a rejected answer {{ ... }}

Characters of a message that a terminal would obey stand as their escapes.
"""

import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TextIO

import numpy as np

from meshtrain.data.boundaries import Mark, end_of_turn
from meshtrain.data.documents import documents
from meshtrain.data.examples import NOTED
from meshtrain.data.input_files import InputFile
from meshtrain.data.manifest import ID, LEARNED, REJECTED
from meshtrain.data.messages import Unfit
from meshtrain.data.tokenizer import Tokenizer
from meshtrain.data.unit import Encoder
from meshtrain.errors import ConfigError, printable, short

GREEN = "\033[1;32m"
RED = "\033[1;31m"
PLAIN = "\033[0m"
# By whether the answer is the rejected one
MARKS = {False: ("[[", "]]"), True: ("{{", "}}")}


def nth(
    files: Sequence[InputFile], encoder: Encoder, number: int
) -> tuple[str, np.ndarray, list[str]]:
    """Returns (the name of its record, the tokens as they are stored, notes) of an example, the first being 1;
    ConfigError if there are fewer.

    Notes say what the template leaves out of the record.
    """
    assert encoder.examples is not None
    seen = 0
    problem = ""
    for document in documents(files, None):
        if document.problem:
            problem = problem or f"{short(document.name)} is {document.problem}"
            continue
        try:
            counts: Counter[str] = Counter()
            examples = encoder.examples.read(document, counts)
        except Unfit as error:
            problem = (
                problem
                or f"{short(document.name)} is {error.kind} {error.detail}".rstrip()
            )
            continue
        if seen + len(examples) >= number:
            (tokens,) = encoder.examples.encode(
                [examples[number - seen - 1]], Counter()
            )
            return (
                document.name,
                tokens,
                [f"{counts[what]:,} {what}" for what in NOTED if counts[what]],
            )
        seen += len(examples)
    raise ConfigError(
        f"there are {seen:,} examples in the input, of which none is number {number:,}"
        + (f"; the first record that is none, {problem}." if problem else ".")
    )


def draw(
    name: str,
    tokens: np.ndarray,
    tokenizer: Tokenizer,
    length: int | None,
    to: TextIO | None = None,
) -> None:
    """Prints an example as rows of `length` labels take it."""
    stream = to or sys.stdout
    colours = (
        stream.isatty()
        and not os.environ.get("NO_COLOR")
        and os.environ.get("TERM") != "dumb"
    )
    summary = f"{short(name)}: {len(tokens):,} tokens"
    taken = _taken(tokens, length)
    if taken.size < tokens.size:
        summary += (
            f", of which the first {taken.size:,} are taken"
            if taken.size
            else ", of which none are taken"
        )
    print("".join(_marked(taken, tokenizer, colours)), file=stream)
    print(f"{summary}, {int(((taken & LEARNED) > 0).sum()):,} learned", file=stream)


def draw_boundaries(tokenizer: Tokenizer, turn: Mark | None) -> None:
    """Prints how texts begin and end, and which special token ends an answer; of bytes there is nothing to say."""
    if tokenizer.name == "byte":
        return
    print(printable(tokenizer.boundaries.describe()))
    print(
        printable(f"an answer ends with {turn}, of {turn.source}")
        if turn
        else "no special token ends an answer"
    )


def print_json(
    name: str,
    tokens: np.ndarray,
    tokenizer: Tokenizer,
    length: int | None,
    turn: Mark | None = None,
) -> None:
    """Prints the same for programs: what is taken, in parts that are learned, or of a rejected answer, alike."""
    taken = _taken(tokens, length)
    marks = tokenizer.boundaries
    begins = [mark._asdict() for mark in marks.begin]
    ends = marks.end._asdict()
    parts = [
        {"text": text, "learned": learned, "rejected": rejected}
        for text, learned, rejected in _runs(taken, tokenizer)
    ]
    learned = int(((taken & LEARNED) > 0).sum())
    record = {
        "example": name,
        "tokens": tokens.size,
        "taken": taken.size,
        "learned": learned,
        "parts": parts,
    }
    print(
        json.dumps(
            record
            | {
                "begins": begins,
                "ends": ends,
                "turn": None if turn is None else turn._asdict(),
            },
            indent=2,
        )
    )


def turn_of(encoder: Encoder) -> Mark | None:
    """Returns the special token that ends an answer."""
    assert encoder.examples is not None, "only conversations are shown"
    template = encoder.examples.template

    def write(messages: list[dict[str, str]]) -> str:
        try:
            return template.render(messages, None, [(len(messages), False)], "")[0][0]
        except Unfit as error:
            raise ConfigError(error.detail) from None

    return end_of_turn(write, encoder.tokenizer)


def _taken(tokens: np.ndarray, length: int | None) -> np.ndarray:
    """Returns what a row of `length` labels takes of an example, as pieces.py does."""
    if length is None or tokens.size - 1 <= length:
        return tokens
    first = tokens[: length + 1]
    left_out = (tokens & REJECTED).any() or not (first[1:] & LEARNED).any()
    return tokens[:0] if left_out else first


def _runs(tokens: np.ndarray, tokenizer: Tokenizer) -> Iterator[tuple[str, bool, bool]]:
    """Yields the text of tokens that are alike in whether they are learned, and rejected."""
    for (learned, rejected), run in groupby(
        tokens.tolist(),
        lambda token: (bool(token & int(LEARNED)), bool(token & int(REJECTED))),
    ):
        yield tokenizer.spell(np.array(list(run), np.uint32) & ID), learned, rejected


def _marked(tokens: np.ndarray, tokenizer: Tokenizer, colours: bool) -> Iterator[str]:
    for spelt, learned, rejected in _runs(tokens, tokenizer):
        text = printable(spelt, "\n")
        begin, end = (RED if rejected else GREEN, PLAIN) if colours else MARKS[rejected]
        # A colour ends with its line, for those who scroll by lines.
        inner = text.replace("\n", f"{end}\n{begin}") if colours else text
        yield f"{begin}{inner}{end}" if learned else text
