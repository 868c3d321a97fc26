"""config.json of a Hugging Face model as our section `model`. What it asks for that is not computed here is refused by name.

transformers 4 writes `rope_theta` and `rope_scaling`, 5 writes `rope_parameters`, which 4 passes over in silence: both are read.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshtrain.config.kinds import check_kinds
from meshtrain.errors import ConfigError, nearest, refusal, short

CONFIG = "config.json"
# The class that loads it, by our family.
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "vit": "ViTForImageClassification",
}
# Their model_type by our family, where it is another: their gemma3 is a text model and a vision tower.
MODEL_TYPES = {family: family for family in ARCHITECTURES} | {"gemma3": "gemma3_text"}
FAMILY_OF = {kind: family for family, kind in MODEL_TYPES.items()}
# Their names of functions by ours. transformers' gelu is the exact one.
FUNCTIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu_exact",
    "gelu_new": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "relu": "relu",
}
ROPES = {"default": "none", "linear": "linear", "llama3": "llama3", "yarn": "yarn"}
Json = Mapping[str, Any]


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; ConfigError if there is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{short(path)} cannot be read: {refusal(error)}.") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{short(path)} is no JSON: {short(str(error))}.") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{short(path)} must hold a JSON object.")
    return found


def is_theirs(directory: Path) -> bool:
    """Whether it is a Hugging Face directory: a config.json of a model, which no run and no checkpoint has."""
    return (directory / CONFIG).is_file()


def section_of(directory: Path) -> dict[str, Any]:
    """The section `model` that a Hugging Face directory asks for."""
    return model_section(read_json(directory / CONFIG), short(directory / CONFIG))


def model_section(given: Json, where: str) -> dict[str, Any]:
    """The section `model` that a config.json asks for; `where` it stands, for the sentence that refuses it."""
    check_kinds(given, where)
    kind = given.get("model_type")
    if kind == "gemma3":
        raise ConfigError(
            f"{where}: model_type 'gemma3' has a vision tower, which is not computed here; take its text model alone, gemma3_text."
        )
    if kind not in FAMILY_OF:
        known = ", ".join(FAMILY_OF)
        raise ConfigError(
            f"{where}: model_type {short(repr(kind))} is no family of ours; there are {known}{nearest(str(kind), FAMILY_OF)}."
        )
    family = FAMILY_OF[kind]
    if family == "gpt2":
        section = _gpt2(given, where)
    elif family == "vit":
        section = _vit(given, where)
    else:
        section = (_gemma if family.startswith("gemma") else _llama)(family, given, where)
    _refuse(where, given, "quantization_config", None)
    return {"family": family} | section


def _llama(kind: str, given: Json, where: str) -> dict[str, Any]:
    heads = _whole(given, "num_attention_heads", where)
    for key in ("mlp_bias", "attention_bias"):
        # Qwen2 has biases of q, k and v without saying so
        _refuse(where, given, key, False)
    section = {
        "layers": _whole(given, "num_hidden_layers", where),
        "d_model": _whole(given, "hidden_size", where),
        "heads": heads,
        "kv_heads": given.get("num_key_value_heads") or heads,
        "d_ff": _whole(given, "intermediate_size", where),
        "vocab_size": _whole(given, "vocab_size", where),
        "norm_eps": given.get("rms_norm_eps", 1e-6),
        "tied_head": given.get("tie_word_embeddings", False),
        "activation": _function(given.get("hidden_act", "silu"), where),
        "window": _window(kind, given, where),
    }
    if given.get("head_dim"):
        section["head_dim"] = given["head_dim"]
    elif kind == "qwen3":
        section["head_dim"] = 128
    return section | _rope(given, where)


def _gemma(family: str, given: Json, where: str) -> dict[str, Any]:
    """What a file leaves out is as transformers has it (5.23, configuration_gemma2 and _gemma3)."""
    for key in ("attention_bias", "use_bidirectional_attention"):
        _refuse(where, given, key, False)
    if family == "gemma3":  # their class reads it and caps nothing
        _refuse(where, given, "attn_logit_softcapping", None)
    caps = {"gemma2": (50.0, 30.0), "gemma3": (None, None)}[family]
    window, every = _alternating(family, given, where)
    section = {
        "layers": _whole(given, "num_hidden_layers", where),
        "d_model": _whole(given, "hidden_size", where),
        "heads": _whole(given, "num_attention_heads", where),
        "kv_heads": _whole(given, "num_key_value_heads", where),
        "head_dim": given.get("head_dim", 256),
        "d_ff": _whole(given, "intermediate_size", where),
        "vocab_size": _whole(given, "vocab_size", where),
        "norm_eps": given.get("rms_norm_eps", 1e-6),
        "tied_head": given.get("tie_word_embeddings", True),
        "activation": _function(given.get("hidden_activation") or "gelu_pytorch_tanh", where),
        "query_scalar": given.get("query_pre_attn_scalar", 256),
        "score_cap": float(given.get("attn_logit_softcapping", caps[0]) or 0),
        "logit_cap": float(given.get("final_logit_softcapping", caps[1]) or 0),
        "window": window,
        "global_every": every,
    }
    return section | (_rope(given, where) if family == "gemma2" else _two_ropes(given, where))


def _alternating(family: str, given: Json, where: str) -> tuple[int, int]:
    """The window, and of how many layers the last one sees all."""
    layers = _whole(given, "num_hidden_layers", where)
    usual = 2 if family == "gemma2" else given.get("sliding_window_pattern") or 6
    found = given.get("layer_types") or layer_types(layers, usual)
    every = next((n for n in (usual, *range(layers + 1)) if layer_types(layers, n) == found), None)
    if every is None:
        raise ConfigError(
            f"{where}: layer_types {short(found)} is not computed here; every so manieth layer may have full_attention, the others "
            "sliding_attention."
        )
    window = given.get("sliding_window", 4096)
    if not window and every != 1:
        raise ConfigError(f"{where}: layer_types asks for sliding_attention, but sliding_window is not given.")
    return window or 0, every


def layer_types(layers: int, global_every: int) -> list[str]:
    """Their words for what each layer sees."""
    kinds = ("sliding_attention", "full_attention")
    return [kinds[global_every > 0 and (i + 1) % global_every == 0] for i in range(layers)]


def _two_ropes(given: Json, where: str) -> dict[str, Any]:
    """Of the layers that see all, and of those that see the window; transformers 4 writes `rope_local_base_freq` of the latter."""
    ropes = given.get("rope_parameters") or {}
    if "full_attention" not in ropes:
        return _rope(given, where) | {"rope_theta_local": float(given.get("rope_local_base_freq", 10000.0))}
    theirs = {**given, "rope_scaling": None}
    far, near = (
        _rope(theirs | {"rope_parameters": ropes.get(kind) or {}}, where)
        for kind in ("full_attention", "sliding_attention")
    )
    if near["rope_scaling"] == "none":
        return far | {"rope_theta_local": near["rope_theta"]}
    if near != far:
        raise ConfigError(
            f"{where}: rope_type {near['rope_scaling']} of the layers with sliding_attention alone is not computed here."
        )
    return far | {"rope_theta_local": 0.0}


def _gpt2(given: Json, where: str) -> dict[str, Any]:
    for key, usual in (
        ("scale_attn_weights", True), ("scale_attn_by_inverse_layer_idx", False), ("add_cross_attention", False),
    ):  # fmt: skip
        _refuse(where, given, key, usual)
    d_model = _whole(given, "n_embd", where)
    return {
        "layers": _whole(given, "n_layer", where),
        "d_model": d_model,
        "heads": _whole(given, "n_head", where),
        "d_ff": given.get("n_inner") or 4 * d_model,
        "vocab_size": _whole(given, "vocab_size", where),
        "max_positions": _whole(given, "n_positions", where),
        "norm_eps": given.get("layer_norm_epsilon", 1e-5),
        "tied_head": given.get("tie_word_embeddings", True),
        "activation": _function(given.get("activation_function", "gelu_new"), where),
    }


def _vit(given: Json, where: str) -> dict[str, Any]:
    """Of images to classes; what a file leaves out is as transformers has it (5.23, configuration_vit)."""
    classes, found = ARCHITECTURES["vit"], given.get("architectures") or [ARCHITECTURES["vit"]]
    if found != [classes]:
        raise ConfigError(
            f"{where}: architectures {short(found)} has no classes, or more than them; load it with {classes}, and save that."
        )
    d_model, heads = _whole(given, "hidden_size", where), _whole(given, "num_attention_heads", where)
    _refuse(where, given, "head_dim", d_model // heads)
    return {
        "layers": _whole(given, "num_hidden_layers", where),
        "d_model": d_model,
        "heads": heads,
        "d_ff": _whole(given, "intermediate_size", where),
        "vocab_size": len(given.get("id2label") or ()) or given.get("num_labels") or 2,
        "norm_eps": given.get("layer_norm_eps", 1e-12),
        "activation": _function(given.get("hidden_act", "gelu"), where),
        "qkv_bias": given.get("qkv_bias", True),
        "image_size": _side(given, "image_size", 224, where),
        "patch_size": _side(given, "patch_size", 16, where),
        "channels": given.get("num_channels", 3),
        "pool": "class",
    }


def _side(given: Json, key: str, usual: int, where: str) -> int:
    """Of a square, which they may give as its height and width."""
    value = given.get(key, usual)
    sides = value if isinstance(value, list) else [value]
    if len(set(map(str, sides))) != 1 or len(sides) > 2:
        raise ConfigError(f"{where}: {key} {short(value)} is not computed here; it must be a square's.")
    return _whole({key: sides[0]}, key, where)


def _window(kind: str, given: Json, where: str) -> int:
    """0: none. Of some layers alone it is refused."""
    window = given.get("sliding_window") or 0
    if kind.startswith("qwen") and not given.get("use_sliding_window", False):
        window = 0
    of_layers = set(given.get("layer_types") or ())
    if window and ("full_attention" in of_layers or 0 < given.get("max_window_layers", 0) < given["num_hidden_layers"]):
        raise ConfigError(f"{where}: sliding_window {window} of some layers alone is not computed here.")
    if not window and "sliding_attention" in of_layers:
        raise ConfigError(f"{where}: layer_types asks for sliding_attention, but sliding_window is not given.")
    return window


def _rope(given: Json, where: str) -> dict[str, Any]:
    """Of either schema."""
    new, old = given.get("rope_parameters") or {}, given.get("rope_scaling") or {}
    rope = {**old, **new}
    theta = rope.get("rope_theta", given.get("rope_theta"))
    if theta is None:
        raise ConfigError(f"{where}: neither rope_theta nor rope_parameters.rope_theta is there.")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ROPES:
        raise ConfigError(f"{where}: rope_type {short(repr(kind))} is not computed here; there are {', '.join(ROPES)}.")
    for key in ("mscale", "mscale_all_dim"):
        _refuse(where, rope, key, None)
    for holder in (given, rope):
        _refuse(where, holder, "partial_rotary_factor", 1.0)
    section = {"rope_theta": float(theta), "rope_scaling": ROPES[kind]}
    if kind == "default":
        return section
    section["rope_factor"] = _number(rope, "factor", where)
    if kind == "linear":
        return section
    original = rope.get("original_max_position_embeddings")
    section["rope_original"] = original or _whole(given, "max_position_embeddings", where)
    if kind == "llama3":
        return section | {
            "rope_slow": _number(rope, "low_freq_factor", where),
            "rope_fast": _number(rope, "high_freq_factor", where),
        }
    return section | {
        "rope_slow": float(rope.get("beta_slow") or 1), "rope_fast": float(rope.get("beta_fast") or 32),
        "rope_amplitude": float(rope.get("attention_factor") or 0), "rope_truncate": bool(rope.get("truncate", True)),
    }  # fmt: skip


def _function(name: str, where: str) -> str:
    if name not in FUNCTIONS:
        raise ConfigError(
            f"{where}: the activation {short(repr(name))} is not computed here; there are {', '.join(FUNCTIONS)}."
        )
    return FUNCTIONS[name]


def _number(given: Json, key: str, where: str) -> float:
    value = given.get(key)
    if value is None:
        raise ConfigError(f"{where}: {key} is not there.")
    return float(value)


def _whole(given: Json, key: str, where: str) -> int:
    value = given.get(key)
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"{where}: {key} is {short(repr(value))}; it must be a whole number above 0.")
    return value


def _refuse(where: str, given: Json, key: str, usual: Any) -> None:
    """What is asked for there must be as usual."""
    if given.get(key, usual) != usual and given.get(key) is not None:
        raise ConfigError(f"{where}: {key} {short(repr(given[key]))} is not computed here.")
