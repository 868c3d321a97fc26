"""Every weight of a model, in one table without JAX: its name, the axes of its dimensions, its shape, how it begins.

The modules of `model` make their parameters from it, `parallel.placement` says where each lies on a mesh, the planner
counts them, and checkpoints name them. The blocks' weights are stacked along a first axis `layers`, whatever the mesh;
where layers are of several kinds those of each kind in a stack of their own (`config.stacks`).
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from meshtrain.config.model import (
    PROJECTIONS,
    LoraConfig,
    ModelConfig,
    patches_of,
    projections,
)
from meshtrain.config.stacks import (
    BLOCKS,
    FULL,
    KINDS,
    LINEAR,
    kind_of,
    last_of_stacks,
    layers_of_stacks,
    model_of_stack,
)
from meshtrain.families import FAMILIES

Sizes = tuple[tuple[str, int], ...]  # of each axis
Add = Callable[..., None]  # adds a weight to the table of all

EXPERT_BLOCK = 128  # the most rows of a block of an expert (`model.experts`)
# what a router counts besides the tokens of each expert: rows dropped or rounds, and the sum of its entropies
COUNTED = 2
GOLDEN_RATIO = 0.5 * (5**0.5 - 1)


def lie_side_by_side(slots: int, experts: int, width: int) -> bool:
    """Returns whether gate and up of `experts` are one product of so many slots on GPUs: to put the weights side by
    side, forward and backward, moves less than the sum of two gradients of the rows, three passes.
    """
    return 8 * experts * width < 3 * slots


@dataclass(frozen=True)
class Weight:
    """One weight of the canonical layout."""

    name: str  # its path in the tree of parameters
    dims: Sizes  # (axis, size) of each dimension, of one layer
    std: float  # of its normal initialisation; 0: all are `fill`
    fill: float | tuple[float, ...] = 0.0
    layers: int = 0  # that are stacked; 0: it stands outside the blocks
    adapter: bool = False  # of LoRA
    bound: float = 0.0  # of its uniform initialisation, in the place of a normal one
    float32: bool = False  # it computes in float32, whatever the others do: a router's
    # Its gradient is no gradient but what a router counted (`model.experts`)
    counts: bool = False

    @property
    def stacked(self) -> bool:
        return self.layers > 0

    @property
    def axes(self) -> tuple[str, ...]:
        return ("layers",) * self.stacked + tuple(axis for axis, _ in self.dims)

    @property
    def shape(self) -> tuple[int, ...]:
        layers = (self.layers,) * self.stacked
        return layers + tuple(n for _, n in self.dims)

    @property
    def size(self) -> int:
        """Elements, of all layers."""
        return math.prod(self.shape)

    @property
    def decayed(self) -> bool:
        """Weight decay applies: to matrices, not to norms and biases."""
        return self.std > 0 or self.adapter


def adapted(model: ModelConfig, lora: LoraConfig) -> tuple[str, ...]:
    """Returns the projections that have adapters, of a resolved config, in layers of any stack."""
    if not lora.rank:
        return ()
    return tuple(
        name
        for name in PROJECTIONS
        if name in projections(model) and (not lora.targets or name in lora.targets)
    )


@functools.lru_cache(maxsize=256)
def adapters(model: ModelConfig, lora: LoraConfig) -> tuple[Weight, ...]:
    """LoRA's two factors of each adapted projection W (Hu et al. 2021): y = x W + scale (x A) B, with A [inputs, rank],
    B [rank, outputs].

        blocks.attention.q        [embed, heads, head]
        blocks.attention.q_lora_a [embed, rank]   uniform within 1 / sqrt(inputs), as PEFT begins it
        blocks.attention.q_lora_b [rank, heads, head]   zeros, so that a run begins with the model itself

    They lie as W does: what splits W's outputs splits B, what splits its inputs splits A.
    """
    factors: list[Weight] = []
    for stack, layers in layers_of_stacks(model).items():
        of_layer = _adapters_of_layer(model_of_stack(model, stack), lora)
        factors += _rename_to_stack(of_layer, stack, layers)
    return tuple(factors)


def _adapters_of_layer(model: ModelConfig, lora: LoraConfig) -> list[Weight]:
    """Returns the adapters of layers that are all alike, below `blocks`."""
    base = {weight.name: weight for weight in _list_layer(model)}
    rank = ("rank", lora.rank)
    factors = []
    for name in adapted(model, lora):
        module = "attention" if name in ("q", "k", "v", "out") else "mlp"
        if (weight := base.get(f"{BLOCKS}.{module}.{name}")) is None:
            continue
        # the inputs are the first dimension, but for what gathers the heads
        cut = 1
        if weight.axes[-1] == "embed":
            cut = len(weight.dims) - 1
        inputs = weight.dims[:cut]
        outputs = weight.dims[cut:]
        bound = math.prod(n for _, n in inputs) ** -0.5
        a = Weight(
            f"{weight.name}_lora_a", (*inputs, rank), 0.0, adapter=True, bound=bound
        )
        b = Weight(f"{weight.name}_lora_b", (rank, *outputs), 0.0, adapter=True)
        factors += [a, b]
    return factors


def _rename_to_stack(
    weights: Sequence[Weight], stack: str, layers: Sequence[int]
) -> list[Weight]:
    """Returns the weights of a layer, below `blocks`, as those of all layers of a stack."""
    return [
        replace(w, name=stack + w.name.removeprefix(BLOCKS), layers=len(layers))
        for w in weights
    ]


def lora_difference(
    model: ModelConfig, one: LoraConfig, other: LoraConfig
) -> str | None:
    """Returns the first key by which two sections make other adapters, or scale them otherwise; None if they do not."""
    for name in ("rank", "alpha", "rslora"):
        if getattr(one, name) != getattr(other, name):
            return name
    # whatever the order in which they are named; none named are all
    if adapted(model, one) != adapted(model, other):
        return "targets"
    return None


def lora_scale(lora: LoraConfig) -> float:
    """Returns the factor of an adapter's product."""
    return lora.alpha / (lora.rank**0.5 if lora.rslora else lora.rank)


