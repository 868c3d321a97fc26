"""Faults that are asked for happen, once, to the right rank at the right moment."""

import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from supervised import Rank, supervised

from meshtrain.config import ConfigError, load
from meshtrain.config.inject import KINDS, parse
from meshtrain.mesh import fake_cpu_devices
from meshtrain.survive import begun
from meshtrain.survive.heartbeat import Heartbeat
from meshtrain.survive.injector import _FAULTS, Injector, NodeInjector

STEP = 3  # at which the faults are asked for


def test_the_catalogue_has_32_kinds_in_order_and_each_of_a_trainer_is_done_at_a_moment():
    assert [kind.number for kind in KINDS.values()] == list(range(1, 33))
    of_trainer = [kind for kind in KINDS.values() if kind.where == "trainer"]
    assert {kind.name for kind in of_trainer} == set(_FAULTS)
    assert all(
        (kind.moment is not None) == (kind in of_trainer) for kind in KINDS.values()
    )


def test_a_fault_is_asked_for_by_kind_step_and_rank():
    (request,) = parse("kill@40:1")
    assert (request.name, request.kind.name, request.step, request.rank) == (
        "kill@40:1",
        "kill",
        40,
        1,
    )
    assert parse("kill@40:1.b")[0].name == "kill@40:1.b"
    assert [(r.name, r.rank) for r in parse("kill-two@4:2")] == [
        ("kill-two@4:2", 2),
        ("kill-two@4:2+1", 3),
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("kil@4:0", r"kil; did you mean kill\?"),
        ("moon@4:0", r"no fault moon; legal are node-lost, .*, node-returns\.$"),
        ("kill", r"it must be KIND@STEP:RANK, as in kill@40:1\."),
        ("kill@3", "must be KIND@STEP:RANK"),
        ("kill@-1:0", "must be KIND@STEP:RANK"),
        ("kill@1:99999999", "must be KIND@STEP:RANK"),
        ("kill@1:0.a/../b", "must be KIND@STEP:RANK"),
        ("kill@１:0", "must be KIND@STEP:RANK"),
        ("kill@" + "9" * 500 + ":1", "must be KIND@STEP:RANK"),
        ("kill@101:0", r"kill@101:0.*train\.steps is 100"),
    ],
)
def test_what_asks_for_no_fault_is_refused_with_the_config(text, says):
    with pytest.raises(ConfigError, match=f"^survive.inject has .*{says}"):
        load({"train": {"steps": 100}, "survive": {"inject": [text]}})


# --- a process that is hurt


class State(NamedTuple):
    params: dict[str, jax.Array]


def checkpoint(directory: Path, step: int) -> Path:
    """Something like a committed step, whose arrays are in two files."""
    arrays = directory / "checkpoints" / str(step) / "arrays"
    arrays.mkdir(parents=True)
    (arrays.parent / "COMMIT").touch()
    (arrays / "small").write_bytes(b"ab")
    (arrays / "large").write_bytes(bytes(1000))
    return arrays


def run(directory: str, asked: list[str]) -> None:
    """The moments of a run of 6 steps from step 0, in which a save begins after each."""
    fake_cpu_devices(2)
    beat = begun()
    injector = Injector(beat, asked)
    devices = NamedSharding(Mesh(jax.devices(), ("data",)), PartitionSpec("data"))
    state, batch = (
        State({"w": jnp.zeros((2, 3, 4))}),
        {"tokens": jax.device_put(np.zeros((4, 2), np.int32), devices)},
    )
    beat.phase("join")
    injector.at("join")
    injector.at("restore")
    injector.at("compile", 0)
    for step in range(6):
        beat.phase("data")
        injector.at("data", step)
        injector.in_loader()
        beat.phase("dispatch")
        injector.at("dispatch", step, (state, batch))
        beat.phase("wait")
        time.sleep(0.02)
        beat.took(step + 1)
        injector.at("save", step + 1)
        writing = Path(directory) / "checkpoints" / f"{step + 1}.writing"
        writing.mkdir(parents=True)
        time.sleep(0.05)
        writing.rmdir()
    beat.phase("end")
    print("ended", flush=True)
    time.sleep(0.6)  # until the beat is written
    os._exit(0)


