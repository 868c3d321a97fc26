"""Published runs of NVIDIA's recipes on H100 and GB200, tensor parallelism of 1 to 8 with pipelines and context
parallelism, to 2,304 GPUs.

NVIDIA/dgxc-benchmarking, README.md of each recipe, step times in bfloat16: tag v25.04.02 (NeMo 24.12: llama3.1,
nemotron, nemo_megatron; MaxText 25.01: maxtext), v24.11.1 (llama3.1/README_405b.md, nemotron/README_15b.md: other
layouts), v25.05 (GB200). Synthetic data; batches grow with the GPUs. Nemotron-4's shapes: Adler et al. 2024; its
products are two an MLP, and its embedding is its own.

NeMo: Transformer Engine, cuDNN's attention, norms and gates of one kernel, sequence parallelism, collectives of tensor
parallelism in pieces beside their products (user buffers), gradients in bfloat16, optimizer sharded and both its
collectives overlapped. MaxText: XLA, FSDP in groups of 128 (16 nodes, copies beyond), q, k and v kept and the rest
computed again (`save_qkv_proj`), cuDNN's attention.
"""

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from experiments.bench import LLAMA_3
from meshtrain.config import load
from meshtrain.plan.compute import FrameworkProfile

from .published import Run

NEMO = FrameworkProfile(
    execution="asynchronous",
    loss_passes=5,
    sum_bytes=0,
    gradient_bytes=2,
    overlap_data=True,
    overlap_tensor=True,
)
XLA = FrameworkProfile(overlap_data=True, recomputes=(0.75, 1.0, 1.0))

# Transformer Engine rounds weights for the first microbatch of a step, norms and gates write float8 themselves, and
# casts both orders.
NEMO_FLOAT8 = replace(NEMO, cast_bytes=1.0, transposed_bytes=0.0)
# Seconds of 405B on 1,024 H100s in bfloat16 and in float8: the pair that this profile is calibrated by.
FLOAT8_PAIR = (19.78, 12.37)

_NEMOTRON = {"family": "gpt2", "kv_heads": 8, "vocab_size": 256000, "tied_head": False}
MODELS: dict[str, dict[str, Any]] = {
    **LLAMA_3,
    "15B": _NEMOTRON | {"layers": 32, "d_model": 6144, "heads": 48, "d_ff": 24576},
    "340B": _NEMOTRON | {"layers": 96, "d_model": 18432, "heads": 96, "d_ff": 73728},
    "175B": {
        "family": "gpt2",
        "layers": 96,
        "d_model": 12288,
        "heads": 96,
        "vocab_size": 51200,
    },
}

