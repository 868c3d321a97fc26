"""The model that is trained: the sections `model` and `lora`."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from meshtrain.config.key import Resume, key
from meshtrain.config.stacks import KINDS, LINEAR
from meshtrain.errors import ConfigError, listed_divisors, nearest, short
from meshtrain.families import ACTIVATIONS as FUNCTIONS
from meshtrain.families import FAMILIES, period_of, yarn_amplitude

REFUSED = Resume.REFUSED
SHAPE = Resume.SHAPE
SIZE = Resume.SIZE
ADAPTERS = Resume.ADAPTERS
FUNCTION = Resume.FUNCTION

# What LoRA may adapt, in the order in which a layer has it.
PROJECTIONS = ("q", "k", "v", "out", "gate", "up", "down")
# Those of latent attention, in which the weights of a product are followed by others'.
LATENT_PROJECTIONS = ("q_down", "q_up", "kv_down", "k_up", "v_up")


def _head_dim(config: Any) -> int:
    model = config.model
    if model.mla.kv_rank:
        return int(model.mla.nope + model.mla.rope)
    if model.d_model % model.heads:
        raise ConfigError(
            f"model.d_model {model.d_model} does not divide into model.heads {model.heads}; "
            f"give model.head_dim, or heads that divide it: {listed_divisors(model.d_model)}."
        )
    return model.d_model // model.heads


def _family_default(name: str) -> Callable[[Any], Any]:
    return lambda config: getattr(FAMILIES[config.model.family], name)


def _pattern(config: Any) -> tuple[str, ...]:
    """Returns the family's pattern, as far as the layers go."""
    pattern = FAMILIES[config.model.family].pattern[: config.model.layers]
    if pattern:
        return period_of(pattern)
    return ()


def _query_scalar(config: Any) -> float:
    """As published for latent attention, yarn makes scores larger and not cos and sin (DeepSeek-V2, section 3.1.4)."""
    model = config.model
    stretched = model.mla.kv_rank and model.rope_scaling == "yarn"
    return float(
        model.head_dim / (yarn_amplitude(model.rope_factor) ** 4 if stretched else 1.0)
    )


_of_images = _family_default("images")


def _has_experts(config: Any) -> bool:
    return config.model.moe.experts > 0


def _is_latent(config: Any) -> bool:
    return config.model.mla.kv_rank > 0


def patches_of(model: "ModelConfig") -> tuple[int, int]:
    """Returns (N, P): patches of an image, and numbers of a patch."""
    return (
        model.image_size // model.patch_size
    ) ** 2, model.patch_size**2 * model.channels


def positions_of(model: "ModelConfig") -> int:
    """Returns the positions of an image: its patches, and the class token where there is one; 0 for text."""
    if not FAMILIES[model.family].images:
        return 0
    return patches_of(model)[0] + (model.pool == "class")


def _d_ff(config: Any) -> int:
    model = config.model
    if model.moe.experts:
        return model.moe.shared_experts * model.expert_width
    return FAMILIES[model.family].d_ff(model.d_model)


def problems(model: "ModelConfig") -> Iterator[str]:
    """Yields a sentence on keys of a resolved section that contradict each other."""
    family = FAMILIES[model.family]
    positions = positions_of(model)
    yield from _expert_problems(model)
    yield from _latent_problems(model)
    yield from _stack_problems(model)
    if model.heads % model.kv_heads:
        legal = listed_divisors(model.heads)
        yield f"model.kv_heads {model.kv_heads} does not divide model.heads {model.heads}; legal are {legal}."
    if family.rotary and (turned := model.head_dim * model.rope_share) % 2:
        numbers = f"model.head_dim {model.head_dim} times model.rope_share {model.rope_share:g}"
        if model.rope_share == 1:
            numbers = "model.head_dim"
        yield f"{numbers} is {turned:g}; rotary positions turn pairs of numbers, so it must be even."
    if model.window and not family.causal:
        but = f"but in {family.name} attention goes both ways, and a window reaches back only"
        yield f"model.window is {model.window}, {but}; leave it out."
    for name in ("tied_head", "scaled_embedding") if family.images else ():
        if getattr(model, name):
            but = f"but {family.name} reads patches, and has no embedding of tokens"
            yield f"model.{name} is true, {but}; leave it out."
    if (
        family.images
        and family.positions == "learned"
        and model.max_positions != positions
    ):
        but = f"but an image has {positions} positions"
        yield f"model.max_positions is {model.max_positions}, {but}; leave it out, and it follows."


