"""Model families: each is a preset of the decoder's options, which every other room asks for and never for a family's
name.

             norm                 positions            MLP                  biases  head           source
    llama    RMSNorm              rotary (RoPE)        silu(gate x) * up x  no      its own        Touvron et al. 2023
    mistral  as llama; its first release attends to a window (model.window)                        Jiang et al. 2023
    qwen2    as llama, but q, k and v have biases                                                  Yang et al. 2024
    qwen3    as llama, with an RMSNorm over each head's q and k                                    Yang et al. 2025
    gpt2     LayerNorm with bias  a learned table      gelu(up x)           yes     the embedding  Radford et al. 2019
    gemma2   RMSNorm by 1 + scale rotary               gelu(gate x) * up x  no      the embedding  Gemma Team 2024, 2
    gemma3   likewise             rotary               likewise             no      the embedding  Gemma Team 2025, 2
    vit      as gpt2              as gpt2, of patches  as gpt2, exact GELU  yes     its own        Dosovitskiy 2021

With experts (model.moe), of which a router chooses a few for each token, in the place of the MLP; their numbers are of
the largest or only model:

    mixtral    as llama; 8 experts, 2 chosen                                                          Jiang et al. 2024
    qwen3_moe  as qwen3; 128 experts, 8 chosen                                                        Yang et al. 2025
    olmoe      as llama, with an RMSNorm over all heads' q, and all k, together; 64 experts, 8      Muennighoff 2024
               chosen, whose weights are not divided by their sum
    deepseek_v3  as llama, with latent attention (model.mla), first layers that are dense, a router   DeepSeek-AI 2024
                 of sigmoid; 256 experts, 8 chosen. Kimi-K2 has 384
    moonlight  the same with 64 experts, 6 chosen                                                     Liu et al. 2025
    gpt_oss    as llama, with biases, a sink for each head, a window in every second layer,           OpenAI 2025
               beginning with the first; 128 experts, 4 chosen, whose gate and up are clipped
    glm4_moe   as qwen3_moe (GLM-4.5-Air: norms over heads off), with biases of q, k and v, half of a    GLM Team 2025
               head's width turned, and first layers whose MLP is dense; routers of sigmoid

Hybrids have three layers of linear attention (model.linear) to one of attention. Their RMSNorms, over each head's q and
k too, are by 1 + scale. Attention's output has a gate, and a quarter of a head's width is turned:

    qwen3_5      the MLP as llama                                                                  Qwen Team 2026
    qwen3_5_moe  256 experts, 8 chosen, beside a shared one with a gate                            Qwen Team 2026
    qwen3_next   512 experts, 10 chosen, likewise                                                  Qwen Team 2025

Both Gemmas have norms after attention and MLP too, scaled embeddings, and layers that see a window (model.window)
alternate with ones
that see all: every second in Gemma 2, which caps scores and logits; every sixth in Gemma 3, which has norms over each
head's q and k, and another rotary base where it sees the window.

ViT reads images in patches: attention goes both ways, and the head gives one row of logits an image, its classes in the
place of the vocabulary.

A family's value of an option that has a key is a default: the key of the model's section counts.

A family from outside: `FAMILIES.register(Family(name="mine", ...))` before the config is loaded. It
computes what the options cannot say in a block of its own (see `model.hooks.BlockHook`).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from meshtrain.registry import Registry


@dataclass(frozen=True)
class Family:
    """The options of a decoder that `model.family` chooses."""

    name: str
    centred_norms: bool  # LayerNorm, with a bias; else RMSNorm
    positions: Literal["rotary", "learned"]
    gated: bool  # the MLP is activation(gate x) * up x; else activation(up x)
    activation: str  # one of ACTIVATIONS; where model.activation is null
    biases: bool  # of the projections; those of q, k and v where model.qkv_bias is null
    tied_head: bool  # where model.tied_head is null
    d_ff: Callable[[int], int]  # of d_model, where model.d_ff is null
    # A BlockHook in place of the pre-norm block
    block: Callable[..., Any] | None = None
    biased_qkv: bool = False  # q, k and v have biases though nothing else has
    qk_norm: bool = False  # where model.qk_norm is null; so with the keys below
    window: int = 0
    norm_plus_one: bool = False
    post_norms: bool = False
    scaled_embedding: bool = False
    score_cap: float = 0.0
    logit_cap: float = 0.0
    global_every: int = 0
    rope_theta_local: float = 0.0
    experts: int = 0  # this and the next three of model.moe
    top_k: int = 2
    router: str = "softmax"
    normalize: bool = True
    joint_qk_norm: bool = False  # qk_norm is over all heads together, not over each
    # the output projection of attention has a bias though nothing else has
    biased_out: bool = False
    biased_experts: bool = False  # experts and their router have biases
    # The softmax of each head has one more score, which is learned and of no key
    sinks: bool = False
    # What attention gives is multiplied by a sigmoid of its input
    gated_attention: bool = False
    # Likewise of the shared experts, one number a token
    gated_shared_experts: bool = False
    rope_share: float = 1.0  # where model.rope_share is null; so with the next
    pattern: tuple[str, ...] = ()
    # A gated MLP is activation(min(gate x, limit)) * (up x within limit, + 1); 0: it is not
    gate_limit: float = 0.0
    # Images in patches, and classes of them, in the place of tokens.
    images: bool = False
    causal: bool = True
    head_bias: bool = False

    @property
    def rotary(self) -> bool:
        return self.positions == "rotary"


def period_of(kinds: Sequence[str]) -> tuple[str, ...]:
    """Returns the shortest sequence of kinds that layers of these kinds go through over and over."""
    return next(
        tuple(kinds[:period])
        for period in range(1, len(kinds) + 1)
        if all(kind == kinds[layer % period] for layer, kind in enumerate(kinds))
    )


# jax.nn.gelu is the tanh approximation, which GPT-2 was trained with; later models have the function itself.
EXACT_GELU = "gelu_exact"
# x sigmoid(1.702 x) (Hendrycks & Gimpel 2016)
QUICK_GELU = "gelu_quick"
ACTIVATIONS = dict.fromkeys(("silu", "gelu", EXACT_GELU, QUICK_GELU, "relu"))

four_times = lambda d_model: 4 * d_model


def yarn_amplitude(factor: float, share: float = 1.0) -> float:
    """Returns by how much queries and keys grow in sequences that are longer by a factor (Peng et al. 2023, 3.4)."""
    return 0.1 * share * math.log(factor) + 1


# fmt: off
LLAMA = Family(
    "llama", centred_norms=False, positions="rotary", gated=True, activation="silu", biases=False, tied_head=False,
    d_ff=lambda d_model: 32 * math.ceil(8 * d_model / 3 / 32),
)
GPT2 = Family(
    "gpt2", centred_norms=True, positions="learned", gated=False, activation="gelu", biases=True, tied_head=True,
    d_ff=four_times,
)
GEMMA2 = replace(
    LLAMA, name="gemma2", activation="gelu", tied_head=True, d_ff=four_times, norm_plus_one=True, post_norms=True,
    scaled_embedding=True, score_cap=50.0, logit_cap=30.0, window=4096, global_every=2,
)
QWEN3_5 = replace(
    LLAMA, name="qwen3_5", qk_norm=True, norm_plus_one=True, gated_attention=True, gated_shared_experts=True,
    rope_share=0.25, pattern=("linear", "linear", "linear", "full"),
)
FAMILIES = Registry(
    LLAMA,
    replace(LLAMA, name="mistral"),
    replace(LLAMA, name="qwen2", biased_qkv=True),
    replace(LLAMA, name="qwen3", qk_norm=True),
    replace(LLAMA, name="mixtral", experts=8),
    replace(LLAMA, name="qwen3_moe", qk_norm=True, experts=128, top_k=8),
    replace(LLAMA, name="olmoe", qk_norm=True, joint_qk_norm=True, experts=64, top_k=8, normalize=False),
    replace(LLAMA, name="deepseek_v3", experts=256, top_k=8, router="sigmoid"),
    replace(LLAMA, name="moonlight", experts=64, top_k=6, router="sigmoid"),
    replace(
        LLAMA, name="gpt_oss", biased_qkv=True, biased_out=True, biased_experts=True, sinks=True,
        activation=QUICK_GELU, gate_limit=7.0, window=128, global_every=2, experts=128, top_k=4, router="softmax_top_k",
    ),
    replace(
        LLAMA, name="glm4_moe", biased_qkv=True, qk_norm=True, rope_share=0.5, experts=160, top_k=8, router="sigmoid",
    ),
    replace(QWEN3_5, name="qwen3_next", experts=512, top_k=10),
    QWEN3_5,
    replace(QWEN3_5, name="qwen3_5_moe", experts=256, top_k=8),
    GPT2,
    GEMMA2,
    replace(
        GEMMA2, name="gemma3", qk_norm=True, score_cap=0.0, logit_cap=0.0, window=1024, global_every=6,
        rope_theta_local=10000.0,
    ),
    replace(GPT2, name="vit", activation=EXACT_GELU, tied_head=False, images=True, causal=False, head_bias=True),
)
# fmt: on
