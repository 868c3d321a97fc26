"""Weights come from every layout of training to that of decoding: the same numbers, each byte sent once, by a program
that is compiled once.
"""

import math
from itertools import cycle

import jax
import numpy as np
import pytest
from covering import thorough_but

import meshtrain as mt
from meshtrain.generate.forward import DecodingForward
from meshtrain.generate.resharding import Resharding
from meshtrain.hlo import collectives
from meshtrain.parallel.placement import Placed

MODEL = {
    "layers": 3,
    "d_model": 16,
    "heads": 4,
    "kv_heads": 2,
    "d_ff": 30,
    "vocab_size": 61,
}
EXPERTS = {
    "family": "mixtral",
    "d_ff": 0,
    "moe": {"experts": 4, "top_k": 2, "d_ff": 10},
}
EACH = {
    "one": {},
    "data 8, ZeRO-3": {"mesh": {"data": 8}, "parallel": {"zero_stage": 3}},
    "data 2, tensor 2, pipeline 2, uneven": {
        "mesh": {"data": 2, "tensor": 2, "pipeline": 2},
        "parallel": {"zero_stage": 3},
    },
    "pipeline 2, tensor 4, edge": {
        "mesh": {"tensor": 4, "pipeline": 2},
        "parallel": {"vocab": "edge"},
    },
    "pipeline 4, tensor 2, tied, split by hand": {
        "model": {"tied_head": True, "layers": 5},
        "mesh": {"tensor": 2, "pipeline": 4},
        "parallel": {"layer_split": [1, 2, 2, 0], "microbatches": 4},
    },
    "virtual stages": {
        "model": {"layers": 5},
        "mesh": {"pipeline": 2, "data": 2},
        "parallel": {"schedule": "interleaved", "virtual_stages": 2, "microbatches": 2},
    },
    "context 2": {
        "mesh": {"data": 2, "context": 2, "pipeline": 2},
        "parallel": {"zero_stage": 3, "microbatches": 2},
    },
    "expert 2": {
        "model": EXPERTS,
        "mesh": {"data": 4, "expert": 2},
        "parallel": {"zero_stage": 2},
    },
    "experts over context": {
        "model": EXPERTS,
        "mesh": {"data": 2, "context": 2, "expert": 4, "tensor": 2},
        "parallel": {"zero_stage": 3},
    },
    "expert 2, tensor 2, pipeline 2": {
        "model": EXPERTS,
        "mesh": {"data": 2, "expert": 2, "tensor": 2, "pipeline": 2},
        "parallel": {"zero_stage": 1},
    },
    "experts over tensor": {
        "model": EXPERTS,
        "mesh": {"data": 4, "expert": 2, "tensor": 2},
        "parallel": {
            "zero_stage": 3,
            "sequence_parallel": True,
            "experts": {"dispatch": "all_to_all"},
        },
    },
    "LoRA": {
        "mesh": {"data": 2, "tensor": 2, "pipeline": 2},
        "lora": {"rank": 2},
        "parallel": {"zero_stage": 3},
    },
    "LoRA, frozen in float8": {
        "model": {"d_model": 32, "d_ff": 32},
        "mesh": {"data": 2, "tensor": 2},
        "lora": {"rank": 2},
        "parallel": {"zero_stage": 3},
        "precision": {"matmul": "float8", "float8_skip": [0, 0]},
    },
}


def program_of(name: str, **sections) -> mt.Program:
    given = EACH[name] | sections
    train = {"global_batch_size": 8, "sequence_length": 16}
    return mt.Program(
        mt.load({**given, "model": MODEL | given.get("model", {}), "train": train})
    )


def params_of(program: mt.Program):
    shardings = jax.tree.map(lambda x: x.sharding, program.layout.masters)
    return jax.jit(program.layout.init, out_shardings=shardings)(jax.random.key(1))


def resharding(program: mt.Program) -> Resharding:
    ways = program.mesh.size // program.mesh.shape["tensor"]
    return Resharding(program.layout, DecodingForward(program, ways, 16).layout)