def _latent_problems(model: "ModelConfig") -> Iterator[str]:
    mla = model.mla
    family = FAMILIES[model.family]
    if not mla.kv_rank:
        if given := [f"{name} {n}" for name, n in vars(mla).items() if n]:
            yield f"model.mla has {given[0]}, but no kv_rank, by which attention is latent; give it, or leave mla out."
        return
    if not family.rotary or family.biases or family.biased_out or family.sinks:
        yield f"model.mla.kv_rank is {mla.kv_rank}, which model.family {family.name} has no form of; leave it out."
    if missing := [
        name for name in ("nope", "rope", "value") if not getattr(mla, name)
    ]:
        yield f"model.mla.kv_rank is {mla.kv_rank}, but model.mla.{missing[0]} is 0; give it at least 1."
    if mla.rope % 2:
        yield f"model.mla.rope is {mla.rope}; rotary positions turn pairs of numbers, so it must be even."
    legal = {
        "head_dim": mla.nope + mla.rope,
        "kv_heads": model.heads,
        "qkv_bias": False,
        "qk_norm": False,
    }
    for name, value in legal.items():
        if getattr(model, name) != value:
            yield (
                f"model.{name} is {str(getattr(model, name)).lower()}, but with model.mla.kv_rank {mla.kv_rank} it is "
                f"{str(value).lower()}; leave it out."
            )


def projections(model: "ModelConfig") -> list[str]:
    """Returns the projections of a layer that may have adapters: of experts those that every token is computed by, of
    latent attention what no other product with the same weight follows.
    """
    if not FAMILIES[model.family].gated:
        lacks = {"gate"}
    elif model.d_ff or model.dense_layers:
        lacks = set()
    else:
        lacks = {"gate", "up", "down"}
    if model.mla.kv_rank:
        lacks = {"k", "v", *lacks, *(("q",) if model.mla.q_rank else ())}
    return [name for name in PROJECTIONS if name not in lacks]


def _expert_problems(model: "ModelConfig") -> Iterator[str]:
    moe = model.moe
    family = FAMILIES[model.family]
    if moe.balance not in BALANCE:
        why = nearest(moe.balance, BALANCE) or "."
        if moe.balance == "batch":
            why = (
                ": a loss over a batch changes with its microbatches and the mesh; sequence is over each sequence, "
                "bias by the load of a whole step."
            )
        yield f"model.moe.balance is {short(repr(moe.balance))}; it must be one of {', '.join(BALANCE)}{why}"
    if not moe.experts:
        if not model.d_ff:
            yield "model.d_ff is 0; without model.moe.experts it must be at least 1."
        return
    if not family.gated or family.biases:
        gated = ", ".join(
            name for name, other in FAMILIES.items() if other.gated and not other.biases
        )
        yield (
            f"model.moe.experts is {moe.experts}, but the MLP of {family.name} is not gated, or has biases; legal "
            f"are {gated}."
        )
    if moe.top_k > moe.experts:
        yield f"model.moe.top_k is {moe.top_k}, but there are {moe.experts} experts; legal are at most so many."
    if model.d_ff != moe.shared_experts * model.expert_width:
        yield f"model.d_ff is {model.d_ff}, but an expert's width is model.moe.d_ff; leave model.d_ff out."
    if moe.groups and (
        len(moe.groups) != 2
        or moe.experts % moe.groups[0]
        or moe.groups[1] > moe.groups[0]
        or moe.experts // moe.groups[0] < 2
        or moe.experts // moe.groups[0] * moe.groups[1] < moe.top_k
    ):
        yield (
            f"model.moe.groups is {short(list(moe.groups))}; it must be two numbers, groups that divide the "
            f"{moe.experts} experts into two or "
            f"more each, and how many of them a token chooses from, which must hold its top_k {moe.top_k} experts."
        )
    if moe.groups and moe.router != "sigmoid":
        yield (
            f"model.moe.groups is given, but model.moe.router is {moe.router}; groups are chosen by scores of "
            "sigmoid."
        )


