"""Residuals and the state of replica groups from one mesh onto another."""

from pathlib import Path

import checkpoint_runs
import jax
import numpy as np
import pytest
from checkpoint_runs import build_for, config, opened, same
from covering import slow_but, thorough_but
from island_runs import largest_difference, numbers, run, same_bits, spoiled
from island_runs import settings as island_settings
from refusals import tells

from meshtrain.checkpoint import steps
from meshtrain.checkpoint.global_arrays import GlobalArrays
from meshtrain.checkpoint.resharding import COUNTED, check_sync_start, initial_groups
from meshtrain.config import ConfigError, replaced
from meshtrain.config.reduce import SyncConfig
from meshtrain.mesh import make_mesh
from meshtrain.step import Program, State

EVENLY = "what compression had left out of gradients is shared out evenly among the ranks of this mesh."
DROPPED = "what compression had left out of gradients is dropped where nothing is fed back from here on."
NOTHING = "error feedback starts with nothing left out."
ANEW = "PowerSGD's Q starts anew: the checkpoint has none of the matrices that this run sends."
# (data, tensor, pipeline, islands, keys of parallel)
FOUR, TWO, CUBE = (4, 1, 1, 1, {}), (2, 1, 1, 1, {}), (2, 2, 2, 1, {"microbatches": 2})
CHUNKS = (
    2,
    1,
    2,
    1,
    {"microbatches": 2, "schedule": "interleaved", "virtual_stages": 2},
)
ISLANDS, WIDE = (4, 2, 1, 2, {}), (8, 1, 1, 2, {})
POWER = {"compression": "powersgd", "rank": 2}
TOPK = {"compression": "topk", "ratio": 0.05}


def settings(directory, layout, **reduce):
    data, tensor, pipeline, islands, parallel = layout
    mesh = {"data": data, "tensor": tensor, "pipeline": pipeline, "islands": islands}
    return config(directory, mesh=mesh, parallel={**parallel, "reduce": reduce})


def numbered(program, seed=0):
    """A state with other numbers in every place that a run could have put some: none in what only pads."""
    random = np.random.default_rng(seed)
    state = program.init()

    def fill(x):
        if not np.issubdtype(x.dtype, np.floating):
            return x
        return jax.device_put(
            random.standard_normal(x.shape).astype(x.dtype), x.sharding
        )

    def residual(weight, x):
        if x is None:
            return None
        real = np.zeros(x.shape[1:], bool)
        places = (
            program.layout.stack(weight).places
            if weight.stacked
            else slice(weight.shape[0])
        )
        real[(places, *map(slice, weight.shape[1:]))] = True
        return jax.device_put(
            np.where(real, random.standard_normal(x.shape), 0).astype(np.float32),
            x.sharding,
        )

    kept = state.reduce
    if kept is not None:
        kept = kept._replace(
            residual=program.layout.map(residual, kept.residual),
            q=jax.tree.map(fill, kept.q),
        )
    return state._replace(reduce=kept)


def owed(program, state):
    """Of each weight what all ranks owe together, its layers in the model's order [*canonical]."""
    found = {}
    flat = jax.tree.leaves(state.reduce.residual, is_leaf=lambda x: x is None)
    for weight, x in zip(program.layout.flat, flat, strict=True):
        if x is not None:
            whole = np.asarray(x, np.float64).sum(0)
            places = (
                program.layout.stack(weight).places
                if weight.stacked
                else slice(weight.shape[0])
            )
            found[weight.name] = whole[(places, *map(slice, weight.shape[1:]))]
    return found


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """(layout, keys of reduce) -> a run directory with a numbered state of it, and that state; made once each."""
    made = {}

    def write(layout, **reduce):
        key = repr((layout, reduce))
        if key not in made:
            chosen = settings(tmp_path_factory.mktemp("run"), layout, **reduce)
            program = build_for(chosen)
            state = numbered(program)
            with opened(chosen, program) as (checkpointer, _):
                checkpointer.save(3, state._replace(step=jax.numpy.int32(3)), 1.0)
            made[key] = chosen.run.directory, program, state
        return made[key]

    return write


def resumed(directory, layout, **reduce):
    chosen = settings(directory, layout, **reduce)
    program = build_for(chosen)
    state, step, said = checkpoint_runs.restored(chosen, program)
    assert step == 3
    for x, wanted in zip(
        jax.tree.leaves(state), jax.tree.leaves(program.state_shapes), strict=True
    ):
        assert x.sharding.is_equivalent_to(wanted.sharding, x.ndim)
    return program, state, said


