"""Frozen weights in float8 (LoRA): half their bytes, the same numbers as when they are rounded where they are used, on
every mesh and to disk.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from short_runs import canonical_numbers, place, token_batches

import meshtrain as mt
from meshtrain.adopt.__main__ import main as adopt
from meshtrain.checkpoint import Checkpointer
from meshtrain.cluster.cluster import named
from meshtrain.config import load, replaced
from meshtrain.mesh import make_mesh
from meshtrain.model.float8 import rounded, widened
from meshtrain.model.weights import adapters, weights
from meshtrain.parallel.float8 import groups_of, is_held
from meshtrain.parallel.placement import all_placed
from meshtrain.plan.estimate import estimate
from meshtrain.step import Program

MODEL = {
    "layers": 4,
    "d_model": 128,
    "heads": 4,
    "kv_heads": 4,
    "head_dim": 64,
    "d_ff": 256,
    "vocab_size": 260,
}
EXPERTS = {"experts": 4, "top_k": 2, "d_ff": 128}
RECIPES = (
    "rowwise",
    *[
        pytest.param(name, marks=pytest.mark.thorough)
        for name in ("tensorwise", "blockwise")
    ],
)


def config_of(
    recipe="rowwise",
    frozen=True,
    mesh=None,
    parallel=None,
    model=None,
    precision=None,
    **more,
):
    precision = {
        "matmul": "float8",
        "float8_recipe": recipe,
        "float8_frozen": frozen,
        **(precision or {}),
    }
    size = MODEL | (model or {})
    if "moe" in size:
        del size["d_ff"]
    given = {
        "model": size,
        "mesh": mesh or {},
        "parallel": parallel or {},
        "precision": precision,
    }
    return load(
        {
            "lora": {"rank": 4},
            "train": {"global_batch_size": 8, "sequence_length": 16},
            **given,
            **more,
        }
    )


def gradients(config):
    program = Program(config, make_mesh(config))
    tokens, labels = token_batches(config, 1)[0]
    params = place(program.layout, canonical_numbers(program.layout))
    loss, grads = jax.jit(program.gradients)(
        params,
        program.place({"tokens": tokens, "labels": labels}),
        jnp.int32(0),
        jnp.float32(1),
    )
    leaf = lambda w, x: (
        None
        if x is None
        else np.asarray(program.layout.canonical_leaf(w, np.asarray(x)))
    )
    return float(loss), jax.tree.leaves(program.layout.map(leaf, grads))


@pytest.mark.thorough
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("model", [{}, {"moe": EXPERTS}])
def test_numbers_are_those_of_weights_that_are_rounded_where_they_are_used(
    recipe, model
):
    every = {"float8_skip": [0, 0]}
    held, at_use = (
        gradients(config_of(recipe, frozen, model=model, precision=every))
        for frozen in (True, False)
    )
    assert held[0] == at_use[0]
    for mine, theirs in zip(held[1], at_use[1], strict=True):
        # the loops of experts are compiled in another order of sums, of which some round to another number
        # (`test_float8`)
        if model:
            assert np.linalg.norm(mine - theirs) < 0.03 * np.linalg.norm(theirs)
        else:
            np.testing.assert_array_equal(mine, theirs)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("mesh", "parallel"),
    [
        (
            {"data": 2, "tensor": 2, "pipeline": 2},
            {"microbatches": 2, "schedule": "zb_h1"},
        ),
        ({"data": 4}, {"zero_stage": 3}),
        (
            {"data": 2, "pipeline": 2},
            {
                "microbatches": 2,
                "zero_stage": 3,
                "zero_hold": True,
                "remat": "selective",
            },
        ),
    ],
)
@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_scales_of_frozen_weights_are_the_same_on_every_mesh(recipe, mesh, parallel):
    """Those of activations are not, tensorwise: weights alone are looked at."""
    wide = {"d_model": 512}  # of which shards have whole blocks
    configs = (
        config_of(recipe, True, mesh, parallel, wide),
        config_of(recipe, model=wide),
    )
    split, one = (Program(config, make_mesh(config)) for config in configs)
    numbers = canonical_numbers(one.layout)
    for weight, whole in zip(split.layout.flat, one.layout.flat, strict=True):
        if not one.layout.is_rounded(whole):
            continue
        assert split.layout.is_rounded(weight)
        *parents, name = weight.name.split(".")
        here, there = (place(program.layout, numbers) for program in (split, one))
        for parent in (*parents, name):
            here, there = here[parent], there[parent]
        live = split.layout.unstored(weight, here)
        np.testing.assert_array_equal(
            split.layout.canonical_leaf(weight, live), one.layout.unstored(whole, there)
        )


@pytest.mark.thorough
def test_a_state_has_half_the_bytes_and_the_plan_says_so():
    bytes_of, planned = {}, {}
    for frozen in (True, False):
        config = config_of(
            "rowwise",
            frozen,
            {"data": 2, "tensor": 2},
            {"zero_stage": 3},
            precision={"compute": "bfloat16"},
        )
        program = Program(config, make_mesh(config))
        bytes_of[frozen] = (
            program.lower().compile().memory_analysis().argument_size_in_bytes
        )
        (planned[frozen],) = (
            m.nbytes
            for m in estimate(config, named("cpu", 4)).memory
            if m.name == "frozen weights"
        )
    frozen = [w for w in all_placed(config) if not w.trained]
    products = sum(2 * w.on_rank() for w in frozen if groups_of(w, "rowwise"))
    assert planned[False] == pytest.approx(
        sum(2 * w.on_rank() for w in frozen), rel=1e-6
    )
    assert planned[False] - planned[True] == pytest.approx(
        products / 2, rel=0.06
    )  # less 4 bytes a column of 128
    assert bytes_of[False] - bytes_of[True] == pytest.approx(
        planned[False] - planned[True], rel=0.01
    )


@pytest.mark.thorough
@pytest.mark.parametrize("skip", [[1, 1], [0, 0]])
def test_no_copy_of_a_frozen_weight_is_kept_for_the_backward(skip):
    """Of a stage's layers, skipped ones too: weights in the compute dtype would be as large again as all that is
    frozen.
    """
    temp = {}
    for frozen in (True, False):
        config = config_of(
            "rowwise",
            frozen,
            {"pipeline": 2},
            {"microbatches": 2},
            {"layers": 8, "d_ff": 1024},
            {"float8_skip": skip},
        )
        temp[frozen] = (
            Program(config, make_mesh(config))
            .lower()
            .compile()
            .memory_analysis()
            .temp_size_in_bytes
        )
    layer = sum(
        4 * w.on_device() / (w.padded[0] // 2)
        for w in all_placed(config)
        if is_held(replaced(config, precision={"float8_frozen": True}), w)
    )
    assert temp[True] < temp[False] + 1.5 * layer


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("mesh", "parallel"),
    [
        ({"data": 2, "pipeline": 2}, {"microbatches": 2}),
        ({"data": 4}, {"zero_stage": 3}),
    ],
)
def test_a_checkpoint_goes_onto_other_meshes_and_its_merge_is_what_was_trained(
    mesh, parallel, tmp_path
):
    run = {
        "run": {"directory": str(tmp_path / "run")},
        "data": {"source": "synthetic"},
        "checkpoint": {"every": 2},
    }
    steps = {"steps": 2, "global_batch_size": 8, "sequence_length": 16}
    first = config_of(mesh=mesh, parallel=parallel, **run, train=steps)
    mt.train(first)
    for other in ({"tensor": 2, "pipeline": 2}, {}):
        config = config_of(mesh=other, parallel={"microbatches": 2}, **run, train=steps)
        program = Program(config, make_mesh(config))
        checkpointer = Checkpointer(config, program)
        state, step = checkpointer.restore_or_init()
        checkpointer.close()
        assert step == 2
    # and as they are
    exact = jax.tree.map(np.asarray, state.params)
    model = mt.read_model(tmp_path / "run")
    for weight in weights(config.model):
        *parents, name = weight.name.split(".")
        here = exact
        for parent in (*parents, name):
            here = here[parent]
        placed = next(w for w in program.layout.flat if w.name == weight.name)
        live = program.layout.unstored(placed, jax.tree.map(jnp.asarray, here))
        np.testing.assert_array_equal(model.weights[weight.name], live)
        if program.layout.is_rounded(placed):
            groups = (1, *groups_of(placed, "rowwise"))
            np.testing.assert_array_equal(
                live, widened(rounded(live, groups), live.dtype)
            )
    assert (
        adopt(
            [
                "merge",
                str(tmp_path / "run"),
                str(tmp_path / "merged"),
                "--dtype",
                "float32",
            ]
        )
        == 0
    )
    merged = mt.read_model(tmp_path / "merged").weights
    for a, b in zip(*[iter(adapters(config.model, config.lora))] * 2, strict=True):
        name = a.name.removesuffix("_lora_a")
        delta = np.einsum(
            "lir,lro->lio",
            model.weights[a.name].reshape(4, -1, 4),
            model.weights[b.name].reshape(4, 4, -1),
        )
        base = np.asarray(model.weights[name])
        np.testing.assert_allclose(
            merged[name],
            base + config.lora.alpha / 4 * delta.reshape(base.shape),
            rtol=1e-5,
            atol=1e-6,
        )
