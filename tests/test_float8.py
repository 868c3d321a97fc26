"""Layers in float8: the same losses and gradients on every mesh, schedule and remat that the recipe allows, and float8
where it is asked for.
"""

import json
import re
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from short_runs import OF_SIXTEENS as MODEL
from short_runs import canonical_numbers, place, token_batches, train

from meshtrain.cluster.cluster import named
from meshtrain.config import ConfigError, load
from meshtrain.mesh import make_mesh
from meshtrain.parallel.layout import Layout
from meshtrain.parallel.parallelize import LocalStep
from meshtrain.plan.estimate import estimate
from meshtrain.plan.traffic import by_axis
from meshtrain.step import Program

EXPERTS = {name: n for name, n in MODEL.items() if name != "d_ff"}
# tensor ranks have whole blocks of 128
WIDE = {
    "layers": 3,
    "d_model": 128,
    "heads": 4,
    "kv_heads": 4,
    "head_dim": 64,
    "d_ff": 256,
    "vocab_size": 64,
}
# A sum in another order may round to another number of 8 bits, which layers then carry on: a weight changed by 1e-7 of
# itself moves the gradients of the models here by 0 to 0.011. Without float8 they are 0.08 to 0.1 away.
LOSS, GRADIENT, WITHOUT = 1e-4, 0.03, 0.05

#       recipe        model   mesh                                      parallel and more
CELLS = {
    "data, ZeRO-3": (
        "rowwise",
        MODEL,
        {"data": 4},
        {"zero_stage": 3, "microbatches": 2},
        {},
    ),
    "context, remat": (
        "rowwise",
        MODEL,
        {"data": 2, "context": 2},
        {"remat": "selective", "microbatches": 2},
        {},
    ),
    "zero bubble, uneven": (
        "rowwise",
        MODEL | {"layers": 5},
        {"data": 2, "pipeline": 2},
        {"schedule": "zb_h1", "microbatches": 2},
        {},
    ),
    "interleaved, wgrad": (
        "rowwise",
        MODEL,
        {"pipeline": 2},
        {"virtual_stages": 2, "microbatches": 4, "remat": "dots"},
        {},
    ),
    "sequence parallel": (
        "blockwise",
        WIDE,
        {"data": 2, "tensor": 2},
        {"sequence_parallel": True, "zero_stage": 3},
        {},
    ),
    "blocks, all axes, pairs": (
        "blockwise",
        WIDE,
        {"data": 2, "tensor": 2, "pipeline": 2},
        {"schedule": "zb_paired", "microbatches": 4},
        {},
    ),
    "experts": (
        "rowwise",
        EXPERTS | {"moe": {"experts": 4, "top_k": 4, "d_ff": 32, "shared_experts": 1}},
        {"data": 2, "pipeline": 2},
        {"schedule": "1f1b", "microbatches": 2},
        {},
    ),
    "expert axis": (
        "blockwise",
        {
            **{n: WIDE[n] for n in WIDE if n != "d_ff"},
            "moe": {"experts": 4, "top_k": 2, "d_ff": 128},
        },
        {"data": 4, "expert": 2},
        {"zero_stage": 3, "microbatches": 2},
        {},
    ),
    "LoRA": (
        "rowwise",
        MODEL | {"qk_norm": True},
        {"data": 2, "pipeline": 2},
        {"microbatches": 2, "zero_stage": 3},
        {"lora": {"rank": 4}},
    ),
}


def config_of(recipe, model, mesh, parallel, more, precision=None):
    precision = {"matmul": "float8", "float8_recipe": recipe} | (precision or {})
    training = {"global_batch_size": 8, "sequence_length": 16}
    return load(
        {
            "model": model,
            "mesh": mesh,
            "parallel": parallel,
            "precision": precision,
            "train": training,
            **more,
        }
    )


def of(*given, overlaps=False):
    """(loss, canonical gradients) of one batch; `overlaps`: by the step of accelerators, on CPU."""
    return gradients(json.dumps([*given, overlaps]))


