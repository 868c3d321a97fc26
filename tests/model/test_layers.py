"""The parts of a block do what their papers say."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from meshtrain.config import load
from meshtrain.model.layers import Norm


def model(family: str) -> object:
    return load(
        {"model": {"family": family, "d_model": 16, "heads": 2, "layers": 1}}
    ).model


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
