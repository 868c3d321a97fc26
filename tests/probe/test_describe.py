from dataclasses import replace

import numpy as np
import pytest
import yaml
from probed import PAIR_SIZES, devices, pairs, probe

from meshtrain.config import ConfigError, MeshConfig
from meshtrain.plan import ACCELERATORS, load_cluster, named
from meshtrain.probe import describe, judge, report
from meshtrain.probe.figures import Pairs

CUBE = MeshConfig(data=2, tensor=2, pipeline=2)


def loaded(measured, path):
    path.write_text(describe.to_yaml(measured))
    return load_cluster(path)


def test_what_is_written_the_planner_reads_with_a_level_for_each_kind_of_link(tmp_path):
    links = {"tensor": (4e-6, 3e11), "data": (1e-5, 4e10), "pipeline": (1.2e-5, 4.5e10)}
    measured = probe(
        MeshConfig(data=4, tensor=8, pipeline=2), links, devices=devices(64)
    )
    cluster = loaded(measured, tmp_path / "mine.yaml")
    assert (cluster.nodes, cluster.devices_per_node, cluster.accelerator.platform) == (
        8,
        8,
        "gpu",
    )
    node, rail = (dict(cluster.levels())[name] for name in ("node", "rail"))
    assert (node.devices, node.latency, node.bandwidth) == (8, 4e-6, 300)
    # data and pipeline cross the same network
    assert (rail.devices, rail.latency, rail.bandwidth) == pytest.approx(
        (64, 1.1e-5, 42.4), rel=0.01
    )
    assert cluster.axis("tensor", measured.mesh).bytes_per_second == pytest.approx(3e11)
    assert cluster.accelerator.flops("bfloat16") == pytest.approx(4e14)


def test_a_device_that_the_planner_knows_keeps_its_data_sheet_and_what_was_fitted(
    tmp_path,
):
    measured = replace(probe(devices=devices(8)), kind="h100")
    device, sheet = (
        loaded(measured, tmp_path / "mine.yaml").accelerator,
        ACCELERATORS["h100"],
    )
    fitted = ("attention", "exposed", "half_size")
    assert [getattr(device.efficiency, n) for n in fitted] == [
        getattr(sheet.efficiency, n) for n in fitted
    ]
    assert device.flops("bfloat16") == sheet.flops(
        "bfloat16"
    ) and device.memory_rate == pytest.approx(2.5e12, rel=0.01)
    assert judge.device_scores(load_cluster(tmp_path / "mine.yaml"), measured)[
        "bfloat16"
    ] == pytest.approx(1, rel=0.01)
    assert device.usable_bytes == pytest.approx(80 * 2**30, rel=0.01)


def test_a_device_that_the_planner_does_not_know_is_told():
    assert "no data sheet of some-gpu" in report.to_text(probe(devices=devices(8)))
    assert "data sheet" not in report.to_text(
        replace(probe(devices=devices(8)), kind="h100")
    )


def test_levels_that_differ_stay_apart_in_a_machine():
    """As many levels as there are names, or one more, joined where they differ least."""
    for third in (4e10, 1e10):
        links = {
            "tensor": (1e-5, 1e11),
            "data": (1e-5, 3e10),
            "pipeline": (1e-5, third),
        }
        found = describe.levels(probe(CUBE, links))
        assert {name: level.devices for name, level in found.items()} == {
            "island": 2,
            "node": 8,
        }


def test_fake_devices_share_one_machine_whose_figures_are_divided_again(tmp_path):
    links = dict.fromkeys(("tensor", "data", "pipeline"), (1e-4, 2e9))
    measured = probe(CUBE, links, platform="cpu", devices=devices(8))
    loaded(measured, tmp_path / "mine.yaml")
    cluster = named(str(tmp_path / "mine.yaml"), 8)
    assert [(name, link.devices) for name, link in cluster.levels()] == [("node", 8)]
    assert cluster.accelerator.flops("bfloat16") == pytest.approx(4e14)
    assert named(str(tmp_path / "mine.yaml"), 4).accelerator.flops(
        "bfloat16"
    ) == pytest.approx(8e14)


def test_fake_machines_keep_their_two_kinds_of_link(tmp_path):
    links = {"tensor": (1e-4, 2e9), "data": (1e-3, 2e8)}
    mesh = MeshConfig(data=2, tensor=4)
    loaded(
        probe(mesh, links, per_machine=4, platform="cpu", devices=devices(8)),
        tmp_path / "mine.yaml",
    )
    cluster = named(str(tmp_path / "mine.yaml"), 8)
    assert [(name, link.devices) for name, link in cluster.levels()] == [
        ("node", 4),
        ("rail", 8),
    ]
    assert cluster.axis("data", mesh).bytes_per_second == pytest.approx(2e8)


