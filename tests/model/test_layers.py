"""The parts of a block do what their papers say."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from meshtrain.config import load
from meshtrain.model.layers import Norm, rotary, rotate


def model(family: str) -> object:
    return load({"model": {"family": family, "d_model": 16, "heads": 2, "layers": 1}}).model


def test_rms_norm_has_unit_mean_square_and_its_scale():
    norm = Norm("head.norm", model("llama"), nnx.Rngs(0))
    norm.scale[...] = jnp.linspace(0.5, 2, 16)
    y = norm(7 * jax.random.normal(jax.random.key(0), (3, 16)) + 1)
    np.testing.assert_allclose(((y / norm.scale[...]) ** 2).mean(-1), 1, rtol=1e-5)


def test_layer_norm_has_no_mean_unit_variance_and_its_bias():
    norm = Norm("head.norm", model("gpt2"), nnx.Rngs(0))
    norm.bias[...] = jnp.arange(16.0)
    y = norm(7 * jax.random.normal(jax.random.key(0), (3, 16)) + 1) - norm.bias[...]
    np.testing.assert_allclose(y.mean(-1), 0, atol=1e-5)
    np.testing.assert_allclose(y.var(-1), 1, rtol=1e-4)


def test_norm_of_half_precision_is_computed_in_float32():
    norm = Norm("head.norm", model("llama"), nnx.Rngs(0))
    norm.scale[...] = norm.scale[...].astype(jnp.float16)
    y = norm(jnp.full((1, 16), 300.0, jnp.float16))  # whose square is beyond float16
    np.testing.assert_allclose(y, 1, rtol=1e-3)


def test_rotated_queries_and_keys_meet_by_their_distance_alone():
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 8))
    at = lambda x, p: rotate(x[None, None], *rotary(jnp.array([p]), 8, 100.0))[0, 0]  # noqa: E731
    near = (at(q, 3) * at(k, 1)).sum()
    np.testing.assert_allclose((at(q, 45) * at(k, 43)).sum(), near, rtol=1e-4)
    assert abs((at(q, 3) * at(k, 2)).sum() - near) > 1e-3
    np.testing.assert_allclose(at(q, 0), q, rtol=1e-6)


def test_rotation_keeps_lengths_and_turns_each_pair_at_its_own_pace():
    cos, sin = rotary(jnp.arange(5), 4, 10000.0)
    np.testing.assert_allclose(cos**2 + sin**2, 1, rtol=1e-6)
    np.testing.assert_allclose(jnp.arctan2(sin, cos)[1], [1.0, 0.01], rtol=1e-5)


def test_positions_may_differ_between_sequences():
    x = jax.random.normal(jax.random.key(1), (2, 3, 1, 8))
    both = rotate(x, *rotary(jnp.array([[0, 1, 2], [5, 0, 1]]), 8, 10000.0))
    one = rotate(x[1:], *rotary(jnp.array([5, 0, 1]), 8, 10000.0))
    np.testing.assert_allclose(both[1:], one, rtol=1e-6)
