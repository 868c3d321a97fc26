"""Published runs of InternLM 7B on 8 to 1,024 A100, with tensor parallelism of 1 and 2. None is fitted.

InternLM/InternLM, doc/en/train_performance.md (commit 20fe5ac): A100-80, four RoCE links of 100 Gbit/s a node,
FlashAttention; tokens/s a GPU of the first table (nothing computed again) and of the first eight rows of the table with
everything computed again. `zero` GPUs share the optimizer's state: all data ranks of a row, or those of one node; then
gradients are reduced within a node and between nodes.
"""

import functools
from dataclasses import replace

from meshtrain.config import load
from meshtrain.plan.compute import FrameworkProfile

from .kernels import FLASH_2_AMPERE
from .published import BY_KERNEL, PYTORCH_LOSS, Run

MODEL = {
    "layers": 32,
    "d_model": 4096,
    "heads": 32,
    "d_ff": 11008,
    "vocab_size": 103168,
}
GPUS = (8, 16, 32, 64, 128, 256, 512, 1024)
PROFILE = FrameworkProfile(
    execution="asynchronous",
    kernel=FLASH_2_AMPERE,
    **BY_KERNEL,
    loss_passes=PYTORCH_LOSS,
    gradient_bytes=2,
    overlap_data=True,
    sum_bytes=6,
)
# (tensor, sequences a microbatch, microbatches, computed again): the optimizer's state within a node
ROWS = {
    (1, 2, 4, False): (4078, 3939, 3919, 3944, 3928, 3920, 3835, 3625),
    (2, 4, 4, False): (3761, 3658, 3655, 3650, 3651, 3653, 3589, 3486),
    (1, 8, 1, True): (3314, 3268, 3323, 3217, 3260, 3215, 3199, 3163),
}


@functools.cache
def runs() -> tuple[Run, ...]:
    """Every row."""
    return tuple(
        _run(*key, devices, speed)
        for key, speeds in ROWS.items()
        for devices, speed in zip(GPUS, speeds, strict=True)
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
    config = load(
        {
            "model": MODEL,
            "mesh": {"data": data, "tensor": tensor},
            "parallel": {
                "zero_stage": 1,
                "microbatches": microbatches,
                "remat": "full" if again else "none",
            },
            "precision": {"compute": "bfloat16"},
            "train": {
                "global_batch_size": sequences * microbatches * data,
                "sequence_length": 2048,
            },
        }
    )
    profile = replace(PROFILE, recomputes=(1, 1, 1) if again else None)
    seconds = config.train.global_batch_size * 2048 / speed / devices
    name = f"7B on {devices}, {sequences} x {tensor}{' recomputed' if again else ''}"
    return Run(
        "InternLM",
        name,
        config,
        "a100-80",
        profile,
        seconds,
        f"{speed:,} tokens/s a GPU",
    )
