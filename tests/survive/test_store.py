"""The directory that supervisors share, when others can write there, and when what stands there is no record."""

import json
import os
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from meshtrain.errors import ConfigError
from meshtrain.survive.records import Node, RestartPlan, decode
from meshtrain.survive.store import RECORD, Store


def plan(number: int, **what) -> RestartPlan:
    given = {
        "generation": 1,
        "state": "forming",
        "leader": "n0",
        "wall": 1.0,
        "kind": "start",
        "reason": "it begins",
    }
    return RestartPlan(number, **given | what)


@pytest.fixture
def store(tmp_path) -> Store:
    return Store(tmp_path, "n0")


# What is no record: by name, made at a path.
NO_RECORDS = {
    "directory": Path.mkdir,
    "link": lambda path: path.symlink_to("/etc/hostname"),
    "link to nothing": lambda path: path.symlink_to("nothing"),
    "pipe": os.mkfifo,
    "empty": Path.touch,
    "garbage": lambda path: path.write_bytes(b"\xff\x00{"),
    "nested": lambda path: path.write_bytes(b"[" * 100_000),
    "huge": lambda path: path.write_bytes(b"1" * 9_000_000),
}


@pytest.mark.parametrize("what", NO_RECORDS)
def test_what_is_no_record_is_passed_over(store, what):
    store.publish(Node("n0"))
    assert store.propose(plan(1))
    NO_RECORDS[what](store.root / "nodes" / "n1.json")
    NO_RECORDS[what](store.root / "plans" / "000002.json")
    assert [p.number for p in store.plans()] == [1]
    # Its number is taken, the one after it is not.
    assert not store.propose(plan(2)) and store.propose(plan(store.next_number))
    assert [p.number for p in store.plans()] == [1, 3]
    found = {name: decode(Node, text) for name, text in store.nodes().items()}
    assert found == {"n0": Node("n0"), "n1": None}


@pytest.mark.parametrize("what", ["directory", "link", "pipe"])
def test_its_own_record_is_not_written_into_something_else(store, what):
    NO_RECORDS[what](store.root / "nodes" / "n0.json")
    with pytest.raises(OSError):
        store.publish(Node("n0"))
    NO_RECORDS[what](store.root / "events.n0.jsonl")
    store.log("join")


def test_a_run_that_has_taken_the_directorys_name_gets_neither_record_nor_plan(
    tmp_path,
):
    run = tmp_path / "run"
    run.mkdir()
    first = Store(run, "n0")
    first.publish(Node("n0", "first", "host"))
    run.rename(tmp_path / "away")
    run.mkdir()
    second = Store(run, "n0")
    for use in (
        lambda: first.publish(Node("n0", "first", "host")),
        first.nodes,
        first.plans,
    ):
        with pytest.raises(OSError, match="Stale"):
            use()
    assert second.nodes() == {}
    second.publish(Node("n0", "second", "host"))
    with pytest.raises(ConfigError, match="another supervisor"):
        first.plans()
    run.rename(tmp_path / "later")
    (tmp_path / "away").rename(run)
    first.publish(Node("n0", "first", "host"))
    assert list(first.nodes()) == ["n0"]


def test_names_that_are_no_records_names(store):
    for name in ("x", ".hidden.json", "-x.json", "a b.json", "x" * 65 + ".json"):
        (store.root / "nodes" / name).write_bytes(b"{}")
    for name in (
        "1.json",
        "000001.json.json",
        "٣٣٣٣٣٣.json",
        "9" * 250 + ".json",
        ".n1.abc",
    ):
        (store.root / "plans" / name).write_bytes(b"{}")
    assert store.nodes() == {} and store.plans() == []
    assert store.next_number == 1


def test_a_plan_under_another_number_is_none(store):
    assert store.propose(plan(1))
    os.link(store.root / "plans" / "000001.json", store.root / "plans" / "999999.json")
    assert [p.number for p in store.plans()] == [1]
    assert store.next_number == 1_000_000
    assert store.propose(plan(1_000_000)) and [p.number for p in store.plans()] == [
        1,
        1_000_000,
    ]


