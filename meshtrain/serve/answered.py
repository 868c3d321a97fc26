"""Answers that are kept, since the same request would get them again: at temperature 0, or with its seed.

Bounded in entries, bytes and age; what was not asked for longest goes first. Off unless --cache asks for it: that a model answers the
same each time is a thing to check, which kept answers would only pretend.
"""

import time
from collections import OrderedDict
from collections.abc import Hashable

from meshtrain.generate.request import Piece, Request

MOST_BYTES = 256 << 20
# What an object of each kind takes, roughly: a piece, a chosen token, one of the likeliest beside it.
PIECE, CHOSEN, LIKELY = 300, 200, 150


def key(request: Request) -> Hashable:
    """The same for requests that ask for the same."""
    return (
        request.tokens.tobytes(),
        request.most,
        request.sampling,
        request.stop,
        request.ignore_ends,
        request.logprobs,
    )


class Answered:
    """Whole answers by the key of their request; of one thread."""

    def __init__(self, entries: int, seconds: float, most_bytes: int = MOST_BYTES) -> None:
        self._entries, self._seconds, self._most_bytes = entries, seconds, most_bytes
        self._kept: OrderedDict[Hashable, tuple[float, int, Piece]] = OrderedDict()
        self.bytes = self.hits = self.misses = 0

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, key: Hashable) -> Piece | None:
        """The answer, if it is there and young enough."""
        found = self._kept.get(key)
        if found is not None and time.monotonic() - found[0] > self._seconds:
            self._drop(key)
            found = None
        if found is None:
            self.misses += 1
            return None
        self.hits += 1
        self._kept.move_to_end(key)
        return found[2]

    def keep(self, key: Hashable, answer: Piece) -> None:
        size = _size(key, answer)
        if size > self._most_bytes:
            return
        if key in self._kept:
            self._drop(key)
        self._kept[key] = time.monotonic(), size, answer
        self.bytes += size
        while len(self._kept) > self._entries or self.bytes > self._most_bytes:
            self._drop(next(iter(self._kept)))

    def _drop(self, key: Hashable) -> None:
        self.bytes -= self._kept.pop(key)[1]


def _size(key: Hashable, answer: Piece) -> int:
    assert isinstance(key, tuple)
    chosen = sum(CHOSEN + LIKELY * len(each.likeliest) for each in answer.chosen)
    # a character takes up to four bytes
    return PIECE + len(key[0]) + 4 * len(answer.text) + chosen
