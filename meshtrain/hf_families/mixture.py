"""MixtralForCausalLM, Qwen3MoeForCausalLM and OlmoeForCausalLM: Llama's fields and names, with experts in the place of
each layer's MLP.

    ours                 Mixtral                  Qwen3-MoE                   OLMoE
    moe.experts          num_local_experts        num_experts, or likewise    num_experts
    moe.top_k            num_experts_per_tok      likewise                    likewise
    moe.d_ff             intermediate_size        moe_intermediate_size       intermediate_size
    moe.normalize        always                   norm_topk_prob              norm_topk_prob

Files have a tensor for each expert's matrix, which transformers 5 merges in memory;
`save_pretrained(save_original_format=False)` leaves them so, and both are read. Their `router_aux_loss_coef` is of a
loss over a batch, which no mesh here would agree on (`model.moe.balance`): it stays in their file.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

from meshtrain.families import FAMILIES
from meshtrain.hf_families import llama
from meshtrain.hf_families.family import HfFamily, WeightName
from meshtrain.hf_families.json_fields import Json, positive, refuse_unless

# Fields with the one value that is computed here.
LEGAL = {
    "router_jitter_noise": 0.0,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "clip_qkv": None,
}


def section(family: str, config: Json, where: str) -> dict[str, Any]:
    for key, legal in LEGAL.items():
        refuse_unless(where, config, key, legal)
    experts, width = _fields(family)
    sizes = {"intermediate_size": positive(config, width, where)}
    model = llama.section(family, {**config, **sizes}, where)
    normalize = family == "mixtral" or bool(config.get("norm_topk_prob"))
    moe = {
        "experts": positive(
            {experts: config.get("num_local_experts"), **config}, experts, where
        ),
        "top_k": positive(config, "num_experts_per_tok", where),
        "d_ff": model.pop("d_ff"),
        "router": "softmax",
        "normalize": normalize,
    }
    return model | {"moe": moe}


def config(model: Json, length: int) -> dict[str, Any]:
    family = model["family"]
    moe = model["moe"]
    experts, width = _fields(family)
    fields = llama.config(model, length)
    # of Qwen3-MoE it is the width of layers without experts
    del fields["intermediate_size"]
    fields |= {
        experts: moe.experts,
        "num_experts_per_tok": moe.top_k,
        width: moe.d_ff or FAMILIES[family].d_ff(model["d_model"]),
    }
    if family == "mixtral":
        return fields
    return fields | {
        "norm_topk_prob": moe.normalize,
        **({"decoder_sparse_step": 1} if family == "qwen3_moe" else {}),
    }


def _fields(family: str) -> tuple[str, str]:
    """Returns the names of the number of experts and of their width."""
    experts = "num_local_experts" if family == "mixtral" else "num_experts"
    return (
        experts,
        "moe_intermediate_size" if family == "qwen3_moe" else "intermediate_size",
    )


def in_memory(model: Json) -> Iterator[WeightName]:
    """Yields the names of experts and router where files have them as transformers 5 does (its
    `conversion_mapping`).
    """
    mlp = "model.layers.{}.mlp."
    yield WeightName("blocks.experts.gate", f"{mlp}experts.gate_up_proj", "half", 0)
    yield WeightName("blocks.experts.up", f"{mlp}experts.gate_up_proj", "half", 1)
    yield WeightName("blocks.experts.down", f"{mlp}experts.down_proj", "stacked")
    yield WeightName("blocks.experts.router", f"{mlp}gate.weight", "linear")


def _family(name: str, architecture: str, **options: Any) -> HfFamily:
    return HfFamily(
        name,
        architecture,
        partial(section, name),
        config,
        llama.names,
        in_memory,
        router="softmax",
        **options,
    )


MIXTRAL = _family("mixtral", "MixtralForCausalLM")
QWEN3_MOE = _family("qwen3_moe", "Qwen3MoeForCausalLM", qk_norm=True, normalize=None)
OLMOE = _family(
    "olmoe",
    "OlmoeForCausalLM",
    qk_norm=True,
    normalize=None,
    window=False,
    wide_heads=False,
)


def sigmoid_section(config: Json, where: str, shared: Any) -> dict[str, Any]:
    """Returns the section `moe` of DeepSeek's fields: a router of sigmoid with groups and a bias."""
    groups = (config.get("n_group") or 1, config.get("topk_group") or 1)
    return {
        "experts": positive(config, "n_routed_experts", where),
        "top_k": positive(config, "num_experts_per_tok", where),
        "d_ff": positive(config, "moe_intermediate_size", where),
        "shared_experts": shared,
        "router": "sigmoid",
        "normalize": bool(config.get("norm_topk_prob", True)),
        "route_scale": float(config.get("routed_scaling_factor", 1.0)),
        "groups": groups if groups[0] > 1 else (),
        "balance": "bias",
    }


def dense_first_config(model: Json) -> dict[str, Any]:
    """Returns DeepSeek's fields of experts behind dense layers."""
    moe = model["moe"]
    return {
        "first_k_dense_replace": model["dense_layers"],
        "intermediate_size": model["dense_d_ff"],
        "moe_intermediate_size": moe.d_ff
        or FAMILIES[model["family"]].d_ff(model["d_model"]),
        "n_routed_experts": moe.experts,
        "n_shared_experts": moe.shared_experts,
        "num_experts_per_tok": moe.top_k,
        "norm_topk_prob": moe.normalize,
        "routed_scaling_factor": moe.route_scale,
        "n_group": moe.groups[0] if moe.groups else 1,
        "topk_group": moe.groups[1] if moe.groups else 1,
    }
