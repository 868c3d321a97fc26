from dataclasses import replace

import numpy as np
import pytest
from probed import collective, devices, pairs, probe

from meshtrain.cluster.algorithms import ALL_REDUCE, KINDS, best
from meshtrain.config import MeshConfig
from meshtrain.plan import named, programs
from meshtrain.plan.compute import product
from meshtrain.probe import judge, report
from meshtrain.probe.figures import XLA

NOISE = 0.1  # either way


def named_slow(found):
    return [(one.what, one.devices) for one in judge.findings(found)]


def test_a_machine_whose_parts_are_alike_but_for_chance_has_nothing_slow():
    for seed in range(20):
        chance = {"noise": NOISE, "seed": seed}
        assert (
            named_slow(probe(pairs=pairs(8, **chance), devices=devices(8, **chance)))
            == []
        )


@pytest.mark.parametrize("slow", range(8))
def test_the_one_slow_device_is_named_with_its_score(slow):
    found = devices(8, noise=NOISE, seed=slow)
    found.flops[slow] *= 0.6
    (finding,) = judge.findings(probe(devices=found))
    assert (finding.what, finding.devices) == (
        "device",
        (slow,),
    ) and finding.score == pytest.approx(0.6, abs=0.1)
    assert f"device {slow} (tensor {slow}) computes at 0." in report.to_text(
        probe(devices=found)
    )

    found = devices(8)
    found.memory_bandwidth[slow] *= 0.5
    assert named_slow(probe(devices=found)) == [("memory", (slow,))]


@pytest.mark.parametrize(("a", "b"), [(0, 1), (2, 7), (6, 3)])
def test_the_one_slow_link_is_named_both_ways_or_one_way(a, b):
    measured = probe(pairs=pairs(8, noise=NOISE))
    measured.pairs.seconds[:, a, b] *= 2
    assert named_slow(measured) == [("pair", (a, b))]
    assert (
        f"slow: the link from device {a} (tensor {a}) to device {b} (tensor {b})"
        in report.to_text(measured)
    )
    measured.pairs.seconds[:, b, a] *= 2
    assert named_slow(measured) == [("pair", (min(a, b), max(a, b)))]
    assert "slow: the link between device" in report.to_text(measured)


def test_a_device_whose_links_are_all_slow_is_named_and_its_partners_are_not():
    found = pairs(8, noise=NOISE)
    found.seconds[:, 5, :] *= 2
    found.seconds[:, :, 5] *= 2
    assert named_slow(probe(pairs=found)) == [("links", (5,))]


def test_times_that_vary_are_a_verdict_on_the_machine_and_on_nothing_else():
    slow, steady = pairs(8, spread=0.6), devices(8)
    slow.seconds[:, 0, 1] *= 2
    steady.flops[2] *= 0.5
    found = judge.findings(probe(pairs=slow, devices=steady))
    # the devices were measured in a quiet moment
    assert [one.what for one in found] == ["machine", "device"]
    assert "the times of pairs vary by 60%" in found[0].sentence


@pytest.mark.parametrize(
    ("mesh", "per_machine", "block"),
    [
        (MeshConfig(tensor=8), 6, 6),
        (MeshConfig(data=2, tensor=4), 4, 4),
        (MeshConfig(data=8, islands=2), 8, 4),
    ],
)
def test_links_of_one_kind_are_held_against_each_other_alone(mesh, per_machine, block):
    """In a machine or between two of them; in an island or between two."""
    measured = probe(mesh, {}, per_machine=per_machine, pairs=pairs(8))
    blocks = np.arange(8) // block
    measured.pairs.seconds[:, blocks[:, None] != blocks] *= 20
    assert named_slow(measured) == []
    measured.pairs.seconds[:, 1, 6] *= 2
    assert named_slow(measured) == [("pair", (1, 6))]
    if mesh.islands > 1:
        first, second = "device 1 (island 0, data 1)", "device 6 (island 1, data 2)"
        assert f"{first} to {second}" in report.to_text(measured)


def at_half_speed(axis, kind, seconds, algorithm=XLA):
    """A collective over an axis that takes twice as long as `seconds` of so many bytes."""
    found = collective(axis, kind, 16, 1e-5, 1e9)
    return replace(
        found,
        seconds=tuple(2 * seconds(nbytes) for nbytes in found.sizes),
        algorithm=algorithm,
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("axis", ["data", "tensor"])
def test_half_the_described_speed_scores_a_half(kind, axis):
    cluster, mesh = named("h100", 16), MeshConfig(data=2, tensor=8)
    half = at_half_speed(
        axis, kind, lambda nbytes: best(kind, cluster.axis(axis, mesh), nbytes).seconds
    )
    assert judge.score(cluster, probe(mesh, {}), half) == pytest.approx(0.5)


def test_an_axis_far_below_its_description_is_named():
    cluster = named("h100", 8)
    # of NVLink's 450 GB/s
    found = judge.findings(probe(links={"tensor": (1e-5, 5e9)}), cluster)
    assert [one.what for one in found] == ["axis"]
    assert found[0].sentence.startswith("collectives over tensor reach 0.0")


def test_rates_of_devices_are_held_against_what_the_planner_believes():
    cluster = named("h100", 8)
    measured = devices(8)
    measured.matmul["bfloat16"] = (
        0.5 * 2 * 8192**3 / product(cluster.accelerator, "bfloat16", 8192, 8192, 8192)
    )
    scores = judge.device_scores(
        cluster,
        probe(devices=replace(measured, memory_rate=cluster.accelerator.memory_rate)),
    )
    assert (scores["bfloat16"], scores["memory"]) == pytest.approx((0.5, 1.0))
    assert judge.device_scores(cluster, probe()) == {}


def test_of_too_few_devices_none_is_called_slow():
    found = devices(2)
    found.flops[1] /= 4
    links = pairs(2)
    links.seconds[:, 0, 1] *= 4
    assert named_slow(probe(MeshConfig(tensor=2), {}, devices=found, pairs=links)) == []


def test_the_sum_over_all_kinds_is_written_beside_the_described_link():
    text = report.to_text(probe(devices=devices(8), pairs=pairs(8)), named("h100", 8))
    assert f"  {ALL_REDUCE}" in text and "left out  score" in text and "(score " in text


@pytest.mark.parametrize("by", ["ring", "double_tree"])
def test_a_program_of_messages_is_scored_by_what_it_costs_and_not_by_what_xla_does(by):
    cluster, mesh = named("h100", 16), MeshConfig(data=16)
    seconds = lambda n: programs.seconds(by, ALL_REDUCE, ("data",), mesh, cluster, n)
    half = at_half_speed("data", ALL_REDUCE, seconds, by)
    assert judge.score(cluster, probe(mesh, {}), half) == pytest.approx(0.5)
