"""Checkpoints of islands that step by themselves: the same bits on the same islands, means on others."""

from contextlib import closing
from pathlib import Path

import jax
import numpy as np
import pytest
from island_runs import largest_difference, numbers, run, same_bits, settings

from meshtrain.checkpoint import Checkpointer, steps
from meshtrain.checkpoint.moved import refuse_start
from meshtrain.config import ConfigError, replaced
from meshtrain.config.reduce import SyncConfig
from meshtrain.mesh import make_mesh
from meshtrain.step import Program

FLAT = {"data": 4, "islands": 2}
SYNC = {"every": 3, "start": 2}
SGD = {"name": "sgd", "beta1": 0.5, "learning_rate": 1.0}  # one moment, so that programs are small


def built_for(directory, mesh=FLAT, sync=SYNC, **sections):
    return Program(config := settings(mesh, sync, run={"directory": str(directory)}, **sections), make_mesh(config))


def saved(built, after):
    """Saves the states after some of the first steps; their numbers by step."""
    state, before, states = built.init(), 0, {}
    checkpointer = Checkpointer(replaced(built.config, checkpoint={"keep": 20}), built)
    checkpointer.restore_or_init()
    for step in after:
        state, _ = run(built, state, step - before)
        checkpointer.save(step, state, loss=1.0)
        checkpointer.wait()
        states[step], before = [x.copy() for x in numbers(state)], step
    checkpointer.close()
    return states


def restored(built, said=None, **keys):
    config, heard = replaced(built.config, checkpoint=keys), said if said is not None else []
    with closing(Checkpointer(config, built, heard.append)) as checkpointer:
        return checkpointer.restore_or_init()


def killed_after(built, step):
    """As if the run had ended there."""
    root = Path(built.config.run.directory) / "checkpoints"
    for later in steps.committed_in(root):
        if later > step:
            steps.remove(root / str(later))


@pytest.mark.thorough
def test_a_run_goes_on_between_two_syncs_with_the_same_bits(tmp_path):
    built = built_for(tmp_path)
    states = saved(built, [4, 6])
    assert not np.array_equal(*numbers(run(built, built.init(), 4)[0].islands.params)[0])
    killed_after(built, 4)
    state, step = restored(built)
    assert step == 4 and same_bits(state, states[4])
    state, rows = run(built, state, 2)
    assert "sync_islands" in rows[0] and same_bits(state, states[6])


@pytest.mark.thorough
def test_a_run_goes_on_from_any_step_with_fragments_under_way_on_stages_with_padding(tmp_path):
    """Fragments are due after steps 4, 6, 8 and 10, and taken in a step later."""
    built = built_for(tmp_path, None, {"every": 4, "start": 2, "fragments": 2, "delay": 1})
    states = saved(built, [1, 4, 5, 7, 9, 11])
    for step in (9, 7, 5, 4, 1):
        killed_after(built, step)
        state, found = restored(built)
        assert found == step and same_bits(state, states[step])
        assert any(x.any() for x in numbers(state.islands.under_way)) == (step >= 5)
        state, _ = run(built, state, 11 - step)
        assert same_bits(state, states[11])


def canonical(built, tree):
    return [
        np.asarray(built.layout.canonical_leaf(w, x)) for w, x in zip(built.layout.flat, numbers(tree), strict=True)
    ]


def of_islands(built, tree, islands):
    each = [canonical(built, [x[i] for x in numbers(tree)]) for i in range(islands)]
    return [np.stack(leaves) for leaves in zip(*each, strict=True)]


