"""What one stage computes of one microbatch: its layers forward, backward whole or in two halves, embedding and loss."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshtrain.compat import residuals, vary, varying, with_residuals
from meshtrain.mesh import DATA, PIPELINE
from meshtrain.parallel.forward import Batch, Forward
from meshtrain.parallel.pipeline.split_backward import Halves, split_backward
from meshtrain.parallel.zero import Weights

Tree = Any


class Stage:
    """The weights and batches of one step on this device. A microbatch and a chunk are traced numbers: one program serves all."""

    def __init__(self, forward: Forward, chunks: int, weights: Weights, batches: Batch, key: jax.Array | None) -> None:
        self.model, self.chunks, self.batches, self.key = forward, chunks, batches, key
        self.remat = forward.config.parallel.remat
        self.edge = {part: weights.differentiated[part] for part in ("embedding", "head")}
        self.constant = weights.constant
        self.blocks, self.constant_blocks = jax.tree.map(lambda a: _chunked(a, chunks), weights.part("blocks"))
        layer_at = jnp.asarray(forward.layout.layer_at)
        self.layer_at = lax.dynamic_index_in_dim(layer_at, lax.axis_index(PIPELINE), 0, keepdims=False)

    def zeros(self) -> jax.Array:
        """A residual stream of one microbatch, all zeros."""
        config, tokens = self.model.config, self.batches["tokens"]
        length = tokens.shape[2] // (config.mesh.tensor if self.model.collectives.sequence_parallel else 1)
        shape = (tokens.shape[1], length, config.model.d_model)
        return vary(jnp.zeros(shape, self.model.zero.compute), self.model.stream_axes)

    def embed(self, edge: Tree, microbatch: jax.Array) -> jax.Array:
        return self.model.embed(Weights(edge, self.constant), self._batch(microbatch), self.key)

    def loss(self, edge: Tree, y: jax.Array, microbatch: jax.Array, here: jax.Array) -> jax.Array:
        """Loss of what left the last stage, on the stages that share the vocabulary; zero but where `here`."""
        return self.model.loss(Weights(edge, self.constant), y, self._batch(microbatch), here)

    def run(self, x: jax.Array, microbatch: jax.Array, chunk: jax.Array) -> jax.Array:
        function, weights = self._layers(microbatch, chunk)
        return function(*weights, x)

    def forward(self, x: jax.Array, microbatch: jax.Array, chunk: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        """Stage output, and the residuals that depend on the microbatch (none with remat: full)."""
        if self.remat == "full":
            return self.run(x, microbatch, chunk), []
        function, weights = self._layers(microbatch, chunk)
        y, vjp = jax.vjp(function, *weights, x)
        return y, [r for r in residuals(vjp) if DATA in varying(r)]

    def backward(self, x: jax.Array, kept: list[jax.Array], microbatch: jax.Array, chunk: jax.Array) -> Callable:
        """The stage's vjp, over stashed residuals; the forward pass traced here is dead code unless remat is full."""
        function, weights = self._layers(microbatch, chunk)
        _, vjp = jax.vjp(function, *weights, x)
        if self.remat == "full":
            return vjp
        stored = iter(kept)
        return with_residuals(vjp, [next(stored) if DATA in varying(r) else r for r in residuals(vjp)])

    def halves(self, x: jax.Array, kept: Tree, cotangent: jax.Array, microbatch: jax.Array, chunk: jax.Array) -> Halves:
        """`backward` as I (x, kept, cotangent) -> input gradient and W (stash, x, kept) -> leaves of the weight gradient."""

        def whole(x: jax.Array, kept: Tree, cotangent: jax.Array) -> tuple[jax.Array, Tree]:
            gradient, _, gx = self.backward(x, kept, microbatch, chunk)(cotangent)
            return gx, gradient

        return split_backward(whole, (False, False, True), x, kept, cotangent)

    def _batch(self, microbatch: jax.Array) -> Batch:
        index = jnp.maximum(microbatch, 0)
        return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, index, 0, keepdims=False), self.batches)

    def _layers(self, microbatch: jax.Array, chunk: jax.Array) -> tuple[Callable, tuple[Tree, Tree | None]]:
        """The chunk's layers as a function of (differentiated, constant, x), and its weights."""
        pick = lambda a: a[0] if self.chunks == 1 else lax.dynamic_index_in_dim(a, chunk, 0, False)  # noqa: E731
        remat = "none" if self.remat == "full" else self.remat  # full: backward() recomputes the stage as a whole
        layers = self.model.layers(self._batch(microbatch), self.key, pick(self.layer_at), remat)
        function = lambda differentiated, constant, x: layers(Weights(differentiated, constant), x)  # noqa: E731
        return function, (jax.tree.map(pick, self.blocks), jax.tree.map(pick, self.constant_blocks))


def _chunked(a: jax.Array, chunks: int) -> jax.Array:
    return a.reshape((chunks, a.shape[0] // chunks, *a.shape[1:]))
