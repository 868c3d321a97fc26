import math

import pytest

from meshtrain.allreduce import ALGORITHMS
from meshtrain.cluster.algorithms import ALL_REDUCE, REDUCE_SCATTER, best
from meshtrain.cluster.topology import Group, Hop
from meshtrain.config import MeshConfig, load
from meshtrain.plan import named, programs
from meshtrain.plan.seconds import data_seconds

ALPHA, RATE, NBYTES = 1e-5, 1e9, 8 * 2**20


def one_level(n):
    return Group(n, (Hop("node", n, ALPHA, RATE, 1),))


@pytest.mark.parametrize(
    ("name", "n", "steps", "busiest"),
    [
        ("ring", 8, 14, 14 / 8),
        ("ring", 5, 8, 8 / 5),
        # Of one device, whose way out both directions share.
        ("two_way_ring", 8, 8, 16 / 8),
        ("two_way_ring", 5, 4, 8 / 5),
        ("halving_doubling", 8, 6, 14 / 8),
        ("halving_doubling", 5, 6, 6 / 4 + 2),
        # 16 pieces of 256 KiB each half
        ("double_tree", 8, 4 * (16 + 3), 4 * (16 + 3) / 32),
        ("hierarchical", 8, 14, 14 / 8),
    ],
)
def test_a_program_takes_its_steps_and_the_bytes_of_the_busiest_device(
    name, n, steps, busiest
):
    found = 2 * ALGORITHMS[name].seconds(one_level(n), NBYTES)
    assert found == pytest.approx(steps * ALPHA + busiest * NBYTES / RATE)


def test_few_steps_win_where_arrays_are_small_and_few_bytes_where_they_are_large():
    group = one_level(64)
    small, large = (
        {
            name: entry.seconds(group, n)
            for name, entry in ALGORITHMS.items()
            if entry.seconds
        }
        for n in (64, 2**32)
    )
    assert (
        min(small, key=small.__getitem__) == "halving_doubling"
        and small["ring"] > 4 * small["double_tree"]
    )
    assert (
        large["ring"] < 1.01 * min(large.values())
        and large["double_tree"] < 1.4 * large["ring"]
    )


def test_one_ring_leaves_a_machine_by_one_card_and_the_hierarchical_program_by_all_eight():
    cluster, mesh = named("h100", 512), MeshConfig(data=512, islands=64)
    flat, both = (
        programs.seconds(name, ALL_REDUCE, mesh.data_axes, mesh, cluster, 2**33)
        for name in ("ring", "hierarchical")
    )
    # 2 S over a card of 50 GB/s; or 7/8 of 2 S over NVLink's 450, and an eighth of 2 S over the card
    assert flat / both == pytest.approx(
        (2 / 50) / (2 * 7 / 8 / 450 + 2 / 8 * 63 / 64 / 50), rel=0.02
    )
    # NCCL lays a ring through each card.
    assert (
        programs.seconds("psum", ALL_REDUCE, mesh.data_axes, mesh, cluster, 2**33)
        < 1.2 * both
    )


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("zero", [0, 1])
def test_the_plan_of_a_run_has_the_seconds_of_its_program(name, zero):
    if name == "double_tree" and zero:
        return
    cluster = named("h100", 16)
    config, other = (
        load(
            {
                "mesh": {"data": 16, "islands": 2},
                "train": {"global_batch_size": 16},
                "parallel": {"zero_stage": zero, "reduce": {"algorithm": a}},
            }
        )
        for a in (name, "psum")
    )
    same = math.isclose(data_seconds(config, cluster), data_seconds(other, cluster))
    assert same == (name == "psum")
    group = cluster.axis("data", config.mesh)
    assert (
        programs.seconds("psum", ALL_REDUCE, ("data",), config.mesh, cluster, 1e6)
        == best(ALL_REDUCE, group, 1e6).seconds
    )
    if not ALGORITHMS[name].by_levels:
        passes = [
            programs.seconds(name, kind, ("data",), config.mesh, cluster, 1e6)
            for kind in (ALL_REDUCE, REDUCE_SCATTER)
        ]
        assert name == "psum" or passes[0] == 2 * passes[1]
