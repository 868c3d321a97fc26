"""Top-k: the largest numbers of each row and no others; and with feedback over 5 steps, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closing import Closing
from covering import thorough_but

from meshtrain.parallel.reduce.topk import TopK

RATIO = 0.05


def largest(row, ratio):
    """The row with all but its largest numbers zero."""
    k = max(1, round(ratio * row.size))
    chosen = np.argsort(-np.abs(row), kind="stable")[:k]
    out = np.zeros_like(row)
    out[chosen] = row[chosen]
    return out


SHAPES = [(3, 7, 0.3), (1, 1, 0.01), (4, 1000, 0.01), (2, 257, 1.0)]


@pytest.mark.parametrize("shape", thorough_but(SHAPES, SHAPES[:1].__contains__), ids=str)
def test_the_largest_arrive_as_they_are_and_the_others_as_zero(shape):
    rows, k, ratio = shape
    codec, x = TopK(ratio), np.random.default_rng(0).standard_normal((rows, k)).astype(np.float32)
    sent = codec.encode(jnp.asarray(x))
    assert sent.dtype == jnp.uint8
    assert sent.shape == (rows, codec.nbytes(k)) == (rows, 8 * max(1, round(ratio * k)))
    assert np.array_equal(codec.decode(sent, k), [largest(row, ratio) for row in x])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_always_sent(bad):
    """Else a loss scale would see no overflow, and the residual would keep it for ever."""
    x = np.full((1, 100), 1e30, np.float32)
    x[0, 63] = bad
    arrived = np.asarray(TopK(0.01).decode(TopK(0.01).encode(jnp.asarray(x)), 100))
    assert not np.isfinite(arrived[0, 63])


def test_five_steps_with_feedback_are_those_of_numpy():
    made, random = Closing({"data": 4}, {"compression": "topk", "ratio": RATIO}), np.random.default_rng(1)
    owed = {name: np.zeros((4, *w.whole), np.float32) for name, w in made.weights.items() if w.decayed}
    assert owed
    for _ in range(5):
        gradients = made.draw(random)
        sums, _ = made.close(gradients)
        for name, residual in owed.items():
            weight, total = made.weights[name], np.zeros(made.weights[name].whole, np.float64)
            for rank in range(4):
                given = gradients[name][rank, 0, 0] + residual[rank]
                padding = [(0, m - n) for n, m in zip(weight.whole, weight.padded, strict=True)]
                parts = np.split(np.pad(given, padding), 4, axis=weight.zero_dim)
                sent = np.concatenate(
                    [largest(part.reshape(-1), RATIO).reshape(part.shape) for part in parts], axis=weight.zero_dim
                )[tuple(slice(n) for n in weight.whole)]
                residual[rank] = given - sent
                total += sent
            np.testing.assert_allclose(sums[name], total, rtol=1e-6, atol=1e-6, err_msg=name)
    flat = jax.tree.leaves(made.kept.residual, is_leaf=lambda x: x is None)
    for name, x in zip(made.weights, flat, strict=True):
        if x is None:
            assert name not in owed
        else:
            np.testing.assert_array_equal(np.asarray(x), owed[name], err_msg=name)
