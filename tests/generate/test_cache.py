"""What a cache keeps is each rank's own, once; what is read from it is what attention without one gives."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshtrain.generate.cache import (
    LayerCache,
    OwnGroups,
    against,
    appended,
    seen,
    written,
)
from meshtrain.model.attention import attend
from meshtrain.model.collectives import Collectives

SIZES = [
    (6, 3, 2),
    (4, 2, 4),
    (8, 2, 8),
    (12, 4, 6),
    (12, 8, 6),
    (6, 2, 2),
    (5, 1, 5),
    (8, 8, 4),
    (12, 3, 2),
]


@pytest.mark.parametrize(
    ("heads", "groups", "ranks"), [size for size in SIZES if size[0] % size[1] == 0]
)
def test_every_query_head_finds_its_group_among_its_ranks_own(heads, groups, ranks):
    own, local = OwnGroups(heads, groups, ranks), heads // ranks
    needed = [
        {head // (heads // groups) for head in range(local * r, local * (r + 1))}
        for r in range(ranks)
    ]
    assert own.each == max(map(len, needed))
    if own.split:
        return
    for rank in range(ranks):
        of_head = np.arange(local * rank, local * (rank + 1)) // (heads // groups)
        # a rank computes one for each of its query heads
        kept = own.select(
            jnp.asarray(of_head, jnp.float32)[None, None, :, None], local * rank
        )
        assert kept.shape[2] == own.each
        np.testing.assert_array_equal(kept[0, 0, own.indices(local * rank), 0], of_head)


def test_a_prompt_fills_its_slot_with_zeros_behind_and_no_other():
    kept = jnp.full((3, 2, 7, 4), jnp.nan)
    new = jnp.arange(5 * 2 * 4, dtype=jnp.float32).reshape(1, 5, 2, 4)
    found = np.asarray(written(kept, new, jnp.int32(1), jnp.int32(3)))
    np.testing.assert_array_equal(found[1, :, :3], new[0, :3].transpose(1, 0, 2))
    assert not found[1, :, 3:].any() and np.isnan(found[[0, 2]]).all()
    for other_rank in (-1, 3):
        assert np.isnan(written(kept, new, jnp.int32(other_rank), jnp.int32(3))).all()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("window", "local"), [(0, None), (3, None), (3, True), (3, False)]
)
@pytest.mark.parametrize(("cap", "new"), [(0.0, 1), (2.0, 1), (2.0, 2)])
def test_attention_to_a_cache_is_that_of_the_last_queries_of_attention(
    window, local, cap, new
):
    slots, length, heads, groups, width = 3, 9, 6, 2, 5
    q, k, v = (
        jnp.asarray(
            np.random.default_rng(n).normal(size=(slots, length, g, width)), jnp.float32
        )
        for n, g in enumerate((heads, groups, groups))
    )
    first = jnp.array([7, 0, 4])
    positions = first[:, None] + jnp.arange(new)
    flag = None if local is None else jnp.bool_(local)
    right = attend(
        q, k, v, None, Collectives(), window=window, scale=0.3, cap=cap, local=flag
    ).reshape(q.shape)
    # the position's own is added by the step, what stands behind it is no number
    before = (jnp.arange(length) < first[:, None])[:, None, :, None]
    keys, values = (jnp.where(before, x.transpose(0, 2, 1, 3), 0) for x in (k, v))
    at = positions[:, :, None, None]
    now_q, now_k, now_v = (jnp.take_along_axis(x, at, axis=1) for x in (q, k, v))
    keys, values = appended(keys, now_k, first), appended(values, now_v, first)
    model = SimpleNamespace(query_scalar=0.3**-2, score_cap=cap)
    visible = seen(positions, length, window, local)
    found = against(now_q, LayerCache(keys, values), visible, model)  # type: ignore[arg-type]
    wanted = jnp.take_along_axis(right, at, axis=1).reshape(slots * new, -1)
    np.testing.assert_allclose(found, wanted, atol=2e-6)


def test_one_position_of_every_slot_is_written_in_place():
    kept = jnp.zeros((2, 1, 4, 3))
    new = jnp.ones((2, 1, 1, 3))
    compiled = (
        jax.jit(appended, donate_argnums=0)
        .lower(kept, new, jnp.array([1, 3]))
        .compile()
    )
    assert " copy(" not in compiled.as_text()
    found = np.asarray(appended(kept, new, jnp.array([1, 3])))
    assert found[0, 0, 1].all() and found[1, 0, 3].all() and found.sum() == 6
