"""Live to global arrays and back where the layouts differ, on the host and on the devices, against the placement of
tests/helpers/short_runs.py.
"""

import re
import threading
import weakref

import jax
import numpy as np
import pytest
from checkpoint_runs import LAYOUTS, config, opened, program, restored, same, take
from short_runs import canonical_numbers, place

from meshtrain.checkpoint import rearrangement
from meshtrain.checkpoint.global_arrays import GlobalArrays
from meshtrain.parallel.layout import shard_spec

INTERLEAVED = "data 2, pipeline 2, interleaved, ZeRO-1"


def together(canonical, entries, live):
    """The canonical arrays of live ones."""
    blocks = rearrangement.host_blocks(
        dict(zip((e.name for e in entries), live, strict=True))
    )
    return [canonical.assembled(e, blocks[e.name]) for e in entries]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_leaf_is_put_together_bit_for_bit(layout):
    built = program(layout)
    numbers = canonical_numbers(built.layout)
    canonical = GlobalArrays(built)
    entries = [e for e in canonical.entries if e.name.startswith("params.")]
    found = together(canonical, entries, jax.tree.leaves(place(built.layout, numbers)))
    for entry, x, expected in zip(
        entries, found, jax.tree.leaves(numbers), strict=True
    ):
        assert np.array_equal(np.asarray(x), expected), entry.name


@pytest.mark.thorough
@pytest.mark.parametrize("layout", [INTERLEAVED, "tensor 2, pipeline 2, V"])
def test_the_blocks_are_those_of_the_devices_way_and_each_is_there_once(layout):
    """Stored chunks have the shape of a block: what is on disk depends on neither way."""
    built = program(layout)
    canonical, state = GlobalArrays(built), built.init()
    there = canonical.arrays(state)
    for entry, x in zip(
        canonical.entries,
        together(canonical, canonical.entries, jax.tree.leaves(state)),
        strict=True,
    ):
        other = there[entry.name]
        assert x.sharding.shard_shape(x.shape) == other.sharding.shard_shape(x.shape), (
            entry.name
        )
        assert (x.dtype, np.asarray(x).tobytes()) == (
            other.dtype,
            np.asarray(other).tobytes(),
        ), entry.name
        assert sum(shard.data.size for shard in x.addressable_shards) == x.size, (
            entry.name
        )


def test_runs_count_on_in_both_orders_and_leave_out_what_lies_elsewhere():
    places = np.array([0, 1, 4, 5, 2, 3, 6])
    assert list(rearrangement.runs(places, 0, 7)) == [
        (0, 0, 2),
        (2, 4, 2),
        (4, 2, 2),
        (6, 6, 1),
    ]
    assert list(rearrangement.runs(places, 4, 7)) == [(2, 0, 2), (6, 2, 1)]
    assert list(rearrangement.runs(places, 7, 9)) == []


@pytest.mark.thorough
def test_save_returns_before_anything_is_rearranged_and_the_next_steps_do_not_change_what_is_written(
    tmp_path, monkeypatch
):
    gate, assembled = threading.Event(), rearrangement.assembled
    monkeypatch.setattr(
        rearrangement, "assembled", lambda *given: (gate.wait(30), assembled(*given))[1]
    )
    built = program(INTERLEAVED)
    with opened(config(tmp_path, INTERLEAVED), built) as (checkpointer, _):
        state, loss = take(built, checkpointer.restore_or_init()[0], 1)
        kept = jax.tree.map(lambda x: x.copy(), state)
        checkpointer.save(1, state, loss)
        for step in range(2, 5):  # donates the state that is still to be written
            state, _ = take(built, state, step)
        gate.set()
        checkpointer.wait()
    found, step, _ = restored(config(tmp_path, INTERLEAVED), built)
    assert step == 1 and same(found, kept) and not same(found, state)


@pytest.mark.thorough
def test_live_blocks_are_let_go_leaf_by_leaf(monkeypatch):
    """At most one more state in host memory, and one leaf."""
    canonical, blocks, alive = GlobalArrays(program(INTERLEAVED)), [], []
    held, assembled = rearrangement.host_blocks, rearrangement.assembled

    def watched(live):
        found = held(live)
        blocks.extend(
            [weakref.ref(block) for _, block in of_one] for of_one in found.values()
        )
        return found

    def counted(*given):
        alive.append(
            sum(any(block() is not None for block in of_one) for of_one in blocks)
        )
        return assembled(*given)

    monkeypatch.setattr(rearrangement, "host_blocks", watched)
    monkeypatch.setattr(rearrangement, "assembled", counted)
    make = canonical.prepare(canonical.program.init())
    assert callable(make) and make().keys() == {e.name for e in canonical.entries}
    assert alive == list(range(len(canonical.entries), 0, -1))


def batches(built):
    canonical = GlobalArrays(built)
    entries = [e for e in canonical.entries if e.name.startswith("params.")]
    return canonical, list(canonical.batches(entries))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_leaf_comes_and_goes_bit_for_bit(layout):
    built = program(layout)
    numbers = canonical_numbers(built.layout)
    expected, live = (
        {
            f"params.{leaf.name}": x
            for leaf, x in zip(built.layout.flat, jax.tree.leaves(tree), strict=True)
        }
        for tree in (numbers, place(built.layout, numbers))
    )
    canonical, found = batches(built)
    for batch in found:
        there = canonical.rearranged("global", batch, [live[e.name] for e in batch])
        back = canonical.rearranged("live", batch, there)
        for entry, x, y in zip(batch, there, back, strict=True):
            assert np.array_equal(np.asarray(x), expected[entry.name]), entry.name
            assert np.array_equal(np.asarray(y), np.asarray(live[entry.name])), (
                entry.name
            )
            assert y.sharding.is_equivalent_to(entry.live.sharding, y.ndim)


def test_one_device_has_nothing_to_rearrange_and_padded_stages_have():
    assert batches(program())[1] == []
    rearranged = {
        e.name for batch in batches(program("pipeline 4, gpipe"))[1] for e in batch
    }
    assert "params.blocks.mlp.gate" in rearranged


@pytest.mark.parametrize(
    "layout", ["data 2, tensor 2, pipeline 2, ZeRO-1", "tensor 2, pipeline 2, V"]
)
def test_a_matrix_of_the_layers_is_never_whole_on_a_device(layout):
    """XLA, given shardings alone, replicates here; ours must have no all-gather, and nothing larger than a device's
    share.
    """
    built = program(layout)
    # 24 wide: every axis finds a place
    leaf = next(leaf for leaf in built.layout.flat if leaf.name == "blocks.attention.q")
    way = rearrangement.rearrangement(built.layout, leaf, built.mesh)
    assert all(move.after is not None for move in way.moves)
    mapped = jax.shard_map(
        way.make_global, mesh=built.mesh, in_specs=shard_spec(leaf), out_specs=way.spec
    )
    live = jax.ShapeDtypeStruct(
        leaf.padded,
        np.float32,
        sharding=jax.NamedSharding(built.mesh, shard_spec(leaf)),
    )
    text = jax.jit(mapped).lower(live).compile().as_text()
    assert "all-gather" not in text and "all-to-all" in text
    share = np.prod(live.sharding.shard_shape(live.shape))
    sizes = [
        np.prod([int(n) for n in shape.split(",")])
        for shape in re.findall(r"f32\[([\d,]+)\]", text)
    ]
    assert max(sizes) <= share
