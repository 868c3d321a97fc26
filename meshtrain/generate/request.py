"""What is asked of an engine, and what it answers; without JAX."""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

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
