"""Attention sinks: the softmax with one more score, which no kernel knows of, forward and backward."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshtrain.model.attention import attend
from meshtrain.model.collectives import Collectives

B, T, H, G, K, WINDOW = 2, 24, 4, 2, 8, 7


def plain(q, k, v, sinks, local):
    """With the score in a column of its own."""
    k, v = (jnp.repeat(x, H // G, axis=2) for x in (k, v))
    scores = jnp.einsum("bthk,bshk->bhts", q, k, precision="highest") * K**-0.5
    back = jnp.arange(T)[:, None] - jnp.arange(T)
    visible = (back >= 0) & ((back < WINDOW) | ~local)
    column = jnp.broadcast_to(sinks[:, None, None], (B, H, T, 1))
    p = jax.nn.softmax(
        jnp.concatenate([jnp.where(visible, scores, -jnp.inf), column], -1)
    )[..., :-1]
    return jnp.einsum("bhts,bshk->bthk", p, v, precision="highest").reshape(
        B * T, H * K
    )


@pytest.mark.thorough
@pytest.mark.parametrize("local", [True, False])
def test_outputs_and_gradients_are_those_of_one_more_score(local):
    keys = jax.random.split(jax.random.key(0), 5)
    shapes = (B, T, H, K), (B, T, G, K), (B, T, G, K), (H,), (B * T, H * K)
    *given, cotangent = (
        jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)
    )

    @jax.jit
    def both(q, k, v, sinks, cotangent, local):
        ours = lambda *x: attend(
            *x[:3], None, Collectives(), window=WINDOW, local=local, sinks=x[3]
        )
        return [
            (out, *back(cotangent))
            for out, back in (
                jax.vjp(f, q, k, v, sinks) for f in (ours, lambda *x: plain(*x, local))
            )
        ]

    for mine, right in zip(*both(*given, cotangent, jnp.array(local)), strict=True):
        np.testing.assert_allclose(
            mine, right, atol=2e-6 * float(jnp.abs(right).max() + 1)
        )
