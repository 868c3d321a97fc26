"""config.json of a model of ours, as transformers reads it: `meshtrain.config.theirs` is the way back.

transformers 4 reads `rope_theta` and `rope_scaling`, 5 reads `rope_parameters`: both are written. No JAX.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from meshtrain.adopt import preprocessor
from meshtrain.adopt.exportable import check_exportable
from meshtrain.config import Config, load
from meshtrain.config.follow import put
from meshtrain.config.model import ModelConfig
from meshtrain.config.theirs import (
    ARCHITECTURES,
    CONFIG,
    FAMILY_OF,
    FUNCTIONS,
    MODEL_TYPES,
    ROPES,
    is_theirs,
    layer_types,
    read_json,
)
from meshtrain.errors import ConfigError, short
from meshtrain.families import FAMILIES

THEIR_FUNCTIONS = {ours: theirs for theirs, ours in reversed(FUNCTIONS.items())}


def config_json(model: ModelConfig, length: int, dtype: str) -> dict[str, Any]:
    """config.json of a resolved config's model, trained on sequences of `length` tokens; ConfigError where no class of theirs holds it."""
    check_exportable(model)
    kind = model.family
    functions = dict(THEIR_FUNCTIONS)
    common = {
        "model_type": MODEL_TYPES[kind], "architectures": [ARCHITECTURES[kind]], "vocab_size": model.vocab_size, "tie_word_embeddings": model.tied_head,
        "dtype": dtype, "torch_dtype": dtype,
    }  # fmt: skip
    if kind == "gpt2":
        return common | {
            "n_layer": model.layers, "n_embd": model.d_model, "n_head": model.heads, "n_inner": model.d_ff, "n_positions": model.max_positions,
            "n_ctx": model.max_positions, "layer_norm_epsilon": model.norm_eps, "activation_function": functions[model.activation],
        }  # fmt: skip
    if kind == "vit":
        return _of_images(model, dtype)
    stretched = model.rope_original if model.rope_scaling in ("llama3", "yarn") else 0
    window = {"sliding_window": model.window or None}
    if kind.startswith("qwen"):
        window |= {"use_sliding_window": model.window > 0, "max_window_layers": 0 if model.window else model.layers}
    if kind.startswith("gemma"):
        # the same function; vLLM takes it by this name alone
        functions["gelu"] = "gelu_pytorch_tanh"
        window |= _of_gemma(model) | {"hidden_activation": functions[model.activation]}
    return common | window | _ropes(model) | {
        "num_hidden_layers": model.layers, "hidden_size": model.d_model, "num_attention_heads": model.heads, "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim, "intermediate_size": model.d_ff, "rms_norm_eps": model.norm_eps, "hidden_act": functions[model.activation],
        "max_position_embeddings": max(length, round(stretched * model.rope_factor)),
    }  # fmt: skip


def _of_images(model: ModelConfig, dtype: str) -> dict[str, Any]:
    labels = [f"LABEL_{i}" for i in range(model.vocab_size)]
    return {
        "model_type": MODEL_TYPES["vit"], "architectures": [ARCHITECTURES["vit"]], "dtype": dtype, "torch_dtype": dtype,
        "num_hidden_layers": model.layers, "hidden_size": model.d_model, "num_attention_heads": model.heads, "intermediate_size": model.d_ff,
        "hidden_act": THEIR_FUNCTIONS[model.activation], "layer_norm_eps": model.norm_eps, "qkv_bias": model.qkv_bias,
        "image_size": model.image_size, "patch_size": model.patch_size, "num_channels": model.channels,
        "id2label": {str(i): label for i, label in enumerate(labels)}, "label2id": {label: i for i, label in enumerate(labels)},
    }  # fmt: skip


def _of_gemma(model: ModelConfig) -> dict[str, Any]:
    """What the others have not; transformers 4 reads `sliding_window_pattern`, 5 reads `layer_types`."""
    pattern = {"sliding_window_pattern": model.global_every or model.layers + 1} if model.family == "gemma3" else {}
    return pattern | {
        "layer_types": layer_types(model.layers, model.global_every), "query_pre_attn_scalar": model.query_scalar,
        "attn_logit_softcapping": model.score_cap or None, "final_logit_softcapping": model.logit_cap or None,
    }  # fmt: skip


def _ropes(model: ModelConfig) -> dict[str, Any]:
    """In both schemas."""
    kind = next(theirs for theirs, ours in ROPES.items() if ours == model.rope_scaling)
    scaling: dict[str, Any] = {"rope_type": kind}
    if kind != "default":
        scaling["factor"] = model.rope_factor
    if kind in ("llama3", "yarn"):
        scaling["original_max_position_embeddings"] = model.rope_original
    if kind == "llama3":
        scaling |= {"low_freq_factor": model.rope_slow, "high_freq_factor": model.rope_fast}
    if kind == "yarn":
        scaling |= {"beta_slow": model.rope_slow, "beta_fast": model.rope_fast, "truncate": model.rope_truncate}
        scaling |= {"attention_factor": model.rope_amplitude} if model.rope_amplitude else {}
    old = None if kind == "default" else scaling
    found = {"rope_theta": model.rope_theta, "rope_scaling": old}
    far = scaling | {"rope_theta": model.rope_theta}
    if model.family != "gemma3":
        return found | {"rope_parameters": far}
    theta = model.rope_theta_local
    near = {"rope_type": "default", "rope_theta": theta} if theta else far
    return found | {
        "rope_local_base_freq": near["rope_theta"],
        "rope_parameters": {"full_attention": far, "sliding_attention": near},
    }


def config_of(directory: Path, source: Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """The config of a Hugging Face directory's model: their section `model`, the rest as `source` and `overrides` have it."""
    if not is_theirs(directory):
        raise ConfigError(f"{short(directory)} has no config.json; give a directory of Hugging Face's.")
    given = read_json(directory / CONFIG)
    usual = {"parallel": {"zero_stage": 0}} | _of_data(given, directory)
    config = load(source or usual, [*overrides, f"model.weights={directory}"])
    # what it is made from need not be there later
    return put(config, model={"weights": None})


def _of_data(given: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """What a config that says nothing of data has: short sequences, or the directory's pixels."""
    pad = {"uneven_batch": "pad"}
    family = FAMILY_OF.get(str(given.get("model_type")))
    if family is not None and FAMILIES[family].images:
        return {"train": pad, "data": {"source": "synthetic", "images": preprocessor.section(directory)}}
    longest = given.get("max_position_embeddings") or given.get("n_positions")
    length = min(longest, 256) if isinstance(longest, int) and longest > 0 else 256
    return {"train": pad | {"sequence_length": length}}