@pytest.mark.parametrize(
    "wrong",
    [
        {"state": "dancing"},
        {"state": "running"},
        {
            "state": "running",
            "members": ["n0", "n1"],
            "incarnations": ["a"],
            "coordinator": "h:1",
        },
        {
            "state": "running",
            "members": ["n0", "n0"],
            "incarnations": ["a", "a"],
            "coordinator": "h:1",
        },
        {"state": "stopping", "members": ["n0", "n1"], "incarnations": ["a", "b"]},
    ],
)
def test_a_plan_that_nobody_can_follow_is_none(store, wrong):
    assert store.propose(plan(1)) and store.propose(plan(2, **wrong))
    assert [p.number for p in store.plans()] == [1]


def test_of_many_leaders_one_takes_a_number(tmp_path):
    stores = [Store(tmp_path, f"n{k}") for k in range(8)]
    won = []
    together = threading.Barrier(8)

    def propose(k: int) -> None:
        for number in range(1, 21):
            together.wait()
            if stores[k].propose(plan(number, leader=f"n{k}")):
                won.append((number, f"n{k}"))

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(propose, range(8)))
    assert (
        sorted(won) == [(p.number, p.leader) for p in stores[0].plans()]
        and len(won) == 20
    )
    assert not list((tmp_path / "survive" / "plans").glob(".*"))


@pytest.mark.parametrize(
    "where",
    [
        "",
        "survive",
        *(f"survive/{n}" for n in ("plans", "nodes", "inject", "injected")),
    ],
)
def test_a_directory_that_others_could_put_decisions_into_is_refused(tmp_path, where):
    run = tmp_path / "run"
    run.mkdir()
    Store(run, "n0")
    (run / where).chmod(0o777)
    with pytest.raises(ConfigError, match=f"{run / where} can be written by everybody"):
        Store(run, "n0")
    (run / where).chmod(0o700)
    if os.geteuid() == 0:  # nobody else gives a directory away
        os.chown(run / where, 12345, 12345)
        with pytest.raises(ConfigError, match="belongs to another user"):
            Store(run, "n0")
        os.chown(run / where, 0, 0)
    if where:
        elsewhere = (run / where).rename(tmp_path / "elsewhere")
        (run / where).symlink_to(elsewhere)
        with pytest.raises(ConfigError, match="is not a directory"):
            Store(run, "n0")


def test_a_run_may_be_a_link_and_what_is_made_is_private(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "latest").symlink_to("run")
    store = Store(tmp_path / "latest", "n0")
    store.generation(1)
    store.publish(Node("n0"))
    store.log("join")
    for path in (
        tmp_path / "run" / "survive",
        *(tmp_path / "run" / "survive").rglob("*"),
    ):
        assert not stat.S_IMODE(path.stat().st_mode) & 0o077, path


def test_events_that_a_disk_refuses_are_written_later(store, monkeypatch):
    write, refused = os.write, [True]

    def full(descriptor, text):
        if refused[0]:
            raise OSError(28, "No space left on device")
        return write(descriptor, text[:30])  # some of it

    monkeypatch.setattr(os, "write", full)
    store.log("join", pid=1)
    refused[0] = False
    for k in range(20):
        store.log("more", k=k)
    monkeypatch.undo()
    store.log("last")
    lines = [
        json.loads(line)
        for line in (store.root / "events.n0.jsonl").read_text().splitlines()
    ]
    assert [line["event"] for line in lines] == ["join", *["more"] * 20, "last"]


def test_a_record_keeps_its_place(store):
    store.publish(Node("n0", sequence=1))
    first = os.stat(store.root / "nodes" / "n0.json")
    store.publish(Node("n0", sequence=2))
    again = os.stat(store.root / "nodes" / "n0.json")
    assert (first.st_ino, again.st_size) == (again.st_ino, RECORD)
