"""The work of a step on one device: FLOPs of every matrix product with its shape, and bytes that go through memory.

A product (m, k, n) multiplies [m, k] by [k, n]. Sizes are of one microbatch; the backward of a product is two of the same size.
"""

import functools
from dataclasses import dataclass

from meshtrain.config import Config, ModelConfig
from meshtrain.parallel.placement import stages
from meshtrain.plan import shapes
from meshtrain.plan.cluster.accelerators import Accelerator


@dataclass(frozen=True)
class Practice:
    """How a framework runs a step, in what makes a difference to time. The defaults are this framework's."""

    clock: str = "lockstep"  # or asynchronous: one program per stage
    flash: bool = True  # attention never writes its scores to memory
    fused: bool = True  # a compiler fuses norms, activations and residual sums into few passes
    overlap_data: bool = False  # gradient reduction and weight gathers run beside compute
    overlap_tensor: bool = False  # collectives of tensor parallelism run beside the products they belong to
    overlap_pipeline: bool = True  # messages between stages travel while the stages work on
    scatter_messages: bool = False  # tensor ranks send a share of a message each (Narayanan et al. 2021, section 4.1)
    gradient_bytes: int = 4  # of one element, as summed over data
    recomputes: tuple[float, float, float] | None = None  # shares of products, attention, memory; None: as remat says


OURS = Practice()


@dataclass(frozen=True)
class Seconds:
    """Compute time of a piece of work on one device, by what bounds it."""

    matmul: float = 0.0
    attention: float = 0.0
    memory: float = 0.0

    def __add__(self, other: "Seconds") -> "Seconds":
        return Seconds(self.matmul + other.matmul, self.attention + other.attention, self.memory + other.memory)

    def __mul__(self, factor: float) -> "Seconds":
        return Seconds(self.matmul * factor, self.attention * factor, self.memory * factor)

    @property
    def total(self) -> float:
        return self.matmul + self.attention + self.memory


def product(accelerator: Accelerator, dtype: str, m: float, k: float, n: float) -> float:
    """Seconds of one matrix product: by the roofline (Williams et al. 2009), with a rate that falls with every short side."""
    efficiency, size = accelerator.efficiency, shapes.itemsize(dtype)
    slowed = 1 + efficiency.half_size * (1 / m + 1 / k + 1 / n)
    compute = 2 * m * k * n / (accelerator.flops(dtype) * efficiency.matmul) * slowed
    moved = size * (m * k + k * n + m * n) / (accelerator.bandwidth * 1e9 * efficiency.memory)
    return max(compute, moved)


@functools.lru_cache(maxsize=65536)
def layer_forward(
    model: ModelConfig,
    accelerator: Accelerator,
    dtype: str,
    sequences: int,
    length: int,
    tensor: int,
    sequence_parallel: bool,
    practice: Practice = OURS,
) -> Seconds:
    """One layer forward on one device."""
    n, size = sequences * length, shapes.itemsize(dtype)
    d, k, f = model.d_model, model.head_dim or 1, -(-(model.d_ff or 1) // tensor)
    heads, groups = model.heads // tensor, model.kv_heads or model.heads
    groups = groups // tensor if groups % tensor == 0 else groups
    gated = model.family == "llama"
    dots = [(n, d, heads * k), (n, d, 2 * groups * k), (n, heads * k, d), (n, f, d)] + [(n, d, f)] * (1 + gated)
    matmul = sum(product(accelerator, dtype, *shape) for shape in dots)

    scores = sequences * heads * length * length
    rate = accelerator.flops(dtype) * accelerator.efficiency.attention
    if practice.flash:
        attention, score_bytes = 4 * k * scores / 2 / rate, 0.0
    else:  # both products in full; scores written, scaled, masked, normalised and read again
        attention = 4 * k * scores / (accelerator.flops(dtype) * accelerator.efficiency.matmul)
        score_bytes = (4 * size + 1) * scores
    # passes over the residual stream: two norms and two sums; over the inner activations: rotation of q and k, the MLP's own
    split = tensor if sequence_parallel else 1
    passes = 10 if practice.fused else 22
    inner = (2 * (heads + groups) * k + (3 if gated else 2) * f) * (1 if practice.fused else 2)
    moved = size * n * (passes * d / split + inner) + score_bytes
    return Seconds(matmul, attention, moved / (accelerator.bandwidth * 1e9 * accelerator.efficiency.memory))


def layer_backward(forward: Seconds, flash: bool = True) -> Seconds:
    """Twice every product; flash attention computes the scores again (FlashAttention, section 3.1: 2.5 times the forward)."""
    return Seconds(2 * forward.matmul, (2.5 if flash else 2.0) * forward.attention, 2 * forward.memory)


def recomputed(config: Config, forward: Seconds, practice: Practice = OURS) -> Seconds:
    """What the backward computes again of a layer's forward."""
    if practice.recomputes is not None:
        products, attention, memory = practice.recomputes
        return Seconds(products * forward.matmul, attention * forward.attention, memory * forward.memory)
    remat = config.parallel.remat
    if remat == "none":
        return Seconds()
    if remat == "dots":
        return Seconds(0.0, forward.attention, forward.memory)
    if remat == "full":
        return forward
    kept = set(config.parallel.remat_keep) | set(config.parallel.remat_offload)
    return Seconds(forward.matmul, 0.0 if "attention" in kept else forward.attention, forward.memory)


@functools.lru_cache(maxsize=65536)
def head(
    model: ModelConfig, accelerator: Accelerator, dtype: str, tokens: int, ways: int, practice: Practice = OURS
) -> Seconds:
    """Final norm, logits, cross-entropy and their backward, the vocabulary shared by `ways` devices."""
    rows = -(-model.vocab_size // ways)
    matmul = 3 * product(accelerator, dtype, tokens, model.d_model, rows)
    passes = 3 if practice.fused else 7  # over float32 logits
    moved = 4.0 * tokens * rows * passes + 8 * shapes.itemsize(dtype) * tokens * model.d_model
    return Seconds(matmul, 0.0, moved / (accelerator.bandwidth * 1e9 * accelerator.efficiency.memory))


def optimizer(config: Config, accelerator: Accelerator, elements: float) -> float:
    """Seconds to read gradient, master and state of this device's share of `elements`, and write master and state."""
    moved = 4 * (3 * elements + 2 * shapes.optimizer_state(config, stages(config).on_device))
    return moved / (accelerator.bandwidth * 1e9 * accelerator.efficiency.memory)
