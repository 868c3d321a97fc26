"""The stacks of a model: its layers by kind, the weights of each kind stacked along a first axis of their own.

    layer                                    0              1              2              3
    model.dense_layers 1                     dense_blocks   blocks         blocks         blocks
    model.pattern [linear, full]             linear_blocks  blocks         linear_blocks  blocks
    both                                     dense_linear_blocks           linear_blocks  ...

A model whose layers are all of one kind has one stack, `blocks`. Which layers are in which stack is a fact of the
model, whatever the mesh: weights, checkpoints, files, placement, the program and the planner all ask for it here. No
JAX.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from meshtrain.registry import Registry, late

# the section model, whose module checks kinds by this one
Model = TypeVar("Model", bound=Any)

BLOCKS = "blocks"
DENSE = "dense"
FULL = "full"
LINEAR = "linear"


@dataclass(frozen=True)
class LayerKind:
    """A kind of layer of model.pattern, by what it has in the place of attention: `full` is attention itself, `linear`
    `model.linear_attention`.

    add_weights: (model, add) adds its weights as `model.weights` does, below `blocks.attention`. module: its class, as
    (name, model, rngs, lora), called as `model.layers.Attention` is; imported when a model has one.
    """

    name: str
    add_weights: Any = None
    module: Any = None


KINDS = Registry(
    LayerKind(FULL),
    LayerKind(LINEAR, module=late("meshtrain.model.linear_attention:LinearAttention")),
)


def kinds_of_layers(model: Model) -> list[str]:
    """Returns the kind of each layer, in the order of the model."""
    return _kinds(model.layers, model.pattern)


def _kinds(layers: int, pattern: tuple[str, ...]) -> list[str]:
    return [
        (pattern or (FULL,))[layer % (len(pattern) or 1)] for layer in range(layers)
    ]


def is_uniform(model: Any) -> bool:
    """Returns whether a model's layers are sure to be of one kind."""
    return not model.pattern and not model.dense_layers


def even_parts(model: Any) -> int:
    """Returns into how many stages a model's layers can be cut at most that all have the same kinds."""
    names = " ".join((*stack_of_layers(model), ""))
    # A text is found in itself and itself again at its shortest period.
    return len(names) // (2 * names).find(names, 1)


def stack_of_layers(model: Any) -> tuple[str, ...]:
    """Returns the name of each layer's stack, in the order of the model."""
    return _stacks(model.layers, model.dense_layers, model.pattern)


# A search asks millions of times: a few numbers are hashed sooner than a model.
@functools.lru_cache(maxsize=256)
def _stacks(
    layers: int, dense_layers: int, pattern: tuple[str, ...]
) -> tuple[str, ...]:
    kinds = [
        (layer < dense_layers, kind)
        for layer, kind in enumerate(_kinds(layers, pattern))
    ]
    if len(set(kinds)) == 1:
        return (BLOCKS,) * layers
    return tuple(
        f"{DENSE}_" * dense + f"{mixer}_" * (mixer != FULL) + BLOCKS
        for dense, mixer in kinds
    )


def layers_of_stacks(model: Any) -> dict[str, tuple[int, ...]]:
    """Returns the layers of each stack, by its name, in the order in which the model has them first."""
    return _layers(stack_of_layers(model))


@functools.lru_cache(maxsize=256)
def _layers(names: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    return {
        stack: tuple(layer for layer, name in enumerate(names) if name == stack)
        for stack in dict.fromkeys(names)
    }


@functools.lru_cache(maxsize=256)
def model_of_stack(model: Model, stack: str) -> Model:
    """Returns the model whose layers are all as those of a stack; so many as the whole model has."""
    if set(stack_of_layers(model)) == {stack}:
        return model
    dense, kind = is_dense(stack), stack.removeprefix(f"{DENSE}_").removesuffix(BLOCKS)
    alike: Model = replace(
        model, dense_layers=0, pattern=(kind.removesuffix("_"),) if kind else ()
    )
    layers = layers_of_stacks(model)[stack]
    if everywhere := count_global(model, layers):
        alike = replace(alike, global_every=round(len(layers) / everywhere))
    elif model.global_every:
        alike = replace(alike, global_every=model.layers + 1)
    if not dense:
        return alike
    moe = replace(model.moe, experts=0, shared_experts=0, groups=())
    return replace(alike, moe=moe, d_ff=model.dense_d_ff)


def count_global(model: Any, layers: Sequence[int]) -> int:
    """Returns how many of some layers see all tokens of a sequence, where others see a window."""
    every = model.global_every
    return sum((layer + 1) % every == 0 for layer in layers) if every else 0


def last_of_stacks(model: Model) -> Model:
    """Returns the model whose layers are all as its last one."""
    return model_of_stack(model, stack_of_layers(model)[-1])


def is_dense(stack: str) -> bool:
    """Returns whether the layers of a stack have an MLP where others have experts."""
    return stack.startswith(f"{DENSE}_")


def expert_layers(model: Any) -> list[int]:
    """Returns the layers that have experts, of a model that has any."""
    return [
        layer
        for layer, stack in enumerate(stack_of_layers(model))
        if not is_dense(stack)
    ]


def kind_of(model: Any) -> str:
    """Returns the kind of a model's layers, which are all alike (`model_of_stack`)."""
    if model.pattern:
        return model.pattern[0]
    return FULL


def stack_of(name: str) -> str:
    """Returns the stack of a weight by its name."""
    return name.partition(".")[0]
