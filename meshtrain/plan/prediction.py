"""The cost of predicting further tokens (`model.mtp`): of each a layer, a product before it, an embedding and a head.

All of it stands where the loss is, so that in a pipeline every clock with a loss takes as much longer. Its weights are
whole on every stage, as the head's are.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from meshtrain.cluster.accelerators import Accelerator
from meshtrain.cluster.algorithms import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from meshtrain.config import Config
from meshtrain.config.mesh import TENSOR
from meshtrain.parallel.placement import stages
from meshtrain.plan import activations, compute, shapes
from meshtrain.plan.compute import Seconds
from meshtrain.plan.gradient_traffic import Moment, Transfer
from meshtrain.plan.shapes import compute_size

# Passes of a layer and of the embedding, as passes of the head.
OF_HEAD = {
    "forward": "head",
    "backward": "unhead",
    "embedding": "head",
    "unembedding": "unhead",
}
# Streams that a depth keeps: of the depth before and of the tokens, each before and behind its norm.
STREAMS = 4


def prediction_transfers(
    config: Config, layer: Iterable[Moment], edge: Iterable[Moment]
) -> list[Moment]:
    """Returns the collectives of all depths in one pass of the head, from those of a chunk's layers and the edges."""
    depths = config.model.mtp
    if not depths:
        return []
    of_layer = [
        (m, replace(t, count=t.count / stages(config).longest)) for m, t in layer
    ]
    moments = [*of_layer, *edge, *join_transfers(config)]
    return [
        (
            OF_HEAD.get(moment, moment),
            replace(t, what=f"prediction: {t.what}", count=depths * t.count),
        )
        for moment, t in moments
    ]


def join_transfers(config: Config) -> Iterator[Moment]:
    """Yields what the product before the block sends: it is split over tensor along what it sums over."""
    ranks = config.mesh.tensor
    stream = shapes.tokens(config) * config.model.d_model
    stream *= compute_size(config)

    def transfer(moment: str, kind: str, what: str, count: int) -> Moment:
        return moment, Transfer(TENSOR, kind, what, stream, count, ranks)

    # what the block takes is computed again
    again = int(config.parallel.remat != "none")
    if not config.parallel.sequence_parallel:
        yield transfer("backward", ALL_REDUCE, "joined inputs summed again", again)
        yield transfer("forward", ALL_REDUCE, "joined inputs summed", 1)
        yield transfer("backward", ALL_REDUCE, "joined inputs' cotangents summed", 2)
        return
    yield transfer("forward", ALL_GATHER, "inputs gathered to be joined", 2)
    yield transfer("forward", REDUCE_SCATTER, "joined inputs scattered", 1)
    yield transfer("backward", REDUCE_SCATTER, "joined inputs scattered again", again)
    yield transfer("backward", ALL_GATHER, "inputs gathered again to be joined", 2)
    yield transfer("backward", ALL_GATHER, "joined inputs' cotangents gathered", 1)
    yield transfer("backward", REDUCE_SCATTER, "inputs' cotangents scattered", 2)


def join_seconds(config: Config, device: Accelerator) -> Seconds:
    """Returns the seconds of the product before the block, forward and backward."""
    d = config.model.d_model
    shape = shapes.tokens(config), 2 * d // config.mesh.tensor, d
    return Seconds(matmul=3 * compute.product(device, config.precision.compute, *shape))


def kept_bytes(config: Config) -> float:
    """Returns the bytes that all depths keep of a microbatch until the loss has its gradient."""
    stream = shapes.stream(config) * compute_size(config)
    return config.model.mtp * (
        activations.kept(config, config.parallel.remat) + STREAMS * stream
    )
