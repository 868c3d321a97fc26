"""Requests to an engine, its answers, and a request under way; without JAX."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from meshtrain.errors import ConfigError
from meshtrain.generate.text import Spelling, Stream

# The most likely tokens that can be told beside a chosen one.
MOST_LIKELY = 20

Finish = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen from logits. The random number follows from the seed and the token's position alone."""

    temperature: float = 0.0  # 0: the most likely one (greedy)
    top_k: int = 0  # among so many of the most likely; 0: all
    # Among the fewest whose probabilities sum to this (nucleus: Holtzman et al. 2020)
    top_p: float = 1.0
    seed: int = 0

    def check(self) -> None:
        """Raises ConfigError if no token can be chosen so."""
        if not (0 <= self.temperature < np.inf):
            raise ConfigError(
                f"temperature is {self.temperature}; it must be a number from 0."
            )
        if not 0 < self.top_p <= 1:
            raise ConfigError(
                f"top_p is {self.top_p}; it must be above 0 and at most 1."
            )
        if not 0 <= self.top_k < 1 << 31:
            raise ConfigError(
                f"top_k is {self.top_k}; it must be from 0, which leaves all tokens."
            )


@dataclass(frozen=True)
class Request:
    """A prompt and how to go on with it."""

    tokens: np.ndarray  # int32 [T], at least one
    most: int  # tokens to choose, at most
    sampling: Sampling = Sampling()
    stop: tuple[str, ...] = ()  # the text ends before the first of them
    ignore_ends: bool = False  # go on behind an end token
    # Tell of so many of the most likely tokens; None: of no token
    logprobs: int | None = None

    def check(self, length: int, vocabulary: int) -> None:
        """Raises ConfigError if so many positions and tokens cannot answer it."""
        tokens = np.asarray(self.tokens)
        if (
            tokens.ndim != 1
            or not len(tokens)
            or not np.issubdtype(tokens.dtype, np.integer)
        ):
            raise ConfigError("a prompt must be one token at least.")
        if len(tokens) >= length:
            both = f"prompt and answer together have {length} positions here"
            raise ConfigError(f"the prompt is {len(tokens)} tokens long; {both}.")
        if len(wrong := tokens[(tokens < 0) | (tokens >= vocabulary)]):
            raise ConfigError(
                f"the prompt has the token {wrong[0]}; the model has {vocabulary}, from 0."
            )
        if self.most < 1:
            raise ConfigError(
                f"{self.most} tokens are asked for; it must be 1 at least."
            )
        if self.logprobs is not None and not 0 <= self.logprobs <= MOST_LIKELY:
            raise ConfigError(
                f"logprobs is {self.logprobs}; it must be from 0 to {MOST_LIKELY}."
            )
        self.sampling.check()


@dataclass(frozen=True)
class Chosen:
    """A chosen token, its log-probability (of the model's own distribution, at temperature 1) and the likeliest in its
    place.
    """

    token: int
    text: str  # of this token alone
    logprob: float = 0.0
    likeliest: tuple[
        tuple[int, str, float], ...
    ] = ()  # (token, its text, log-probability), the likeliest first


@dataclass(frozen=True)
class Piece:
    """A bit of an answer, as it comes: text that no later token changes, and once, at last, why it ended."""

    text: str
    chosen: tuple[Chosen, ...] = field(
        default=()
    )  # what was chosen since the last piece; of logprobs alone
    tokens: int = 0  # chosen so far, an end token among them
    finish: Finish | None = None
    problem: str = ""  # of finish error, a sentence


log = logging.getLogger(__name__)
Listener = Callable[[Piece], None]


class Busy(Exception):
    """As many requests wait as may; the same one may be submitted later."""


class Closed(Exception):
    """The engine takes no more requests: it is closed, or broken, which the sentence says."""


@dataclass(frozen=True)
class EngineStatus:
    """The work of an engine, now and so far; counts never fall."""

    slots: int
    busy: int  # slots with a request
    waiting: int  # requests without a slot
    requests: int = 0  # ended, by whatever
    tokens: int = 0  # chosen for a request
    prompt_tokens: int = 0  # read
    steps: int = 0  # of decode
    drafts: int = 0  # that a request's step has checked
    accepted_drafts: int = 0  # of these
    saved: int = 0  # steps that a request would have taken without
    # programs: one for each power of two of a prompt's length, and decode's two
    compiled: int = 0
    failures: int = 0  # of the device's programs
    last_step: float = 0.0  # time.monotonic() at the end of the last turn
    # of the turn that goes on; None: nothing is asked of the device
    turn_began: float | None = None
    # In this turn a program is compiled, or what waits waits for that
    compiling: bool = False
    broken: str = ""  # why nothing can be generated any more, a sentence


class Ticket:
    """A request that was taken; from any thread."""

    def __init__(
        self, request: Request, listener: Listener, wake: Callable[[], None]
    ) -> None:
        self.request = request
        self._listener = listener
        self._wake = wake
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
            self._listener = lambda piece: None
            self.cancelled = True


class Running:
    """A request in a slot, as the host sees it."""

    def __init__(
        self,
        ticket: Ticket,
        ends: frozenset[int],
        spelling: Spelling,
        length: int,
    ) -> None:
        """`ends`: tokens that end a text; `length`: positions of the slot."""
        request = ticket.request
        self.ticket = ticket
        self.ends = ends
        self._spelling = spelling
        self.most = min(request.most, length - len(request.tokens))
        # Tokens that are chosen, or are to be by what the device was given
        self.dispatched = 1
        self.tokens = 0  # those of them that were read
        self.ended = False
        self._stream = Stream(spelling.tokenizer, request.tokens, request.stop)

    def next(self, token: int, logprob: Any, ids: Any, logprobs: Any) -> Piece | None:
        """Returns what one more token makes of it, with its last token a finish; None where there is nothing to tell
        yet.

        `logprob`: the token's; `ids`, `logprobs`: the most likely tokens and theirs. None where nobody asked for them.
        """
        request = self.ticket.request
        self.tokens += 1
        if logprob is not None and not np.isfinite(logprob):
            return self.last(
                "error", problem="the model's logits are not finite numbers."
            )
        ended = token in self.ends and not request.ignore_ends
        text = "" if ended else self._stream.push(token)
        chosen: tuple[Chosen, ...] = ()
        if (most := request.logprobs) is not None:
            spelt = self._spelling.spell
            likely = zip(ids[:most], logprobs[:most], strict=True)
            alternatives = tuple((int(i), spelt(int(i)), float(p)) for i, p in likely)
            chosen = (Chosen(token, spelt(token), float(logprob), alternatives),)
        if ended or self._stream.stopped:
            return self.last("stop", text, chosen)
        if self.tokens == self.most:
            return self.last("length", text, chosen)
        return Piece(text, chosen, self.tokens) if text or chosen else None

    def last(
        self,
        finish: Finish,
        text: str = "",
        chosen: tuple[Chosen, ...] = (),
        problem: str = "",
    ) -> Piece:
        """Returns how it ends, with the text that was held back."""
        return Piece(text + self._stream.close(), chosen, self.tokens, finish, problem)
