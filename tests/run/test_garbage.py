"""Garbage is collected at the same steps on every process, and Python's collector is as it was afterwards."""

import gc

import pytest

from meshtrain.run.garbage import GarbageCollection


@pytest.fixture(autouse=True)
def as_before():
    yield
    gc.unfreeze()
    gc.enable()


def collections(monkeypatch, every, steps):
    made, collection = [], GarbageCollection(every)
    for step in steps:
        monkeypatch.setattr(gc, "collect", lambda step=step: made.append(step))
        collection.after_step(step, None, {})
        assert not gc.isenabled()
    return made, collection


@pytest.mark.parametrize("start", [0, 1, 7])
def test_processes_collect_at_the_same_steps_wherever_they_began(start, monkeypatch):
    made, _ = collections(monkeypatch, 5, range(start + 1, 30))
    assert made == [
        start + 1,
        *(step for step in range(start + 2, 30) if step % 5 == 0),
    ]


def test_what_is_there_when_training_begins_is_not_looked_through_again(monkeypatch):
    _, collection = collections(monkeypatch, 5, [1])
    assert gc.get_freeze_count() > 1000
    collection.close()
    assert gc.get_freeze_count() == 0 and gc.isenabled()


def test_a_collector_that_was_off_stays_off(monkeypatch):
    gc.disable()
    collections(monkeypatch, 5, [1])[1].close()
    assert not gc.isenabled()


def test_a_run_that_took_no_step_changes_nothing():
    frozen = gc.get_freeze_count()
    GarbageCollection(5).close()
    assert gc.isenabled() and gc.get_freeze_count() == frozen
