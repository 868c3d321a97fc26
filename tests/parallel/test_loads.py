"""The bias that evens experts' loads out moves by whole numbers: not at the mean, whatever the number of experts and of
tokens.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from meshtrain.parallel.loads import below_mean


@pytest.mark.thorough
@pytest.mark.parametrize("experts", [2, 7, 512])
def test_loads_are_compared_to_their_mean_exactly_also_beyond_float32_and_int32(
    experts,
):
    random = np.random.default_rng(experts)
    for most in (3, 1 << 24, (1 << 31) - 256):
        counts = random.integers(0, most, (5, experts)).astype(np.float32)
        counts[0] = counts[0, 0]
        exact = counts.astype(np.int64)
        right = np.sign(exact.sum(-1, keepdims=True) - experts * exact)
        np.testing.assert_array_equal(below_mean(jnp.asarray(counts)), right)


def test_one_token_away_from_the_mean_is_not_the_mean():
    counts = np.full(8, 1 << 23, np.float32)
    counts[3] += 1
    assert below_mean(jnp.asarray(counts)).tolist() == [1, 1, 1, -1, 1, 1, 1, 1]
