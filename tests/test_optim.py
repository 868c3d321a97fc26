"""Optimizers give the same updates on every mesh, those of plain Optax on one layer's own matrices; the learning rate
of every step.
"""

import jax
import numpy as np
import optax
import pytest
from covering import slow_but
from short_runs import canonical_numbers, place, start_optimizer, token_batches

from meshtrain.config import ConfigError, load
from meshtrain.learning_rates import LEARNING_RATES, LearningRate
from meshtrain.mesh import make_mesh
from meshtrain.optim import learning_rate, updates_made
from meshtrain.step import Program

MODEL = {
    "layers": 3,
    "d_model": 32,
    "heads": 4,
    "kv_heads": 2,
    "d_ff": 33,
    "vocab_size": 67,
}
# Layers, d_ff and vocabulary are padded there, layers out of order, state sharded over data
PLACED = {
    "mesh": {"data": 2, "tensor": 2, "pipeline": 2},
    "parallel": {"layer_split": [1, 2], "microbatches": 2, "zero_stage": 1},
}


def updates_of_two_steps(name: str, layout: dict) -> tuple[dict, dict]:
    """Canonical parameters before and after two steps with made-up gradients."""
    optimizer = {
        "name": name,
        "learning_rate": 0.01,
        "schedule": "constant",
        "warmup_steps": 0,
        "weight_decay": 0.1,
    }
    config = load(
        {
            "model": MODEL,
            "optimizer": optimizer,
            "train": {"global_batch_size": 4},
            **layout,
        }
    )
    program = Program(config, make_mesh(config))
    before = canonical_numbers(program.layout, 0)
    params = place(program.layout, before)
    state, step = start_optimizer(program, params)
    for seed in (1, 2):
        params, state = step(
            params,
            state,
            place(program.layout, canonical_numbers(program.layout, seed)),
        )
        assert int(updates_made(state)) == seed
    return before, jax.tree.map(np.asarray, jax.jit(program.layout.canonical)(params))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name",
    slow_but(
        ["adamw", "sgd", "lion", "adafactor", "muon"], ["adamw", "muon", "adafactor"]
    ),
)
def test_updates_are_the_same_on_a_mesh_that_pads_and_reorders(name):
    before, alone = updates_of_two_steps(name, {})
    _, placed = updates_of_two_steps(name, PLACED)
    moved = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), before, alone)
    assert min(jax.tree.leaves(moved)) > 0
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6),
        placed,
        alone,
    )


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["adafactor", "muon"])
def test_updates_of_a_layer_are_those_of_optax_on_its_own_matrices(name):
    before, after = updates_of_two_steps(name, {})
    layer = jax.tree.map(lambda x: x[1].reshape(_matrix(x.shape)), before["blocks"])
    config = load({"model": MODEL, "train": {"global_batch_size": 4}})
    layout = Program(config, make_mesh(config)).layout
    if name == "adafactor":
        theirs = optax.adafactor(0.01, min_dim_size_to_factor=32)
    else:
        theirs = optax.contrib.muon(0.01, beta=0.9, adam_b2=0.95)
    decayed = jax.tree.map(lambda x: x.ndim == 2, layer)
    for step, seed in enumerate((1, 2)):
        whole = canonical_numbers(layout, seed)
        norm = np.sqrt(sum(float(np.sum(np.square(x))) for x in jax.tree.leaves(whole)))
        gradients = jax.tree.map(
            lambda x, norm=norm: x[1].reshape(_matrix(x.shape)) / max(norm, 1.0),
            whole["blocks"],
        )
        state = theirs.init(layer) if step == 0 else state  # noqa: F821
        updates, state = theirs.update(gradients, state, layer)
        layer = jax.tree.map(
            lambda w, u, d: w + u - (0.01 * 0.1 * w if d else 0),
            layer,
            updates,
            decayed,
        )
    for part in (
        "mlp",
        "attention_norm",
    ):  # matrices that Optax's own rules see as we do, and vectors
        for leaf, mine in after["blocks"][part].items():
            np.testing.assert_allclose(
                mine[1], layer[part][leaf], rtol=1e-4, atol=1e-6, err_msg=leaf
            )


