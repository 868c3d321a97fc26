"""Canonical arrays put together on the host, against the placement written out in tests/helpers/short_runs.py and against the devices' way."""

import threading
import weakref

import jax
import numpy as np
import pytest
from checkpoint_runs import LAYOUTS, config, program, same, take
from short_runs import canonical_numbers, place

from meshtrain.checkpoint import Checkpointer, assembling
from meshtrain.checkpoint.canonical import Canonical

INTERLEAVED = "data 2, pipeline 2, interleaved, ZeRO-1"


def leaves(built):
    return built.layout.flat


def together(canonical, entries, live):
    """The canonical arrays of live ones."""
    return [canonical.assembled(e, blocks) for e, blocks in zip(entries, assembling.held(live), strict=True)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_leaf_is_put_together_bit_for_bit(layout):
    built = program(layout)
    numbers = canonical_numbers(built.layout)
    canonical = Canonical(built)
    entries = [e for e in canonical.entries if e.name.startswith("params.")]
    found = together(canonical, entries, jax.tree.leaves(place(built.layout, numbers)))
    for entry, x, expected in zip(entries, found, jax.tree.leaves(numbers), strict=True):
        assert np.array_equal(np.asarray(x), expected), entry.name


@pytest.mark.parametrize("layout", [INTERLEAVED, "tensor 2, pipeline 2, V"])
def test_the_blocks_are_those_of_the_devices_way_and_each_is_there_once(layout):
    """Stored chunks have the shape of a block: what is on disk depends on neither way."""
    built = program(layout)
    canonical, state = Canonical(built), built.init()
    there = canonical.arrays(state)
    for entry, x in zip(canonical.entries, together(canonical, canonical.entries, jax.tree.leaves(state)), strict=True):
        other = there[entry.name]
        assert x.sharding.shard_shape(x.shape) == other.sharding.shard_shape(x.shape), entry.name
        assert (x.dtype, np.asarray(x).tobytes()) == (other.dtype, np.asarray(other).tobytes()), entry.name
        assert sum(shard.data.size for shard in x.addressable_shards) == x.size, entry.name


def test_runs_count_on_in_both_orders_and_leave_out_what_lies_elsewhere():
    places = np.array([0, 1, 4, 5, 2, 3, 6])
    assert list(assembling.runs(places, 0, 7)) == [(0, 0, 2), (2, 4, 2), (4, 2, 2), (6, 6, 1)]
    assert list(assembling.runs(places, 4, 7)) == [(2, 0, 2), (6, 2, 1)]
    assert list(assembling.runs(places, 7, 9)) == []


def test_save_returns_before_anything_is_rearranged_and_the_next_steps_do_not_change_what_is_written(
    tmp_path, monkeypatch
):
    gate, assembled = threading.Event(), assembling.assembled
    monkeypatch.setattr(assembling, "assembled", lambda *given: (gate.wait(30), assembled(*given))[1])
    built = program(INTERLEAVED)
    checkpointer = Checkpointer(config(tmp_path, INTERLEAVED), built)
    state, _ = checkpointer.restore_or_init()
    state, loss = take(built, state, 1)
    kept = jax.tree.map(lambda x: x.copy(), state)
    checkpointer.save(1, state, loss)
    for step in range(2, 5):  # donates the state that is still to be written
        state, _ = take(built, state, step)
    gate.set()
    checkpointer.wait()
    checkpointer.close()
    again = Checkpointer(config(tmp_path, INTERLEAVED), built)
    restored, step = again.restore_or_init()
    again.close()
    assert step == 1 and same(restored, kept) and not same(restored, state)


def test_live_blocks_are_let_go_leaf_by_leaf(monkeypatch):
    """At most one more state in host memory, and one leaf."""
    canonical, blocks, alive = Canonical(program(INTERLEAVED)), [], []
    held, assembled = assembling.held, assembling.assembled

    def watched(live):
        found = held(live)
        blocks.extend([weakref.ref(block) for _, block in of_one] for of_one in found)
        return found

    def counted(*given):
        alive.append(sum(any(block() is not None for block in of_one) for of_one in blocks))
        return assembled(*given)

    monkeypatch.setattr(assembling, "held", watched)
    monkeypatch.setattr(assembling, "assembled", counted)
    make = canonical.to_write(canonical.program.init())
    assert callable(make) and make().keys() == {e.name for e in canonical.entries}
    assert alive == list(range(len(canonical.entries), 0, -1))
