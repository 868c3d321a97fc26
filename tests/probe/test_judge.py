from dataclasses import replace

import numpy as np
import pytest
from probed import collective, devices, pairs, probe

from meshtrain.cluster.algorithms import ALL_REDUCE, KINDS, best
from meshtrain.config import MeshConfig
from meshtrain.plan import named, programs
from meshtrain.plan.compute import product
from meshtrain.probe import judge, report

NOISE = 0.1  # either way


def named_slow(found):
    return [(one.what, one.devices) for one in judge.findings(found)]


@pytest.mark.parametrize("seed", range(20))
def test_a_machine_whose_parts_are_alike_but_for_chance_has_nothing_slow(seed):
    assert named_slow(probe(pairs=pairs(8, noise=NOISE, seed=seed), devices=devices(8, noise=NOISE, seed=seed))) == []


@pytest.mark.parametrize("seed", range(8))
def test_the_one_slow_device_is_named_with_its_score(seed):
    found = devices(8, noise=NOISE, seed=seed)
    found.flops[seed] *= 0.6
    (finding,) = judge.findings(probe(devices=found))
    assert (finding.what, finding.devices) == ("device", (seed,))
    assert finding.score == pytest.approx(0.6, abs=0.1)
    assert f"device {seed} (tensor {seed}) computes at 0." in report.to_text(probe(devices=found))


def test_a_device_with_slow_memory_is_told_from_one_that_computes_slowly():
    found = devices(8)
    found.memory_bandwidth[3] *= 0.5
    assert named_slow(probe(devices=found)) == [("memory", (3,))]


@pytest.mark.parametrize(("a", "b"), [(0, 1), (2, 7), (6, 3)])
def test_the_one_slow_link_is_named_both_ways_or_one_way(a, b):
    found = pairs(8, noise=NOISE)
    found.seconds[:, a, b] *= 2
    assert named_slow(probe(pairs=found)) == [("pair", (a, b))]
    assert f"slow: the link from device {a} (tensor {a}) to device {b} (tensor {b})" in report.to_text(
        probe(pairs=found)
    )
    found.seconds[:, b, a] *= 2
    assert named_slow(probe(pairs=found)) == [("pair", (min(a, b), max(a, b)))]
    assert "slow: the link between device" in report.to_text(probe(pairs=found))


def test_a_device_whose_links_are_all_slow_is_named_and_its_partners_are_not():
    found = pairs(8, noise=NOISE)
    found.seconds[:, 5, :] *= 2
    found.seconds[:, :, 5] *= 2
    assert named_slow(probe(pairs=found)) == [("links", (5,))]


def test_links_between_machines_are_held_against_each_other_and_not_against_those_in_one():
    found = pairs(8)
    machines = np.arange(8) // 4
    found.seconds[:, machines[:, None] != machines] *= 20
    across = replace(probe(MeshConfig(data=2, tensor=4), {}, per_machine=4), pairs=found)
    assert named_slow(across) == []
    found.seconds[:, 1, 6] *= 2
    assert named_slow(across) == [("pair", (1, 6))]


def test_times_that_vary_are_a_verdict_on_the_machine_and_on_nothing_else():
    slow, steady = pairs(8, spread=0.6), devices(8)
    slow.seconds[:, 0, 1] *= 2
    steady.flops[2] *= 0.5
    found = judge.findings(probe(pairs=slow, devices=steady))
    # the devices were measured in a quiet moment
    assert [one.what for one in found] == ["machine", "device"]
    assert "the times of pairs vary by 60%" in found[0].sentence


def test_a_tensor_group_over_two_machines_has_two_kinds_of_links():
    found = pairs(8)
    machines = np.arange(8) // 6
    found.seconds[:, machines[:, None] != machines] *= 20
    assert named_slow(probe(links={}, per_machine=6, pairs=found)) == []


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_as_described_scores_one_and_half_the_speed_scores_a_half(kind):
    cluster = named("h100", 16)
    mesh = MeshConfig(data=2, tensor=8)
    for axis in ("data", "tensor"):
        found = collective(axis, kind, getattr(mesh, axis), 1e-5, 1e9)
        timings = tuple(
            replace(t, seconds=2 * best(kind, cluster.axis(axis, mesh), t.nbytes).seconds) for t in found.timings
        )
        measured = replace(probe(mesh, {}), collectives=(replace(found, timings=timings),))
        assert judge.score(cluster, measured, measured.collectives[0]) == pytest.approx(0.5)


def test_an_axis_far_below_its_description_is_named():
    cluster = named("h100", 8)
    # of NVLink's 450 GB/s
    found = judge.findings(probe(links={"tensor": (1e-5, 5e9)}), cluster)
    assert [one.what for one in found] == ["axis"]
    assert found[0].sentence.startswith("collectives over tensor reach 0.0")


def test_rates_of_devices_are_held_against_what_the_planner_believes():
    cluster = named("h100", 8)
    measured = devices(8)
    measured.matmul["bfloat16"] = 0.5 * 2 * 8192**3 / product(cluster.accelerator, "bfloat16", 8192, 8192, 8192)
    scores = judge.device_scores(cluster, probe(devices=replace(measured, memory_rate=cluster.accelerator.memory_rate)))
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


def test_devices_of_an_island_are_held_against_each_other_and_named_by_their_island():
    mesh = MeshConfig(data=8, islands=2)
    found = pairs(8)
    across = np.arange(8) // 4
    found.seconds[:, across[:, None] != across] *= 20
    assert named_slow(replace(probe(mesh, {}), pairs=found)) == []
    found.seconds[:, 1, 6] *= 2
    slow = replace(probe(mesh, {}), pairs=found)
    assert named_slow(slow) == [("pair", (1, 6))]
    assert "from device 1 (island 0, data 1) to device 6 (island 1, data 2)" in report.to_text(slow)


def test_a_program_of_messages_is_scored_by_what_it_costs_and_not_by_what_xla_does():
    cluster, mesh = named("h100", 16), MeshConfig(data=16)
    for algorithm, half in (("ring", 0.5), ("double_tree", 0.5)):
        found = collective("data", ALL_REDUCE, 16, 1e-5, 1e9)
        timings = tuple(
            replace(t, seconds=2 * programs.seconds(algorithm, ALL_REDUCE, ("data",), mesh, cluster, t.nbytes))
            for t in found.timings
        )
        measured = replace(found, timings=timings, algorithm=algorithm)
        assert judge.score(cluster, probe(mesh, {}), measured) == pytest.approx(half)
