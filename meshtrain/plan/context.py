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
from meshtrain.plan.gradient_traffic import FLOAT32, Moment, Transfer, layer_waits


def context_transfers(config: Config) -> list[Moment]:
    """Collectives over context of a chunk's layers, in one pass."""
    if config.mesh.context == 1:
        return []
    if kind_of(config.model) == LINEAR:
        return _linear_transfers(config)
    if config.parallel.context_strategy == "ring":
        return _ring_transfers(config)
    if activations.gathered_ranks(config) > 1:
        return _latent_transfers(config)
    if config.parallel.context_strategy == "all_gather":
        return _gather_transfers(config)
    return _swap_transfers(config)


def _transfer(
    config: Config, moment: str, kind: str, what: str, nbytes: float, count: int = 1
) -> Moment:
    """Returns a collective over context that each layer has `count` times."""
    count *= stages(config).longest
    return moment, Transfer(CONTEXT, kind, what, nbytes, count, config.mesh.context)


def _document_transfers(config: Config) -> list[Moment]:
    """Returns the gather of documents' ids, which are the same for all layers; nothing where rows are not packed."""
    if not activations.is_packed(config):
        return []
    n = config.mesh.context
    nbytes = n * FLOAT32 * shapes.tokens(config)
    return [("forward", Transfer(CONTEXT, ALL_GATHER, "documents' ids gathered", nbytes, 1, n))]


def _key_value_elements(config: Config) -> int:
    """Returns the elements of keys and values of one rank's tokens."""
    w = _widths(config)
    return shapes.tokens(config) * (w.key + w.value)


def _widths(config: Config) -> activations.Widths:
    parallel = config.parallel
    return activations.widths(config.model, config.mesh.tensor, parallel.sequence_parallel)


def _ring_transfers(config: Config) -> list[Moment]:
    """Returns the messages of a ring; XLA makes the first one only once where a layer is computed again."""
    n = config.mesh.context
    transfer = partial(_transfer, config, kind=PERMUTE)
    elements = _key_value_elements(config)
    pairs = shapes.itemsize(config.precision.compute) * elements
    if activations.is_packed(config):
        pairs += FLOAT32 * shapes.tokens(config)
    sent_again = n - 1 + activations.makes_attention_again(config) * (n - 2)
    return [
        transfer("forward", what="keys and values sent round", nbytes=pairs, count=n - 1),
        transfer(
            "backward", what="keys and values sent round again", nbytes=pairs, count=sent_again
        ),
        transfer(
            "backward",
            what="cotangents of keys and values sent round",
            nbytes=FLOAT32 * elements,
            count=n - 1,
        ),
    ]


def _latent_transfers(config: Config) -> list[Moment]:
    transfer = partial(_transfer, config)
    mla = config.model.mla
    parallel = config.parallel
    size = shapes.itemsize(config.precision.compute)
    latents = config.mesh.context * size * shapes.tokens(config) * (mla.kv_rank + mla.rope)
    again = parallel.remat != "none" or gathers_at_use(config) or parallel.sequence_parallel
    return [
        transfer("forward", ALL_GATHER, "latents gathered", latents),
        *_document_transfers(config),
        transfer("backward", ALL_GATHER, "latents gathered again", latents, int(again)),
        transfer("backward", REDUCE_SCATTER, "cotangents of latents scattered", latents),
    ]


def _gather_transfers(config: Config) -> list[Moment]:
    transfer = partial(_transfer, config)
    elements = config.mesh.context * _key_value_elements(config)
    pairs = shapes.itemsize(config.precision.compute) * elements
    scattered = "cotangents of keys and values scattered"
    return [
        transfer("forward", ALL_GATHER, "keys and values gathered", pairs),
        *_document_transfers(config),
        transfer("backward", ALL_GATHER, "keys and values gathered again", pairs),
        transfer("backward", REDUCE_SCATTER, scattered, FLOAT32 * elements),
    ]


def _swap_transfers(config: Config) -> list[Moment]:
    n = config.mesh.context
    transfer = partial(_transfer, config, kind=ALL_TO_ALL)
    w = _widths(config)
    repeats = n // math.gcd(n, w.key // config.model.head_dim)
    elements = shapes.tokens(config) * (w.query + w.out + repeats * (w.key + w.value))
    swapped = shapes.itemsize(config.precision.compute) * elements
    again = config.parallel.remat != "none"
    return [
        transfer("forward", what="tokens swapped for heads", nbytes=swapped),
        *_document_transfers(config),
        transfer("backward", what="tokens swapped for heads again", nbytes=swapped, count=again),
        transfer("backward", what="cotangents swapped", nbytes=swapped),
    ]


def _linear_transfers(config: Config) -> list[Moment]:
    """Collectives of layers of linear attention (`parallel.row_pieces`), whatever the strategy: the last tokens of each
    piece before the convolution, and the maps of the states of all pieces, once for outputs and once for cotangents.
    """
    n = config.mesh.context
    sizes = config.model.linear
    size = shapes.itemsize(config.precision.compute)
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
    transfer = partial(_transfer, config)
    again = config.parallel.remat != "none"
    exchange = partial(transfer, kind=ALL_GATHER, nbytes=n * maps)
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
