"""What each class of transformers can hold of a decoder's options; what it cannot is refused by name, and not left out in silence.

                 biases of q, k, v   q and k normed   window   heads of another width, shared keys   Gemma's
    llama        no                  no               no       yes                                   no
    mistral      no                  no               yes      yes                                   no
    qwen2        yes                 no               yes      yes                                   no
    qwen3        no                  yes              yes      yes                                   no
    gpt2         yes                 no               no       no                                    no
    gemma2       no                  no               always   yes                                   but another base
    gemma3       no                  yes              always   yes                                   but capped scores
    vit          either              no               no       no                                    no

Gemma's are norms by 1 + scale, also behind attention and MLP, and scaled embeddings, all three always; the scores' own scale, capped
scores and logits, layers that see all by turns, and another rotary base for those that do not. ViT's head reads the class token.
Read in transformers 5.23 (models/*/modeling_*.py). Each holds any of our functions in its MLP, and a head that is tied or is not.
No JAX.
"""

from dataclasses import dataclass

from meshtrain.config.model import ModelConfig, positions_of
from meshtrain.config.theirs import ARCHITECTURES
from meshtrain.errors import ConfigError


@dataclass(frozen=True)
class Held:
    """The options of one class: what they must be, or either."""

    qkv_bias: bool | None  # None: either
    qk_norm: bool
    window: bool  # whether there may be one
    head_shapes: bool = True  # whether heads may be wider than d_model / heads, and share keys and values
    gemma: bool = False
    score_cap: bool = False  # whether there may be one
    local_theta: bool = False  # the same
    names: str = "llama"  # whose names its weights have


HELD = {
    "llama": Held(qkv_bias=False, qk_norm=False, window=False),
    "mistral": Held(qkv_bias=False, qk_norm=False, window=True),
    "qwen2": Held(qkv_bias=True, qk_norm=False, window=True),
    "qwen3": Held(qkv_bias=False, qk_norm=True, window=True),
    "gpt2": Held(qkv_bias=True, qk_norm=False, window=False, head_shapes=False, names="gpt2"),
    "gemma2": Held(qkv_bias=False, qk_norm=False, window=True, gemma=True, score_cap=True),
    "gemma3": Held(qkv_bias=False, qk_norm=True, window=True, gemma=True, local_theta=True),
    "vit": Held(qkv_bias=None, qk_norm=False, window=False, head_shapes=False, names="vit"),
}


def check_exportable(model: ModelConfig) -> None:
    """ConfigError where no class of transformers computes what this model does."""
    if model.family not in HELD:
        raise ConfigError(
            f"model.family {model.family} is no family of transformers; exported are {', '.join(HELD)}: see meshtrain.adopt.exportable."
        )
    problem = _problem(HELD[model.family], model)
    if problem is None:
        return
    # the same weights under the same names
    same = [name for name, held in HELD.items() if held.names == HELD[model.family].names]
    others = [name for name in same if _problem(HELD[name], model) is None]
    way_out = f"; train it as model.family {others[0]} to export it" if others else ""
    raise ConfigError(f"{ARCHITECTURES[model.family]} of transformers cannot hold {problem}{way_out}.")


def _problem(held: Held, model: ModelConfig) -> str | None:
    if model.qkv_bias != held.qkv_bias and held.qkv_bias is not None:
        return f"model.qkv_bias {str(model.qkv_bias).lower()}"
    if positions_of(model) and model.pool != "class":
        return f"model.pool {model.pool}"
    if model.qk_norm != held.qk_norm:
        return f"model.qk_norm {str(model.qk_norm).lower()}"
    if model.window and not held.window:
        return f"model.window {model.window}"
    if not held.head_shapes and model.kv_heads != model.heads:
        return f"model.kv_heads {model.kv_heads} beside model.heads {model.heads}"
    if not held.head_shapes and model.head_dim * model.heads != model.d_model:
        return f"model.head_dim {model.head_dim} with {model.heads} heads in model.d_model {model.d_model}"
    for name in ("norm_plus_one", "post_norms", "scaled_embedding"):
        if (value := getattr(model, name)) != held.gemma:
            return f"model.{name} {str(value).lower()}"
    if held.gemma and not model.window and model.global_every != 1:
        return "model.window 0"
    usual = {} if held.gemma else {"query_scalar": model.head_dim, "global_every": 0, "logit_cap": 0.0}
    usual |= {} if held.score_cap else {"score_cap": 0.0}
    usual |= {} if held.local_theta else {"rope_theta_local": 0.0}
    for name, value in usual.items():
        if getattr(model, name) != value:
            return f"model.{name} {getattr(model, name):g}"
    return None
