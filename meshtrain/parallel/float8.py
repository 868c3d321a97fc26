"""The weights that may be in float8 on a mesh, and which of their numbers share a scale, without JAX.

The scales of a frozen weight are those of all of it, on every mesh; of a trained one that splits over tensor each rank
has its own. `float8_storage` makes the arrays.
"""

from dataclasses import replace

from meshtrain.config import Config
from meshtrain.config.model import LATENT_PROJECTIONS, PROJECTIONS
from meshtrain.config.schema import FLOAT8_BLOCK
from meshtrain.parallel.placement import Placed, stages

MODULES = ("attention", "mlp", "experts")


def float8_share(config: Config) -> float:
    """Returns the share of a device's layers whose products are in float8.

    Where one stage has a layer that is skipped, and another has not, both multiply rounded operands in the compute
    dtype.
    """
    precision = config.precision
    layers = stages(config).longest
    skipped = sum(min(n, layers) for n in precision.float8_skip)
    return max(0, layers - skipped) / layers if precision.matmul == "float8" else 0.0


def notes(config: Config) -> list[str]:
    """Returns a sentence where no product is in float8 though it is asked for."""
    if config.precision.matmul != "float8" or float8_share(config):
        return []
    return [
        f"precision.float8_skip {list(config.precision.float8_skip)} leaves no product in float8 where a chunk has "
        f"{stages(config).longest} layers: what is rounded is multiplied in the compute dtype; give [0, 0], or "
        "fewer parallel.virtual_stages."
    ]


def groups_of(
    weight: Placed, recipe: str, turned: bool = False
) -> tuple[int, ...] | None:
    """Returns how many numbers along each dimension of a layer's weight share a scale in float8, 0: all; `turned`: for
    the backward, which sums over the outputs.

    None for a weight that no product takes, and where shards or heads would tear blocks of 128 apart. Each expert has
    scales of its own.
    """
    *parents, name = weight.name.split(".")
    if (
        not weight.stacked
        or parents[-1] not in MODULES
        or name not in (*PROJECTIONS, *LATENT_PROJECTIONS)
    ):
        return None
    each = 1 + (weight.axes[1] == "experts")
    lead = (1,) * (each - 1)
    sizes = weight.whole[each:]
    # the inputs are the first dimension, but for what gathers the heads
    cut = len(sizes) - 1 if weight.axes[-1] == "embed" else 1
    if recipe != "blockwise":
        sides = (0, 1 if recipe == "rowwise" else 0)
        inputs, outputs = sides[::-1] if turned else sides
        return (*lead, *(inputs for _ in sizes[:cut]), *(outputs for _ in sizes[cut:]))
    groups = (
        *lead,
        *(size for side in (sizes[:cut], sizes[cut:]) for size in _block_sizes(side)),
    )
    if 0 in groups or weight.padded != weight.whole:
        return None
    degree = [
        n * (weight.zero_degree if d == weight.zero_dim else 1)
        for d, n in enumerate(weight.ways)
    ][1:]
    shards = [n // by for n, by in zip(weight.padded[1:], degree, strict=True)]
    # the last block of all may be shorter
    torn = any(
        n % size and (by > 1 or size < FLOAT8_BLOCK)
        for n, by, size in zip(shards, degree, groups, strict=True)
    )
    return None if torn else groups


def unsharded(weight: Placed) -> Placed:
    """Returns a weight as ZeRO's ranks have it after a gather."""
    return replace(weight, zero_dim=None, padded=weight.whole)


def _block_sizes(side: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the sizes of blocks of 128 numbers, of dimensions that count as one; 0: there are none."""
    *outer, inner = side
    if not outer or inner % FLOAT8_BLOCK == 0:
        return (1,) * len(outer) + (FLOAT8_BLOCK,)
    return (FLOAT8_BLOCK // inner, inner) if FLOAT8_BLOCK % inner == 0 else (0, 0)


def is_held(config: Config, weight: Placed) -> bool:
    """Returns whether a state has a frozen weight in float8."""
    precision = config.precision
    asked = (
        precision.matmul == "float8" and precision.float8_frozen and not weight.trained
    )
    return asked and groups_of(weight, precision.float8_recipe) is not None
