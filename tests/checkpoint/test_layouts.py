"""Saved on one layout, restored on another: the same bits as global arrays, and a run that goes on as if nothing
happened.
"""

from functools import cache
from typing import Any

import checkpoint_runs
import jax
import numpy as np
import pytest
from checkpoint_runs import LAYOUTS, build_for, config, opened, take
from covering import slow_but

from meshtrain.checkpoint.global_arrays import GlobalArrays
from meshtrain.config import Config

STEPS, AFTER, TOLERANCE = (
    3,
    3,
    2e-6,
)  # steps before and after the checkpoint; relative, of each loss after it
OTHERS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "1 island": ({"data": 8}, {"zero_stage": 3}),
    "2 islands": ({"data": 8, "islands": 2}, {"zero_stage": 3}),
    "4 islands": ({"data": 8, "islands": 4}, {"zero_stage": 1}),
    "2 islands, tensor 2": (
        {"data": 4, "tensor": 2, "islands": 2},
        {"zero_stage": 2, "microbatches": 2},
    ),
    "2 islands, pipeline 2": (
        {"data": 2, "pipeline": 2, "islands": 2},
        {"zero_stage": 3, "microbatches": 4},
    ),
    "context 4": ({"data": 2, "context": 4}, {"zero_stage": 3}),
    "context 2, tensor 2": (
        {"data": 2, "context": 2, "tensor": 2},
        {"zero_stage": 1, "context_strategy": "all_gather"},
    ),
    "zero bubble pairs, 2 chunks": (
        {"data": 2, "tensor": 2, "pipeline": 2},
        {
            "zero_stage": 3,
            "microbatches": 2,
            "schedule": "zb_paired",
            "virtual_stages": 2,
        },
    ),
    "pairs on one stage": (
        {"data": 2, "tensor": 2},
        {"zero_stage": 2, "microbatches": 4, "schedule": "paired"},
    ),
}
ONE, CUBE, DATA, FLAT, PIPE, INTERLEAVED, V = LAYOUTS
I1, I2, I4, TENSOR, STAGES, C4, C2, ZB_PAIRS, ONE_STAGE = OTHERS
PAIRS = [
    # CUBE -> DATA: all three axes and the ZeRO stage
    (ONE, CUBE), (CUBE, DATA), (DATA, INTERLEAVED),
    (INTERLEAVED, V), (V, FLAT), (FLAT, PIPE), (PIPE, ONE),
    (I1, I2), (I2, TENSOR), (TENSOR, I4), (I4, STAGES), (STAGES, I1), (I1, I4), (I4, I1),
    (C4, C2), (C2, PIPE), (ONE, C4),
    (INTERLEAVED, ZB_PAIRS), (ZB_PAIRS, ONE_STAGE), (ONE_STAGE, INTERLEAVED),
]  # fmt: skip
# Stages in another order, all axes and the ZeRO stage, islands that become more and none, pairs and back.
# Of the others' arrays tests/checkpoint/test_global_arrays.py keeps every bit.
FEW = [(ONE, CUBE), (INTERLEAVED, V), (CUBE, DATA), (I2, TENSOR), (I4, STAGES), (STAGES, I1),
    (INTERLEAVED, ZB_PAIRS), (ZB_PAIRS, ONE_STAGE), (ONE_STAGE, INTERLEAVED),
]  # fmt: skip


def settings(layout: str, directory: str = "unused") -> Config:
    if layout in LAYOUTS:
        return config(directory, layout)
    mesh, parallel = OTHERS[layout]
    return config(directory, mesh=mesh, parallel=parallel)


@cache
def program(layout):
    return build_for(settings(layout))


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """For each layout, made when asked for: the run directory after STEPS steps, its global arrays and the losses of
    the next steps.
    """

    @cache
    def source(layout):
        directory, built = str(tmp_path_factory.mktemp("run")), program(layout)
        with opened(settings(layout, directory), built) as (checkpointer, _):
            state, loss = checkpointer.restore_or_init()[0], np.nan
            for step in range(1, STEPS + 1):
                state, loss = take(built, state, step)
            checkpointer.save(STEPS, state, loss)
            before = {
                name: np.array(x)
                for name, x in GlobalArrays(built).arrays(state).items()
            }
        return directory, before, losses_after(built, state)

    return source


def losses_after(built, state):
    """Of the next AFTER steps: the first shows the weights, the others the optimizer's state as well."""
    losses = []
    for step in range(STEPS + 1, STEPS + AFTER + 1):
        state, loss = take(built, state, step)
        losses.append(loss)
    return np.array(losses)


def restored(directory, layout):
    state, step, said = checkpoint_runs.restored(
        settings(layout, directory), program(layout)
    )
    assert step == STEPS == int(state.step)
    return state, said


@pytest.mark.thorough
@pytest.mark.parametrize("pair", slow_but(PAIRS, FEW), ids=" -> ".join)
def test_a_run_goes_on_on_another_layout(pair, sources):
    first, second = pair
    directory, before, expected = sources(first)
    state, said = restored(directory, second)
    built = program(second)
    for x, wanted in zip(
        jax.tree.leaves(state), jax.tree.leaves(built.state_shapes), strict=True
    ):
        assert x.sharding.is_equivalent_to(wanted.sharding, x.ndim)
    for name, x in GlobalArrays(built).arrays(state).items():
        assert np.array_equal(np.asarray(x), before[name]), name
    old, new = (program(layout).config.mesh.islands for layout in pair)
    assert (f"mesh.islands was {old} and is {new} from here on." in said) == (
        old != new
    )
    assert np.all(np.abs(losses_after(built, state) - expected) <= TOLERANCE * expected)


@pytest.mark.thorough
def test_on_the_same_layout_the_losses_are_the_same_bits(sources):
    directory, _, expected = sources(CUBE)
    state, _ = restored(directory, CUBE)
    assert np.array_equal(losses_after(program(CUBE), state), expected)


@pytest.mark.thorough
def test_the_pairs_change_all_axes_the_zero_stage_and_islands_and_meet_every_layout_on_both_sides():
    assert (
        {a for a, _ in PAIRS} == {b for _, b in PAIRS} == LAYOUTS.keys() | OTHERS.keys()
    )
    (mesh, parallel), (other, others) = LAYOUTS[CUBE], LAYOUTS[DATA]
    assert all(a != b for a, b in zip(mesh, other, strict=True))
    assert parallel.get("zero_stage", 1) != others["zero_stage"]
    assert (
        program(ZB_PAIRS).layout.table.paired and program(ONE_STAGE).layout.table.paired
    )
    between = {tuple(program(x).config.mesh.islands for x in pair) for pair in PAIRS}
    assert between >= {(a, b) for a in (1, 2, 4) for b in (1, 2, 4) if a != b}