def hurt(directory: Path, asked: str, rank: int = 0) -> Rank:
    return Rank(supervised(directory, rank), run, str(directory), [asked])


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        ("kill", -signal.SIGKILL),
        ("segv", -signal.SIGSEGV),
        ("abort", -signal.SIGABRT),
        ("preempt", -signal.SIGTERM),
        ("kill-two", -signal.SIGKILL),
        ("kill-save", -signal.SIGKILL),
        ("crash-loop", -signal.SIGKILL),
        ("out-of-memory", 1),
        ("error", 1),
    ],
)
def test_a_process_ends_at_the_step_in_the_way_that_was_asked_for(tmp_path, kind, code):
    rank = hurt(tmp_path, f"{kind}@{STEP}:0")
    ended = rank.end()
    assert (ended, rank.beat.get("step")) == (code, STEP), (
        f"{rank.beat} {rank.output.read_text()}"
    )
    said = rank.output.read_text()
    assert (
        f"meshtrain: {kind}@{STEP}:0: {KINDS[kind].does}, injected into rank 0 after step {STEP}."
        in said
    )
    assert ("RESOURCE_EXHAUSTED" in said) == (kind == "out-of-memory")
    if kind == "kill-save":
        assert (tmp_path / "checkpoints" / f"{STEP}.writing").exists()


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["kill-forming", "kill-restore"])
def test_a_fault_of_the_start_waits_for_a_checkpoint_of_the_step(tmp_path, kind):
    assert hurt(tmp_path, f"{kind}@4:0").end() == 0
    checkpoint(tmp_path, 4)
    rank = hurt(tmp_path, f"{kind}@4:0")
    assert rank.end() == -9 and rank.beat["phase"] == "join"
    assert hurt(tmp_path, f"{kind}@4:0").end() == 0


@pytest.mark.thorough
def test_a_fault_happens_once_unless_it_is_one_for_ever(tmp_path):
    for fault, again in (
        ("kill@2:0", 0),
        ("kill-two@2:0", 0),
        ("kill-compile@0:0", 0),
        ("crash-loop@2:0", -9),
    ):
        assert hurt(tmp_path, fault).end() == -9
        assert hurt(tmp_path, fault).end() == again
    assert hurt(tmp_path, "kill@2:0.b").end() == -9  # asked for once more


@pytest.mark.thorough
def test_the_other_ranks_are_left_alone_but_for_the_second_of_two(tmp_path):
    assert hurt(tmp_path, "kill@2:0", rank=1).end() == 0
    assert hurt(tmp_path, "kill-two@2:0", rank=2).end() == 0
    assert hurt(tmp_path, "kill-two@2:0", rank=1).end() == -9
    assert hurt(tmp_path, "kill-two@2:0", rank=0).end() == -9


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "phase", "state", "thread_lives", "stack"),
    [
        ("frozen", "dispatch", "T", False, None),
        ("asleep", "dispatch", "S", True, "_sleep"),
        ("loader", "data", "S", True, "in_loader"),
        ("gil", "dispatch", "S", False, "_hold_gil"),
        ("d-state", "dispatch", "D", False, "_sleep_in_kernel"),
        ("collective", "wait", "S", True, "_never_ready"),
    ],
)
def test_a_process_hangs_in_the_way_that_was_asked_for(
    tmp_path, kind, phase, state, thread_lives, stack
):
    rank = hurt(tmp_path, f"{kind}@{STEP}:0")
    rank.until(lambda: "injected" in rank.output.read_text() and rank.state == state)
    time.sleep(0.3)
    before = rank.beat
    time.sleep(1.6)
    after = rank.beat
    rank.until(
        lambda: rank.state == state
    )  # at most for moments it is another: a sleep that ends, and begins again
    assert (after["phase"], after["step"], after["n"]) == (phase, STEP, before["n"])
    assert (after["alive"] > before["alive"]) == thread_lives
    if stack and state != "D":  # a process in the kernel hears no signal
        os.kill(rank.process.pid, signal.SIGUSR1)
        rank.until(lambda: stack in rank.told.own("stack").read_text())
        time.sleep(0.2)
        assert rank.beat["n"] == before["n"]  # to be asked does not wake it
    rank.kill()
    # What the fault had started ends with it
    rank.until(lambda: not processes_of(tmp_path))


