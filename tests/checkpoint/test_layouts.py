"""Saved on one layout, restored on another: the same bits in the canonical layout, and a run that goes on as if nothing happened."""

import jax
import numpy as np
import pytest
from checkpoint_runs import LAYOUTS, config, program, take
from covering import thorough_but

from meshtrain.checkpoint import Checkpointer
from meshtrain.checkpoint.global_arrays import GlobalArrays

STEPS, AFTER, TOLERANCE = 3, 3, 2e-6  # steps before and after the checkpoint; relative, of each loss after it
ONE, CUBE, DATA, FLAT, PIPE, INTERLEAVED, V = LAYOUTS
PAIRS = [
    (ONE, CUBE), (CUBE, DATA), (DATA, INTERLEAVED),  # CUBE -> DATA: all three axes and the ZeRO stage
    (INTERLEAVED, V), (V, FLAT), (FLAT, PIPE), (PIPE, ONE),
]  # fmt: skip


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """For each layout, made when asked for: the run directory after STEPS steps, its canonical arrays and the losses of the next steps."""
    made = {}

    def source(layout):
        if layout not in made:
            directory = tmp_path_factory.mktemp("run")
            checkpointer = Checkpointer(config(directory, layout), program(layout))
            state, loss = checkpointer.restore_or_init()[0], np.nan
            for step in range(1, STEPS + 1):
                state, loss = take(program(layout), state, step)
            checkpointer.save(STEPS, state, loss)
            before = {name: np.array(x) for name, x in GlobalArrays(program(layout)).arrays(state).items()}
            checkpointer.close()
            made[layout] = directory, before, losses_after(layout, state)
        return made[layout]

    return source


def losses_after(layout, state):
    """Of the next AFTER steps: the first shows the weights, the others the optimizer's state as well."""
    losses = []
    for step in range(STEPS + 1, STEPS + AFTER + 1):
        state, loss = take(program(layout), state, step)
        losses.append(loss)
    return np.array(losses)


NOW = {(INTERLEAVED, V)}  # of the others' arrays tests/checkpoint/test_global_arrays.py keeps every bit


@pytest.mark.parametrize("pair", thorough_but(PAIRS, NOW.__contains__), ids=" -> ".join)
def test_a_run_goes_on_on_another_layout(pair, sources):
    first, second = pair
    directory, before, expected = sources(first)
    checkpointer = Checkpointer(config(directory, second), program(second), say=lambda _: None)
    state, step = checkpointer.restore_or_init()
    checkpointer.close()
    assert step == STEPS == int(state.step)
    for x, wanted in zip(jax.tree.leaves(state), jax.tree.leaves(program(second).state_shapes), strict=True):
        assert x.sharding.is_equivalent_to(wanted.sharding, x.ndim)
    for name, x in GlobalArrays(program(second)).arrays(state).items():
        assert np.array_equal(np.asarray(x), before[name]), name
    differences = np.abs(losses_after(second, state) - expected) / expected
    print(f"{first} -> {second}: the losses of the next {AFTER} steps differ by {differences}")
    assert np.all(differences <= TOLERANCE)


def test_on_the_same_layout_the_losses_are_the_same_bits(sources):
    directory, _, expected = sources(INTERLEAVED)
    checkpointer = Checkpointer(config(directory, INTERLEAVED), program(INTERLEAVED))
    state, _ = checkpointer.restore_or_init()
    checkpointer.close()
    assert np.array_equal(losses_after(INTERLEAVED, state), expected)


def test_the_pairs_change_all_axes_and_the_zero_stage_and_meet_every_layout_on_both_sides():
    assert {a for a, _ in PAIRS} == {b for _, b in PAIRS} == set(LAYOUTS)
    (mesh, parallel), (other, others) = LAYOUTS[CUBE], LAYOUTS[DATA]
    assert all(a != b for a, b in zip(mesh, other, strict=True))
    assert parallel.get("zero_stage", 1) != others["zero_stage"]
