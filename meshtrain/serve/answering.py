"""The answers to one request, from the engine's thread to the event loop.

    engine's thread ─ listener(choice, piece) ─► lists of pieces, by choice ─ one wake-up ─► pieces(), in the event loop

The engine never waits: a client that reads slowly finds several pieces as one when it comes back. At most the answers
themselves can wait, which the engine ends after so many tokens, and the port's patience bounds for how long (see
listening.py).
"""

import asyncio
import contextlib
import functools
import threading
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace

from meshtrain.errors import ConfigError
from meshtrain.generate.engine import Engine
from meshtrain.generate.request import Busy, Closed, Piece, Request, Ticket
from meshtrain.serve.cache import AnswerCache, digest
from meshtrain.serve.errors import Refused, failed, queue_full, unavailable

FAILED = "the engine ended this answer"
END = -1  # in place of a choice: there is no more of any


def joined(pieces: Sequence[Piece]) -> Piece:
    """Returns pieces of one answer, in their order, as one."""
    chosen = tuple(each for piece in pieces for each in piece.chosen)
    return replace(
        pieces[-1], text="".join(piece.text for piece in pieces), chosen=chosen
    )


class Channel:
    """Holds the pieces that have come and are not taken yet.

    `every`: whoever takes is woken by each piece, not only by the last one of an answer.
    """

    def __init__(self, every: bool) -> None:
        self._every = every
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._waiting: dict[int, list[Piece]] = {}
        self._woken = False
        self._come = asyncio.Event()

    def put(self, choice: int, piece: Piece) -> None:
        """Adds a piece; from any thread, and never blocks."""
        with self._lock:
            self._waiting.setdefault(choice, []).append(piece)
            wake = not self._woken and (self._every or piece.finish is not None)
            self._woken |= wake
        if wake:
            # A loop that is closed has nobody who waits.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._come.set)

    async def take(self) -> dict[int, Piece]:
        """Returns all that has come, as one piece a choice; waits until there is something."""
        await self._come.wait()
        self._come.clear()
        with self._lock:
            waiting = self._waiting
            self._waiting = {}
            self._woken = False
        return {choice: joined(pieces) for choice, pieces in waiting.items()}


@dataclass
class TokenTimes:
    """When the tokens of one answer were chosen, by time.monotonic, and how many they are so far."""

    first: float = 0.0
    last: float = 0.0
    tokens: int = 0


class Answering:
    """Requests of one client that are with the engine, until it is closed, which cancels what is not answered.

    `model`: its name; `cache`: where their answers may be, and are kept; `weights`: the identity of the engine's.
    """

    def __init__(
        self,
        engine: Engine,
        requests: Sequence[Request],
        every: bool,
        *,
        model: str = "",
        cache: AnswerCache | None = None,
        weights: str = "",
    ) -> None:
        self._engine = engine
        self._requests = requests
        self.model = model
        self._cache = cache
        self._keys = [digest(weights, request) for request in requests] if cache else []
        self._told: list[list[Piece]] = [[] for _ in requests]
        self._channel = Channel(every)
        self._tickets: dict[int, Ticket] = {}
        self.times = [TokenTimes() for _ in requests]
        self._why = failed(f"{FAILED}.")

    @property
    def tokens(self) -> int:
        """Chosen so far, over all answers."""
        return sum(times.tokens for times in self.times)

    def close(self) -> None:
        for ticket in self._tickets.values():
            ticket.cancel()

    def submit(self) -> None:
        """Hands the requests to the engine; Refused if it has no room, or cannot do it."""
        for choice, request in enumerate(self._requests):
            if self._cache and (known := self._cache.get(self._keys[choice])):
                self._tell(choice, known)
                continue
            try:
                self._tickets[choice] = self._engine.submit(
                    request, functools.partial(self._listen, choice)
                )
            except Busy:
                raise queue_full(self._engine.status.waiting) from None
            except Closed as error:
                raise unavailable(str(error), "closed") from None
            except ConfigError as error:
                raise Refused(400, str(error), code="invalid_value") from None

    def _listen(self, choice: int, piece: Piece) -> None:
        if self._cache:
            self._told[choice].append(piece)
            if piece.finish in ("stop", "length"):
                self._cache.put(self._keys[choice], joined(self._told[choice]))
        self._tell(choice, piece)

    def _tell(self, choice: int, piece: Piece) -> None:
        times = self.times[choice]
        if piece.tokens > times.tokens:
            times.last = time.monotonic()
            times.first = times.first or times.last
            times.tokens = piece.tokens
        self._channel.put(choice, piece)

    def end(self, refused: Refused) -> None:
        """Tells whoever reads the answers why there are no more; in the event loop."""
        self._why = refused
        self._channel.put(END, Piece("", finish="error"))

    async def pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """Yields (choice, piece), until each choice has had its last; Refused where the engine, or the server's end,
        ended one.
        """
        open_choices = set(range(len(self._requests)))
        while open_choices:
            for choice, piece in (await self._channel.take()).items():
                if choice == END:
                    raise self._why
                if piece.finish == "error":
                    raise failed(piece.problem or f"{FAILED}.")
                if piece.finish == "cancelled":
                    raise unavailable(f"{FAILED}: it was cancelled.", "cancelled")
                if piece.finish is not None:
                    open_choices.discard(choice)
                    self._tickets.pop(choice, None)
                yield choice, piece