def processes_of(directory: Path) -> list[str]:
    """The command lines that name the directory."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            command = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if str(directory).encode() in command and entry.name != str(os.getpid()):
            found.append(command.decode())
    return found


@pytest.mark.thorough
def test_a_byte_of_the_newest_checkpoint_is_flipped_once_there_is_one(tmp_path):
    assert hurt(tmp_path, "damage@1:0").end() == 0
    old, new = checkpoint(tmp_path, 2), checkpoint(tmp_path, 10)
    assert hurt(tmp_path, "damage@1:0").end() == -9
    assert (
        sum((new / "large").read_bytes()) == 1
        and len((new / "large").read_bytes()) == 1000
    )
    assert (
        not any((old / "large").read_bytes()) and (new / "small").read_bytes() == b"ab"
    )


@pytest.mark.thorough
def test_a_run_that_goes_on_takes_requests(tmp_path):
    rank = Rank(supervised(tmp_path), run_for_ever)
    rank.until(lambda: rank.beat.get("phase") == "wait")
    requests = tmp_path / "survive" / "inject"
    (requests / ".kill@1:0.part").touch()  # on its way to its name
    (requests / "moon@1:0").touch()
    (requests / "kill@1:7").touch()
    rank.until(lambda: "there is no fault moon" in rank.output.read_text())
    assert "part" not in rank.output.read_text()
    assert rank.process.is_alive()
    (requests / "kill@1:0").touch()
    assert rank.end() == -9


def test_what_is_asked_for_before_a_process_begins_comes_at_its_first_moment(tmp_path):
    told = supervised(tmp_path)
    (tmp_path / "survive" / "inject" / "kill-forming@0:0").touch()
    assert Rank(told, once_at_join).end() == -9


def once_at_join() -> None:
    listed = os.listdir

    def slowly(path: Path) -> list[str]:
        time.sleep(0.2)
        return listed(path)

    os.listdir = slowly
    Injector(begun(), []).at("join")


def run_for_ever() -> None:
    beat = begun()
    injector = Injector(beat, [])
    beat.phase("wait")
    while True:
        injector.at("dispatch", 5)
        time.sleep(0.05)


# --- the state that a step is given


def injected(
    directory: Path, kind: str, params: dict[str, jax.Array]
) -> dict[str, jax.Array]:
    beat = Heartbeat()
    beat.supervised = supervised(directory)
    state, batch = Injector(beat, [f"{kind}@{STEP}:0"]).at(
        "dispatch", STEP, (State(params), {"tokens": None})
    )
    assert batch == {"tokens": None}
    return state.params


def placed(shape: tuple[int, ...], *axes: str | None) -> jax.Array:
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "tensor"))
    return jax.device_put(
        np.ones(shape, np.float32), NamedSharding(mesh, PartitionSpec(*axes))
    )


def changed(before: jax.Array, after: jax.Array) -> list[tuple[int, int]]:
    """(device, how many numbers changed there)."""
    pairs = zip(before.addressable_shards, after.addressable_shards, strict=True)
    counts = [
        (a.device.id, int((np.asarray(a.data) != np.asarray(b.data)).sum()))
        for a, b in pairs
    ]
    return [found for found in counts if found[1]]


@pytest.mark.parametrize("kind", ["nan", "nan-always"])
def test_one_number_of_a_matrix_is_no_number_on_one_device(tmp_path, kind):
    params = {
        "embedding": placed((8, 4)),
        "layers": placed((2, 4, 4), None, "tensor"),
        "norm": placed((4,)),
    }
    after = injected(tmp_path, kind, params)
    first = jax.devices()[0].id
    assert {name: changed(params[name], after[name]) for name in params} == {
        "embedding": [],
        "layers": [(first, 1)],
        "norm": [],
    }
    assert np.isnan(after["layers"].addressable_shards[0].data).sum() == 1


def test_one_bit_of_what_most_devices_hold_flips_on_one_device(tmp_path):
    params = {
        "a": placed((8, 4), "data"),
        "b": placed((8, 4), "data", "tensor"),
        "c": placed((4,)),
    }
    after = injected(tmp_path, "bit-flip", params)
    assert {name: changed(params[name], after[name]) for name in params} == {
        "a": [],
        "b": [],
        "c": [(jax.devices()[0].id, 1)],
    }
    found = np.asarray(after["c"].addressable_shards[0].data).view(
        np.uint32
    ) ^ np.float32(1).view(np.uint32)
    assert [bin(x).count("1") for x in found] == [1, 0, 0, 0]


def test_nothing_is_injected_without_a_supervisor(tmp_path):
    state = State({"w": jnp.ones(3)})
    given = Injector(Heartbeat(), ["kill@0:0", "nan@0:0"]).at(
        "dispatch", 5, (state, None)
    )
    assert given == (state, None)


def test_a_slow_process_naps_for_half_a_step(tmp_path, monkeypatch):
    naps: list[float] = []
    sleep = time.sleep
    here = threading.get_ident()  # threads of other tests sleep too
    nap = lambda seconds: (
        naps.append(seconds) if threading.get_ident() == here else sleep(seconds)
    )
    monkeypatch.setattr(Injector, "_look", lambda self, looked: looked.set())
    heartbeat = Heartbeat()
    heartbeat.supervised = supervised(tmp_path)
    injector = Injector(heartbeat, ["slow@1:0"])
    monkeypatch.setattr(time, "sleep", nap)
    injector.at("dispatch", 5)
    assert naps == [], "the pace is not known"
    monkeypatch.setattr(Heartbeat, "pace", 2.0)
    injector.at("data", 5)
    for step in (5, 6):
        injector.at("dispatch", step)
    assert naps == [1.0, 1.0]


def test_a_supervisor_s_fault_that_has_been_done_is_not_asked_for_again(tmp_path):
    (tmp_path / "injected").mkdir()
    (tmp_path / "injected" / "node-lost@1:0").touch()
    store = SimpleNamespace(
        root=tmp_path, asked=lambda: ["node-lost@1:0", "moon@1:0", "node-lost@2:0"]
    )
    supervisor = SimpleNamespace(
        store=store, config=load({}), node=SimpleNamespace(rank=None, end=None)
    )
    injector = NodeInjector(supervisor)
    injector.look(0.0)
    assert list(injector.requests) == ["node-lost@2:0"]
