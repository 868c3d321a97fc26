"""What one stage computes of one microbatch: its layers forward, backward whole or in two halves, embedding and loss.

The layers are looped over by hand, each with a vjp of its own, so that what one keeps for its backward goes straight to its place:

    forward     x ─► layer 0 ─► layer 1 ─► y          stash[place, layer] ◄─ the layer's input, and what its vjp keeps
    backward    gx ◄─ layer 0 ◄─ layer 1 ◄─ cotangent     gradients[layer] += those of its weights, where the stage is not idle
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from meshtrain.compat import residuals, vary, varying, with_residuals
from meshtrain.inputs import inputs
from meshtrain.mesh import DATA, PIPELINE
from meshtrain.parallel.beside import after
from meshtrain.parallel.forward import Batch, Forward, Judged, Totals
from meshtrain.parallel.pipeline.split_backward import Halves, split_backward
from meshtrain.parallel.pipeline.storage import add, read, write
from meshtrain.parallel.placement import buckets
from meshtrain.parallel.zero import Weights

Tree = Any


class Slot(NamedTuple):
    """What one slot of a tick is for: traced numbers, so that one program serves all."""

    active: jax.Array
    microbatch: jax.Array
    chunk: jax.Array
    place: jax.Array  # of the stash


class Stage:
    """The weights and batches of one step on this device."""

    def __init__(self, forward: Forward, chunks: int, weights: Weights, batches: Batch, key: jax.Array | None) -> None:
        self.model, self.batches, self.key = forward, batches, key
        self.edge = {part: weights.differentiated[part] for part in ("embedding", "head")}
        self.constant = weights.constant
        self.blocks = weights.part("blocks")
        # Of a chunk; its layers lie one after the other in the weights' first axis.
        self.layers = forward.layout.layer_at.shape[-1]
        assert len(jax.tree.leaves(self.blocks)[0]) == chunks * self.layers
        layer_at = jnp.asarray(forward.layout.layer_at)
        self.layer_at = lax.dynamic_index_in_dim(layer_at, lax.axis_index(PIPELINE), 0, keepdims=False).reshape(-1)

    def zeros(self) -> jax.Array:
        """A residual stream of one microbatch, all zeros."""
        config, rows = self.model.config, inputs(self.batches).shape[1]
        length = self.model.length(self.batches) // (
            config.mesh.tensor if self.model.collectives.sequence_parallel else 1
        )
        shape = (rows, length, config.model.d_model)
        return vary(jnp.zeros(shape, self.model.zero.compute), self.model.stream_axes)

    def embed(self, edge: Tree, microbatch: jax.Array) -> jax.Array:
        return self.model.embed(Weights(edge, self.constant), self._batch(microbatch), self.key)

    def add_embedding_gradient(self, edge: Tree, microbatch: jax.Array, gx: jax.Array) -> Tree:
        """The gradients of the edge's weights with the embedding's added, from the cotangent of what `embed` gave."""
        weights, batch = Weights(self.edge, self.constant), self._batch(microbatch)
        return edge | {"embedding": self.model.add_embedding_gradient(edge["embedding"], weights, batch, self.key, gx)}

    def loss(self, edge: Tree, y: jax.Array, microbatch: jax.Array, here: jax.Array) -> Totals:
        """Loss of what left the last stage, on the stages that share the vocabulary; zero but where `here`."""
        return self.model.loss(Weights(edge, self.constant), y, self._batch(microbatch), here)

    def judged(self, y: jax.Array, microbatch: jax.Array, here: jax.Array) -> Judged:
        """Its labels one by one, [b, T] each."""
        return self.model.judged(Weights(self.edge, self.constant), y, self._batch(microbatch), here)

    # --- the layers of a chunk

    def run(self, x: jax.Array, microbatch: jax.Array, chunk: jax.Array) -> jax.Array:
        """The chunk's output, with nothing kept."""
        layer = self._layer(microbatch)
        return self._over_layers(chunk, x, lambda x, at, _: layer(self._weights(at), self.layer_at[at], x))

    def forward(self, x: jax.Array, stash: Tree, slot: Slot) -> tuple[jax.Array, Tree]:
        """The chunk's output, and the stash with what its backward needs at the slot's place."""
        layer = self._layer(slot.microbatch)

        def one(carry: tuple[jax.Array, Tree], at: jax.Array, i: jax.Array) -> tuple[jax.Array, Tree]:
            x, stash = carry
            y, kept = self._kept(layer, at, x)
            return y, write(stash, (x, kept), slot.place, i)

        return self._over_layers(slot.chunk, (x, stash), one)

    def backward(self, stash: Tree, cotangent: jax.Array, gradients: Tree, slot: Slot) -> tuple[jax.Array, Tree]:
        """The input gradient, and `gradients` with the weights' gradient added where the slot is active."""
        layer = self._layer(slot.microbatch)

        def one(carry: tuple[jax.Array, Tree], at: jax.Array, i: jax.Array) -> tuple[jax.Array, Tree]:
            cotangent, gradients = carry
            gradient, gx = self._vjp(layer, at, *read(stash, slot.place, i))(cotangent)
            return gx, add(gradients, gradient, at, active=slot.active)

        return self._over_layers(slot.chunk, (cotangent, gradients), one, reverse=True)

    def backward_sending(self, stash: Tree, cotangent: jax.Array, gradients: Tree, slot: Slot, send: Callable[[Tree], Tree]) -> tuple[jax.Array, Tree]:  # fmt: skip
        """The input gradient, and of all layers, stacked, what `send` makes of their weights' gradients added to those in `gradients`
        (None: to nothing). A bucket of layers is sent while the one before it is gone through.
        """
        layer = self._layer(slot.microbatch)

        def one(cotangent: jax.Array, at: jax.Array) -> tuple[jax.Array, Tree]:
            found, gx = self._vjp(layer, at, *read(stash, slot.place, at))(cotangent)
            return gx, found

        def backward(cotangent: jax.Array, first: int, behind: int) -> tuple[jax.Array, Tree]:
            gx, found = lax.scan(one, cotangent, jnp.arange(first, behind, dtype=jnp.int32), reverse=True)
            found = jax.tree.map(lambda g: g.astype(jnp.float32), found)
            return gx, found if gradients is None else jax.tree.map(
                lambda total, g: total[first:behind] + g, gradients, found
            )

        (first, behind), *others = buckets(self.layers)[::-1]
        cotangent, complete = backward(cotangent, first, behind)
        sent = []
        for first, behind in others:
            sent.append(send(after(complete, cotangent)))
            cotangent, complete = backward(cotangent, first, behind)
            complete = after(complete, sent[-1])
        return cotangent, jax.tree.map(lambda *x: jnp.concatenate(x), *[*sent, send(complete)][::-1])

    def input_gradient(self, stash: Tree, cotangent: jax.Array, left: Tree, place: jax.Array, slot: Slot) -> tuple[jax.Array, Tree]:  # fmt: skip
        """I: the input gradient, and at `place` of `left` what the weight gradient needs of it."""
        layer = self._layer(slot.microbatch)

        def one(carry: tuple[jax.Array, Tree], at: jax.Array, i: jax.Array) -> tuple[jax.Array, Tree]:
            cotangent, left = carry
            x, kept = read(stash, slot.place, i)
            (gx,), more = self._halves(layer, at, x, kept).first(x, kept, cotangent)
            return gx, write(left, more, place, i)

        return self._over_layers(slot.chunk, (cotangent, left), one, reverse=True)

    def weight_gradient(self, stash: Tree, left: Tree, gradients: Tree, place: jax.Array, slot: Slot) -> Tree:
        """W: `gradients` with the weights' gradient added, of what I left at `place`."""
        layer, tree = self._layer(slot.microbatch), jax.tree.structure(self.blocks.differentiated)

        def one(gradients: Tree, at: jax.Array, i: jax.Array) -> Tree:
            x, kept = read(stash, slot.place, i)
            leaves = self._halves(layer, at, x, kept).second(read(left, place, i), x, kept, None)
            return add(gradients, jax.tree.unflatten(tree, leaves), at, active=slot.active)

        return self._over_layers(slot.chunk, gradients, one, reverse=True)

    def stashed(self, split: bool) -> tuple[Tree, Tree]:
        """Shapes of what a layer has in the stash, and of what I leaves of it where the backward is `split`."""
        zero, x = jnp.zeros((), jnp.int32), self.zeros()

        def of(x: jax.Array) -> tuple[Tree, Tree]:
            layer = self._layer(zero)
            kept = self._kept(layer, zero, x)[1]
            return (x, kept), self._halves(layer, zero, x, kept).first(x, kept, x)[1] if split else []

        return jax.eval_shape(of, x)

    # --- one layer

    def _over_layers(self, chunk: jax.Array, carry: Any, one: Callable, reverse: bool = False) -> Any:
        """`one(carry, its index in the stacked weights, its index in the chunk)` of each layer in turn."""
        first = chunk * self.layers
        step = lambda carry, i: (one(carry, first + i, i), None)  # noqa: E731
        return lax.scan(step, carry, jnp.arange(self.layers, dtype=jnp.int32), reverse=reverse)[0]

    def _batch(self, microbatch: jax.Array) -> Batch:
        index = jnp.maximum(microbatch, 0)
        return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, index, 0, keepdims=False), self.batches)

    def _layer(self, microbatch: jax.Array) -> Callable:
        return self.model.layer(self._batch(microbatch), self.key, self.model.config.parallel.remat)

    def _weights(self, at: jax.Array) -> Weights:
        return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, at, 0, keepdims=False), self.blocks)

    def _traced(self, layer: Callable, at: jax.Array, x: jax.Array) -> tuple[jax.Array, Callable, list[bool]]:
        """A layer's output, its vjp to the gradients of its weights and of x, and which of the residuals depend on the microbatch:
        no weights that are only read, which are there in the backward as they were."""
        weights, index = self._weights(at), self.layer_at[at]
        run = lambda w, x: layer(weights._replace(differentiated=w), index, x)  # noqa: E731
        y, vjp = jax.vjp(run, weights.differentiated, x)
        constant = {id(w) for w in jax.tree.leaves(weights.constant)}
        return y, vjp, [DATA in varying(r) and id(r) not in constant for r in residuals(vjp)]

    def _kept(self, layer: Callable, at: jax.Array, x: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        """A layer's output, and the residuals that depend on the microbatch."""
        y, vjp, stored = self._traced(layer, at, x)
        return y, [r for r, is_stored in zip(residuals(vjp), stored, strict=True) if is_stored]

    def _vjp(self, layer: Callable, at: jax.Array, x: jax.Array, kept: list[jax.Array]) -> Callable:
        """The layer's vjp over residuals from the stash; the forward pass traced here is dead code."""
        _, vjp, stored = self._traced(layer, at, x)
        place = iter(kept)
        return with_residuals(
            vjp, [next(place) if is_stored else r for r, is_stored in zip(residuals(vjp), stored, strict=True)]
        )

    def _halves(self, layer: Callable, at: jax.Array, x: jax.Array, kept: list[jax.Array]) -> Halves:
        """The layer's vjp as I (x, kept, cotangent) -> input gradient and W (what I left, x, kept) -> leaves of the weight gradient."""

        def whole(x: jax.Array, kept: Tree, cotangent: jax.Array) -> tuple[jax.Array, Tree]:
            gradient, gx = self._vjp(layer, at, x, kept)(cotangent)
            return gx, gradient

        return split_backward(whole, (False, False, True), x, kept, x)
