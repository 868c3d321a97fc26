"""The losses of predictions of several tokens ahead, beside the loss of the next one.

    place of a row     0    1    2    3         depth 0 at place 0: of h and the token 1, it predicts token 2
    tokens             t0   t1   t2   t3
    labels             t1   t2   t3   t4        depth 0 takes these as its tokens
    ahead by 1         t2   t3   t4   -         and learns these; - weighs nothing, nor what lies in another document

Labels are shifted before rows are cut, in the program on global arrays: over context they lie in zigzag order, and a
label may come from another rank. All else is done where the loss is, on the last stage of a pipeline: its H.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from meshtrain.compat import vary, varying
from meshtrain.inputs import LABELS, TOKENS, WEIGHTS
from meshtrain.model.dropout import NO_DROPOUT
from meshtrain.model.prediction import depths
from meshtrain.model.rope import sequences
from meshtrain.parallel.forward import Batch, Forward
from meshtrain.parallel.remat import checkpointed
from meshtrain.parallel.zero import Weights

Tree = Any


def add_ahead(batch: Batch, order: np.ndarray | None, count: int) -> Batch:
    """Returns a global batch with the labels of each depth and their weights, from 1 on; `order`: the position of each
    place of a row, None if it is the place.
    """
    length = batch[LABELS].shape[1]
    positions = np.arange(length) if order is None else order
    places = np.argsort(positions)
    more: dict[str, Array] = {}
    for by in range(1, count + 1):
        inside = positions + by < length
        source = places[np.minimum(positions + by, length - 1)]
        ahead = partial(jnp.take, indices=source, axis=1)
        weights = jnp.broadcast_to(inside, batch[LABELS].shape).astype(jnp.float32)
        if WEIGHTS in batch:
            weights = weights * ahead(batch[WEIGHTS])
        if "segments" in batch:
            weights = weights * (batch["segments"] == ahead(batch["segments"]))
        more |= {_name(LABELS, by): ahead(batch[LABELS]), _name(WEIGHTS, by): weights}
    return {**batch, **more}


def _name(array: str, by: int) -> str:
    return f"{array}_ahead_{by}" if by else array


class PredictionLosses:
    """The losses of all depths on one device, of the parts that `forward` has."""

    def __init__(self, forward: Forward) -> None:
        self.forward = forward
        self.graphs = {
            name: nnx.split(getattr(forward.decoder.mtp, name))[0]
            for name in depths(forward.config.model)
        }

    def seeded(
        self,
        weights: Weights,
        head: tuple[Tree, Array | None],
        x: Array,
        batch: Batch,
        here: Array,
        seed: Array,
    ) -> tuple[Array, Array]:
        """Returns `seed` times the mean loss of the depths, times its weight, and that mean, both summed over a
        microbatch; x is the stream behind the last layer, `head` as `Forward.head_weights` gives it.
        """
        forward = self.forward
        model = forward.config.model
        own, tied = head
        trees = forward.zero.gather_at_use("mtp", weights.part("mtp"))
        norm = own["norm"]
        seeded = total = jnp.zeros(())
        for depth, (name, graph) in enumerate(self.graphs.items()):
            embedded = forward.embed(
                weights, {**batch, TOKENS: batch[_name(LABELS, depth)]}, None
            )
            x = self._layer(graph, depth, batch, here)(
                trees[name], norm, own, x, embedded
            )
            norm = trees[name]["norm"]
            ahead = {
                array: batch[_name(array, depth + 1)] for array in (LABELS, WEIGHTS)
            }
            more, loss, measured = forward.seeded_loss(
                ({**own, "norm": norm}, tied),
                x,
                {**batch, **ahead},
                here,
                seed * model.mtp_weight / model.mtp,
            )
            seeded = seeded + more
            total = total + measured.get("nll", loss) / model.mtp
        return seeded, total

    def _layer(self, graph: Any, depth: int, batch: Batch, here: Array) -> Any:
        """Returns the function of a depth's weights, the norm of the depth before, the head's weights, x and embedded
        tokens to x.
        """
        forward = self.forward
        config = forward.config
        index = config.model.layers + depth
        sequence = sequences(
            config.model, forward.positions(batch), batch.get("segments")
        )(index)
        if (routing := forward.routing(batch, here)) is not None:
            sequence = replace(sequence, routing=routing(jnp.int32(index)))

        def layer(
            tree: Tree,
            norm: Tree,
            own: Tree,
            x: Array,
            embedded: Array,
        ) -> Array:
            module = nnx.merge(graph, tree)
            before = nnx.merge(forward.head_graph, {**own, "norm": norm}).norm
            stream = module.join(before(x), embedded, forward.collectives)
            stream = vary(stream.astype(x.dtype), varying(x))
            module.block.attention.attend = forward.parts.attention
            y = forward.parts.block(
                module.block, stream, sequence, forward.collectives, NO_DROPOUT
            )
            return vary(y, varying(x))

        gathers = forward.zero.gathers_at_use or forward.collectives.sequence_parallel
        return checkpointed(
            jax.named_scope("prediction")(layer), config.parallel, gathers, looped=False
        )
