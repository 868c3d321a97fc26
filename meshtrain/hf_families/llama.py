"""LlamaForCausalLM, and the classes whose weights have its names: Mistral, Qwen2 and Qwen3; Gemma stands in `gemma`,
those with experts in `mixture`.

transformers 4 writes `rope_theta` and `rope_scaling`, which 5 reads as `rope_parameters`: both are read, and both are
written. A field that a config.json leaves out has its class's default (transformers 5.23, models/*/configuration_*.py).
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

from meshtrain.errors import ConfigError, short
from meshtrain.hf_families.family import HfFamily, WeightName
from meshtrain.hf_families.json_fields import (
    HF_FUNCTIONS,
    Json,
    activation,
    number,
    positive,
    refuse_unless,
)

Fields = dict[str, Any]

ROPES = {"default": "none", "linear": "linear", "llama3": "llama3", "yarn": "yarn"}
LAYER_TYPES = SLIDING, FULL = ("sliding_attention", "full_attention")
KV_HEADS = {
    "mistral": 8,
    "qwen2": 32,
    "qwen3": 32,
    "mixtral": 8,
    "qwen3_moe": 4,
}  # the others: as many as heads
WINDOW = 4096
MAX_WINDOW_LAYERS = 28
THETA = 10_000.0
THETAS = {"mixtral": 1_000_000.0}  # the others: THETA
EPSILONS = {"mixtral": 1e-5, "olmoe": 1e-5}  # the others: 1e-6


def sizes_section(config: Json, where: str, kv_heads: int, tied: bool) -> Fields:
    """Returns the keys that all these classes have; `tied`: whether the head is, where nothing is said of it."""
    return {
        "layers": positive(config, "num_hidden_layers", where),
        "d_model": positive(config, "hidden_size", where),
        "heads": positive(config, "num_attention_heads", where),
        "kv_heads": kv_heads,
        "d_ff": positive(config, "intermediate_size", where),
        "vocab_size": positive(config, "vocab_size", where),
        "norm_eps": config.get("rms_norm_eps", 1e-6),
        "tied_head": config.get("tie_word_embeddings", tied),
    }


def section(family: str, config: Json, where: str) -> Fields:
    # Qwen2 has biases of q, k and v without a field for them
    for key, legal in (
        ("mlp_bias", False),
        ("attention_bias", False),
        ("attention_dropout", 0.0),
    ):
        refuse_unless(where, config, key, legal)
    heads = positive(config, "num_attention_heads", where)
    kv_heads = config.get("num_key_value_heads", KV_HEADS.get(family)) or heads
    model = sizes_section(config, where, kv_heads, tied=False)
    model["norm_eps"] = config.get("rms_norm_eps", EPSILONS.get(family, 1e-6))
    model["activation"] = activation(config.get("hidden_act", "silu"), where)
    model["window"] = _window(family, config, where)
    if config.get("head_dim"):
        model["head_dim"] = config["head_dim"]
    elif family == "qwen3":
        model["head_dim"] = 128
    return model | rope_section(config, where, THETAS.get(family, THETA))


def _window(family: str, config: Json, where: str) -> int:
    """Returns 0 for none; ConfigError where some of the layers have one and others none."""
    layers = config["num_hidden_layers"]
    window = config.get("sliding_window", WINDOW) or 0
    first = 0
    if family.startswith("qwen"):
        window = window if config.get("use_sliding_window") else 0
        first = (
            MAX_WINDOW_LAYERS
            if config.get("max_window_layers") is None
            else config["max_window_layers"]
        )
    elif family == "mixtral":
        window = config.get("sliding_window") or 0
    elif family in ("llama", "olmoe"):  # their classes read none
        window = 0
    if family in ("mixtral", "qwen3_moe"):  # their classes read no types of layers
        return window
    types = config.get("layer_types") or [
        LAYER_TYPES[not window or i < first] for i in range(layers)
    ]
    if not window and SLIDING in types:
        raise ConfigError(
            f"{where}: layer_types asks for sliding_attention, but sliding_window is not given."
        )
    # Mistral's class reads no layer_types
    if types == [FULL] * layers and (family != "mistral" or not window):
        return 0
    if types != [SLIDING] * layers:
        which = (
            "layer_types"
            if "layer_types" in config
            else f"max_window_layers {first} of {layers}"
        )
        raise ConfigError(
            f"{where}: sliding_window {window} of some layers alone ({which}) is not computed here; all have it, or "
            "none."
        )
    return window


def rope_section(config: Json, where: str, theta: float = THETA) -> Fields:
    """Returns the keys of rotary positions, of either schema; `theta` is the base where none is given."""
    rope = _merge_rope(config, where)
    for key in LAYER_TYPES:
        refuse_unless(where, rope, key, None)
    base = next(
        base
        for base in (rope.get("rope_theta"), config.get("rope_theta"), theta)
        if base is not None
    )
    kind = rope.get("rope_type", "default")
    if kind not in ROPES:
        raise ConfigError(
            f"{where}: rope_type {short(repr(kind))} is not computed here; there are {', '.join(ROPES)}."
        )
    for key in ("mscale", "mscale_all_dim"):
        refuse_unless(where, rope, key, None)
    for holder in (config, rope):
        refuse_unless(where, holder, "partial_rotary_factor", 1.0)
    model = {"rope_theta": float(base), "rope_scaling": ROPES[kind]}
    if kind == "default":
        return model
    return model | _scaling_section(config, rope, kind, where)


def _merge_rope(config: Json, where: str) -> Json:
    """Returns what rope_parameters and rope_scaling say together."""
    new, old = (
        _add_rope_type(config.get(key) or {})
        for key in ("rope_parameters", "rope_scaling")
    )
    for key in old.keys() & new.keys():
        if old[key] != new[key]:
            raise ConfigError(
                f"{where}: {short(key)} is {short(repr(old[key]))} in rope_scaling, but {short(repr(new[key]))} in "
                "rope_parameters; let them agree."
            )
    return {**old, **new}


def _scaling_section(config: Json, rope: Json, kind: str, where: str) -> Fields:
    """Returns the keys of a scaling of positions, `kind`."""
    model: Fields = {"rope_factor": number(rope, "factor", where)}
    if kind == "linear":
        return model
    original = config.get("original_max_position_embeddings") or rope.get(
        "original_max_position_embeddings"
    )
    model["rope_original"] = original or positive(
        config, "max_position_embeddings", where
    )
    if kind == "llama3":
        slow, fast = (
            number(rope, f"{which}_freq_factor", where) for which in ("low", "high")
        )
        return model | {"rope_slow": slow, "rope_fast": fast}
    return model | {
        "rope_slow": float(rope.get("beta_slow") or 1),
        "rope_fast": float(rope.get("beta_fast") or 32),
        "rope_amplitude": float(rope.get("attention_factor") or 0),
        "rope_truncate": bool(rope.get("truncate", True)),
    }


def _add_rope_type(rope: Json) -> Json:
    """Adds `rope_type`, which was called `type` once."""
    return {"rope_type": rope.get("type", "default"), **rope} if rope else {}


def config(model: Json, length: int) -> Fields:
    window = {"sliding_window": model["window"] or None}
    if model["family"].startswith("qwen"):
        window["use_sliding_window"] = model["window"] > 0
        window["max_window_layers"] = 0 if model["window"] else model["layers"]
    rope = rope_parameters(model)
    return (
        window
        | rope_config(model, rope)
        | {"rope_parameters": rope}
        | sizes_config(model, length)
    )


def rope_parameters(model: Json) -> Fields:
    kind = next(
        theirs for theirs, ours in ROPES.items() if ours == model["rope_scaling"]
    )
    rope: Fields = {"rope_type": kind}
    if kind != "default":
        rope["factor"] = model["rope_factor"]
    if kind in ("llama3", "yarn"):
        rope["original_max_position_embeddings"] = model["rope_original"]
    if kind == "llama3":
        rope |= {
            "low_freq_factor": model["rope_slow"],
            "high_freq_factor": model["rope_fast"],
        }
    if kind == "yarn":
        rope |= {
            "beta_slow": model["rope_slow"],
            "beta_fast": model["rope_fast"],
            "truncate": model["rope_truncate"],
        }
        rope |= (
            {"attention_factor": model["rope_amplitude"]}
            if model["rope_amplitude"]
            else {}
        )
    return rope | {"rope_theta": model["rope_theta"]}


def rope_config(model: Json, rope: Json) -> Fields:
    """Returns the fields that transformers 4 reads; `rope` are the `rope_parameters` of 5."""
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    return {
        "rope_theta": model["rope_theta"],
        "rope_scaling": None if rope["rope_type"] == "default" else scaling,
    }


def sizes_config(model: Json, length: int, function: str | None = None) -> Fields:
    """Returns the fields that all these classes have; `function` is the activation, where it has another name than
    usual.
    """
    stretched = (
        model["rope_original"] if model["rope_scaling"] in ("llama3", "yarn") else 0
    )
    return {
        "num_hidden_layers": model["layers"],
        "hidden_size": model["d_model"],
        "num_attention_heads": model["heads"],
        "num_key_value_heads": model["kv_heads"],
        "head_dim": model["head_dim"],
        "intermediate_size": model["d_ff"],
        "rms_norm_eps": model["norm_eps"],
        "hidden_act": function or HF_FUNCTIONS[model["activation"]],
        "max_position_embeddings": max(length, round(stretched * model["rope_factor"])),
    }


def names(model: Json) -> Iterator[WeightName]:
    """Yields the names of all these classes; of Gemma, which has norms behind attention and MLP too, two norms have
    others.
    """
    layer = "model.layers.{}."
    yield WeightName("embedding.tokens", "model.embed_tokens.weight")
    yield WeightName("blocks.attention_norm.scale", f"{layer}input_layernorm.weight")
    if model["post_norms"]:
        yield WeightName(
            "blocks.attention_post_norm.scale",
            f"{layer}post_attention_layernorm.weight",
        )
        yield WeightName(
            "blocks.mlp_norm.scale", f"{layer}pre_feedforward_layernorm.weight"
        )
        yield WeightName(
            "blocks.mlp_post_norm.scale", f"{layer}post_feedforward_layernorm.weight"
        )
    else:
        yield WeightName(
            "blocks.mlp_norm.scale", f"{layer}post_attention_layernorm.weight"
        )
    for ours in "qkv":
        yield WeightName(
            f"blocks.attention.{ours}", f"{layer}self_attn.{ours}_proj.weight", "linear"
        )
        yield WeightName(
            f"blocks.attention.{ours}_bias", f"{layer}self_attn.{ours}_proj.bias"
        )
    yield WeightName(
        "blocks.attention.out", f"{layer}self_attn.o_proj.weight", "linear"
    )
    yield WeightName("blocks.attention.q_norm.scale", f"{layer}self_attn.q_norm.weight")
    yield WeightName("blocks.attention.k_norm.scale", f"{layer}self_attn.k_norm.weight")
    if model["family"] == "mixtral":
        mlp = "block_sparse_moe"
        experts = {"gate": "w1", "up": "w3", "down": "w2"}
    else:
        mlp = "mlp"
        experts = {ours: f"{ours}_proj" for ours in ("gate", "up", "down")}
    for ours, theirs in experts.items():
        yield WeightName(
            f"blocks.mlp.{ours}", f"{layer}{mlp}.{theirs}.weight", "linear"
        )
        yield WeightName(
            f"blocks.experts.{ours}",
            f"{layer}{mlp}.experts.{{}}.{theirs}.weight",
            "experts",
        )
    yield WeightName("blocks.experts.router", f"{layer}{mlp}.gate.weight", "linear")
    yield WeightName("head.norm.scale", "model.norm.weight")
    yield WeightName("head.weight", "lm_head.weight", "linear")


def _family(name: str, architecture: str, **options: Any) -> HfFamily:
    return HfFamily(
        name, architecture, partial(section, name), config, names, **options
    )


LLAMA = _family("llama", "LlamaForCausalLM", window=False)
MISTRAL = _family("mistral", "MistralForCausalLM")
QWEN2 = _family("qwen2", "Qwen2ForCausalLM", qkv_bias=True)
QWEN3 = _family("qwen3", "Qwen3ForCausalLM", qk_norm=True)
