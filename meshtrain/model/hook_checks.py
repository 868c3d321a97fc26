"""Checks of the hooks that replace built-in functions: they can be called, and a loss is right on a sharded
vocabulary.
"""

import inspect
import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshtrain.config import Config, ConfigError, short
from meshtrain.errors import name_of
from meshtrain.model.collectives import VocabularyShards
from meshtrain.model.loss import Vocabulary


def check_call(kind: str, hook: Any, names: list[str]) -> None:
    """Raises ConfigError for what cannot be called with arguments of these names."""
    wanted = f"it is called with ({', '.join(names)})"
    if not callable(hook):
        raise ConfigError(
            f"the {kind} hook is {short(repr(hook))}; it must be a function, and {wanted}."
        )
    if taken := misfit(hook, names):
        raise ConfigError(
            f"the {kind} hook {name_of(hook)} takes {short(taken)}, but {wanted}."
        )


def misfit(function: Callable[..., Any], names: Sequence[str]) -> str:
    """Returns the signature of a function that does not take arguments of these names by their places, else nothing."""
    try:
        signature = inspect.signature(function)
    except ValueError:
        # some callables written in C tell none; the call will say
        return ""
    try:
        signature.bind(*names)
    except TypeError:
        return str(signature)
    return ""


def check_sharded_loss(
    hook: Callable[..., jax.Array], config: Config, axes: tuple[str, ...]
) -> None:
    """Raises ConfigError if a loss hook takes its shard of the vocabulary, which the mesh axes `axes` split, for all of
    it.

    Its losses of made-up logits in one piece are compared with those of the same logits cut as on the mesh, all on one
    device. On
    the mesh itself nobody could tell: devices agree on a wrong sum as on a right one.
    """
    size, split = config.model.vocab_size, [getattr(config.mesh, axis) for axis in axes]
    degree = math.prod(split)
    if degree == 1:
        return
    logits, labels = _example(size)
    # the padding is like the rest, so that a hook that counts it in is seen
    padding = ((0, 0), (0, 0), (0, -size % degree))
    padded = np.pad(logits, padding, constant_values=logits.mean() + 1)
    shares = np.moveaxis(padded.reshape(*labels.shape, *split, -1), (0, 1), (-3, -2))
    in_one = logits.reshape(*(1 for _ in axes), *logits.shape)

    def losses(logits: jax.Array) -> jax.Array:
        ranks = math.prod(logits.shape[: len(axes)])
        of_share = lambda share: hook(
            share, jnp.asarray(labels), Vocabulary(size, VocabularyShards(axes, ranks))
        )
        for axis in reversed(axes):
            of_share = jax.vmap(of_share, axis_name=axis)
        return of_share(logits).reshape(-1, *labels.shape)

    def compared(complete: jax.Array, shares: jax.Array) -> tuple[jax.Array, ...]:
        # twice of the whole: a hook that draws its own random numbers cannot be judged
        return losses(complete), losses(complete), losses(shares)

    try:
        lowered = jax.jit(compared).lower(in_one, shares)
        (complete,), (again,), cut = (
            np.asarray(x, np.float32) for x in lowered.compile()(in_one, shares)
        )
    except Exception:
        # the trace of the step says what is wrong with it, if anything is with arrays as long as that has
        return
    # wider where the hook has chosen to add up in 16 bits or fewer
    tolerance = 0.05 if re.search(r"xb?f(16|8)", lowered.as_text()) else 1e-4
    same = partial(np.isclose, rtol=tolerance, atol=tolerance, equal_nan=True)
    # of shares that come to different values the trace tells
    if (
        not np.array_equal(complete, again, equal_nan=True)
        or not np.all(same(cut, cut[0]))
        or np.all(same(cut[0], complete))
    ):
        return
    at = np.unravel_index(np.argmin(same(cut[0], complete)), complete.shape)
    masks = (
        f", and leave out the ids from {size} on, which are padding"
        if size % degree
        else ""
    )
    raise ConfigError(
        f"the loss hook {name_of(hook)} gives {cut[0][at]:.4f} where the vocabulary is cut into {degree} shares, and "
        f"{complete[at]:.4f} of the "
        "same logits where it is whole; softmax, mean and one_hot over the last axis see one share only: "
        f"use vocabulary.sum, max, log_sum_exp and of_label{masks}."
    )


def _example(size: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns logits, float32 [2, 3, size], and labels from the first id to the last, of probability 0.1 to 0.9."""
    labels = np.linspace(0, size - 1, 6).round().astype(np.int32).reshape(2, 3)
    # their mean is not 0, and rises with the id: what is true of one share is not of another
    logits = np.random.default_rng(0).normal(size=(2, 3, size)) + np.linspace(
        0, 2, size
    )
    at_label = np.arange(size) == labels[..., None]
    others = np.log(np.sum(np.exp(logits), axis=-1, where=~at_label))
    logits = np.where(
        at_label, (others + np.linspace(-2, 2, 6).reshape(2, 3))[..., None], logits
    )
    return logits.astype(np.float32), labels
