"""A checkpoint knows no islands: the same bits on any number of them, and a run that goes on as if nothing happened."""

from functools import cache
from typing import Any

import jax
import numpy as np
import pytest
from checkpoint_runs import build_for, config, take
from covering import thorough_but

from meshtrain.checkpoint import Checkpointer
from meshtrain.checkpoint.global_arrays import GlobalArrays
from meshtrain.config import Config
from meshtrain.step import Program, State

STEPS, AFTER, TOLERANCE = 3, 3, 2e-6  # steps before and after the checkpoint; relative, of each loss after it
LAYOUTS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "1 island": ({"data": 8}, {"zero_stage": 3}),
    "2 islands": ({"data": 8, "islands": 2}, {"zero_stage": 3}),
    "4 islands": ({"data": 8, "islands": 4}, {"zero_stage": 1}),
    "2 islands, tensor 2": ({"data": 4, "tensor": 2, "islands": 2}, {"zero_stage": 2, "microbatches": 2}),
    "2 islands, pipeline 2": ({"data": 2, "pipeline": 2, "islands": 2}, {"zero_stage": 3, "microbatches": 4}),
}
FLAT, TWO, FOUR, TENSOR, STAGES = LAYOUTS
PAIRS = [
    (FLAT, TWO), (TWO, TENSOR), (TENSOR, FOUR), (FOUR, STAGES), (STAGES, FLAT), (FLAT, FOUR), (FOUR, FLAT),
]  # fmt: skip
NOW = (TWO, TENSOR)


def settings(layout: str, directory: str = "unused") -> Config:
    mesh, parallel = LAYOUTS[layout]
    return config(directory, mesh=mesh, parallel=parallel)


@cache
def program(layout: str) -> Program:
    return build_for(settings(layout))


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """For each layout, made when asked for: the run directory after STEPS steps, its canonical arrays and the losses of the next steps."""

    @cache
    def source(layout: str) -> tuple[str, dict[str, np.ndarray], np.ndarray]:
        directory, built = str(tmp_path_factory.mktemp("run")), program(layout)
        checkpointer = Checkpointer(settings(layout, directory), built)
        state, loss = checkpointer.restore_or_init()[0], np.nan
        for step in range(1, STEPS + 1):
            state, loss = take(built, state, step)
        checkpointer.save(STEPS, state, loss)
        before = {name: np.array(x) for name, x in GlobalArrays(built).arrays(state).items()}
        checkpointer.close()
        return directory, before, losses_after(built, state)

    return source


def losses_after(built: Program, state: State) -> np.ndarray:
    """Of the next AFTER steps: the first shows the weights, the others the optimizer's state as well."""
    losses = []
    for step in range(STEPS + 1, STEPS + AFTER + 1):
        state, loss = take(built, state, step)
        losses.append(loss)
    return np.array(losses)


@pytest.mark.parametrize("pair", thorough_but(PAIRS, lambda pair: pair == NOW), ids=" -> ".join)
def test_a_run_goes_on_on_other_islands(pair, sources):
    first, second = pair
    directory, before, expected = sources(first)
    said: list[str] = []
    built = program(second)
    checkpointer = Checkpointer(settings(second, directory), built, say=said.append)
    state, step = checkpointer.restore_or_init()
    checkpointer.close()
    assert step == STEPS == int(state.step)
    for x, wanted in zip(jax.tree.leaves(state), jax.tree.leaves(built.state_shapes), strict=True):
        assert x.sharding.is_equivalent_to(wanted.sharding, x.ndim)
    for name, x in GlobalArrays(built).arrays(state).items():
        assert np.array_equal(np.asarray(x), before[name]), name
    old, new = (LAYOUTS[layout][0].get("islands", 1) for layout in pair)
    assert any(f"mesh.islands was {old} and is {new} from here on" in sentence for sentence in said) == (old != new)
    assert np.all(np.abs(losses_after(built, state) - expected) <= TOLERANCE * expected)


def test_the_pairs_go_between_1_2_and_4_islands_both_ways():
    between = {tuple(LAYOUTS[layout][0].get("islands", 1) for layout in pair) for pair in PAIRS}
    assert between >= {(a, b) for a in (1, 2, 4) for b in (1, 2, 4) if a != b}
    assert {a for a, _ in PAIRS} == {b for _, b in PAIRS} == set(LAYOUTS)