CELLS = [
    (layout, kind) for layout in (FOUR, CUBE, CHUNKS, ISLANDS) for kind in (POWER, TOPK)
]
CELLS += [(ISLANDS, {**kind, "over": "islands"}) for kind in (POWER, TOPK)]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "cell", slow_but(CELLS, [CELLS[0], (CHUNKS, TOPK), CELLS[-1]]), ids=str
)
def test_on_the_same_mesh_every_bit_comes_back(cell, written):
    layout, reduce = cell
    directory, _, before = written(layout, **reduce)
    _, state, said = resumed(directory, layout, **reduce)
    assert said == []
    assert same(
        State(None, None, None, None, state.reduce),
        State(None, None, None, None, before.reduce),
    )
    assert jax.tree.leaves(state.reduce.residual)


MOVES = [
    (FOUR, TWO, POWER),
    (CUBE, FOUR, POWER),
    (CUBE, CHUNKS, TOPK),
    (CHUNKS, TWO, TOPK),
    (ISLANDS, CUBE, TOPK),
    (FOUR, ISLANDS, TOPK),
    (ISLANDS, WIDE, {**TOPK, "over": "islands"}),
    (WIDE, ISLANDS, {**POWER, "over": "islands"}),
]


@pytest.mark.parametrize(
    "cell",
    thorough_but(MOVES, lambda _: False, [MOVES[1], MOVES[3], MOVES[6]]),
    ids=str,
)
def test_on_another_mesh_each_rank_owes_an_equal_share_of_the_sum(cell, written):
    first, second, reduce = cell
    directory, program, before = written(first, **reduce)
    other, state, said = resumed(directory, second, **reduce)
    assert [s for s in said if s in (EVENLY, ANEW)] == [
        EVENLY,
        *[ANEW] * (reduce["compression"] == "powersgd"),
    ]
    wanted, found = owed(program, before), owed(other, state)
    assert found.keys() == wanted.keys() and wanted
    for name, x in wanted.items():
        np.testing.assert_allclose(
            found[name], x, rtol=0, atol=1e-5 * np.abs(x).max(), err_msg=name
        )
    for was, x in zip(
        *(map(np.asarray, jax.tree.leaves(s.reduce.residual)) for s in (before, state)),
        strict=True,
    ):
        # With as many ranks, and layers in the same places, each has what it had.
        assert np.array_equal(was, x) or all(np.array_equal(x[0], share) for share in x)
    drawn = jax.jit(other.local.zero.feedback.init_q)(other.feedback_key)
    assert all(
        np.array_equal(a, b)
        for a, b in zip(*map(jax.tree.leaves, (state.reduce.q, drawn)), strict=True)
    )


CHANGES = [
    (POWER, TOPK, []),
    (TOPK, POWER, [ANEW]),
    (POWER, {"compression": "none"}, [DROPPED]),
    (POWER, {**POWER, "rank": 3}, [ANEW]),
    (POWER, {**POWER, "feedback": False}, [DROPPED]),
    ({"compression": "none"}, POWER, [NOTHING, ANEW]),
]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "cell",
    slow_but(CHANGES, [CHANGES[0], CHANGES[2], CHANGES[3], CHANGES[5]]),
    ids=str,
)
def test_other_compression_is_told_with_what_becomes_of_its_state(cell, written):
    before, after, sentences = cell
    directory, _, was = written(FOUR, **before)
    _, state, said = resumed(directory, FOUR, **after)
    assert [s for s in said if not s.startswith("parallel.reduce.")] == sentences
    assert any(s.startswith("parallel.reduce.") for s in said)
    kept = state.reduce
    if sentences in ([], [ANEW]):
        assert same(
            State(*[None] * 4, kept.residual), State(*[None] * 4, was.reduce.residual)
        )
    elif kept is not None:
        assert all(not np.asarray(x).any() for x in jax.tree.leaves(kept.residual))


@pytest.mark.thorough
def test_weights_alone_take_nothing_of_it(written, tmp_path):
    directory, _, _ = written(FOUR, **POWER)
    weights = {"resume": str(directory), "weights_only": True}
    chosen = config(
        tmp_path, mesh={"data": 4}, parallel={"reduce": POWER}, checkpoint=weights
    )
    program = build_for(chosen)
    state, _, _ = checkpoint_runs.restored(chosen, program)
    assert same(
        State(*[None] * 4, state.reduce), State(*[None] * 4, program.init().reduce)
    )


FLAT = {"data": 4, "islands": 2}
SYNC = {"every": 3, "start": 2}
# One moment, so that programs are small
SGD = {"name": "sgd", "beta1": 0.5, "learning_rate": 1.0}


