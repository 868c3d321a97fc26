"""Cross-entropy from shares of the logits is that of the whole, at the edges of the numbers too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshtrain.model.collectives import Collectives
from meshtrain.model.loss import Vocabulary, cross_entropy

VOCABULARY = 11


def example() -> tuple[jax.Array, jax.Array]:
    random = np.random.default_rng(0)
    logits = jnp.asarray(3 * random.standard_normal((2, 5, VOCABULARY)), jnp.float32)
    return logits, jnp.asarray(random.integers(0, VOCABULARY, (2, 5)))


def definition(logits: jax.Array, labels: jax.Array, smoothing: float = 0.0, z_loss: float = 0.0) -> jax.Array:
    target = (1 - smoothing) * jax.nn.one_hot(labels, logits.shape[-1]) + smoothing / logits.shape[-1]
    return -(target * jax.nn.log_softmax(logits)).sum(-1) + z_loss * jax.nn.logsumexp(logits, -1) ** 2


@pytest.mark.parametrize(("smoothing", "z_loss"), [(0.0, 0.0), (0.1, 0.0), (0.0, 0.01), (0.3, 0.1)])
def test_loss_and_gradient_are_those_of_the_definition(smoothing, z_loss):
    logits, labels = example()
    mine = lambda z: cross_entropy(z, labels, Vocabulary(VOCABULARY, Collectives()), smoothing, z_loss)  # noqa: E731
    np.testing.assert_allclose(mine(logits), definition(logits, labels, smoothing, z_loss), rtol=1e-5)
    gradient = jax.grad(lambda z: mine(z).sum())(logits)
    right = jax.grad(lambda z: definition(z, labels, smoothing, z_loss).sum())(logits)
    np.testing.assert_allclose(gradient, right, atol=2e-6)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_padding_of_the_vocabulary_has_no_probability_and_no_gradient(smoothing):
    logits, labels = example()
    padded = jnp.concatenate([logits, jnp.full((2, 5, 3), 50.0)], axis=-1)  # far above every real logit
    loss = cross_entropy(padded, labels, Vocabulary(VOCABULARY, Collectives()), smoothing, 0.1)
    np.testing.assert_allclose(loss, definition(logits, labels, smoothing, 0.1), rtol=1e-5)
    gradient = jax.grad(
        lambda z: cross_entropy(z, labels, Vocabulary(VOCABULARY, Collectives()), smoothing, 0.1).sum()
    )(padded)
    assert not gradient[..., VOCABULARY:].any()


def test_large_logits_neither_overflow_nor_vanish():
    logits = jnp.array([[[3e4, 0.0, -3e4], [-3e4, -3e4, -3e4]]])
    loss = cross_entropy(logits, jnp.array([[0, 1]]), Vocabulary(3, Collectives()))
    np.testing.assert_allclose(loss, [[0.0, np.log(3)]], rtol=1e-6)


def test_half_precision_logits_are_summed_in_float32():
    logits, labels = example()
    loss = cross_entropy(logits.astype(jnp.bfloat16), labels, Vocabulary(VOCABULARY, Collectives()))
    assert loss.dtype == jnp.float32
    np.testing.assert_allclose(loss, definition(logits.astype(jnp.bfloat16).astype(jnp.float32), labels), rtol=1e-5)
