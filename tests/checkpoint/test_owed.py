"""What compression kept: back bit for bit on the same mesh; on another what is owed is still owed; and the run says what became of it."""

import jax
import numpy as np
import pytest
from checkpoint_runs import build_for, config, same
from covering import thorough_but

from meshtrain.checkpoint import Checkpointer
from meshtrain.step import State

EVENLY = "what compression had left out of gradients is shared out evenly among the ranks of this mesh."
DROPPED = "what compression had left out of gradients is dropped where nothing is fed back from here on."
NOTHING = "error feedback starts with nothing left out."
ANEW = "PowerSGD's Q starts anew: the checkpoint has none of the matrices that this run sends."
# (data, tensor, pipeline, islands, keys of parallel)
FOUR, TWO, CUBE = (4, 1, 1, 1, {}), (2, 1, 1, 1, {}), (2, 2, 2, 1, {"microbatches": 2})
CHUNKS = (2, 1, 2, 1, {"microbatches": 2, "schedule": "interleaved", "virtual_stages": 2})
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
        return jax.device_put(random.standard_normal(x.shape).astype(x.dtype), x.sharding)

    def residual(weight, x):
        if x is None:
            return None
        real = np.zeros(x.shape[1:], bool)
        places = program.layout.places if weight.stacked else slice(weight.shape[0])
        real[(places, *map(slice, weight.shape[1:]))] = True
        return jax.device_put(np.where(real, random.standard_normal(x.shape), 0).astype(np.float32), x.sharding)

    kept = state.reduce
    if kept is not None:
        kept = kept._replace(residual=program.layout.map(residual, kept.residual), q=jax.tree.map(fill, kept.q))
    return state._replace(reduce=kept)


def owed(program, state):
    """Of each weight what all ranks owe together, its layers in the model's order [*canonical]."""
    found = {}
    flat = jax.tree.leaves(state.reduce.residual, is_leaf=lambda x: x is None)
    for weight, x in zip(program.layout.flat, flat, strict=True):
        if x is not None:
            whole = np.asarray(x, np.float64).sum(0)
            places = program.layout.places if weight.stacked else slice(weight.shape[0])
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
            checkpointer = Checkpointer(chosen, program)
            checkpointer.save(3, state._replace(step=jax.numpy.int32(3)), 1.0)
            checkpointer.close()
            made[key] = chosen.run.directory, program, state
        return made[key]

    return write


def resumed(directory, layout, **reduce):
    chosen, said = settings(directory, layout, **reduce), []
    program = build_for(chosen)
    checkpointer = Checkpointer(chosen, program, say=said.append)
    try:
        state, step = checkpointer.restore_or_init()
    finally:
        checkpointer.close()
    assert step == 3
    for x, wanted in zip(jax.tree.leaves(state), jax.tree.leaves(program.state_shapes), strict=True):
        assert x.sharding.is_equivalent_to(wanted.sharding, x.ndim)
    return program, state, said


CELLS = [(layout, kind) for layout in (FOUR, CUBE, CHUNKS, ISLANDS) for kind in (POWER, TOPK)]
CELLS += [(ISLANDS, {**kind, "over": "islands"}) for kind in (POWER, TOPK)]


@pytest.mark.parametrize("cell", thorough_but(CELLS, [CELLS[-2]].__contains__), ids=str)
def test_on_the_same_mesh_every_bit_comes_back(cell, written):
    layout, reduce = cell
    directory, _, before = written(layout, **reduce)
    _, state, said = resumed(directory, layout, **reduce)
    assert said == []
    assert same(State(None, None, None, None, state.reduce), State(None, None, None, None, before.reduce))
    assert jax.tree.leaves(state.reduce.residual)


MOVES = [
    (FOUR, TWO, POWER), (CUBE, FOUR, POWER), (FOUR, CUBE, POWER), (CUBE, CHUNKS, TOPK), (CHUNKS, CUBE, TOPK), (CHUNKS, TWO, TOPK),
    (ISLANDS, CUBE, TOPK), (FOUR, ISLANDS, TOPK), (ISLANDS, WIDE, TOPK),
    (ISLANDS, WIDE, {**TOPK, "over": "islands"}), (WIDE, ISLANDS, {**POWER, "over": "islands"}),
]  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("cell", thorough_but(MOVES, [MOVES[1]].__contains__), ids=str)
def test_on_another_mesh_each_rank_owes_an_equal_share_of_the_sum(cell, written):
    first, second, reduce = cell
    directory, program, before = written(first, **reduce)
    other, state, said = resumed(directory, second, **reduce)
    assert [s for s in said if s in (EVENLY, ANEW)] == [EVENLY, *[ANEW] * (reduce["compression"] == "powersgd")]
    wanted, found = owed(program, before), owed(other, state)
    assert found.keys() == wanted.keys() and wanted
    for name, x in wanted.items():
        np.testing.assert_allclose(found[name], x, rtol=0, atol=1e-5 * np.abs(x).max(), err_msg=name)
    for was, x in zip(*(map(np.asarray, jax.tree.leaves(s.reduce.residual)) for s in (before, state)), strict=True):
        # With as many ranks, and layers in the same places, each has what it had.
        assert np.array_equal(was, x) or all(np.array_equal(x[0], share) for share in x)
    drawn = jax.jit(other.local.zero.feedback.init_q)(other.feedback_key)
    assert all(np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (state.reduce.q, drawn)), strict=True))


CHANGES = [
    (POWER, TOPK, []),
    (TOPK, POWER, [ANEW]),
    (POWER, {"compression": "none"}, [DROPPED]),
    (POWER, {**POWER, "rank": 3}, [ANEW]),
    (POWER, {**POWER, "feedback": False}, [DROPPED]),
    ({"compression": "none"}, POWER, [NOTHING, ANEW]),
]


@pytest.mark.parametrize("cell", thorough_but(CHANGES, [CHANGES[3]].__contains__), ids=str)
def test_other_compression_is_told_with_what_becomes_of_its_state(cell, written):
    before, after, sentences = cell
    directory, _, was = written(FOUR, **before)
    _, state, said = resumed(directory, FOUR, **after)
    assert [s for s in said if not s.startswith("parallel.reduce.")] == sentences
    assert any(s.startswith("parallel.reduce.") for s in said)
    kept = state.reduce
    if sentences in ([], [ANEW]):
        assert same(State(*[None] * 4, kept.residual), State(*[None] * 4, was.reduce.residual))
    elif kept is not None:
        assert all(not np.asarray(x).any() for x in jax.tree.leaves(kept.residual))


@pytest.mark.thorough
def test_weights_alone_take_nothing_of_it(written, tmp_path):
    directory, _, _ = written(FOUR, **POWER)
    chosen = config(
        tmp_path,
        mesh={"data": 4},
        parallel={"reduce": POWER},
        checkpoint={"resume": str(directory), "weights_only": True},
    )
    program = build_for(chosen)
    checkpointer = Checkpointer(chosen, program, say=lambda _: None)
    state, _ = checkpointer.restore_or_init()
    checkpointer.close()
    assert same(State(*[None] * 4, state.reduce), State(*[None] * 4, program.init().reduce))
