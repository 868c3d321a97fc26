"""Which operations images get, and how often."""

from collections import Counter

import numpy as np
import pytest

from meshtrain.data.images import policies
from meshtrain.data.images.policies import IMAGENET, RANDAUGMENT, autoaugment, randaugment


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, float, int]]:
    """Of every operation its name, share and sign, in place of what it does."""
    found: list[tuple[str, float, int]] = []

    def noting(name: str):
        return lambda image, share, sign: found.append((name, share, sign)) or image

    monkeypatch.setattr(policies, "OPERATIONS", {name: noting(name) for name in policies.OPERATIONS})
    return found


def test_randaugment_draws_n_operations_evenly_all_of_one_magnitude(noted: list) -> None:
    draw = np.random.default_rng(0)
    for _ in range(1400):
        randaugment(None, draw, 3, 12.0)
    counts = Counter(name for name, _, _ in noted)
    assert len(noted) == 4200 and set(counts) == set(RANDAUGMENT)
    assert all(abs(count - 300) < 5 * 300**0.5 for count in counts.values()), counts
    assert {share for _, share, _ in noted} == {0.4}
    assert abs(sum(sign for _, _, sign in noted)) < 5 * 4200**0.5


def test_autoaugment_draws_a_pair_and_each_of_its_operations_as_often_as_the_policy_says(noted: list) -> None:
    draw, times = np.random.default_rng(0), 10_000
    for _ in range(times):
        autoaugment(None, draw)
    expected: Counter[tuple[str, float]] = Counter()
    for pair in IMAGENET:
        for name, probability, magnitude in pair:
            expected[name, magnitude / 9] += times * probability / len(IMAGENET)
    counts = Counter((name, share) for name, share, _ in noted)
    for key, count in expected.items():
        assert abs(counts[key] - count) < 5 * max(count, 1) ** 0.5, key
    assert set(counts) <= set(expected)
