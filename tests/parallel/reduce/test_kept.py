"""What compression keeps in a real step: its bytes in the compiled program, float16's skipped steps, a resume, the
planner's memory.
"""

from functools import cache
from itertools import product
from typing import Any

import jax
import numpy as np
import pytest
from checkpoint_runs import same
from covering import thorough_but

from meshtrain.checkpoint import Checkpointer
from meshtrain.config import ConfigError, load
from meshtrain.hlo import collectives
from meshtrain.mesh import make_mesh
from meshtrain.parallel.reduce import sizes
from meshtrain.plan import memory
from meshtrain.step import Program, State

# Large enough that norms, which are sent as they are, weigh little.
MODEL = {
    "layers": 2,
    "d_model": 256,
    "heads": 4,
    "kv_heads": 2,
    "d_ff": 512,
    "vocab_size": 264,
}
TOPK, POWER = (
    {"compression": "topk", "ratio": 0.01},
    {"compression": "powersgd", "rank": 4},
)
# (data, tensor, pipeline, islands)
FLAT, ISLANDS, CUBE = (4, 1, 1, 1), (4, 1, 1, 2), (2, 2, 2, 1)


def configuration(
    reduce, mesh=FLAT, directory="unused", compute="float32", **parallel: Any
):
    return load(
        {
            "model": MODEL,
            "mesh": dict(
                zip(("data", "tensor", "pipeline", "islands"), mesh, strict=True)
            ),
            "parallel": {"zero_stage": 1, "reduce": reduce, **parallel},
            "precision": {"compute": compute},
            "train": {"global_batch_size": 8, "sequence_length": 16},
            "data": {"source": "synthetic"},
            "run": {"directory": str(directory)},
        }
    )


@cache
def compiled(kind: str, mesh=FLAT, compute: str = "float32") -> Any:
    config = configuration(
        {"topk": TOPK, "powersgd": POWER}[kind], mesh, compute=compute
    )
    program = Program(config, make_mesh(config))
    return program, program.lower().compile()


def batch(program, step):
    tokens = np.random.default_rng(step).integers(0, 264, (8, 17), np.int32)
    return program.place({"tokens": tokens[:, :-1], "labels": tokens[:, 1:]})


def go(program, step, state, steps):
    """The state after steps, and their metrics."""
    metrics = []
    for n in steps:
        state, found = step(state, batch(program, n))
        metrics.append(jax.device_get(found))
    return state, metrics


def gradient_bytes(program, step):
    """That a device sends of gradients, norms included; weights are gathered."""
    found = collectives(step, program.mesh)
    kinds = ("reduce-scatter", "all-to-all", "all-reduce")
    return sum(c.sent * c.times for c in found if c.axis == "data" and c.kind in kinds)


@pytest.mark.thorough
def test_topk_sends_a_fiftieth_in_one_exchange_a_matrix_and_no_dense_one():
    program, step = compiled("topk", compute="float16")
    float32 = 3 / 4 * 4 * sum(weight.on_device() for weight in program.layout.flat)
    assert float32 / gradient_bytes(program, step) >= 45
    matrices = [weight for weight in program.layout.flat if weight.decayed]
    exchanges = [
        c for c in collectives(step, program.mesh) if c.kind == "all-to-all" and c.axes
    ]
    assert len(exchanges) == len(matrices) > 5
    each = {
        4 * 8 * round(0.01 * weight.on_rank()) * 3 / 4 for weight in matrices
    }  # of 4 rows one stays
    assert {c.sent for c in exchanges} == each


@pytest.mark.thorough
def test_powersgd_sends_two_thin_matrices_as_its_paper_says():
    program, step = compiled("powersgd")
    sizes = [weight.shape for weight in program.layout.flat]
    thin = sum(
        layers * 4 * (n + c)
        for layers, n, c in [
            (1, 264, 256),
            (1, 256, 264),  # embedding and head
            (2, 256, 256),
            (2, 256, 128),
            (2, 256, 128),
            (2, 256, 256),  # q, k, v, out
            (2, 256, 512),
            (2, 256, 512),
            (2, 512, 256),  # gate, up, down
        ]
    )
    norms = sum(np.prod(shape) for shape in sizes if shape in ((2, 256), (256,)))
    wanted = 4 * (2 * 3 / 4 * thin + 3 / 4 * norms)
    assert gradient_bytes(program, step) == pytest.approx(wanted, rel=0.01)


