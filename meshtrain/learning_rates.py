"""Learning-rate schedules by name: what `optimizer.schedule` does with the rate once its warm-up has reached the peak.

    cosine     half a cosine to final_ratio of the peak            Loshchilov & Hutter 2017
    linear     a line to it
    constant   the peak
    wsd        the peak, then a line over the last decay_ratio of the steps (warmup-stable-decay)
                                                                   Hu et al. 2024, section 4

One from outside: `LEARNING_RATES.register(LearningRate("mine", function))` before the config is loaded. Optax is
imported where one is made, so that a plan needs no JAX.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from meshtrain.registry import Registry

if TYPE_CHECKING:
    import optax


class RateKeys(Protocol):
    """The section `optimizer` of a config, as far as it is asked here."""

    @property
    def learning_rate(self) -> float: ...
    @property
    def final_ratio(self) -> float: ...
    @property
    def decay_ratio(self) -> float: ...


@dataclass(frozen=True)
class LearningRate:
    """`make(keys, rest, steps)`: the rate by the number of updates since the peak, which is at 0; the run's last update
    is `rest`, of `steps` in all.
    """

    name: str
    make: Callable[[RateKeys, int, int], optax.Schedule]


def _cosine(o: RateKeys, rest: int, steps: int) -> optax.Schedule:
    import optax

    return optax.cosine_decay_schedule(o.learning_rate, rest, o.final_ratio)


def _linear(o: RateKeys, rest: int, steps: int) -> optax.Schedule:
    import optax

    return optax.linear_schedule(o.learning_rate, o.learning_rate * o.final_ratio, rest)


def _constant(o: RateKeys, rest: int, steps: int) -> optax.Schedule:
    import optax

    return optax.constant_schedule(o.learning_rate)


def _wsd(o: RateKeys, rest: int, steps: int) -> optax.Schedule:
    import optax

    falls = min(rest, max(1, round(o.decay_ratio * steps)))
    return optax.join_schedules(
        [_constant(o, rest, steps), _linear(o, falls, steps)], [rest - falls]
    )


LEARNING_RATES = Registry(
    LearningRate("cosine", _cosine),
    LearningRate("linear", _linear),
    LearningRate("constant", _constant),
    LearningRate("wsd", _wsd),
)
