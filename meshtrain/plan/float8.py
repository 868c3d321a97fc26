"""What products in float8 change of a layer's costs: their rate, the passes that round their operands, bytes that are kept and gathered.

    rounding       read twice, for the scale and for the cast, and written as a byte: 5 bytes of a bfloat16 element
    transposing    cuBLAS sums over the last dimension of both operands alone: a weight forward, both operands of a weight's gradient

A product gains what its width takes of the faster rate, and loses the passes, whose bytes do not depend on it: narrow ones lose.
Blockwise products have the rate of the compute dtype, as XLA has no kernel for them.
"""

from typing import NamedTuple

from meshtrain.cluster.accelerators import Accelerator
from meshtrain.config import Config
from meshtrain.config.reduce import gathers_at_use
from meshtrain.families import FAMILIES
from meshtrain.parallel.placement import float8_share, local_kv_heads
from meshtrain.plan import shapes
from meshtrain.plan.compute import Seconds, product, trained_share

TRANSPOSED = 2  # bytes of an element


class Differences(NamedTuple):
    """Seconds that a layer takes more, forward and backward, on the mean of all layers."""

    forward: Seconds
    backward: Seconds


NONE = Differences(Seconds(), Seconds())


def differences(config: Config, device: Accelerator) -> Differences:
    """Returns what a microbatch takes more in a layer than with products in the compute dtype."""
    part, dtype, recipe = float8_share(config), config.precision.compute, config.precision.float8_recipe
    if not part:
        return NONE
    model, tensor, n, size = config.model, config.mesh.tensor, shapes.tokens(config), shapes.itemsize(dtype)
    d, f, k = model.d_model, -(-model.d_ff // tensor), model.head_dim
    heads, groups, into = (
        model.heads // tensor,
        local_kv_heads(model.kv_heads, tensor),
        1 + FAMILIES[model.family].gated,
    )
    dots = [(d, heads * k), (d, 2 * groups * k), (heads * k, d), *[(d, f)] * into * (f > 0), *[(f, d)] * (f > 0)]
    gain = sum(_product(device, dtype, recipe, n, *dot) - product(device, dtype, n, *dot) for dot in dots)
    inputs, outputs = n * (2 * d + heads * k + f), n * sum(width for _, width in dots)
    weights, rounds = sum(a * b for a, b in dots), 2 * size + 1
    in_hardware = recipe != "blockwise"
    forward: float = rounds * (inputs + weights) + in_hardware * TRANSPOSED * weights
    backward: float = rounds * (outputs + weights) + (recipe == "rowwise") * 3 * weights
    trained = trained_share(config)
    if in_float8 := config.precision.float8_wgrad == "float8":
        # over tokens they are other groups, but where there is one
        backward += trained * (recipe != "tensorwise") * (3 * inputs + rounds * outputs)
        backward += trained * in_hardware * TRANSPOSED * (inputs + outputs)
    return Differences(
        Seconds(part * gain, 0.0, part * forward / device.memory_rate),
        Seconds(part * gain * (1 + trained * in_float8), 0.0, part * backward / device.memory_rate),
    )


def _product(device: Accelerator, dtype: str, recipe: str, m: float, k: float, n: float) -> float:
    """Seconds of a product of rounded operands. The largest reach the share of the peak that 16-bit ones do; what a short side costs is
    time, not a share of the rate, and at twice the rate twice the share.
    """
    if recipe == "blockwise" or not device.peak.float8:
        return product(device, dtype, m, k, n)
    efficiency, flops = device.efficiency, device.peak.float8 * 1e12
    slowed = 1 + efficiency.half_size * flops / device.flops(dtype) * (1 / m + 1 / k + 1 / n)
    compute = 2 * m * k * n / (flops * efficiency.matmul) * slowed
    return max(compute, (m * k + k * n + shapes.itemsize(dtype) * m * n) / device.memory_rate)


def kept_size(config: Config) -> float:
    """Returns the bytes that the backward keeps of an element which a product takes, on the mean of all layers."""
    size = shapes.itemsize(config.precision.compute)
    return size - float8_share(config) * (size - 1)


def kept_shards(config: Config) -> float:
    """Returns the bytes of a layer's own shards that are kept as they are gathered, to be gathered again."""
    gathers = (
        config.precision.float8_gather and config.precision.float8_recipe != "blockwise" and gathers_at_use(config)
    )
    return float8_share(config) * shapes.resident(config).block.shard if gathers else 0.0


def entering_size(config: Config) -> float:
    """Returns the bytes of an element that sequence parallelism gathers for products, those of scales among them."""
    precision = config.precision
    scales = {"rowwise": 4 / config.model.d_model, "tensorwise": 0.0, "blockwise": 4 / 128}.get(
        precision.float8_recipe, 0.0
    )
    return (
        kept_size(config) + float8_share(config) * scales
        if precision.float8_gather
        else shapes.itemsize(precision.compute)
    )


def weight_size(config: Config) -> float:
    """Returns the bytes of an element of a layer's weights that is gathered where it is used."""
    whole = config.precision.float8_recipe != "blockwise"
    return kept_size(config) if whole and config.precision.float8_gather else shapes.itemsize(config.precision.compute)
