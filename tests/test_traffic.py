"""The compiled step sends what the papers say, and every byte beyond that has a name.

Read from the HLO of whole train steps, in bytes that one device sends in a step by a ring. Ψ counts the parameters on a
device, b·s·h a microbatch's activations (its sequence split over tensor between the blocks, with sequence parallelism).

    data      ZeRO 0, 1, 2: 2Ψ; ZeRO 3: 3Ψ (Rajbhandari et al. 2020, section 7), but for embedding and head: their weights are gathered
              once, since the one's backward pass needs none and the other's follows at once
    tensor    4 all-reduces of b·s·h a layer (Shoeybi et al. 2019) or as many gather-scatter pairs, and 2 gathers of what the products
              were given, which the backward pass gathers again (Korthikanti et al. 2022, section 4.2.2)
    pipeline  2 messages of b·s·h a boundary and microbatch; and as many in each clock in which a stage has nothing to
    send
"""

import math
from collections import defaultdict
from typing import Any

import pytest
from covering import thorough_but

from meshtrain.config import Config, load
from meshtrain.hlo import Collective, collectives
from meshtrain.mesh import make_mesh
from meshtrain.parallel.placement import Placed
from meshtrain.step import Program

WITHIN = 0.03


def configuration(
    mesh: tuple[int, int, int], family: str = "llama", **parallel: Any
) -> Config:
    model = {
        "layers": 8,
        "d_model": 32,
        "heads": 8,
        "kv_heads": 8,
        "d_ff": 128,
        "vocab_size": 128,
        "max_positions": 64,
    }
    return load(
        {
            "model": {**model, "family": family},
            "mesh": dict(zip(("data", "tensor", "pipeline"), mesh, strict=True)),
            "parallel": {"schedule": "1f1b"} | parallel,
            "train": {"global_batch_size": 8, "sequence_length": 64},
        }
    )


def reduced(ranks: int) -> float:
    """Share of a buffer that a ring all-reduce sends."""
    return 2 * (ranks - 1) / ranks


def passed(ranks: int) -> float:
    """The same for an all-gather or a reduce-scatter."""
    return (ranks - 1) / ranks


def theory(program: Program) -> dict[str, float]:
    """Bytes sent by name, from the sizes in the config alone."""
    config = program.config
    mesh, parallel, model = config.mesh, config.parallel, config.model
    microbatches, tensor, stages = parallel.microbatches, mesh.tensor, mesh.pipeline
    tokens = microbatch_tokens(config)
    bsh = 4 * tokens * model.d_model
    split = parallel.sequence_parallel and tensor > 1
    stream = bsh // tensor if split else bsh
    vocabulary = tensor * (stages if parallel.vocab == "spread" else 1)
    others = vocabulary // tensor  # stages that share the vocabulary

    layer = 10 * passed(tensor) * bsh if split else 4 * reduced(tensor) * bsh
    # Embedding out and its cotangent in; last output in and its cotangent out
    if split:
        edges = 4 * passed(tensor) * bsh + 4 * reduced(others) * stream
    # Each of the two summed over the vocabulary once, and broadcast from its stage once
    else:
        edges = 2 * reduced(vocabulary) * bsh + 2 * reduced(others) * bsh
    expected = {
        "layers": layer * microbatches * model.layers / stages,
        "embedding and head": edges * microbatches,
        "loss": 3 * reduced(vocabulary) * 4 * tokens * microbatches,
        "messages": 2 * stream * microbatches if stages > 1 else 0,
        "messages in idle clocks": 2 * stream * (clocks(program) - microbatches)
        if stages > 1
        else 0,
        **on_data(program),
    }
    return {name: sent for name, sent in expected.items() if sent}


def on_data(program: Program) -> dict[str, float]:
    """What ZeRO sends: each part of the weights so many times."""
    mesh, parallel = program.config.mesh, program.config.parallel
    blocks = sum(
        held(leaf, mesh.tensor, mesh.pipeline)
        for leaf in leaves(program)
        if leaf.stacked
    )
    edges = sum(
        held(leaf, mesh.tensor, mesh.pipeline)
        for leaf in leaves(program)
        if not leaf.stacked
    )
    psi, sent = 4 * (blocks + edges), passed(mesh.data)
    again = (
        parallel.microbatches
        if parallel.zero_hold is False or parallel.zero_stage == 3
        else 1
    )
    if parallel.zero_hold is True or parallel.zero_stage < 2:
        return {"weights and gradients": 2 * sent * psi}
    if parallel.zero_stage == 2:
        return {"weights and gradients": sent * (psi + again * psi)}
    return {"weights and gradients": sent * again * 4 * (3 * blocks + 2 * edges)}


def replicated(program: Program) -> float:
    """Weights that are whole on an axis of the model: their partial gradients are summed over it once a step."""
    sizes, total = (
        {
            "tensor": program.config.mesh.tensor,
            "pipeline": program.config.mesh.pipeline,
        },
        0.0,
    )
    for leaf in leaves(program):
        ranks = math.prod(sizes[axis] for axis in leaf.replicated)
        shard = program.config.mesh.data if leaf.zero_dim is not None else 1
        total += reduced(ranks) * 4 * held(leaf, *sizes.values()) / shard
    return total


def microbatch_tokens(config: Config) -> int:
    rows = (
        config.train.global_batch_size
        // config.mesh.data
        // config.parallel.microbatches
    )
    return rows * config.train.sequence_length


