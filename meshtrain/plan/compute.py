"""The work of a step on one device: FLOPs of every matrix product with its shape, and bytes that go through memory.

A product (m, k, n) multiplies [m, k] by [k, n]. Sizes are of one microbatch; the backward of a product is two of the
same size.
"""

import functools
import math
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

from meshtrain.cluster.accelerators import Accelerator
from meshtrain.config import Config, ModelConfig
from meshtrain.config.model import LoraConfig, patches_of
from meshtrain.config.reduce import gathers_at_use
from meshtrain.config.stacks import LINEAR, kind_of
from meshtrain.families import FAMILIES
from meshtrain.model.kernels import BLOCK, WIDTHS_APART, attention_kernel
from meshtrain.model.weights import adapters as lora_weights
from meshtrain.model.weights import is_trained, weights
from meshtrain.parallel.placement import local_kv_heads, stages
from meshtrain.plan import shapes


@dataclass(frozen=True)
class Kernel:
    """A kernel of attention that never writes its scores.

    On a GPU and on sequences of `length` tokens its forward reaches

        rate / (1 + half_length / length)

    of the peak, where only the half of the scores that is not masked is counted: blocks on the diagonal are computed
    whole, and short loops do not fill the device's pipelines. `experiments/plan/kernels.py` reads the numbers from
    published tables; width of heads hardly shows in them.
    """

    rate: float | None = None  # none: Efficiency.attention, which is cuDNN's
    backward: float = 0.84  # rate of the backward on long sequences, in the forward's
    half_length: float = 340.0
    half_length_backward: float = 700.0
    share: float = 1.0  # of the rate

    def slowed(self, accelerator: Accelerator, length: int) -> tuple[float, float]:
        """Returns how much longer forward and backward take than at the forward's rate on long sequences."""
        if accelerator.platform != "gpu":  # nothing is known of their kernels' lengths
            return 1.0, 1.0
        return 1 + self.half_length / length, (
            1 + self.half_length_backward / length
        ) / self.backward


CUDNN = Kernel()
# Triton's rate beside cuDNN's on an H100, heads of 128, rows of 1,024 to 16,384: 0.64 to 0.66 (Shah et al. 2024, figure
# 5). Our own kernel has not been measured.
FUSED = Kernel(share=0.65)
# Bytes an element of the output in a step over context: operands picked, read and written; the kernel's output read,
# and merged with the float32 one in two halves.
MERGED = 14
# Passes over q and k of a rotation in PyTorch's own kernels: times the cosine (2), halves swapped (4), times the sine
# (2), the sum (3); over the MLP's width of a gate: silu (2), product (3).
ROTATION = 11
GATE = 5