def built_for(directory, mesh=FLAT, sync=SYNC, **sections):
    config = island_settings(mesh, sync, run={"directory": str(directory)}, **sections)
    return Program(config, make_mesh(config))


def saved(built, after):
    """Saves the states after some of the first steps; their numbers by step."""
    state, before, states = built.init(), 0, {}
    with opened(replaced(built.config, checkpoint={"keep": 20}), built) as (
        checkpointer,
        _,
    ):
        checkpointer.restore_or_init()
        for step in after:
            state, _ = run(built, state, step - before)
            checkpointer.save(step, state, loss=1.0)
            checkpointer.wait()
            states[step], before = [x.copy() for x in numbers(state)], step
    return states


def restored(built, **keys):
    return checkpoint_runs.restored(replaced(built.config, checkpoint=keys), built)


def killed_after(built, step):
    """As if the run had ended there."""
    root = Path(built.config.run.directory) / "checkpoints"
    for later in steps.committed_in(root):
        if later > step:
            steps.remove(root / str(later))


@pytest.mark.slow
def test_a_run_goes_on_from_any_step_with_fragments_under_way_on_stages_with_padding(
    tmp_path,
):
    """Fragments are due after steps 4, 6, 8 and 10, and taken in a step later."""
    built = built_for(
        tmp_path, None, {"every": 4, "start": 2, "fragments": 2, "delay": 1}
    )
    states = saved(built, [1, 4, 5, 7, 9, 11])
    for step in (9, 7, 5, 4, 1):
        killed_after(built, step)
        state, found, _ = restored(built)
        assert found == step and same_bits(state, states[step])
        assert any(x.any() for x in numbers(state.islands.under_way)) == (step >= 5)
        state, _ = run(built, state, 11 - step)
        assert same_bits(state, states[11])


def canonical(built, tree):
    flat = zip(built.layout.flat, numbers(tree), strict=True)
    return [np.asarray(built.layout.canonical_leaf(weight, x)) for weight, x in flat]


def of_islands(built, tree, islands):
    each = [canonical(built, [x[i] for x in numbers(tree)]) for i in range(islands)]
    return [np.stack(leaves) for leaves in zip(*each, strict=True)]


def moment(state):
    return next(
        part.trace
        for part in jax.tree.leaves(
            state.optimizer, is_leaf=lambda x: hasattr(x, "trace")
        )
        if hasattr(part, "trace")
    )


@pytest.fixture(scope="module")
def met(tmp_path_factory):
    """Two islands that have met, after step 6: their program and its state, read once from a checkpoint that stays."""
    here = built_for(
        tmp_path_factory.mktemp("met"), optimizer=SGD, train={"global_batch_size": 8}
    )
    saved(here, [6])
    return here, restored(here)[0]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("mesh", "parallel"),
    [
        ({"data": 4, "islands": 4}, {}),
        (
            {"data": 4, "pipeline": 2, "islands": 2},
            {"schedule": "interleaved", "virtual_stages": 2, "vocab": "edge"},
        ),
        pytest.param(
            {"data": 6, "islands": 3}, {"microbatches": 1}, marks=pytest.mark.slow
        ),
        ({"data": 4, "tensor": 2}, {}),
    ],
)
def test_other_islands_each_begin_with_the_mean_and_the_outer_momentum_is_kept(
    met, mesh, parallel
):
    """From 2 islands on one stage to 4 islands, 2 on stages out of order (bit for bit), 3, and none of their own."""
    batch = {"global_batch_size": 24}
    here, was = met
    assert (
        float(
            np.abs(
                numbers(was.islands.params)[0][0] - numbers(was.islands.params)[0][1]
            ).max()
        )
        > 1e-4
    )
    islands = mesh.get("islands", 0)
    sync = SYNC if islands else {}
    allow = ["train.global_batch_size", "parallel.sync.every", "parallel.sync.start"]
    directory = here.config.run.directory
    there = built_for(
        directory,
        mesh,
        sync,
        parallel={**parallel, "sync": sync},
        optimizer=SGD,
        train=batch,
    )
    state, step, said = restored(there, allow=allow)
    assert step == 6
    ours = [of_islands(here, tree, 2) for tree in (was.islands.params, moment(was))]
    if not islands:
        found = [None, [x[None] for x in canonical(there, moment(state))]]
    else:
        found = [
            of_islands(there, tree, islands)
            for tree in (state.islands.params, moment(state))
        ]
        assert same_bits(
            canonical(here, was.islands.momentum),
            canonical(there, state.islands.momentum),
        )
    assert same_bits(canonical(here, was.params), canonical(there, state.params))
    for old, new in zip(ours, found, strict=True):
        for x, y in zip(old, new or [], strict=bool(new)):
            expected = x if islands == 2 else np.broadcast_to(x.mean(0), y.shape)
            assert np.abs(expected - y).max() < 1e-7
    sentences = [s for s in said if "islands of their own" in s]
    assert len(sentences) == (islands != 2)
    if islands != 2:
        assert tells(sentences[0], "checkpoint has 2 islands", "mean of their")


