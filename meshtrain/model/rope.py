"""Rotary positions (RoPE, Su et al. 2021), and how a model that was trained on short sequences is stretched to long
ones.

    model.rope_scaling   frequencies                                                 published in
    none                 theta^(-2i/K)
    linear               all of them slower by the factor                            Chen et al. 2023
    llama3               the slow ones by the factor, fast ones not, a ramp between  Llama 3 (2024), section 3.4.2
    yarn                 likewise, a ramp by pair; cos and sin a little larger       Peng et al. 2023, sections 3.2-3.4

A pair i turns through theta^(-2i/K) a position; `turns` is how often it goes round in the sequence length of before.

Layers may alternate between a window and all positions:

    global_every 3      layer 0   1   2   3   4   5       one program serves both kinds, so a layer's kind follows on
                              w   w   all w   w   all     the device from its index

(sliding window: Beltagy et al. 2020; by turns with another rotary base: Gemma Team 2025, section 2).
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from meshtrain.config import ModelConfig
from meshtrain.families import FAMILIES, yarn_amplitude


class Rope(NamedTuple):
    """The values from which the angles follow."""

    # [K / 2], K the width that is turned: radians a position, float32
    frequency: np.ndarray
    amplitude: float = 1.0  # of cos and sin


def rope(model: ModelConfig) -> Rope:
    """The frequencies of a resolved config's model."""
    width = _width(model)
    pairs = np.arange(0, width, 2, dtype=np.float32)
    frequency = np.float32(model.rope_theta) ** (-pairs / np.float32(width))
    factor = model.rope_factor
    slow = frequency / np.float32(factor)
    if model.rope_scaling == "none":
        return Rope(frequency)
    if model.rope_scaling == "linear":
        return Rope(slow)
    if model.rope_scaling == "llama3":
        turns = model.rope_original * frequency / (2 * math.pi)
        ramp = model.rope_fast - model.rope_slow
        fast = np.clip((turns - model.rope_slow) / ramp, 0, 1)
        return Rope((frequency * fast + slow * (1 - fast)).astype(np.float32))
    low, high = (_pair(model, turns) for turns in (model.rope_fast, model.rope_slow))
    if model.rope_truncate:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, width - 1)
    breadth = max(high - low, 0.001)
    stretched = np.clip((pairs / 2 - low) / breadth, 0, 1)
    usual = 1.0 if model.mla.kv_rank else yarn_amplitude(factor)
    amplitude = model.rope_amplitude or usual
    frequency = frequency * (1 - stretched) + slow * stretched
    return Rope(frequency.astype(np.float32), amplitude)


def _pair(model: ModelConfig, turns: float) -> float:
    """The pair, a fraction, that goes round so often in the length of before."""
    ratio = model.rope_original / (turns * 2 * math.pi)
    return _width(model) * math.log(ratio) / (2 * math.log(model.rope_theta))


def _width(model: ModelConfig) -> int:
    """Returns the width of a head that is turned."""
    return model.mla.rope or round(model.head_dim * model.rope_share)


def angles(positions: Array, rope: Rope) -> tuple[Array, Array]:
    """cos and sin at `positions`: [..., K / 2] each, float32."""
    angle = positions[..., None].astype(jnp.float32) * rope.frequency
    return rope.amplitude * jnp.cos(angle), rope.amplitude * jnp.sin(angle)


def rotary_table(config: ModelConfig, positions: Array) -> tuple[Array, Array] | None:
    """cos and sin of rotary positions; None where they are learned."""
    if FAMILIES[config.family].rotary:
        return angles(positions, rope(config))
    return None


def _turned(x_BTHK: Array, cos: Array, sin: Array) -> Array:
    """Turns the pairs (x[i], x[i + R/2]) of the first R numbers by the angles of their positions."""
    width = 2 * cos.shape[-1]
    if width < x_BTHK.shape[-1]:
        turned = _turned(x_BTHK[..., :width], cos, sin)
        return jnp.concatenate([turned, x_BTHK[..., width:]], axis=-1)
    cos = cos[..., None, :].astype(x_BTHK.dtype)
    sin = sin[..., None, :].astype(x_BTHK.dtype)
    low, high = jnp.split(x_BTHK, 2, axis=-1)
    turned_low = low * cos - high * sin
    turned_high = high * cos + low * sin
    return jnp.concatenate([turned_low, turned_high], axis=-1)


# Its transpose turns back: nothing is kept but the angles.
rotate = jax.custom_vjp(_turned)
rotate.defvjp(
    lambda x, cos, sin: (_turned(x, cos, sin), (cos, sin)),
    lambda angles, cotangent: (_turned(cotangent, angles[0], -angles[1]), None, None),
)


@dataclasses.dataclass(frozen=True)
class Routing:
    """All that a router of experts needs of the tokens here, besides their activations."""

    # which are computed by experts; None: all
    routed_BT: Array | None = None
    # of the gradient of each row's auxiliary losses; None: there is none
    seeds_B: Array | None = None
    # the experts that each token takes, int32; None: those that the router chooses
    chosen_BTK: Array | None = None
    # is called with the experts that each token takes
    note: Callable[[Array], None] | None = None


@dataclasses.dataclass(frozen=True)
class Sequence:
    """All that a block needs of the sequences, besides their activations."""

    # cos, sin: [T, K/2], or [B, T, K/2] where positions differ by sequence
    rotary_TK: tuple[Array, Array] | None = None
    # documents packed in a sequence; attention stays within one
    segments_BT: Array | None = None
    # whether this layer sees the window alone; None where all layers see the same
    local: Array | bool | None = None
    # for experts; None: all tokens are computed by them
    routing: Routing | None = None
    # takes each head's largest score, a `parallel.qk_clip.Maxima`; None: nobody asks for it
    maxima: Any = None


def sequences(
    model: ModelConfig, positions: Array, segments_BT: Array | None = None
) -> Callable[[Array | int], Sequence]:
    """The function (a layer's index) -> what the layer must know of sequences at these `positions`."""
    far = rotary_table(model, positions)
    near = None
    if model.rope_theta_local:
        unscaled = dataclasses.replace(
            model, rope_theta=model.rope_theta_local, rope_scaling="none"
        )
        near = rotary_table(unscaled, positions)
    if not model.global_every:
        return lambda index: Sequence(near or far, segments_BT)

    def of(index: Array | int) -> Sequence:
        local = (index + 1) % model.global_every != 0
        rotary = far
        if near is not None and far is not None:
            cos, sin = (jnp.where(local, *both) for both in zip(near, far, strict=True))
            rotary = cos, sin
        return Sequence(rotary, segments_BT, local if model.window else None)

    return of
