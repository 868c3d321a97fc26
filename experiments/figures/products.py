"""Products of experts in seconds on this machine, and bytes that a step in float8 moves."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from experiments import bench
from experiments.bench import LLAMA_3, Table, config_of
from experiments.plan.work import Work
from meshtrain.config import replaced
from meshtrain.hlo.module import Module
from meshtrain.mesh import make_mesh
from meshtrain.model.grouped import grouped as grouped_product
from meshtrain.parallel.float8_storage import Float8Storage
from meshtrain.step import Program

ROWS, DEPTH, WIDTH, BLOCK = 4096, 256, 512, 128  # of the products


def grouped(*, rounds: int = 30) -> None:
    """Prints the least seconds of each product, forward and both gradients.

    Rows fall to the experts unevenly, in whole blocks.
    """
    random = np.random.default_rng(0)

    def numbers(*shape: int) -> jax.Array:
        return jnp.asarray(random.standard_normal(shape), jnp.float32)

    rows = numbers(ROWS, DEPTH)
    cotangent = numbers(ROWS, WIDTH)
    products: dict[str, tuple[Callable, tuple[jax.Array, ...]]] = {
        "dense": (jnp.matmul, (numbers(DEPTH, WIDTH),))
    }
    ours = partial(grouped_product, platform=jax.default_backend())
    for experts in (8, 16):
        weight = numbers(experts, DEPTH, WIDTH)
        shares = random.dirichlet(np.ones(experts))
        of_block = jnp.asarray(
            np.sort(random.choice(experts, ROWS // BLOCK, p=shares)), jnp.int32
        )
        sizes = jnp.bincount(of_block, length=experts) * BLOCK
        products[f"grouped, {experts} experts"] = (
            ours,
            (weight, of_block, jnp.int32(ROWS // BLOCK)),
        )
        products[f"ragged_dot, {experts} experts"] = lax.ragged_dot, (weight, sizes)
    runs, temporaries = {}, {}
    for name, (product, arrays) in products.items():
        backward = partial(_gradients, product)
        compiled = jax.jit(backward).lower(rows, cotangent, *arrays).compile()
        temporaries[name] = compiled.memory_analysis().temp_size_in_bytes
        forward = jax.jit(product).lower(rows, *arrays).compile()
        runs[f"{name} forward"] = lambda run=forward, arrays=arrays: (
            jax.block_until_ready(run(rows, *arrays))
        )
        runs[name] = lambda run=compiled, arrays=arrays: jax.block_until_ready(
            run(rows, cotangent, *arrays)
        )
    quickest = {
        name: min(one.wall for one in found)
        for name, found in bench.turns(runs, rounds).items()
    }
    title = f"{ROWS} rows, {DEPTH} to {WIDTH}, blocks of {BLOCK}, float32, {jax.default_backend()}"
    table = Table(
        "product               ",
        "forward ms",
        "x dense",
        "backward ms",
        "x dense",
        "temp MB",
        title=title,
    )
    for name in products:
        cells: list[str] = []
        for way in (" forward", ""):
            seconds = quickest[name + way]
            cells += [
                f"{1e3 * seconds:.2f}",
                f"{seconds / quickest['dense' + way]:.2f}",
            ]
        table.row(name, *cells, f"{temporaries[name] / 1e6:.1f}")


def _gradients(
    product: Callable,
    rows: jax.Array,
    cotangent: jax.Array,
    weight: jax.Array,
    *others: jax.Array,
) -> Any:
    return jax.vjp(lambda rows, weight: product(rows, weight, *others), rows, weight)[
        1
    ](cotangent)


def beside_products(
    recipe: str, microbatches: int, once: bool, devices: Any, layers: int = 4
) -> tuple[float, int]:
    """Returns the bytes that a step's instructions beside products and collectives move on a device, and those of its
    temporaries.
    """
    ranks = len(devices)
    model = LLAMA_3["8B"] | {"layers": layers}
    parallel = {"zero_stage": 1, "microbatches": microbatches}
    config = config_of(model, {"data": ranks}, ranks * microbatches, 2048, parallel)
    narrow = {"matmul": "float8", "float8_recipe": recipe, "float8_skip": (0, 0)}
    config = replaced(config, precision=narrow)
    lowered = lower(config, devices, once)
    # no GPU is there to try which kernel is faster, and Triton would take all products
    compiled = lowered.compile(compiler_options={"xla_gpu_enable_triton_gemm": False})
    module = Module(compiled.as_text())
    work = Work(module)
    total = 0.0
    for body, loops in module.bodies():
        turns = np.prod([1 if n is None else n for n in loops])
        for op in module.computations[body]:
            if not op.kind and not work.flops(body, op):
                total += turns * work.moved(body, op).bytes
    memory = compiled.memory_analysis()
    assert memory is not None, "XLA's GPU compiler tells it"
    return total, memory.temp_size_in_bytes


def lower(config: Any, devices: Any, once: bool) -> jax.stages.Lowered:
    """Returns the lowered step; not `once`: each product rounds its weight itself."""
    rounds = Float8Storage.round_once
    if not once:
        Float8Storage.round_once = lambda *_: None  # type: ignore[method-assign]
    try:
        return Program(config, make_mesh(config, devices)).lower()
    finally:
        Float8Storage.round_once = rounds  # type: ignore[method-assign]
