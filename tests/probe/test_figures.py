"""Lines through times are found again, and bandwidths are nccl-tests'."""

import numpy as np
import pytest

from meshtrain.cluster.algorithms import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    KINDS,
    PERMUTE,
    REDUCE_SCATTER,
)
from meshtrain.probe.figures import MeasuredCollective, bus_factor, left_out, line

SIZES = [2**k for k in range(12, 28, 3)]
ALPHA, RATE = 5e-6, 2e10


def exact(size):
    return ALPHA + size / RATE


def test_an_exact_line_is_found_again():
    found = line(SIZES, [exact(n) for n in SIZES])
    assert (found.latency, found.bandwidth) == pytest.approx((ALPHA, RATE))
    assert found.seconds(12345) == pytest.approx(exact(12345))
    assert line(SIZES[::-1], [exact(n) for n in SIZES[::-1]]) == found


# 20% of noise; and one time in six that chance made five times as long, where plain least squares are twice as far off.
@pytest.mark.parametrize(
    ("noise", "longer", "quantile", "most"), [(0.2, 1, 0.95, 0.3), (0.1, 5, 0.9, 0.13)]
)
def test_noise_bends_the_line_little(noise, longer, quantile, most):
    random, off = np.random.default_rng(7), []
    for _ in range(200):
        seconds = np.array([exact(n) for n in SIZES]) * random.uniform(
            1 - noise, 1 + noise, len(SIZES)
        )
        seconds[random.integers(len(SIZES))] *= longer
        found = line(SIZES, seconds.tolist())
        off.append((found.latency / ALPHA - 1, found.bandwidth / RATE - 1))
    assert np.quantile(np.abs(off), quantile, axis=0).max() < most


def test_chance_makes_no_endless_bandwidth_and_no_negative_latency():
    # a load on the machine that held up the small messages only
    falling = line(SIZES, [1e-3 - n * 1e-13 for n in SIZES])
    assert falling.bandwidth == pytest.approx(SIZES[-1] / (1e-3 - SIZES[-1] * 1e-13))
    concave = line(SIZES, [(n / RATE) ** 1.2 for n in SIZES])
    assert concave.latency == 0 and concave.bandwidth > 0


def test_a_size_left_out_is_predicted_with_its_own_error_and_from_the_others_alone():
    seconds = [exact(n) for n in SIZES]
    assert left_out(SIZES, seconds) == pytest.approx([0.0] * len(SIZES), abs=1e-9)
    seconds[2] *= 2
    errors = left_out(SIZES, seconds)
    assert errors[2] == pytest.approx(-0.5)
    assert left_out(SIZES[:3], seconds[:3]) == []


# NVIDIA/nccl-tests, doc/PERFORMANCE.md, section "Bus bandwidth"
FACTORS = {
    ALL_REDUCE: 2 * 7 / 8,
    ALL_GATHER: 7 / 8,
    REDUCE_SCATTER: 7 / 8,
    ALL_TO_ALL: 7 / 8,
    PERMUTE: 1.0,
}


@pytest.mark.parametrize("kind", KINDS)
def test_bus_bandwidth_is_that_of_nccl_tests(kind):
    assert bus_factor(kind, 8) == pytest.approx(FACTORS[kind])
    (sized,) = MeasuredCollective(
        "data", kind, 8, (8_000_000,), (1e-3,), (0.0,)
    ).as_json()["sizes"]
    assert (sized["algbw"], sized["busbw"]) == pytest.approx((8e9, 8e9 * FACTORS[kind]))
