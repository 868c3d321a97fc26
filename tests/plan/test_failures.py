import math
import random
from dataclasses import replace

import pytest

from meshtrain.config import replaced
from meshtrain.plan import named, plan
from meshtrain.plan.failures import (
    best_interval,
    daly,
    faults,
    goodput,
    lost,
    mean_time_between,
    survival,
    young,
)


def test_mean_time_between_failures_falls_with_the_number_of_devices():
    # Llama 3, section 3.3.4: 419 unexpected interruptions of 16,384 GPUs in 54 days
    assert mean_time_between(2e-5, 16384) * 419 == pytest.approx(54 * 86400, rel=0.02)
    assert mean_time_between(0, 100) == math.inf


def test_daly_is_young_when_writing_is_quick_and_shorter_than_it_when_not():
    assert daly(1e-3, 1e5) == pytest.approx(young(1e-3, 1e5), rel=1e-3)
    assert daly(50, 1000) == pytest.approx(
        young(50, 1000) * (1 + math.sqrt(0.025) / 3 + 0.025 / 9) - 50
    )


def test_dalys_interval_loses_least():
    write, between, restart = 30.0, 7200.0, 120.0
    best = goodput(daly(write, between), write, restart, between)
    for factor in (0.5, 0.8, 1.25, 2.0):
        assert goodput(factor * daly(write, between), write, restart, between) < best


# Interval, copy, write: no write, one that is done long before the next, one that is just done, and one that the next
# waits for.
@pytest.mark.parametrize(
    "interval, copy, write",
    [(600, 60, 0), (600, 60, 200), (600, 20, 600), (200, 20, 700)],
)
def test_goodput_is_that_of_a_played_run(interval, copy, write):
    restart, between = 120.0, 3000.0
    dice = random.Random(7)
    clock = counted = spoiled = 0.0
    lives = 20000
    for _ in range(lives):
        end, now = dice.expovariate(1 / between), 0.0
        # When the newest copy's round began; work that is safe
        began, durable = 0.0, 0.0
        while True:
            now += interval
            now = max(now, began + write) if began else now  # the write before
            copied = now + copy
            if copied + write > end:
                break
            durable, now, began = durable + interval, copied, copied
        rounds = durable / interval * (max(interval, write) + copy)
        clock, counted, spoiled = clock + end, counted + durable, spoiled + end - rounds
        while (again := dice.expovariate(1 / between)) < restart:
            clock += again
        clock += restart
    assert goodput(interval, copy, restart, between, write) == pytest.approx(
        counted / clock, rel=0.02
    )
    assert lost(interval, copy, between, write) == pytest.approx(
        spoiled / lives, rel=0.02
    )


def test_a_failure_loses_half_a_round_and_what_was_being_written():
    """By hand, for a mean time between failures that is long beside a round of 100 s: 50 s since the last copy, and as
    long as its write takes, 30 s, which is how often it is not there yet times the 100 s that are lost with it.
    """
    assert lost(100, 0, 1e7) == pytest.approx(50, rel=1e-3)
    assert lost(100, 0, 1e7, write=30) == pytest.approx(50 + 0.3 * 100, rel=1e-3)
    # the write takes 400 s, so the round does too; the newest copy is never there when it fails
    assert lost(100, 0, 1e7, write=400) == pytest.approx(200 + 100, rel=1e-3)
    assert goodput(100, 0, 0, 1e9, write=400) == pytest.approx(1 / 4, rel=1e-3)


def test_no_checkpoint_begins_before_the_one_before_is_written():
    copy, between = 0.01, 10_000.0  # Daly: 14 s
    assert best_interval(copy, 5.0, between) == daly(copy, between)
    assert best_interval(copy, 500.0, between) == 500.0
    assert best_interval(copy, 5 * between, between) == between
    for write in (5.0, 500.0, 5 * between):
        best = best_interval(copy, write, between)
        most = goodput(best, copy, 120.0, between, write)
        assert all(
            goodput(k * best, copy, 120.0, between, write) < most
            for k in (0.5, 0.8, 1.25, 2.0)
        )


