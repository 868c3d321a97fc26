"""Of what kind the values of a config.json must be: it may come from anybody, and `meshtrain.config.theirs` computes with them."""

from collections.abc import Mapping
from typing import Any

from meshtrain.errors import ConfigError, short

# Of what is read, where it is there.
KINDS: dict[type, tuple[str, ...]] = {
    int: (
        "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size", "head_dim",
        "sliding_window", "max_window_layers", "sliding_window_pattern", "max_position_embeddings", "original_max_position_embeddings",
        "n_layer", "n_embd", "n_head", "n_inner", "n_positions", "num_channels", "num_labels",
    ),
    float: (
        "rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "rope_theta", "rope_local_base_freq", "query_pre_attn_scalar", "attn_logit_softcapping",
        "final_logit_softcapping", "factor", "low_freq_factor", "high_freq_factor", "beta_slow", "beta_fast", "attention_factor",
    ),
    bool: ("tie_word_embeddings", "use_sliding_window", "truncate", "qkv_bias"),
    str: ("model_type", "hidden_act", "hidden_activation", "activation_function", "rope_type", "type"),
    list: ("layer_types",),
    # full and sliding attention stand within the first, where layers differ
    dict: ("rope_parameters", "rope_scaling", "full_attention", "sliding_attention", "id2label"),
}  # fmt: skip
CALLED = {
    int: "a whole number, not negative",
    float: "a number, not negative",
    bool: "true or false",
    str: "a text",
    list: "a list of texts",
    dict: "a mapping",
}
MOST_LAYERS = 65536


def check_kinds(given: Mapping[str, Any], where: str) -> None:
    """ConfigError for the first value that is of no legal kind; what rope_parameters hold, of all layers or by their type, likewise."""
    for kind, names in KINDS.items():
        for key in names:
            value = given.get(key)
            if value is not None and not _is(kind, value):
                raise ConfigError(f"{where}: {key} is {short(repr(value))}; it must be {CALLED[kind]}.")
    for key in ("num_hidden_layers", "n_layer"):
        if (given.get(key) or 0) > MOST_LAYERS:
            raise ConfigError(f"{where}: {key} is {given[key]}; it must be at most {MOST_LAYERS}.")
    for key in KINDS[dict]:
        for value in [given.get(key), *(given.get(key) or {}).values()]:
            if isinstance(value, dict):
                check_kinds(value, where)


def _is(kind: type, value: Any) -> bool:
    if kind in (int, float):
        whole = type(value) is int
        return (whole or (kind is float and type(value) is float)) and 0 <= value < 2**31
    return isinstance(value, kind) and not (isinstance(value, list) and any(type(text) is not str for text in value))
