"""Published training runs with their speed, as configs that the planner can be held against; `foundry` has more.

Where their figures stand, and what these leave open:

    Megatron 2021   Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM",
                    table 1: A100-80, everything recomputed; TFLOP/s count the recomputation,
                    96 B s L h² (1 + s/6h + V/16Lh). Microbatches and virtual stages: NVIDIA/Megatron-LM,
                    examples/sc21/run_table_1.sh.
    Megatron 2022   Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", tables 3 and 5: A100-80, seconds
                    of a step with everything recomputed, and with sequence parallelism and attention alone recomputed.
    Megatron 2024   README of NVIDIA/Megatron-LM, "Training Speed and Scalability": H100, data parallel 48; TFLOP/s of the model,
                    72 B s L h² (1 + s/6h + V/12Lh). It does not give microbatch and virtual stages: we take chunks of
                    one or two layers and one sequence (two for the smallest model).
    torchtitan      benchmarks/llama3_h100_202412_torchtitan.md, tables 1 and 3: H100 with 96 GB at 500 W; tokens/s a device.
                    "Selective" recomputation keeps attention and every second product.
    torchtitan A100 the same repository's docs/performance.md (2024): FSDP on 64 A100-80, not compiled. Its network is
    not given: we take
                    that of a DGX A100. "Selective layer" recomputes every second layer.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from experiments.bench import LLAMA_3
from meshtrain.cluster.accelerators import ACCELERATORS, Accelerator
from meshtrain.cluster.cluster import named
from meshtrain.config import Config, load
from meshtrain.plan.compute import FrameworkProfile
from meshtrain.plan.estimate import estimate

from .kernels import FLASH_2_AMPERE, FLASH_2_HOPPER

# Kernel by kernel in megatron/core/tensor_parallel/cross_entropy.py: to float32, maximum, difference, exponential, sum,
# division, product with the cotangent, to 16 bits.
MEGATRON_LOSS = 13
# To float32, log_softmax (which reads twice), its backward (which reads two), to 16 bits.
PYTORCH_LOSS = 9
# PyTorch's RMSNorm in bytes of a 16-bit element: to float32 (6), square (8), mean (4), times its root (8), to 16 bits
# (6), times the scale (4).
NORM = 36.0
BY_KERNEL: dict[str, Any] = {
    "norm_bytes": NORM,
    "fused_rotation": False,
    "fused_gate": False,
}
FUSED: dict[str, Any] = {"norm_bytes": 4.0, "fused_rotation": True, "fused_gate": True}
# FSDP2 copies a layer's weights out of the buffer of each of two gathers, and its gradient into a buffer in float32.
FSDP_2_COPIES = 2 * (2 + 2) + (2 + 4)
# In 2021 gradients were added up in float16, later by the product that makes them (gradient accumulation fusion).
# Without a fused kernel, attention writes its scores: FlashAttention came in 2022.
MEGATRON_2021 = FrameworkProfile(
    execution="asynchronous",
    kernel=None,
    loss_passes=MEGATRON_LOSS,
    overlap_pipeline=False,
    scatter_messages=True,
    gradient_bytes=2,
    sum_bytes=6,
    recomputes=(1, 1, 1),
)
MEGATRON_2022 = replace(MEGATRON_2021, sum_bytes=0, recomputes="attention")
MEGATRON_2024 = FrameworkProfile(
    execution="asynchronous",
    loss_passes=MEGATRON_LOSS,
    sum_bytes=0,
    overlap_data=True,
    overlap_tensor=True,
)
EAGER = FrameworkProfile(
    execution="asynchronous",
    overlap_data=True,
    **BY_KERNEL,
    loss_passes=PYTORCH_LOSS,
    copy_bytes=FSDP_2_COPIES,
    kernel=FLASH_2_HOPPER,
    recomputes=(0.5, 0.0, 1.0),
)
COMPILED = replace(EAGER, **FUSED, loss_passes=3)
EAGER_A100 = replace(EAGER, kernel=FLASH_2_AMPERE)
# By what torchtitan recomputes. PyTorch stops recomputing a block once its backward has all it reads: before the last
# product, which is a quarter of those of a Llama's block.
TORCHTITAN_A100 = {
    "selective op": EAGER_A100,
    "selective layer": replace(EAGER_A100, recomputes=(0.375, 0.5, 0.5)),
    "full": replace(EAGER_A100, recomputes=None),
    "none": replace(EAGER_A100, recomputes=(0, 0, 0)),
}


@dataclass(frozen=True)
class Run:
    """A published run: `seconds` is what a step took by the reported speed."""

    source: str
    name: str
    config: Config
    accelerator: str
    profile: FrameworkProfile
    seconds: float
    reported: str
    gib: float | None = None  # memory, where it is reported
    per_node: int | None = (
        # Devices of a node, where not as in the machines that the accelerator is sold in
        None
    )

    def predicted(self, accelerator: Accelerator | None = None) -> float:
        """Seconds of a step by the planner, with what was fitted on such runs or other figures."""
        cluster = named(self.accelerator, self.config.mesh.devices)
        if self.per_node and self.config.mesh.devices > self.per_node:
            nodes = self.config.mesh.devices // self.per_node
            node = replace(cluster.links.node, devices=self.per_node)
            links = replace(cluster.links, node=node)
            cluster = replace(
                cluster, nodes=nodes, devices_per_node=self.per_node, links=links
            )
        known = ACCELERATORS[cluster.accelerator.name]
        given = replace(cluster, accelerator=accelerator or known)
        # None of them took the loss by chunks, as ours would, but those that say so.
        train = self.config.train
        chunk = 2**30 if train.loss_chunk == "auto" else train.loss_chunk
        config = replace(self.config, train=replace(train, loss_chunk=chunk))
        return estimate(config, given, self.profile).seconds


def _gpt(
    shape: tuple[int, int, int],
    vocabulary: int,
    length: int,
    mesh: tuple[int, int, int],
    batch: int,
    microbatch: int,
    chunks: int,
    parallel: dict,
    compute: str,
) -> Config:
    width, layers, heads = shape
    data, tensor, pipeline = mesh
    schedule = "interleaved" if chunks > 1 else "1f1b"
    pieces = {"schedule": schedule, "virtual_stages": chunks, "vocab": "edge"}
    pieces["microbatches"] = batch // data // microbatch
    return load(
        {
            "model": {
                "family": "gpt2",
                "layers": layers,
                "d_model": width,
                "heads": heads,
                "vocab_size": vocabulary,
            },
            "mesh": {"data": data, "tensor": tensor, "pipeline": pipeline},
            "parallel": pieces | parallel,
            "precision": {"compute": compute},
            "train": {"global_batch_size": batch, "sequence_length": length},
        }
    )


class _Megatron(NamedTuple):
    """What all runs of one of NVIDIA's papers have in common; `passes`: how often a layer's products are counted."""

    source: str
    accelerator: str
    profile: FrameworkProfile
    compute: str
    vocabulary: int
    length: int
    passes: int

    def run(
        self,
        name: str,
        shape: tuple[int, int, int],
        layout: tuple[int, int, int, int],
        devices: int,
        batch: int,
        reported: float,
    ) -> Run:
        """`layout` is (tensor, pipeline, virtual stages, sequences a microbatch)."""
        tensor, pipeline, chunks, microbatch = layout
        width, layers, _ = shape
        vocabulary, length = self.vocabulary, self.length
        mesh = (devices // tensor // pipeline, tensor, pipeline)
        if self.passes == 4:
            parallel = {"zero_stage": 0, "remat": "full"}
        else:
            parallel = {"zero_stage": 1, "sequence_parallel": tensor > 1}
        config = _gpt(
            shape,
            vocabulary,
            length,
            mesh,
            batch,
            microbatch,
            chunks,
            parallel,
            self.compute,
        )
        products = 24 * self.passes * batch * length * layers * width**2
        head = vocabulary / (4 * self.passes * layers * width)
        flops = products * (1 + length / (6 * width) + head)
        seconds = flops / (devices * reported * 1e12)
        what = f"{reported:g} TFLOP/s"
        return Run(
            self.source, name, config, self.accelerator, self.profile, seconds, what
        )


# Full recomputation is counted as a pass of its own.
_megatron_2021 = _Megatron(
    "Megatron 2021", "a100-80", MEGATRON_2021, "float16", 51200, 2048, passes=4
).run
_megatron_2024 = _Megatron(
    "Megatron 2024", "h100", MEGATRON_2024, "bfloat16", 131072, 4096, passes=3
).run


def _torchtitan(
    name: str,
    devices: int,
    profile: FrameworkProfile,
    reported: float,
    precision: dict | None = None,
) -> Run:
    batch, length = 2 * devices, 8192
    config = load(
        {
            "model": LLAMA_3["8B"],
            "mesh": {"data": devices},
            "parallel": {"zero_stage": 3, "remat": "dots"},
            "precision": {"compute": "bfloat16", **(precision or {})},
            "train": {"global_batch_size": batch, "sequence_length": length},
        }
    )
    seconds = batch * length / devices / reported
    return Run(
        "torchtitan",
        name,
        config,
        "h100-96",
        profile,
        seconds,
        f"{reported:,.0f} tokens/s",
    )


def _megatron_2022(
    name: str,
    shape: tuple[int, int, int],
    layout: tuple[int, int, int, int],
    batch: int,
    present: bool,
    seconds: float,
) -> Run:
    """`present` is the paper's own way: sequence parallelism, and attention alone recomputed."""
    tensor, pipeline, chunks, microbatch = layout
    parallel = (
        {"remat": "none", "sequence_parallel": True} if present else {"remat": "full"}
    )
    mesh, profile = (
        (1, tensor, pipeline),
        MEGATRON_2022 if present else replace(MEGATRON_2022, recomputes=(1, 1, 1)),
    )
    config = _gpt(
        shape,
        51200,
        2048,
        mesh,
        batch,
        microbatch,
        chunks,
        {"zero_stage": 0} | parallel,
        "float16",
    )
    title = f"{name} {'selective' if present else 'full'}"
    return Run(
        "Megatron 2022", title, config, "a100-80", profile, seconds, f"{seconds:g} s"
    )