def test_thousands_of_gpus_save_as_often_as_their_store_can_take_it(llama_8b):
    """A copy alone would be worth it after every step; a store of 0.01 GB/s a node needs longer for what a node
    holds.
    """
    cluster = replace(
        named("h100", 16384),
        storage_bandwidth=0.01,
        save_seconds=0.0,
        save_seconds_per_host=0.0,
    )
    config = llama_8b(
        {"data": 1024, "tensor": 8, "pipeline": 2},
        {"global_batch_size": 2048},
        microbatches=2,
    )
    planned = plan(config, cluster)
    found, held = (
        faults(planned),
        sum(item.nbytes for item in planned.memory if item.between_steps),
    )
    assert found.write == pytest.approx(8 * held / 0.01e9)
    step = planned.seconds - planned.time.checkpoint
    assert (
        found.interval == pytest.approx(found.write)
        and found.interval_steps * step > found.write
    )
    assert daly(found.copy, found.between) < found.write
    often = replaced(config, checkpoint={"every": 1})
    assert faults(plan(often, cluster)).configured_goodput < 0.5 < found.goodput


def test_what_a_save_costs_however_little_it_copies_sets_how_often_thousands_of_gpus_save(
    llama_8b,
):
    """Of 8 GB on 16,384 GPUs each copies next to nothing: without the fixed part a save after every step would seem
    best.
    """
    config = llama_8b(
        {"data": 1024, "tensor": 8, "pipeline": 2},
        {"global_batch_size": 2048},
        microbatches=2,
    )
    keys = ({"save_seconds": 0.0, "save_seconds_per_host": 0.0}, {})
    free, real = (
        faults(plan(config, replace(named("h100", 16384), **given))) for given in keys
    )
    assert (
        free.interval_steps * 2 < real.interval_steps
        and free.interval * 10 < real.interval
    )
    assert (
        real.interval == pytest.approx(daly(real.copy, real.between))
        and real.copy > 0.2 + 2048 * 0.002
    )


def test_a_store_of_its_own_bandwidth_is_not_filled_faster_by_more_nodes(llama_8b):
    config = llama_8b(
        {"data": 1024, "tensor": 8, "pipeline": 2},
        {"global_batch_size": 2048},
        microbatches=2,
    )
    planned = plan(config, "h100")
    held = sum(item.nbytes for item in planned.memory if item.between_steps)
    assert faults(planned).write == pytest.approx(held * 16384 / 200e9)
    wide = replace(planned.cluster, storage_bandwidth_total=1e6)
    assert faults(plan(config, wide)).write == pytest.approx(8 * held / 1e9)


def test_what_is_advised_gives_up_half_a_percent_for_fewer_and_later_saves(llama_8b):
    config = llama_8b(
        {"data": 1024, "tensor": 8, "pipeline": 2},
        {"global_batch_size": 2048},
        microbatches=2,
    )
    planned = plan(config, "h100")
    found, restart = faults(planned), planned.cluster.restart_seconds
    step = planned.seconds - planned.time.checkpoint
    assert 1.5 * found.interval < found.interval_steps * step < 4 * found.interval
    best = goodput(found.interval, found.copy, restart, found.between, found.write)
    assert best - 0.0055 < found.goodput < best - 0.003
    assert found.bytes_a_day == pytest.approx(
        86400
        / (found.interval_steps * step + found.copy)
        * sum(i.nbytes for i in planned.memory if i.between_steps)
        * 16384
    )


def test_few_devices_save_within_an_hour_however_seldom_they_fail(llama_8b):
    planned = plan(llama_8b(), "h100")
    found = faults(planned)
    assert (
        found.interval < 3600
        and 0.9 * 3600
        < found.interval_steps * (planned.seconds - planned.time.checkpoint)
        <= 3600 * 1.01
    )


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
