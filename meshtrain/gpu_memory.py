"""How much of a GPU's memory a run may have: one figure for JAX's pool, XLA's scheduler and the planner."""

import os

# Of all of it. The rest is the CUDA context's, NCCL's (buffers for every communicator) and the driver's. JAX's own default is 0.75.
POOL = 0.92
# What XLA plans for: it takes 80% of the device's memory times this percentage. Above that it schedules for memory alone, so that
# nothing travels under compute any more, and computes again what it could keep.
XLA_SHARE = 0.8
_GIVEN = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")


def ask_for_pool() -> None:
    """Has JAX take `POOL` of each GPU's memory when it starts, unless the environment says how much."""
    if not any(name in os.environ for name in _GIVEN):
        os.environ[_GIVEN[0]] = str(POOL)


def slop_factor() -> int:
    """XLA's `xla_gpu_memory_limit_slop_factor` that makes its limit the pool: percent."""
    return round(100 * POOL / XLA_SHARE)
