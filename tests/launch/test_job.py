"""Nodes, devices a node and the supervisor's command, from a config and what was asked for."""

import argparse

import pytest
import yaml

from meshtrain.launch import job


def _job(
    tmp_path, nodes, overrides=(), cluster=None, no_flags=False, **sections
) -> job.LaunchJob:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({"mesh": {"data": 4, "tensor": 2}, **sections}))
    options = argparse.Namespace(
        config=str(path), set=list(overrides), cluster=cluster, no_flags=no_flags
    )
    return job.make(job.load(str(path), overrides), options, nodes, "python")


def test_a_config_without_nodes_is_for_as_many_as_there_are_and_one_with_nodes_keeps_them(
    tmp_path,
):
    made = _job(tmp_path, 4, ("train.steps=5",))
    assert (made.nodes, made.devices) == (4, 2)
    assert made.supervisor[:3] == ("python", "-m", "meshtrain.survive")
    assert made.supervisor[-4:] == (
        "--set",
        "train.steps=5",
        "--set",
        "survive.wanted=4",
    )
    for nodes in (1, 2, 3):
        made = _job(tmp_path, nodes, survive={"wanted": 2})
        assert (made.nodes, made.devices) == (
            nodes,
            4,
        ) and "--set" not in made.supervisor


def test_nodes_set_the_flags_of_their_cluster_unless_they_are_not_to(tmp_path):
    """Eight devices are one node of H100s, which need none; two of four."""
    assert "--flags" not in _job(tmp_path, 2).supervisor
    two = tmp_path / "two.yaml"
    two.write_text(
        "nodes: 2\ndevices_per_node: 4\naccelerator: {name: h100}\n"
        "links: {node: {devices: 4, bandwidth: 450}, rail: {devices: 8, bandwidth: 50}}\n"
    )
    assert _job(tmp_path, 2, cluster=str(two)).supervisor[-2:] == ("--flags", str(two))
    assert (
        "--flags" not in _job(tmp_path, 2, cluster=str(two), no_flags=True).supervisor
    )
    assert "--flags" not in _job(tmp_path, 2, run={"fake_devices": 8}).supervisor


@pytest.mark.parametrize(
    ("mesh", "nodes", "cluster", "fewest"),
    [
        (512, 8, None, 64),
        (512, 8, "h100", 64),
        (24, 2, "a100-80", 3),
        (8, 1, "gb200", 2),
        (36, 4, "h100", 6),
    ],
)
def test_nodes_that_would_need_more_devices_than_they_have_are_refused_with_the_fewest_that_do(
    tmp_path, mesh, nodes, cluster, fewest
):
    sizes = {"data": mesh, "tensor": 1}
    batch = {"train": {"global_batch_size": mesh}}
    with pytest.raises(
        job.ConfigError,
        match=f"has [0-9]+; give at least {fewest} nodes, or the --cluster",
    ):
        _job(tmp_path, nodes, cluster=cluster, mesh=sizes, **batch)
    assert (
        _job(tmp_path, fewest, cluster=cluster, mesh=sizes, **batch).devices
        == mesh // fewest
    )
    # Who says nothing of the nodes' kind, and wants none of its flags, may have others.
    assert (
        _job(tmp_path, nodes, no_flags=True, mesh=sizes, **batch).devices
        == mesh // nodes
    )
    assert (
        _job(tmp_path, nodes, mesh=sizes, run={"fake_devices": mesh}, **batch).devices
        == mesh // nodes
    )


NAMES = {
    "runs/quickstart": "quickstart",
    "/a/8B run_é!": "b-run",
    "runs/123": "meshtrain",
    "r" * 99: "r" * 40,
    "a" * 39 + "--b": "a" * 39,
}


def test_the_name_is_the_run_directorys(tmp_path):
    assert {
        directory: _job(tmp_path, 1, run={"directory": directory}).name
        for directory in NAMES
    } == NAMES


def test_times():
    for text, seconds in (("0:00:01", 1), ("12:30:00", 45000), ("2-01:00:00", 176400)):
        assert job.seconds(job.duration(text)) == seconds
    for text in ("", "10", "1:99:00", "1:00:00; rm -rf /", "1:00:00\n"):
        with pytest.raises(argparse.ArgumentTypeError, match="write H:MM:SS"):
            job.duration(text)
