"""The program that XLA's CUDA compiler makes for described H100s, Triton's products off: float8 where the recipe says
so, halved bytes.
"""

import json

import pytest
from described_gpus import needs_compiler, printed

pytestmark = [pytest.mark.thorough, needs_compiler]

COMPILE = """
import collections, json, re, sys
from meshtrain.config import load
from meshtrain.mesh import make_mesh
from meshtrain.plan.compiled import described_devices
from meshtrain.step import Program

config = load(json.loads(sys.argv[1]))
program = Program(config, make_mesh(config, described_devices("h100", config.mesh.devices)))
# Else Triton would take all products, since no GPU is there to try them on; and products of one operand would be joined.
options = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_dot_merger_threshold_mb": 0}
compiled = program.lower().compile(compiler_options=options)
text = compiled.as_text()
calls = collections.Counter(re.findall(r'custom_call_target="(__cublas[^"]*)"', text))
gathers = [line for line in text.splitlines() if re.search(r" all-gather(-start)?\\(", line)]
found = [shape for line in gathers for shape in re.findall(r"(u8|bf16)\\[([0-9,]+)\\]", line)]
largest = {kind: max([eval(dims.replace(",", "*")) for k, dims in found if k == kind], default=0) for kind in ("u8", "bf16")}
print(json.dumps({"calls": calls, "temp": compiled.memory_analysis().temp_size_in_bytes, "gathered": largest}))
"""
PASSES = """
import json
from experiments.figures.products import beside_products
from meshtrain.plan.compiled import described_devices

devices = described_devices("h100", 8)
print(json.dumps([beside_products("rowwise", 8, once, devices)[0] for once in (False, True)]))
"""
ROWS, LENGTH, WIDTH, HIDDEN = 8, 2048, 1024, 4096
SIZE = {"layers": 4, "d_model": WIDTH, "heads": 8, "d_ff": HIDDEN, "vocab_size": 1024}
FLOAT8 = {"matmul": "float8"}


def compiled(precision, mesh=None, layers=4, **parallel):
    """(calls of float8 products, of others; bytes of temporaries; numbers of the largest gather as bytes, in
    bfloat16).
    """
    given = {
        "model": SIZE | {"layers": layers},
        "mesh": mesh or {},
        "parallel": {"remat": "none", **parallel},
        "precision": {"compute": "bfloat16", **precision},
        "train": {"global_batch_size": ROWS, "sequence_length": LENGTH},
    }
    found = json.loads(printed("-c", COMPILE, json.dumps(given)))
    calls = found["calls"]
    plain = sum(count for name, count in calls.items() if "f8" not in name)
    return (
        calls.get("__cublas$lt$matmul$f8", 0),
        plain,
        found["temp"],
        found["gathered"]["u8"],
        found["gathered"]["bf16"],
    )


@pytest.mark.parametrize(
    ("precision", "float8", "others"),
    [
        # a loop's body has the 7 products of a layer forward, 14 backward; first and last layer are loops of their own;
        # 3 of the head
        ({}, 14, 7 + 2 * 21 + 3),
        ({"float8_wgrad": "float8"}, 21, 2 * 21 + 3),
        (
            {
                "float8_wgrad": "float8",
                "float8_skip": [0, 0],
                "float8_recipe": "tensorwise",
            },
            21,
            3,
        ),
        ({"float8_recipe": "blockwise", "float8_skip": [0, 0]}, 0, 21 + 3),
    ],
)
def test_products_are_in_float8_as_the_recipe_says_and_no_others_left_but_those_named(
    precision, float8, others
):
    assert compiled(FLOAT8 | precision)[:2] == (float8, others)


def test_weights_and_what_the_backward_keeps_of_the_inputs_of_products_are_halved():
    """Tensorwise: rowwise a weight is two bytes, one for the backward."""
    tensorwise = FLOAT8 | {"float8_skip": [0, 0], "float8_recipe": "tensorwise"}
    whole, rounded = (
        compiled(precision, layers=8)[2] - compiled(precision, layers=4)[2]
        for precision in ({}, tensorwise)
    )
    inputs = ROWS * LENGTH * (2 * WIDTH + HIDDEN)
    weights = 4 * WIDTH * WIDTH + 3 * WIDTH * HIDDEN
    assert whole - rounded == pytest.approx(4 * (inputs + weights), rel=0.01)


@pytest.mark.slow
def test_weights_that_are_rounded_once_leave_fewer_passes_beside_products():
    each, once = json.loads(printed("-c", PASSES))
    assert once < 0.85 * each


def test_zero_3_and_sequence_parallelism_gather_bytes_and_nothing_else_of_what_is_rounded():
    weight = WIDTH * HIDDEN
    every = FLOAT8 | {"float8_skip": [0, 0]}
    assert compiled({}, {"data": 8}, zero_stage=3)[3:] == (0, weight)
    embedding = SIZE["vocab_size"] * WIDTH
    assert compiled(every, {"data": 8}, zero_stage=3)[3:] == (weight, embedding)
    assert compiled(every | {"float8_recipe": "blockwise"}, {"data": 8}, zero_stage=3)[
        3:
    ] == (
        weight,
        embedding,
    )
    assert compiled(every | {"float8_gather": False}, {"data": 8}, zero_stage=3)[
        3:
    ] == (0, weight)
