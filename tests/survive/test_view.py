"""What a supervisor knows of the others: ages that only grow while it looks."""

import threading
import time
from importlib import metadata
from pathlib import Path

import pytest

from meshtrain.config import load
from meshtrain.errors import ConfigError
from meshtrain.run import versions
from meshtrain.survive.records import Node, ProcessEnd, RestartPlan, SupervisorOptions
from meshtrain.survive.store import Store
from meshtrain.survive.view import View, config_text, difference, digests, this_machine


@pytest.fixture
def view(tmp_path: Path) -> View:
    """Of node n0, that has seen n1 change."""
    (tmp_path / "run").mkdir()
    found = View(
        Store(tmp_path / "run", "n0"),
        SupervisorOptions(lambda nodes: nodes, node_timeout=6.0),
    )
    other = Store(tmp_path / "run", "n1")
    for sequence in (1, 2):
        other.publish(Node("n1", "first", sequence=sequence))
        found.look(float(sequence), Node("n0", "own"))
    return found


def of(view: View, name: str) -> Node:
    return next(n for n in view.nodes if n.name == name)


def test_who_stood_still_itself_holds_nobody_for_silent(view: View) -> None:
    view.look(100.0, Node("n0", "own"))
    assert of(view, "n1").age <= 1.0


def test_a_node_that_says_nothing_ages(view: View) -> None:
    for tick in range(3, 40):
        view.look(2.0 + tick / 5, Node("n0", "own"))
    assert of(view, "n1").age == pytest.approx(39 / 5, abs=0.5)


def test_records_are_read_often_however_long_it_takes(
    view: View, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(1000))
    monkeypatch.setattr("time.thread_time", lambda: float(next(clock)))  # a second each
    view.look(3.0, Node("n0", "own"))
    Store(view.store.root.parent, "n1").publish(Node("n1", "first", sequence=3))
    view.look(3.5, Node("n0", "own"))
    assert of(view, "n1").sequence == 3


def test_a_node_that_came_back_is_known_from_then_on(view: View) -> None:
    for tick in range(100):
        view.look(2.0 + tick / 5, Node("n0", "own"))
    Store(view.store.root.parent, "n1").publish(Node("n1", "second", sequence=1))
    view.look(25.0, Node("n0", "own"))
    assert of(view, "n1").known < 1.0


def test_how_long_a_process_has_ended_counts_on_while_its_node_gives_signs_of_life(
    view: View,
) -> None:
    other = Store(view.store.root.parent, "n1")
    end = ProcessEnd(73, "peer", "ended")
    for tick in range(20):
        other.publish(
            Node(
                "n1", "first", sequence=10 + tick, generation=1, state="ended", end=end
            )
        )
        view.look(2.5 + tick / 2, Node("n0", "own"))
    assert of(view, "n1").age < 1.0
    assert of(view, "n1").ended_for > 9.0
    other.publish(
        Node("n1", "first", sequence=50, generation=2, state="ended", end=end)
    )
    view.look(12.5, Node("n0", "own"))
    assert of(view, "n1").ended_for == 0.0


# --- who leads


def leads(view: View, since: float, **plan) -> bool:
    if plan:
        given = {
            "generation": 1,
            "leader": "n1",
            "wall": 1.0,
            "kind": "start",
            "reason": "",
            "coordinator": "h:1",
        }
        assert view.store.propose(RestartPlan(view.store.next_number, **given | plan))
    own = Node("n0", "own")
    view.look(100.0, own)
    return view.is_leader(own, since)


def test_who_has_just_come_does_not_lead_before_it_knows_who_is_alive(
    view: View,
) -> None:
    """n2 has a record that was not seen to change: it is gone, or slow."""
    Store(view.store.root.parent, "n2").publish(Node("n2", "other"))
    assert not leads(view, 2.4 * view.options.heartbeat)
    assert leads(view, 2.6 * view.options.heartbeat)
    # A member of the run is given as much time as others give it.
    running = {
        "state": "running",
        "members": ["n1", "n2"],
        "incarnations": ["first", "other"],
    }
    assert not leads(view, 0.9 * view.options.node_timeout, **running)
    assert leads(view, 1.1 * view.options.node_timeout)
    assert leads(view, 2.6 * view.options.heartbeat, **running | {"state": "over"})


def test_who_knows_all_leads_at_once_if_it_has_the_lowest_name_and_stays(
    view: View,
) -> None:
    assert leads(view, 0.0)
    assert not view.is_leader(Node("n5", "own"), 100.0)
    own = Node("n0", "own", leaving=True)
    view.look(100.0, own)
    assert not view.is_leader(own, 100.0)


# --- who has taken the name


