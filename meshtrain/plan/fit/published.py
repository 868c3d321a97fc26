"""Published training runs with their speed, as configs that the planner can be held against.

Where their figures stand, and what these leave open:

    Megatron 2021   Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM",
                    table 1: A100-80, everything recomputed; TFLOP/s count the recomputation,
                    96 B s L h² (1 + s/6h + V/16Lh). Microbatch and virtual stages of rows that are not in `FITTED` are our guess.
    Megatron 2024   README of NVIDIA/Megatron-LM, "Training Speed and Scalability": H100, data parallel 48; TFLOP/s of the model,
                    72 B s L h² (1 + s/6h + V/12Lh). It does not give microbatch and virtual stages: we take chunks of one or two
                    layers and one sequence (two for the smallest model).
    torchtitan      benchmarks/llama3_h100_202412_torchtitan.md, tables 1 and 3: H100 with 96 GB at 500 W; tokens/s a device.
                    "Selective" recomputation keeps attention and every second product.
"""

from dataclasses import dataclass, replace

from meshtrain.config import Config, load
from meshtrain.plan.cluster.accelerators import Accelerator
from meshtrain.plan.cluster.cluster import named
from meshtrain.plan.compute import Practice
from meshtrain.plan.estimate import estimate

MEGATRON_2021 = Practice(
    clock="asynchronous", flash=False, overlap_pipeline=False, scatter_messages=True, gradient_bytes=2, recomputes=(1, 1, 1),
)  # fmt: skip
MEGATRON_2024 = Practice(clock="asynchronous", overlap_data=True, overlap_tensor=True)
EAGER = Practice(clock="asynchronous", overlap_data=True, fused=False, recomputes=(0.5, 0.0, 1.0))
COMPILED = replace(EAGER, fused=True)


@dataclass(frozen=True)
class Run:
    """A published run: `seconds` is what a step took by the reported speed."""

    source: str
    name: str
    config: Config
    accelerator: str
    practice: Practice
    seconds: float
    reported: str

    def predicted(self, accelerator: Accelerator | None = None) -> float:
        """Seconds of a step by the planner, with the accelerator's own figures or others."""
        cluster = named(self.accelerator, self.config.mesh.devices)
        given = replace(cluster, accelerator=accelerator or cluster.accelerator)
        return estimate(self.config, given, self.practice).seconds


def _gpt(
    shape: tuple[int, int, int], vocabulary: int, length: int, mesh: tuple[int, int, int], batch: int, microbatch: int,
    chunks: int, parallel: dict, compute: str,
) -> Config:  # fmt: skip
    width, layers, heads = shape
    data, tensor, pipeline = mesh
    schedule = "interleaved" if chunks > 1 else "1f1b"
    pieces = {"schedule": schedule, "virtual_stages": chunks, "vocab": "edge"}
    pieces["microbatches"] = batch // data // microbatch
    return load(
        {
            "model": {"family": "gpt2", "layers": layers, "d_model": width, "heads": heads, "vocab_size": vocabulary},
            "mesh": {"data": data, "tensor": tensor, "pipeline": pipeline},
            "parallel": pieces | parallel,
            "precision": {"compute": compute},
            "train": {"global_batch_size": batch, "sequence_length": length},
        }
    )


