"""What each layer must know of the sequences: the same for all, or by turns of the window and of all that came before.

    global_every 3      layer 0   1   2   3   4   5         one program serves both kinds, so a layer's kind follows on the
                              w   w   all w   w   all       device from its index

(sliding window: Beltagy et al. 2020; by turns with another rotary base: Gemma Team 2025, section 2).
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from meshtrain.config import ModelConfig
from meshtrain.model.layers import Sequence
from meshtrain.model.rope import rotary_table


def sequences(
    model: ModelConfig, positions: jax.Array, segments_BT: jax.Array | None = None
) -> Callable[[jax.Array | int], Sequence]:
    """The function (a layer's index) -> what the layer must know of sequences at these `positions`."""
    far, near = rotary_table(model, positions), None
    if model.rope_theta_local:
        unscaled = dataclasses.replace(model, rope_theta=model.rope_theta_local, rope_scaling="none")
        near = rotary_table(unscaled, positions)
    if not model.global_every:
        return lambda index: Sequence(near or far, segments_BT)

    def of(index: jax.Array | int) -> Sequence:
        local = (index + 1) % model.global_every != 0
        rotary = far
        if near is not None and far is not None:
            cos, sin = (jnp.where(local, *both) for both in zip(near, far, strict=True))
            rotary = cos, sin
        return Sequence(rotary, segments_BT, local if model.window else None)

    return of