def layers_of(way: Resharding, parts) -> list[list[np.ndarray]]:
    """The arrays of each weight, a layer each, in the order of the layout."""
    layout = way.decoded
    names = {w.name: [] for w in layout.flat}
    for tree, part in (("embedding", parts.embedding), ("head", parts.head)):
        for weight, x in zip(
            leaves(layout.weights[tree]), jax.tree.leaves(part), strict=True
        ):
            names[weight.name].append(x)
    for part in parts.blocks:
        for weight, x in zip(
            leaves(layout.weights["blocks"]), jax.tree.leaves(part), strict=True
        ):
            names[weight.name].append(x)
    return [names[w.name] for w in layout.flat]


def leaves(weights):
    return jax.tree.leaves(weights, is_leaf=lambda x: hasattr(x, "zero_dim"))


USUAL = "data 2, tensor 2, pipeline 2, uneven"


@pytest.mark.parametrize("name", thorough_but(list(EACH), lambda _: False, [USUAL]))
def test_every_layout_gives_the_same_numbers_on_every_device(name):
    program = program_of(name)
    params = params_of(program)
    layout = program.layout
    way = resharding(program)
    whole = layout.map(layout.unstored, params)
    right = jax.tree.leaves(jax.tree.map(np.asarray, layout.canonical(whole)))
    for weight, arrays, x in zip(
        layout.flat, layers_of(way, way.program(params)), right, strict=True
    ):
        wanted = x if weight.stacked else [x]
        assert len(arrays) == len(wanted), weight.name
        for array, number in zip(arrays, wanted, strict=True):
            cut = tuple(slice(n) for n in number.shape)
            np.testing.assert_array_equal(np.asarray(array)[cut], number, weight.name)
            assert (np.asarray(array) != 0).sum() == (number != 0).sum(), (
                "padding is zeros"
            )
            sharded = array.sharding.spec
            assert {
                axis for axes in sharded if axes for axis in np.atleast_1d(axes)
            } <= {"tensor"}


@pytest.mark.parametrize(
    "name",
    thorough_but([n for n in EACH if "float8" not in n], lambda _: False, [USUAL]),
)
def test_each_device_receives_its_share_of_the_decoding_weights_once(name):
    program = program_of(name)
    compiled = resharding(program).program.lower(program.layout.masters).compile()
    sent = sum(c.sent * c.times for c in collectives(compiled, program.mesh) if c.axes)
    assert sent == sum(
        map(received, program.layout.flat, cycle([program.mesh.shape["tensor"]]))
    )


def received(weight: Placed, tensor: int) -> float:
    """Bytes of a device's part of a weight in decoding less those that it has, by the sizes of training alone."""
    axes = dict(zip(weight.axes, weight.over, strict=True))
    split = tensor if any("tensor" in each for each in weight.over) else 1
    share = math.prod(weight.padded) / split
    has = weight.on_rank()
    if (
        axes.get("vocab") == ("pipeline", "tensor")
        and math.prod(weight.ways) > split > 1
    ):
        # its pieces are other devices'
        has = 0
    if axes.get("experts") == ("expert", "tensor"):
        # it has all columns of fewer experts
        has /= tensor
    return 4 * (share - has)


@pytest.mark.thorough
def test_a_second_step_compiles_nothing():
    program = program_of("one")
    way = resharding(program)
    params = params_of(program)
    way.program(params)
    # as a train step gives them
    shardings = jax.tree.map(lambda x: x.sharding, program.layout.masters)
    double = jax.jit(
        lambda params: jax.tree.map(lambda x: 2 * x, params), out_shardings=shardings
    )
    doubled = double(params)
    again = way.program(doubled)
    assert way.program._cache_size() == 1
    np.testing.assert_array_equal(
        again.blocks[1]["mlp"]["up"], doubled["blocks"]["mlp"]["up"][1]
    )
