"""Glm4MoeForCausalLM (GLM-4.5): first layers that are dense, a router of sigmoid with groups and a bias, heads of which a
part is turned.

    ours                 theirs
    dense_layers         first_k_dense_replace
    dense_d_ff           intermediate_size, of the dense layers
    rope_share           partial_rotary_factor
    qkv_bias, qk_norm    attention_bias, use_qk_norm
    moe.shared_experts   n_shared_experts; in files one MLP, as here
    moe.groups           n_group, topk_group
    experts.load         mlp.gate.e_score_correction_bias, added to scores before experts are chosen

Layers behind the last one, which predict further tokens, are no part of the class.
"""

from collections.abc import Iterator
from typing import Any

from meshtrain.families import FAMILIES
from meshtrain.hf_families import llama
from meshtrain.hf_families.family import HfFamily, WeightName
from meshtrain.hf_families.json_fields import Json, activation, positive, refuse_unless
from meshtrain.hf_families.mixture import in_memory

SHARE = "partial_rotary_factor"


def section(config: Json, where: str) -> dict[str, Any]:
    refuse_unless(where, config, "attention_dropout", 0.0)
    heads = positive(config, "num_attention_heads", where)
    kv_heads = config.get("num_key_value_heads") or heads
    model = llama.sizes_section(config, where, kv_heads, tied=False)
    groups = (config.get("n_group") or 1, config.get("topk_group") or 1)
    share: Any = (config.get("rope_parameters") or {}).get(SHARE, config.get(SHARE, 0.5))
    whole = {key: value for key, value in config.items() if key != SHARE}
    if whole.get("rope_parameters"):
        whole["rope_parameters"] = {**whole["rope_parameters"], SHARE: 1.0}
    dense = config.get("first_k_dense_replace", 1)
    model |= {
        "norm_eps": config.get("rms_norm_eps", 1e-5),
        "activation": activation(config.get("hidden_act", "silu"), where),
        "qkv_bias": bool(config.get("attention_bias", False)),
        "qk_norm": bool(config.get("use_qk_norm", False)),
        "rope_share": float(share),
        "dense_layers": dense,
        "moe": {
            "experts": positive(config, "n_routed_experts", where),
            "top_k": positive(config, "num_experts_per_tok", where),
            "d_ff": positive(config, "moe_intermediate_size", where),
            "shared_experts": config.get("n_shared_experts", 1),
            "router": "sigmoid",
            "normalize": bool(config.get("norm_topk_prob", True)),
            "route_scale": float(config.get("routed_scaling_factor", 1.0)),
            "groups": groups if groups[0] > 1 else (),
            "balance": "bias",
        },
    }
    width = model.pop("d_ff")
    if dense:
        model["dense_d_ff"] = width
    if config.get("head_dim"):
        model["head_dim"] = config["head_dim"]
    return model | llama.rope_section(whole, where)


def config(model: Json, length: int) -> dict[str, Any]:
    moe = model["moe"]
    rope = llama.rope_parameters(model) | {SHARE: model["rope_share"]}
    return {
        **llama.sizes_config(model, length),
        **llama.rope_config(model, rope),
        "rope_parameters": rope,
        SHARE: model["rope_share"],
        "attention_bias": model["qkv_bias"],
        "use_qk_norm": model["qk_norm"],
        "first_k_dense_replace": model["dense_layers"],
        "intermediate_size": model["dense_d_ff"],
        "moe_intermediate_size": moe.d_ff or FAMILIES[model["family"]].d_ff(model["d_model"]),
        "n_routed_experts": moe.experts,
        "n_shared_experts": moe.shared_experts,
        "num_experts_per_tok": moe.top_k,
        "norm_topk_prob": moe.normalize,
        "routed_scaling_factor": moe.route_scale,
        "n_group": moe.groups[0] if moe.groups else 1,
        "topk_group": moe.groups[1] if moe.groups else 1,
        "num_nextn_predict_layers": 0,
    }


def names(model: Json) -> Iterator[WeightName]:
    """Yields the names of a stack's layers: of the shared experts that of a dense MLP too, whichever it has."""
    layer = "model.layers.{}.mlp."
    yield from (name for name in llama.names(model) if not name.ours.startswith("blocks.mlp."))
    mlp = f"{layer}shared_experts." if model["moe"].experts else layer
    for name in ("gate", "up", "down"):
        yield WeightName(f"blocks.mlp.{name}", f"{mlp}{name}_proj.weight", "linear")
    yield WeightName("blocks.experts.load", f"{layer}gate.e_score_correction_bias", "load")


GLM4_MOE = HfFamily(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    section,
    config,
    names,
    in_memory,
    qkv_bias=None,
    qk_norm=None,
    window=False,
    router="sigmoid",
    normalize=None,
    dense_first=True,
    part_turned=True,
)
