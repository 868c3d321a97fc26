"""DeepseekV3ForCausalLM: latent attention, first layers that are dense, a router of sigmoid with groups and a bias.

    DeepSeek-V3     671B of which 37B are active, 61 layers, 256 experts in 8 groups, queries of 1536 numbers
    Kimi-K2         1T, 32B; 61 layers of 64 heads, 384 experts in one group; its files say kimi_k2
    Moonlight       16B, 3B; 27 layers of 16 heads, 64 experts in one group, plain queries; its files say deepseek_v3

The three are one class by other numbers. Its rotary pairs stand next to one another in files (`rope_interleave`), here
half a width apart. The hub's files have matrices in float8, with a scale for each block of 128 x 128, which are read as
what they stand for (`meshtrain.hf.fp8`). transformers keeps no weights of predictions of several tokens (`model.mtp`),
which the files have as layers behind the last one.
"""

from collections.abc import Iterator
from typing import Any

from meshtrain.families import yarn_amplitude
from meshtrain.hf_families import llama, mixture
from meshtrain.hf_families.family import HfFamily, WeightName
from meshtrain.hf_families.json_fields import Json, activation, positive, refuse_unless

# Fields with the one value that is computed here.
LEGAL = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "moe_layer_freq": 1,
    "rope_interleave": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
SIZES = {"q_rank": "q_lora_rank", "kv_rank": "kv_lora_rank", "nope": "qk_nope_head_dim"}
SIZES |= {"rope": "qk_rope_head_dim", "value": "v_head_dim"}
MSCALES = ("mscale", "mscale_all_dim")
LAYER = "model.layers.{}."
FP8 = "fp8"  # quantization_config.quant_method


def section(config: Json, where: str) -> dict[str, Any]:
    for key, legal in LEGAL.items():
        refuse_unless(where, config, key, legal)
    heads = positive(config, "num_attention_heads", where)
    model = llama.sizes_section(config, where, heads, tied=False)
    model["activation"] = activation(config.get("hidden_act", "silu"), where)
    mla = {ours: config.get(theirs) or 0 for ours, theirs in SIZES.items()}
    moe = mixture.sigmoid_section(config, where, config.get("n_shared_experts") or 0)
    model["dense_d_ff"] = model.pop("d_ff")
    model |= {
        "dense_layers": config.get("first_k_dense_replace", 3),
        "mla": mla,
        "moe": moe,
    }
    return model | rope_section(config, where, mla["nope"] + mla["rope"])


def rope_section(config: Json, where: str, width: int) -> dict[str, Any]:
    """Returns the keys of rotary positions, and of the scores, which yarn's factors make larger."""
    scales: dict[str, float] = {}
    plain = dict(config)
    for key in ("rope_parameters", "rope_scaling"):
        if plain.get(key):
            rope = dict(plain[key])
            scales |= {
                name: float(rope.pop(name)) for name in MSCALES if rope.get(name)
            }
            plain[key] = rope
    model = llama.rope_section(plain, where)
    if model["rope_scaling"] != "yarn":
        return model
    factor = model["rope_factor"]
    of_angles, of_scores = (scales.get(name, 0.0) for name in MSCALES)
    model["query_scalar"] = width / yarn_amplitude(factor, of_scores) ** 4
    if not model["rope_amplitude"]:
        # of the two only with both
        both = yarn_amplitude(factor, of_angles) / yarn_amplitude(factor, of_scores)
        model["rope_amplitude"] = both if len(scales) == 2 else yarn_amplitude(factor)
    return model


def config(model: Json, length: int) -> dict[str, Any]:
    rope = rope_parameters(model)
    return {
        **llama.sizes_config(model, length),
        **llama.rope_config(model, rope),
        **LEGAL,
        **{
            theirs: getattr(model["mla"], ours) or None
            for ours, theirs in SIZES.items()
        },
        "head_dim": model["mla"].rope,
        "rope_parameters": rope,
        "num_nextn_predict_layers": model["mtp"],
        **mixture.dense_first_config(model),
    }