def is_trained(weight: Weight, lora: LoraConfig, trainable: Sequence[str]) -> bool:
    """Returns whether a weight is trained: an adapter; others where `trainable` matches, or is empty and there are no
    adapters.
    """
    if trainable and not weight.adapter:
        return any(fnmatchcase(weight.name, pattern) for pattern in trainable)
    return weight.adapter or not lora.rank


@functools.lru_cache(maxsize=256)
def weights(model: ModelConfig) -> tuple[Weight, ...]:
    """The weights of a resolved config's model.

    A module draws its own in this order, so that a seed gives the same numbers for ever.
    """
    family = FAMILIES[model.family]
    table = WeightTable(model)
    add = table.add
    embed = ("embed", model.d_model)
    vocab = ("vocab", model.vocab_size)
    std = model.init_std
    if family.images:
        _patches(model, add)
    else:
        add("embedding.tokens", (vocab, embed), std)
    if family.positions == "learned":
        add("embedding.positions", (("positions", model.max_positions), embed), std)
    for stack, layers in layers_of_stacks(model).items():
        table.weights += _rename_to_stack(
            _list_layer(model_of_stack(model, stack)), stack, layers
        )
    table.norm("head.norm")
    if not model.tied_head:
        add("head.weight", (embed, vocab), std)
    if family.head_bias:
        add("head.bias", (vocab,))
    of_layer = _list_layer(last_of_stacks(model))
    for depth in range(model.mtp):
        at = f"mtp.depth_{depth}"
        for name in ("embedding_norm", "stream_norm", "norm"):
            table.norm(f"{at}.{name}")
        add(f"{at}.project", (("joined", 2 * model.d_model), embed), std)
        table.weights += [
            replace(w, name=f"{at}.block{w.name.removeprefix(BLOCKS)}")
            for w in of_layer
        ]
    return tuple(table.weights)


