"""What is left of a distribution, and how often each of it is drawn, against a reference in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshtrain.generate.request import Sampling
from meshtrain.generate.sampling import SamplingArrays, draw, kept, sample

VOCABULARY = 97
LOGITS = np.random.default_rng(5).normal(0, 3, (6, VOCABULARY)).astype(np.float32)
SAMPLE = jax.jit(sample)
# Of 99.9%: what a chi-square of so many degrees of freedom stays below (Wilson and Hilferty 1931).
QUANTILE = lambda freedom: (
    freedom * (1 - 2 / (9 * freedom) + 3.0902 * (2 / (9 * freedom)) ** 0.5) ** 3
)


def arrays(*each: Sampling) -> SamplingArrays:
    return SamplingArrays(
        *map(np.stack, zip(*map(SamplingArrays.of, each), strict=True))
    )


def reference(logits: np.ndarray, how: Sampling) -> np.ndarray:
    """The probability of each token, in float64, of what is left."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    order = order[: how.top_k or None]
    p = np.exp((logits[order].astype(np.float64) - logits.max()) / how.temperature)
    p /= p.sum()
    if how.top_p < 1:
        count = next(n for n in range(1, len(p) + 1) if p[:n].sum() >= how.top_p)
        order, p = order[:count], p[:count] / p[:count].sum()
    found = np.zeros(len(logits))
    found[order] = p
    return found


def draws(logits: np.ndarray, how: Sampling, count: int) -> np.ndarray:
    """What is drawn at the positions from 0 to `count`, [count]."""
    many = SamplingArrays(
        *(np.broadcast_to(x, (count,)) for x in SamplingArrays.of(how))
    )
    return np.asarray(
        SAMPLE(np.broadcast_to(logits, (count, len(logits))), many, np.arange(count))
    )


HOWS = [
    Sampling(1.0),
    Sampling(0.7, top_k=5),
    Sampling(1.3, top_p=0.8),
    Sampling(2.0, top_k=20, top_p=0.9),
    Sampling(1.0, top_k=1),
    Sampling(0.5, top_p=0.01),
    Sampling(5.0, top_k=VOCABULARY + 7, top_p=0.999),
]


@pytest.mark.parametrize("how", HOWS, ids=str)
def test_what_is_left_is_what_the_reference_leaves(how):
    scaled = (LOGITS - LOGITS.max(1, keepdims=True)) / how.temperature
    many = arrays(*[how] * len(LOGITS))
    left = np.asarray(
        kept(jnp.asarray(scaled), jnp.asarray(many.top_k), jnp.asarray(many.top_p))
    )
    np.testing.assert_array_equal(left, [reference(row, how) > 0 for row in LOGITS])


@pytest.mark.thorough
@pytest.mark.parametrize("how", HOWS[:4], ids=str)
def test_tokens_are_drawn_as_often_as_the_reference_says(how):
    count, p = 20_000, reference(LOGITS[0], how)
    found = np.bincount(draws(LOGITS[0], how, count), minlength=VOCABULARY)
    assert not found[p == 0].any()
    # Of tokens that are expected seldom, the sum.
    often = p * count >= 5
    seen = np.append(found[often], found[~often].sum())
    expected = np.append(p[often], max(p[~often].sum(), 1e-9)) * count
    chi_square = ((seen - expected) ** 2 / expected).sum()
    assert often.sum() > 3 and chi_square < QUANTILE(often.sum())


@pytest.mark.thorough
def test_of_equals_the_lower_ids_are_left_and_the_first_is_greedy():
    logits = np.array([1.0, 3.0, 3.0, 0.0, 3.0, 3.0], np.float32)
    assert set(draws(logits, Sampling(1.0, top_k=2), 200)) == {1, 2}
    assert set(draws(logits, Sampling(1.0, top_k=3), 200)) == {1, 2, 4}
    assert set(draws(logits, Sampling(1.0, top_p=0.6), 200)) == {1, 2, 4}
    assert (
        set(draws(logits, Sampling(), 20))
        == {1}
        == set(draws(logits, Sampling(1e-30), 20)) - {2, 4, 5}
    )
    assert set(draws(np.zeros(6, np.float32), Sampling(1.0, top_p=0.5), 200)) == {
        0,
        1,
        2,
    }


