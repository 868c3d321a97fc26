"""The programs that XLA's CUDA compiler makes of grouped products for described GPUs: kernels alone, with no room for
experts x rows.
"""

import json
from functools import cache

import pytest
from described_gpus import needs_compiler, printed

pytestmark = [pytest.mark.thorough, needs_compiler]

ROWS, K, N, EXPERTS, BLOCK = 16384, 2048, 768, 16, 128  # of each device
COMPILE = f"""
import json
import re
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from meshtrain.model.grouped import grouped
from meshtrain.plan.compiled import described_devices

mesh = Mesh(np.array(described_devices("h100", 2)), "x")

def loop_or_kernel(rows, weight, experts, blocks):
    return grouped(rows, weight, experts, blocks[0], "gpu")

def ragged(rows, weight, experts, blocks):
    return jax.lax.ragged_dot(rows, weight, jnp.bincount(experts, length={EXPERTS}) * {BLOCK})

def compiled(product, what, dtype):
    def run(rows, weight, experts, blocks, cotangent):
        out, vjp = jax.vjp(lambda rows, weight: product(rows, weight, experts, blocks), rows, weight)
        return {{"forward": (out,), "rows": vjp(cotangent)[:1], "weight": vjp(cotangent)[1:]}}[what]

    shapes = [(({ROWS}, {K}), dtype), (({EXPERTS}, {K}, {N}), dtype), (({ROWS // BLOCK},), "int32"), ((1,), "int32"), (({ROWS}, {N}), dtype)]
    at = NamedSharding(mesh, P("x"))
    given = [jax.ShapeDtypeStruct((2 * first, *others), kind, sharding=at) for (first, *others), kind in shapes]
    mapped = jax.shard_map(run, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    program = jax.jit(mapped).lower(*given).compile({{"xla_gpu_fail_ptx_compilation_on_register_spilling": True}})
    text = program.as_text()
    kernels = re.findall(r'__gpu\\$xla.gpu.triton".*?name = "(\\w+)"', text)
    return {{"temp": program.memory_analysis().temp_size_in_bytes, "kernels": kernels, "dots": len(re.findall(r" dot\\(|cublas", text))}}

found = {{
    f"{{name}} {{what}} {{dtype}}": compiled(product, what, dtype)
    for name, product, dtypes in (("grouped", loop_or_kernel, ("bfloat16", "float32")), ("ragged", ragged, ("bfloat16",)))
    for what in ("forward", "rows", "weight")
    for dtype in dtypes
}}
print(json.dumps(found))
"""


@cache
def programs() -> dict[str, dict]:
    return json.loads(printed("-c", COMPILE))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    "what, kernel",
    [
        ("forward", "product_kernel"),
        ("rows", "product_kernel"),
        ("weight", "weight_kernel"),
    ],
)
def test_a_grouped_product_is_one_kernel_without_temporaries_and_spilled_registers(
    what, kernel, dtype
):
    """Of the weight's gradient the first rows of the experts are one."""
    program = programs()[f"grouped {what} {dtype}"]
    assert program["kernels"] == [kernel]
    assert program["temp"] <= 4 * (EXPERTS + 1) and not program["dots"]


@pytest.mark.parametrize("what", ["forward", "rows", "weight"])
def test_of_ragged_dot_it_would_be_a_dense_product_with_room_for_experts_times_rows(
    what,
):
    program = programs()[f"ragged {what} bfloat16"]
    assert program["temp"] >= 2 * EXPERTS * ROWS * min(K, N) and program["dots"]
