"""The tokens with which a text, a document, a turn and a prompt begin and end. Data, training, evaluation, the harness,
generation and the server all ask here.

    document   BEGIN text END             as it is trained on, and as its perplexity is measured
    prompt     BEGIN text                 what a chat template writes begins as the template has it
    turn       ... answer TURN            the special token that a chat template writes behind an answer
    stops      END, TURN and every end that one of the files names: a model that says one of them has ended

A model comes with several files that say so, and not all of them agree. The first that says anything counts, and a
contradiction is told:

    BEGIN   data.begin; the post-processor of tokenizer.json, if it puts special tokens around a text; add_bos_token of
            tokenizer_config.json with the bos_token that a file names
    END     data.end; eos_token of tokenizer_config.json, then of special_tokens_map.json; eos_token_id of config.json
            (of a run and an import: hf_config.json), then of generation_config.json, of several the first; what the
            post-processor puts behind a text; the tokens that usually are called so (END_TOKENS); one id more than the
            tokenizer has

transformers 5 too has the post-processor decide alone what is put around a text, whatever add_bos_token says.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, takewhile
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from meshtrain.errors import ConfigError, nearest, short
from meshtrain.hf_families.json_fields import read_json

TOKENIZER = "tokenizer.json"
CONFIG = "tokenizer_config.json"
SPECIAL = "special_tokens_map.json"
MODEL = "config.json"
IMPORTED = "hf_config.json"
GENERATION = "generation_config.json"
PROCESSOR = f"the post-processor of {TOKENIZER}"
# By a token's text, then by its number.
SOURCES = (CONFIG, SPECIAL, MODEL, IMPORTED, GENERATION)
# What others call the end of a document, where no file says it.
END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[SEP]")
# Characters [begin, end) of a text, in order.
Spans = Sequence[tuple[int, int]]
NONE = "none"  # data.begin: nothing
MOST_ID = 1 << 31


def companion_files(tokenizer: Path) -> dict[str, Path]:
    """Returns a tokenizer.json and the files beside it that are read here, by the names that copies of them have.

    A copy of config.json is called otherwise, since it would make a Hugging Face directory of where it lies.
    """
    paths = (
        tokenizer.parent / name
        for name in (IMPORTED, CONFIG, SPECIAL, GENERATION, MODEL)
    )
    beside = {
        IMPORTED if path.name == MODEL else path.name: path
        for path in paths
        if path.is_file()
    }
    return {TOKENIZER: tokenizer} | beside


class Mark(NamedTuple):
    """A token that begins or ends something, and where that is said."""

    id: int
    text: str
    source: str

    def __str__(self) -> str:
        return f"{self.text} ({self.id})" if self.text else f"id {self.id}"


@dataclass(frozen=True)
class Boundaries:
    """The tokens with which texts begin and end.

    `bos`: the token that the files call so, whether it is put before a text or not; `notes`: sentences without their
    full stop on what the files contradict one another in, or nobody says.
    """

    begin: tuple[Mark, ...]
    end: Mark
    stops: tuple[Mark, ...]
    bos: Mark | None = None
    notes: tuple[str, ...] = ()

    def describe(self) -> str:
        """Returns what a text begins and ends with, and of which file that is."""
        end = f"ends with {self.end}, of {self.end.source}"
        if not self.begin:
            return f"a text begins with nothing, {end}"
        begins = f"a text begins with {' '.join(map(str, self.begin))}"
        source = self.begin[0].source
        if source == self.end.source:
            return f"{begins}, {end}"
        return f"{begins}, of {source}; {end}"


class Spelled(Protocol):
    """The part of a tokenizer that this file needs."""

    special: tuple[str, ...]

    def encode(self, texts: Sequence[str]) -> Sequence[Any]: ...


def byte_boundaries(begin: str | None = None, end: str | None = None) -> Boundaries:
    """Returns the boundaries of the tokenizer byte; ConfigError where a token is asked for, which it does not have."""
    for key, text in (("begin", begin), ("end", end)):
        if text is not None and (key, text) != ("begin", NONE):
            raise ConfigError(
                f"data.{key} is {short(repr(text))}, but the tokenizer byte has no such token; leave the key out."
            )
    mark = Mark(256, "", "the tokenizer byte")
    return Boundaries((), mark, (mark,))


def read_boundaries(
    path: Path,
    tokenizer: Any,
    size: int,
    begin: str | None,
    end: str | None,
) -> Boundaries:
    """Returns the boundaries of a tokenizer.json at `path`, from it and the files beside it.

    `tokenizer`: as the tokenizers library has it, of `size` ids. ConfigError for a data.begin or data.end that is none
    of its tokens.
    """
    notes: list[str] = []
    files = _read_files(path.parent, notes)
    before, behind = _put_around(tokenizer)
    bos = next(_marks(files, "bos", tokenizer, notes), None)
    ends = list(_marks(files, "eos", tokenizer, notes))
    usual = (
        Mark(i, t, "the usual names of it")
        for t in END_TOKENS
        if (i := tokenizer.token_to_id(t)) is not None
    )
    mark = _named("end", end, tokenizer) or next(
        (m for m in chain(ends, behind, usual) if m.text), None
    )
    if mark is None:
        mark = Mark(
            size, "", "no file, so that it is one id more than the tokenizer has"
        )
        notes.append(
            f"no file beside {short(path)} says what ends a document, so that it is the id {size}, one more than the "
            "tokenizer has; data.end names another"
        )
    stops = {stop.id: stop for stop in reversed([mark, *ends])}
    begins = _begin(files.get(CONFIG, {}), before, behind, bos, notes)
    if begin is not None:
        asked = _named("begin", begin, tokenizer)
        asked_ids = () if asked is None else (asked.id,)
        if asked_ids != tuple(m.id for m in begins):
            theirs = " ".join(map(str, begins)) or "nothing"
            source = begins[0].source if begins else "the tokenizer's files"
            notes.append(
                f"data.begin is {begin}, but other programs begin a text with {theirs}, of {source}"
            )
        begins = () if asked is None else (asked,)
    return Boundaries(begins, mark, tuple(reversed(stops.values())), bos, tuple(notes))


def _read_files(directory: Path, notes: list[str]) -> dict[str, Mapping[str, Any]]:
    files: dict[str, Mapping[str, Any]] = {}
    for name in SOURCES:
        # an import's own config.json stands where no other does
        if not (directory / name).is_file() or (name == IMPORTED and MODEL in files):
            continue
        try:
            files[name] = read_json(directory / name)
        except ConfigError as error:
            notes.append(
                f"{str(error).rstrip('.')}, so that it says nothing of how texts begin and end"
            )
    return files


def _marks(
    files: Mapping[str, Mapping[str, Any]], which: str, tokenizer: Any, notes: list[str]
) -> Iterator[Mark]:
    """Yields the tokens that files call bos or eos, in the order in which they count; one that the tokenizer does not
    have has no text.
    """
    for name, content in files.items():
        key = f"{which}_token" if name in (CONFIG, SPECIAL) else f"{which}_token_id"
        given = content.get(key)
        for value in given if isinstance(given, list) else [given]:
            if key.endswith("_token"):
                text = value.get("content") if isinstance(value, dict) else value
                number = (
                    tokenizer.token_to_id(text)
                    if isinstance(text, str) and text
                    else None
                )
                legal = (
                    f"a token of {TOKENIZER}, as a text or an object with its content"
                )
            else:
                number = next(iter(numbers_of(value)), None)
                text = None if number is None else tokenizer.id_to_token(number) or ""
                legal = "a whole number from 0, or a list of them"
            if number is not None:
                yield Mark(number, str(text), name)
            elif value is not None:
                notes.append(
                    f"{name}: {key} is {short(repr(value))}, which is left out; legal is {legal}"
                )


def numbers_of(field: Any) -> list[int]:
    """Returns the ids of a field of somebody's JSON, which may hold one, several, or what is none."""
    return [
        i
        for i in (field if isinstance(field, list) else [field])
        if type(i) is int and 0 <= i < MOST_ID
    ]


