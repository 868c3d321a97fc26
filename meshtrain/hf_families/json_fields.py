"""Fields of a config.json.

It may come from anybody, so the type of each is checked before anything is computed with it.

Everything that is asked for and not computed here is refused by name.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshtrain.errors import ConfigError, refusal, short
from meshtrain.files import check_regular, refuse_passing, retried

Json = Mapping[str, Any]
# The fields that are read, by the type that they must have where they are given.
FIELDS: dict[type, tuple[str, ...]] = {
    int: (
        "num_hidden_layers",
        "hidden_size",
        "num_attention_heads",
        "num_key_value_heads",
        "intermediate_size",
        "vocab_size",
        "head_dim",
        "sliding_window",
        "max_window_layers",
        "sliding_window_pattern",
        "max_position_embeddings",
        "original_max_position_embeddings",
        "n_layer",
        "n_embd",
        "n_head",
        "n_inner",
        "n_positions",
        "num_channels",
        "num_labels",
        "num_local_experts",
        "num_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "decoder_sparse_step",
        "linear_num_key_heads",
        "linear_num_value_heads",
        "linear_key_head_dim",
        "linear_value_head_dim",
        "linear_conv_kernel_dim",
        "shared_expert_intermediate_size",
        "full_attention_interval",
    ),
    float: (
        "rms_norm_eps",
        "layer_norm_epsilon",
        "layer_norm_eps",
        "rope_theta",
        "rope_local_base_freq",
        "query_pre_attn_scalar",
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "beta_slow",
        "beta_fast",
        "attention_factor",
        "partial_rotary_factor",
        "swiglu_limit",
        "swiglu_alpha",
        "attention_dropout",
        "resid_pdrop",
        "embd_pdrop",
        "attn_pdrop",
        "hidden_dropout_prob",
        "attention_probs_dropout_prob",
    ),
    bool: (
        "tie_word_embeddings",
        "use_sliding_window",
        "truncate",
        "qkv_bias",
        "norm_topk_prob",
        "attention_bias",
    ),
    str: (
        "model_type",
        "hidden_act",
        "hidden_activation",
        "activation_function",
        "rope_type",
        "type",
    ),
    list: ("layer_types",),
    # rope_parameters holds full_attention and sliding_attention where the layers differ
    dict: (
        "rope_parameters",
        "rope_scaling",
        "full_attention",
        "sliding_attention",
        "id2label",
    ),
}
LEGAL = {
    int: "a whole number, not negative",
    float: "a number, not negative",
    bool: "true or false",
    str: "a text",
    list: "a list of texts",
    dict: "a mapping",
}
MOST_LAYERS = 65536
# Their names of activation functions by ours. transformers' gelu is the exact one.
FUNCTIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu_exact",
    "gelu_new": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "quick_gelu": "gelu_quick",
    "relu": "relu",
}
HF_FUNCTIONS = {ours: theirs for theirs, ours in reversed(FUNCTIONS.items())}


def read_json(path: Path) -> dict[str, Any]:
    """Returns a file's JSON object; ConfigError if there is none."""
    try:
        check_regular(path)
        content = json.loads(retried(lambda: path.read_text(encoding="utf-8")))
    except OSError as error:
        refuse_passing(path, error)
        raise ConfigError(f"{short(path)} cannot be read: {refusal(error)}.") from None
    except ConfigError:
        raise
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{short(path)} is not JSON: {short(str(error))}.") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{short(path)} must hold a JSON object.")
    return content


def check_types(config: Json, where: str) -> None:
    """ConfigError for the first field of another type; the mappings in `rope_parameters` are checked likewise."""
    for kind, names in FIELDS.items():
        for key in names:
            value = config.get(key)
            if value is not None and not _has_type(kind, value):
                raise ConfigError(
                    f"{where}: {key} is {short(repr(value))}; it must be {LEGAL[kind]}."
                )
    for key in ("num_hidden_layers", "n_layer"):
        if (config.get(key) or 0) > MOST_LAYERS:
            raise ConfigError(
                f"{where}: {key} is {config[key]}; it must be at most {MOST_LAYERS}."
            )
    for key in FIELDS[dict]:
        for value in [config.get(key), *(config.get(key) or {}).values()]:
            if isinstance(value, dict):
                check_types(value, where)


def _has_type(kind: type, value: Any) -> bool:
    if kind in (int, float):
        legal = (int,) if kind is int else (int, float)
        return type(value) in legal and 0 <= value < 2**31
    return isinstance(value, kind) and not (
        isinstance(value, list) and any(type(text) is not str for text in value)
    )


def positive(config: Json, key: str, where: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value < 1:
        raise ConfigError(
            f"{where}: {key} is {short(repr(value))}; it must be a whole number above 0."
        )
    return value


def number(config: Json, key: str, where: str) -> float:
    value = config.get(key)
    if value is None:
        raise ConfigError(f"{where}: {key} is not there.")
    return float(value)


def activation(name: str, where: str) -> str:
    if name not in FUNCTIONS:
        known = ", ".join(FUNCTIONS)
        raise ConfigError(
            f"{where}: the activation {short(repr(name))} is not computed here; there are {known}."
        )
    return FUNCTIONS[name]


def dropout(config: Json, where: str, default: float, *keys: str) -> float:
    """Returns the one probability of all places; ConfigError where they have several."""
    rates = {key: default if config.get(key) is None else config[key] for key in keys}
    if len(set(rates.values())) > 1:
        text = ", ".join(f"{key} {short(rate)}" for key, rate in rates.items())
        raise ConfigError(
            f"{where}: {text}: here all are dropped with one probability; give them one there."
        )
    return float(rates[keys[0]])


def refuse_unless(where: str, config: Json, key: str, legal: Any) -> None:
    """ConfigError where a field asks for anything but the one legal value."""
    if config.get(key, legal) != legal and config.get(key) is not None:
        raise ConfigError(
            f"{where}: {key} {short(repr(config[key]))} is not computed here."
        )
