"""GptOssForCausalLM: experts in one tensor a layer, biases, a sink for each head, a window by turns.

The hub's files have the experts' matrices in MXFP4, as `_blocks` and `_scales`, which are read as what they stand for
(`meshtrain.hf.mxfp4`). Written are tensors of the names that transformers has in memory, which it loads likewise.
"""

from collections.abc import Iterator
from typing import Any

from meshtrain.families import FAMILIES
from meshtrain.hf_families import llama
from meshtrain.hf_families.family import HfFamily, WeightName
from meshtrain.hf_families.gemma import alternating, layer_types
from meshtrain.hf_families.json_fields import Json, positive, refuse_unless

WINDOW = 128
THETA = 150_000.0
ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
# Fields with the one value that is computed here.
LEGAL = {
    "attention_bias": True,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "swiglu_limit": 7.0,
    "swiglu_alpha": 1.702,
}
MXFP4 = "mxfp4"  # quantization_config.quant_method


def section(config: Json, where: str) -> dict[str, Any]:
    for key, legal in LEGAL.items():
        refuse_unless(where, config, key, legal)
    window, global_every = alternating(config, where, 2, WINDOW)
    model = llama.sizes_section(
        config, where, config.get("num_key_value_heads", 8), tied=False
    )
    model |= {
        "norm_eps": config.get("rms_norm_eps", 1e-5),
        "head_dim": config.get("head_dim", 64),
        "window": window,
        "global_every": global_every,
    }
    moe = {
        "experts": positive(config, "num_local_experts", where),
        "top_k": positive(config, "num_experts_per_tok", where),
        "d_ff": model.pop("d_ff"),
        "router": "softmax_top_k",
    }
    stretched = (
        {}
        if config.get("rope_parameters") or config.get("rope_scaling")
        else {"rope_parameters": ROPE}
    )
    return (
        model | {"moe": moe} | llama.rope_section({**config, **stretched}, where, THETA)
    )


def config(model: Json, length: int) -> dict[str, Any]:
    moe = model["moe"]
    rope = llama.rope_parameters(model)
    return {
        **llama.sizes_config(model, length, "silu"),
        **llama.rope_config(model, rope),
        **LEGAL,
        "rope_parameters": rope,
        "intermediate_size": moe.d_ff or FAMILIES["gpt_oss"].d_ff(model["d_model"]),
        "num_local_experts": moe.experts,
        "num_experts_per_tok": moe.top_k,
        "sliding_window": model["window"] or None,
        "layer_types": layer_types(model["layers"], model["global_every"]),
    }


def names(model: Json) -> Iterator[WeightName]:
    layer = "model.layers.{}."
    yield from (name for name in llama.names(model) if ".experts." not in name.ours)
    yield WeightName("blocks.attention.out_bias", f"{layer}self_attn.o_proj.bias")
    yield WeightName("blocks.attention.sinks", f"{layer}self_attn.sinks")
    yield WeightName("blocks.experts.router", f"{layer}mlp.router.weight", "linear")
    yield WeightName("blocks.experts.router_bias", f"{layer}mlp.router.bias")
    for suffix in ("", "_bias"):
        for part, ours in enumerate(("gate", "up")):
            theirs = f"{layer}mlp.experts.gate_up_proj{suffix}"
            yield WeightName(
                f"blocks.experts.{ours}{suffix}", theirs, "alternating", part
            )
        yield WeightName(
            f"blocks.experts.down{suffix}",
            f"{layer}mlp.experts.down_proj{suffix}",
            "merged",
        )


GPT_OSS = HfFamily(
    "gpt_oss",
    "GptOssForCausalLM",
    section,
    config,
    names,
    qkv_bias=True,
    router="softmax_top_k",
    normalize=None,
    activation="gelu_quick",
    window_by_turns=True,
)
