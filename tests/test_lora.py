"""LoRA and freezing: every layout trains what one device does, and what is frozen costs neither gradient, state nor
stash.
"""

import math
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from short_runs import canonical_numbers, first_moment, merged, token_batches, train

from experiments.adopt import stash
from meshtrain.config import Config, ConfigError, load, notes, replaced
from meshtrain.mesh import AXES, make_mesh
from meshtrain.model.weights import adapters, weights
from meshtrain.parallel.layout import Layout
from meshtrain.step import Program

STEPS, CLIP, WARMUP, RATE = 4, 0.5, 2, 0.01
TRAINABLE = ("blocks.*_norm.*", "head.*")

#          mesh        section parallel
LAYOUTS: dict[str, tuple[tuple[int, int, int], dict[str, Any]]] = {
    "2x2x2-zero1": (
        (2, 2, 2),
        {"sequence_parallel": True, "microbatches": 4, "schedule": "1f1b"},
    ),
    "2x2x2-zero3-zb": (
        (2, 2, 2),
        {"zero_stage": 3, "microbatches": 4, "schedule": "zb_h1", "remat": "selective"},
    ),
    "2x1x4-zero3-held": (
        (2, 1, 4),
        {"zero_stage": 3, "zero_hold": True, "microbatches": 2, "schedule": "gpipe"},
    ),
    "4x2x1-zero2": (
        (4, 2, 1),
        {"zero_stage": 2, "zero_hold": False, "microbatches": 2, "remat": "full"},
    ),
    "2x2x2-zero2-at-use": (
        (2, 2, 2),
        {"zero_stage": 2, "zero_hold": False, "microbatches": 2},
    ),
    "8x1x1-zero0": ((8, 1, 1), {"zero_stage": 0}),
    "1x2x2-interleaved": ((1, 2, 2), {"microbatches": 4, "virtual_stages": 2}),
}
NOW = ("2x2x2-zero1",)
# The first of them gpt2, more of which is trained
FEW = ("2x2x2-zero3-zb", "1x2x2-interleaved")
SIZE = {
    "layers": 5,
    "d_model": 24,
    "heads": 6,
    "kv_heads": 2,
    "d_ff": 50,
    "vocab_size": 257,
}
TARGETS: dict[str, tuple[str, ...]] = {"llama": (), "gpt2": ("q", "v", "out", "up")}


def one_device(family: str, trainable: tuple[str, ...] = ()) -> Config:
    return load(
        {
            "model": {**SIZE, "family": family},
            "train": {
                "global_batch_size": 8,
                "steps": STEPS,
                "sequence_length": 24,
                "trainable": list(trainable),
            },
            "optimizer": {
                "learning_rate": RATE,
                "warmup_steps": WARMUP,
                "grad_clip": CLIP,
            },
            "lora": {
                "rank": 3,
                "alpha": 5.0,
                "targets": list(TARGETS[family]),
                "rslora": family == "gpt2",
            },
        }
    )


