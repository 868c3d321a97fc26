"""What is offloaded lies in host memory, and changes no number."""

import jax
import numpy as np
import pytest
from covering import slow_but
from short_runs import token_batches

from meshtrain.config import Config, ConfigError, load
from meshtrain.mesh import make_mesh
from meshtrain.parallel import offload
from meshtrain.step import Program, State

MODEL = {"layers": 2, "d_model": 16, "heads": 2, "d_ff": 32, "vocab_size": 64}


def configuration(
    precision: dict[str, object] | None = None, **parallel: object
) -> Config:
    train = {"global_batch_size": 4, "sequence_length": 16}
    mesh = {"data": 2, "tensor": 2}
    return load(
        {
            "model": MODEL,
            "mesh": mesh,
            "parallel": parallel,
            "precision": precision or {},
            "train": train,
        }
    )


def step(config: Config) -> tuple:
    program = Program(config, make_mesh(config))
    tokens, labels = token_batches(config, 1)[0]
    batch = jax.device_put({"tokens": tokens, "labels": labels}, program.batch_sharding)
    return program, batch, program.train_step(program.init(), batch)


def on_host(state: State) -> bool:
    """Just the optimizer state is; its scalars cost nothing and stay."""
    kinds = {x.sharding.memory_kind for x in jax.tree.leaves(state.optimizer) if x.ndim}
    return kinds == {offload.HOST} and {
        x.sharding.memory_kind for x in jax.tree.leaves(state.params)
    } == {"device"}


@pytest.mark.thorough
@pytest.mark.parametrize(
    "compute", slow_but(["float32", "bfloat16", "float16"], ["float32", "float16"])
)
def test_optimizer_state_lies_on_the_host_before_and_after_a_step_and_the_step_is_the_same(
    compute,
):
    _, _, (plain, metrics) = step(configuration({"compute": compute}))
    program, _, (state, offloaded) = step(
        configuration({"compute": compute}, offload_optimizer=True)
    )
    assert on_host(program.init()) and on_host(state)
    assert metrics == offloaded and float(metrics.get("skipped", 0)) == 0
    jax.tree.map(np.testing.assert_array_equal, plain, state)


@pytest.mark.thorough
def test_a_skipped_step_leaves_an_offloaded_optimizer_state_bit_for_bit_and_on_the_host():
    program, _, (state, metrics) = step(
        configuration(
            {"compute": "float16", "loss_scale": 2.0**32}, offload_optimizer=True
        )
    )
    assert float(metrics["skipped"]) == 1 and on_host(state)
    before = program.init()
    jax.tree.map(
        np.testing.assert_array_equal,
        (state.params, state.optimizer),
        (before.params, before.optimizer),
    )
    assert int(state.step) == 1


@pytest.mark.thorough
def test_offloaded_activations_give_the_gradients_of_recomputed_ones():
    program, batch, _ = step(
        configuration(remat="names", remat_keep=["qkv"], remat_offload=["mlp_hidden"])
    )
    assert 0 <= program.check_offload(program.init(), batch) < offload.TOLERANCE


@pytest.mark.thorough
def test_offloaded_activations_of_all_layers_wait_in_host_memory_for_the_backward_pass():
    program, _, _ = step(configuration(remat="names", remat_offload=["mlp_hidden"]))
    text = str(
        jax.make_jaxpr(program.train_step)(program.state_shapes, program.batch_shapes())
    )
    # Layers, tokens of a data rank, d_ff of a tensor rank
    assert "f32<host>[2,32,16]" in text


def test_the_check_notices_a_gradient_that_differs():
    a = {"w": np.ones(100, np.float32)}
    b = {"w": np.ones(100, np.float32) * np.float32(1.001)}
    difference = float(offload.relative_difference(a, b))
    assert difference == pytest.approx(1e-3, rel=0.01)
    assert (
        offload.judged(difference, "bfloat16")
        == "offloaded activations checked: gradients differ by 1.0e-03"
    )
    for wrong in (difference, float("nan")):
        with pytest.raises(
            FloatingPointError,
            match=r"parallel\.remat_offload .* differ by .*, so leave it out\.$",
        ):
            offload.judged(wrong, "float32")


def test_devices_without_host_memory_are_refused_in_one_sentence():
    class Memory:
        kind = "device"

    class Device:
        def addressable_memories(self) -> list[Memory]:
            return [Memory()]

    class Mesh:
        devices = np.array([Device()])

    with pytest.raises(
        ConfigError,
        match=r"offload_optimizer needs pinned_host memory, .* only device",
    ):
        offload.check_memory(configuration(offload_optimizer=True), Mesh())
