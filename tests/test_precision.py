"""bfloat16 and float16 compute over float32 masters: near the float32 run, with gradients summed in the dtype asked for."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from short_runs import canonical_numbers, start, token_batches, train

from meshtrain.config import Config, decode
from meshtrain.mesh import make_mesh
from meshtrain.step import build

STEPS = 10


def configuration(mesh: tuple[int, int, int] = (2, 2, 2), **sections: dict[str, Any]) -> Config:
    return decode(
        {
            "model": {"layers": 4, "d_model": 32, "heads": 4, "kv_heads": 2, "d_ff": 64, "vocab_size": 64},
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


@pytest.mark.parametrize(
    ("compute", "reduce", "near"), [("bfloat16", "float32", 5e-3), ("bfloat16", "bfloat16", 5e-3), ("float16", "float32", 1e-3)]
)  # fmt: skip
def test_losses_stay_near_those_of_float32(compute, reduce, near, float32_losses):
    metrics, _, states = train(configuration(precision={"compute": compute, "reduce": reduce}), STEPS)
    assert {leaf.dtype for leaf in jax.tree.leaves(states[-1].params)} == {np.dtype(np.float32)}
    losses = [m["loss"] for m in metrics]
    assert losses != float32_losses, "another precision cannot give the very same numbers"
    np.testing.assert_allclose(losses, float32_losses, rtol=near)


@pytest.mark.parametrize("reduce", ["float32", "bfloat16"])
@pytest.mark.parametrize("stage", [1, 3])
def test_gradients_are_scattered_over_data_in_the_dtype_asked_for(reduce, stage):
    config = configuration(
        (8, 1, 1),
        precision={"compute": "bfloat16", "reduce": reduce},
        parallel={"zero_stage": stage},
    )
    text = build(config, make_mesh(config)).lower().as_text()  # before a CPU's compiler widens what it cannot add
    kinds = {line.split("->")[-1].strip() for line in operations(text, "reduce_scatter")}
    assert kinds and all(("bf16" in kind) == (reduce == "bfloat16") for kind in kinds), kinds
    gathered = {line.split("->")[-1].strip() for line in operations(text, "all_gather")}
    assert gathered and all("bf16" in kind for kind in gathered), "weights travel in the compute dtype"


def operations(text: str, name: str) -> list[str]:
    """The closing line, with the types, of each operation of that name in StableHLO."""
    lines = text.splitlines()
    starts = [i for i, line in enumerate(lines) if f"stablehlo.{name}" in line]
    return [next(line for line in lines[i:] if "->" in line) for i in starts]


def test_an_overflow_in_step_5_is_skipped_on_every_device_and_halves_the_scale(float32_losses):
    config = configuration(
        (2, 2, 2), precision={"compute": "float16", "loss_scale": 1024.0, "loss_scale_hysteresis": 1}
    )
    program = build(config, make_mesh(config))
    state = start(program, canonical_numbers(program.layout))
    names = ("tokens", "labels", "weights")
    compiled = program.train_step.lower(program.state_shapes, program.batch_shapes(dict.fromkeys(names))).compile()
    history = []
    for step, (tokens, labels) in enumerate(token_batches(config, STEPS), start=1):
        weights = np.ones(tokens.shape, np.float32)
        if step == 5:
            weights[0, 3] = np.inf  # one token, on one data rank and one microbatch
        batch = jax.device_put(dict(zip(names, (tokens, labels, weights), strict=True)), program.batch_sharding)
        before = jax.tree.map(np.asarray, (state.params, state.optimizer))
        state, metrics = compiled(state, batch)
        after = (state.params, state.optimizer)
        same = [
            np.array_equal(np.asarray(shard.data), old[shard.index])
            for new, old in zip(jax.tree.leaves(after), jax.tree.leaves(before), strict=True)
            for shard in new.addressable_shards
        ]
        history.append((all(same), float(metrics["loss_scale"]), int(metrics["skipped"]), float(metrics["loss"])))
    assert [h[0] for h in history] == [step == 5 for step in range(1, 11)], "only step 5 changes nothing, anywhere"
    assert [h[1] for h in history] == [1024.0] * 4 + [512.0] * 6
    assert [h[2] for h in history] == [0] * 4 + [1] * 6
    assert int(state.step) == STEPS
    assert history[-1][3] == pytest.approx(float32_losses[-1], rel=0.01)


def test_loss_scale_itself_overflows_float16_and_comes_down_to_what_fits():
    config = configuration((2, 1, 1), precision={"compute": "float16", "loss_scale": 2.0**30})
    metrics, _, _ = train(config, STEPS)
    scales = [m["loss_scale"] for m in metrics]
    assert metrics[0]["skipped"] == 1 and scales[0] == 2.0**30, "the first overflow is forgiven"
    assert scales[1] == 2.0**29, "the second halves the scale"
    assert jnp.isfinite(metrics[-1]["loss"])