@cache
def expected(family: str, trainable: tuple[str, ...]) -> tuple[Any, list[float], Any]:
    """Parameters, and what the reference makes of their merge: losses, and the first gradient of what is trained."""
    config = one_device(family, trainable)
    layout = Layout(config, make_mesh(config))
    parameters = canonical_numbers(layout)
    model, recipe = (
        reference.Model(family),
        reference.Recipe(RATE, WARMUP, STEPS, clip=CLIP),
    )
    numbers = jax.tree.map(jnp.asarray, parameters)
    trained = layout.only_trained(numbers)
    optimizer = recipe.optimizer(trained)

    @jax.jit
    def step(trained: Any, state: Any, tokens: jax.Array, labels: jax.Array) -> Any:
        batch = {"tokens": tokens, "labels": labels}
        of = lambda t: reference.loss(
            model, merged(config, layout.add_frozen(t, numbers)), **batch
        )
        loss, gradient = jax.value_and_grad(of)(trained)
        updates, state = optimizer.update(gradient, state, trained)
        return optax.apply_updates(trained, updates), state, loss, gradient

    state, losses, first = optimizer.init(trained), [], None
    for tokens, labels in token_batches(config, STEPS):
        trained, state, loss, gradient = step(trained, state, tokens, labels)
        losses.append(float(loss))
        first = gradient if first is None else first
    return parameters, losses, first


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("layout", "family", "trainable"),
    [(name, "llama", ()) for name in NOW]
    + [
        pytest.param(
            name,
            *(("gpt2", TRAINABLE) if number % 2 else ("llama", ())),
            marks=pytest.mark.thorough if name in FEW else pytest.mark.slow,
        )
        for number, name in enumerate(LAYOUTS)
        if number % 2 or name not in NOW
    ],
)
def test_every_layout_trains_as_one_device_does_what_the_merged_weights_would(
    layout, family, trainable
):
    mesh, parallel = LAYOUTS[layout]
    parameters, losses, gradient = expected(family, trainable)
    config = replaced(
        one_device(family, trainable),
        mesh=dict(zip(AXES, mesh, strict=True)),
        parallel={"microbatches": 1, **parallel},
    )
    metrics, program, (after_one, after) = train(config, STEPS, parameters)
    np.testing.assert_allclose([m["loss"] for m in metrics], losses, rtol=2e-5)
    assert losses[-1] != losses[0]
    clipping = min(1.0, CLIP / metrics[0]["grad_norm"])
    seen = jax.tree.map(lambda m: m / (0.1 * clipping), first_moment(after_one))
    canonical = jax.tree.map(
        lambda g, w: program.layout.canonical_leaf(w, g), seen, program.layout.updated
    )
    for path, right in jax.tree_util.tree_leaves_with_path(gradient):
        found = canonical
        for key in path:
            found = found[key.key]
        assert np.linalg.norm(found - right) <= 1e-5 * np.linalg.norm(right), (
            jax.tree_util.keystr(path)
        )
    whole = program.layout.canonical(after.params)

    def kept(weight: Any, now: jax.Array, before: np.ndarray) -> None:
        assert np.array_equal(now, before) != weight.trained, weight.name

    program.layout.map(kept, whole, parameters)


def test_what_is_frozen_has_no_optimizer_state_and_lies_in_the_dtype_that_computes():
    config = replaced(
        one_device("llama"), precision={"compute": "bfloat16"}, mesh={"data": 2}
    )
    program = Program(config)
    trained = sum(weight.size for weight in adapters(config.model, config.lora))
    moments = [x for x in jax.tree.leaves(program.state_shapes.optimizer) if x.ndim]
    assert sum(x.size for x in moments) == 2 * trained
    sizes = {jnp.dtype(jnp.bfloat16): 0, jnp.dtype(jnp.float32): 0}
    for x in jax.tree.leaves(program.state_shapes.params):
        sizes[x.dtype] += x.size
    assert sizes[jnp.dtype(jnp.bfloat16)] == sum(
        weight.size for weight in weights(config.model)
    )
    assert sizes[jnp.dtype(jnp.float32)] == trained


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_zero_3_alone_shards_what_is_frozen(stage):
    config = replaced(
        one_device("llama"), mesh={"data": 4}, parallel={"zero_stage": stage}
    )
    for weight in Layout(config, make_mesh(config)).flat:
        sharded = stage >= (1 if weight.trained else 3)
        assert (weight.zero_dim is not None) == sharded, weight.name


@pytest.mark.thorough
def test_adapters_begin_as_in_peft_and_leave_the_model_as_it_is_drawn_without_them():
    config = one_device("llama")
    plain, tuned = (
        Program(c).init().params
        for c in (replaced(config, lora={"rank": 0, "targets": ()}), config)
    )
    for path, x in jax.tree_util.tree_leaves_with_path(plain):
        found = tuned
        for key in path:
            found = found[key.key]
        assert np.array_equal(found, x), path
    for weight in adapters(config.model, config.lora):
        part, name = weight.name.split(".")[1:]
        drawn = np.asarray(tuned["blocks"][part][name])
        if name.endswith("_b"):
            assert not drawn.any()
        else:
            inputs = drawn[0].size // config.lora.rank
            assert np.abs(drawn).max() <= inputs**-0.5 and np.std(
                drawn
            ) == pytest.approx((3 * inputs) ** -0.5, rel=0.2)


@pytest.mark.slow
def test_dropout_of_adapters_is_the_same_on_every_mesh_and_none_in_evaluation():
    config = replaced(one_device("llama"), lora={"dropout": 0.4})
    split = replaced(
        config,
        mesh={"tensor": 2, "pipeline": 2},
        parallel={"microbatches": 2, "sequence_parallel": True},
    )
    parameters, without, _ = expected("llama", ())
    alone, placed = (train(c, 2, parameters)[0] for c in (config, split))
    np.testing.assert_allclose(
        [m["loss"] for m in placed], [m["loss"] for m in alone], rtol=2e-5
    )
    assert abs(alone[0]["loss"] - without[0]) > 1e-3
    tokens, labels = token_batches(config, 1)[0]
    batch = {"tokens": tokens, "labels": labels}
    losses = []
    for c in (config, one_device("llama")):
        program = Program(c)
        losses.append(
            float(program.eval_step(program.init().params, program.place(batch)))
        )
    assert losses[0] == losses[1]


