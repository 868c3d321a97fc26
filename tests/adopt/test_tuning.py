"""LoRA beside PEFT's own run: from the same adapters on the same tokens, the same losses and the same adapters after
five steps.
"""

import jax
import numpy as np
import pytest

pytest.importorskip("safetensors")

from golden import GOLDEN

from meshtrain.config import load
from meshtrain.hf import loading
from meshtrain.hf.peft import Adapters
from meshtrain.hf_families import section_of
from meshtrain.model.weights import adapters
from meshtrain.parallel.placement import Placed
from meshtrain.step import Program

KEYS = {
    "model": section_of(GOLDEN / "llama3"),
    "lora": {"rank": 4, "alpha": 8.0},
    "train": {"global_batch_size": 4, "sequence_length": 48, "steps": 5},
    "optimizer": {
        "learning_rate": 0.01,
        "warmup_steps": 0,
        "schedule": "constant",
        "grad_clip": 0,
    },
}


@pytest.mark.parametrize(
    ("mesh", "parallel"),
    [
        pytest.param({}, {}, marks=pytest.mark.thorough, id="one"),
        pytest.param(
            {"data": 2, "tensor": 2, "pipeline": 2},
            {"microbatches": 2, "zero_stage": 3},
            marks=pytest.mark.thorough,
            id="2x2x2",
        ),
    ],
)
def test_five_steps_are_those_of_peft(mesh, parallel):
    program = Program(load({**KEYS, "mesh": mesh, "parallel": parallel}))
    model, lora = program.config.model, program.config.lora
    factors = {weight.name: weight for weight in adapters(model, lora)}

    def of_peft(directory: str):
        theirs = Adapters(GOLDEN / "llama3_lora" / directory, model)
        assert (theirs.lora.rank, theirs.lora.alpha) == (lora.rank, lora.alpha)
        return {
            name: np.stack([theirs.read(w, layer) for layer in range(model.layers)])
            for name, w in factors.items()
        }

    state, before = program.init(), of_peft("before")

    def begun(weight: Placed, x: jax.Array) -> jax.Array:
        own = (
            program.layout.live_leaf(weight, before[weight.name])
            if weight.name in before
            else x
        )
        return jax.device_put(own, x.sharding)

    drawn = program.layout.map(begun, state.params)
    state = state._replace(
        params=loading.read(program.layout, GOLDEN / "llama3", drawn)
    )
    losses = []
    for step in range(5):
        tokens = np.random.default_rng(step).integers(0, 45, (4, 49)).astype(np.int32)
        state, metrics = program.train_step(
            state, program.place({"tokens": tokens[:, :-1], "labels": tokens[:, 1:]})
        )
        losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(
        losses, np.load(GOLDEN / "llama3_lora" / "losses.npy"), atol=1e-5
    )
    after, canonical = of_peft("after"), program.layout.canonical(state.params)

    def same(weight: Placed, x: jax.Array) -> None:
        if weight.name in after:
            np.testing.assert_allclose(
                x, after[weight.name], atol=1e-5, err_msg=weight.name
            )

    program.layout.map(same, canonical)