def _torchtitan_a100(
    name: str, shape: dict, length: int, batch: int, recomputes: str, reported: float
) -> Run:
    """`batch` is a device's."""
    devices = 64
    config = load(
        {
            "model": shape,
            "mesh": {"data": devices},
            "parallel": {"zero_stage": 3, "remat": "full"},
            "precision": {"compute": "bfloat16"},
            "train": {"global_batch_size": batch * devices, "sequence_length": length},
        }
    )
    title = f"{name} {recomputes}"
    profile = TORCHTITAN_A100[recomputes]
    return Run(
        "torchtitan A100",
        title,
        config,
        "a100-80",
        profile,
        batch * length / reported,
        f"{reported:,.0f} tokens/s",
    )


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

# Rows of sources that the fit knows, which it never sees. The strong scaling of Megatron's README gives MFU only: 47%
# and 42%.
HELD_OUT = (
    _megatron_2021("3.6B", (3072, 30, 32), (2, 1, 1, 16), 64, 512, 138),
    _megatron_2021("18.4B", (6144, 40, 48), (8, 1, 1, 8), 256, 1024, 135),
    _megatron_2021("76.1B", (10240, 60, 80), (8, 4, 3, 2), 1024, 1792, 140),
    _megatron_2021("310.1B", (16384, 96, 128), (8, 16, 2, 1), 1920, 2160, 155),
    _megatron_2021("1008B", (25600, 128, 160), (8, 64, 1, 1), 3072, 3072, 163),
    _megatron_2024("177B on 96", (12288, 96, 96), (8, 6, 8, 1), 96, 1152, 0.47 * 989.4),
    _megatron_2024(
        "177B on 4608", (12288, 96, 96), (8, 6, 8, 1), 4608, 1152, 0.42 * 989.4
    ),
    _torchtitan("8B on 128", 128, EAGER, 5605),
    _torchtitan("8B on 128 compiled", 128, COMPILED, 6514),
)