def _put_around(tokenizer: Any) -> tuple[list[Mark], list[Mark]]:
    """Returns the tokens that the post-processor puts before and behind a text."""
    import tokenizers

    if (processor := tokenizer.post_processor) is None:
        return [], []
    # of one token, whatever text that would be: not every tokenizer knows every letter
    one = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, "a")).encode("a")
    encoding = processor.process(one, None, True)
    special = list(zip(encoding.ids, encoding.special_tokens_mask, strict=True))
    before = list(takewhile(lambda pair: pair[1], special))
    behind = list(takewhile(lambda pair: pair[1], reversed(special[len(before) :])))[
        ::-1
    ]
    marks = [
        [Mark(i, tokenizer.id_to_token(i) or "", PROCESSOR) for i, _ in pairs]
        for pairs in (before, behind)
    ]
    return marks[0], marks[1]


def _begin(
    config: Mapping[str, Any],
    before: list[Mark],
    behind: list[Mark],
    bos: Mark | None,
    notes: list[str],
) -> tuple[Mark, ...]:
    """Returns what is put before a text unless data.begin says otherwise."""
    asked = config.get("add_bos_token")
    if asked is not None and type(asked) is not bool:
        notes.append(
            f"{CONFIG}: add_bos_token is {short(repr(asked))}, which is left out; legal is true or false"
        )
    if before or behind:
        if (
            type(asked) is bool
            and bos is not None
            and asked != any(mark.id == bos.id for mark in before)
        ):
            puts = " ".join(map(str, before)) or "nothing"
            notes.append(
                f"{CONFIG} has add_bos_token {str(asked).lower()}, but {PROCESSOR} puts {puts} before a text, which "
                "counts; data.begin names another"
            )
        return tuple(before)
    if asked is True and bos is not None:
        return (bos._replace(source=f"add_bos_token in {CONFIG}"),)
    return ()