def _stack_problems(model: "ModelConfig") -> Iterator[str]:
    if model.dense_layers and not model.moe.experts:
        but = "but without model.moe.experts all layers are dense"
        yield f"model.dense_layers is {model.dense_layers}, {but}; leave it out."
    if model.dense_layers >= model.layers:
        but = f"but of model.layers {model.layers} one at least has experts"
        yield f"model.dense_layers is {model.dense_layers}, {but}; legal are at most {model.layers - 1}."
    for kind in model.pattern:
        if kind not in KINDS:
            legal = f"legal are {', '.join(KINDS)}"
            yield f"model.pattern has {short(repr(kind))}; {legal}{nearest(kind, KINDS) or '.'}"
    if LINEAR in model.pattern:
        yield from _linear_problems(model)
    if len(model.pattern) > model.layers:
        but = f"but there are model.layers {model.layers}"
        yield f"model.pattern has {len(model.pattern)} kinds, {but}; legal are at most so many."


def _linear_problems(model: "ModelConfig") -> Iterator[str]:
    linear = model.linear
    family = FAMILIES[model.family]
    if not family.causal or not family.rotary:
        legal = ", ".join(
            name for name, other in FAMILIES.items() if other.causal and other.rotary
        )
        reads = "has learned positions" if family.causal else "reads in both directions"
        yield f"model.pattern has linear, but model.family {family.name} {reads}; legal are {legal}."
    if linear.value_heads % linear.key_heads:
        yield (
            f"model.linear.key_heads {linear.key_heads} does not divide model.linear.value_heads "
            f"{linear.value_heads}; legal are {listed_divisors(linear.value_heads)}."
        )
    if linear.chunk & (linear.chunk - 1):
        yield f"model.linear.chunk is {linear.chunk}; it must be a power of two."


# Losses and rules that keep the experts' loads even and are the same on every mesh.
BALANCE = ("none", "sequence", "bias")


# A key keeps together what it says.
# fmt: off
@dataclass(frozen=True)
class MoeConfig:
    experts: int = key(
        None, "experts of a layer, in the place of its MLP (Shazeer et al. 2017); 0: a dense MLP; null: as many as "
              "the family has",
        least=0, most=65536, follows=_family_default("experts"), resume=SHAPE
    )
    top_k: int = key(
        None, "experts that a token is computed by; null: as the family has it",
        least=1, most=1024, follows=_family_default("top_k"), resume=SHAPE, counts=_has_experts
    )
    d_ff: int = key(
        0, "hidden width of an expert; 0: as wide as the family's MLP",
        least=0, resume=SHAPE, counts=_has_experts
    )
    shared_experts: int = key(
        0, "experts that every token is computed by, beside those it chooses",
        least=0, most=1024, resume=SHAPE, counts=_has_experts
    )
    router: Literal["softmax", "sigmoid", "softmax_top_k"] = key(
        None, "scores, of which the top_k are chosen, and the weights of their outputs. softmax, sigmoid: of each "
              "logit; softmax_top_k: the logits, and a softmax over those chosen; null: as the family has it",
        follows=_family_default("router"), resume=SHAPE, counts=_has_experts
    )
    normalize: bool = key(
        None, "softmax, sigmoid: the weights of a token's experts are divided by their sum; null: as the family has it",
        follows=_family_default("normalize"), resume=SHAPE, counts=_has_experts
    )
    route_scale: float = key(1.0, "weights are multiplied by this", above=0.0, resume=SHAPE, counts=_has_experts)
    groups: tuple[int, ...] = key(
        (), "[groups, chosen]: a token chooses among the experts of so many groups, those with the highest sums of "
            "their two best scores "
        "(DeepSeek-V3, section 2.1.2); empty: among all", least=1, resume=SHAPE, counts=_has_experts
    )
    z_loss: float = key(0.0, "weight of the mean of log(sum of exp of the router's logits)^2 (Zoph et al. 2022, "
                             "section 3.1)", least=0.0, counts=_has_experts)
    balance: str = key(
        "none", "what keeps loads even: none; sequence: a loss over each sequence; bias: each expert's score gets a "
                "bias that goes up "
        "by bias_rate a step while its load is below the mean, else down (Wang et al. 2024). Both are the same on "
        "every mesh", counts=_has_experts
    )
    balance_weight: float = key(
        1e-4, "balance sequence: the loss's weight (DeepSeek-V3, section 4.2)",
        least=0.0, counts=_has_experts
    )
    bias_rate: float = key(1e-3, "balance bias: the change of a step", above=0.0, counts=_has_experts)


