"""The mesh: three axes over the devices, ranks that talk most lie closest, and a plain sentence where devices are too
few.
"""

import os
import socket
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from free_port import free_port
from jax.sharding import NamedSharding, PartitionSpec
from refusals import tells

from meshtrain.config import ConfigError, MeshConfig, load
from meshtrain.errors import PortTaken
from meshtrain.mesh import (
    AXES,
    arranged,
    device_names,
    join_cluster,
    make_mesh,
    platform,
)
from meshtrain.step import Program


def test_axes_are_data_tensor_pipeline_in_this_order():
    mesh = make_mesh(load({"mesh": {"data": 4, "pipeline": 2}}))
    assert mesh.axis_names == AXES == ("data", "tensor", "pipeline")
    assert dict(mesh.shape) == {"data": 4, "tensor": 1, "pipeline": 2}


def test_tensor_ranks_are_neighbours_and_stages_lie_farthest_apart():
    mesh = make_mesh(load({"mesh": {"data": 2, "tensor": 2, "pipeline": 2}}))
    ids = np.vectorize(lambda d: d.id)(mesh.devices)
    assert ids[0, :, 0].tolist() == [0, 1]
    assert ids[:, 0, 0].tolist() == [0, 2]
    assert ids[0, 0, :].tolist() == [0, 4]


def test_mesh_smaller_than_the_machine_takes_its_first_devices():
    assert [d.id for d in make_mesh(load({"mesh": {"tensor": 2}})).devices.flat] == [
        0,
        1,
    ]


def test_given_devices_are_used_in_their_order():
    chosen = jax.devices()[:3:-1]
    assert list(make_mesh(load({"mesh": {"data": 4}}), chosen).devices.flat) == chosen