class WeightTable:
    """The weights of a model as they are listed."""

    def __init__(self, model: ModelConfig) -> None:
        self.model = model
        self.weights: list[Weight] = []

    def add(
        self,
        name: str,
        dims: Sizes,
        std: float = 0.0,
        fill: float = 0.0,
        **kind: Any,
    ) -> None:
        """Adds a weight, of one layer."""
        self.weights.append(Weight(name, dims, std, fill, **kind))

    def norm(self, name: str) -> None:
        """Adds the weights of a norm over the stream."""
        embed = ("embed", self.model.d_model)
        self.add(
            f"{name}.scale", (embed,), fill=0.0 if self.model.norm_plus_one else 1.0
        )
        if FAMILIES[self.model.family].centred_norms:
            self.add(f"{name}.bias", (embed,))


@functools.lru_cache(maxsize=256)
def _list_layer(model: ModelConfig) -> Sequence[Weight]:
    """Returns the weights of one layer, below `blocks`, of a model whose layers are all alike."""
    table = WeightTable(model)
    norm = table.norm
    norm("blocks.attention_norm")
    kind = kind_of(model)
    (KINDS[kind].add_weights or ADD_MIXER[kind])(model, table.add)
    if model.post_norms:
        norm("blocks.attention_post_norm")
    norm("blocks.mlp_norm")
    if model.moe.experts:
        _add_experts(model, table.add)
    _add_mlp(model, table.add)
    if model.post_norms:
        norm("blocks.mlp_post_norm")
    return table.weights


def _add_experts(model: ModelConfig, add: Add) -> None:
    """Adds the weights of experts and of their router, below `blocks.experts`."""
    family = FAMILIES[model.family]
    std = model.init_std
    embed = ("embed", model.d_model)
    number = model.moe.experts
    experts = ("experts", number)
    width = ("mlp", model.expert_width)
    add("blocks.experts.router", (embed, ("routes", number)), std, float32=True)
    add(
        "blocks.experts.load",
        (("routes", number + COUNTED),),
        float32=True,
        counts=True,
    )
    add("blocks.experts.gate", (experts, embed, width), std)
    add("blocks.experts.up", (experts, embed, width), std)
    add("blocks.experts.down", (experts, width, embed), _std_into_stream(model))
    if family.biased_experts:
        add("blocks.experts.router_bias", (("routes", number),), float32=True)
        add("blocks.experts.gate_bias", (experts, width))
        add("blocks.experts.up_bias", (experts, width))
        add("blocks.experts.down_bias", (experts, embed))


def _add_mlp(model: ModelConfig, add: Add) -> None:
    """Adds the weights of the MLP, beside experts that of shared ones, below `blocks.mlp`."""
    family = FAMILIES[model.family]
    std = model.init_std
    embed = ("embed", model.d_model)
    mlp = ("mlp", model.d_ff)
    if family.gated and model.d_ff:
        add("blocks.mlp.gate", (embed, mlp), std)
    if model.d_ff:
        add("blocks.mlp.up", (embed, mlp), std)
        add("blocks.mlp.down", (mlp, embed), _std_into_stream(model))
    if family.gated_shared_experts and model.moe.experts and model.d_ff:
        add("blocks.mlp.token_gate", (embed, ("one", 1)), std)
    if family.biases:
        add("blocks.mlp.up_bias", (mlp,))
        add("blocks.mlp.down_bias", (embed,))


def _std_into_stream(model: ModelConfig) -> float:
    """Returns the standard deviation of a product into the residual stream, to which every layer adds two (GPT-2)."""
    return model.init_std / (2 * model.layers) ** 0.5