@dataclass(frozen=True)
class FrameworkProfile:
    """How a framework runs a step, in what makes a difference to time. The defaults are this framework's."""

    execution: str = "lockstep"  # or asynchronous: one program per stage
    kernel: Kernel | None = CUDNN  # none: attention writes its scores to memory
    # that a norm reads and writes of a 16-bit element: one kernel reads it and writes it
    norm_bytes: float = 4.0
    fused_rotation: bool = True  # the rotation of q and k is one kernel
    fused_gate: bool = True  # so is the MLP's gate
    # over the float32 logits of cross-entropy and its backward, in reads or writes of all of them
    loss_passes: float = 3
    # tensor ranks gather the logits, and each takes the loss of the whole vocabulary
    whole_logits: bool = False
    # Gradient reduction and weight gathers run beside compute
    overlap_data: bool = False
    # collectives of tensor parallelism run beside the products they belong to
    overlap_tensor: bool = False
    # sums over tensor of the cotangents of a layer's inputs: one for each product that reads them by itself
    input_sums: int = 2
    # rows of the fullest device's experts, over the mean: of a balanced router
    imbalance: float = 1.1
    # Messages of experts travel beside another microbatch's products
    overlap_expert: bool = False
    # a row of several experts is sent to each node once, and there to each device once, by kernels that put it where
    # its experts take it (DeepEP, HybridEP)
    token_per_node: bool = False
    # in which the host waits for the counts of rows before it launches a layer's experts
    expert_wait: float = 0.0
    # in which the host launches the kernels of a layer with experts, of a pass, which takes no less
    expert_launch: float = 0.0
    # to add a bias to a 16-bit element of what goes into an expert's activation, and of its output: XLA reads it and
    # writes it
    bias_bytes: tuple[float, float] = (4.0, 4.0)
    # with sequence parallelism the inputs are gathered again for the weights' gradients, not kept whole
    regathers: bool = True
    # Messages between stages travel while the stages work on
    overlap_pipeline: bool = True
    # tensor ranks send a share of a message each (Narayanan et al. 2021, section 4.1)
    scatter_messages: bool = False
    gradient_bytes: int = 4  # of one element, as summed over data
    # to add one element of a microbatch's gradient: it is read, and the float32 sum read and written
    sum_bytes: int = 10
    # weights of products in float8 are rounded once a step, else in each microbatch
    rounds_weights_once: bool = True
    # to round an element of what products take; None: it is read for the scale and for the cast, and written as a byte,
    # 5 of a 16-bit one. 1 where norm and gate write float8 themselves.
    cast_bytes: float | None = None
    # to transpose an element that was rounded, for a product that sums over its other dimension: it is read and
    # written; 0 where casts write both orders
    transposed_bytes: float = 2.0
    # of one element of weights and gradient, out of and into the buffers of collectives
    copy_bytes: int = 0
    # as our program: with its copies, and what XLA lets collectives travel under
    compiled: bool = False
    # fractions of products, attention, memory; or attention alone, with its passes over memory; None: as our remat does
    recomputes: tuple[float, float, float] | Literal["attention"] | None = None


DEFAULT_PROFILE = FrameworkProfile(compiled=True)


@dataclass(frozen=True)
class Seconds:
    """Compute time of a piece of work on one device, by what bounds it."""

    matmul: float = 0.0
    attention: float = 0.0
    memory: float = 0.0

    def __add__(self, other: "Seconds") -> "Seconds":
        return Seconds(
            self.matmul + other.matmul,
            self.attention + other.attention,
            self.memory + other.memory,
        )

    def __mul__(self, factor: float) -> "Seconds":
        return Seconds(
            self.matmul * factor, self.attention * factor, self.memory * factor
        )

    @property
    def total(self) -> float:
        return self.matmul + self.attention + self.memory


def product(
    accelerator: Accelerator, dtype: str, m: float, k: float, n: float
) -> float:
    """Seconds of one matrix product: by the roofline (Williams et al. 2009), with a rate that falls with every short
    side.
    """
    efficiency = accelerator.efficiency
    size = shapes.itemsize(dtype)
    slowed = 1 + efficiency.half_size * (1 / m + 1 / k + 1 / n)
    compute = 2 * m * k * n / (accelerator.flops(dtype) * efficiency.matmul) * slowed
    moved = size * (m * k + k * n + m * n) / accelerator.memory_rate
    return max(compute, moved)


@dataclass(frozen=True)
class Layer:
    """One layer forward on one device, in the parts that its backward may have to compute again."""

    norms: Seconds  # all of them
    qkv: Seconds
    attention: Seconds
    attention_out: Seconds  # the product
    residual: Seconds  # the sum with attention's output
    mlp_in: Seconds  # the products into the MLP
    mlp_hidden: Seconds  # its activation alone
    # Product and sum, which no backward needs but that of a norm behind them
    mlp_out: Seconds
    dispatched: Seconds = Seconds()  # rows to the slots of their experts

    @functools.cached_property
    def forward(self) -> Seconds:
        """All of them."""
        return sum(vars(self).values(), Seconds())