def _megatron_2021(name: str, shape: tuple[int, int, int], layout: tuple[int, int, int, int], devices: int, batch: int, reported: float) -> Run:  # fmt: skip
    """`layout` is (tensor, pipeline, virtual stages, sequences a microbatch)."""
    tensor, pipeline, chunks, microbatch = layout
    width, layers, _ = shape
    vocabulary, length = 51200, 2048
    mesh = (devices // tensor // pipeline, tensor, pipeline)
    parallel = {"zero_stage": 0, "remat": "full"}
    config = _gpt(shape, vocabulary, length, mesh, batch, microbatch, chunks, parallel, "float16")
    flops = 96 * batch * length * layers * width**2 * (1 + length / (6 * width) + vocabulary / (16 * layers * width))
    seconds = flops / (devices * reported * 1e12)
    return Run("Megatron 2021", name, config, "a100-80", MEGATRON_2021, seconds, f"{reported:g} TFLOP/s")


def _megatron_2024(name: str, shape: tuple[int, int, int], layout: tuple[int, int, int, int], devices: int, batch: int, reported: float) -> Run:  # fmt: skip
    tensor, pipeline, chunks, microbatch = layout
    width, layers, _ = shape
    vocabulary, length = 131072, 4096
    mesh = (devices // tensor // pipeline, tensor, pipeline)
    parallel = {"zero_stage": 1, "sequence_parallel": tensor > 1}
    config = _gpt(shape, vocabulary, length, mesh, batch, microbatch, chunks, parallel, "bfloat16")
    flops = 72 * batch * length * layers * width**2 * (1 + length / (6 * width) + vocabulary / (12 * layers * width))
    seconds = flops / (devices * reported * 1e12)
    return Run("Megatron 2024", name, config, "h100", MEGATRON_2024, seconds, f"{reported:g} TFLOP/s")


def _torchtitan(name: str, devices: int, practice: Practice, reported: float) -> Run:
    batch, length = 2 * devices, 8192
    config = load(
        {
            "model": {
                "layers": 32, "d_model": 4096, "heads": 32, "kv_heads": 8, "d_ff": 14336, "vocab_size": 128256,
            },
            "mesh": {"data": devices},
            "parallel": {"zero_stage": 3, "remat": "dots"},
            "precision": {"compute": "bfloat16"},
            "train": {"global_batch_size": batch, "sequence_length": length},
        }
    )  # fmt: skip
    seconds = batch * length / devices / reported
    return Run("torchtitan", name, config, "h100-96", practice, seconds, f"{reported:,.0f} tokens/s")


# The rows that the efficiency numbers are fitted on.
FITTED = (
    _megatron_2021("1.7B", (2304, 24, 24), (1, 1, 1, 16), 32, 512, 137),
    _megatron_2021("7.5B", (4096, 36, 32), (4, 1, 1, 16), 128, 512, 142),
    _megatron_2021("39.1B", (8192, 48, 64), (8, 2, 1, 4), 512, 1536, 138),
    _megatron_2021("145.6B", (12288, 80, 96), (8, 8, 2, 2), 1536, 2304, 148),
    _megatron_2021("529.6B", (20480, 105, 128), (8, 35, 3, 1), 2520, 2520, 163),
    _megatron_2024("1.7B", (2048, 24, 16), (1, 1, 1, 2), 48, 192, 408.8),
    _megatron_2024("16B", (6144, 32, 48), (4, 1, 1, 1), 192, 192, 489.1),
    _megatron_2024("70B", (8192, 84, 64), (8, 2, 21, 1), 768, 384, 419.7),
    _megatron_2024("177B", (12288, 96, 96), (8, 6, 8, 1), 2304, 1152, 432.8),
    _megatron_2024("462B", (18432, 112, 144), (8, 16, 7, 1), 6144, 3072, 459.9),
    _torchtitan("8B", 8, EAGER, 5762),
    _torchtitan("8B compiled", 8, COMPILED, 6667),
)

# Rows of the same sources that the fit never sees. The strong scaling of Megatron's README gives MFU only: 47% and 42%.
HELD_OUT = (
    _megatron_2021("3.6B", (3072, 30, 32), (2, 1, 1, 16), 64, 512, 138),
    _megatron_2021("18.4B", (6144, 40, 48), (8, 1, 1, 4), 256, 1024, 135),
    _megatron_2021("76.1B", (10240, 60, 80), (8, 4, 1, 2), 1024, 1792, 140),
    _megatron_2021("310.1B", (16384, 96, 128), (8, 16, 3, 1), 1920, 2160, 155),
    _megatron_2021("1008B", (25600, 128, 160), (8, 64, 2, 1), 3072, 3072, 163),
    _megatron_2024("177B on 96", (12288, 96, 96), (8, 6, 8, 1), 96, 1152, 0.47 * 989.4),
    _megatron_2024("177B on 4608", (12288, 96, 96), (8, 6, 8, 1), 4608, 1152, 0.42 * 989.4),
    _torchtitan("8B on 128", 128, EAGER, 5605),
    _torchtitan("8B on 128 compiled", 128, COMPILED, 6514),
)