@pytest.mark.thorough
def test_a_skipped_step_leaves_what_is_owed_as_it_was_and_a_new_scale_owes_the_same():
    program, step = compiled("topk", compute="float16")
    state, metrics = go(program, step, program.init(), range(2))
    before = jax.device_get(state.reduce)
    norm = np.sqrt(
        sum(
            np.sum(np.square(x, dtype=np.float64))
            for x in before.residual["blocks"]["mlp"].values()
        )
    )
    assert 0 < norm < metrics[-1]["residual_norm"], (
        "in units of the gradient, whatever the scale"
    )
    scale = float(state.scale.value)
    assert scale > 1000
    overflowing = jax.device_put(np.float32(1e30), state.scale.value.sharding)
    state, metrics = go(
        program,
        step,
        state._replace(scale=state.scale._replace(value=overflowing)),
        [2],
    )
    assert metrics[0]["skipped"] == 1
    assert same(State(*[None] * 4, before), State(*[None] * 4, state.reduce))
    lower = jax.device_put(np.float32(scale / 4), state.scale.value.sharding)
    state, metrics = go(
        program, step, state._replace(scale=state.scale._replace(value=lower)), [3]
    )
    assert metrics[0]["skipped"] == 1, "and no more"
    after = np.sqrt(
        sum(
            np.sum(np.square(x, dtype=np.float64))
            for x in jax.tree.leaves(jax.device_get(state.reduce))
        )
    )
    assert after == pytest.approx(float(metrics[0]["residual_norm"]), rel=1e-4)
    assert metrics[0]["residual_norm"] < 10 * norm


@pytest.mark.thorough
def test_what_compression_keeps_goes_on_bit_for_bit_after_a_resume(tmp_path):
    program, step = compiled("topk", compute="float16")
    config = configuration(TOPK, directory=tmp_path, compute="float16")
    checkpointer = Checkpointer(config, program)
    state, _ = go(program, step, program.init(), range(3))
    checkpointer.save(3, state, 1.0)
    checkpointer.wait()
    state, metrics = go(program, step, state, (3, 4))
    checkpointer.close()
    checkpointer = Checkpointer(config, program)
    again, at = checkpointer.restore_or_init()
    checkpointer.close()
    assert at == 3
    again, repeated = go(program, step, again, (3, 4))
    assert [m["loss"] for m in repeated] == [m["loss"] for m in metrics]
    assert same(state, again)


KEPT = [TOPK, POWER, {**POWER, "over": "islands"}, {**POWER, "feedback": False}]
MESHES = [FLAT, ISLANDS, CUBE, (2, 4, 1, 2), (4, 1, 2, 4)]
NOW = [
    (FLAT, TOPK),
    (CUBE, POWER),
    ((2, 4, 1, 2), KEPT[2]),
    ((4, 1, 2, 4), POWER),
    (ISLANDS, KEPT[3]),
]


@pytest.mark.parametrize(
    "cell",
    thorough_but(
        list(product(MESHES, KEPT)),
        NOW.__contains__,
        [(CUBE, TOPK), (ISLANDS, KEPT[2])],
    ),
    ids=str,
)
def test_the_planner_knows_what_is_kept_on_a_device(cell):
    mesh, reduce = cell
    model = {
        "layers": 5,
        "d_model": 96,
        "heads": 12,
        "kv_heads": 3,
        "d_ff": 190,
        "vocab_size": 257,
    }
    config = load(
        {
            "model": model,
            "mesh": dict(
                zip(("data", "tensor", "pipeline", "islands"), mesh, strict=True)
            ),
            "parallel": {"reduce": reduce, "microbatches": 2},
            "train": {"global_batch_size": 8, "sequence_length": 16},
        }
    )
    program = Program(config, make_mesh(config))
    shapes = program.state_shapes.reduce
    held = sum(
        4 * np.prod(x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(shapes)
    )
    assert held == sum(sizes.feedback_bytes(config).values())
    planned = sum(item.nbytes for item in memory.between_steps(config))
    assert planned == pytest.approx(program.state_bytes, rel=0.005)
    if shapes is not None and reduce.get("feedback", True) and not reduce.get("over"):
        matrices = sum(
            weight.on_device()
            for weight in program.layout.flat
            if sizes.compresses(config, weight)
        )
        assert sizes.feedback_bytes(config)["residual"] == 4 * matrices, (
            "one whole float32 gradient a device"
        )


@pytest.mark.parametrize(
    ("parallel", "told"),
    [
        (
            {"zero_stage": 2, "reduce": POWER},
            "parallel.zero_stage 2 scatters them wherever they are made; set parallel.zero_hold to true",
        ),
        (
            {"zero_stage": 3, "reduce": {"compression": "int8", "feedback": True}},
            "with parallel.reduce.feedback compresses",
        ),
        (
            {"zero_stage": 3, "reduce": {**POWER, "feedback": False}},
            "with its Q compresses",
        ),
        (
            {"reduce": {"compression": "topk", "ratio": 0.6}},
            "parallel.reduce.ratio is 0.6, but topk sends 8 bytes",
        ),
        ({"zero_stage": 0, "reduce": TOPK}, "parallel.zero_stage is 0"),
    ],
)
def test_what_cannot_be_right_is_refused_in_one_sentence(parallel, told):
    with pytest.raises(ConfigError) as refused:
        load(
            {
                "mesh": {"data": 4},
                "parallel": parallel,
                "train": {"global_batch_size": 8},
            }
        )
    assert told in str(refused.value)
    assert str(refused.value).count("\n") == 0


@pytest.mark.thorough
def test_gradients_that_are_scattered_at_use_may_be_compressed_across_islands():
    config = configuration({**POWER, "over": "islands"}, ISLANDS, zero_stage=3)
    program = Program(config, make_mesh(config))
    _, metrics = go(program, program.train_step, program.init(), range(2))
    assert metrics[-1]["residual_norm"] > 0
