"""Recomputation in the backward pass (activation checkpointing, Chen et al. 2016): parallel.remat as policies of
jax.checkpoint.

    none        nothing; but what was gathered is gathered again: weights at use (ZeRO-3), and with sequence parallelism
                the inputs of products (Korthikanti et al. 2022, section 4.2.2)
    selective   what takes neither a product with a weight nor attention's kernel: norms, the MLP's activation,
                dropout's masks; and of an attention hook its inner part, scores and softmax (section 5 there; built-in
                ones keep none)
    dots        all but products with weights: attention too
    names       all but parallel.remat_keep, which stays on the device, and parallel.remat_offload, which waits on the
                host
    full        all of a layer

The names are given where the values are made, in `model.layers` and `model.attention`; `config.schema.ACTIVATIONS`
lists them.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from meshtrain.config.schema import ParallelConfig
from meshtrain.parallel.offload import HOST

FLOAT8 = (jnp.float8_e4m3fn, jnp.float8_e5m2)


def checkpointed(
    layer: Callable,
    parallel: ParallelConfig,
    gathers: bool,
    rank: int = 0,
    looped: bool = True,
) -> Callable:
    """`layer` under the policy of `parallel.remat`; `gathers`: it gathers weights or activations, which are never among
    what is kept; `rank`: of its adapters, 0 without; `looped`: it is called in a loop over layers.
    """
    if parallel.remat == "none" and not gathers:
        return layer
    policy: Callable | None = _all_but_gathered
    if parallel.remat != "none":
        policy = _policy(parallel, rank)
    # In a loop nothing that XLA could merge stands beside it: the loop lies between what is computed and what is
    # computed again.
    return jax.checkpoint(layer, policy=policy, prevent_cse=not looped)


def _policy(parallel: ParallelConfig, rank: int) -> Callable | None:
    policies = jax.checkpoint_policies
    if parallel.remat == "dots":
        # Products with weights; attention's have batch dimensions.
        if rank:
            return partial(_products, rank)
        return policies.dots_with_no_batch_dims_saveable
    if parallel.remat in ("names", "selective"):
        return policies.save_and_offload_only_these_names(
            names_which_can_be_saved=list(parallel.names_kept),
            names_which_can_be_offloaded=list(parallel.remat_offload),
            offload_src="device",
            offload_dst=HOST,
        )
    return None


def _products(rank: int, primitive: Any, *avals: Any, **params: Any) -> bool:
    """Products with weights, but for those with LoRA's B: as wide as what they are added to, they are soon made of x A
    again.
    """
    if not jax.checkpoint_policies.dots_with_no_batch_dims_saveable(
        primitive, *avals, **params
    ):
        return False
    (over, _), _ = params["dimension_numbers"]
    return [avals[0].shape[d] for d in over] != [rank]


def _all_but_gathered(primitive: Any, *_: Any, **params: Any) -> bool:
    """Keeps everything, but gathers again.

    Nor keeps another view of what was gathered: it would be a copy. For float8 it keeps the bytes."""
    return (
        primitive.name not in ("all_gather", "slice", "reshape")
        and params.get("new_dtype") not in FLOAT8
    )
