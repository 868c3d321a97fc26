"""Attention's messages over context, and how long a device waits for them: bytes and seconds of `parallel.context`.

    strategy     forward                           backward                                   what hides it
    ring         N-1 messages of K and V           as many, and of their float32 cotangents   a step of attention each
    all_gather   K and V gathered                  the same, and their cotangents scattered   nothing
                 (of latent attention the latents, whose cotangents are in the compute dtype)
    ulysses      Q, K, V and the output swapped    their cotangents                           nothing

K and V are those of the tokens of one of the N ranks.
"""

import math
from functools import partial

from meshtrain.cluster.algorithms import ALL_GATHER, ALL_TO_ALL, PERMUTE, REDUCE_SCATTER
from meshtrain.cluster.cluster import Cluster
from meshtrain.config import Config
from meshtrain.config.mesh import CONTEXT
from meshtrain.config.reduce import gathers_at_use
from meshtrain.config.stacks import LINEAR, kind_of
from meshtrain.parallel.placement import MOST_GATHERED, stages
from meshtrain.plan import activations, shapes
from meshtrain.plan.gradient_traffic import FLOAT32, Transfer, layer_waits


def context_transfers(config: Config) -> list[tuple[str, Transfer]]:
    """Collectives over context of a chunk's layers, in one pass.

    Where a layer is computed again, XLA makes what it sends twice of the same
    only once: of a ring the first message, since the others are sent in loops.
    """
    mesh = config.mesh
    parallel = config.parallel
    n = config.mesh.context
    if n == 1:
        return []
    if kind_of(config.model) == LINEAR:
        return _linear_transfers(config)
    size = shapes.itemsize(config.precision.compute)
    tokens = shapes.tokens(config)
    layers = stages(config).longest
    w = activations.widths(config.model, mesh.tensor, parallel.sequence_parallel)
    ids = FLOAT32 * tokens if activations.is_packed(config) else 0
    # of one rank
    pairs = size * tokens * (w.key + w.value)
    sums = FLOAT32 * tokens * (w.key + w.value)
    # They are the same for all layers.
    documents = "forward", Transfer(CONTEXT, ALL_GATHER, "documents' ids gathered", n * ids, 1, n)

    def transfer(
        moment: str, kind: str, what: str, nbytes: float, count: int = 1
    ) -> tuple[str, Transfer]:
        return moment, Transfer(CONTEXT, kind, what, nbytes, count * layers, n)

    if parallel.context_strategy == "ring":
        again = activations.makes_attention_again(config)
        return [
            transfer("forward", PERMUTE, "keys and values sent round", pairs + ids, n - 1),
            transfer(
                "backward",
                PERMUTE,
                "keys and values sent round again",
                pairs + ids,
                n - 1 + again * (n - 2),
            ),
            transfer("backward", PERMUTE, "cotangents of keys and values sent round", sums, n - 1),
        ]
    if activations.gathered_ranks(config) > 1:
        latents = n * size * tokens * (config.model.mla.kv_rank + config.model.mla.rope)
        again = parallel.remat != "none" or gathers_at_use(config) or parallel.sequence_parallel
        return [
            transfer("forward", ALL_GATHER, "latents gathered", latents),
            *[documents] * (ids > 0),
            transfer("backward", ALL_GATHER, "latents gathered again", latents, int(again)),
            transfer("backward", REDUCE_SCATTER, "cotangents of latents scattered", latents),
        ]
    if parallel.context_strategy == "all_gather":
        return [
            transfer("forward", ALL_GATHER, "keys and values gathered", n * pairs),
            *[documents] * (ids > 0),
            transfer("backward", ALL_GATHER, "keys and values gathered again", n * pairs),
            transfer(
                "backward", REDUCE_SCATTER, "cotangents of keys and values scattered", n * sums
            ),
        ]
    repeats = n // math.gcd(n, w.key // config.model.head_dim)
    swapped = size * tokens * (w.query + w.out + repeats * (w.key + w.value))
    again = parallel.remat != "none"
    return [
        transfer("forward", ALL_TO_ALL, "tokens swapped for heads", swapped),
        *[documents] * (ids > 0),
        transfer("backward", ALL_TO_ALL, "tokens swapped for heads again", swapped, again),
        transfer("backward", ALL_TO_ALL, "cotangents swapped", swapped),
    ]


def _linear_transfers(config: Config) -> list[tuple[str, Transfer]]:
    """Collectives of layers of linear attention (`parallel.row_pieces`), whatever the strategy: the last tokens of each
    piece before the convolution, and the maps of the states of all pieces, once for outputs and once for cotangents.
    """
    n = config.mesh.context
    sizes = config.model.linear
    size = shapes.itemsize(config.precision.compute)
    layers = stages(config).longest
    rows = shapes.microbatch_rows(config)
    heads = sizes.value_heads // config.mesh.tensor
    keys = sizes.key_heads // config.mesh.tensor * sizes.key_dim
    reach = rows * (sizes.conv - 1)
    tail = size * reach * (2 * keys + heads * sizes.value_dim)
    ids = FLOAT32 * reach if activations.is_packed(config) else 0
    depth = sizes.key_dim
    maps = FLOAT32 * 2 * rows * heads * depth * (depth + sizes.value_dim)
    # with ulysses every second piece stays where it is
    sent = 1 if config.parallel.context_strategy == "ulysses" else 2

    def transfer(
        moment: str, kind: str, what: str, nbytes: float, count: int
    ) -> tuple[str, Transfer]:
        return moment, Transfer(CONTEXT, kind, what, nbytes, count * layers, n)

    again = config.parallel.remat != "none"
    exchange = partial(transfer, kind=ALL_GATHER, nbytes=n * maps, count=1)
    if n > MOST_GATHERED:
        doublings = math.ceil(math.log2(2 * n))
        exchange = partial(transfer, kind=PERMUTE, nbytes=maps / 2, count=2 * doublings + 1)
    return [
        transfer("forward", PERMUTE, "last tokens of pieces sent on", tail + ids, sent),
        exchange("forward", what="maps of states exchanged"),
        transfer("backward", PERMUTE, "last tokens of pieces sent again", tail + ids, sent * again),
        *[exchange("backward", what="maps of states exchanged again")]
        * activations.makes_attention_again(config),
        exchange("backward", what="maps of cotangents exchanged"),
        transfer("backward", PERMUTE, "cotangents of last tokens sent back", tail, sent),
    ]


def context_seconds(
    config: Config, cluster: Cluster, forward: float, backward: float
) -> tuple[float, float]:
    """(forward, backward) seconds that one layer waits for its messages over context, where its attention takes so
    long.
    """
    n = config.mesh.context
    waits = layer_waits(config, cluster, context_transfers(config))
    if config.parallel.context_strategy != "ring" or cluster.accelerator.platform == "cpu":
        return waits
    # Behind the last step of the forward no message is under way.
    return max(0.0, waits[0] - (n - 1) / n * forward), max(0.0, waits[1] - backward)