@pytest.mark.thorough
def test_a_name_is_free_if_its_process_is_gone_or_silent_and_not_if_it_speaks(
    tmp_path: Path,
) -> None:
    own = View(
        Store(tmp_path, "n0"), SupervisorOptions(lambda nodes: nodes, node_timeout=1.0)
    )
    own.refuse_twin("n0")
    other = Store(tmp_path, "n0")
    other.publish(Node("n0", "other", machine=this_machine(), pid=2**22 + 1))
    own.refuse_twin("n0")
    for state, waits in (
        ("idle", 2.5 * own.options.heartbeat),
        ("running", own.options.node_timeout),
    ):
        other.publish(Node("n0", "other", host="elsewhere", pid=1, state=state))
        began = time.monotonic()
        own.refuse_twin("n0")
        assert waits <= time.monotonic() - began < waits + 0.5
    speak = threading.Timer(
        0.3,
        lambda: other.publish(Node("n0", "other", host="elsewhere", pid=7, sequence=2)),
    )
    speak.start()
    with pytest.raises(ConfigError, match=r"another supervisor .* is at work as n0"):
        own.refuse_twin("n0")
    speak.join()


def test_the_one_of_two_that_finds_the_others_record_goes(tmp_path: Path) -> None:
    first, second = Store(tmp_path, "n0"), Store(tmp_path, "n0")
    first.publish(Node("n0", "first"))
    first.publish(Node("n0", "first", sequence=2))
    second.publish(Node("n0", "second"))
    with pytest.raises(ConfigError, match="give this one another --node"):
        first.publish(Node("n0", "first", sequence=3))
    second.publish(Node("n0", "second", sequence=2))


def test_a_clock_that_is_wrong_is_told_once_and_again_when_it_jumps(view: View) -> None:
    other = Store(view.store.root.parent, "n1")
    found = []
    for tick, ahead in enumerate((0.0, 3600.0, 3600.0, 3600.5, -3600.0)):
        other.publish(Node("n1", "first", sequence=10 + tick, wall=time.time() + ahead))
        view.look(100.0 + 2 * tick, Node("n0", "own", wall=time.time()))
        found += [(name, round(seconds / 1800)) for name, seconds in view.new_clocks()]
    assert found == [("n1", 2), ("n1", -2)]


def test_what_an_editor_leaves_beside_the_source_is_no_other_code(
    tmp_path, monkeypatch
):
    digests = []
    monkeypatch.setattr(
        versions, "__file__", str(tmp_path / "meshtrain" / "run" / "versions.py")
    )
    (tmp_path / "meshtrain").mkdir()
    for name in (
        "run/versions.py",
        ".ipynb_checkpoints/versions.py",
        "__pycache__/x.pyc",
        "more.py",
    ):
        (tmp_path / "meshtrain" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "meshtrain" / name).write_text("1")
        (tmp_path / "meshtrain" / ".#more.py").unlink(missing_ok=True)
        (tmp_path / "meshtrain" / ".#more.py").symlink_to("somebody@nowhere")
        digests.append(versions.source_digest.__wrapped__())
    assert digests[0] == digests[1] == digests[2] != digests[3]


def test_what_differs_between_nodes_is_named(monkeypatch):
    version = metadata.version
    base = {"run": {"directory": "/a"}, "optimizer": {"learning_rate": 0.01}}
    one, other = (
        load(base),
        load(base, ["optimizer.learning_rate=0.02", "run.directory=/b", "run.seed=5"]),
    )
    own = Node("n0", host="h0", digests=digests(one))

    def said(config, **changed: str) -> str:
        texts = [config_text(c).encode() for c in (config, one)]
        return difference(
            Node("n1", host="h1", digests=digests(config) | changed), own, *texts
        )

    assert said(one) == "" == said(load(base, ["run.directory=/b"]))
    # a checkout beside an installed package: its source says what it is
    monkeypatch.setattr(
        metadata,
        "version",
        lambda name: "9.9" if name == "meshtrain" else version(name),
    )
    assert said(one) == ""
    sentence = said(other, jaxlib="9.9", code="feed")
    assert sentence.startswith("node n1 (h1) does not fit node n0 (h0): ")
    keys = (
        "learning_rate is 0.02 on n1 and 0.01 on n0",
        "run.seed is 5 on n1 and 0 on n0",
    )
    assert all(
        part in sentence for part in (*keys, "jaxlib is 9.9 on n1", "source code")
    )
    assert "run.directory" not in sentence and "python" not in sentence
    # What cannot be read names no key; a record of an earlier version has no digests.
    assert "its config is another" in difference(
        Node("n1", digests=digests(other)), own, b"", b"{"
    )
    assert "source code" in difference(Node("n1"), own, b"", b"")