@cache
def gradients(given):
    *keys, overlaps = json.loads(given)
    config = config_of(*keys)
    program = Program(config, make_mesh(config))
    layout = program.layout
    if overlaps:
        program.local = LocalStep(layout, "accelerator", program.hooks)
    calm = lambda w, x: (
        x if w.name.endswith("scale") or not w.stacked else np.float32(0.3) * x
    )
    params = place(layout, layout.map(calm, canonical_numbers(layout)))
    tokens, labels = token_batches(config, 1)[0]
    batch = program.place({"tokens": tokens, "labels": labels})
    loss, grads = jax.jit(program.gradients)(
        params, batch, jnp.int32(0), jnp.float32(1)
    )
    leaf = lambda w, x: (
        None if x is None else np.asarray(layout.canonical_leaf(w, np.asarray(x)))
    )
    found = layout.map(leaf, grads)
    # A count of rounds, which a mesh changes, and no gradient.
    found["blocks"].get("experts", {}).pop("load", None)
    return float(loss), found


def distance(a, b):
    leaves = [
        (np.asarray(x), np.asarray(y))
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    ]
    return max(np.linalg.norm(x - y) / np.linalg.norm(y) for x, y in leaves)


@pytest.mark.thorough
@pytest.mark.parametrize("cell", CELLS)
def test_rowwise_without_split_sums_and_blockwise_are_the_same_on_every_mesh(cell):
    recipe, model, mesh, parallel, more = CELLS[cell]
    precision = {"float8_wgrad": "float8"} if "wgrad" in cell else {}
    loss, grads = of(recipe, model, mesh, parallel, more, precision)
    one, expected = of(
        recipe,
        model,
        {},
        {"microbatches": 4 if "wgrad" in cell else 1},
        more,
        precision,
    )
    _, without = of(recipe, model, {}, {}, more, {"matmul": "compute"})
    assert loss == pytest.approx(one, abs=LOSS)
    assert distance(grads, expected) < GRADIENT
    assert distance(without, expected) > WITHOUT


@pytest.mark.thorough
@pytest.mark.parametrize("cell", ["data, ZeRO-3", "zero bubble, uneven"])
def test_from_the_same_state_each_step_is_that_of_one_device(cell):
    recipe, model, mesh, parallel, more = CELLS[cell]
    made = [
        config_of(recipe, model, m, p, more) for m, p in (({}, {}), (mesh, parallel))
    ]
    one, other = (Program(config, make_mesh(config)) for config in made)
    state, its = one.init(), other.init()
    for tokens, labels in token_batches(made[0], 4):
        # the state of one device, on the mesh
        numbers = one.layout.map(
            lambda w, x: np.asarray(one.layout.canonical_leaf(w, np.asarray(x))),
            state.params,
        )
        its = its._replace(params=place(other.layout, numbers))
        batch = {"tokens": tokens, "labels": labels}
        its, found = other.train_step(its, other.place(batch))
        state, right = one.train_step(state, one.place(batch))
        assert float(found["loss"]) == pytest.approx(float(right["loss"]), abs=LOSS)
        assert float(found["grad_norm"]) == pytest.approx(
            float(right["grad_norm"]), rel=GRADIENT
        )


@pytest.mark.thorough
@pytest.mark.parametrize("more", [{}, {"microbatches": 2}])
def test_gradients_that_travel_or_are_summed_on_the_way_are_those_of_one_device(more):
    model, sums = MODEL | {"layers": 10}, {"gradient_sums": "bfloat16"} if more else {}
    loss, grads = of("rowwise", model, {"data": 4}, more, {}, sums, overlaps=True)
    one, expected = of("rowwise", model, {}, {}, {})
    assert loss == pytest.approx(one, abs=LOSS)
    assert distance(grads, expected) < GRADIENT


def dots(precision, parallel=None, mesh=None, more=None, model=MODEL):
    """How many products of float8 stand in the lowered step: each layer is in a loop, once forward and once
    backward.
    """
    config = config_of(
        "rowwise", model, mesh or {}, parallel or {}, more or {}, precision
    )
    text = Program(config, make_mesh(config)).lower().as_text()
    return len(re.findall(r"dot_general.*tensor<[0-9x]*f8E4M3FN>", text))


@pytest.mark.thorough
def test_the_lowered_step_has_the_products_that_the_recipe_says():
    assert dots({}) == dots({}, model=MODEL | {"qk_norm": True}) == 7 + 7
    assert dots({"float8_wgrad": "float8"}) == 7 + 7 + 7
    assert dots({"float8_wgrad": "float8"}, more={"lora": {"rank": 4}}) == 7 + 7
    assert dots({"float8_recipe": "blockwise"}) == 0


