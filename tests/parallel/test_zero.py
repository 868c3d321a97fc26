"""Each ZeRO stage holds what the paper's formulas say, on live arrays, and what it gathers and scatters is whole.

Of Ψ parameters in bfloat16, with Adam in float32, on each of N data ranks (Rajbhandari et al. 2020, figure 1; their
gradients are in half precision, ours are accumulated in float32; masters and both moments are their K = 12):

    stage    weights    gradients    masters and moments
    0        2Ψ         4Ψ           12Ψ
    1        2Ψ         4Ψ           12Ψ/N
    2        2Ψ         4Ψ/N         12Ψ/N
    3        2Ψ/N       4Ψ/N         12Ψ/N
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from short_runs import place

from meshtrain.config import Config, load
from meshtrain.hlo import live_bytes
from meshtrain.mesh import AXES, make_mesh
from meshtrain.model.weights import Weight
from meshtrain.parallel import accumulate, placement
from meshtrain.parallel.layout import Layout, shard_spec
from meshtrain.parallel.parallelize import make_zero
from meshtrain.parallel.placement import Placed, splits
from meshtrain.parallel.reduce.reduction import Reduction, gather
from meshtrain.step import Program

WITHIN = 0.02
STACKED = PartitionSpec(AXES)  # what each device holds for itself, one entry a device


def configuration(
    mesh: tuple[int, int, int],
    stage: int,
    compute: str = "bfloat16",
    layers: int = 4,
    **parallel: Any,
) -> Config:
    return load(
        {
            "model": {
                "layers": layers,
                "d_model": 64,
                "heads": 8,
                "kv_heads": 4,
                "d_ff": 200,
                "vocab_size": 257,
            },
            "mesh": dict(zip(("data", "tensor", "pipeline"), mesh, strict=True)),
            "parallel": {"zero_stage": stage, **parallel},
            "precision": {"compute": compute},
            "train": {"global_batch_size": 8, "sequence_length": 16},
        }
    )


def held_in_step(program: Program) -> dict[str, int]:
    """Bytes on one device of the weights that a step computes with and of the gradients it accumulates, made live."""
    config = program.config
    zeros = jnp.zeros((), jnp.int32)
    rows = PartitionSpec("data")

    def pieces(masters: Any, batch: Any) -> tuple[Any, Any]:
        opened = program.local.zero.gather_params(masters)
        batches, tokens = program.local.microbatches(batch)
        gradients = accumulate.accumulate(
            program.local.forward, opened, batches, None, 1 / tokens + zeros
        ).gradients
        read = (
            opened.constant
            if jax.tree.leaves(opened.constant)
            else opened.differentiated
        )
        return jax.tree.map(lambda x: x[None], (read, gradients))

    mapped = jax.shard_map(
        pieces,
        mesh=program.mesh,
        in_specs=(program.layout.shards, rows),
        out_specs=STACKED,
    )
    masters = jax.tree.map(
        lambda s: jax.device_put(np.zeros(s.shape, s.dtype), s.sharding),
        program.layout.masters,
    )
    shape = (config.train.global_batch_size, config.train.sequence_length)
    batch = jax.device_put(
        {n: np.zeros(shape, np.int32) for n in ("tokens", "labels")},
        program.batch_sharding,
    )
    weights, gradients = jax.jit(mapped)(masters, batch)
    return {"weights": live_bytes(weights), "gradients": live_bytes(gradients)}


@pytest.mark.thorough
@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 4, 8])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_each_stage_holds_what_the_paper_says(stage, ranks):
    config = configuration((ranks, 1, 1), stage)
    program = Program(config, make_mesh(config))
    psi, n = program.layout.parameters, ranks
    expected = {
        "weights": 2 * psi / (n if stage == 3 else 1),
        "gradients": 4 * psi / (n if stage >= 2 else 1),
        "masters and moments": 12 * psi / (n if stage >= 1 else 1),
    }
    state = state_of_zeros(program)
    found = {
        "masters and moments": live_bytes((state.params, state.optimizer)),
        **held_in_step(program),
    }
    assert found == pytest.approx(expected, rel=WITHIN)


def state_of_zeros(program: Program) -> Any:
    return jax.tree.map(
        lambda s: jax.device_put(np.zeros(s.shape, s.dtype), s.sharding),
        program.state_shapes,
    )


@pytest.mark.thorough
def test_initial_state_is_held_as_its_shapes_say():
    config = configuration((4, 2, 1), 1)
    program = Program(config, make_mesh(config))
    state = program.init()
    jax.tree.map(
        lambda x, s: np.testing.assert_(
            x.sharding.is_equivalent_to(s.sharding, x.ndim)
        ),
        state,
        program.state_shapes,
    )
    assert live_bytes(state) == live_bytes(state_of_zeros(program))
    psi = program.layout.parameters
    assert live_bytes((state.params, state.optimizer)) == pytest.approx(
        12 * psi / 8, rel=WITHIN
    )


@pytest.mark.parametrize("name", ["adamw", "lion", "sgd", "adafactor", "muon"])
def test_every_optimizer_keeps_its_state_in_shards(name):
    """Nothing of a weight's size is whole on a data rank."""
    config = configuration((8, 1, 1), 1)
    config = dataclasses.replace(
        config, optimizer=dataclasses.replace(config.optimizer, name=name)
    )
    program = Program(config, make_mesh(config))
    for shape in jax.tree.leaves(program.state_shapes.optimizer):
        local = np.prod(shape.sharding.shard_shape(shape.shape))
        assert local <= max(np.prod(shape.shape) / 8, 4 * 257), shape