@pytest.mark.parametrize(
    ("mesh", "flags", "says"),
    [
        (
            {"data": 4, "tensor": 4},
            "",
            [
                "data 4 x tensor 4 x pipeline 1 needs 16 devices",
                "8 (cpu)",
                "run.fake_devices=16.",
            ],
        ),
        (
            {"data": 4, "tensor": 4},
            "--xla_force_host_platform_device_count=8",
            [
                "needs 16 devices",
                "8 (cpu)",
                "XLA_FLAGS asks for 8",
                "run.fake_devices",
                "16",
            ],
        ),
        (
            {"data": 2048},
            "",
            ["needs 2048 devices", "8 (cpu)", "run.fake_devices fakes at most 1024."],
        ),
    ],
)
def test_too_few_devices_are_told_with_the_way_out(mesh, flags, says, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", flags)
    batch = {"global_batch_size": mesh["data"]}
    with pytest.raises(ConfigError) as refused:
        make_mesh(load({"mesh": mesh, "train": batch, "run": {"fake_devices": 8}}))
    assert tells(str(refused.value), *says)


def test_fake_devices_are_platform_cpu():
    assert platform(make_mesh(load({}))) == "cpu"


@dataclass(frozen=True)
class Chip:
    """A device of a described torus, as far as JAX looks at it."""

    id: int
    coords: tuple[int, int, int]
    process_index: int
    platform: str = "tpu"
    device_kind: str = "TPU v5"
    core_on_chip: int = 0
    slice_index: int = 0


def torus(x: int, y: int, z: int) -> list[Chip]:
    """Chips in the order of their hosts, each of which has a square of four."""
    corners = [
        (i, j, k) for k in range(z) for j in range(0, y, 2) for i in range(0, x, 2)
    ]
    places = [
        (i + a, j + b, k) for i, j, k in corners for b in range(2) for a in range(2)
    ]
    return [Chip(n, at, n // 4) for n, at in enumerate(places)]


# A ring of 4 where the axes are the torus's; else the squares of the hosts, whose rows of the batch would be torn
# apart.
@pytest.mark.parametrize(
    ("data", "tensor", "pipeline", "links"),
    [(4, 4, 4, 1), (2, 8, 4, 2), (8, 4, 2, 2), (16, 4, 1, 2)],
)
def test_on_a_torus_tensor_ranks_are_neighbours(data, tensor, pipeline, links):
    chips = torus(4, 4, 4)
    grid = arranged(chips, MeshConfig(data, tensor, pipeline))
    assert sorted(chip.id for chip in grid.flat) == list(range(64))
    for rank in range(data):
        for stage in range(pipeline):
            at = np.array([chip.coords for chip in grid[rank, :, stage]])
            steps = np.abs(at - np.roll(at, 1, axis=0))
            assert np.minimum(steps, 4 - steps).sum(axis=1).max() <= links


def test_a_process_has_neighbouring_rows_however_a_torus_is_cut():
    chips = torus(4, 4, 1)
    for data, tensor, pipeline in [(16, 1, 1), (4, 2, 2), (2, 2, 4), (8, 2, 1)]:
        grid = arranged(chips, MeshConfig(data, tensor, pipeline))
        for process in range(4):
            rows = sorted(
                {
                    r
                    for (r, _, _), chip in np.ndenumerate(grid)
                    if chip.process_index == process
                }
            )
            assert rows == list(range(rows[0], rows[-1] + 1))


DEVICES = """
from meshtrain.config import load
from meshtrain.mesh import make_mesh
import jax, os
make_mesh(load({sections}))
print(jax.device_count(), os.environ.get("PJRT_NPROC"))
"""


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("sections", "flags", "printed"),
    [
        # as many as the mesh needs, 4 threads each
        ({"mesh": {"data": 3}, "train": {"global_batch_size": 3}}, "", "3 12"),
        ({"mesh": {"data": 2}, "run": {"fake_devices": 6}}, "", "6 24"),
        (
            {"mesh": {"data": 2}, "run": {"fake_devices": 6}},
            "--xla_force_host_platform_device_count=5",
            "5 20",
        ),
    ],
)
def test_devices_are_faked_before_jax_starts_and_flags_win(sections, flags, printed):
    bare = {k: v for k, v in os.environ.items() if k not in ("PJRT_NPROC", "XLA_FLAGS")}
    ended = subprocess.run(
        [sys.executable, "-c", DEVICES.format(sections=sections)],
        env={**bare, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.stdout.strip() == printed, ended.stderr


NOTEBOOK = """
import meshtrain as mt, jax
{before}
try:
    mt.fake_devices({count})
    print(len(jax.devices()), jax.devices()[0].platform, mt.make_mesh(mt.load({{"mesh": {{"tensor": 6}}, "model": {{"heads": 6, "d_model": 48}}}})).size)
except mt.ConfigError as error:
    print(error)
"""


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("before", "count", "flags", "printed"),
    [
        ("", 6, "", "6 cpu 6"),
        ("", 6, "--xla_force_host_platform_device_count=7", "7 cpu 6"),
        ("jax.devices()", 6, "", "JAX has started already, with 1 cpu devices"),
        (
            "",
            6,
            "--xla_force_host_platform_device_count=5",
            "JAX has started already, with 5 cpu devices",
        ),
        ("mt.fake_devices(6)", 6, "", "6 cpu 6"),
        ("", 0, "", "mt.fake_devices(0): "),
    ],
)
def test_a_notebook_asks_for_fake_devices_once_and_first(before, count, flags, printed):
    bare = {
        k: v
        for k, v in os.environ.items()
        if k not in ("PJRT_NPROC", "XLA_FLAGS", "JAX_PLATFORMS")
    }
    command = [sys.executable, "-c", NOTEBOOK.format(before=before, count=count)]
    ended = subprocess.run(
        command,
        env={**bare, "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.stdout.startswith(printed), ended.stdout + ended.stderr


JOINS = (
    "import jax; from meshtrain.mesh import join_cluster; join_cluster(); print(jax.process_index(), "
    "jax.process_count())"
)


def joins(script: str = JOINS, **environment: str) -> subprocess.Popen:
    clean = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("JAX_", "SLURM_", "JOB_", "XLA_", "PJRT_"))
    }
    command = [sys.executable, "-c", script]
    return subprocess.Popen(
        command,
        env=clean | {"JAX_PLATFORMS": "cpu"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.thorough
def test_processes_named_by_the_environment_find_each_other():
    named = {
        "JAX_COORDINATOR_ADDRESS": f"localhost:{free_port()}",
        "JAX_NUM_PROCESSES": "2",
    }
    both = joins(**named, JAX_PROCESS_ID="0"), joins(**named, JOB_COMPLETION_INDEX="1")
    assert [process.communicate(timeout=60)[0].split() for process in both] == [
        ["0", "2"],
        ["1", "2"],
    ]


SHARE = """
import jax
from meshtrain.config import load
from meshtrain.mesh import join_cluster, make_mesh
join_cluster()
try:
    make_mesh(load({sections}))
    print(jax.local_device_count(), jax.device_count())
except ValueError as error:
    print(error)
"""


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("sections", "flags", "printed"),
    [
        ({"mesh": {"data": 4}}, "", "2 4"),
        # All of them in the mesh
        ({"mesh": {"data": 4}, "run": {"fake_devices": 6}}, "", "2 4"),
        ({"mesh": {"data": 3}, "train": {"global_batch_size": 3}}, "", "2 4"),
        ({"mesh": {"data": 4}}, "--xla_force_host_platform_device_count=3", "3 6"),
        (
            {"mesh": {}},
            "",
            "process 1 has no device",
        ),
    ],
)
def test_each_process_fakes_its_share_of_the_mesh(sections, flags, printed):
    named = {
        "JAX_COORDINATOR_ADDRESS": f"localhost:{free_port()}",
        "JAX_NUM_PROCESSES": "2",
        "XLA_FLAGS": flags,
    }
    both = [
        joins(SHARE.format(sections=sections), **named, JAX_PROCESS_ID=str(rank))
        for rank in (0, 1)
    ]
    said = [process.communicate(timeout=60) for process in both]
    assert all(out.splitlines()[-1].startswith(printed) for out, _ in said), said


@pytest.mark.thorough
def test_the_environment_of_jax_wins_over_that_of_slurm():
    named = {
        "JAX_COORDINATOR_ADDRESS": f"localhost:{free_port()}",
        "JAX_NUM_PROCESSES": "1",
        "JAX_PROCESS_ID": "0",
    }
    slurm = {
        "SLURM_NTASKS": "4",
        "SLURM_JOB_ID": "1",
        "SLURM_PROCID": "3",
        "SLURM_LOCALID": "0",
        "SLURM_STEP_NODELIST": "nowhere",
    }
    assert joins(**named, **slurm).communicate(timeout=60)[0].split() == ["0", "1"]


@pytest.mark.parametrize("bind", ["localhost:{port}", None])
def test_a_port_in_use_is_one_sentence(monkeypatch, bind):
    with socket.create_server(("localhost", 0)) as taken:
        port = taken.getsockname()[1]
        named = {
            "JAX_COORDINATOR_ADDRESS": f"localhost:{port}",
            "JAX_NUM_PROCESSES": "2",
            "JAX_PROCESS_ID": "0",
        }
        for key, value in (
            named
            | ({"JAX_COORDINATOR_BIND_ADDRESS": bind.format(port=port)} if bind else {})
        ).items():
            monkeypatch.setenv(key, value)
        with pytest.raises(
            PortTaken,
            match=f"^the coordinator cannot listen at .*:{port}: address already in use; ",
        ):
            join_cluster()


def test_a_job_of_slurm_without_srun_is_told_of_it(monkeypatch):
    for key, value in {
        "SLURM_JOB_ID": "1",
        "SLURM_NTASKS": "2",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
    }.items():
        monkeypatch.setenv(key, value)
    monkeypatch.delenv("SLURM_STEP_NODELIST", raising=False)
    with pytest.raises(
        ConfigError,
        match=r"^this is one process .* 2 tasks; .* srun, ",
    ):
        join_cluster()


@pytest.mark.parametrize(
    ("environment", "name"),
    [({}, "JAX_NUM_PROCESSES"), ({"JAX_NUM_PROCESSES": "2"}, "JAX_PROCESS_ID")],
)
def test_a_coordinator_without_the_numbers_is_refused_by_name(
    monkeypatch, environment, name
):
    for key, value in {"JAX_COORDINATOR_ADDRESS": "localhost:1", **environment}.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(ConfigError, match=f"{name} is not set"):
        join_cluster()


@pytest.mark.parametrize(
    ("name", "wrong", "says"),
    [
        ("JAX_COORDINATOR_ADDRESS", "localhost", "'localhost'; it must be host:port"),
        ("JAX_NUM_PROCESSES", "0", "'0'; .* from 1 to"),
        ("JAX_NUM_PROCESSES", "9" * 5000, "'999.*…999.*'; .* whole number"),
        ("JAX_PROCESS_ID", "2", "'2'; .* from 0 to 1"),
        ("JAX_PROCESS_ID", "²", "'²'; .* whole number"),
    ],
)
def test_numbers_that_no_process_can_have_are_refused_before_anybody_waits(
    monkeypatch, name, wrong, says
):
    named = {
        "JAX_COORDINATOR_ADDRESS": "localhost:1",
        "JAX_NUM_PROCESSES": "2",
        "JAX_PROCESS_ID": "1",
        name: wrong,
    }
    for key, value in named.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(ConfigError, match=f"{name} is {says}"):
        join_cluster()


def test_a_backend_that_jax_does_not_have_is_one_sentence(monkeypatch):
    def refused():
        raise RuntimeError(
            "Unable to initialize backend 'moon': it is far away\nand more"
        )

    monkeypatch.setattr(jax, "devices", refused)
    with pytest.raises(
        ConfigError,
        match=r"^JAX finds no devices .*'moon': .*; JAX_PLATFORMS=cpu",
    ):
        make_mesh(load({"run": {"fake_devices": 8}}))


# --- devices in the order that a cluster file gives

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


def ordered(**mesh):
    return load(
        {
            "mesh": {"data": 2, "tensor": 4, **mesh},
            "model": SMALL,
            "train": {"global_batch_size": 4, "sequence_length": 16},
        }
    )


def test_a_device_is_named_by_its_host_and_its_number_there():
    assert device_names(jax.devices()[2:4]) == (f"{HERE}/2", f"{HERE}/3")


def test_the_mesh_takes_devices_in_the_order_of_the_file(repaired):
    ids = np.vectorize(lambda device: device.id)(
        make_mesh(ordered(cluster=repaired)).devices
    )
    assert ids[:, :, 0].tolist() == [[0, 2, 4, 6], [1, 3, 5, 7]]
    few = make_mesh(load({"mesh": {"tensor": 2, "cluster": repaired}}))
    assert [device.id for device in few.devices.flat] == [0, 2]


def test_the_order_of_axes_changes_which_devices_are_neighbours(repaired):
    order = ["island", "pipeline", "tensor", "data"]
    ids = np.vectorize(lambda device: device.id)(
        make_mesh(ordered(order=order)).devices
    )
    assert ids[:, :, 0].tolist() == [[0, 2, 4, 6], [1, 3, 5, 7]]
    both = np.vectorize(lambda device: device.id)(
        make_mesh(ordered(order=order, cluster=repaired)).devices
    )
    assert both[:, :, 0].tolist() == [[0, 4, 1, 5], [2, 6, 3, 7]]


def losses(config):
    program = Program(config, make_mesh(config))
    state, step = program.init(), program.train_step
    random, found = np.random.default_rng(0), []
    for _ in range(2):
        rows = {
            name: random.integers(0, config.model.vocab_size, x.shape)
            for name, x in program.batch_shapes().items()
        }
        state, said = step(state, program.place(rows))
        found.append(float(said["loss"]))
    return found


@pytest.mark.thorough
def test_losses_are_the_same_in_every_order_of_axes_and_devices(repaired):
    plain = losses(ordered())
    assert (
        losses(
            ordered(order=["island", "pipeline", "tensor", "data"], cluster=repaired)
        )
        == plain
    )
    assert plain[0] != plain[1]


@pytest.mark.parametrize(
    ("order", "says"),
    [
        ([], "no device_order; let meshtrain probe"),
        (
            [f"elsewhere/{i}" for i in range(8)],
            f"8 of the 8 devices .*, {HERE}/0 for one; probe",
        ),
        (
            [f"{HERE}/{i}" for i in (0, 1, 2, 3, 4, 5, 6, 8)],
            f"1 of the 8 devices .*, {HERE}/7 for one",
        ),
        ([f"{HERE}/{i % 7}" for i in range(8)], f"device_order names {HERE}/0 twice"),
        ([f"{HERE}/{i}" for i in range(7)], "device_order names 7 devices, .* 8"),
    ],
)
def test_an_order_that_does_not_fit_the_devices_there_is_refused(tmp_path, order, says):
    with pytest.raises(ConfigError, match=says) as refused:
        make_mesh(ordered(cluster=written(tmp_path / "cluster.yaml", order)))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("data, is_kept", [(1, True), (2, False)])
def test_a_program_of_several_cpu_devices_never_comes_from_the_compilation_cache(
    data, is_kept
):
    mesh = make_mesh(load({"mesh": {"data": data}}), jax.devices()[:data])
    rows = NamedSharding(mesh, PartitionSpec("data"))
    events = Counter()

    def compile_program():
        program = jax.jit(lambda x: jnp.sin(x).sum(), in_shardings=rows)
        return program.lower(jax.ShapeDtypeStruct((4, 3), jnp.float32)).compile()

    def count(event, **_):
        events[event] += 1

    name = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, name)
    jax.config.update(name, 0)
    jax.monitoring.register_event_listener(count)
    try:
        compile_program()
        events.clear()
        compile_program()
    finally:
        jax.monitoring.unregister_event_listener(count)
        jax.config.update(name, before)
    assert events["/jax/compilation_cache/cache_hits"] == is_kept
