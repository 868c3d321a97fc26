"""Levels found in matrices of which the truth is known."""

import numpy as np
import pytest

from meshtrain.cluster.levels import clustered, cost
from meshtrain.config import MeshConfig

SIZES = (2**12, 2**25)
NVLINK, RAIL, SPINE = (3e-6, 450e9), (8e-6, 50e9), (3e-5, 12.5e9)


def matrix(sizes, links, seed, noise=0.2, shuffled=True, uneven=False):
    """(seconds [sizes, from, to], true blocks of each level): `sizes` of blocks and their links, innermost first.

    `uneven`: some devices are noisier than others, and their messages slower rather than faster.
    """
    random = np.random.default_rng(seed)
    n = sizes[-1]
    place = random.permutation(n) if shuffled else np.arange(n)
    seconds = np.full((len(SIZES), n, n), np.nan)
    for size, (latency, bandwidth) in reversed(list(zip(sizes, links, strict=True))):
        same = place[:, None] // size == place // size
        for i, nbytes in enumerate(SIZES):
            seconds[i][same] = latency + nbytes / bandwidth
    factors = random.uniform(-noise, noise, seconds.shape)
    if uneven:
        factors = np.abs(factors) * random.choice([0.2, 1.0], (1, n, 1))
    seconds *= 1 + factors
    seconds[:, np.eye(n, dtype=bool)] = np.nan
    blocks = [
        {
            frozenset(np.flatnonzero(place // size == b).tolist())
            for b in range(n // size)
        }
        for size in sizes
    ]
    return seconds, blocks


CASES = {
    "2 nodes of 8": ((8, 16), (NVLINK, RAIL)),
    "8 nodes of 8": ((8, 64), (NVLINK, RAIL)),
    "9 nodes of 4": ((4, 36), (NVLINK, RAIL)),
    "3 nodes of 5": ((5, 15), (NVLINK, RAIL)),
    "8 pairs": ((2, 16), (NVLINK, RAIL)),
    "3 levels of 64": ((8, 32, 64), (NVLINK, RAIL, SPINE)),
    "3 levels of 54": ((6, 18, 54), (NVLINK, RAIL, SPINE)),
    "bandwidth alone": ((8, 32), ((5e-6, 200e9), (5e-6, 25e9))),
    "latency alone": ((8, 32), ((2e-6, 50e9), (2e-5, 50e9))),
    "one level": ((16,), (NVLINK,)),
    # So few that noise alone makes two pairs of them.
    "four devices": ((4,), (NVLINK,)),
    "2 nodes of 4": ((4, 8), (NVLINK, RAIL)),
}


@pytest.mark.parametrize("uneven", [False, True], ids=["even", "uneven"])
@pytest.mark.parametrize("case", CASES)
def test_every_node_and_leaf_is_found_again_under_a_fifth_of_noise(case, uneven):
    sizes, links = CASES[case]
    for seed in range(20):
        seconds, blocks = matrix(sizes, links, seed, uneven=uneven)
        found = clustered(SIZES, seconds)
        assert [
            set(map(frozenset, level.blocks)) for level in found.levels
        ] == blocks, seed
        # Blocks of every level follow one another in the order.
        for size, level in zip(sizes, blocks, strict=True):
            pieces = [
                frozenset(found.order[i : i + size]) for i in range(0, sizes[-1], size)
            ]
            assert set(pieces) == level
        for level, (latency, bandwidth) in zip(found.levels, links, strict=True):
            assert level.latency == pytest.approx(latency, rel=0.25)
            assert level.bandwidth == pytest.approx(bandwidth, rel=0.25)


@pytest.mark.parametrize("case", CASES)
def test_devices_that_stand_in_order_keep_it(case):
    sizes, links = CASES[case]
    found = clustered(SIZES, matrix(sizes, links, seed=1, shuffled=False)[0])
    assert found.is_ordered and found.order == tuple(range(sizes[-1]))


def test_pairs_that_were_not_measured_are_no_reason_against_a_block():
    """As the probe takes them of many devices: each with those 1, 2, 4, ... further."""
    seconds, blocks = matrix((8, 64), (NVLINK, RAIL), seed=3, shuffled=False)
    apart = (np.arange(64)[:, None] - np.arange(64)) % 64
    seconds[:, ~np.isin(np.minimum(apart, 64 - apart), [1, 2, 4, 8, 16, 32])] = np.nan
    found = clustered(SIZES, seconds)
    assert [set(map(frozenset, level.blocks)) for level in found.levels] == blocks


def test_blocks_of_several_sizes_are_no_level():
    seconds, _ = matrix((8, 16), (NVLINK, RAIL), seed=0)
    without_one = seconds[:, 1:, 1:]
    assert [level.devices for level in clustered(SIZES, without_one).levels] == [15]


MESH = MeshConfig(data=8, tensor=4, pipeline=2)
# Bytes of a step, in those of data
WEIGHTS = {"data": 1.0, "tensor": 8.0, "pipeline": 0.3}


@pytest.mark.parametrize("case", ["8 nodes of 8", "3 levels of 64"])
def test_a_wrong_order_is_repaired_so_that_no_order_of_blocks_is_a_hundredth_faster(
    case,
):
    sizes, links = CASES[case]
    true, _ = matrix(sizes, links, seed=0, noise=0.0, shuffled=False)
    best = cost(true[-1], range(64), MESH, WEIGHTS)
    for seed in range(10):
        quiet, noisy = (matrix(sizes, links, seed, noise)[0] for noise in (0.0, 0.2))
        found = clustered(SIZES, noisy)
        assert not found.is_ordered
        wrong = cost(quiet[-1], range(64), MESH, WEIGHTS)
        assert wrong > 3 * best
        assert cost(quiet[-1], found.order, MESH, WEIGHTS) <= 1.01 * best


def test_what_an_order_costs_is_each_axis_slowest_neighbours():
    """Two nodes of 2: tensor inside, data between them, and the other way around."""
    seconds, _ = matrix(
        (2, 4), ((0.0, 100.0), (0.0, 10.0)), seed=0, noise=0.0, shuffled=False
    )
    mesh, nbytes = MeshConfig(data=2, tensor=2), {"data": 1.0, "tensor": 5.0}
    fast, slow = SIZES[-1] / 100, SIZES[-1] / 10
    assert cost(seconds[-1], [0, 1, 2, 3], mesh, nbytes) == pytest.approx(
        5 * fast + slow
    )
    assert cost(seconds[-1], [0, 2, 1, 3], mesh, nbytes) == pytest.approx(
        5 * slow + fast
    )
