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

from experiments.bench import LLAMA_3, MODELS, config_of
from meshtrain.cluster.accelerators import ACCELERATORS, Accelerator
from meshtrain.cluster.cluster import named
from meshtrain.config import Config, replaced
from meshtrain.plan.compute import FrameworkProfile
from meshtrain.plan.estimate import estimate

from . import PUBLISHED
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


def _megatron_config(
    shape: tuple[int, int, int],
    layout: tuple[int, int, int, int],
    devices: int,
    batch: int,
    length: int,
    vocabulary: int,
    compute: str,
    **parallel: Any,
) -> Config:
    """`layout` is (tensor, pipeline, virtual stages, sequences a microbatch)."""
    width, layers, heads = shape
    tensor, pipeline, chunks, microbatch = layout
    data = devices // tensor // pipeline
    model = {"family": "gpt2", "layers": layers, "d_model": width, "heads": heads}
    pieces = {
        "schedule": "interleaved" if chunks > 1 else "1f1b",
        "virtual_stages": chunks,
        "vocab": "edge",
        "microbatches": batch // data // microbatch,
    }
    return config_of(
        model | {"vocab_size": vocabulary},
        {"data": data, "tensor": tensor, "pipeline": pipeline},
        batch,
        length,
        pieces | parallel,
        compute,
    )


class _Paper(NamedTuple):
    """What all runs of one of NVIDIA's papers have in common; `passes`: how often a layer's products are counted."""

    accelerator: str
    profile: FrameworkProfile
    compute: str
    vocabulary: int
    length: int
    passes: int


_PAPERS = {
    # Full recomputation is counted as a pass of its own.
    "Megatron 2021": _Paper("a100-80", MEGATRON_2021, "float16", 51200, 2048, 4),
    "Megatron 2024": _Paper("h100", MEGATRON_2024, "bfloat16", 131072, 4096, 3),
}


def _megatron(
    source: str,
    name: str,
    shape: tuple[int, int, int],
    layout: tuple[int, int, int, int],
    devices: int,
    batch: int,
    reported: float,
) -> Run:
    accelerator, profile, compute, vocabulary, length, passes = _PAPERS[source]
    width, layers, _ = shape
    parallel: dict[str, Any] = {"zero_stage": 1, "sequence_parallel": layout[0] > 1}
    if passes == 4:
        parallel = {"zero_stage": 0, "remat": "full"}
    config = _megatron_config(
        shape, layout, devices, batch, length, vocabulary, compute, **parallel
    )
    products = 24 * passes * batch * length * layers * width**2
    head = vocabulary / (4 * passes * layers * width)
    flops = products * (1 + length / (6 * width) + head)
    seconds = flops / (devices * reported * 1e12)
    what = f"{reported:g} TFLOP/s"
    return Run(source, name, config, accelerator, profile, seconds, what)


def _megatron_2022(
    name: str,
    shape: tuple[int, int, int],
    layout: tuple[int, int, int, int],
    batch: int,
    present: bool,
    seconds: float,
) -> Run:
    """`present` is the paper's own way: sequence parallelism, and attention alone recomputed."""
    parallel = {"remat": "full"}
    profile = replace(MEGATRON_2022, recomputes=(1, 1, 1))
    if present:
        parallel = {"remat": "none", "sequence_parallel": True}
        profile = MEGATRON_2022
    config = _megatron_config(
        shape,
        layout,
        layout[0] * layout[1],
        batch,
        2048,
        51200,
        "float16",
        zero_stage=0,
        **parallel,
    )
    title = f"{name} {'selective' if present else 'full'}"
    told = f"{seconds:g} s"
    return Run("Megatron 2022", title, config, "a100-80", profile, seconds, told)


def _torchtitan(
    name: str,
    devices: int,
    profile: FrameworkProfile,
    reported: float,
    source: str = "torchtitan",
    **precision: Any,
) -> Run:
    parallel = {"zero_stage": 3, "remat": "dots"}
    mesh = {"data": devices}
    config = config_of(LLAMA_3["8B"], mesh, 2 * devices, 8192, parallel)
    config = replaced(config, precision=precision) if precision else config
    told = f"{reported:,.0f} tokens/s"
    return Run(source, name, config, "h100-96", profile, 2 * 8192 / reported, told)


def _torchtitan_a100(
    whose: str, name: str, length: int, batch: int, recomputes: str, reported: float
) -> Run:
    """`batch` is a device's."""
    parallel = {"zero_stage": 3, "remat": "full"}
    config = config_of(MODELS[whose][name], {"data": 64}, batch * 64, length, parallel)
    return Run(
        "torchtitan A100",
        f"{whose} {name} {recomputes}",
        config,
        "a100-80",
        TORCHTITAN_A100[recomputes],
        batch * length / reported,
        f"{reported:,.0f} tokens/s",
    )


def _of_teams_that_are_fitted(which: str) -> tuple[Run, ...]:
    return (
        *(_megatron(*row) for row in PUBLISHED["megatron"][which]),
        *(
            _torchtitan(name, devices, COMPILED if compiled else EAGER, speed)
            for name, devices, compiled, speed in PUBLISHED["torchtitan"][which]
        ),
    )


# The rows that the efficiency numbers are fitted on.
FITTED = _of_teams_that_are_fitted("fitted")
# Rows of sources that the fit knows, which it never sees.
HELD_OUT = _of_teams_that_are_fitted("held out")

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
    _torchtitan("8B compiled", 8, _ROUNDS, 8532, "torchtitan float8", **_TENSORWISE),
)

# Rows of sources that the fit knows nothing of.
ELSEWHERE = (
    *(
        _megatron_2022(*row, present, seconds)
        for *row, full, own in PUBLISHED["megatron 2022"]
        for present, seconds in ((False, full), (True, own))
    ),
    *(_torchtitan_a100(*row) for row in PUBLISHED["torchtitan a100"]),
)