@dataclass(frozen=True)
class LinearConfig:
    kind: Literal["gated_delta", "kda", "mamba2"] = key(
        "gated_delta", "rule of the layers `linear` of model.pattern: gated_delta (Yang et al. 2024); kda: the same, "
        "but each channel of a key decays by itself (Kimi Team 2025); mamba2: decays alone, replaces nothing (Dao & Gu "
        "2024)", resume=SHAPE
    )
    key_heads: int = key(16, "their heads of queries and of keys", least=1, resume=SHAPE)
    value_heads: int = key(
        32, "their heads of values, each with a state of its own; a multiple of key_heads", least=1, resume=SHAPE
    )
    key_dim: int = key(128, "width of a key head", least=1, resume=SHAPE)
    value_dim: int = key(128, "width of a value head", least=1, resume=SHAPE)
    conv: int = key(4, "tokens that the convolution before the rule reaches over, its own counted", least=2, most=64,
                    resume=SHAPE)
    chunk: int = key(64, "tokens that are computed at once, a power of two: it changes the time, not the result",
                     least=1, most=1024, resume=Resume.FREE)

    @property
    def gates(self) -> int:
        """Numbers a token and head that say what it forgets and how far it replaces."""
        return {"gated_delta": 2, "kda": self.key_dim + 1, "mamba2": 1}[self.kind]

    @property
    def latent(self) -> int:
        """Numbers a token that what it forgets is made of, and likewise the gate of its output; 0: of the stream."""
        if self.kind == "kda":
            return self.value_dim
        return 0


@dataclass(frozen=True)
class MlaConfig:
    q_rank: int = key(
        0, "numbers that a token's queries are made of; 0: of the stream itself", least=0, resume=SHAPE,
        counts=_is_latent
    )
    kv_rank: int = key(
        0, "multi-head latent attention (DeepSeek-V2, section 2.1): numbers that a token's keys and values of all "
           "heads are made of; 0: plain attention", least=0, resume=SHAPE
    )
    nope: int = key(0, "width of a head's queries and keys without position", least=0, resume=SHAPE, counts=_is_latent)
    rope: int = key(
        0, "width of their part with rotary positions, which of keys all heads share", least=0, resume=SHAPE,
        counts=_is_latent
    )
    value: int = key(0, "width of a head's values", least=0, resume=SHAPE, counts=_is_latent)


