"""Published runs of sharded data parallelism with tensor parallelism on H200, with seconds and memory. None is fitted.

KempnerInstitute/KempnerForge, benchmarks/mfu_scaling (April 2026), weak_scaling_160gpu (June 2026) and 175b_360gpu
(July 2026): Llama 3's architecture, nodes of four H200, sequences of 4,096 tokens, everything recomputed, PyTorch
compiled but where said. Of layouts in two of the reports we take the older report's. Its attention is PyTorch's, which
we take for FlashAttention-2.
"""

from dataclasses import replace

from experiments.bench import MODELS, config_of

from . import PUBLISHED
from .published import BY_KERNEL, COMPILED, PYTORCH_LOSS, Run

# Weights are copied out of the buffers of two gathers; gradients are scattered once a step.
PRACTICE = replace(
    COMPILED, loss_passes=PYTORCH_LOSS, copy_bytes=2 * (2 + 2), recomputes=None
)


def _run(
    model: str,
    data: int,
    tensor: int,
    sequences: int,
    microbatches: int,
    speed: int,
    gib: float,
) -> Run:
    mesh = {"data": data, "tensor": tensor}
    parallel = {
        "zero_stage": 3,
        "zero_hold": False,
        "sequence_parallel": tensor > 1,
        "remat": "full",
        "microbatches": microbatches,
    }
    rows = sequences * microbatches * data
    config = config_of(MODELS["Kempner"][model], mesh, rows, 4096, parallel)
    name = f"{model}, data {data}" + (f" x tensor {tensor}" if tensor > 1 else "")
    profile = PRACTICE
    if (model, tensor) == ("13B", 1):
        profile = replace(PRACTICE, **BY_KERNEL)
    return Run(
        "KempnerForge",
        name,
        config,
        "h200",
        profile,
        rows * 4096 / speed,
        f"{speed:,} tokens/s",
        gib=gib,
        per_node=4,
    )


RUNS = tuple(_run(*row) for row in PUBLISHED["kempner"])
