"""Axes on links: what the plan shows of them, and when it names another order."""

import dataclasses
from pathlib import Path

import pytest

from meshtrain.cluster.cluster import DIRECTORY
from meshtrain.config import load
from meshtrain.plan import axes, load_cluster, named, plan

FILE = Path(__file__).parents[2] / "configs/llama3_8b.yaml"
MESH = ["mesh.data=8", "mesh.tensor=4", "mesh.pipeline=2"]
WRONG = ("tensor", "island", "pipeline", "data")


def config(*overrides):
    return load(FILE, [*MESH, *overrides])


def planned(order=None):
    return plan(
        config(*[f"mesh.order=[{', '.join(order)}]"] if order else []),
        named("h100", 64),
    )


def test_each_axis_says_how_far_apart_its_neighbours_are_and_which_levels_it_crosses():
    found = {one.axis: one for one in axes.axes_on_links(planned())}
    assert list(found)[:3] == ["pipeline", "data", "tensor"]
    assert [
        (found[a].size, found[a].apart) for a in ("pipeline", "data", "tensor")
    ] == [
        (2, 32),
        (8, 4),
        (4, 1),
    ]
    assert found["tensor"].levels == (("node", 4),)
    assert found["data"].levels == (("node", 2), ("rail", 4))
    assert found["pipeline"].levels == (("rail", 2),)


def test_context_lies_next_to_tensor_outside_of_it_and_what_zero_sends_goes_over_data_and_context():
    found = {
        one.axis: one
        for one in axes.axes_on_links(
            plan(config("mesh.data=2", "mesh.context=4"), named("h100", 64))
        )
    }
    assert list(found)[:4] == ["pipeline", "data", "context", "tensor"]
    assert (
        found["context"].apart,
        found["data"].apart,
        found["data+context"].size,
    ) == (4, 16, 8)
    assert (
        found["data"].sent == 0 < min(found["context"].sent, found["data+context"].sent)
    )


def test_bytes_and_seconds_of_an_axis_are_those_of_its_collectives():
    """As counted by the traffic table, whatever the order: an order moves no byte."""
    own, wrong = planned(), planned(order=WRONG)
    for one, other in zip(
        sorted(axes.axes_on_links(own), key=str),
        sorted(axes.axes_on_links(wrong), key=str),
        strict=True,
    ):
        assert (
            one.sent
            == other.sent
            == sum(
                transfer.sent for transfer in own.transfers if transfer.axis == one.axis
            )
        )
    slower = {one.axis: one.seconds for one in axes.axes_on_links(wrong)}
    assert (
        slower["tensor"]
        > 2 * {one.axis: one.seconds for one in axes.axes_on_links(own)}["tensor"]
    )


def test_the_usual_order_is_within_a_hundredth_of_the_best():
    assert axes.faster_order(planned()) is None and not axes.notes(planned())


def test_a_wrong_order_is_told_a_better_one_with_what_it_saves():
    wrong = planned(order=WRONG)
    order, saved = axes.faster_order(wrong)
    assert order[-1] == "tensor"
    assert (
        saved == pytest.approx(1 - planned(order=order).seconds / wrong.seconds)
        and saved > 0.1
    )
    (note,) = axes.notes(wrong)
    assert note.startswith(
        f"mesh.order=[{', '.join(order)}] makes a step {saved:.1%} faster"
    )
    assert axes.notes(planned(order=order)) == []
    found = axes.as_json(wrong)
    assert (found["topology"], found["bisection"]) == (
        "rail_optimised",
        wrong.cluster.bisection,
    )
    assert (
        found["faster_order"] == list(order)
        and found["faster_by"] == saved
        and found["order"] == list(WRONG)
    )


def test_a_cluster_that_knows_the_order_of_its_devices_says_so_until_the_mesh_takes_them_so(
    tmp_path,
):
    names = tuple(f"h{i // 8}/{i % 8}" for i in range(64))
    cluster = dataclasses.replace(named("h100", 64), device_order=names)
    (note,) = axes.notes(plan(config(), cluster))
    assert "mesh.cluster=FILE" in note
    file = tmp_path / "mine.yaml"
    text = (
        (DIRECTORY / "h100.yaml")
        .read_text()
        .replace("nodes: 2", f"nodes: 8\ndevice_order: [{', '.join(names)}]")
    )
    file.write_text(text)
    taken = plan(config(f"mesh.cluster={file}"))
    assert taken.cluster == load_cluster(file) and axes.notes(taken) == []
