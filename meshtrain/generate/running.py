"""A request under way: what its listener is told of each token, and with which it ends."""

import logging
from collections.abc import Callable
from typing import Any

import numpy as np

from meshtrain.generate.opened import Opened
from meshtrain.generate.request import Chosen, Finish, Piece, Request
from meshtrain.generate.text import Spelling, Stream

log = logging.getLogger(__name__)
Listener = Callable[[Piece], None]


class Ticket:
    """A request that was taken; from any thread."""

    def __init__(self, request: Request, listener: Listener, wake: Callable[[], None]) -> None:
        self.request = request
        self._listener, self._wake = listener, wake
        self.cancelled = False

    def cancel(self) -> None:
        """Ends it within a step, with finish cancelled; nothing where it has ended."""
        self.cancelled = True
        self._wake()

    def tell(self, piece: Piece) -> None:
        """From the engine's thread. A listener that raises has its own request cancelled."""
        try:
            self._listener(piece)
        except Exception:
            log.exception("who listens to a request has failed; it is cancelled")
            self._listener, self.cancelled = _nobody, True


class Running:
    """A request in a slot, as the host sees it."""

    def __init__(self, ticket: Ticket, opened: Opened, spelling: Spelling, length: int) -> None:
        """`length`: positions of the slot."""
        request = ticket.request
        self.ticket, self.ends, self._spelling = ticket, opened.ends, spelling
        self.most = min(request.most, length - len(request.tokens))
        # tokens that are chosen, or are to be by what the device was given; and those of them that were read
        self.dispatched, self.tokens = 1, 0
        self.ended = False
        self._stream = Stream(opened.tokenizer, request.tokens, request.stop)

    def next(self, token: int, logprob: Any, ids: Any, logprobs: Any) -> Piece | None:
        """What one more token makes of it, with its last token a finish; None where there is nothing to tell yet.

        The others are what was told beside the token: its log-probability, the likeliest tokens and theirs; None where nothing was.
        """
        request = self.ticket.request
        self.tokens += 1
        if logprob is not None and not np.isfinite(logprob):
            return self.last("error", problem="the model's logits are not finite numbers.")
        if token in self.ends and not request.ignore_ends:
            return self.last("stop")
        text, chosen = self._stream.push(token), self._chosen(request, token, logprob, ids, logprobs)
        if self._stream.stopped:
            return self.last("stop", text, chosen)
        if self.tokens == self.most:
            return self.last("length", text, chosen)
        return Piece(text, chosen, self.tokens) if text or chosen else None

    def last(self, finish: Finish, text: str = "", chosen: tuple[Chosen, ...] = (), problem: str = "") -> Piece:
        """How it ends, with the text that was held back."""
        return Piece(text + self._stream.close(), chosen, self.tokens, finish, problem)

    def _chosen(self, request: Request, token: int, logprob: Any, ids: Any, logprobs: Any) -> tuple[Chosen, ...]:
        if request.logprobs is None:
            return ()
        of, most = self._spelling.of, request.logprobs
        likeliest = tuple((int(i), of(int(i)), float(p)) for i, p in zip(ids[:most], logprobs[:most], strict=True))
        return (Chosen(token, of(token), float(logprob), likeliest),)


def _nobody(piece: Piece) -> None:
    """Listens for one who cannot."""
