"""What islands keep of their own between steps, and how it lies: an axis of islands in front of everything.

Without `parallel.sync` a state has none of it.

    leaf                          whole shape            on a device                   memory
    params (the shared model)     [...]                  its shard, on every island    1 x float32
    islands.params                [islands, ...]         its island's shard            1 x
    islands.momentum              [...]                  as params                     1 x, none at outer_momentum 0
    islands.under_way             [...]                  as params                     1 x, none at delay 0
    optimizer, scale              [islands, ...]         its island's shard            as without islands of their own
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from meshtrain.config import Config
from meshtrain.mesh import ISLAND

Tree = Any


class Islands(NamedTuple):
    """The field `islands` of a `State`; trees of float32 as that of the weights, None where one is frozen."""

    params: Tree  # each island's own weights
    momentum: Tree  # of the outer step
    under_way: Tree  # mean pseudo-gradients that are sent and not yet followed


def stacked(tree: Tree, islands: int) -> Tree:
    """ShapeDtypeStructs with the axis of islands in front of those given."""

    def stack(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        assert isinstance(x.sharding, NamedSharding)
        sharding = x.sharding.update(spec=PartitionSpec(ISLAND, *x.sharding.spec))
        return jax.ShapeDtypeStruct((islands, *x.shape), x.dtype, sharding=sharding)

    return jax.tree.map(stack, tree)


def shapes(config: Config, trained: Tree) -> Islands:
    """ShapeDtypeStructs of what islands keep, from those of the trained weights."""
    sync = config.parallel.sync
    return Islands(
        params=stacked(trained, config.mesh.islands),
        momentum=trained if sync.outer_momentum else None,
        under_way=trained if sync.delay else None,
    )


def every_island(tree: Tree, islands: int) -> Tree:
    """The same for each island, inside jit."""
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (islands, *x.shape)), tree)


def begun(config: Config, trained: Tree) -> Islands:
    """What islands keep before the first step, inside jit: each has the shared model, and nothing has moved."""
    sync = config.parallel.sync
    zeros = jax.tree.map(jnp.zeros_like, trained)
    own = every_island(trained, config.mesh.islands)
    return Islands(own, zeros if sync.outer_momentum else None, zeros if sync.delay else None)


def visible(metrics: Mapping[str, jax.Array | float]) -> dict[str, float]:
    """Metrics as this process sees them: of what each island has, the mean over the islands on its devices where it is finite."""
    own = {name: x for name, x in metrics.items() if isinstance(x, jax.Array) and x.ndim}
    alike = jax.device_get({name: x for name, x in metrics.items() if name not in own})
    return {name: _mean(own[name]) if name in own else float(alike[name]) for name in metrics}


def _mean(metric: jax.Array) -> float:
    by_island = {shard.index[0].start or 0: np.asarray(shard.data) for shard in metric.addressable_shards}
    numbers = np.concatenate(list(by_island.values()))
    finite = numbers[np.isfinite(numbers)]
    return float(finite.mean()) if finite.size else math.nan
