"""Rotary positions, and how they are stretched."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshtrain.config import load
from meshtrain.model.rope import Rope, angles, rope, rotate


def made(width: int, theta: float = 10000.0, **scaling) -> Rope:
    sizes = {"d_model": 2 * width, "heads": 2, "rope_theta": theta}
    return rope(load({"model": sizes | scaling}).model)


def plain(width: int, theta: float = 10000.0) -> Rope:
    return made(width, theta)


@pytest.mark.thorough
def test_rotated_queries_and_keys_meet_by_their_distance_alone():
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 8))
    at = lambda x, p: rotate(x[None, None], *angles(jnp.array([p]), plain(8, 100.0)))[
        0, 0
    ]
    near = (at(q, 3) * at(k, 1)).sum()
    np.testing.assert_allclose((at(q, 45) * at(k, 43)).sum(), near, rtol=1e-4)
    assert abs((at(q, 3) * at(k, 2)).sum() - near) > 1e-3
    np.testing.assert_allclose(at(q, 0), q, rtol=1e-6)


def test_rotation_keeps_lengths_and_turns_each_pair_at_its_own_pace():
    cos, sin = angles(jnp.arange(5), plain(4))
    np.testing.assert_allclose(cos**2 + sin**2, 1, rtol=1e-6)
    np.testing.assert_allclose(jnp.arctan2(sin, cos)[1], [1.0, 0.01], rtol=1e-5)


@pytest.mark.thorough
def test_positions_may_differ_between_sequences():
    x = jax.random.normal(jax.random.key(1), (2, 3, 1, 8))
    both = rotate(x, *angles(jnp.array([[0, 1, 2], [5, 0, 1]]), plain(8)))
    one = rotate(x[1:], *angles(jnp.array([5, 0, 1]), plain(8)))
    np.testing.assert_allclose(both[1:], one, rtol=1e-6)


# From transformers 5 (modeling_rope_utils): frequencies of heads of 16, and the amplitude.
TRANSFORMERS = [
    (
        made(16, 500000.0, rope_scaling="llama3", rope_factor=8.0, rope_original=64),
        [
            1.0,
            0.079403013,
            0.0047007538,
            0.00091158313,
            0.00017677668,
            3.4281024e-05,
            6.6478697e-06,
            1.2891732e-06,
        ],
        1.0,
    ),
    (
        made(16, rope_scaling="yarn", rope_factor=4.0, rope_original=64),
        [
            1.0,
            0.23717082,
            0.049999997,
            0.0079056947,
            0.0024999999,
            0.00079056947,
            0.00025000001,
            7.9056947e-05,
        ],
        1.138629436111989,
    ),
    (
        made(
            16,
            rope_scaling="yarn",
            rope_factor=4.0,
            rope_original=4096,
            rope_fast=20.0,
            rope_slow=2.0,
            rope_truncate=False,
            rope_amplitude=1.5,
        ),
        [
            1.0,
            0.31622776,
            0.1,
            0.031622779,
            0.0063486258,
            0.00082175765,
            0.00025000001,
            7.9056947e-05,
        ],
        1.5,
    ),
    (
        made(16, rope_scaling="linear", rope_factor=4.0),
        [
            0.25,
            0.079056941,
            0.025,
            0.0079056947,
            0.0024999999,
            0.00079056947,
            0.00025000001,
            7.9056947e-05,
        ],
        1.0,
    ),
]


@pytest.mark.parametrize(
    "found, frequency, amplitude",
    TRANSFORMERS,
    ids=["llama3", "yarn", "yarn with all keys", "linear"],
)
def test_stretched_frequencies_are_those_of_transformers(found, frequency, amplitude):
    np.testing.assert_allclose(found.frequency, frequency, rtol=1e-6)
    assert found.amplitude == pytest.approx(amplitude, rel=1e-9)
    assert found.frequency.dtype == np.float32


def test_a_larger_amplitude_makes_scores_larger_and_turns_nothing_further():
    cos, sin = angles(jnp.arange(3), Rope(np.float32([1.0, 0.1]), 1.25))
    np.testing.assert_allclose(jnp.hypot(cos, sin), 1.25, rtol=1e-6)
