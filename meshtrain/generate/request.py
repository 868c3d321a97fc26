"""What is asked of an engine, and what it answers; without JAX."""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from meshtrain.errors import ConfigError

# The most likely tokens that can be told beside a chosen one.
MOST_LIKELY = 20

Finish = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen from logits. The random number follows from the seed and the token's position alone."""

    temperature: float = 0.0  # 0: the most likely one (greedy)
    top_k: int = 0  # among so many of the most likely; 0: all
    top_p: float = 1.0  # among the fewest whose probabilities sum to this (nucleus: Holtzman et al. 2020)
    seed: int = 0


@dataclass(frozen=True)
class Request:
    """A prompt and how to go on with it."""

    tokens: np.ndarray  # int32 [T], at least one
    most: int  # tokens to choose, at most
    sampling: Sampling = Sampling()
    stop: tuple[str, ...] = ()  # the text ends before the first of them
    ignore_ends: bool = False  # go on behind an end token
    logprobs: int | None = None  # tell of so many of the most likely tokens; None: of no token


@dataclass(frozen=True)
class Chosen:
    """A chosen token, its log-probability (of the model's own distribution, at temperature 1) and the likeliest in its place."""

    token: int
    text: str  # of this token alone
    logprob: float = 0.0
    likeliest: tuple[tuple[int, str, float], ...] = ()  # (token, its text, log-probability), the likeliest first


@dataclass(frozen=True)
class Piece:
    """A bit of an answer, as it comes: text that no later token changes, and once, at last, why it ended."""

    text: str
    chosen: tuple[Chosen, ...] = field(default=())  # what was chosen since the last piece; of logprobs alone
    tokens: int = 0  # chosen so far, an end token among them
    finish: Finish | None = None
    problem: str = ""  # of finish error, a sentence


def check(request: Request, length: int, vocabulary: int) -> None:
    """ConfigError for a request that cannot be answered with so many positions and tokens, in a sentence."""
    tokens = np.asarray(request.tokens)
    if tokens.ndim != 1 or not len(tokens) or not np.issubdtype(tokens.dtype, np.integer):
        raise ConfigError("a prompt must be one token at least.")
    if len(tokens) >= length:
        raise ConfigError(
            f"the prompt is {len(tokens)} tokens long; prompt and answer together have {length} positions here."
        )
    if len(wrong := tokens[(tokens < 0) | (tokens >= vocabulary)]):
        raise ConfigError(f"the prompt has the token {wrong[0]}; the model has {vocabulary}, from 0.")
    if request.most < 1:
        raise ConfigError(f"{request.most} tokens are asked for; it must be 1 at least.")
    if request.logprobs is not None and not 0 <= request.logprobs <= MOST_LIKELY:
        raise ConfigError(f"logprobs is {request.logprobs}; it must be from 0 to {MOST_LIKELY}.")
    _check_sampling(request.sampling)


def _check_sampling(how: Sampling) -> None:
    """ConfigError for what is no way to choose a token."""
    if not (0 <= how.temperature < np.inf):
        raise ConfigError(f"temperature is {how.temperature}; it must be a number from 0.")
    if not 0 < how.top_p <= 1:
        raise ConfigError(f"top_p is {how.top_p}; it must be above 0 and at most 1.")
    if not 0 <= how.top_k < 1 << 31:
        raise ConfigError(f"top_k is {how.top_k}; it must be from 0, which leaves all tokens.")
