"""What a supervisor knows of the others: ages that only grow while it looks."""

from pathlib import Path

import pytest

from meshtrain.survive.decide import Options
from meshtrain.survive.records import Node
from meshtrain.survive.store import Store
from meshtrain.survive.view import View


@pytest.fixture
def view(tmp_path: Path) -> View:
    """Of node n0, that has seen n1 change."""
    (tmp_path / "run").mkdir()
    found = View(Store(tmp_path / "run", "n0"), Options(lambda nodes: nodes, node_timeout=6.0), "own")
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


def test_records_are_read_often_however_long_it_takes(view: View, monkeypatch: pytest.MonkeyPatch) -> None:
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