class LayerShape(NamedTuple):
    """The sizes of one layer's work on one device.

    `context` devices share the `length` tokens of a sequence. Attention's kernel is called for `kernel_length` of them,
    0 for all; if they are not all, its outputs are merged step by step.
    """

    model: ModelConfig
    dtype: str
    sequences: int
    length: int
    tensor: int = 1
    sequence_parallel: bool = False
    context: int = 1
    kernel_length: int = 0
    gathered: int = 1  # context ranks of whose latents keys and values are made here


def head_products(
    model: ModelConfig, tensor: int, gathered: int = 1
) -> list[tuple[int, int]]:
    """Returns the inputs and outputs of a layer's products into heads, on a tensor rank; of latents of several context
    ranks, which are as many rows more, as many outputs more.
    """
    heads = model.heads // tensor
    mla = model.mla
    into = [(model.d_model, heads * model.head_dim)]
    if not mla.kv_rank:
        groups = local_kv_heads(model.kv_heads, tensor)
        return [*into, (model.d_model, 2 * groups * model.head_dim)]
    if mla.q_rank:
        into = [(model.d_model, mla.q_rank), (mla.q_rank, heads * model.head_dim)]
    up = gathered * heads * (mla.nope + mla.value)
    return [*into, (model.d_model, mla.kv_rank + mla.rope), (mla.kv_rank, up)]