def clocks(program: Program) -> int:
    """Clocks of the pipeline's table; a stage has work in as many of them as there are microbatches."""
    return (
        program.layout.table.clocks
        if program.layout.table
        else program.config.parallel.microbatches
    )


def leaves(program: Program) -> list[Placed]:
    return program.layout.flat


def held(leaf: Placed, tensor: int, stages: int) -> float:
    """Elements of a whole weight on one device."""
    ways = math.prod(
        {"tensor": tensor, "pipeline": stages}[axis]
        for over in leaf.over
        for axis in over
    )
    return math.prod(leaf.shape) / ways


def measured(program: Program) -> dict[str, float]:
    """Bytes sent by name, from the compiled step; on CPU idle slots of the pipeline are skipped."""
    config = program.config
    found: dict[str, float] = defaultdict(float)
    for c in collectives(program.lower().compile(), program.mesh, program.taken):
        found[name(c, config)] += c.sent * c.times
    found.pop("nothing: one device", None)
    if "messages" in found:
        # messages stand in no conditional
        busy = program.taken("layer")
        found["messages in idle clocks"] = found["messages"] * (1 - busy)
        found["messages"] *= busy
    return dict(found)


def name(c: Collective, config: Config) -> str:
    """What a collective is for, by its axis, its size and the loops around it."""
    loops = 1 if config.parallel.microbatches > 1 else 0  # over microbatches or clocks
    activations = (
        4 * microbatch_tokens(config) * config.model.d_model // config.mesh.tensor
    )
    if not c.axes:
        return "nothing: one device"
    if c.kind == "collective-permute" and c.axis == "pipeline":
        return "messages"
    if c.axis == "data" and (c.kind != "all-reduce" or c.bytes > 1000):
        return "weights and gradients"
    if c.axis == "tensor" and len(c.loops) == loops + 1:
        return "layers"
    # A phase of one clock is no loop.
    in_clock = loops == 1 and (len(c.loops) == 1 or "token_embedding" in c.source)
    if in_clock and set(c.axes) <= {"tensor", "pipeline"}:
        return "embedding and head" if c.bytes >= activations else "loss"
    if not c.loops and c.kind == "all-reduce":
        return "once a step"
    return f"unnamed: {c}"


CASES: dict[str, tuple[tuple[int, int, int], dict[str, Any]]] = {
    "zero0-data8": ((8, 1, 1), {"zero_stage": 0}),
    "zero1-data8": ((8, 1, 1), {"zero_stage": 1}),
    "zero2-data8": ((8, 1, 1), {"zero_stage": 2}),
    "zero3-data8": ((8, 1, 1), {"zero_stage": 3}),
    "zero3-data4-remat": ((4, 1, 1), {"zero_stage": 3, "remat": "full"}),
    "zero2-data2-accumulating-held": (
        (2, 1, 1),
        {"zero_stage": 2, "zero_hold": True, "microbatches": 4},
    ),
    "zero2-data2-accumulating": (
        (2, 1, 1),
        {"zero_stage": 2, "zero_hold": False, "microbatches": 4},
    ),
    "zero3-data2-accumulating-held": (
        (2, 1, 1),
        {"zero_stage": 3, "zero_hold": True, "microbatches": 4},
    ),
    "zero3-data2-accumulating": ((2, 1, 1), {"zero_stage": 3, "microbatches": 4}),
    "tensor8": ((1, 8, 1), {"microbatches": 2}),
    "tensor8-sequence": ((1, 8, 1), {"microbatches": 2, "sequence_parallel": True}),
    "tensor4-data2-gpt2": ((2, 4, 1), {"microbatches": 2, "family": "gpt2"}),
    "pipeline4": ((1, 1, 4), {"microbatches": 8}),
    "pipeline4-edge": ((1, 1, 4), {"microbatches": 8, "vocab": "edge"}),
    "pipeline8-gpipe": ((1, 1, 8), {"microbatches": 8, "schedule": "gpipe"}),
    "pipeline4-zero3": ((2, 1, 4), {"microbatches": 4, "zero_stage": 3}),
    "all-three": ((2, 2, 2), {"microbatches": 4}),
    "all-three-sequence-zero3": (
        (2, 2, 2),
        {"microbatches": 4, "sequence_parallel": True, "zero_stage": 3},
    ),
}


NOW = ("zero3-data8",)
# Gradients scattered at each use, each axis alone with another key, and all of it.


FEW = (
    "zero2-data2-accumulating",
    "tensor4-data2-gpt2",
    "pipeline4-edge",
    "all-three-sequence-zero3",
    "zero1-data8",
    "zero3-data4-remat",
    "zero3-data2-accumulating-held",
    "tensor8-sequence",
    "pipeline4-zero3",
)


@pytest.mark.parametrize("case", thorough_but(CASES, NOW.__contains__, FEW))
def test_step_sends_what_theory_says_and_every_other_byte_is_named(case):
    mesh, parallel = CASES[case]
    config = configuration(mesh, **parallel)
    program = Program(config, make_mesh(config))
    expected, found = theory(program), measured(program)
    once = found.pop("once a step", 0.0) - replicated(
        program
    )  # what is left are sums for the gradient norm, and the loss
    assert 0 <= once <= 3 * 8 * (len(leaves(program)) + 2), (
        "a number or two a leaf and axis"
    )
    assert found == pytest.approx(expected, rel=WITHIN)