@pytest.mark.thorough
@pytest.mark.parametrize("optimizer", ["muon", "adafactor"])
def test_optimizers_of_whole_matrices_train_one_part_alone(optimizer):
    for trainable in (("head.weight",), ("blocks.mlp.up",)):
        config = replaced(
            one_device("llama"),
            lora={"rank": 0, "targets": ()},
            train={"trainable": trainable},
            optimizer={"name": optimizer},
        )
        program = Program(config)
        before = program.init()
        tokens, labels = token_batches(config, 1)[0]
        start = jax.tree.map(np.asarray, before.params)
        after, _ = program.train_step(
            before, program.place({"tokens": tokens, "labels": labels})
        )
        moved = program.layout.map(
            lambda w, a, b: None if np.array_equal(a, b) else w.name,
            start,
            after.params,
        )
        assert tuple(jax.tree.leaves(moved)) == trainable


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            {"lora": {"rank": 4, "targets": ["q_proj"]}},
            "'q_proj'; projections of llama are q, k, v, out, gate, up, down; did you mean q?",
        ),
        ({"lora": {"targets": ["q"]}}, "lora.rank is 0"),
        (
            {"model": {"family": "gpt2"}, "lora": {"rank": 4, "targets": ["gate"]}},
            "projections of gpt2 are q, k, v",
        ),
        ({"train": {"objective": "dpo"}}, "give lora.rank"),
        ({"train": {"objective": "dpo"}, "lora": {"rank": 4}}, "data.format is text"),
    ],
)
def test_a_section_that_cannot_be_meant_is_refused(given, says):
    with pytest.raises(ConfigError) as error:
        load(given)
    assert says in str(error.value)


def test_a_trainable_that_names_no_weight_is_refused_with_the_nearest():
    config = replaced(one_device("llama"), train={"trainable": ("head.wieght",)})
    with pytest.raises(ConfigError, match=r"head\.wieght.* mean head\.weight"):
        Program(config)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("tuned", "most"),
    [
        ({"lora": {"rank": 16}}, 1.05),
        # nothing of the inputs of what is frozen
        ({"lora": {"rank": 16, "targets": ("q", "v")}}, 0.75),
        ({"train": {"trainable": ("blocks.*_norm.scale",)}}, 0.7),
    ],
)
def test_the_stash_is_that_of_full_fine_tuning_or_smaller(tuned, most):
    assert stash.stashed(stash.config(tuned)) <= most * stash.stashed(stash.config({}))


def test_adapters_of_a_model_drawn_at_random_are_noted():
    assert any("drawn at random" in note for note in notes(one_device("llama")))
    begun = replaced(
        one_device("llama"), checkpoint={"resume": "runs/base", "weights_only": True}
    )
    assert not any("drawn at random" in note for note in notes(begun))


@pytest.mark.thorough
def test_over_data_only_adapters_travel_and_over_tensor_what_would_without_them():
    config = replaced(
        one_device("llama"),
        mesh={"data": 2, "tensor": 2},
        parallel={"zero_stage": 1, "microbatches": 2},
    )
    tuned, full = (
        Program(c) for c in (config, replaced(config, lora={"rank": 0, "targets": ()}))
    )

    def sent(program: Program, axis: str, in_loops: bool) -> float:
        return sum(
            c.sent * c.times
            for c in program.collectives()
            if c.axis == axis and bool(c.loops) == in_loops
        )

    # gathered and scattered once, half of each to the other rank; besides a number or two a leaf
    trained = sum(
        math.prod(w.padded) / math.prod(w.ways) for w in tuned.layout.flat if w.trained
    )
    assert sent(tuned, "data", in_loops=False) == pytest.approx(
        2 * 4 * trained / 2, rel=0.03
    )
    assert sent(full, "data", in_loops=False) > 4 * sent(tuned, "data", in_loops=False)
    assert (
        sent(tuned, "tensor", in_loops=True) == sent(full, "tensor", in_loops=True) > 0
    )