# --- what is gathered and scattered


@pytest.mark.parametrize("shape", [(16, 6), (5, 7), (257, 3)])
def test_gather_and_scatter_are_each_others_transpose_padding_or_not(shape):
    config = configuration((8, 1, 1), 1)
    mesh = make_mesh(config)
    weight = Weight("x", tuple(zip(("vocab", "embed"), shape, strict=True)), std=1.0)
    leaf = placement.place(
        weight,
        splits(config.model, config.mesh, "spread"),
        config.mesh,
        places=1,
        zero=True,
    )
    assert leaf.zero_dim is not None
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    padded = np.zeros(leaf.padded, np.float32)
    padded[tuple(slice(n) for n in shape)] = x

    whole = jax.shard_map(
        lambda s: gather(leaf, s)[None],
        mesh=mesh,
        in_specs=shard_spec(leaf),
        out_specs=STACKED,
    )(padded)
    np.testing.assert_array_equal(whole, np.broadcast_to(x, (8, *shape)))
    parts = np.random.default_rng(1).standard_normal((8, *shape)).astype(np.float32)
    scatter = Reduction(config).reduce_scatter
    summed = jax.shard_map(
        lambda g: scatter(leaf, g[0]).shard,
        mesh=mesh,
        in_specs=STACKED,
        out_specs=shard_spec(leaf),
    )(parts)
    np.testing.assert_allclose(
        summed[tuple(slice(n) for n in shape)], parts.sum(0), rtol=1e-5, atol=1e-6
    )
    assert summed.sum() == pytest.approx(parts.sum(), rel=1e-4), (
        "nothing lands in the padding"
    )


@pytest.mark.parametrize(
    ("stage", "hold", "microbatches", "pipeline", "gathers", "scatters"),
    [
        (1, False, 4, 1, False, False),
        (2, False, 1, 1, False, True),
        (2, False, 4, 1, False, True),  # stage 2 was asked for to save memory
        (2, False, 1, 2, False, True),
        (2, True, 4, 1, False, False),
        (3, False, 4, 2, True, True),
        (3, True, 4, 1, False, False),
    ],
)
def test_what_is_held_over_the_step_by_default_and_by_choice(
    stage, hold, microbatches, pipeline, gathers, scatters
):
    config = configuration(
        (2, 1, pipeline), stage, zero_hold=hold, microbatches=microbatches
    )
    found = make_zero(Layout(config, make_mesh(config)))
    assert (found.gathers_at_use, found.scatters_at_use) == (gathers, scatters)


@pytest.mark.thorough
@pytest.mark.parametrize(("mesh", "microbatches"), [((8, 1, 1), 1), ((2, 1, 4), 4)])
def test_gathered_weights_are_never_kept_for_the_backward_pass(mesh, microbatches):
    """The compiler's temporary memory is less by whole weights and whole gradients, though nothing is recomputed.

    With 4 layers a stage: those of the one layer at work are whole.
    """
    temporary = {}
    for stage in (1, 3):
        config = configuration(
            mesh, stage, "float32", 4 * mesh[2], microbatches=microbatches
        )
        program = Program(config, make_mesh(config))
        temporary[stage] = (
            program.lower().compile().memory_analysis().temp_size_in_bytes
        )
    psi, n = 4 * sum(jax.tree.leaves(program.layout.map(stacked))) / mesh[2], mesh[0]
    assert temporary[1] - temporary[3] > 0.9 * 2 * psi * (1 - 1 / n)


def stacked(leaf: Placed) -> int:
    return int(np.prod(leaf.shape)) if leaf.stacked else 0


@pytest.mark.thorough
def test_gradients_of_all_stages_are_equal_shard_by_shard():
    """ZeRO moves numbers, it makes none: stages 1 to 3 give the same shards."""
    shards = {}
    for stage in (1, 2, 3):
        config = configuration((4, 2, 1), stage, "float32")
        program = Program(config, make_mesh(config))
        shape = (config.train.global_batch_size, config.train.sequence_length)
        text = np.random.default_rng(0).integers(0, 257, shape, np.int32)
        params = place(
            program.layout, program.layout.map(partial(draw, np.random.default_rng(1)))
        )
        batch = jax.device_put(
            {"tokens": text, "labels": text[:, ::-1].copy()}, program.batch_sharding
        )
        _, shards[stage] = jax.jit(program.gradients)(
            params, batch, jnp.zeros((), jnp.int32), jnp.ones(())
        )
    for stage in (2, 3):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
            shards[1],
            shards[stage],
        )


def draw(random: np.random.Generator, leaf: Placed) -> np.ndarray:
    return 0.1 * random.standard_normal(leaf.shape).astype(np.float32) + (
        leaf.name.endswith("scale")
    )
