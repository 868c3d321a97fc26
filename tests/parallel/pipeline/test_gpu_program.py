"""The program that XLA's CUDA compiler makes for 8 described GPUs: nothing waits for a predicate, and messages travel under compute.

The sizes are those of a real model, since the compiler weighs what it overlaps; nothing is allocated. It needs the compiler (pip install 'meshtrain[compile]'), though no GPU and no driver. It runs in a process of its own, because
tests have started JAX on CPU.
"""

import importlib.util
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda12_plugin") is None,
    reason="XLA's CUDA compiler is not installed (pip install 'meshtrain[compile]')",
)

COMPILE = """
import sys
from meshtrain.config import load
from meshtrain.mesh import make_mesh
from meshtrain.plan.compiled import described_devices
from meshtrain.step import Program

schedule, chunks, *mesh = sys.argv[1:]
data, tensor, pipeline = map(int, mesh)
config = load({
    "model": {"layers": 2 * pipeline * int(chunks), "d_model": 4096, "heads": 32, "d_ff": 8192, "vocab_size": 32768},
    "mesh": {"data": data, "tensor": tensor, "pipeline": pipeline},
    "parallel": {"schedule": schedule, "virtual_stages": int(chunks), "microbatches": 16},
    "precision": {"compute": "bfloat16"},
    "train": {"global_batch_size": 16 * data, "sequence_length": 4096},
})
print(Program(config, make_mesh(config, described_devices("h100", 8))).lower().compile().as_text())
"""
LAYOUTS = [
    ("1f1b", 1, (1, 2, 4)),
    ("zb_interleaved", 2, (2, 1, 4)),
]  # messages beside collectives of the layers, and alone


@cache
def computations(schedule: str, chunks: int, mesh: tuple[int, int, int]) -> dict[str, list[str]]:
    """The instructions of each computation of the compiled step, in the order in which they are issued."""
    command = [sys.executable, "-c", COMPILE, schedule, str(chunks), *map(str, mesh)]
    environment = {k: v for k, v in os.environ.items() if k not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "is_scheduled=true" in done.stdout.split("\n", 1)[0]
    found: dict[str, list[str]] = {}
    current = ""
    for line in done.stdout.splitlines():
        if header := re.match(r"(?:ENTRY )?%?([\w.\-]+) (?:\(.*)?\{$", line):
            current = header[1]
            found[current] = []
        elif line.startswith("  "):
            found[current].append(line.strip().removeprefix("ROOT "))
    return found


def opcode(instruction: str) -> str:
    named = re.search(r" = (?:\(.*?\)|\S+) ([\w\-]+)\(", instruction)
    return named[1] if named else ""


def multiplies(instruction: str, program: dict[str, list[str]]) -> bool:
    """Whether it is or calls a matrix product: of cuBLAS or cuDNN, or a fusion or a loop with one in it."""
    if re.search(r' dot\(|custom_call_target="(__cublas|__cudnn)', instruction):
        return True
    called = re.findall(r"(?:calls|body)=%?([\w.\-]+)", instruction)
    return any(multiplies(inner, program) for name in called for inner in program[name])


def size(instruction: str) -> int:
    """Elements of the largest array that it yields."""
    result = re.split(r" [\w\-]+\(", instruction.split(" = ", 1)[1], maxsplit=1)[0]
    return max((math.prod(map(int, dims.split(","))) for dims in re.findall(r"\[([\d,]+)\]", result)), default=1)


def messages(body: list[str]) -> Iterator[tuple[int, int]]:
    """Places of each message's start and of its done."""
    for i, instruction in enumerate(body):
        if opcode(instruction) == "collective-permute-start":
            waits = f"collective-permute-done({instruction.split(' = ')[0]})"
            yield i, next(j for j, other in enumerate(body) if waits in other)


def steady(program: dict[str, list[str]]) -> list[list[str]]:
    """Bodies of the loops over ticks in which there is a forward and a backward: they send activations and cotangents."""
    return [body for body in program.values() if len(list(messages(body))) == 2]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_no_stage_work_stands_under_a_conditional(layout):
    assert not [i for body in computations(*layout).values() for i in body if opcode(i) == "conditional"]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_messages_of_the_steady_segment_travel_while_the_device_computes(layout):
    program = computations(*layout)
    bodies = steady(program)
    assert bodies
    for body in bodies:
        under = [body[start + 1 : done] for start, done in messages(body)]
        for (start, _), between in zip(messages(body), under, strict=True):
            fusions = [i for i in between if opcode(i) == "fusion" and size(i) >= size(body[start])]
            assert fusions or any(multiplies(i, program) for i in between), body[start]
        assert any(multiplies(i, program) for between in under for i in between)