def test_figures_beyond_what_the_planner_takes_are_its_bounds(tmp_path):
    cluster = loaded(
        probe(links={"tensor": (0.5, 1e5)}, devices=devices(8)), tmp_path / "mine.yaml"
    )
    assert (cluster.links.node.latency, cluster.links.node.bandwidth) == (0.01, 0.01)


def test_one_device_has_no_links_and_is_told_once():
    one, two = (probe(MeshConfig(data=n), {}, devices=devices(n)) for n in (1, 2))
    assert yaml.safe_load(describe.to_yaml(one))["links"] == {}
    assert "device alone" not in report.to_text(
        one
    ) and "device alone" in report.to_text(two)


@pytest.mark.parametrize(
    "parts", [{"pairs": pairs(8)}, {"devices": devices(8), "links": {}}]
)
def test_a_file_of_a_part_is_refused(parts):
    with pytest.raises(ConfigError, match="leave --only out"):
        describe.to_yaml(probe(**parts))


def test_machines_of_different_sizes_are_refused():
    with pytest.raises(ConfigError, match="these have 2 and 6 devices"):
        describe.to_yaml(probe(per_machine=6, devices=devices(8)))


def of_two_nodes(place, noise=0.2, names=()):
    """Pairs of 16 devices of which `place` says where they stand in two machines of 8; collectives over axes that mix
    both levels.
    """
    links, mesh = (
        {"tensor": (8e-6, 5e10), "data": (8e-6, 5e10)},
        MeshConfig(data=2, tensor=8),
    )
    seconds = pairs(16, *INSIDE).seconds
    apart = place[:, None] // 8 != place // 8
    seconds[:, apart] = pairs(16, *BETWEEN).seconds[:, apart]
    seconds *= 1 + noise * np.random.default_rng(0).uniform(-1, 1, seconds.shape)
    found = probe(
        mesh, links, devices=devices(16), pairs=Pairs(PAIR_SIZES, seconds, 0.05)
    )
    return replace(
        found,
        machines=tuple((place // 8).tolist()),
        names=tuple(f"host{p // 8}/{p % 8}" for p in place),
    )


INSIDE, BETWEEN = (3e-6, 4.5e11), (8e-6, 5e10)


def test_devices_that_do_not_stand_by_their_links_are_told_their_order_and_the_levels_of_the_pairs(
    tmp_path,
):
    shuffled = np.random.default_rng(1).permutation(16)
    cluster = loaded(of_two_nodes(shuffled), tmp_path / "mine.yaml")
    assert [(name, link.devices) for name, link in cluster.levels()] == [
        ("node", 8),
        ("rail", 16),
    ]
    for link, (latency, bandwidth) in (
        (cluster.links.node, INSIDE),
        (cluster.links.rail, BETWEEN),
    ):
        assert (link.latency, link.bandwidth * 1e9) == pytest.approx(
            (latency, bandwidth), rel=0.2
        )
    hosts = [name.partition("/")[0] for name in cluster.device_order]
    assert (
        len(set(hosts[:8])) == len(set(hosts[8:])) == 1
        and len(set(cluster.device_order)) == 16
    )


def test_devices_that_stand_by_their_links_keep_the_figures_of_all_sending_at_once(
    tmp_path,
):
    cluster = loaded(of_two_nodes(np.arange(16)), tmp_path / "mine.yaml")
    assert cluster.device_order == tuple(f"host{i // 8}/{i % 8}" for i in range(16))
    assert cluster.levels()[-1][1].bandwidth == pytest.approx(50)
    assert "device_order" not in yaml.safe_load(
        describe.to_yaml(probe(pairs=pairs(8), devices=devices(8)))
    )


def test_islands_are_a_level_of_their_own(tmp_path):
    links = {"data": (4e-6, 3e11), "island": (2e-5, 2e10)}
    measured = probe(MeshConfig(data=16, islands=2), links, devices=devices(16))
    cluster = loaded(measured, tmp_path / "mine.yaml")
    assert [(name, link.devices) for name, link in cluster.levels()] == [
        ("node", 8),
        ("rail", 16),
    ]
    assert cluster.axis("island", measured.mesh).bytes_per_second == pytest.approx(2e10)


def test_some_pairs_alone_confirm_an_order_and_tell_of_no_other():
    for place, told in (
        (np.arange(16), True),
        (np.random.default_rng(1).permutation(16), False),
    ):
        measured = of_two_nodes(place)
        assert describe.cluster_pairs(measured) is not None
        one_less = measured.pairs.seconds.copy()
        one_less[:, 0, 9] = np.nan
        found = describe.cluster_pairs(
            replace(measured, pairs=replace(measured.pairs, seconds=one_less))
        )
        assert (found is not None) == told
