"""bfloat16 and float16 compute over float32 masters: near the float32 run, with gradients summed in the dtype asked
for.

And numbers that are none: a loss scale that stays one, steps that are skipped, states that are not saved, runs that
end.
"""

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from short_runs import canonical_numbers, start, token_batches, train

from meshtrain.config import Config, ConfigError, PrecisionConfig, load, replaced
from meshtrain.mesh import make_mesh
from meshtrain.precision import LossScale, NumbersCheck, initial_scale, next_scale
from meshtrain.step import Program

STEPS = 10


def configuration(
    mesh: tuple[int, int, int] = (2, 2, 2), **sections: dict[str, Any]
) -> Config:
    return load(
        {
            "model": {
                "layers": 4,
                "d_model": 32,
                "heads": 4,
                "kv_heads": 2,
                "d_ff": 64,
                "vocab_size": 64,
            },
            "mesh": dict(zip(("data", "tensor", "pipeline"), mesh, strict=True)),
            "parallel": {"microbatches": 2, "zero_stage": 2, "sequence_parallel": True},
            "train": {"global_batch_size": 8, "sequence_length": 16, "steps": STEPS},
            "optimizer": {"learning_rate": 0.003, "warmup_steps": 2},
            **sections,
        }
    )


@pytest.fixture(scope="module")
def float32_losses() -> list[float]:
    return [m["loss"] for m in train(configuration(), STEPS)[0]]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("compute", "reduce", "near"),
    [
        ("bfloat16", "float32", 5e-3),
        ("bfloat16", "bfloat16", 5e-3),
        ("float16", "float32", 1e-3),
    ],
)
def test_losses_stay_near_those_of_float32(compute, reduce, near, float32_losses):
    metrics, _, states = train(
        configuration(precision={"compute": compute, "reduce": reduce}), STEPS
    )
    assert {leaf.dtype for leaf in jax.tree.leaves(states[-1].params)} == {
        np.dtype(np.float32)
    }
    losses = [m["loss"] for m in metrics]
    assert losses != float32_losses, "another precision gives other numbers"
    np.testing.assert_allclose(losses, float32_losses, rtol=near)


@pytest.mark.thorough
@pytest.mark.parametrize("reduce", ["float32", "bfloat16"])
@pytest.mark.parametrize("stage", [1, 3])
def test_gradients_are_scattered_over_data_in_the_dtype_asked_for(reduce, stage):
    config = configuration(
        (8, 1, 1),
        precision={"compute": "bfloat16", "reduce": reduce},
        parallel={"zero_stage": stage},
    )
    text = (
        Program(config, make_mesh(config)).lower().as_text()
    )  # before a CPU's compiler widens what it cannot add
    kinds = {
        line.split("->")[-1].strip() for line in operations(text, "reduce_scatter")
    }
    assert kinds and all(
        ("bf16" in kind) == (reduce == "bfloat16") for kind in kinds
    ), kinds
    gathered = {line.split("->")[-1].strip() for line in operations(text, "all_gather")}
    assert gathered and all("bf16" in kind for kind in gathered), (
        "weights travel in the compute dtype"
    )


@pytest.mark.thorough
@pytest.mark.parametrize("compute", ["bfloat16", "float16"])
def test_no_product_takes_float32_of_which_a_gpu_does_half_as_many_a_second(compute):
    config = configuration(precision={"compute": compute})
    lines = operations(
        Program(config, make_mesh(config)).lower().as_text(), "dot_general"
    )
    kind = "bf16" if compute == "bfloat16" else "f16"
    operands = [
        re.findall(r"x(b?f\d+)>", line.rpartition(" : ")[2].partition("->")[0])
        for line in lines
    ]
    assert len(operands) > 10 and all(taken == [kind, kind] for taken in operands), (
        operands
    )


