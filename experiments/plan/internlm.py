"""Published runs of InternLM 7B on 8 to 1,024 A100, with tensor parallelism of 1 and 2. None is fitted.

InternLM/InternLM, doc/en/train_performance.md (commit 20fe5ac): A100-80, four RoCE links of 100 Gbit/s a node,
FlashAttention; tokens/s a GPU of the first table (nothing computed again) and of the first eight rows of the table with
everything computed again. `zero` GPUs share the optimizer's state: all data ranks of a row, or those of one node; then
gradients are reduced within a node and between nodes.
"""

import functools
from dataclasses import replace

from experiments.bench import MODELS, config_of
from meshtrain.plan.compute import FrameworkProfile

from . import PUBLISHED
from .kernels import FLASH_2_AMPERE
from .published import BY_KERNEL, PYTORCH_LOSS, Run

PROFILE = FrameworkProfile(
    execution="asynchronous",
    kernel=FLASH_2_AMPERE,
    **BY_KERNEL,
    loss_passes=PYTORCH_LOSS,
    gradient_bytes=2,
    overlap_data=True,
    sum_bytes=6,
)


@functools.cache
def runs() -> tuple[Run, ...]:
    """Every row."""
    return tuple(
        _run(*layout, 8 * 2**doubled, speed)
        for layout, speeds in PUBLISHED["internlm"]
        for doubled, speed in enumerate(speeds)
    )


def _run(
    tensor: int,
    sequences: int,
    microbatches: int,
    again: bool,
    devices: int,
    speed: int,
) -> Run:
    data = devices // tensor
    mesh = {"data": data, "tensor": tensor}
    parallel = {"zero_stage": 1, "microbatches": microbatches}
    parallel["remat"] = "full" if again else "none"
    rows = sequences * microbatches * data
    config = config_of(MODELS["InternLM"], mesh, rows, 2048, parallel)
    profile = replace(PROFILE, recomputes=(1, 1, 1) if again else None)
    name = f"7B on {devices}, {sequences} x {tensor}{' recomputed' if again else ''}"
    seconds = rows * 2048 / speed / devices
    told = f"{speed:,} tokens/s a GPU"
    return Run("InternLM", name, config, "a100-80", profile, seconds, told)
