"""The program that XLA's CUDA compiler makes for 8 described GPUs: nothing waits for a predicate, messages travel under
matrix products, rings are worked on where they lie, and the stages are summed over only where the table needs it.

The sizes are those of a real model, since the compiler weighs what it overlaps; nothing is allocated.
"""

import re
from functools import cache
from typing import Any

import jax
import pytest
from described_gpus import compiled_step, needs_compiler

from experiments.plan.work import IssuedCollective, Work
from meshtrain.cluster.algorithms import PERMUTE, best
from meshtrain.config import Config, load
from meshtrain.config.reduce import sends_by_table
from meshtrain.hlo import Module, collectives
from meshtrain.mesh import PIPELINE, make_mesh
from meshtrain.plan import named
from meshtrain.schedule import make_table
from meshtrain.schedule.buffers import allocate

pytestmark = needs_compiler

MICROBATCHES = 16
SMALL = {"d_model": 4096, "heads": 32, "d_ff": 8192, "vocab_size": 32768}
LLAMA_8B = {
    "d_model": 4096,
    "heads": 32,
    "kv_heads": 8,
    "d_ff": 14336,
    "vocab_size": 128256,
}
# messages beside the layers' collectives of each sort, and alone: (model, layers of a chunk, tokens, parallel's keys,
# mesh)
LAYOUTS = {
    "tensor": (SMALL, 2, 2048, {"schedule": "1f1b"}, {"tensor": 2, "pipeline": 4}),
    # as full as a device gets: short of memory the compiler starts messages late
    "sequence": (
        LLAMA_8B,
        8,
        8192,
        {"schedule": "1f1b", "sequence_parallel": True},
        {"tensor": 2, "pipeline": 4},
    ),
    "remat": (
        SMALL,
        2,
        2048,
        {
            "schedule": "interleaved",
            "virtual_stages": 2,
            "sequence_parallel": True,
            "remat": "full",
        },
        {"tensor": 2, "pipeline": 4},
    ),
    "zero bubble": (
        SMALL,
        2,
        2048,
        {"schedule": "zb_interleaved", "virtual_stages": 2},
        {"data": 2, "pipeline": 4},
    ),
}
REACHED = 0.7  # share of the peak that a matrix product reaches


def given(layout: str) -> dict[str, Any]:
    model, layers, tokens, parallel, mesh = LAYOUTS[layout]
    return {
        "model": {
            **model,
            "layers": layers * mesh["pipeline"] * parallel.get("virtual_stages", 1),
        },
        "mesh": mesh,
        "parallel": {"microbatches": MICROBATCHES, "remat": "none", **parallel},
        "precision": {"compute": "bfloat16"},
        "train": {
            "global_batch_size": MICROBATCHES * mesh.get("data", 1),
            "sequence_length": tokens,
        },
    }


def stream(config: Config) -> int:
    """Bytes of a microbatch's residual stream on a device, which is a message."""
    parts = config.mesh.tensor if config.parallel.sequence_parallel else 1
    return config.train.sequence_length * config.model.d_model * 2 // parts


@cache
def program(layout: str) -> Work:
    """The compiled step, its instructions in the order in which they are issued."""
    text = compiled_step(given(layout))
    assert "is_scheduled=true" in text.split("\n", 1)[0]
    return Work(Module(text))


def steady(work: Work) -> dict[str, list[IssuedCollective]]:
    """Bodies of the loops over clocks in which there is a forward and a backward: they send activations and
    cotangents.
    """
    by_body: dict[str, list[IssuedCollective]] = {}
    for message in work.issued("collective-permute"):
        by_body.setdefault(message.body, []).append(message)
    found = {
        body: messages
        for body, messages in by_body.items()
        if len(messages) == 2 and messages[0].loops
    }
    assert found
    return found


def arrays(kind: str) -> list[tuple[int, ...]]:
    return [
        tuple(map(int, dims.split(","))) for dims in re.findall(r"\w\[([\d,]+)\]", kind)
    ]


def squeezed(array: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(n for n in array if n > 1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_stage_work_stands_under_a_conditional(layout):
    assert not [
        op
        for ops in program(layout).module.computations.values()
        for op in ops
        if op.opcode == "conditional"
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_messages_of_the_steady_clocks_travel_under_matrix_products_of_at_least_their_time(
    layout,
):
    config = load(given(layout))
    cluster = named("h100", config.mesh.devices)
    link, rate = (
        cluster.axis(PIPELINE, config.mesh),
        REACHED * cluster.accelerator.flops("bfloat16"),
    )
    for messages in steady(program(layout)).values():
        for message in messages:
            assert message.bytes == stream(config)
            needed = best(PERMUTE, link, message.bytes).seconds
            assert message.flops / rate >= needed, f"{message.op.name} is waited for"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_steady_clock_neither_copies_nor_fills_what_the_layers_leave_for_the_backward(
    layout,
):
    """Residuals lie in rings [slots, layers, ...]: a clock's loops over layers write and read them there, and nothing
    else does.
    """
    work, config, layers = program(layout), load(given(layout)), LAYOUTS[layout][1]
    table = make_table(
        config.parallel.schedule,
        config.mesh.pipeline,
        MICROBATCHES,
        config.parallel.virtual_stages,
    )
    depth = allocate(table).depths.stash
    for body in steady(work):
        ops = work.module.computations[body]
        carried = next(op for op in ops if op.opcode == "parameter")
        rings = {
            a for a in arrays(carried.result) if a[:2] == (depth, layers) and len(a) > 3
        }
        assert rings
        slots_and_rings = {squeezed(a) for ring in rings for a in (ring, ring[1:])}
        moves = [op for op in ops if work.only_moves(op) and work.moved(body, op).bytes]
        found = [
            op.name
            for op in moves
            if slots_and_rings & set(map(squeezed, arrays(op.result)))
        ]
        assert not found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_stages_are_summed_over_as_often_as_the_table_needs(layout):
    """Of each microbatch the embedding and its cotangent, and what goes into the loss head and its cotangent."""
    config = load(given(layout))
    mesh = make_mesh(config, jax.devices()[:8])
    summed = [
        c
        for c in collectives(program(layout).module, mesh)
        if c.kind == "all-reduce" and PIPELINE in c.axes and c.dtype == "bf16"
    ]
    # XLA may sum two arrays in one go. Where chunks are sent over data, clocks are made alike by an embedding or two of
    # no microbatch.
    idle = sum(c.times * c.bytes for c in summed) / stream(config) - 4 * MICROBATCHES
    assert 0 <= idle <= 2 * sends_by_table(config)