def operations(text: str, name: str) -> list[str]:
    """The closing line, with the types, of each operation of that name in StableHLO."""
    lines = text.splitlines()
    starts = [i for i, line in enumerate(lines) if f"stablehlo.{name}" in line]
    return [next(line for line in lines[i:] if "->" in line) for i in starts]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "mesh", [{"data": 2, "tensor": 2, "pipeline": 2}, {"context": 4, "data": 2}]
)
def test_an_overflow_in_step_5_is_skipped_on_every_device_and_halves_the_scale(
    mesh, float32_losses
):
    precision = {"compute": "float16", "loss_scale": 1024.0, "loss_scale_hysteresis": 1}
    config = replaced(configuration((1, 1, 1), precision=precision), mesh=mesh)
    program = Program(config, make_mesh(config))
    state = start(program, canonical_numbers(program.layout))
    names = ("tokens", "labels", "weights")
    compiled = program.train_step.lower(
        program.state_shapes, program.batch_shapes(dict.fromkeys(names))
    ).compile()
    history = []
    for step, (tokens, labels) in enumerate(token_batches(config, STEPS), start=1):
        weights = np.ones(tokens.shape, np.float32)
        if step == 5:
            # One token, on one data or context rank and in one microbatch
            weights[0, 3] = np.inf
        batch = program.place(dict(zip(names, (tokens, labels, weights), strict=True)))
        before = jax.tree.map(np.asarray, (state.params, state.optimizer))
        state, metrics = compiled(state, batch)
        after = (state.params, state.optimizer)
        same = [
            np.array_equal(np.asarray(shard.data), old[shard.index])
            for new, old in zip(
                jax.tree.leaves(after), jax.tree.leaves(before), strict=True
            )
            for shard in new.addressable_shards
        ]
        history.append(
            (
                all(same),
                float(metrics["loss_scale"]),
                int(metrics["skipped"]),
                float(metrics["loss"]),
            )
        )
    assert [h[0] for h in history] == [step == 5 for step in range(1, 11)], (
        "only step 5 changes nothing, anywhere"
    )
    assert [h[1] for h in history] == [1024.0] * 4 + [512.0] * 6
    assert [h[2] for h in history] == [0] * 4 + [1] * 6
    assert int(state.step) == STEPS
    assert history[-1][3] == pytest.approx(float32_losses[-1], rel=0.01)


@pytest.mark.thorough
def test_loss_scale_itself_overflows_float16_and_comes_down_to_what_fits():
    config = configuration(
        (2, 1, 1), precision={"compute": "float16", "loss_scale": 2.0**30}
    )
    metrics, _, _ = train(config, STEPS)
    scales = [m["loss_scale"] for m in metrics]
    assert metrics[0]["skipped"] == 1 and scales[0] == 2.0**30, (
        "the first overflow is forgiven"
    )
    assert scales[1] == 2.0**29, "the second halves the scale"
    assert jnp.isfinite(metrics[-1]["loss"])


# --- the loss scale


def scales(finite: list[bool], **keys: Any) -> tuple[list[float], LossScale]:
    """The scale after each step, by whether its gradients were finite."""
    precision = PrecisionConfig(compute="float16", **keys)
    scale, seen = initial_scale(precision), []
    for good in finite:
        scale = next_scale(scale, jnp.array(good), precision)
        seen.append(float(scale.value))
    return seen, scale


def test_loss_scale_doubles_after_a_window_of_good_steps_and_halves_from_the_second_overflow_on():
    finite = [True, True, True, False, False, False, True, True, True, False]
    seen, scale = scales(
        finite, loss_scale=8.0, loss_scale_window=3, loss_scale_hysteresis=2
    )
    assert seen == [8, 8, 16, 16, 8, 4, 4, 4, 8, 8]  # doubling makes it patient again
    assert int(scale.skipped) == 4


def test_overflows_need_not_be_in_a_row_to_halve_the_loss_scale():
    """As Megatron-LM counts, and DeepSpeed by default: only a doubling forgives."""
    seen, _ = scales(
        [False, True, False, True, False],
        loss_scale=8.0,
        loss_scale_window=3,
        loss_scale_hysteresis=2,
    )
    assert seen == [8, 8, 4, 4, 2]


def test_loss_scale_never_falls_below_one():
    assert scales([False] * 5, loss_scale=3.0, loss_scale_hysteresis=1)[0] == [
        1.5,
        1,
        1,
        1,
        1,
    ]


def test_loss_scale_never_grows_beyond_the_largest():
    seen, _ = scales([True] * 4, loss_scale=2.0**30, loss_scale_window=1)
    assert seen == [2.0**31, 2.0**32, 2.0**32, 2.0**32]
    assert (
        float(initial_scale(PrecisionConfig(compute="float16", loss_scale=1e40)).value)
        == 2.0**32
    )
    with pytest.raises(ConfigError, match=r"precision.loss_scale is 1e\+40"):
        load({"precision": {"loss_scale": 1e40}})


# --- states that are not saved


