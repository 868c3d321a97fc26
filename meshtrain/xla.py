"""The options that a run gives XLA, whoever starts it, and the names by which a trace of the step is read.

No JAX here: the planner and the launcher ask it too.

One figure says how much of a GPU's memory a run may have: to JAX's pool, to XLA's scheduler and to the planner. A
launcher's further flags stand in `meshtrain.launch.flags`.

The train step names its parts, and they stand in each instruction's `op_name`; of names inside one another the rules of
`report.trace.instructions` begin with the outermost:

    jit(_train) / shard_map / while / body / FORWARD / while / body / LAYER / dot_general
                                              slot                    what of it
"""

import os
from typing import NamedTuple

# Share of a GPU's memory. The rest is the CUDA context's, NCCL's (buffers for every communicator) and the driver's.
# JAX's own default is 0.75.
POOL = 0.92
# XLA plans for 80% of the device's memory times a percentage. Above that it schedules for memory alone, so that nothing
# travels under compute any more, and computes again what it could keep.
XLA_SHARE = 0.8
POOL_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")

# Names of the step's parts.
FORWARD = "forward_slot"  # of the schedule's table
BACKWARD = "backward_slot"  # B; I and W where the table splits it
LAYER = "layer"
HEAD = "loss_head"
EMBEDDING = "token_embedding"
UPDATE = "update"  # of the weights, outside the shard_map
ZERO = "zero_cast"  # fp32 master weights to weights, gradients to shards


def ask_for_pool() -> None:
    """Has JAX take `POOL` of each GPU's memory when it starts, unless the environment says how much."""
    if not any(name in os.environ for name in POOL_VARIABLES):
        os.environ[POOL_VARIABLES[0]] = str(POOL)


def slop_factor() -> int:
    """Returns the percentage for `xla_gpu_memory_limit_slop_factor` that makes XLA's limit the pool."""
    return round(100 * POOL / XLA_SHARE)


class Option(NamedTuple):
    """An option of XLA's GPU compiler."""

    name: str
    value: int
    reason: str


def step_options(
    devices: int,
    tensor: int,
    overlaps_reduce_scatter: bool,
    sends_by_table: bool = False,
) -> list[Option]:
    """Returns options for the step on a mesh of so many devices and tensor ranks; the last two: see `config.reduce`.

    By default one collective is under way at a time, so that nothing could travel during a layer with tensor
    parallelism, whose
    backward alone may have three: a cotangent's and two gathers that only the weights' gradients need.
    """
    planned = (
        "XLA plans for the memory that JAX's pool has; by default for less, and then collectives wait where "
        "there is room"
    )
    options = [Option("xla_gpu_memory_limit_slop_factor", slop_factor(), planned)]
    if devices > tensor:
        under_way = (
            "messages between stages and what is sent over data may be under way during a layer's own "
            "collectives"
        )
        options.append(
            Option(
                "xla_gpu_experimental_parallel_collective_overlap_limit", 4, under_way
            )
        )
    if overlaps_reduce_scatter:
        together = "a bucket's gradients are one message, of any size, and so one of those that may be under way"
        options.append(
            Option("xla_gpu_reduce_scatter_combine_threshold_bytes", 2**33, together)
        )
    if sends_by_table:
        together = "a chunk's weights are one message, of any size, and so one of those that may be under way"
        options.append(
            Option("xla_gpu_all_gather_combine_threshold_bytes", 2**33, together)
        )
    return options