def moment(state):
    return next(
        part.trace
        for part in jax.tree.leaves(state.optimizer, is_leaf=lambda x: hasattr(x, "trace"))
        if hasattr(part, "trace")
    )


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("mesh", "parallel"),
    [
        ({"data": 4, "islands": 4}, {}),
        ({"data": 4, "pipeline": 2, "islands": 2}, {"schedule": "interleaved", "virtual_stages": 2, "vocab": "edge"}),
        ({"data": 6, "islands": 3}, {"microbatches": 1}),
        ({"data": 4, "tensor": 2}, {}),
    ],
)
def test_other_islands_each_begin_with_the_mean_and_the_outer_momentum_is_kept(tmp_path, mesh, parallel):
    """From 2 islands on one stage to 4 islands, 2 on stages out of order (bit for bit), 3, and none of their own."""
    batch = {"global_batch_size": 24}
    here = built_for(tmp_path, optimizer=SGD, train={"global_batch_size": 8})
    saved(here, [6])
    was, _ = restored(here)
    assert float(np.abs(numbers(was.islands.params)[0][0] - numbers(was.islands.params)[0][1]).max()) > 1e-4
    islands = mesh.get("islands", 0)
    sync = SYNC if islands else {}
    allow = ["train.global_batch_size", "parallel.sync.every", "parallel.sync.start"]
    there = built_for(tmp_path, mesh, sync, parallel={**parallel, "sync": sync}, optimizer=SGD, train=batch)
    said: list[str] = []
    state, step = restored(there, said, allow=allow)
    assert step == 6
    ours = [of_islands(here, tree, 2) for tree in (was.islands.params, moment(was))]
    if not islands:
        found = [None, [x[None] for x in canonical(there, moment(state))]]
    else:
        found = [of_islands(there, tree, islands) for tree in (state.islands.params, moment(state))]
        assert same_bits(canonical(here, was.islands.momentum), canonical(there, state.islands.momentum))
    assert same_bits(canonical(here, was.params), canonical(there, state.params))
    for old, new in zip(ours, found, strict=True):
        for x, y in zip(old, new or [], strict=bool(new)):
            expected = x if islands == 2 else np.broadcast_to(x.mean(0), y.shape)
            assert np.abs(expected - y).max() < 1e-7
    sentences = [s for s in said if "islands of their own" in s]
    assert len(sentences) == (islands != 2)
    if islands != 2:
        assert "the checkpoint has 2 islands of their own" in sentences[0] and "mean of their" in sentences[0]
    state, _ = run(there, state, 1) if batch["global_batch_size"] == 8 else (state, None)


@pytest.mark.thorough
def test_islands_begin_with_the_weights_and_moments_of_a_plain_run(tmp_path):
    plain = built_for(tmp_path, sync={}, optimizer=SGD)
    saved(plain, [2])
    was, _ = restored(plain)
    ours = built_for(tmp_path, sync={"every": 3}, optimizer=SGD)
    with pytest.raises(ConfigError, match=r"parallel\.sync\.every is 3 but was 0"):
        restored(ours)
    said: list[str] = []
    state, _ = restored(ours, said, allow=["parallel.sync.every"])
    assert any("the 2 islands begin with the weights and moments of the checkpoint" in s for s in said)
    for tree, own in ((was.params, state.islands.params), (was.optimizer, state.optimizer)):
        assert all(
            np.array_equal(x, y[0]) and np.array_equal(x, y[1])
            for x, y in zip(numbers(tree), numbers(own), strict=True)
        )
    assert not any(x.any() for x in numbers(state.islands.momentum))
    state, rows = run(ours, state, 1)
    assert "sync_islands" in rows[0]


def test_islands_that_have_moved_apart_cannot_be_held_to_be_equal_again():
    old = {"parallel": {"sync": {"every": 5, "start": 10}}}
    with pytest.raises(
        ConfigError,
        match=r"step 12, and its islands .* since step 10, but parallel\.sync\.start is 20; give at most 12",
    ):
        refuse_start(old, 12, SyncConfig(every=5, start=20), "checkpoint x")
    refuse_start(old, 12, SyncConfig(every=5, start=12), "checkpoint x")
    refuse_start(old, 10, SyncConfig(every=5, start=20), "checkpoint x")
    refuse_start({"parallel": {}}, 12, SyncConfig(every=5, start=20), "checkpoint x")


@pytest.mark.thorough
def test_weights_alone_begin_on_every_island(tmp_path):
    plain = built_for(tmp_path / "plain", sync={}, optimizer=SGD)
    saved(plain, [2])
    was, _ = restored(plain)
    ours = built_for(tmp_path / "ours", sync={"every": 3}, optimizer=SGD)
    state, step = restored(ours, resume=str(tmp_path / "plain"), weights_only=True)
    assert step == 0 and same_bits(state.params, was.params)
    assert largest_difference(state.params, [x[1] for x in numbers(state.islands.params)]) == 0
