"""Answers that were given before, for requests that draw nothing new: greedy ones, and those with a seed of their own.

    a request ── digest of the weights' identity, prompt tokens, sampling, ends ──► the whole answer, or nothing

Each choice of a request is one entry, so that n, log-probabilities and streams need nothing of their own. The
entries used least lately go first.
"""

import hashlib
import pickle
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace

from meshtrain.generate.request import Piece, Request


def digest(weights: str, request: Request) -> bytes:
    """Returns what two requests have in common if their answers are the same. `weights`: no other weights have it."""
    how = replace(request, tokens=None)  # type: ignore[arg-type]
    return hashlib.sha256(
        repr((weights, how, request.tokens.tolist())).encode()
    ).digest()


class AnswerCache:
    """At most `size` bytes of answers, each for so many seconds; of size 0 it is off. From any thread."""

    def __init__(
        self,
        size: int = 0,
        seconds: float = 3600.0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.size = size
        self._seconds = seconds
        self._now = now
        self._lock = threading.Lock()
        self._entries: OrderedDict[bytes, tuple[float, bytes]] = OrderedDict()
        self.bytes = self.hits = self.misses = 0

    def get(self, key: bytes) -> Piece | None:
        """Returns a whole answer as one piece."""
        with self._lock:
            until, answer = self._entries.get(key, (0.0, b""))
            if answer and until < self._now():
                self._drop(key)
                answer = b""
            if not answer:
                self.misses += 1
                return None
            self.hits += 1
            self._entries.move_to_end(key)
        return pickle.loads(answer)

    def put(self, key: bytes, piece: Piece) -> None:
        answer = pickle.dumps(piece)
        if len(answer) > self.size:
            return
        with self._lock:
            if key in self._entries:
                self._drop(key)
            self._entries[key] = self._now() + self._seconds, answer
            self.bytes += len(answer)
            while self.bytes > self.size:
                self._drop(next(iter(self._entries)))

    def _drop(self, key: bytes) -> None:
        self.bytes -= len(self._entries.pop(key)[1])