@pytest.mark.parametrize(
    ("layers", "pipeline", "chunks", "skip", "kinds"),
    [
        (4, 1, 1, [1, 1], ["compute", "float8", "compute"]),
        (4, 1, 1, [0, 2], ["float8", "compute"]),
        (8, 2, 1, [1, 1], ["either", "float8", "either"]),
        (9, 2, 1, [1, 0], ["either", "float8"]),
        (8, 2, 2, [1, 1], ["either"]),
        (8, 2, 2, [0, 0], ["float8"]),
    ],
)
def test_layers_of_one_kind_stand_together(layers, pipeline, chunks, skip, kinds):
    schedule = "interleaved" if chunks > 1 else "1f1b"
    parallel = (
        {"schedule": schedule, "virtual_stages": chunks, "microbatches": 4}
        if pipeline > 1
        else {}
    )
    config = config_of(
        "rowwise",
        MODEL | {"layers": layers},
        {"pipeline": pipeline},
        parallel,
        {},
        {"float8_skip": skip},
    )
    segments = Layout(config, make_mesh(config)).segments
    assert [segment.period[0].products for segment in segments] == kinds
    assert segments[0].first == 0 and segments[-1].behind == -(
        -layers // pipeline // chunks
    )


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        (
            {"matmul": "mxfp8"},
            "precision.matmul is mxfp8, .* are compute, float8.",
        ),
        (
            {"float8_recipe": "nvfp4"},
            "precision.float8_recipe is nvfp4, .* legal .*rowwise,",
        ),
        ({"float8_recipe": "rowise"}, "did you mean rowwise"),
        ({"matmul": "fp8"}, "precision.matmul is 'fp8'; .* compute, float8"),
        (
            {"float8_skip": [1]},
            r"precision.float8_skip is \[1\]; .*two numbers",
        ),
        (
            {"float8_skip": [2, 2]},
            r"precision.float8_skip \[2, 2\] .* model.layers 4 .*fewer",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(keys, sentence):
    with pytest.raises(ConfigError, match=sentence):
        load({"model": MODEL, "precision": {"matmul": "float8", **keys}})


def test_widths_that_cublas_does_not_take_are_refused_but_by_blocks():
    odd = {
        "model": MODEL | {"d_ff": 48},
        "mesh": {"tensor": 2},
        "precision": {"matmul": "float8"},
    }
    with pytest.raises(
        ConfigError,
        match=r"model.d_ff 48 .*mesh.tensor 2 .* multiple of 16",
    ):
        load(odd)
    load(odd | {"precision": {"matmul": "float8", "float8_recipe": "blockwise"}})


@pytest.mark.thorough
def test_a_step_that_overflows_is_skipped_as_without_float8():
    precision = {"compute": "float16", "loss_scale": 2.0**32}
    config = config_of("rowwise", MODEL, {}, {}, {}, precision)
    metrics, _, _ = train(config, 1)
    assert metrics[0]["skipped"] == 1 and np.isfinite(metrics[0]["loss"])
    calm, _, _ = train(
        config_of("rowwise", MODEL, {}, {}, {}, precision | {"loss_scale": 16.0}), 2
    )
    assert [step["skipped"] for step in calm] == [0, 0]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("recipe", "zero", "gathered"),
    [("rowwise", 3, 0.62), ("blockwise", 3, 0.62), ("rowwise", 1, 0.7)],
)
def test_the_compiled_step_gathers_the_bytes_that_are_planned(recipe, zero, gathered):
    """Shards of a width of 256 have whole blocks."""
    mesh, parallel = (
        {"data": 2, "tensor": 2},
        {"sequence_parallel": True, "zero_stage": zero},
    )
    sent = {}
    for matmul in ("compute", "float8"):
        model = WIDE | {"d_model": 256}
        config = config_of(
            recipe, model, mesh, parallel, {}, {"matmul": matmul, "float8_skip": [0, 0]}
        )
        planned = by_axis(estimate(config, named("cpu", 4)).transfers)
        found = Program(config, make_mesh(config)).collectives().traffic
        assert [found[axis] for axis in mesh] == pytest.approx(
            [planned[axis] for axis in mesh], rel=0.03
        )
        sent[matmul] = found
    # of float32 three quarters of what is gathered are saved: weights twice of three transfers over data, with ZeRO-1
    # once of two, inputs 4 of 10 over tensor
    assert sent["float8"]["data"] < gathered * sent["compute"]["data"]
    assert sent["float8"]["tensor"] < 0.75 * sent["compute"]["tensor"]