@pytest.mark.thorough
def test_the_same_seed_and_position_get_the_same_token_in_any_slot_beside_anything():
    alone = Sampling(0.9, seed=11)
    cutting, greedy = Sampling(1.1, top_k=3, seed=2), Sampling()
    positions = np.arange(40)
    once = [
        int(SAMPLE(LOGITS[:1], arrays(alone), np.array([at]))[0]) for at in positions
    ]
    for slot, beside in ((0, cutting), (1, greedy), (2, cutting)):
        each = [beside] * 3
        each[slot] = alone
        rows = np.stack([LOGITS[3], LOGITS[4], LOGITS[5]])
        rows[slot] = LOGITS[0]
        found = [
            int(SAMPLE(rows, arrays(*each), np.array([at, at, at]))[slot])
            for at in positions
        ]
        assert found == once
    assert len(set(once)) > 3


def test_seeds_and_positions_differ():
    assert (
        draws(LOGITS[0], Sampling(2.0, seed=1), 50)
        != draws(LOGITS[0], Sampling(2.0, seed=2), 50)
    ).any()
    # of a seed its lowest 32 bits
    assert (
        draws(LOGITS[0], Sampling(2.0, seed=1), 50)
        == draws(LOGITS[0], Sampling(2.0, seed=1 + 2**32), 50)
    ).all()
    assert len(set(draws(LOGITS[0], Sampling(2.0, seed=1), 50))) > 10


@pytest.mark.thorough
def test_a_padded_vocabulary_changes_no_token():
    padded = np.append(LOGITS[0], np.full(31, -np.inf, np.float32))
    for how in HOWS:
        np.testing.assert_array_equal(
            draws(padded, how, 100), draws(LOGITS[0], how, 100)
        )


def test_nothing_is_sorted_or_drawn_where_all_are_greedy():
    def branches(jaxpr, depth=0):
        """Yields (depth, primitive) of each equation."""
        for equation in jaxpr.eqns:
            yield depth, equation.primitive.name
            for value in equation.params.values():
                for inner in value if isinstance(value, list | tuple) else [value]:
                    if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                        deeper = depth + (equation.primitive.name == "cond")
                        yield from branches(getattr(inner, "jaxpr", inner), deeper)

    found = list(
        branches(
            jax.make_jaxpr(sample)(
                LOGITS, arrays(*[Sampling()] * 6), np.zeros(6, np.int32)
            ).jaxpr
        )
    )
    assert {depth for depth, name in found if name == "sort"} == {2}
    assert {depth for depth, name in found if "random" in name} == {1}


@pytest.mark.parametrize("how", HOWS, ids=str)
def test_a_token_is_told_with_the_probability_that_it_was_drawn_with(how):
    drawn = jax.jit(draw)(LOGITS, arrays(*[how] * len(LOGITS)), np.arange(len(LOGITS)))
    tokens, logprobs = map(np.asarray, drawn)
    right = [
        np.log(reference(row, how)[token])
        for row, token in zip(LOGITS, tokens, strict=True)
    ]
    np.testing.assert_allclose(logprobs, right, atol=2e-5)
    np.testing.assert_array_equal(
        tokens, SAMPLE(LOGITS, arrays(*[how] * len(LOGITS)), np.arange(len(LOGITS)))
    )


def test_an_argmax_is_certain_beside_what_is_drawn():
    hows = [Sampling(), Sampling(1.0)] * 3
    logprobs = np.asarray(jax.jit(draw)(LOGITS, arrays(*hows), np.arange(6)).logprobs)
    assert ((logprobs == 0) == [True, False] * 3).all()
