"""Weights in float8 on a mesh: which are held so, which numbers of them share a scale, and how they are gathered.

    frozen     the state has them rounded, as bytes and scales: half the bytes of bfloat16 (`precision.float8_frozen`)
    trained    their float32 masters are rounded at each use; with ZeRO-3 before they are gathered (`precision.float8_gather`)

Either way a product has what it would round the whole weight to by itself. The scales of a frozen one are those of all
of it, on every mesh; of a trained one that splits over tensor each rank has its own. No JAX but where arrays are made,
as the planner asks for the groups.
"""

from typing import TYPE_CHECKING, Any

from meshtrain.config import Config
from meshtrain.config.model import PROJECTIONS
from meshtrain.config.schema import FLOAT8_BLOCK
from meshtrain.parallel.placement import Placed, stages

if TYPE_CHECKING:
    import jax

    from meshtrain.model.float8 import Rounded
    from meshtrain.parallel.layout import Layout
    from meshtrain.parallel.zero import Weights, Zero

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
    if float8_share(config):
        return []
    return [
        f"precision.float8_skip {list(config.precision.float8_skip)} leaves no product in float8 where a chunk has "
        f"{stages(config).longest} layers: "
        "what is rounded is multiplied in the compute dtype; give [0, 0], or fewer parallel.virtual_stages."
    ]


def groups_of(weight: Placed, recipe: str) -> tuple[int, ...] | None:
    """Returns how many numbers along each dimension of a layer's weight share a scale in float8, 0: all.

    None for a weight that no product takes, and where shards or heads would tear blocks of 128 apart. Each expert has
    scales of its own.
    """
    *parents, name = weight.name.split(".")
    if parents[-1] not in MODULES or name not in PROJECTIONS:
        return None
    each = 1 + (weight.axes[1] == "experts")
    lead = (1,) * (each - 1)
    sizes = weight.whole[each:]
    # the inputs are the first dimension, but for what gathers the heads
    cut = len(sizes) - 1 if weight.axes[-1] == "embed" else 1
    if recipe != "blockwise":
        outputs = 1 if recipe == "rowwise" else 0
        return (*lead, *(0 for _ in sizes[:cut]), *(outputs for _ in sizes[cut:]))
    groups = (*lead, *(size for side in (sizes[:cut], sizes[cut:]) for size in _in_blocks(side)))
    if 0 in groups or weight.padded != weight.whole:
        return None
    degree = [
        n * (weight.zero_degree if d == weight.zero_dim else 1) for d, n in enumerate(weight.ways)
    ][1:]
    shards = [n // by for n, by in zip(weight.padded[1:], degree, strict=True)]
    # the last block of all may be shorter
    torn = any(
        n % size and (by > 1 or size < FLOAT8_BLOCK)
        for n, by, size in zip(shards, degree, groups, strict=True)
    )
    return None if torn else groups


def _in_blocks(side: tuple[int, ...]) -> tuple[int, ...]:
    """Blocks of 128 numbers of dimensions that count as one; 0: there are none."""
    *outer, inner = side
    if not outer or inner % FLOAT8_BLOCK == 0:
        return (1,) * len(outer) + (FLOAT8_BLOCK,)
    return (FLOAT8_BLOCK // inner, inner) if FLOAT8_BLOCK % inner == 0 else (0, 0)


def is_held(config: Config, weight: Placed) -> bool:
    """Returns whether a state has a frozen weight in float8."""
    precision = config.precision
    asked = precision.matmul == "float8" and precision.float8_frozen and not weight.trained
    return asked and groups_of(weight, precision.float8_recipe) is not None


def rounded_weight(config: Config, weight: Placed, x: "jax.Array") -> "Rounded":
    """Rounds a live weight, its layers stacked, as a state has it."""
    from meshtrain.model.float8 import rounded

    groups = groups_of(weight, config.precision.float8_recipe)
    assert groups is not None
    return rounded(x, (1, *groups)).packed()


def stored(layout: "Layout", weight: Placed, x: "jax.Array") -> "Rounded":
    """Rounds a live weight, its layers stacked, onto the shardings that a state has."""
    import jax

    shardings = jax.tree.map(lambda s: s.sharding, layout.master(weight))
    return jax.jit(lambda x: rounded_weight(layout.config, weight, x), out_shardings=shardings)(x)


def shapes(config: Config, weight: Placed, array: "jax.ShapeDtypeStruct") -> "Rounded":
    """Returns the ShapeDtypeStructs of what a state has of a live weight: where numbers share a scale it is split as
    they are.
    """
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    q = jax.eval_shape(lambda x: rounded_weight(config, weight, x), array)
    mesh = array.sharding.mesh
    split = zip(weight.shard_over, q.scale.shape, strict=True)
    of_scale = NamedSharding(
        mesh, PartitionSpec(*(axes if axes and n > 1 else None for axes, n in split))
    )
    values, scale = (
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        for x, sharding in zip(q, (array.sharding, of_scale), strict=True)
    )
    return q._replace(values=values, scale=scale)


def gathered(config: Config, weight: Placed, q: "Rounded") -> "Rounded":
    """Gathers a weight's shards; a scale that is that of all shards they have already."""
    from meshtrain.parallel.zero import gather

    groups = groups_of(weight, config.precision.float8_recipe)
    split = weight.zero_dim is not None and groups is not None and groups[weight.zero_dim - 1] > 0
    return q._replace(
        values=gather(weight, q.values), scale=gather(weight, q.scale) if split else q.scale
    )


def use_float8(
    block: Any, zero: "Zero", weights: "Weights", products: str, index: "jax.Array"
) -> None:
    """Has the modules of layer `index` multiply in float8, as the `products` of its segment say, by the weights that
    are there in it.
    """
    from jax import lax

    from meshtrain.model.float8 import Float8Products, Float8Recipe, rounded

    layout = zero.layout
    precision = zero.layout.config.precision
    first, last = precision.float8_skip
    skip = (
        (index < first) | (index >= layout.config.model.layers - last)
        if products == "either"
        else None
    )
    how = Float8Recipe(precision.float8_recipe, precision.float8_wgrad == "float8", products)
    gathers = products == "float8" and precision.float8_gather and zero.gathers_at_use

    def in_float8(weight: Placed, shard: Any) -> "Rounded | None":
        if layout.in_float8(weight):
            return zero.gathered(weight, shard) if zero.gathers_at_use else shard
        if not gathers or (groups := groups_of(weight, how.recipe)) is None:
            return None
        shared = weight.zero_dim is not None and not groups[weight.zero_dim - 1]
        q = rounded(lax.stop_gradient(shard), groups, over=weight.zero_axes if shared else ())
        return gathered(layout.config, weight, q.packed())

    for name, placed in layout.weights["blocks"].items():
        if name not in MODULES or (module := getattr(block, name)) is None:
            continue
        trained, frozen = (tree.get(name) or {} for tree in weights)
        shards = {**frozen, **{key: shard for key, shard in trained.items() if shard is not None}}
        of_products = (
            (key, shard) for key, shard in shards.items() if not isinstance(shard, dict)
        )  # no norms
        there = {
            key: q for key, shard in of_products if (q := in_float8(placed[key], shard)) is not None
        }
        if there or products != "compute":
            module.float8 = Float8Products(how, skip, there, precision.float8_gather)
