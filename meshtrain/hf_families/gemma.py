"""Gemma2ForCausalLM and Gemma3ForCausalLM: Llama's names, with more norms, capped scores or logits, and layers that
differ.

Every n-th layer sees all tokens, the others a window. transformers 4 reads `sliding_window_pattern` and
`rope_local_base_freq`, 5 reads `layer_types` and `rope_parameters` by the type of the layer: all are read, and all are
written.
"""

from functools import partial
from typing import Any

from meshtrain.errors import ConfigError, short
from meshtrain.hf_families import llama
from meshtrain.hf_families.family import HfFamily
from meshtrain.hf_families.json_fields import (
    HF_FUNCTIONS,
    Json,
    activation,
    positive,
    refuse_unless,
)
from meshtrain.hf_families.llama import FULL, LAYER_TYPES, SLIDING, THETA, WINDOW

THETA_GLOBAL = 1_000_000.0  # Gemma 3: of the layers with full_attention


def section(family: str, config: Json, where: str) -> dict[str, Any]:
    for key, legal in (
        ("attention_bias", False),
        ("use_bidirectional_attention", False),
        ("attention_dropout", 0.0),
    ):
        refuse_unless(where, config, key, legal)
    if family == "gemma3":  # its class reads it and caps nothing
        refuse_unless(where, config, "attn_logit_softcapping", None)
    caps = {"gemma2": (50.0, 30.0), "gemma3": (None, None)}[family]
    default = 2 if family == "gemma2" else config.get("sliding_window_pattern") or 6
    window, global_every = alternating(config, where, default, WINDOW)
    model = llama.sizes_section(
        config, where, positive(config, "num_key_value_heads", where), tied=True
    )
    model |= {
        "head_dim": config.get("head_dim", 256),
        "activation": activation(
            config.get("hidden_activation") or "gelu_pytorch_tanh", where
        ),
        "query_scalar": config.get("query_pre_attn_scalar", 256),
        "score_cap": float(config.get("attn_logit_softcapping", caps[0]) or 0),
        "logit_cap": float(config.get("final_logit_softcapping", caps[1]) or 0),
        "window": window,
        "global_every": global_every,
    }
    return model | (
        llama.rope_section(config, where)
        if family == "gemma2"
        else _two_ropes(config, where)
    )


def alternating(
    config: Json, where: str, default: int, default_window: int
) -> tuple[int, int]:
    """Returns the window, and of how many layers the last one sees all; the defaults are for what the config leaves
    out.
    """
    layers = positive(config, "num_hidden_layers", where)
    types = config.get("layer_types") or layer_types(layers, default)
    every = next(
        (n for n in (default, *range(layers + 1)) if layer_types(layers, n) == types),
        None,
    )
    if every is None:
        raise ConfigError(
            f"{where}: layer_types {short(types)} is not computed here; every n-th layer may have full_attention, the "
            "others "
            "sliding_attention."
        )
    window = config.get("sliding_window", default_window)
    if not window and every != 1:
        raise ConfigError(
            f"{where}: layer_types asks for sliding_attention, but sliding_window is not given."
        )
    return window or 0, every


def layer_types(layers: int, global_every: int) -> list[str]:
    return [
        LAYER_TYPES[global_every > 0 and (i + 1) % global_every == 0]
        for i in range(layers)
    ]


def _two_ropes(config: Json, where: str) -> dict[str, Any]:
    """Returns the rotary positions of the layers that see all, and the base of those that see the window."""
    ropes = config.get("rope_parameters") or {}
    for key in ropes.keys() - set(LAYER_TYPES):
        refuse_unless(where, ropes, key, None)
    local = {
        "rope_scaling": None,
        "rope_theta": config.get("rope_local_base_freq", THETA),
    }
    full = llama.rope_section(
        {**config, "rope_parameters": ropes.get(FULL)}, where, THETA_GLOBAL
    )
    sliding = llama.rope_section(
        {**config, **local, "rope_parameters": ropes.get(SLIDING)}, where
    )
    if sliding["rope_scaling"] == "none":
        return full | {"rope_theta_local": sliding["rope_theta"]}
    if sliding != full:
        raise ConfigError(
            f"{where}: rope_type {sliding['rope_scaling']} of the layers with sliding_attention alone is not computed "
            "here."
        )
    return full | {"rope_theta_local": 0.0}


def config(model: Json, length: int) -> dict[str, Any]:
    # the same function; vLLM takes it by this name alone
    function = (
        "gelu_pytorch_tanh"
        if model["activation"] == "gelu"
        else HF_FUNCTIONS[model["activation"]]
    )
    window: dict[str, Any] = {"sliding_window": model["window"] or None}
    if model["family"] == "gemma3":
        window["sliding_window_pattern"] = model["global_every"] or model["layers"] + 1
    window |= {
        "layer_types": layer_types(model["layers"], model["global_every"]),
        "query_pre_attn_scalar": round(model["query_scalar"]),
        "attn_logit_softcapping": model["score_cap"] or None,
        "final_logit_softcapping": model["logit_cap"] or None,
        "hidden_activation": function,
    }
    full = llama.rope_parameters(model)
    ropes = llama.rope_config(model, full)
    if model["family"] == "gemma3":
        theta = model["rope_theta_local"]
        sliding = {"rope_type": "default", "rope_theta": theta} if theta else full
        ropes |= {
            "rope_local_base_freq": sliding["rope_theta"],
            "rope_parameters": {FULL: full, SLIDING: sliding},
        }
    else:
        ropes["rope_parameters"] = full
    return window | ropes | llama.sizes_config(model, length, function)


def _family(name: str, architecture: str, **options: Any) -> HfFamily:
    return HfFamily(
        name,
        architecture,
        partial(section, name),
        config,
        llama.names,
        gemma=True,
        window_by_turns=True,
        **options,
    )


GEMMA2 = _family("gemma2", "Gemma2ForCausalLM", score_cap=True)
# their gemma3 is a text model and a vision tower
GEMMA3 = _family(
    "gemma3",
    "Gemma3ForCausalLM",
    model_type="gemma3_text",
    qk_norm=True,
    local_theta=True,
)