# Scales a tensor, weights gathered in float8; all layers. No number is fitted on it.
_TENSORWISE = {
    "matmul": "float8",
    "float8_recipe": "tensorwise",
    "float8_wgrad": "float8",
    "float8_skip": [0, 0],
}
# FSDP rounds shards at each gather.
_ROUNDS = replace(COMPILED, rounds_weights_once=False)
FLOAT8 = (
    replace(
        _torchtitan("8B compiled", 8, _ROUNDS, 8532, _TENSORWISE),
        source="torchtitan float8",
    ),
)

_LLAMA_2_13B = {
    "layers": 40,
    "d_model": 5120,
    "heads": 40,
    "d_ff": 13824,
    "vocab_size": 32000,
}
_LLAMA_2_70B = LLAMA_3["70B"] | {"vocab_size": 32000}

# Rows of sources that the fit knows nothing of.
ELSEWHERE = (
    *(
        _megatron_2022(name, shape, layout, batch, present, seconds)
        for name, shape, layout, batch, full, own in (
            ("22B", (6144, 48, 64), (8, 1, 1, 4), 4, 1.42, 1.10),
            ("175B", (12288, 96, 96), (8, 8, 3, 1), 64, 18.13, 13.75),
            ("530B", (20480, 105, 128), (8, 35, 3, 1), 280, 49.05, 37.83),
            ("1T", (25600, 128, 160), (8, 64, 1, 1), 512, 94.42, 71.49),
        )
        for present, seconds in ((False, full), (True, own))
    ),
    _torchtitan_a100("Llama 3 8B", LLAMA_3["8B"], 8192, 1, "selective layer", 2904),
    _torchtitan_a100("Llama 3 8B", LLAMA_3["8B"], 8192, 1, "selective op", 2973),
    _torchtitan_a100("Llama 3 70B", LLAMA_3["70B"], 8192, 1, "full", 331),
    _torchtitan_a100("Llama 2 13B", _LLAMA_2_13B, 4096, 2, "none", 2162),
    _torchtitan_a100("Llama 2 13B", _LLAMA_2_13B, 4096, 2, "selective layer", 1914),
    _torchtitan_a100("Llama 2 13B", _LLAMA_2_13B, 4096, 2, "selective op", 1904),
    _torchtitan_a100("Llama 2 70B", _LLAMA_2_70B, 4096, 1, "selective op", 355),
    _torchtitan_a100("Llama 2 70B", _LLAMA_2_70B, 4096, 2, "full", 353),
)
