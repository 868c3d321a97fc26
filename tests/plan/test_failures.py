import math
import random

import pytest

from meshtrain.plan.failures import daly, goodput, mean_time_between, survival, young


def test_mean_time_between_failures_falls_with_the_number_of_devices():
    # Llama 3, section 3.3.4: 419 unexpected interruptions of 16,384 GPUs in 54 days
    assert mean_time_between(2e-5, 16384) * 419 == pytest.approx(54 * 86400, rel=0.02)
    assert mean_time_between(0, 100) == math.inf


def test_daly_is_young_when_writing_is_quick_and_shorter_than_it_when_not():
    assert daly(1e-3, 1e5) == pytest.approx(young(1e-3, 1e5), rel=1e-3)
    assert daly(50, 1000) == pytest.approx(young(50, 1000) * (1 + math.sqrt(0.025) / 3 + 0.025 / 9) - 50)


def test_dalys_interval_loses_least():
    write, between, restart = 30.0, 7200.0, 120.0
    best = goodput(daly(write, between), write, restart, between)
    for factor in (0.5, 0.8, 1.25, 2.0):
        assert goodput(factor * daly(write, between), write, restart, between) < best


def test_goodput_is_that_of_a_played_run():
    interval, write, restart, between = 600.0, 60.0, 120.0, 3000.0
    dice = random.Random(7)
    clock, wanted = 0.0, 4000
    for _ in range(wanted):  # segments of work and write, tried until one passes
        while (failure := dice.expovariate(1 / between)) < interval + write:
            clock += failure
            while (again := dice.expovariate(1 / between)) < restart:
                clock += again
            clock += restart
        clock += interval + write
    assert goodput(interval, write, restart, between) == pytest.approx(wanted * interval / clock, rel=0.02)


def test_goodput_without_failures_loses_only_the_writes():
    assert goodput(90, 10, 100, math.inf) == 0.9
    assert goodput(1e9, 1, 1, 1.0) == 0.0


def test_survival_is_the_binomial_tail():
    p = math.exp(-0.01 * 24)
    exact = sum(math.comb(10, k) * p**k * (1 - p) ** (10 - k) for k in range(8, 11))
    assert survival(8, 10, 0.01, 24) == pytest.approx(exact)
    assert survival(10, 10, 0.01, 24) == pytest.approx(p**10)
    assert survival(0, 10, 0.01, 24) == survival(8, 10, 0.0, 24) == 1.0
    assert survival(11, 10, 0.01, 24) == 0.0
    assert 0 < survival(16000, 16384, 2e-5, 24 * 30) <= 1
