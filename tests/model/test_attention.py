"""Blockwise attention computes the whole square's softmax, for every length, grouping and packing."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshtrain.model import attention
from meshtrain.model.collectives import Collectives
from meshtrain.model.dropout import Dropout
from meshtrain.model.kernels import BLOCK, BLOCKS, attention_kernel


def attend(q: jax.Array, *others: Any) -> jax.Array:
    return attention.attend(q, *others).reshape(q.shape)


def full(q: jax.Array, k: jax.Array, v: jax.Array, segments: np.ndarray | None) -> jax.Array:
    """Softmax over the whole [T, T] square of each head."""
    length, heads = q.shape[1:3]
    k, v = (jnp.repeat(a, heads // a.shape[2], axis=2) for a in (k, v))
    allowed = np.tril(np.ones((length, length), bool))[None, None]
    if segments is not None:
        allowed = allowed & (segments[:, None, :, None] == segments[:, None, None, :])
    scores = jnp.einsum("bqhk,bshk->bhqs", q, k) / np.sqrt(q.shape[-1])
    return jnp.einsum("bhqs,bshk->bqhk", jax.nn.softmax(jnp.where(allowed, scores, -jnp.inf)), v)


def numbers(length: int, heads: int, groups: int, width: int = 8) -> tuple[jax.Array, ...]:
    shapes = [(2, length, h, width) for h in (heads, groups, groups, heads)]
    random = np.random.default_rng(length)
    return tuple(jnp.asarray(random.standard_normal(s), jnp.float32) for s in shapes)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("length", "heads", "groups"),
    [
        (1, 2, 2),
        (7, 4, 1),
        (BLOCK - 1, 2, 1),
        (BLOCK, 4, 2),
        (BLOCK + 1, 3, 3),
        (2 * BLOCK + 5, 6, 2),
        (BLOCKS * BLOCK + 3, 2, 1),
    ],
)
def test_output_and_gradients_are_those_of_the_full_square(length, heads, groups, packed):
    q, k, v, cotangent = numbers(length, heads, groups)
    segments = np.sort(np.random.default_rng(0).integers(0, 3, (2, length)), axis=1) if packed else None

    def blockwise(q, k, v):
        return attend(q, k, v, None if segments is None else jnp.asarray(segments), Collectives())

    out, vjp = jax.vjp(jax.jit(blockwise), q, k, v)
    right, right_vjp = jax.vjp(lambda q, k, v: full(q, k, v, segments), q, k, v)
    np.testing.assert_allclose(out, right, atol=3e-6)
    for g, r in zip(vjp(cotangent), right_vjp(cotangent), strict=True):
        np.testing.assert_allclose(g, r, atol=3e-5)


def test_no_query_sees_a_later_key():
    q, k, v, _ = numbers(BLOCK + 9, 2, 1)
    gradient = jax.grad(lambda v, at: attend(q, k, v, None, Collectives())[:, at].sum())
    for at in (0, BLOCK - 1, BLOCK, BLOCK + 5):
        seen = np.abs(gradient(v, at)).sum((0, 2, 3)) > 0
        assert seen.tolist() == [s <= at for s in range(BLOCK + 9)]


def test_scores_beyond_the_block_of_a_query_are_never_computed():
    """n blocks compute (n+1)/2n of the square's multiplications."""
    blocks = 8
    q, k, v, _ = numbers(blocks * BLOCK, 1, 1)
    cost = jax.jit(lambda q, k, v: attend(q, k, v, None, Collectives())).lower(q, k, v).compile().cost_analysis()
    square = jax.jit(lambda q, k, v: full(q, k, v, None)).lower(q, k, v).compile().cost_analysis()
    assert cost["flops"] / square["flops"] == pytest.approx((blocks + 1) / (2 * blocks), rel=0.1)


def test_probabilities_are_kept_for_the_backward_pass_under_no_remat_policy():
    q, k, v, _ = numbers(BLOCK, 2, 1)
    run = lambda q, k, v: attend(q, k, v, None, Collectives())  # noqa: E731
    for layer in (run, jax.checkpoint(run, policy=jax.checkpoint_policies.everything_saveable)):
        kept = jax.tree.leaves(jax.vjp(layer, q, k, v)[1])
        assert kept and not any(a.shape[-2:] == (BLOCK, BLOCK) for a in kept)


def test_bfloat16_keeps_its_dtype_and_softmax_its_precision():
    q, k, v, _ = numbers(BLOCK + 3, 4, 2)
    out = attend(*(a.astype(jnp.bfloat16) for a in (q, k, v)), None, Collectives())
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(out.astype(jnp.float32), full(q, k, v, None), atol=0.1)


def test_scores_of_float16_do_not_overflow():
    q, k, v, _ = (100 * a for a in numbers(16, 2, 2))
    out = attend(*(a.astype(jnp.float16) for a in (q, k, v)), None, Collectives())
    assert jnp.isfinite(out).all()


def test_dropped_probabilities_still_sum_to_one_on_average():
    q, k, v, _ = numbers(32, 2, 2)
    dropout = Dropout(0.3, jax.random.key(0), jnp.arange(2))
    sums = jnp.stack([attend(q, k, jnp.ones_like(v), None, Collectives(), dropout.at(i)) for i in range(20)])
    assert float(sums.std()) > 0.1
    np.testing.assert_allclose(sums.mean(), 1, atol=0.02)


@pytest.mark.parametrize(
    "platform, dtype, width, packed, dropout, kernel",
    [
        ("gpu", "bfloat16", 64, False, False, "cudnn"),
        ("gpu", "float16", 60, False, False, "scores"),
        ("gpu", "float32", 64, False, False, "scores"),
        ("gpu", "bfloat16", 64, True, False, "scores"),
        ("gpu", "bfloat16", 64, False, True, "blocks"),
        ("tpu", "bfloat16", 64, False, False, "blocks"),
        ("cpu", "float32", 64, True, True, "blocks"),
    ],
)
def test_the_kernel_follows_from_platform_dtype_packing_and_dropout(platform, dtype, width, packed, dropout, kernel):
    assert attention_kernel(platform, dtype, width, packed, dropout) == kernel
