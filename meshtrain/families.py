"""Model families: each is a preset of the decoder's options, which every other room asks for and never for a family's name.

           norm                 positions            MLP                     biases   head
    llama  RMSNorm              rotary (RoPE)        silu(gate x) * up x     no       its own       Touvron et al. 2023
    gpt2   LayerNorm with bias  a learned table      gelu(up x)              yes      the embedding Radford et al. 2019

A family from outside: `FAMILIES.register(Family(name="mine", ...))` before the config is loaded. What the options cannot say, it
computes in a block of its own (see `model.hooks.BlockHook`).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from meshtrain.registry import Registry


@dataclass(frozen=True)
class Family:
    """The options of a decoder that `model.family` chooses."""

    name: str
    centred_norms: bool  # LayerNorm, with a bias; else RMSNorm
    positions: Literal["rotary", "learned"]
    gated: bool  # the MLP is activation(gate x) * up x; else activation(up x)
    activation: str  # a function of jax.nn
    biases: bool  # of the projections
    tied_head: bool  # where model.tied_head is null
    d_ff: Callable[[int], int]  # of d_model, where model.d_ff is null
    block: Callable[..., Any] | None = None  # a BlockHook in place of the pre-norm block

    @property
    def rotary(self) -> bool:
        return self.positions == "rotary"


FAMILIES = Registry(
    Family(
        name="llama",
        centred_norms=False,
        positions="rotary",
        gated=True,
        activation="silu",
        biases=False,
        tied_head=False,
        d_ff=lambda d_model: 32 * math.ceil(8 * d_model / 3 / 32),
    ),
    Family(
        name="gpt2",
        centred_norms=True,
        positions="learned",
        gated=False,
        activation="gelu",
        biases=True,
        tied_head=True,
        d_ff=lambda d_model: 4 * d_model,
    ),
)