@functools.lru_cache(maxsize=65536)
def layer(
    shape: LayerShape,
    accelerator: Accelerator,
    profile: FrameworkProfile = DEFAULT_PROFILE,
) -> Layer:
    """Returns the time of one layer forward on one device."""
    model = shape.model
    dtype = shape.dtype
    tensor = shape.tensor
    n = shape.sequences * shape.length // shape.context
    size = shapes.itemsize(dtype)
    d = model.d_model
    f = -(-model.d_ff // tensor)
    family = FAMILIES[model.family]
    gated = family.gated

    products = partial(_products, accelerator, dtype)
    passes = lambda elements: Seconds(
        memory=size * n * elements / accelerator.memory_rate
    )
    # Passes over the residual stream: two for a norm, three for a sum; over the inner activations: rotation of q and k,
    # the MLP's own. Kernel by kernel an RMSNorm, a rotation and a gate are many passes; LayerNorm and GELU are one
    # kernel anywhere. Without sequence parallelism every tensor rank has the whole stream.
    stream = d / (tensor if shape.sequence_parallel else 1)
    norm = stream * (2.0 if family.centred_norms else profile.norm_bytes / 2)
    activation = (3 if profile.fused_gate else GATE) if gated else 2
    mixer = _linear_mixer if kind_of(model) == LINEAR else _attention_mixer
    return Layer(
        norms=passes((4 if model.post_norms else 2) * norm),
        **mixer(shape, accelerator, profile),
        residual=passes(3 * stream),
        mlp_in=products(*[(n, d, f)] * (1 + gated)),
        mlp_hidden=passes(activation * f),
        # f is 0 if a layer has experts alone (`plan.experts`)
        mlp_out=products((n, f, d)) + passes(3 * stream),
    )


def _products(
    accelerator: Accelerator, dtype: str, *dots: tuple[int, int, int]
) -> Seconds:
    return Seconds(
        matmul=sum(product(accelerator, dtype, *dot) for dot in dots if all(dot))
    )


def _attention_mixer(
    shape: LayerShape, accelerator: Accelerator, profile: FrameworkProfile
) -> dict[str, Seconds]:
    """Returns the parts of a layer that are attention's."""
    model = shape.model
    n = shape.sequences * shape.length // shape.context
    k = model.head_dim
    heads = model.heads // shape.tensor
    groups = local_kv_heads(model.kv_heads, shape.tensor)
    family = FAMILIES[model.family]
    products = partial(_products, accelerator, shape.dtype)
    rotation = 2 if profile.fused_rotation or not family.rotary else ROTATION
    # what attention gives is read, with its gate, and written
    gated = family.gated_attention
    moved = rotation * (heads + groups) * k * model.rope_share + 3 * gated * heads * k
    passes = Seconds(
        memory=shapes.itemsize(shape.dtype) * n * moved / accelerator.memory_rate
    )
    return {
        "qkv": products(
            *(
                (n, *sides)
                for sides in head_products(model, shape.tensor, shape.gathered)
            ),
            *[(n, model.d_model, heads * k)] * gated,
        )
        + passes,
        "attention": _merged_attention(shape, accelerator, profile),
        "attention_out": products((n, heads * model.value_width, model.d_model)),
    }


# What the rule's forward reads and writes (`shapes.rule_numbers`), read off programs for a described H100, with chunks
# of 32 and 64, widths of 64 and 128. It bounds the rule, products do not; and its backward, which begins with a forward
# of its own, as much beside it as that of attention's kernel does (2.4 to 3.4 times).
RULE_MOVES = {
    "gated_delta": (10.8, 18.7, 4.8, 9.4),
    "kda": (41.5, 19.6, 43.7, 9.9),
    "mamba2": (5.5, 15.0, 10.1, 9.0),
}


def _linear_mixer(
    shape: LayerShape, accelerator: Accelerator, profile: FrameworkProfile
) -> dict[str, Seconds]:
    """Returns the parts of a layer that are linear attention's (`model.delta_rule`).

    On several context ranks each piece of a row is gone through for its map too.
    """
    sizes = shape.model.linear
    d = shape.model.d_model
    n = shape.sequences * shape.length // shape.context
    heads = sizes.value_heads // shape.tensor
    values = heads * sizes.value_dim
    columns = sizes.value_dim + (shape.context > 1) * sizes.key_dim
    moved = (
        4
        * heads
        * n
        * shapes.rule_numbers(RULE_MOVES[sizes.kind], sizes, columns, columns)
    )
    products = partial(_products, accelerator, shape.dtype)
    rows = shapes.itemsize(shape.dtype) * n * 3 * values
    gates = [(n, d, values), (n, d, heads * sizes.gates)]
    if sizes.latent:
        gates = [
            (n, d, 2 * sizes.latent + heads),
            (n, sizes.latent, values + heads * sizes.key_dim),
        ]
    return {
        "qkv": products(
            (n, d, 2 * (sizes.key_heads // shape.tensor * sizes.key_dim)),
            (n, d, values),
            *gates,
        ),
        "attention": Seconds(
            attention=moved / accelerator.memory_rate,
            memory=rows / accelerator.memory_rate,
        ),
        "attention_out": products((n, values, d)),
    }


def _merged_attention(
    shape: LayerShape, accelerator: Accelerator, profile: FrameworkProfile
) -> Seconds:
    """Returns the time of attention forward, and of merging the outputs of the kernel's calls."""
    model = shape.model
    n = shape.sequences * shape.length // shape.context
    heads = model.heads // shape.tensor
    length = shape.kernel_length or shape.length
    scores = n * heads * shapes.seen(model, shape.length)
    causal = FAMILIES[model.family].causal
    width = multiplied_width(model, accelerator.platform)
    seconds = attention(
        accelerator, shape.dtype, width, length, scores, profile, causal
    )
    if length < shape.length:
        k = model.value_width
        seconds += Seconds(
            memory=MERGED * n * heads * k * shape.context / accelerator.memory_rate
        )
    return seconds


def attention(
    accelerator: Accelerator,
    dtype: str,
    width: float,
    length: int,
    scores: float,
    profile: FrameworkProfile,
    causal: bool = True,
) -> Seconds:
    """Attention forward over `scores` elements of the whole square, of sequences of `length` tokens and heads of
    `width` elements.

    A kernel leaves out the half that is masked, where attention is `causal`.
    """
    flops = accelerator.flops(dtype)
    efficiency = accelerator.efficiency
    size = shapes.itemsize(dtype)
    if kernel := profile.kernel:
        slowed, _ = kernel.slowed(accelerator, looped(length, causal))
        products = 4 * width * (scores / 2 if causal else scores) * slowed
        rate = kernel.share * (kernel.rate or efficiency.attention)
        return Seconds(attention=products / (flops * rate))
    # Both products in full. Passes over the scores: 6 and a byte of dropout's mask forward (product, softmax and
    # dropout write them, and each is read), 9 and a byte backward. A backward counts as two forwards here, so a forward
    # as a third of both.
    moved = scores * (15 * size + 2) / 3
    spent = scores / length**2 * 2 * product(accelerator, dtype, length, width, length)
    return Seconds(attention=spent, memory=moved / accelerator.memory_rate)


def multiplied_width(model: ModelConfig, platform: str) -> float:
    """Returns the mean width of keys and values as attention's products take them: of a kernel that knows of one width
    the larger.
    """
    both = model.head_dim, model.value_width
    kernel = attention_kernel(platform, "bfloat16", max(both), BLOCK, False, False)
    return sum(both) / 2 if kernel in WIDTHS_APART else max(both)


def looped(length: int, causal: bool) -> int:
    """The length of the causal sequence over which a kernel's loops are as long: they are half of it there, in the
    mean.
    """
    return length if causal else 2 * length


def trained_share(config: Config) -> float:
    """The share of a layer's products with weights, by FLOPs, whose weights are trained."""
    return _trained_share(config.model, config.lora, config.train.trainable)


@functools.lru_cache(maxsize=64)
def _trained_share(
    model: ModelConfig, lora: LoraConfig, trainable: tuple[str, ...]
) -> float:
    matrices = [
        weight for weight in weights(model) if weight.stacked and weight.decayed
    ]
    trained = sum(
        shapes.active_size(model, w) for w in matrices if is_trained(w, lora, trainable)
    )
    return trained / sum(shapes.active_size(model, w) for w in matrices)


def adapters(config: Config, accelerator: Accelerator) -> Seconds:
    """LoRA's products of one layer and microbatch forward, on one device: what splits a projection's inputs or outputs
    splits its factor's.
    """
    seconds = Seconds()
    n = shapes.tokens(config)
    tensor = config.mesh.tensor
    for weight in lora_weights(config.model, config.lora):
        sides = [n for axis, n in weight.dims if axis != "rank"]
        split = tensor if {axis for axis, _ in weight.dims} & {"heads", "mlp"} else 1
        width = math.prod(sides) / split
        rank = config.lora.rank
        shape = (n, width, rank) if weight.bound else (n, rank, width)
        seconds += Seconds(
            matmul=product(accelerator, config.precision.compute, *shape)
        )
    return seconds


def layer_backward(
    forward: Seconds,
    accelerator: Accelerator,
    length: int,
    profile: FrameworkProfile = DEFAULT_PROFILE,
    share: float = 1.0,
) -> Seconds:
    """Every pass twice, and every product, but once where its weight is frozen (all but a `share`).

    A kernel of attention computes the scores again, 2.5 times the FLOPs (FlashAttention, section 3.1); `length` is as
    it is `looped`.
    """
    attention = 2.0
    if kernel := profile.kernel:
        slowed, slowed_backward = kernel.slowed(accelerator, length)
        attention = 2.5 * slowed_backward / slowed
    return Seconds(
        (1 + share) * forward.matmul, attention * forward.attention, 2 * forward.memory
    )


def weight_passes(
    config: Config,
    accelerator: Accelerator,
    profile: FrameworkProfile = DEFAULT_PROFILE,
) -> Seconds:
    """Passes over memory of one microbatch for the weights and gradients of one layer, beside its products.

    A gradient that is scattered at once costs as much as one that is added up: it is read, and written and sent in
    float32.
    """
    block = shapes.resident(config).block
    moved = 0.0
    if config.parallel.microbatches > 1:
        moved += profile.sum_bytes * shapes.trained(config).block.full
    if gathers_at_use(config):
        moved += profile.copy_bytes * block.full
    return Seconds(memory=moved / accelerator.memory_rate)


def recomputed(
    config: Config, layer: Layer, profile: FrameworkProfile = DEFAULT_PROFILE
) -> Seconds:
    """The part of a layer's forward that the backward computes again: what it reads and was not kept."""
    if profile.recomputes == "attention":
        return layer.attention
    if profile.recomputes is not None:
        products, attention, memory = profile.recomputes
        forward = layer.forward
        return Seconds(
            products * forward.matmul,
            attention * forward.attention,
            memory * forward.memory,
        )
    parallel = config.parallel
    if parallel.remat == "none":
        return Seconds()
    if parallel.remat == "dots":
        return Seconds(0.0, layer.forward.attention, layer.forward.memory)
    kept = {*parallel.names_kept, *parallel.remat_offload}
    names = (
        "qkv",
        "attention",
        "attention_out",
        "dispatched",
        "mlp_in",
        "mlp_hidden",
        *["mlp_out"] * config.model.post_norms,
    )
    parts = {name: getattr(layer, name) for name in names}
    again = layer.norms + layer.residual
    return sum((part for name, part in parts.items() if name not in kept), again)


@functools.lru_cache(maxsize=65536)
def head(
    model: ModelConfig,
    accelerator: Accelerator,
    dtype: str,
    tokens: int,
    degree: int,
    profile: FrameworkProfile = DEFAULT_PROFILE,
    trained: bool = True,
) -> Seconds:
    """Final norm, logits, cross-entropy and their backward, the vocabulary shared by `degree` devices."""
    rows = -(-model.vocab_size // degree)
    labels = shapes.labels(model, tokens)
    seen = model.vocab_size if profile.whole_logits else rows
    matmul = (2 + trained) * product(accelerator, dtype, labels, model.d_model, rows)
    moved = 4.0 * labels * seen * profile.loss_passes
    moved += 8 * shapes.itemsize(dtype) * shapes.read(model, tokens) * model.d_model
    return Seconds(matmul, 0.0, moved / accelerator.memory_rate)


@functools.lru_cache(maxsize=65536)
def embedding(
    model: ModelConfig,
    accelerator: Accelerator,
    dtype: str,
    tokens: int,
    degree: int,
    trained: bool = True,
) -> Seconds:
    """Patches to the stream, and the gradient of their weights, the numbers of a patch shared by `degree` devices;
    nothing of text, whose rows are looked up.
    """
    if not FAMILIES[model.family].images:
        return Seconds()
    number, size = patches_of(model)
    shape = (shapes.labels(model, tokens) * number, -(-size // degree), model.d_model)
    return Seconds(matmul=(1 + trained) * product(accelerator, dtype, *shape))


def head_forward(
    model: ModelConfig, accelerator: Accelerator, dtype: str, tokens: int, degree: int
) -> Seconds:
    """Final norm, logits and cross-entropy alone: the logits are written and read once."""
    rows = -(-model.vocab_size // degree)
    moved = (
        2 * 4.0 * tokens * rows + 4 * shapes.itemsize(dtype) * tokens * model.d_model
    )
    return Seconds(
        product(accelerator, dtype, tokens, model.d_model, rows),
        0.0,
        moved / accelerator.memory_rate,
    )


def optimizer(
    config: Config,
    accelerator: Accelerator,
    elements: float,
    profile: FrameworkProfile = DEFAULT_PROFILE,
) -> float:
    """Seconds to read gradient, master and state of this device's share of `elements`, and write master and state.

    Our program also sets the gradients' sums to zero. It reorders them from the order that matmuls leave to the order
    of the shards, and gathered weights the other way: it reads and writes all once in float32, and once in the compute
    dtype.
    """
    moved = 4 * (
        3 * elements + 2 * shapes.optimizer_state(config, stages(config).on_device)
    )
    own_program = profile.compiled and accelerator.platform == "gpu"
    gathered_at_once = (
        config.mesh.shards > 1
        and config.parallel.zero_stage
        and not gathers_at_use(config)
    )
    if own_program and gathered_at_once:
        resident = shapes.trained(config)
        elements_gathered = (
            resident.block.full * stages(config).on_device + resident.outer.full
        )
        moved += (4 + 8 + 2 * shapes.compute_size(config)) * elements_gathered
    return moved / accelerator.memory_rate