# accelerator, model, (tensor, pipeline, context, chunks, sequences a microbatch), tokens, GPUs → (sequences a step,
# seconds); layers where fewer
SERIES: tuple[
    tuple[str, str, tuple[int, int, int, int, int], int, dict[int, tuple[int, float]]],
    ...,
] = (
    (
        "h100",
        "8B",
        (1, 1, 2, 1, 1),
        8192,
        {
            n: (16 * n, s)
            for n, s in ((8, 12.27), (16, 12.3), (32, 12.32), (64, 12.33), (128, 12.33))
        },
    ),
    (
        "h100",
        "70B",
        (4, 4, 2, 5, 1),
        8192,
        {
            n: (2 * n, s)
            for n, s in (
                (64, 14.66),
                (128, 14.67),
                (256, 14.68),
                (512, 14.67),
                (1024, 14.65),
                (2048, 14.66),
            )
        },
    ),
    (
        "h100",
        "405B",
        (8, 8, 2, 8, 1),
        8192,
        {n: (n // 2, s) for n, s in ((512, 19.78), (1024, 19.84), (2048, 19.87))},
    ),
    (
        "h100",
        "405B",
        (8, 9, 2, 7, 1),
        8192,
        {576: (252, 17.20), 1152: (504, 17.52), 2304: (1008, 17.62)},
    ),
    (
        "h100",
        "175B",
        (4, 8, 1, 6, 1),
        2048,
        {
            n: (2 * n, s)
            for n, s in (
                (128, 8.309),
                (256, 8.408),
                (512, 8.42),
                (1024, 8.453),
                (2048, 8.49),
            )
        },
    ),
    (
        "h100",
        "15B",
        (2, 1, 1, 1, 2),
        4096,
        {
            n: (4 * n, s)
            for n, s in (
                (16, 2.66),
                (32, 2.66),
                (64, 2.67),
                (128, 2.67),
                (256, 2.68),
                (512, 2.71),
                (1024, 2.74),
                (2048, 2.78),
            )
        },
    ),
    (
        "h100",
        "15B",
        (4, 1, 1, 1, 4),
        4096,
        {
            n: (4 * n, s)
            for n, s in (
                (16, 2.83),
                (32, 2.86),
                (64, 2.86),
                (128, 2.89),
                (256, 2.88),
                (512, 2.92),
                (1024, 2.92),
                (2048, 2.96),
            )
        },
    ),
    (
        "h100",
        "340B",
        (8, 8, 1, 12, 1),
        4096,
        {
            n: (n // 4, s)
            for n, s in ((256, 4.36), (512, 4.39), (1024, 4.41), (2048, 4.43))
        },
    ),
    (
        "gb200",
        "405B",
        (4, 8, 2, 8, 1),
        8192,
        {n: (n // 2, s) for n, s in ((128, 9.347), (256, 9.484), (512, 9.508))},
    ),
    (
        "gb200",
        "340B",
        (8, 4, 1, 12, 1),
        4096,
        {128: (32, 2.189), 256: (64, 2.19), 512: (128, 2.229)},
    ),
    (
        "gb200",
        "340B",
        (8, 4, 1, 12, 1),
        4096,
        {128: (512, 32.66), 256: (512, 16.58), 512: (512, 8.468)},
    ),
)
MAXTEXT = {
    128: 15.563,
    256: 15.444,
    512: 15.519,
    1024: 15.603,
    2048: 15.898,
}  # 70B, two sequences of 8,192 a GPU


@functools.cache
def runs() -> tuple[Run, ...]:
    """Every row."""
    return (*_nemo(), *_maxtext())


def _nemo() -> Iterator[Run]:
    for accelerator, model, (
        tensor,
        pipeline,
        context,
        chunks,
        microbatch,
    ), length, rows in SERIES:
        for devices, (batch, seconds) in rows.items():
            data = devices // tensor // pipeline // context
            layers, virtual = MODELS[model]["layers"], pipeline * chunks
            parallel: dict[str, Any] = {
                "zero_stage": 1,
                "sequence_parallel": tensor > 1,
                "vocab": "edge",
                "microbatches": batch // data // microbatch,
                "schedule": "interleaved" if chunks > 1 else "1f1b",
                "virtual_stages": chunks,
            }
            if virtual > 1 and layers % virtual:
                # 405B: embedding and head stand for a layer each, of 128
                each = (layers + 2) // virtual
                parallel["layer_split"] = [each - 1, *[each] * (virtual - 2), each - 1]
            config = load(
                {
                    "model": MODELS[model],
                    "mesh": {
                        "data": data,
                        "tensor": tensor,
                        "pipeline": pipeline,
                        "context": context,
                    },
                    "parallel": parallel
                    | ({"context_strategy": "ring"} if context > 1 else {}),
                    "precision": {"compute": "bfloat16"},
                    "train": {"global_batch_size": batch, "sequence_length": length},
                }
            )
            layout = " x ".join(map(str, (tensor, pipeline, context)))
            yield Run(
                "NeMo",
                f"{model} on {devices}, {layout}",
                config,
                accelerator,
                NEMO,
                seconds,
                f"{seconds:g} s",
            )


def _maxtext() -> Iterator[Run]:
    for devices, seconds in MAXTEXT.items():
        config = load(
            {
                "model": MODELS["70B"],
                "mesh": {"data": devices},
                "parallel": {
                    "zero_stage": 3,
                    "remat": "full",
                    "zero_hold": False,
                    "microbatches": 1,
                },
                "precision": {"compute": "bfloat16"},
                "train": {"global_batch_size": 2 * devices, "sequence_length": 8192},
            }
        )
        yield Run(
            "MaxText",
            f"70B on {devices}",
            config,
            "h100",
            XLA,
            seconds,
            f"{seconds:g} s",
        )
