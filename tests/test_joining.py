"""What an environment says of a process among others: read before JAX, and refused in one sentence where it does not
agree.
"""

import pytest

from meshtrain.config import ConfigError
from meshtrain.joining import place_of
from meshtrain.mesh import join_cluster

JAX = {
    "JAX_COORDINATOR_ADDRESS": "host:1234",
    "JAX_NUM_PROCESSES": "4",
    "JAX_PROCESS_ID": "3",
}
SLURM = {
    "SLURM_JOB_ID": "4097",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "node[01-02]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "4",
}


def test_a_process_that_nobody_numbers_is_alone():
    for environment in (
        {},
        {"SLURM_NTASKS": "1"},
        {"SLURM_NTASKS": ""},
        {"JAX_NUM_PROCESSES": "1"},
        {"SLURM_PROCID": "3"},
    ):
        assert place_of(environment) is None


def test_a_process_knows_its_place_among_those_that_meet_at_an_address():
    place = place_of(JAX)
    assert (place.address, place.processes, place.process, place.listen) == (
        "host:1234",
        4,
        3,
        "[::]:1234",
    )
    assert (
        place_of({**JAX, "JAX_COORDINATOR_ADDRESS": "[fe80::1]:9"}).listen == "[::]:9"
    )
    assert (
        place_of({**JAX, "JAX_COORDINATOR_BIND_ADDRESS": "10.0.0.1:80"}).listen
        == "10.0.0.1:80"
    )


def test_a_task_of_slurm_knows_its_place_and_the_port_that_jax_takes():
    place = place_of(SLURM)
    assert (place.address, place.processes, place.process, place.by_slurm) == (
        None,
        4,
        3,
        True,
    )
    assert place.listen == f"[::]:{4097 % 4096 + 61440}"
    assert place_of({**SLURM, "JAX_COORDINATOR_PORT": "77"}).listen == "[::]:77"
    assert (
        place_of({**SLURM, "JAX_COORDINATOR_ADDRESS": "host:1234"}).listen
        == "[::]:1234"
    )


@pytest.mark.parametrize(
    ("nodes", "count"),
    [
        ("a", 1),
        ("a,b-2", 2),
        ("n[1-3]", 3),
        ("n[001-003,7],other", 5),
        ("r[0-1]n[0-1]", 4),
        ("n[1-2].site,m[3]", 3),
    ],
)
def test_every_list_of_nodes_that_slurm_writes_is_counted(nodes, count):
    environment = {
        **SLURM,
        "SLURM_NTASKS": "8",
        "SLURM_STEP_NUM_TASKS": "8",
        "SLURM_STEP_NODELIST": nodes,
    }
    assert place_of({**environment, "SLURM_STEP_NUM_NODES": str(count)}).processes == 8
    with pytest.raises(
        ConfigError, match=r"SLURM_STEP_NUM_NODES is 6, but .* they must agree"
    ):
        place_of({**environment, "SLURM_STEP_NUM_NODES": "6"})


WRONG = [
    ({"JAX_COORDINATOR_ADDRESS": wrong}, "JAX_COORDINATOR_ADDRESS")
    for wrong in (
        "host",
        "host:",
        ":80",
        "host:0",
        "host:99999",
        "host:65536",
        "host:-1",
        "host:x",
        "http://host:80",
        "a b:80",
        "::1:80",
        "host:80:80",
        "host:٣",
        "[::1:80",
        "host:1234567",
    )
]
WRONG += [
    ({"JAX_NUM_PROCESSES": wrong}, "JAX_NUM_PROCESSES")
    for wrong in ("0", "-1", "x", "1.5", "", "9" * 99, "²")
]
WRONG += [
    ({"JAX_PROCESS_ID": wrong}, "JAX_PROCESS_ID")
    for wrong in ("4", "-1", "x", "", "1e3", " 1")
]
WRONG += [
    ({"JAX_COORDINATOR_BIND_ADDRESS": wrong}, "JAX_COORDINATOR_BIND_ADDRESS")
    for wrong in ("host", "host:99999")
]
WRONG += [
    ({"JAX_LOCAL_DEVICE_IDS": wrong}, "JAX_LOCAL_DEVICE_IDS")
    for wrong in ("x", "0,", "-1", "0 1")
]
WRONG += [({"SLURM_LOCALID": "x"}, "SLURM_LOCALID")]
WRONG += [({name: "x"}, name) for name in ("JAX_PARTITION_INDEX", "JAX_SLICE_INDEX")]


@pytest.mark.parametrize(
    ("wrong", "named"),
    WRONG,
    ids=[" ".join(map("=".join, w.items())) for w, _ in WRONG],
)
def test_a_variable_that_jax_would_stumble_over_is_refused_by_name(wrong, named):
    with pytest.raises(ConfigError, match=named):
        place_of({**JAX, **wrong})


