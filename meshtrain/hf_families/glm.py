"""Glm4MoeForCausalLM (GLM-4.5): dense layers first, a router of sigmoid with groups and a bias, heads of which a
part is turned.

    ours                 theirs
    dense_layers         first_k_dense_replace
    dense_d_ff           intermediate_size, of the dense layers
    rope_share           partial_rotary_factor
    qkv_bias, qk_norm    attention_bias, use_qk_norm
    moe.shared_experts   n_shared_experts; in files one MLP, as here
    moe.groups           n_group, topk_group
    experts.load         mlp.gate.e_score_correction_bias, added to scores before experts are chosen

Layers behind the last one, which predict further tokens, do not belong to the class.
"""

from collections.abc import Iterator
from typing import Any

from meshtrain.hf_families import llama, mixture
from meshtrain.hf_families.family import HfFamily, WeightName
from meshtrain.hf_families.json_fields import Json, activation, positive, refuse_unless

SHARE = "partial_rotary_factor"


def section(config: Json, where: str) -> dict[str, Any]:
    refuse_unless(where, config, "attention_dropout", 0.0)
    heads = positive(config, "num_attention_heads", where)
    kv_heads = config.get("num_key_value_heads") or heads
    model = llama.sizes_section(config, where, kv_heads, tied=False)
    rope = config.get("rope_parameters") or {}
    share = float(rope.get(SHARE) or config.get(SHARE) or 0.5)
    whole = {key: value for key, value in config.items() if key != SHARE}
    if rope:
        whole["rope_parameters"] = {**rope, SHARE: 1.0}
    dense = config.get("first_k_dense_replace", 1)
    model |= {
        "norm_eps": config.get("rms_norm_eps", 1e-5),
        "activation": activation(config.get("hidden_act", "silu"), where),
        "qkv_bias": bool(config.get("attention_bias", False)),
        "qk_norm": bool(config.get("use_qk_norm", False)),
        "rope_share": share,
        "dense_layers": dense,
        "moe": mixture.sigmoid_section(
            config, where, config.get("n_shared_experts", 1)
        ),
    }
    width = model.pop("d_ff")
    if dense:
        model["dense_d_ff"] = width
    if config.get("head_dim"):
        model["head_dim"] = config["head_dim"]
    return model | llama.rope_section(whole, where)


def config(model: Json, length: int) -> dict[str, Any]:
    rope = llama.rope_parameters(model) | {SHARE: model["rope_share"]}
    return {
        **llama.sizes_config(model, length),
        **llama.rope_config(model, rope),
        "rope_parameters": rope,
        SHARE: model["rope_share"],
        "attention_bias": model["qkv_bias"],
        "use_qk_norm": model["qk_norm"],
        **mixture.dense_first_config(model),
        "num_nextn_predict_layers": 0,
    }


def names(model: Json) -> Iterator[WeightName]:
    """Yields the names of a stack's layers: of the shared experts that of a dense MLP too, whichever it has."""
    layer = "model.layers.{}.mlp."
    yield from (
        name for name in llama.names(model) if not name.ours.startswith("blocks.mlp.")
    )
    mlp = f"{layer}shared_experts." if model["moe"].experts else layer
    for name in ("gate", "up", "down"):
        yield WeightName(f"blocks.mlp.{name}", f"{mlp}{name}_proj.weight", "linear")
    yield WeightName(
        "blocks.experts.load", f"{layer}gate.e_score_correction_bias", "load"
    )


GLM4_MOE = HfFamily(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    section,
    config,
    names,
    mixture.in_memory,
    qkv_bias=None,
    qk_norm=None,
    window=False,
    router="sigmoid",
    normalize=None,
    dense_first=True,
    part_turned=True,
)
