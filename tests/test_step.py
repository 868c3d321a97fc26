"""The compiled step: the same run on three axes as on one device, and memory that does not grow with the
microbatches.
"""

import sys
import traceback
from pathlib import Path

import jax
import numpy as np
import pytest
from refusals import tells
from short_runs import train

import meshtrain
from meshtrain.config import Config, ConfigError, load, replaced
from meshtrain.mesh import make_mesh
from meshtrain.model import products
from meshtrain.step import Program

STEPS = 20
# may only fall; a clock, its op, the loop over layers, its body and a layer's gradients are named steps
MOST_FRAMES = 19


def configuration(
    family: str, mesh: tuple[int, int, int], microbatches: int, batch: int = 8
) -> Config:
    return load(
        {
            "model": {
                "family": family,
                "layers": 4,
                "d_model": 32,
                "heads": 4,
                "kv_heads": 2,
                "d_ff": 64,
                "vocab_size": 96,
            },
            "mesh": dict(zip(("data", "tensor", "pipeline"), mesh, strict=True)),
            "parallel": {"microbatches": microbatches},
            "train": {
                "global_batch_size": batch,
                "sequence_length": 16,
                "steps": STEPS,
            },
            "optimizer": {"learning_rate": 0.003, "warmup_steps": 2},
        }
    )


@pytest.mark.thorough
@pytest.mark.parametrize(
    "family", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)]
)
def test_twenty_losses_on_2x2x2_are_those_of_one_device(family):
    alone = [m["loss"] for m in train(configuration(family, (1, 1, 1), 1), STEPS)[0]]
    placed = [m["loss"] for m in train(configuration(family, (2, 2, 2), 4), STEPS)[0]]
    assert alone[-1] != alone[0]
    np.testing.assert_allclose(placed, alone, rtol=2e-5)


@pytest.mark.thorough
def test_1f1b_needs_no_more_memory_for_32_microbatches_than_for_8():
    def temporary(microbatches: int) -> int:
        config = configuration("llama", (1, 1, 2), microbatches, batch=microbatches)
        return (
            Program(config, make_mesh(config))
            .lower()
            .compile()
            .memory_analysis()
            .temp_size_in_bytes
        )

    assert temporary(32) == pytest.approx(temporary(8), rel=0.05)


@pytest.mark.thorough
def test_few_of_our_frames_lie_between_the_step_and_a_product(monkeypatch):
    package, product, stacks = (
        str(Path(meshtrain.__file__).parent),
        products._product,
        [],
    )

    def recorded(x, weight):
        frames = [frame.f_code for frame, _ in traceback.walk_stack(sys._getframe())]
        stacks.append(
            [
                code.co_qualname
                for code in frames
                if code.co_filename.startswith(package)
            ]
        )
        return product(x, weight)

    monkeypatch.setattr(products, "_product", recorded)
    Program(configuration("llama", (2, 2, 2), 4)).lower()
    longest = max(stacks, key=len)
    assert longest[0] == "_linear_forward" and "Program._train" in longest
    assert longest.index("Program._train") + 1 <= MOST_FRAMES, longest


@pytest.mark.thorough
@pytest.mark.parametrize("compute", ["float32", "float16"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_step_gives_back_arrays_of_the_types_it_took_so_that_it_is_compiled_once(
    family, compute
):
    def types(tree):
        # weak ones too, of a dtype that nobody gave
        return jax.tree.map(lambda x: (x.dtype, x.weak_type), tree)

    program = Program(
        replaced(configuration(family, (2, 1, 1), 1), precision={"compute": compute})
    )
    before = jax.eval_shape(program.init)
    after, _ = jax.eval_shape(program.train_step, before, program.batch_shapes())
    assert types(after) == types(before)


@pytest.mark.thorough
def test_a_program_that_jax_may_not_compile_is_refused():
    with jax.disable_jit(), pytest.raises(ConfigError) as refused:
        Program(configuration("llama", (1, 1, 1), microbatches=1))
    assert tells(str(refused.value), "JAX_DISABLE_JIT", "unset")


def test_a_mean_is_one_however_little_the_labels_weigh():
    program = Program(configuration("llama", (2, 1, 1), 2))
    params = program.init().params
    tokens, labels = np.random.default_rng(0).integers(0, 96, (2, 8, 16), np.int32)
    step = jax.jit(
        lambda batch: program.gradients(params, batch, np.int32(0), np.float32(1))
    )

    def of(weight: float):
        weights = np.full((8, 16), weight, np.float32)
        loss, gradients = step(
            program.place({"tokens": tokens, "labels": labels, "weights": weights})
        )
        return [float(loss), *map(np.asarray, jax.tree.leaves(gradients))]

    expected = of(1.0)
    for weight in (0.01, 1e-4):
        for found, wanted in zip(of(weight), expected, strict=True):
            assert np.linalg.norm(found - wanted) <= 1e-5 * np.linalg.norm(wanted)
    assert all(not np.any(x) for x in of(0.0))