def _named(key: str, text: str | None, tokenizer: Any) -> Mark | None:
    """Returns the token that data.begin or data.end names; None where it is not given, or names none."""
    if text is None or (key == "begin" and text == NONE):
        return None
    number = tokenizer.token_to_id(text)
    if number is None:
        special = [
            token.content
            for token in tokenizer.get_added_tokens_decoder().values()
            if token.special
        ]
        legal = f"{NONE}, or a token of it" if key == "begin" else "a token of it"
        ending = nearest(text, special) or (
            f", such as {special[0]}." if special else "."
        )
        raise ConfigError(
            f"data.{key} is {short(repr(text))}, which data.tokenizer does not have; give {legal}{ending}"
        )
    return Mark(number, text, f"data.{key}")


def end_of_turn(
    write: Callable[[list[dict[str, Any]]], str], tokenizer: Spelled
) -> Mark | None:
    """Returns the special token behind an answer, by which a model says that it has ended; None if the template writes
    none there.

    `write`: messages -> what the template makes of them; ConfigError where it does not take them.
    """
    messages = [
        {"role": "user", "content": "Are you there?"},
        {"role": "assistant", "content": "Yes"},
    ]
    try:
        _, answer, behind = write(messages).rpartition("Yes")
    except ConfigError:
        return None
    special = [
        (at, -len(word), word)
        for word in tokenizer.special
        if (at := behind.find(word)) >= 0
    ]
    if not special or not answer:
        return None
    text = min(special)[2]
    ids = tokenizer.encode([text])[0]
    return Mark(int(ids[0]), text, "the chat template") if len(ids) == 1 else None
