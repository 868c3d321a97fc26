"""The parameter server of experiments/communicate: in step it is an all-reduce, out of step its gradients are as old as
is said.
"""

import math

import numpy as np
import pytest

from experiments.communicate import server_time, servers
from experiments.communicate.server_time import Network

WIDE, ROWS = 5, 7


def squares(weights, x, y):
    return ((x @ weights - y) ** 2).mean()


def rows_of(step, worker):
    dice = np.random.default_rng([step, worker])
    x = dice.standard_normal((ROWS, WIDE)).astype(np.float32)
    return x, x @ (np.arange(WIDE, dtype=np.float32) / 10)


def task(workers):
    return servers.Task(
        squares, np.zeros(WIDE, np.float32), rows_of, rows_of(10_000, 0), workers
    )


def gradient(weights, x, y):
    return 2 * x.T @ (x @ weights - y) / len(y)


@pytest.fixture(scope="module")
def three():
    return task(3)


def test_in_step_a_server_computes_what_an_all_reduce_does(three):
    summed, served = (
        servers.all_reduce(three, 20, 0.1),
        servers.synchronous(three, 20, 0.1, (1.0, 1.0, 1.0)),
    )
    assert (
        np.allclose(summed.losses, served.losses, rtol=0, atol=1e-6)
        and summed.losses[-1] < 0.1 * summed.losses[0]
    )
    assert math.isclose(summed.held_out[-1][2], served.held_out[-1][2], abs_tol=1e-6)


def test_out_of_step_with_one_worker_is_in_step():
    one = task(1)
    apart, together = (
        servers.asynchronous(one, 9, 0.1, (2.0,)),
        servers.synchronous(one, 9, 0.1, (2.0,)),
    )
    assert apart.losses == together.losses and apart.staleness == [0] * 9
    assert apart.held_out == together.held_out


def test_out_of_step_a_gradient_is_of_the_weights_that_its_worker_pulled(three):
    count, rate = 12, 0.1
    found = servers.asynchronous(three, count, rate, (1.0, 1.0, 1.0))
    # three equal workers in turn: each has the weights of two updates ago, but the first three, who have the first
    versions, losses = [np.zeros(WIDE)], []
    for k in range(count):
        x, y = rows_of(*divmod(k, 3))
        seen = versions[max(0, k - 2)]
        losses.append(squares(seen, x, y))
        versions.append(versions[-1] - rate * (1 - k / count) * gradient(seen, x, y))
    assert np.allclose(found.losses, losses, rtol=1e-5)
    assert found.staleness == [0, 1, *[2] * 10]


def test_a_worker_four_times_slower_delays_nobody_and_is_stale(three):
    found = servers.asynchronous(three, 19, 0.1, (1.0, 1.0, 4.0))
    # in 4 seconds the other two push 8 gradients, that of the slow one comes ninth
    assert found.staleness[8] == 8 and found.staleness[17] == 8
    assert found.held_out[-1][:2] == (19, 9.0)
    in_step = servers.synchronous(three, 3, 0.1, (1.0, 1.0, 4.0))
    assert in_step.held_out[-1][:2] == (9, 12.0)


FAST = Network(0.0, 1e9)


@pytest.mark.parametrize("workers", [3, 8, 17])
def test_servers_win_over_a_ring_once_they_are_somewhat_more_than_half_as_many(workers):
    ring = server_time.all_reduce(workers, 1e9, FAST)
    first = next(
        s
        for s in range(1, workers + 1)
        if server_time.server(workers, 1e9, s, FAST) < ring
    )
    assert first == workers**2 // (2 * (workers - 1)) + 1
    assert server_time.server(workers, 1e9, workers, FAST) == 1.0 and math.isclose(
        ring, 2 * (workers - 1) / workers
    )


def test_one_server_takes_as_many_times_longer_as_there_are_workers():
    assert server_time.server(16, 1e8, 1, FAST) == 16 * server_time.server(
        1, 1e8, 1, FAST
    )


def test_small_messages_are_summed_faster_by_a_tree_than_by_a_port_that_takes_one_after_the_other():
    slow = Network(1e-4, 1e9)
    assert server_time.server(64, 1e3, 64, slow) > 5 * server_time.all_reduce(
        64, 1e3, slow
    )