@pytest.mark.thorough
def test_a_broken_island_is_left_out_of_what_other_islands_begin_with(tmp_path):
    here = built_for(tmp_path, optimizer=SGD)
    state, random = here.init(), np.random.default_rng(0)
    drawn = lambda x: jax.device_put(
        random.standard_normal(x.shape).astype(x.dtype), x.sharding
    )
    own, optimizer = jax.tree.map(drawn, (state.islands.params, state.optimizer))
    # another one in its weights than in its moments, each in one leaf alone
    state = state._replace(
        islands=state.islands._replace(params=spoiled(own, 0)),
        optimizer=spoiled(optimizer, 1),
    )
    with opened(here.config, here) as (checkpointer, _):
        checkpointer.save(6, state, loss=1.0)
    found, _, said = restored(
        built_for(tmp_path, {"data": 4, "islands": 4}, optimizer=SGD)
    )
    for tree, wanted, island in (
        (found.islands.params, own, 1),
        (found.optimizer, optimizer, 0),
    ):
        for x, y in zip(numbers(tree), numbers(wanted), strict=True):
            assert (
                all(np.array_equal(x[i], y[island]) for i in range(4))
                or x.dtype == np.int32
            )
    left_out = sorted(s[: s.index(" in the")] for s in said if "left out" in s)
    assert left_out == ["the moments of island 1", "the weights of island 0"]


def test_islands_of_a_checkpoint_that_does_not_say_how_much_they_learned_from_have_the_same_voice(
    tmp_path,
):
    (counted,) = (
        entry
        for entry in GlobalArrays(built_for(tmp_path)).entries
        if entry.name == COUNTED
    )
    assert np.asarray(initial_groups([counted], {})[COUNTED]).tolist() == [[1.0], [1.0]]


@pytest.mark.thorough
def test_islands_begin_with_the_weights_and_moments_of_a_plain_run(tmp_path):
    plain = built_for(tmp_path, sync={}, optimizer=SGD)
    saved(plain, [2])
    was, *_ = restored(plain)
    ours = built_for(tmp_path, sync={"every": 3}, optimizer=SGD)
    with pytest.raises(ConfigError, match=r"parallel\.sync\.every is 3 but was 0"):
        restored(ours)
    state, _, said = restored(ours, allow=["parallel.sync.every"])
    assert any(tells(s, "2 islands begin with", "of the checkpoint") for s in said)
    for tree, own in (
        (was.params, state.islands.params),
        (was.optimizer, state.optimizer),
    ):
        for x, y in zip(numbers(tree), numbers(own), strict=True):
            assert np.array_equal(x, y[0]) and np.array_equal(x, y[1])
    assert not any(x.any() for x in numbers(state.islands.momentum))
    state, rows = run(ours, state, 1)
    assert "sync_islands" in rows[0]


def test_islands_that_have_moved_apart_cannot_be_held_to_be_equal_again():
    old = {"parallel": {"sync": {"every": 5, "start": 10}}}
    says = r"step 12.* step 10, .*parallel\.sync\.start is 20; .* 12"
    with pytest.raises(ConfigError, match=says):
        check_sync_start(old, 12, SyncConfig(every=5, start=20), "checkpoint x")
    check_sync_start(old, 12, SyncConfig(every=5, start=12), "checkpoint x")
    check_sync_start(old, 10, SyncConfig(every=5, start=20), "checkpoint x")
    check_sync_start(
        {"parallel": {}}, 12, SyncConfig(every=5, start=20), "checkpoint x"
    )


@pytest.mark.thorough
def test_weights_alone_begin_on_every_island(tmp_path):
    plain = built_for(tmp_path / "plain", sync={}, optimizer=SGD)
    saved(plain, [2])
    was, *_ = restored(plain)
    ours = built_for(tmp_path / "ours", sync={"every": 3}, optimizer=SGD)
    state, step, _ = restored(ours, resume=str(tmp_path / "plain"), weights_only=True)
    assert step == 0 and same_bits(state.params, was.params)
    assert (
        largest_difference(state.params, [x[1] for x in numbers(state.islands.params)])
        == 0
    )
