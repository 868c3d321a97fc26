"""Devices taken in the order that a cluster file gives: other neighbours, the same losses."""

import socket

import jax
import numpy as np
import pytest

from meshtrain.config import ConfigError, load
from meshtrain.device_order import names
from meshtrain.mesh import make_mesh
from meshtrain.step import Program

HERE = socket.gethostname()
SMALL = {"layers": 1, "d_model": 16, "heads": 4, "d_ff": 32, "vocab_size": 64}
WRONG = [0, 2, 4, 6, 1, 3, 5, 7]
FILE = """
nodes: 2
devices_per_node: 4
accelerator: {name: cpu}
links: {node: {devices: 4, latency: 1.0e-5, bandwidth: 10}, rail: {devices: 8, latency: 1.0e-4, bandwidth: 1}}
"""


def written(path, order):
    path.write_text(FILE + (f"device_order: [{', '.join(order)}]\n" if order else ""))
    return str(path)


@pytest.fixture
def repaired(tmp_path):
    return written(tmp_path / "cluster.yaml", [f"{HERE}/{number}" for number in WRONG])


def config(**mesh):
    return load(
        {
            "mesh": {"data": 2, "tensor": 4, **mesh},
            "model": SMALL,
            "train": {"global_batch_size": 4, "sequence_length": 16},
        }
    )


def test_a_device_is_named_by_its_host_and_its_number_there():
    assert names(jax.devices()[2:4]) == (f"{HERE}/2", f"{HERE}/3")


def test_the_mesh_takes_devices_in_the_order_of_the_file(repaired):
    ids = np.vectorize(lambda device: device.id)(make_mesh(config(cluster=repaired)).devices)
    assert ids[:, :, 0].tolist() == [[0, 2, 4, 6], [1, 3, 5, 7]]
    few = make_mesh(load({"mesh": {"tensor": 2, "cluster": repaired}}))
    assert [device.id for device in few.devices.flat] == [0, 2]


def test_the_order_of_axes_changes_which_devices_are_neighbours(repaired):
    order = ["island", "pipeline", "tensor", "data"]
    ids = np.vectorize(lambda device: device.id)(make_mesh(config(order=order)).devices)
    assert ids[:, :, 0].tolist() == [[0, 2, 4, 6], [1, 3, 5, 7]]
    both = np.vectorize(lambda device: device.id)(make_mesh(config(order=order, cluster=repaired)).devices)
    assert both[:, :, 0].tolist() == [[0, 4, 1, 5], [2, 6, 3, 7]]


def losses(config):
    program = Program(config, make_mesh(config))
    state, step = program.init(), program.train_step
    random, found = np.random.default_rng(0), []
    for _ in range(2):
        rows = {
            name: random.integers(0, config.model.vocab_size, x.shape) for name, x in program.batch_shapes().items()
        }
        state, said = step(state, program.place(rows))
        found.append(float(said["loss"]))
    return found


@pytest.mark.thorough
def test_losses_are_the_same_in_every_order_of_axes_and_devices(repaired):
    plain = losses(config())
    assert losses(config(order=["island", "pipeline", "tensor", "data"], cluster=repaired)) == plain
    assert plain[0] != plain[1]


@pytest.mark.parametrize(
    ("order", "says"),
    [
        ([], "has no device_order; let python -m meshtrain.probe write the file"),
        ([f"elsewhere/{i}" for i in range(8)], f"says nothing of 8 of the 8 devices that are there, {HERE}/0 for one; probe them again"),
        ([f"{HERE}/{i}" for i in (0, 1, 2, 3, 4, 5, 6, 8)], f"says nothing of 1 of the 8 devices that are there, {HERE}/7 for one"),
        ([f"{HERE}/{i % 7}" for i in range(8)], f"device_order names {HERE}/0 twice"),
        ([f"{HERE}/{i}" for i in range(7)], "device_order names 7 devices, and the cluster has 8"),
    ],
)  # fmt: skip
def test_an_order_that_does_not_fit_the_devices_there_is_refused(tmp_path, order, says):
    with pytest.raises(ConfigError, match=says) as refused:
        make_mesh(config(cluster=written(tmp_path / "cluster.yaml", order)))
    assert "\n" not in str(refused.value)
