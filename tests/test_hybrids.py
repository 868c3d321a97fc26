"""Models of linear attention and attention by turns: on every mesh the losses and gradients of one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_runs import numbered, opened, restored, same

import meshtrain as mt
from meshtrain.config import ConfigError, load
from meshtrain.config.follow import put
from meshtrain.plan import named, plan
from meshtrain.plan.report import headline
from meshtrain.step import Program

ROWS, LENGTH, VOCABULARY = 4, 48, 31
MODEL = {
    "family": "qwen3_5",
    "layers": 4,
    "d_model": 16,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 8,
    "d_ff": 16,
    "vocab_size": VOCABULARY,
    "pattern": ["linear", "full"],
    "linear": {
        "key_heads": 2,
        "value_heads": 4,
        "key_dim": 8,
        "value_dim": 4,
        "chunk": 8,
    },
}
EXPERTS = {
    "family": "qwen3_next",
    "pattern": ["linear", "linear", "full"],
    "layers": 5,
    "d_ff": None,
    "moe": {"experts": 4, "top_k": 2, "d_ff": 8, "shared_experts": 1},
}
KINDS = {
    kind: {"layers": 2, "linear": MODEL["linear"] | {"kind": kind}}
    for kind in ("kda", "mamba2")
}
# widths that products in float8 take on two tensor ranks
OF_SIXTEENS = {
    "d_ff": 32,
    "head_dim": 16,
    "linear": MODEL["linear"] | {"key_dim": 16, "value_dim": 8},
}
SPLIT = (
    {"data": 2, "tensor": 2, "pipeline": 2},
    {"zero_stage": 2, "microbatches": 2, "schedule": "1f1b"},
)
MODELS = {
    "plain": {},
    "experts": EXPERTS,
    # attention of layer 1 sees 12 tokens, of layer 3 all
    "windows": {"window": 12, "global_every": 4},
    "dense first": EXPERTS | {"dense_layers": 1, "dense_d_ff": 24},
} | KINDS
# steps of sgd are as long as the gradients are
SGD = {"name": "sgd", "learning_rate": 0.1}
CROSSES = {
    "LoRA": {"lora": {"rank": 2}, "optimizer": SGD},
    "float8": {
        "precision": {"matmul": "float8", "float8_skip": [0, 0]},
        "optimizer": SGD,
    },
    "muon": {"optimizer": {"name": "muon", "learning_rate": 0.01}},
    "PowerSGD": {
        "parallel": {"reduce": {"compression": "powersgd", "rank": 2}, "zero_stage": 1},
        "optimizer": SGD,
    },
    "DiLoCo": {"parallel": {"sync": {"every": 2, "fragments": 2}}, "optimizer": SGD},
}
# Meshes of both sides, where there is more than one rank to sum over: those of PowerSGD begin with other matrices on
# each stage.
RANKS = {"PowerSGD": {"data": 2}, "DiLoCo": {"data": 2, "islands": 2}}


def config(mesh, model=None, **parallel):
    train = {"global_batch_size": ROWS, "sequence_length": LENGTH}
    return load(
        {
            "model": MODEL | (model or {}),
            "mesh": mesh,
            "train": train,
            "parallel": parallel,
        }
    )


def batch(packed: bool) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    tokens, labels = draw.integers(0, VOCABULARY, (2, ROWS, LENGTH), np.int32)
    arrays = {"tokens": tokens, "labels": labels}
    if not packed:
        return arrays
    begins = draw.random((ROWS, LENGTH)) < 0.1
    begins[0] = False  # one document in all pieces of a row
    begins[:, LENGTH // 2] = True  # and one that begins where a piece does
    begins[:, 0] = True
    segments = np.cumsum(begins, axis=1).astype(np.int32)
    at = np.arange(LENGTH, dtype=np.int32)
    positions = at - np.maximum.accumulate(np.where(begins, at, 0), axis=1)
    weights = np.ones((ROWS, LENGTH), np.float32)
    return arrays | {"segments": segments, "positions": positions, "weights": weights}


def loss_and_gradient(config, packed: bool, params=None, one=None):
    """Returns both, of the program's own weights unless others are given; `one`: what the loss is multiplied by."""
    program = Program(config)
    params = program.init().params if params is None else params
    one = jnp.float32(1) if one is None else one
    loss, gradient = jax.jit(program.gradients)(
        params, program.place(batch(packed)), jnp.int32(0), one
    )
    return float(loss), program.layout.canonical(jax.tree.map(np.asarray, gradient))


