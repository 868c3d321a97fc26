"""What cannot be read of a run under supervision says nothing of it: no node is gone, no decision is undone."""

import errno
from types import SimpleNamespace

import pytest
from refusing_disk import refusing

from meshtrain.errors import Unreadable
from meshtrain.survive import agreed, history
from meshtrain.survive.child import TrainingProcess
from meshtrain.survive.records import Node, RestartPlan, SupervisorOptions
from meshtrain.survive.store import Store
from meshtrain.survive.view import View


@pytest.fixture
def run(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    store = Store(run, "n0")
    store.propose(RestartPlan(1, 1, "over", "n0", 1.0, "done", "", code=75))
    store.publish(Node("n0", "first"))
    store.log("join")
    return run


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES])
def test_a_record_that_cannot_be_read_ages_nobody(number, tmp_path):
    (tmp_path / "run").mkdir()
    view = View(
        Store(tmp_path / "run", "n0"),
        SupervisorOptions(lambda nodes: nodes, node_timeout=6.0),
    )
    other = Store(tmp_path / "run", "n1")
    own = Node("n0", "own")
    for sequence in (1, 2):
        other.publish(Node("n1", "first", sequence=sequence))
        view.look(float(sequence), own)
    with refusing("open", "nodes/n1.json", number):
        for now in range(3, 20):
            with pytest.raises(OSError):
                view.look(float(now), own)
    other.publish(Node("n1", "first", sequence=3))
    view.look(20.0, own)
    assert next(node for node in view.nodes if node.name == "n1").age <= 1.0


@pytest.mark.parametrize(
    ("call", "name"),
    [("list", "plans"), ("open", "000001.json"), ("read", "000001.json")],
)
def test_what_a_run_came_to_is_not_forgotten_for_an_error_of_reading(call, name, run):
    with refusing(call, name, errno.EIO, times=1):
        assert agreed.agreed(run, 0) == 75
    with refusing(call, name, errno.EIO), pytest.raises((Unreadable, OSError)):
        agreed.agreed(run, 0)


def test_plans_that_cannot_be_listed_are_not_none(run):
    with refusing("list", "plans", errno.EIO), pytest.raises(Unreadable):
        agreed.newest(run)


@pytest.mark.parametrize("name", ["events.n0.jsonl", "000001.json", "n0.json"])
def test_a_history_counts_what_it_could_not_read(name, run):
    assert history.read(run).torn == 0
    for number in (errno.EIO, errno.EACCES):
        with refusing("open", name, number):
            assert history.read(run).torn == 1
    with refusing("open", name, errno.EIO, times=1):
        assert history.read(run).torn == 0


def test_a_folder_of_records_that_cannot_be_listed_is_not_empty(run):
    with refusing("list", "survive/nodes", errno.EIO), pytest.raises(Unreadable):
        history.read(run)


def test_the_last_words_of_a_process_are_read_after_an_error_that_passes(tmp_path):
    (tmp_path / "rank-0.fault.json").write_text('{"kind": "config"}')
    child = SimpleNamespace(files=tmp_path, number=0)
    with refusing("open", "rank-0.fault.json", errno.EIO, times=2):
        assert TrainingProcess._last_words(child) == b'{"kind": "config"}'
    with refusing("open", "rank-0.fault.json", errno.EIO):
        assert TrainingProcess._last_words(child) == b""
