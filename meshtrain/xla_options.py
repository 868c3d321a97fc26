"""What the step tells XLA's GPU compiler by itself, whoever starts it: names, values and reasons. What a launcher sets besides:
`meshtrain.plan.flags`."""

from typing import NamedTuple

from meshtrain.gpu_memory import slop_factor


class Option(NamedTuple):
    name: str
    value: int
    reason: str


def of_step(devices: int, tensor: int, closes_early: bool) -> list[Option]:
    """For a mesh of so many devices and tensor ranks; `closes_early`: see `parallel.placement`.

    By default one collective is under way at a time, so that nothing could travel during a layer with tensor parallelism, whose
    backward alone may have three: a cotangent's and two gathers that only the weights' gradients need.
    """
    planned = "XLA plans for the memory that JAX's pool has; by default for less, and then collectives wait where there is room"
    found = [Option("xla_gpu_memory_limit_slop_factor", slop_factor(), planned)]
    if devices > tensor:
        under_way = (
            "messages between stages and what is sent over data may be under way during a layer's own collectives"
        )
        found.append(Option("xla_gpu_experimental_parallel_collective_overlap_limit", 4, under_way))
    if closes_early:
        together = "a bucket's gradients are one message, of any size, and so one of those that may be under way"
        found.append(Option("xla_gpu_reduce_scatter_combine_threshold_bytes", 2**33, together))
    return found