@functools.cache
def of_one_device(model: str, packed: bool):
    """Returns both in float64, from the weights that float32 has."""
    of_float32 = config({}, MODELS[model])
    params = jax.tree.map(np.asarray, Program(of_float32).init().params)
    wide = dict.fromkeys(("compute", "reduce", "gradient_sums"), "float64")
    with pytest.MonkeyPatch.context() as patch, jax.enable_x64(True):
        patch.setattr(jnp, "float32", jnp.float64)
        one = jnp.float64(1)
        params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), params)
        return loss_and_gradient(put(of_float32, precision=wide), packed, params, one)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("mesh", "parallel", "model", "packed"),
    [
        ({"context": 2}, {"context_strategy": "ring"}, "plain", True),
        ({"context": 4}, {"context_strategy": "all_gather"}, "experts", True),
        ({"context": 8}, {"context_strategy": "ring"}, "plain", False),
        ({"context": 2, "tensor": 2}, {"context_strategy": "ulysses"}, "plain", True),
        (
            {"tensor": 2, "data": 2, "pipeline": 2},
            {"zero_stage": 3, "microbatches": 2},
            "experts",
            True,
        ),
        (
            {"context": 2, "tensor": 2, "pipeline": 2},
            {
                "context_strategy": "all_gather",
                "sequence_parallel": True,
                "schedule": "zb_h1",
                "microbatches": 2,
                "remat": "full",
            },
            "plain",
            True,
        ),
        (
            {"data": 2, "expert": 2, "tensor": 2},
            {"zero_stage": 2, "remat": "dots"},
            "experts",
            False,
        ),
        (
            {"context": 2, "data": 2},
            {
                "remat": "names",
                "remat_keep": ["qkv"],
                "remat_offload": ["attention", "mlp_in"],
            },
            "plain",
            True,
        ),
        (
            {"pipeline": 2, "tensor": 2},
            {"microbatches": 2, "virtual_stages": 2, "remat": "selective"},
            "windows",
            True,
        ),
        ({"context": 2, "data": 2}, {"zero_stage": 3}, "windows", False),
        (
            {"pipeline": 2, "data": 2, "context": 2},
            {"microbatches": 2, "schedule": "zb_h1", "zero_stage": 2, "remat": "dots"},
            "dense first",
            True,
        ),
        ({"context": 4}, {"context_strategy": "ring"}, "kda", True),
        (
            {"context": 2, "tensor": 2, "pipeline": 2},
            {"schedule": "zb_h1", "microbatches": 2, "remat": "selective"},
            "kda",
            True,
        ),
        ({"context": 4, "tensor": 2}, {"sequence_parallel": True}, "mamba2", True),
        (
            {"data": 2, "tensor": 2, "pipeline": 2},
            {"zero_stage": 3, "microbatches": 2},
            "mamba2",
            True,
        ),
    ],
)
def test_first_loss_and_gradients_are_those_of_one_device_to_a_millionth(
    mesh, parallel, model, packed
):
    loss, gradient = of_one_device(model, packed)
    seen_loss, seen = loss_and_gradient(config(mesh, MODELS[model], **parallel), packed)
    assert seen_loss == pytest.approx(loss, rel=1e-6)
    norm = np.linalg.norm
    errors = jax.tree.map(
        lambda x, y: norm(x - y) / max(norm(y), 1e-30), seen, gradient
    )
    # Mamba2's decay_bias alone is 1.4e-6 apart: it sums terms of both signs over all tokens.
    most = 1.5e-6 if model == "mamba2" else 1e-6
    assert max(jax.tree.leaves(errors)) < most, errors


@pytest.mark.thorough
@pytest.mark.parametrize("pattern", [["linear", "full"], ["linear"]])
def test_layers_of_a_period_are_computed_again_one_by_one(pattern):
    """Else XLA makes the activations of all of them again before the backward of the last."""
    program = Program(config({}, {"pattern": pattern}, remat="full"))
    placed = program.place(batch(packed=False))
    run = jax.jit(program.gradients)
    text = run.lower(
        program.init().params, placed, jnp.int32(0), jnp.float32(1)
    ).as_text()
    assert ("optimization_barrier" in text) == (len(pattern) > 1)


