"""Published runs of sharded data parallelism with tensor parallelism on H200, with seconds and memory. None is fitted.

KempnerInstitute/KempnerForge, benchmarks/mfu_scaling (April 2026), weak_scaling_160gpu (June 2026) and 175b_360gpu
(July 2026): Llama 3's architecture, nodes of four H200, sequences of 4,096 tokens, everything recomputed, PyTorch
compiled but where said. Of layouts in two of the reports we take the older report's. Its attention is PyTorch's, which
we take for FlashAttention-2.
"""

from dataclasses import replace

from experiments.bench import LLAMA_3
from meshtrain.config import load

from .published import BY_KERNEL, COMPILED, PYTORCH_LOSS, Run

MODELS = LLAMA_3 | {
    "13B": {
        "layers": 40,
        "d_model": 5120,
        "heads": 40,
        "kv_heads": 8,
        "d_ff": 17920,
        "vocab_size": 128256,
    },
    "175B": {
        "layers": 96,
        "d_model": 12288,
        "heads": 96,
        "kv_heads": 8,
        "d_ff": 39680,
        "vocab_size": 128256,
    },
}

# model, data, tensor, sequences a microbatch, microbatches, tokens/s of all devices, GiB that tensors took at most
ROWS = (
    ("8B", 1, 1, 2, 4, 10471, 80.7),
    ("8B", 2, 1, 2, 4, 18728, 62.4),
    ("8B", 1, 2, 4, 2, 13163, 57.8),
    ("8B", 4, 1, 4, 2, 38983, 61.1),
    ("8B", 1, 4, 4, 2, 25135, 39.4),
    ("8B", 2, 2, 4, 2, 25980, 45.9),
    ("8B", 2, 4, 4, 2, 44299, 32.7),
    ("13B", 8, 1, 4, 4, 35405, 88.5),  # not compiled
    ("13B", 2, 4, 4, 4, 27345, 45.1),
    ("8B", 4, 4, 4, 2, 82988, 29.4),
    ("13B", 4, 4, 4, 4, 53814, 39.2),
    ("8B", 8, 4, 4, 2, 155917, 27.6),
    ("13B", 8, 4, 4, 4, 104309, 36.3),
    ("70B", 8, 4, 2, 4, 17657, 93.2),
    ("13B", 16, 4, 4, 4, 216507, 34.8),
    ("13B", 32, 4, 4, 4, 423306, 34.0),
    ("13B", 40, 4, 4, 4, 534644, 33.9),
    ("70B", 2, 4, 2, 4, 3623, 128.5),
    ("70B", 16, 4, 2, 4, 35824, 86.8),
    ("70B", 24, 4, 2, 4, 52190, 84.6),
    ("70B", 32, 4, 2, 4, 69985, 83.6),
    ("70B", 40, 4, 2, 4, 85571, 82.9),
    ("175B", 90, 4, 8, 1, 154523, 53.8),
)

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
    config = load(
        {
            "model": MODELS[model],
            "mesh": {"data": data, "tensor": tensor},
            "parallel": {
                "zero_stage": 3,
                "zero_hold": False,
                "sequence_parallel": tensor > 1,
                "remat": "full",
                "microbatches": microbatches,
            },
            "precision": {"compute": "bfloat16"},
            "train": {
                "global_batch_size": sequences * microbatches * data,
                "sequence_length": 4096,
            },
        }
    )
    train = config.train
    name = f"{model}, data {data}" + (f" x tensor {tensor}" if tensor > 1 else "")
    profile = (
        PRACTICE if (model, tensor) != ("13B", 1) else replace(PRACTICE, **BY_KERNEL)
    )
    seconds = train.global_batch_size * train.sequence_length / speed
    return Run(
        "KempnerForge",
        name,
        config,
        "h200",
        profile,
        seconds,
        f"{speed:,} tokens/s",
        gib=gib,
        per_node=4,
    )


RUNS = tuple(_run(*row) for row in ROWS)
