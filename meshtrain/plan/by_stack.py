"""A model whose layers are of several kinds, as its planner takes it: costs of a layer in the mean of a stage's slots.

Every formula of a layer is of a config whose layers are all alike. `averaged` has it computed for each stack by itself
(`config.stacks`), and takes the mean over the slots of a stage: times their number it is their sum.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from meshtrain.config import Config
from meshtrain.config.stacks import (
    BLOCKS,
    is_uniform,
    layers_of_stacks,
    model_of_stack,
    stack_of_layers,
)
from meshtrain.model.weights import is_trained, weights
from meshtrain.parallel.placement import stages

Result = TypeVar("Result")


class StackConfig(NamedTuple):
    """A stack, and the config whose layers are all as its own."""

    stack: str
    config: Config


def stack_configs(config: Config) -> list[StackConfig]:
    """Returns the config of each stack; of a model with one stack the config itself."""
    if is_uniform(config.model) or len(stacks := layers_of_stacks(config.model)) == 1:
        return [StackConfig(BLOCKS, config)]
    return [StackConfig(stack, _config_of(config, stack)) for stack in stacks]


def last_config(config: Config) -> Config:
    """Returns the config whose layers are all as the last one."""
    last = stack_of_layers(config.model)[-1]
    return dict(stack_configs(config))[last]


def _config_of(config: Config, stack: str) -> Config:
    trainable = _trainable(config.model, config.lora, config.train.trainable, stack)
    return dataclasses.replace(
        config,
        model=model_of_stack(config.model, stack),
        train=dataclasses.replace(config.train, trainable=trainable),
        parallel=dataclasses.replace(config.parallel, layer_split=None),
    )


@functools.lru_cache(maxsize=256)
def _trainable(model: Any, lora: Any, trainable: tuple[str, ...], stack: str) -> tuple[str, ...]:
    """Returns train.trainable as names of the weights of a stack, and of those outside the layers."""
    if not trainable:
        return ()
    names = [w.name for w in weights(model) if is_trained(w, lora, trainable)]
    here = {name: name.partition(".") for name in names}
    stacks = layers_of_stacks(model)
    return tuple(
        f"{BLOCKS}.{ours}" if part == stack else name
        for name, (part, _, ours) in here.items()
        if part == stack or part not in stacks
    )


def averaged(function: Callable[..., Result]) -> Callable[..., Result]:
    """Returns a function of a config, and more, as the mean over a stage's slots."""

    @functools.wraps(function)
    def mean(config: Config, *more: Any, **named: Any) -> Result:
        if is_uniform(config.model):
            return function(config, *more, **named)
        several = stack_configs(config)
        if len(several) == 1:
            return function(config, *more, **named)
        assigned = stages(config)
        shares = [assigned.slots.count(stack) / assigned.longest for stack, _ in several]
        return _mean(shares, [function(one, *more, **named) for _, one in several])

    return mean


def _mean(shares: Sequence[float], values: Sequence[Any]) -> Any:
    first = values[0]
    if hasattr(first, "__dataclass_fields__") and not hasattr(first, "__add__"):
        fields = {
            name: _mean(shares, [getattr(value, name) for value in values]) for name in vars(first)
        }
        return dataclasses.replace(first, **fields)
    if isinstance(first, tuple):
        each = [_mean(shares, column) for column in zip(*values, strict=True)]
        return type(first)(*each) if hasattr(first, "_fields") else tuple(each)
    return functools.reduce(
        lambda a, b: a + b, (v * share for v, share in zip(values, shares, strict=True))
    )
