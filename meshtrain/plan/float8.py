"""Changes that matmuls in float8 make to a layer's costs: their rate, the passes that round their operands, the bytes
kept and gathered.

    rounding       read twice, for the scale and for the cast, and written as a byte: 5 bytes of a bfloat16 element
    weights        once a step where they are gathered, for the forward and in the groups of the backward; by a profile
                   in each microbatch
    transposing    cuBLAS sums over the last dimension of both operands alone: a weight forward, both operands of a
                   weight's gradient

A product gains what its width takes of the faster rate, and loses the passes, whose bytes do not depend on it: narrow
ones lose. Blockwise products and experts' have the rate of the compute dtype: XLA has no kernel for the one, nor we for
the others.
"""

import math
from typing import NamedTuple

from meshtrain.cluster.accelerators import Accelerator
from meshtrain.config import Config
from meshtrain.config.reduce import gathers_at_use
from meshtrain.config.schema import FLOAT8_BLOCK
from meshtrain.families import FAMILIES
from meshtrain.parallel.float8 import float8_share, groups_of, is_held, unsharded
from meshtrain.parallel.placement import Placed
from meshtrain.plan import compute, experts, shapes
from meshtrain.plan.by_stack import averaged, held
from meshtrain.plan.compute import (
    DEFAULT_PROFILE,
    FrameworkProfile,
    Seconds,
    head_products,
    trained_share,
)
from meshtrain.plan.shapes import compute_size


class Differences(NamedTuple):
    """Seconds that a layer takes more, forward and backward, on the mean of all layers."""

    forward: Seconds
    backward: Seconds


NONE = Differences(Seconds(), Seconds())


