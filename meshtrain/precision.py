"""Numbers that stay numbers: float16's dynamic loss scale on the device, and the steps at which a run must end.

By what the step computes in, `precision.compute`:

    float32, bfloat16   a loss or gradient norm that is not finite ends the run
    float16             a step that has one is skipped: no bit of the state changes but the counters and the loss
                        scale, which falls; a run that would skip for ever ends
    both                a state is saved only if it `is_finite`
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from meshtrain.config import Config, PrecisionConfig
from meshtrain.config.schema import LARGEST_LOSS_SCALE
from meshtrain.run.hooks import Row, RunHook

Tree = Any
# Gradients that overflow at this loss scale overflow by themselves.
SMALLEST_SCALE = 1.0
# Steps in a row that may be skipped at the smallest scale: a few for bad documents. fairseq gives up at the first.
SKIPS = 10


class LossScale(NamedTuple):
    """float16's dynamic loss scale (Micikevicius et al. 2018, section 3.2)."""

    value: jax.Array  # float32
    good_steps: jax.Array  # int32, in a row, since the scale last grew
    # int32: overflows that are still forgiven before the scale is halved
    patience: jax.Array
    skipped: jax.Array  # int32, steps skipped in the whole run


def initial_scale(precision: PrecisionConfig) -> LossScale | None:
    """None where gradients need no scale: in float32 and bfloat16."""
    if precision.compute != "float16":
        return None
    zero = jnp.zeros((), jnp.int32)
    value = min(precision.loss_scale, LARGEST_LOSS_SCALE)
    return LossScale(
        jnp.float32(value), zero, jnp.int32(precision.loss_scale_hysteresis), zero
    )


def factor(scale: LossScale | None) -> jax.Array:
    """The factor of the loss before it is differentiated."""
    if scale is None:
        return jnp.float32(1.0)
    return scale.value


def unscaled(gradients: Tree, scale: LossScale | None) -> Tree:
    if scale is None:
        return gradients
    return jax.tree.map(lambda g: g / scale.value, gradients)


def next_scale(
    scale: LossScale, finite: jax.Array, precision: PrecisionConfig
) -> LossScale:
    """Doubled after `loss_scale_window` good steps in a row; halved by overflows, from the `loss_scale_hysteresis`-th
    on.

    As in Megatron-LM no good step lets overflows be forgotten, only a doubling does.
    """
    good = jnp.where(finite, scale.good_steps + 1, 0)
    patience = jnp.where(finite, scale.patience, jnp.maximum(scale.patience - 1, 0))
    grows = good >= precision.loss_scale_window
    shrinks = ~finite & (patience == 0)
    value = jnp.where(shrinks, scale.value / 2, scale.value)
    value = jnp.where(grows, scale.value * 2, value)
    return LossScale(
        jnp.clip(value, SMALLEST_SCALE, LARGEST_LOSS_SCALE),
        jnp.where(grows, 0, good),
        jnp.where(grows, precision.loss_scale_hysteresis, patience),
        scale.skipped + ~finite,
    )


def taken_if(finite: jax.Array, after: Tree, before: Tree) -> Tree:
    """The state after a step, or where that is skipped the one before, bit for bit; both in the same kind of memory."""
    return jax.tree.map(lambda new, old: jnp.where(finite, new, old), after, before)


def is_finite(params: Tree, optimizer: Tree, precision: PrecisionConfig) -> jax.Array:
    """Returns whether one can train on from here: all is finite, and the weights small enough for the dtype that
    computes, and to be squared.

    To be squared, since weights of 1e30 give every loss but no gradient: the norms divide by the root of an infinite
    mean.
    """
    greatest = float(jnp.finfo(precision.compute).max)
    most = min(greatest, math.sqrt(jnp.finfo(jnp.float32).max))
    # A CPU's may pass over NaN
    largest = _reduce_leaves(lambda x: jnp.max(jnp.abs(x)), params)
    sums = _reduce_leaves(jnp.sum, (params, optimizer))
    return jnp.all(largest <= most) & jnp.all(jnp.isfinite(sums))


def _reduce_leaves(reduce: Callable[[jax.Array], jax.Array], tree: Tree) -> jax.Array:
    """One number a leaf. The reductions here are of the kinds for which no backend writes another array."""
    return jnp.stack([reduce(x).astype(jnp.float32) for x in jax.tree.leaves(tree)])


class NumbersCheck(RunHook):
    """Checks what every step of a process leaves, and ends the run, by a FloatingPointError, where it is past saving.

    `is_finite`: whether a state is one to train on from. `ended`: whether the step is the last, though train.steps has
    more.
    """

    def __init__(
        self,
        config: Config,
        start: int,
        is_finite: Callable[[Any], jax.Array] = lambda state: jnp.array(True),
        ended: Callable[[], bool] = lambda: False,
    ) -> None:
        self._is_finite = is_finite
        self._ended = ended
        self.steps = config.train.steps
        self.start = start
        self.taken = start
        self.at_smallest = 0
        sync = config.parallel.sync
        # From there on a process knows of its own islands alone: one that is broken ends nothing, and is mended when
        # islands meet.
        self.sees_all = math.inf
        if sync.every and jax.process_count() > 1:
            self.sees_all = sync.start

    def after_metrics(self, row: Row, due: bool) -> None:
        step = row["step"]
        metrics = row
        if metrics.get("sync_islands") == 0:
            raise _past_saving(
                f"no island has weights that are finite after step {step}"
            )
        if step > self.sees_all:
            return
        bad = [
            name for name in ("loss", "grad_norm") if not math.isfinite(metrics[name])
        ]
        if not bad:
            self.taken = step
            self.at_smallest = 0
        elif "loss_scale" not in metrics:
            raise _past_saving(
                f"the {bad[0].replace('grad_', 'gradient ')} of step {step} is {metrics[bad[0]]}"
            )
        else:
            self.at_smallest = (
                self.at_smallest + 1 if metrics["loss_scale"] == SMALLEST_SCALE else 0
            )
            if self.at_smallest > SKIPS:
                raise _past_saving(
                    f"no step after step {self.taken} could be taken in float16, even at a loss scale of 1"
                )
            # of islands `skipped` is the most of any
            none_taken = step == metrics["skipped"] and self.taken == self.start
            if none_taken and (self._ended() or step == self.steps):
                raise FloatingPointError(
                    f"none of the {step} steps could be taken in float16, down to a loss scale of "
                    f"{metrics['loss_scale']:g}. "
                    "More steps, a lower precision.loss_scale, or precision.compute bfloat16, may help."
                )

    def before_save(self, step: int, state: Any) -> None:
        if not self._is_finite(state):
            raise _past_saving(
                f"step {step} left weights or optimizer state that are not finite, or too large to square"
            )


def _past_saving(what: str) -> FloatingPointError:
    return FloatingPointError(
        f"{what}; the checkpoints before it are intact. A lower optimizer.learning_rate, or optimizer.grad_clip, may "
        "help."
    )
