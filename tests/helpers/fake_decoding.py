"""A model without a device: each token follows from all before it in its slot and from its sampling alone, as a real
one's does.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from meshtrain.data.tokenizer import ByteTokenizer
from meshtrain.generate.opened import Opened
from meshtrain.generate.request import MOST_LIKELY, Sampling

Choose = Callable[[tuple[int, ...], Sampling], int]


def letters(history: tuple[int, ...], how: Sampling) -> int:
    """A letter that everything before it decides."""
    return 97 + hash((history, how.seed if how.temperature else None)) % 26


def saying(text: str, choose: Choose = letters) -> Choose:
    """An answer to any prompt that ends on `>`: this text, then the end of document."""

    def chosen(history: tuple[int, ...], how: Sampling) -> int:
        said = (
            len(history)
            - 1
            - max(i for i, token in enumerate(history) if token == ord(">"))
        )
        spelt = text.encode()
        return spelt[said] if said < len(spelt) else ByteTokenizer.end_of_document

    return chosen


class Picked(NamedTuple):
    tokens: Any
    logprobs: Any = None
    likeliest_ids: Any = None
    likeliest_logprobs: Any = None
    accepted: Any = None


class Late:
    """What a device has not computed yet; reading it is what fails."""

    def __init__(self, array: np.ndarray, read: Callable[[], None]) -> None:
        self._array, self._read = array, read

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        self._read()
        return self._array


@dataclass
class State:
    histories: list[tuple[int, ...]]
    hows: list[Sampling]
    gone: bool = False  # donated


@dataclass
class FakeDecoding:
    """As `programs.Decoding`; `calls` is what was asked of it: ("prefill", slot), ("decode",), ("read",) of each in
    order.
    """

    slots: int
    length: int
    choose: Choose = letters
    synchronous: bool = False
    vocabulary: int = 257
    fails: Callable[[str], None] = lambda what: None
    calls: list[tuple] = field(default_factory=list)
    compiles: Callable[[tuple], None] = lambda name: None
    done: set[tuple] = field(default_factory=set)

    note: str = ""
    freed: bool = False
    # Whether the draft for a position is right
    drafts: Callable[[int], bool] | None = None

    def free(self) -> None:
        self.freed = True

    @property
    def names(self) -> list[tuple]:
        buckets = [
            16 << k
            for k in range(self.length.bit_length())
            if 16 << k < 2 * self.length
        ]
        return [
            ("decode", False),
            ("decode", True),
            *(("prefill", bucket) for bucket in buckets),
        ]

    def compile(self, name: tuple) -> None:
        if name not in self.done:
            self.compiles(name)
            self.done.add(name)

    def is_compiled(self, name: tuple) -> bool:
        return name in self.done

    @property
    def compiled(self) -> int:
        return len(self.done)

    def bucket(self, tokens: int) -> int:
        return max(16, 1 << (tokens - 1).bit_length())

    def empty(self) -> State:
        self.fails("empty")
        return State([()] * self.slots, [Sampling()] * self.slots)

    def prefill(
        self, state: State, slot: int, tokens: np.ndarray, sampling: Sampling
    ) -> tuple[State, Picked]:
        self.compile(("prefill", self.bucket(len(tokens))))
        self.fails("prefill")
        self.calls.append(("prefill", slot))
        new = self._taken(state)
        assert 1 <= len(tokens) < self.length
        token = self.choose(tuple(map(int, tokens)), sampling)
        new.histories[slot], new.hows[slot] = (*map(int, tokens), token), sampling
        return new, self._picked(
            np.array([token]), ("read", "prefill", slot), likeliest=True, alone=True
        )

    def decode(self, state: State, likeliest: bool = False) -> tuple[State, Picked]:
        self.compile(("decode", likeliest))
        self.fails("decode")
        self.calls.append(("decode",))
        new = self._taken(state)
        tokens = self._next(new)
        if self.drafts is None:
            return new, self._picked(tokens, ("read", "decode"), likeliest)
        right = np.array([self.drafts(len(history) - 1) for history in new.histories])
        before = list(new.histories)
        second = self._next(new)
        new.histories = [
            new.histories[s] if right[s] else before[s] for s in range(self.slots)
        ]
        both = [
            self._picked(of, ("read", "decode"), likeliest) for of in (tokens, second)
        ]
        arrays = [
            None if x[0] is None else np.stack(x, axis=1)
            for x in zip(*both, strict=True)
        ]
        return new, Picked(*arrays[:4], right)

    def _next(self, state: State) -> np.ndarray:
        tokens = np.zeros(self.slots, np.int32)
        for slot, history in enumerate(state.histories):
            if history and len(history) < self.length:
                tokens[slot] = self.choose(history, state.hows[slot])
                state.histories[slot] = (*history, int(tokens[slot]))
        return tokens

    def _taken(self, state: State) -> State:
        assert not state.gone, "a state is used twice"
        state.gone = True
        return State(list(state.histories), list(state.hows))

    def _picked(
        self, tokens: np.ndarray, call: tuple, likeliest: bool, alone: bool = False
    ) -> Picked:
        def read() -> None:
            self.fails("read")
            self.calls.append(call)

        ids = (
            np.stack([tokens + i for i in range(MOST_LIKELY)], axis=1) % self.vocabulary
        )
        arrays = [
            tokens,
            -tokens / 100,
            ids,
            -np.arange(MOST_LIKELY) - tokens[:, None] / 100,
        ]
        if not likeliest:
            arrays[1:] = [None] * 3
        first, *others = [x if x is None or not alone else x[0] for x in arrays]
        return Picked(Late(np.asarray(first), read), *others)


def fake_opened(length: int = 64, ends: frozenset[int] = frozenset({256})) -> Opened:
    """A model of bytes without a device, for `Engine(fake_opened(), decoding=...)`."""
    return Opened(None, ByteTokenizer(), ends, None, "fake", length)  # type: ignore[arg-type]


def faked(**settings: Any) -> Callable[..., FakeDecoding]:
    """What Engine takes as `decoding`."""
    return lambda model, slots, length, keep: FakeDecoding(slots, length, **settings)


def continuation(
    prompt: bytes,
    most: int,
    how: Sampling = Sampling(),  # noqa: B008
    choose: Choose = letters,
) -> list[int]:
    """The tokens that the fake gives a prompt on its own."""
    history = tuple(prompt)
    for _ in range(most):
        history = (*history, choose(history, how))
    return list(history[len(prompt) :])