@pytest.mark.parametrize(
    "missing", ["JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "JAX_COORDINATOR_ADDRESS"]
)
def test_a_variable_that_is_missing_is_named(missing):
    with pytest.raises(ConfigError, match=f"{missing} is not set"):
        place_of({name: value for name, value in JAX.items() if name != missing})


WRONG_SLURM = [
    ({"SLURM_NTASKS": "x"}, "SLURM_NTASKS"),
    ({"SLURM_NTASKS": "0"}, "SLURM_NTASKS"),
    ({"SLURM_NTASKS": "-2"}, "SLURM_NTASKS"),
    ({"SLURM_NTASKS": "3"}, "SLURM_PROCID"),
    ({"SLURM_PROCID": "4"}, "SLURM_PROCID"),
    ({"SLURM_PROCID": "-1"}, "SLURM_PROCID"),
    ({"SLURM_PROCID": "x"}, "SLURM_PROCID"),
    ({"SLURM_LOCALID": "4"}, "SLURM_LOCALID"),
    ({"SLURM_LOCALID": "x"}, "SLURM_LOCALID"),
    ({"SLURM_JOB_ID": "x"}, "SLURM_JOB_ID"),
    ({"SLURM_JOB_ID": ""}, "SLURM_JOB_ID"),
    ({"SLURM_STEP_NUM_NODES": "3"}, "SLURM_STEP_NUM_NODES"),
    ({"SLURM_STEP_NUM_NODES": "9"}, "SLURM_STEP_NUM_NODES"),
    ({"SLURM_STEP_NUM_TASKS": "8"}, "SLURM_STEP_NUM_TASKS"),
    ({"SLURM_STEP_NODELIST": ""}, "SLURM_STEP_NODELIST"),
    ({"SLURM_STEP_NODELIST": "node[1-"}, "SLURM_STEP_NODELIST"),
    ({"SLURM_STEP_NODELIST": "node[2-1]"}, "SLURM_STEP_NODELIST"),
    ({"SLURM_STEP_NODELIST": "a,,b"}, "SLURM_STEP_NODELIST"),
    ({"SLURM_STEP_NODELIST": "a b"}, "SLURM_STEP_NODELIST"),
    ({"SLURM_STEP_NODELIST": "[1-2]"}, "SLURM_STEP_NODELIST"),
    (
        {"SLURM_STEP_NODELIST": "n[1-9]", "SLURM_STEP_NUM_NODES": "9"},
        "SLURM_STEP_NUM_NODES",
    ),
    ({"JAX_COORDINATOR_PORT": "99999"}, "JAX_COORDINATOR_PORT"),
    ({"JAX_COORDINATOR_PORT": "x"}, "JAX_COORDINATOR_PORT"),
    ({"JAX_COORDINATOR_ADDRESS": "host:99999"}, "JAX_COORDINATOR_ADDRESS"),
]


@pytest.mark.parametrize(
    ("wrong", "named"),
    WRONG_SLURM,
    ids=[" ".join(map("=".join, w.items())) for w, _ in WRONG_SLURM],
)
def test_variables_of_slurm_that_do_not_agree_are_refused_by_name(wrong, named):
    with pytest.raises(ConfigError, match=named):
        place_of({**SLURM, **wrong})


@pytest.mark.parametrize(
    "missing", ["SLURM_JOB_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NODELIST"]
)
def test_a_variable_of_slurm_that_is_missing_is_told(missing):
    with pytest.raises(
        ConfigError,
        match="srun" if missing == "SLURM_STEP_NODELIST" else f"{missing} is not set",
    ):
        place_of({name: value for name, value in SLURM.items() if name != missing})


@pytest.mark.parametrize(
    "wrong", [{"JAX_COORDINATOR_ADDRESS": "host:99999"}, {"SLURM_PROCID": "9"}]
)
def test_nothing_of_it_reaches_jax(wrong, monkeypatch):
    monkeypatch.setattr(
        "jax.distributed.initialize", lambda *_, **__: pytest.fail("JAX was asked")
    )
    for name, value in {
        **(JAX if "JAX_COORDINATOR_ADDRESS" in wrong else SLURM),
        **wrong,
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError):
        join_cluster()


@pytest.mark.parametrize("address", ["nowhere.invalid:1234", "192.0.2.1:1234"])
def test_an_address_at_which_nobody_can_listen_here_is_refused(address, monkeypatch):
    monkeypatch.setattr(
        "jax.distributed.initialize", lambda *_, **__: pytest.fail("JAX was asked")
    )
    for name, value in {
        **JAX,
        "JAX_PROCESS_ID": "0",
        "JAX_COORDINATOR_BIND_ADDRESS": address,
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        ConfigError, match=rf"cannot listen at {address}: .*; give another address"
    ):
        join_cluster()