@dataclass(frozen=True)
class ModelConfig:
    family: str = key(
        "llama",
        "llama: RMSNorm, RoPE, SwiGLU, no biases; mistral, qwen2, qwen3, gemma2, gemma3: the same with other defaults "
        "below; mixtral, "
        "qwen3_moe, olmoe, glm4_moe: the same with experts; gpt_oss: with experts, sinks and biases; gpt2: LayerNorm, "
        "learned "
        "positions, GELU, biases; vit: the same for images, attention both "
        "ways; or one registered from outside",
        one_of=FAMILIES, resume=SHAPE
    )
    layers: int = key(8, "transformer blocks", least=1, most=65536, resume=SIZE)
    dense_layers: int = key(
        0, "first layers that have a dense MLP where the others have experts", least=0, most=65536, resume=SHAPE
    )
    pattern: tuple[str, ...] = key(
        None, "kinds of layers in turn, over and over: full (attention), linear (model.linear), or a kind that was "
              "registered; empty: all full; null: as the family has it",
        follows=_pattern, resume=SHAPE
    )
    d_model: int = key(256, "width of the residual stream", least=1, most=2**24, resume=SHAPE)
    heads: int = key(8, "query heads", least=1, resume=SHAPE)
    kv_heads: int = key(
        None, "key/value heads (grouped-query attention); null: as many as heads",
        least=1, follows=lambda c: c.model.heads, resume=SHAPE
    )
    mla: MlaConfig = field(default_factory=MlaConfig)
    head_dim: int = key(
        None, "width of one head's queries and keys; null: d_model / heads, with mla nope + rope",
        least=1, follows=_head_dim, resume=SHAPE
    )
    # before what follows from it
    moe: MoeConfig = field(default_factory=MoeConfig)
    linear: LinearConfig = field(default_factory=LinearConfig)
    d_ff: int = key(
        None, "hidden width of the MLP; null: as wide as the family has it for d_model, or that of the shared experts",
        least=0, follows=_d_ff, resume=SHAPE
    )
    dense_d_ff: int = key(
        None, "hidden width of the MLP of the first dense_layers; null: as wide as the family has it for d_model",
        least=1, follows=lambda c: FAMILIES[c.model.family].d_ff(c.model.d_model), resume=SHAPE,
        counts=lambda c: c.model.dense_layers > 0
    )
    vocab_size: int = key(
        512, "rows of the embedding; at least the tokenizer's size; of images the classes",
        least=2, resume=SIZE
    )
    dropout: float = key(
        0.0, "probability of dropping an activation (embedding, attention, residual)",
        least=0.0, most=0.99
    )
    block: str | None = key(None, "a function in the place of the built-in block, as MODULE:NAME of run.imports "
                                  "(model.hooks)", resume=FUNCTION)
    attention: str | None = key(None, "a function in the place of attention, likewise", resume=FUNCTION)
    tied_head: bool = key(
        None, "use the embedding as output head; null: as the family does",
        follows=_family_default("tied_head"), resume=SHAPE
    )
    qkv_bias: bool = key(
        None, "biases of the query, key and value projections; null: as the family has it",
        follows=lambda c: FAMILIES[c.model.family].biases or FAMILIES[c.model.family].biased_qkv, resume=SHAPE
    )
    qk_norm: bool = key(
        None, "RMSNorm over each head's queries and keys (olmoe: over those of all heads together), before they are "
              "turned; null: as the "
        "family has it",
        follows=_family_default("qk_norm"), resume=SHAPE
    )
    activation: str = key(
        None, "the MLP's function: silu, gelu (by tanh), gelu_exact, gelu_quick (by sigmoid), relu; null: as the "
              "family has it",
        one_of=FUNCTIONS, follows=_family_default("activation"), resume=SHAPE
    )
    window: int = key(
        None, "positions that a query sees, its own and those before it (sliding window); 0: all; null: as the family "
              "has it",
        least=0, follows=_family_default("window"), resume=SHAPE
    )
    rope_theta: float = key(
        10000.0, "base of the rotary frequencies, where positions are rotary",
        above=1.0, resume=SHAPE
    )
    rope_share: float = key(
        None, "share of a head's width, its first part, that is turned; null: as the family has it",
        above=0.0, most=1.0, follows=_family_default("rope_share"), resume=SHAPE
    )
    rope_scaling: Literal["none", "linear", "llama3", "yarn"] = key(
        "none", "how rotary frequencies are stretched for sequences longer than those of the first training",
        resume=SHAPE
    )
    rope_factor: float = key(1.0, "rope_scaling: by how much", least=1.0, resume=SHAPE)
    rope_original: int = key(8192, "rope_scaling llama3, yarn: the sequence length before", least=1, resume=SHAPE)
    rope_slow: float = key(
        1.0, "llama3, yarn: frequencies that go round so often in rope_original, or less, are slowed by the whole "
             "factor", above=0.0, resume=SHAPE
    )
    rope_fast: float = key(
        None, "llama3, yarn: those that go round so often, or more, stay; null: 4 (llama3), 32 (yarn)",
        above=0.0, follows=lambda c: 32.0 if c.model.rope_scaling == "yarn" else 4.0, resume=SHAPE
    )
    rope_amplitude: float = key(
        0.0, "yarn: cos and sin are larger by this; 0: 0.1 ln(rope_factor) + 1, with mla 1",
        least=0.0, resume=SHAPE
    )
    rope_truncate: bool = key(True, "yarn: the ramp begins and ends at whole pairs", resume=SHAPE)
    max_positions: int = key(
        None, "rows of the position table, where positions are learned; null: train.sequence_length",
        least=1, follows=lambda c: positions_of(c.model) or c.train.sequence_length, resume=SHAPE,
        counts=lambda c: FAMILIES[c.model.family].positions == "learned"
    )
    mtp: int = key(
        0, "tokens beyond the next that are predicted too, by a layer more each (DeepSeek-V3, section 2.2)",
        least=0, most=16, resume=SHAPE
    )
    mtp_weight: float = key(
        0.3, "weight of the mean of their losses", least=0.0, counts=lambda c: c.model.mtp > 0
    )
    norm_eps: float = key(1e-5, "added to the variance in the norms", above=0.0, resume=SHAPE)
    init_std: float = key(0.02, "standard deviation of the initial weights; projections into the residual stream get "
                                "std / sqrt(2 layers)", above=0.0)
    norm_plus_one: bool = key(
        None, "RMSNorm multiplies by 1 + its scale, which begins at 0; null: as the family has it",
        follows=_family_default("norm_plus_one"), resume=SHAPE
    )
    post_norms: bool = key(
        None, "norms after attention and MLP too, before they are added to the stream; null: as the family has it",
        follows=_family_default("post_norms"), resume=SHAPE
    )
    scaled_embedding: bool = key(
        None, "embeddings are multiplied by the root of d_model; null: as the family has it",
        follows=_family_default("scaled_embedding"), resume=SHAPE
    )
    query_scalar: float = key(
        None, "scores are divided by the root of this; null: head_dim, with mla and yarn head_dim / (0.1 "
              "ln(rope_factor) + 1)^4",
        above=0.0, follows=_query_scalar, resume=SHAPE
    )
    score_cap: float = key(
        None, "scores are kept within this of 0, smoothly (c tanh(x / c)); 0: they are not; null: as the family has it",
        least=0.0, follows=_family_default("score_cap"), resume=SHAPE
    )
    logit_cap: float = key(
        None, "the same of the logits, before the loss", least=0.0, follows=_family_default("logit_cap"), resume=SHAPE
    )
    global_every: int = key(
        None, "one layer of so many, the last of them, sees all positions and the others the window; 0: with a window "
              "all layers have it; "
        "null: as the family has it",
        least=0, follows=_family_default("global_every"), resume=SHAPE
    )
    rope_theta_local: float = key(
        None, "rope_theta of the layers that see the window, which then have no rope_scaling; 0: they turn as those "
              "that see all; null: as "
        "the family has it",
        least=0.0, follows=_family_default("rope_theta_local"), resume=SHAPE
    )
    image_size: int = key(
        224, "images: height and width, in pixels",
        least=1, most=2**14, resume=SHAPE, counts=_of_images
    )
    patch_size: int = key(
        16, "images: height and width of a patch, in pixels",
        least=1, most=2**14, resume=SHAPE, counts=_of_images
    )
    channels: int = key(
        3, "images: numbers of a pixel (1: grey, 3: red, green, blue)",
        least=1, most=1024, resume=SHAPE, counts=_of_images
    )
    pool: Literal["class", "mean"] = key(
        "class", "images: what the head reads: class, a learned token before the patches; mean, the mean of the "
                 "patches",
        resume=SHAPE, counts=_of_images
    )
    weights: str | None = key(
        None, "a Hugging Face directory whose weights a new run begins with, and whose config.json fills this section",
        path=True, resume=Resume.FREE
    )

    @property
    def expert_width(self) -> int:
        """Hidden width of one expert."""
        return self.moe.d_ff or FAMILIES[self.family].d_ff(self.d_model)

    @property
    def value_width(self) -> int:
        """Width of one head's values."""
        return self.mla.value or self.head_dim


@dataclass(frozen=True)
class LoraConfig:
    rank: int = key(
        0, "width of the adapters beside frozen projections (Hu et al. 2021); 0: none",
        least=0, most=4096, resume=ADAPTERS
    )
    alpha: float = key(
        None, "adapters are scaled by alpha / rank; null: 2 rank",
        above=0.0, follows=lambda c: 2.0 * max(1, c.lora.rank), resume=REFUSED
    )
    targets: tuple[str, ...] = key((), f"projections that get adapters: {', '.join(PROJECTIONS)}; empty: all that the "
                                       "family has", resume=ADAPTERS)
    dropout: float = key(0.0, "probability of dropping an input of the adapters", least=0.0, most=0.99)
    rslora: bool = key(False, "scale by alpha / sqrt(rank) (Kalajdzievski 2023)", resume=REFUSED)
