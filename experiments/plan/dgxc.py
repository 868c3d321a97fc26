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
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from experiments.bench import MODELS, config_of
from meshtrain.plan.compute import FrameworkProfile

from . import PUBLISHED
from .published import Run

NVIDIA = MODELS["NVIDIA"]

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


@functools.cache
def runs() -> tuple[Run, ...]:
    """Every row."""
    return (*_nemo(), *_maxtext())


def _nemo() -> Iterator[Run]:
    for accelerator, model, layout, length, rows in PUBLISHED["nemo"]:
        *degrees, chunks, microbatch = layout
        tensor, pipeline, context = degrees
        virtual = pipeline * chunks
        for devices, (batch, seconds) in rows.items():
            data = devices // math.prod(degrees)
            parallel: dict[str, Any] = {
                "zero_stage": 1,
                "sequence_parallel": tensor > 1,
                "vocab": "edge",
                "microbatches": batch // data // microbatch,
                "schedule": "interleaved" if chunks > 1 else "1f1b",
                "virtual_stages": chunks,
            }
            if NVIDIA[model]["layers"] % virtual:
                # 405B: embedding and head stand for a layer each, of 128
                each = (NVIDIA[model]["layers"] + 2) // virtual
                parallel["layer_split"] = [each - 1, *[each] * (virtual - 2), each - 1]
            if context > 1:
                parallel["context_strategy"] = "ring"
            mesh = {"data": data, "tensor": tensor, "pipeline": pipeline}
            mesh["context"] = context
            config = config_of(NVIDIA[model], mesh, batch, length, parallel)
            name = f"{model} on {devices}, {' x '.join(map(str, degrees))}"
            yield Run(
                "NeMo", name, config, accelerator, NEMO, seconds, f"{seconds:g} s"
            )


def _maxtext() -> Iterator[Run]:
    parallel = {"zero_stage": 3, "remat": "full", "zero_hold": False, "microbatches": 1}
    for devices, seconds in PUBLISHED["maxtext"].items():
        rows = 2 * devices
        config = config_of(NVIDIA["70B"], {"data": devices}, rows, 8192, parallel)
        name = f"70B on {devices}"
        yield Run("MaxText", name, config, "h100", XLA, seconds, f"{seconds:g} s")
