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
        "experts": positive({experts: config.get("num_local_experts"), **config}, experts, where),
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
    return experts, "moe_intermediate_size" if family == "qwen3_moe" else "intermediate_size"


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
    "olmoe", "OlmoeForCausalLM", qk_norm=True, normalize=None, window=False, wide_heads=False
)