# Of one number among the weights, then the optimizer state: whether the state can be saved
SOUND = {
    "float32": [
        {math.nan: False, 1e30: False, 1e6: True},
        {math.inf: False, 1e30: True},
    ],
    "bfloat16": [
        {math.inf: False, 1e30: False, 1e6: True},
        {math.nan: False, 1e30: True},
    ],
    "float16": [
        {math.nan: False, 1e6: False, 6e4: True},
        {math.inf: False, 1e30: True},
    ],
}


@pytest.mark.thorough
@pytest.mark.parametrize("compute", SOUND)
def test_one_number_makes_a_state_unsound(compute):
    """Weights must be finite in the dtype that computes, and their squares in float32; moments have only to be
    finite.
    """
    precision, parallel = (
        {"compute": compute},
        {"offload_optimizer": compute == "float16"},
    )
    config = configuration((2, 1, 1), precision=precision, parallel=parallel)
    program = Program(config, make_mesh(config))
    state = program.init()
    assert program.is_finite(state)
    for part, values in zip(("params", "optimizer"), SOUND[compute], strict=True):
        leaves, tree = jax.tree.flatten(getattr(state, part))
        at = max(range(len(leaves)), key=lambda i: leaves[i].size)
        whole, sharding = np.asarray(leaves[at]), leaves[at].sharding
        for value, right in values.items():
            spoilt = whole.copy()
            spoilt[-1, -1] = value
            leaves[at] = jax.device_put(spoilt, sharding)
            assert (
                bool(
                    program.is_finite(state._replace(**{part: tree.unflatten(leaves)}))
                )
                == right
            ), (part, value)


# --- runs that end


def metrics(
    loss: float = 1.0, grad_norm: float = 1.0, **others: float
) -> dict[str, float]:
    return {"loss": loss, "grad_norm": grad_norm, **others}


@pytest.mark.parametrize(
    ("loss", "norm", "says"),
    [
        (math.nan, math.nan, "loss of step 3 is nan"),
        (1.0, math.inf, "gradient norm of step 3 is inf"),
    ],
)
def test_a_loss_or_gradient_that_is_not_finite_ends_a_run_without_a_loss_scale(
    loss, norm, says
):
    watch = NumbersCheck(configuration(), start=0)
    watch.after_metrics({"step": 2, **metrics()}, due=True)
    with pytest.raises(
        FloatingPointError, match=f"^the {says}; the checkpoints before it are intact"
    ):
        watch.after_metrics({"step": 3, **metrics(loss, norm)}, due=True)


def skips(scale: float, skipped: int) -> dict[str, float]:
    return metrics(math.nan, math.inf, loss_scale=scale, skipped=skipped)


def test_float16_gives_up_after_ten_skipped_steps_at_the_smallest_scale_and_not_before():
    watch = NumbersCheck(
        configuration(
            train={"global_batch_size": 8, "steps": 100},
            precision={"compute": "float16"},
        ),
        start=5,
    )
    watch.after_metrics({"step": 6, **metrics(loss_scale=4.0, skipped=0)}, due=True)
    watch.after_metrics({"step": 7, **skips(2.0, 1)}, due=True)
    for step in range(8, 18):
        watch.after_metrics(
            {"step": step, **skips(1.0, step - 6)}, due=True
        )  # the first of these still ran at scale 2
    watch.after_metrics(
        {"step": 18, **metrics(loss_scale=1.0, skipped=11)}, due=True
    )  # one good step, and all is forgiven
    for step in range(19, 29):
        watch.after_metrics({"step": step, **skips(1.0, step - 7)}, due=True)
    with pytest.raises(
        FloatingPointError,
        match=r"^no step after step 18 .* scale of 1;",
    ):
        watch.after_metrics({"step": 29, **skips(1.0, 22)}, due=True)


def test_a_float16_run_whose_steps_were_all_skipped_does_not_end_well():
    watch = NumbersCheck(configuration(precision={"compute": "float16"}), start=0)
    for step in range(1, STEPS):
        watch.after_metrics({"step": step, **skips(64.0, step)}, due=True)
    with pytest.raises(
        FloatingPointError,
        match=f"^none of the {STEPS} steps .* loss scale of 64",
    ):
        watch.after_metrics({"step": STEPS, **skips(64.0, STEPS)}, due=True)
    others = NumbersCheck(configuration(precision={"compute": "float16"}), start=0)
    for step in range(1, STEPS + 1):
        others.after_metrics(
            {"step": step, **metrics(loss_scale=64.0, skipped=step)}, due=True
        )  # by another island all of them were taken
    # One of them was
    watch.after_metrics({"step": STEPS, **skips(64.0, STEPS - 1)}, due=True)
