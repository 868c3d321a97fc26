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
from typing import NamedTuple

from meshtrain.cluster.algorithms import ALL_GATHER, ALL_TO_ALL, PERMUTE, REDUCE_SCATTER
from meshtrain.cluster.cluster import Cluster
from meshtrain.config import Config
from meshtrain.config.mesh import CONTEXT
from meshtrain.config.reduce import gathers_at_use
from meshtrain.config.stacks import LINEAR, kind_of
from meshtrain.parallel.placement import MOST_GATHERED, stages
from meshtrain.plan import activations, shapes
from meshtrain.plan.gradient_traffic import FLOAT32, Moment, Transfer, layer_waits


class ContextExchange(NamedTuple):
    """A layer's messages over context: of what attention takes, and of its cotangents."""

    what: str
    kind: str
    nbytes: float
    cotangents: str
    back: str  # their kind
    returned: float  # their bytes
    again: int  # how often the backward sends again what attention takes
    messages: int = 1


def context_transfers(config: Config) -> list[Moment]:
    """Collectives over context of a chunk's layers, in one pass."""
    if config.mesh.context == 1:
        return []
    if kind_of(config.model) == LINEAR:
        return _linear_transfers(config)
    sent = _exchange(config)
    transfer = partial(_transfer, config)
    return [
        transfer("forward", sent.kind, sent.what, sent.nbytes, sent.messages),
        *_document_transfers(config),
        transfer("backward", sent.kind, f"{sent.what} again", sent.nbytes, sent.again),
        transfer("backward", sent.back, sent.cotangents, sent.returned, sent.messages),
    ]


def _exchange(config: Config) -> ContextExchange:
    """Returns the messages of a strategy."""
    n = config.mesh.context
    parallel = config.parallel
    size = shapes.compute_size(config)
    tokens = shapes.tokens(config)
    w = activations.widths(config.model, config.mesh.tensor, parallel.sequence_parallel)
    # of one rank
    elements = tokens * (w.key + w.value)
    if parallel.context_strategy == "ring":
        ids = FLOAT32 * tokens if activations.is_packed(config) else 0
        # Where a layer is computed again, XLA makes the first message only once: the others are sent in loops.
        return ContextExchange(
            "keys and values sent round",
            PERMUTE,
            size * elements + ids,
            "cotangents of keys and values sent round",
            PERMUTE,
            FLOAT32 * elements,
            again=n - 1 + activations.makes_attention_again(config) * (n - 2),
            messages=n - 1,
        )
    if activations.gathered_ranks(config) > 1:
        latents = n * size * tokens * (config.model.mla.kv_rank + config.model.mla.rope)
        again = (
            parallel.remat != "none"
            or gathers_at_use(config)
            or parallel.sequence_parallel
        )
        return ContextExchange(
            "latents gathered",
            ALL_GATHER,
            latents,
            "cotangents of latents scattered",
            REDUCE_SCATTER,
            latents,
            int(again),
        )
    if parallel.context_strategy == "all_gather":
        return ContextExchange(
            "keys and values gathered",
            ALL_GATHER,
            n * size * elements,
            "cotangents of keys and values scattered",
            REDUCE_SCATTER,
            n * FLOAT32 * elements,
            again=1,
        )
    repeats = n // math.gcd(n, w.key // config.model.head_dim)
    swapped = size * tokens * (w.query + w.out + repeats * (w.key + w.value))
    return ContextExchange(
        "tokens swapped for heads",
        ALL_TO_ALL,
        swapped,
        "cotangents swapped",
        ALL_TO_ALL,
        swapped,
        again=parallel.remat != "none",
    )


def _transfer(
    config: Config, moment: str, kind: str, what: str, nbytes: float, count: int = 1
) -> Moment:
    """Returns a collective over context that each layer has `count` times."""
    count *= stages(config).longest
    return moment, Transfer(CONTEXT, kind, what, nbytes, count, config.mesh.context)


def _document_transfers(config: Config) -> list[Moment]:
    """Returns the gather of documents' ids, which are the same for all layers; in a ring they travel with the keys."""
    if config.parallel.context_strategy == "ring" or not activations.is_packed(config):
        return []
    n = config.mesh.context
    nbytes = n * FLOAT32 * shapes.tokens(config)
    return [
        (
            "forward",
            Transfer(CONTEXT, ALL_GATHER, "documents' ids gathered", nbytes, 1, n),
        )
    ]


def _linear_transfers(config: Config) -> list[Moment]:
    """Collectives of layers of linear attention (`parallel.row_pieces`), whatever the strategy: the last tokens of each
    piece before the convolution, and the maps of the states of all pieces, once for outputs and once for cotangents.
    """
    n = config.mesh.context
    sizes = config.model.linear
    size = shapes.compute_size(config)
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
        exchange = partial(
            transfer, kind=PERMUTE, nbytes=maps / 2, count=2 * doublings + 1
        )
    return [
        transfer("forward", PERMUTE, "last tokens of pieces sent on", tail + ids, sent),
        exchange("forward", what="maps of states exchanged"),
        transfer(
            "backward",
            PERMUTE,
            "last tokens of pieces sent again",
            tail + ids,
            sent * again,
        ),
        *[exchange("backward", what="maps of states exchanged again")]
        * activations.makes_attention_again(config),
        exchange("backward", what="maps of cotangents exchanged"),
        transfer(
            "backward", PERMUTE, "cotangents of last tokens sent back", tail, sent
        ),
    ]


def context_seconds(
    config: Config, cluster: Cluster, forward: float, backward: float
) -> tuple[float, float]:
    """(forward, backward) seconds that one layer waits for its messages over context, where its attention takes so
    long.
    """
    n = config.mesh.context
    waits = layer_waits(config, cluster, context_transfers(config))
    if (
        config.parallel.context_strategy != "ring"
        or cluster.accelerator.platform == "cpu"
    ):
        return waits
    # Behind the last step of the forward no message is under way.
    return max(0.0, waits[0] - (n - 1) / n * forward), max(0.0, waits[1] - backward)
