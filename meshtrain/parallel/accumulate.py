"""One pipeline stage: loss and gradients by plain differentiation, microbatches one after the other (gradient accumulation)."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshtrain.compat import vary, varying
from meshtrain.mesh import AXES
from meshtrain.parallel.forward import Batch, Forward
from meshtrain.parallel.zero import Weights

Tree = Any


def loss_sum(forward: Forward, weights: Weights, batch: Batch, key: jax.Array | None) -> jax.Array:
    """Summed loss of one microbatch on a mesh without pipeline stages."""
    x = forward.embed(weights, batch, key)
    layer_at = jnp.asarray(forward.layout.layer_at[0, 0])
    x = forward.layers(batch, key, layer_at, forward.config.parallel.remat)(weights.part("blocks"), x)
    return forward.loss(weights, x, batch, jnp.array(True))


def accumulate(
    forward: Forward, weights: Weights, batches: Batch, key: jax.Array | None, seed: jax.Array
) -> tuple[jax.Array, Tree]:
    """Loss summed over the microbatches [M, b, T], and `seed` times its gradient in float32."""

    def one(batch: Batch) -> tuple[jax.Array, Tree]:
        of = lambda w: loss_sum(forward, weights._replace(differentiated=w), batch, key)  # noqa: E731
        loss, vjp = jax.vjp(of, weights.differentiated)
        gradients = vjp(vary(seed, varying(loss)))[0]
        return loss, jax.tree.map(lambda g: g.astype(jnp.float32), gradients)

    first = jax.tree.map(lambda a: a[0], batches)
    if batches["tokens"].shape[0] == 1:
        return one(first)

    def step(total: tuple[jax.Array, Tree], batch: Batch) -> tuple[tuple[jax.Array, Tree], None]:
        return jax.tree.map(jnp.add, total, one(batch)), None

    loss_type = jax.eval_shape(one, first)[0]
    zeros = jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), weights.differentiated)
    start = (vary(jnp.zeros(()), varying(loss_type)), vary(zeros, AXES))
    return lax.scan(step, start, batches)[0]


def evaluate(forward: Forward, weights: Weights, batches: Batch) -> jax.Array:
    """Summed loss of the microbatches, without gradients."""
    return jnp.sum(lax.map(lambda batch: loss_sum(forward, weights, batch, None), batches))