def _add_attention(model: ModelConfig, add: Add) -> None:
    """Adds the weights of attention, below `blocks.attention`."""
    family = FAMILIES[model.family]
    std = model.init_std
    embed = ("embed", model.d_model)
    heads = ("heads", model.heads)
    groups = ("kv_heads", model.kv_heads)
    head = ("head", model.head_dim)
    one = 0.0 if model.norm_plus_one else 1.0
    if model.mla.kv_rank:
        _add_latent(model, add)
    else:
        add("blocks.attention.q", (embed, heads, head), std)
        add("blocks.attention.k", (embed, groups, head), std)
        add("blocks.attention.v", (embed, groups, head), std)
    width = ("head", model.value_width)
    add("blocks.attention.out", (heads, width, embed), _std_into_stream(model))
    if model.qkv_bias:
        add("blocks.attention.q_bias", (heads, head))
        add("blocks.attention.k_bias", (groups, head))
        add("blocks.attention.v_bias", (groups, head))
    if family.biases or family.biased_out:
        add("blocks.attention.out_bias", (embed,))
    if family.gated_attention:
        add("blocks.attention.z", (embed, heads, head), std)
    if family.sinks:
        add("blocks.attention.sinks", (heads,))
    if model.qk_norm:
        each = not family.joint_qk_norm
        add(
            "blocks.attention.q_norm.scale",
            (head,) if each else (heads, head),
            fill=one,
        )
        add(
            "blocks.attention.k_norm.scale",
            (head,) if each else (groups, head),
            fill=one,
        )


def _add_latent(model: ModelConfig, add: Add) -> None:
    """Adds the weights of latent attention but for its output's: down to what all heads share, and up to each head.

        q_down  [embed, latent]          q_norm  [latent]    q_up  [latent, heads, nope + rope]
        kv_down [embed, latent + rope]   kv_norm [latent]    k_up  [latent, heads, nope]
                                                             v_up  [latent, heads, value]

    Where q_rank is 0, q [embed, heads, nope + rope] stands in the place of the first line.
    """
    mla = model.mla
    embed = ("embed", model.d_model)
    heads = ("heads", model.heads)
    head = ("head", model.head_dim)
    one = 0.0 if model.norm_plus_one else 1.0
    at = "blocks.attention."
    if mla.q_rank:
        latent = ("latent", mla.q_rank)
        add(f"{at}q_down", (embed, latent), model.init_std)
        add(f"{at}q_norm.scale", (latent,), fill=one)
        add(f"{at}q_up", (latent, heads, head), model.init_std)
    else:
        add(f"{at}q", (embed, heads, head), model.init_std)
    latent = ("latent", mla.kv_rank)
    add(f"{at}kv_down", (embed, ("latent", mla.kv_rank + mla.rope)), model.init_std)
    add(f"{at}kv_norm.scale", (latent,), fill=one)
    add(f"{at}k_up", (latent, heads, ("head", mla.nope)), model.init_std)
    add(f"{at}v_up", (latent, heads, ("head", mla.value)), model.init_std)