@functools.cache
def three_steps(cross: str, split: bool):
    """Returns the losses and gradient norms of three steps, and how far they move each weight."""
    sections = CROSSES[cross]
    mesh, parallel = SPLIT if split else ({}, {})
    if cross in RANKS:
        mesh = RANKS[cross] | ({"pipeline": 2} if split and cross == "DiLoCo" else {})
    train = {"global_batch_size": ROWS, "sequence_length": LENGTH}
    given = {"model": MODEL | OF_SIXTEENS, "mesh": mesh, "train": train}
    parallel = parallel | sections.get("parallel", {})
    program = Program(load(given | sections | {"parallel": parallel}))
    numbers = lambda state: program.layout.canonical(
        jax.tree.map(np.asarray, state.params)
    )
    state = program.init()
    before = numbers(state)
    metrics = []
    for _ in range(3):
        state, found = program.train_step(state, program.place(batch(packed=True)))
        # of islands each has its own
        metrics.append([np.asarray(found["loss"]), np.asarray(found["grad_norm"])])
    return np.array(metrics), jax.tree.map(np.subtract, numbers(state), before)


@pytest.mark.thorough
@pytest.mark.parametrize("cross", CROSSES)
def test_three_steps_on_more_axes_are_those_of_fewer(cross):
    metrics, moved = three_steps(cross, split=True)
    expected, should_move = three_steps(cross, split=False)
    # A sum in another order may round to another of float8's few numbers. Without float8 the losses are 8e-6, the norms
    # 6e-4 and the moves 0.1 away.
    within, of_moves = (5e-6, 1e-3) if cross == "float8" else (1e-6, 1e-5)
    np.testing.assert_allclose(metrics, expected, rtol=within)
    norm = np.linalg.norm
    errors = jax.tree.map(
        lambda x, y: norm(x - y) / max(norm(y), 1e-30), moved, should_move
    )
    assert max(jax.tree.leaves(errors)) < of_moves, errors


@pytest.mark.thorough
@pytest.mark.parametrize("model", ["experts", "dense first"])
def test_every_bit_comes_back_from_a_checkpoint_of_other_stages(tmp_path, model):
    def settings(name, mesh, **parallel):
        run = {"directory": str(tmp_path / name)}
        return put(config(mesh, MODELS[model], **parallel), run=run)

    one = settings("one", {})
    split = {"pipeline": 2, "data": 2, "tensor": 2}
    how = {"microbatches": 2, "virtual_stages": 2, "zero_stage": 3}
    program = Program(one)
    state = numbered(program)
    with opened(one, program) as (checkpointer, _):
        checkpointer.save(3, state, 1.0)
    staged = Program(settings("one", split, **how))
    on_stages, step, _ = restored(staged.config, staged)
    assert step == 3
    again = settings("again", split, **how)
    with opened(again, staged) as (checkpointer, _):
        checkpointer.save(3, on_stages, 1.0)
    back, _, _ = restored(settings("again", {}), program)
    assert same(state, back)


def test_a_hybrid_shows_its_stacks_and_a_plan_its_kernels():
    given = config({"pipeline": 2}, MODELS["dense first"], microbatches=2)
    text = str(mt.show(Program(given).layout))
    for stack in ("dense_linear_blocks", "linear_blocks", "blocks"):
        assert f"{stack}.attention.out" in text
    planned = headline(plan(given, named("h100", 2)))
    assert "linear attention by products and lax.scan, attention" in planned


@pytest.mark.parametrize(
    ("model", "mesh", "sentence"),
    [
        (
            {"linear": {"key_heads": 3, "value_heads": 4}},
            {},
            r"key_heads 3 does not divide .* 4; legal are 1, 2",
        ),
        (
            {"linear": {"chunk": 48}},
            {},
            r"model\.linear\.chunk is 48; it must be a power of two",
        ),
        ({"family": "gpt2"}, {}, r"gpt2 has learned positions; legal are llama"),
        (
            {},
            {"tensor": 4},
            r"mesh\.tensor 4 does not divide model\.linear\.key_heads 2; legal are 1, 2",
        ),
        (
            {"linear": {"conv": 8}},
            {"context": 4},
            r"chunks of 6 tokens .*conv 8 reaches back over 7;",
        ),
        ({"pattern": ["lineal"]}, {}, r"'lineal'; legal are full, linear.*linear"),
    ],
)
def test_what_cannot_be_computed_is_refused_in_a_sentence(model, mesh, sentence):
    model = model | {"linear": MODEL["linear"] | model.get("linear", {})}
    with pytest.raises(ConfigError, match=sentence):
        config(mesh, model)