def rope_parameters(model: Json) -> dict[str, Any]:
    """Returns them with `mscale_all_dim`, by which scores grow, and `mscale`, by which cos and sin do."""
    rope = llama.rope_parameters(model)
    if model["rope_scaling"] != "yarn":
        return rope
    of_scores = (model["head_dim"] / model["query_scalar"]) ** 0.25
    of_angles = of_scores * (model["rope_amplitude"] or 1.0)
    shares = [
        (grown - 1) / (yarn_amplitude(model["rope_factor"]) - 1)
        for grown in (of_angles, of_scores)
    ]
    if shares[1]:
        rope.pop("attention_factor", None)
        rope |= {
            name: round(share, 9) for name, share in zip(MSCALES, shares, strict=True)
        }
    return rope


def names(model: Json) -> Iterator[WeightName]:
    """Yields the names of all weights; of further predictions those of layers behind the last one."""
    of_model = list(_names(model))
    yield from of_model
    for depth in range(model["mtp"]):
        ours = f"mtp.depth_{depth}."
        layer = f"model.layers.{model['layers'] + depth}."
        yield WeightName(f"{ours}embedding_norm.scale", f"{layer}enorm.weight")
        yield WeightName(f"{ours}stream_norm.scale", f"{layer}hnorm.weight")
        yield WeightName(f"{ours}project", f"{layer}eh_proj.weight", "linear")
        yield WeightName(f"{ours}norm.scale", f"{layer}shared_head.norm.weight")
        for name in of_model:
            if name.ours.startswith("blocks."):
                theirs = layer + name.theirs.removeprefix(LAYER).replace("{}", "{1}")
                block = f"{ours}block.{name.ours.removeprefix('blocks.')}"
                yield name._replace(ours=block, theirs=theirs)


def _names(model: Json) -> Iterator[WeightName]:
    """Yields those of all layers: of the shared experts that of a dense MLP too, whichever a layer has."""
    layer = LAYER
    at = f"{layer}self_attn."
    ours = "blocks.attention."
    others = (f"{ours}k", f"{ours}v", f"{ours}q", "blocks.mlp.")
    yield from (name for name in llama.names(model) if not name.ours.startswith(others))
    rope = model["mla"].rope
    yield WeightName(f"{ours}q", f"{at}q_proj.weight", "turned", rope)
    yield WeightName(f"{ours}q_down", f"{at}q_a_proj.weight", "linear")
    yield WeightName(f"{ours}q_norm.scale", f"{at}q_a_layernorm.weight")
    yield WeightName(f"{ours}q_up", f"{at}q_b_proj.weight", "turned", rope)
    yield WeightName(f"{ours}kv_down", f"{at}kv_a_proj_with_mqa.weight", "turned", rope)
    yield WeightName(f"{ours}kv_norm.scale", f"{at}kv_a_layernorm.weight")
    yield WeightName(f"{ours}k_up", f"{at}kv_b_proj.weight", "joined", 0)
    yield WeightName(f"{ours}v_up", f"{at}kv_b_proj.weight", "joined", 1)
    mlp = f"{layer}mlp.shared_experts." if model["moe"].experts else f"{layer}mlp."
    for name in ("gate", "up", "down"):
        yield WeightName(f"blocks.mlp.{name}", f"{mlp}{name}_proj.weight", "linear")
    yield WeightName(
        "blocks.experts.load", f"{layer}mlp.gate.e_score_correction_bias", "load"
    )


def _family(name: str) -> HfFamily:
    return HfFamily(
        name,
        "DeepseekV3ForCausalLM",
        section,
        config,
        names,
        mixture.in_memory,
        model_type="deepseek_v3",
        window=False,
        router="sigmoid",
        normalize=None,
        dense_first=True,
        latent=True,
    )


DEEPSEEK_V3 = _family("deepseek_v3")
MOONLIGHT = _family("moonlight")