def differences(
    config: Config, device: Accelerator, profile: FrameworkProfile = DEFAULT_PROFILE
) -> Differences:
    """Returns what a microbatch takes more in a layer than with products in the compute dtype."""
    part = float8_share(config)
    dtype = config.precision.compute
    recipe = config.precision.float8_recipe
    if not part:
        return NONE
    model = config.model
    tensor = config.mesh.tensor
    n = shapes.tokens(config)
    size = shapes.itemsize(dtype)
    d = model.d_model
    f = -(-model.d_ff // tensor)
    out = model.heads // tensor * model.value_width
    into = 1 + FAMILIES[model.family].gated
    dots = [
        *head_products(model, tensor),
        (out, d),
        *[(d, f)] * into * (f > 0),
        *[(f, d)] * (f > 0),
    ]
    gain = sum(
        product(device, dtype, recipe, n, *dot)
        - compute.product(device, dtype, n, *dot)
        for dot in dots
    )
    inputs = n * (2 * d + model.mla.q_rank + model.mla.kv_rank + out + f)
    outputs = n * sum(width for _, width in dots)
    weights = sum(a * b for a, b in dots)
    trained = trained_share(config)
    by_weight = 2 * size + 1
    turns = (recipe == "rowwise") * 3.0
    if rounds_once(config, profile):
        by_weight = 0
        turns *= 1 - trained  # frozen ones are left as their state has them
    rounds = profile.cast_bytes or 2 * size + 1
    transposed = (recipe != "blockwise") * profile.transposed_bytes
    forward: float = rounds * inputs + (by_weight + transposed) * weights
    backward: float = rounds * outputs + (by_weight + turns) * weights
    if in_float8 := config.precision.float8_wgrad == "float8":
        # over tokens they are other groups, but where there is one
        backward += trained * (recipe != "tensorwise") * (3 * inputs + rounds * outputs)
        backward += trained * transposed * (inputs + outputs)
    of_experts = _expert_bytes(config, part, profile)
    return Differences(
        Seconds(
            part * gain, 0.0, (part * forward + of_experts[0]) / device.memory_rate
        ),
        Seconds(
            part * gain * (1 + trained * in_float8),
            0.0,
            (part * backward + of_experts[1]) / device.memory_rate,
        ),
    )


def product(
    device: Accelerator, dtype: str, recipe: str, m: float, k: float, n: float
) -> float:
    """Returns the seconds of a product of rounded operands.

    The largest reach the share of the peak that 16-bit ones do; what a short side costs is time, not a share of the
    rate, and at twice the rate twice the share.
    """
    if recipe == "blockwise" or not device.peak.float8:
        return compute.product(device, dtype, m, k, n)
    efficiency = device.efficiency
    flops = device.peak.float8 * 1e12
    slowed = 1 + efficiency.half_size * flops / device.flops(dtype) * (
        1 / m + 1 / k + 1 / n
    )
    worked = 2 * m * k * n / (flops * efficiency.matmul) * slowed
    return max(
        worked, (m * k + k * n + shapes.itemsize(dtype) * m * n) / device.memory_rate
    )


def rounds_once(config: Config, profile: FrameworkProfile = DEFAULT_PROFILE) -> bool:
    """Returns whether weights are rounded once a step: shards that are gathered at use only if they go in float8."""
    return profile.rounds_weights_once and (
        config.precision.float8_gather or not gathers_at_use(config)
    )


def _once(config: Config) -> list[Placed]:
    """Returns a layer's weights that our program rounds once a step."""
    precision = config.precision
    at_use = gathers_at_use(config)
    if precision.matmul != "float8" or not rounds_once(config):
        return []
    if at_use and not float8_share(config):
        return []
    return [
        p
        for p in shapes.layer_weights(config)
        if not is_held(config, p)
        and groups_of(p if at_use else unsharded(p), precision.float8_recipe)
    ]


@averaged
def held_once(config: Config) -> tuple[float, float]:
    """Returns the bytes of a layer's weights that a step has in float8 on one device, of shards where they are gathered
    at use; and the elements of trained ones that it does not have in the compute dtype for that.
    """
    recipe = config.precision.float8_recipe
    at_use = gathers_at_use(config)
    nbytes = 0.0
    elements = 0.0
    for weight in _once(config):
        forms = {
            groups_of(unsharded(weight), recipe, turned) for turned in (False, True)
        }
        size = weight.on_rank() if at_use else weight.on_device()
        scales = _scales(config, weight, weight.zero_degree if at_use else 1)
        nbytes += len(forms) * (size + 4 * scales)
        # shards are read by layers that are skipped
        share = float8_share(config)
        elements += weight.trained * size * (share == 1 if at_use else share)
    return nbytes, elements


@averaged
def once_bytes(config: Config) -> float:
    """Returns the bytes that rounding a layer's weights once a step moves on one device."""
    size = compute_size(config)
    turns = 3 * (config.precision.float8_recipe == "rowwise")
    at_use = gathers_at_use(config)
    return sum(
        (2 * size + 1) * p.on_rank()
        + turns * (p.on_rank() if at_use else p.on_device())
        for p in _once(config)
    )


def _expert_bytes(
    config: Config, part: float, profile: FrameworkProfile = DEFAULT_PROFILE
) -> tuple[float, float]:
    """Bytes that rounding experts' slots and weights moves, forward and backward: read for the scale and for the cast,
    and written as they are multiplied, in the compute dtype; to be kept, as a byte. Weights that were rounded before
    are read as bytes, and written.
    """
    model = config.model
    trained = trained_share(config)
    if not model.moe.experts:
        return 0.0, 0.0
    used = experts.rows(config).here
    d = model.d_model
    f = experts.width(config)
    weights = 3 * d * f * model.moe.experts / config.mesh.expert
    size = compute_size(config)
    inputs = used * (d + f)
    outputs = used * (2 * f + d)
    in_float8 = trained * (config.precision.float8_wgrad == "float8")
    turned = config.precision.float8_recipe == "rowwise"
    of_weight = 1 + size if rounds_once(config, profile) else 3 * size
    if rounds_once(config, profile):
        turned = True
    backward = (
        3 * size * (outputs + in_float8 * (inputs + outputs))
        + of_weight * turned * weights
        + trained * (1 + size) * inputs
    )
    return part * ((3 * size + 1) * inputs + of_weight * weights), part * backward


def kept_size(config: Config) -> float:
    """Returns the bytes that the backward keeps of an element which a product takes, on the mean of all layers."""
    size = compute_size(config)
    return size - float8_share(config) * (size - 1)


def entering_size(config: Config) -> float:
    """Returns the bytes of an element that sequence parallelism gathers for products, those of scales among them."""
    precision = config.precision
    if not precision.float8_gather:
        return shapes.itemsize(precision.compute)
    scales = {
        "rowwise": 4 / config.model.d_model,
        "tensorwise": 0.0,
        "blockwise": 4 / FLOAT8_BLOCK,
    }
    return kept_size(config) + float8_share(config) * scales.get(
        precision.float8_recipe, 0.0
    )


@averaged
def weight_size(config: Config) -> float:
    """Returns the bytes of an element of a layer's weights that is gathered, on the mean of all."""
    size = compute_size(config)
    precision = config.precision
    share = float8_share(config)
    # what is frozen is whole everywhere but in stage 3
    gathered = [
        p
        for p in shapes.layer_weights(config)
        if p.trained or config.parallel.zero_stage == 3
    ]
    if not gathered:
        return size
    saved = (size - 1.0) * sum(p.on_rank() for p in gathered if is_held(config, p))
    if precision.float8_gather and share:
        # where some layers are skipped, resident weights of these are gathered beside all bytes
        less = share * (size - 1.0) if gathers_at_use(config) else share * size - 1.0
        rounded = [
            p
            for p in _once(config)
            if p in gathered and groups_of(p, precision.float8_recipe) is not None
        ]
        saved += less * sum(p.on_rank() for p in rounded)
    return size - saved / sum(p.on_rank() for p in gathered)


@held
def saved(config: Config) -> tuple[float, float]:
    """Returns the bytes that a layer's frozen weights take less on one device where a state has them in float8:
    gathered, and as they are held.
    """
    less = compute_size(config) - 1
    gathered = 0.0
    held = 0.0
    for weight in (
        shapes.layer_weights(config) if config.precision.matmul == "float8" else ()
    ):
        if is_held(config, weight):
            gathered += less * weight.on_device() - 4 * _scales(config, weight, 1)
            held += less * weight.on_rank() - 4 * _scales(
                config, weight, weight.zero_degree
            )
    return gathered, held


def _scales(config: Config, weight: Placed, ranks: int) -> int:
    """Scales of a layer's weight on one device, where its numbers are spread over `ranks`."""
    groups = groups_of(unsharded(weight), config.precision.float8_recipe) or ()
    sides = [
        n // ways // (ranks if d == weight.zero_dim else 1)
        for d, (n, ways) in enumerate(zip(weight.padded, weight.ways, strict=True))
    ]
    return math.prod(
        -(-n // group) if group else 1
        for n, group in zip(sides[1:], groups, strict=True)
    )