def _add_linear_attention(model: ModelConfig, add: Add) -> None:
    """Adds the weights of linear attention, below `blocks.attention`; a head is one of keys or, with its own state, one
    of values.

        decay = -exp(decay_log) softplus(x decay + decay_bias), so that heads begin with memories of different lengths

        kda       decay_down [embed, latent], decay_up [latent, heads, K] in the place of decay, decay_bias [heads, K];
                  likewise z
        mamba2    no beta; q, k, v_conv_bias, skip [heads], norm.scale [heads, V]
    """
    linear = model.linear
    std = model.init_std
    mamba2 = linear.kind == "mamba2"
    embed = ("embed", model.d_model)
    keys = (("heads", linear.key_heads), ("head", linear.key_dim))
    (heads, _) = values = (("heads", linear.value_heads), ("head", linear.value_dim))
    reach = ("conv", linear.conv)
    decays = (heads, ("head", linear.key_dim)) if linear.latent else (heads,)
    of_qkv = (("q", keys), ("k", keys), ("v", values))
    for name, of in of_qkv:
        add(f"blocks.attention.{name}", (embed, *of), std)
    _add_gate("z", values, model, add)
    for name, of in of_qkv:
        # no matrix: an optimizer of matrices leaves it out
        add(f"blocks.attention.{name}_conv", (reach, *of), bound=linear.conv**-0.5)
        if mamba2:
            add(f"blocks.attention.{name}_conv_bias", of)
    if mamba2:
        add("blocks.attention.skip", (heads,), fill=1.0, float32=True)
    else:
        add("blocks.attention.beta", (embed, heads), std)
    _add_gate("decay", decays, model, add)
    _add_decays(decays, add)
    add("blocks.attention.norm.scale", values if mamba2 else values[1:], fill=1.0)
    add("blocks.attention.out", (*values, embed), _std_into_stream(model))


def _add_gate(
    name: str,
    of: Sizes,
    model: ModelConfig,
    add: Add,
) -> None:
    inputs = ("embed", model.d_model)
    if model.linear.latent:
        latent = ("latent", model.linear.latent)
        add(f"blocks.attention.{name}_down", (inputs, latent), model.init_std)
        inputs = latent
        name += "_up"
    add(f"blocks.attention.{name}", (inputs, *of), model.init_std)


def _add_decays(decays: Sizes, add: Add) -> None:
    """Adds the weights that turn numbers of heads, or of each head's channels, into decays."""
    heads = decays[0][1]
    parts = [(head + 0.5) / heads for head in range(heads)]
    rates = tuple(math.log(16 * part) for part in parts)
    # from 0.001 to 0.1 after the softplus, in another order than the rates; kda's differ by channel
    channels = decays[-1][1]
    steps = (0.001 * 100 ** (GOLDEN_RATIO * (n + 0.5) % 1) for n in range(channels))
    biases = tuple(math.log(math.expm1(step)) for step in steps)
    add("blocks.attention.decay_log", decays[:1], fill=rates, float32=True)
    add("blocks.attention.decay_bias", decays, fill=biases, float32=True)


ADD_MIXER: dict[str, Add] = {
    FULL: _add_attention,
    LINEAR: _add_linear_attention,
}


def _patches(model: ModelConfig, add: Add) -> None:
    """Returns the weights that turn images into a stream, initialised as the code of Dosovitskiy et al. 2021 does: the
    projection as a layer of so many inputs, the class token with zeros.

        embedding.patches     [patch, embed]   rows: a patch's numbers, in the order row, column, channel
        embedding.bias        [embed]
        embedding.class_token [embed]          where model.pool is class
    """
    embed = ("embed", model.d_model)
    (_, numbers) = patches_of(model)
    add("embedding.patches", (("patch", numbers), embed), numbers**-0.5)
    add("embedding.bias", (embed,))
    if model.pool == "class":
        add("embedding.class_token", (embed,))


def parameters(model: ModelConfig) -> int:
    """Returns the number of parameters, without any padding."""
    return sum(weight.size for weight in weights(model))


def all_weights(model: ModelConfig, lora: LoraConfig) -> tuple[Weight, ...]:
    """Returns the weights of a tuned model: its own, then LoRA's."""
    return (*weights(model), *adapters(model, lora))


def trained_text(model: ModelConfig, lora: LoraConfig, trainable: Sequence[str]) -> str:
    """Returns how many of the parameters are trained, in words that follow their number; nothing where all are."""
    weights = all_weights(model, lora)
    trained = [weight for weight in weights if is_trained(weight, lora, trainable)]
    if len(trained) == len(weights):
        return ""
    of = ""
    if lora.rank and not trainable:
        of = f" (adapters of rank {lora.rank})"
    return f", {sum(weight.size for weight in trained):,} trained{of}"
