"""What the backward pass recomputes (activation checkpointing, Chen et al. 2016): parallel.remat as policies of jax.checkpoint.

    none     nothing                          weights gathered at use (ZeRO-3) all the same
    dots     all but products with weights    attention too
    names    all but parallel.remat_keep, which stays on the device, and parallel.remat_offload, which waits on the host
    full     all of a layer; under a pipeline all of a stage's chunk at once, see `pipeline.stage`

The names are given where the values are made, in `model.layers` and `model.attention`; `config.check.ACTIVATIONS` lists them.
"""

from collections.abc import Callable
from typing import Any

import jax

from meshtrain.config.schema import ParallelConfig
from meshtrain.mesh import DATA
from meshtrain.parallel.offload import HOST


def checkpointed(layer: Callable, parallel: ParallelConfig, remat: str, gathers_at_use: bool) -> Callable:
    """`layer` under the policy of `remat`; weights gathered at use are never among what is kept for the backward."""
    if remat == "none":
        return jax.checkpoint(layer, policy=_all_but_gathered) if gathers_at_use else layer
    return jax.checkpoint(layer, policy=_policy(parallel))


def _policy(parallel: ParallelConfig) -> Callable | None:
    policies = jax.checkpoint_policies
    if parallel.remat == "dots":
        # Products with weights; attention's have batch dimensions.
        return policies.dots_with_no_batch_dims_saveable
    if parallel.remat == "names":
        return policies.save_and_offload_only_these_names(
            names_which_can_be_saved=list(parallel.remat_keep),
            names_which_can_be_offloaded=list(parallel.remat_offload),
            offload_src="device",
            offload_dst=HOST,
        )
    return None


def _all_but_gathered(primitive: Any, *_: Any, **parameters: Any) -> bool:
    """Keeps everything, but gathers weights again. Nor keeps a slice, such as takes the padding off: it is a copy."""
    over_data = primitive.name == "all_gather" and DATA in parameters["axis_name"]
    return not over_data and primitive.name != "slice"