def _matrix(shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape[1:] if len(shape) < 4 else (shape[1], -1)


@pytest.mark.parametrize("name", ["adafactor", "muon"])
def test_optimizer_state_on_matrices_is_sharded_over_data(name):
    config = load(
        {
            "model": MODEL | {"layers": 4, "d_ff": 64, "vocab_size": 64},
            "mesh": {"data": 4, "tensor": 2},
            "optimizer": {"name": name},
        }
    )
    program = Program(config, make_mesh(config))
    sizes = {True: 0, False: 0}
    for leaf in jax.tree.leaves(program.state_shapes.optimizer):
        sizes["data" in str(leaf.sharding.spec)] += leaf.size
    assert sizes[True] > 0 and sizes[False] < 0.15 * sizes[True]


def rates(steps: int, **optimizer: object) -> list[float]:
    """The learning rate of each step over the peak."""
    config = load(
        {"optimizer": {"learning_rate": 2.0, **optimizer}, "train": {"steps": steps}}
    )
    return [float(learning_rate(config)(k)) / 2.0 for k in range(steps)]


@pytest.mark.parametrize(
    ("schedule", "middle", "last"),
    [("cosine", 0.55, 0.1), ("linear", 0.55, 0.1), ("constant", 1, 1), ("wsd", 1, 0.1)],
)
def test_learning_rate_climbs_from_the_first_rung_to_the_peak_and_ends_where_asked_at_the_last_step(
    schedule, middle, last
):
    found = rates(20, schedule=schedule, warmup_steps=4)
    assert found[:4] == [0.25, 0.5, 0.75, 1.0]
    # Step 12: half way from step 4 to step 20
    assert found[11] == pytest.approx(middle)
    assert found[-1] == pytest.approx(last, rel=1e-6)
    assert found[3:] == sorted(found[3:], reverse=True)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
def test_learning_rate_without_warm_up_begins_at_the_peak_and_ends_where_asked(
    schedule,
):
    assert rates(5, schedule=schedule, warmup_steps=0) == rates(
        5, schedule=schedule, warmup_steps=1
    )
    for steps in (2, 3, 20):
        found = rates(steps, schedule=schedule, warmup_steps=0, final_ratio=0.0)
        assert (found[0], found[-1]) == (1.0, 0.0)


@pytest.mark.parametrize("schedule", LEARNING_RATES)
@pytest.mark.parametrize(
    ("steps", "warmup", "expected"),
    [
        (1, 0, [1.0]),
        (1, 1, [1.0]),
        (1, 4, [0.25]),
        (4, 4, [0.25, 0.5, 0.75, 1.0]),
        (2, 4, [0.25, 0.5]),
    ],
)
def test_a_run_no_longer_than_its_warm_up_never_decays(
    schedule, steps, warmup, expected
):
    assert rates(steps, schedule=schedule, warmup_steps=warmup) == expected


def test_warmup_stable_decay_falls_in_a_line_over_the_last_share_of_the_steps():
    found = rates(20, schedule="wsd", warmup_steps=4, decay_ratio=0.25, final_ratio=0.0)
    np.testing.assert_allclose(
        found,
        [0.25, 0.5, 0.75, *[1.0] * 12, 0.8, 0.6, 0.4, 0.2, 0.0],
        rtol=1e-6,
        atol=1e-7,
    )
    longer = rates(
        40, schedule="wsd", warmup_steps=4, decay_ratio=0.125, final_ratio=0.0
    )
    assert longer[:15] == found[:15], "the same until the shorter falls"
    assert rates(
        5, schedule="wsd", warmup_steps=4, decay_ratio=1.0, final_ratio=0.0
    ) == [
        0.25,
        0.5,
        0.75,
        1.0,
        0.0,
    ]


def test_a_learning_rate_from_outside_is_one_entry():
    mine = LearningRate(
        "mine", lambda o, rest, steps: lambda k: o.learning_rate * (1 - k / rest) ** 2
    )
    LEARNING_RATES.register(mine)
    try:
        assert rates(5, schedule="mine", warmup_steps=1) == [
            1.0,
            0.5625,
            0.25,
            0.0625,
            0.0,
        ]
        with pytest.raises(
            ConfigError, match=r"cosine, linear, constant, wsd, mine; .*mine"
        ):
            rates(5, schedule="mime")
    finally:
        LEARNING_RATES.forget("mine")


def test_learning_rate_stays_at_its_last_value_in_a_run_that_is_longer_than_planned():
    rate = learning_rate(
        load({"optimizer": {"learning_rate": 2.0}, "train": {"steps": 20}})
    )
    assert float(rate(19)) == float(rate(30)) == pytest.approx(0.2)


@pytest.mark.thorough
def test_learning_rate_goes_by_the_updates_that_the_optimizer_has_seen():
    """A float16 run that goes on in float32 has no count of skipped steps, but an optimizer that never saw them."""
    config = load(
        {"model": MODEL, "train": {"global_batch_size": 4, "sequence_length": 8}}
    )
    program = Program(config, make_mesh(config))
    state = program.init()
    state = state._replace(
        step=state.step + 5,
        optimizer=jax.tree.map(lambda x: x + 3 if x.ndim == 0 else x, state.optimizer),
    )
    tokens, labels = token_batches(config, 1)[0]
    batch = jax.device_put({"tokens": tokens, "labels": labels}, program.batch_sharding)
    _, metrics = program.train_step(state, batch)
    assert float(metrics["learning_rate"]) == pytest.approx(
        float(learning_rate(config)(3)), rel=1e-6
    )
