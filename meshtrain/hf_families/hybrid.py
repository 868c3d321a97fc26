"""Qwen3NextForCausalLM, and the text models of Qwen3.5, Qwen3_5ForCausalLM and Qwen3_5MoeForCausalLM: layers of gated
DeltaNet, and every so many one of gated attention.

    ours, of a layer         Qwen3-Next                              Qwen3.5
    linear q, k, v, z        in_proj_qkvz: of each key head its      in_proj_qkv, and in_proj_z
                             q, k, and its values' v and z
    linear beta, decay       in_proj_ba: likewise                    in_proj_b, in_proj_a
    linear q, k, v_conv      conv1d: the channels of q, k, v         likewise
    attention q, z           q_proj: of each head its q and z        likewise
    shared experts' gate     shared_expert_gate                      likewise

Fields that a config.json leaves out have their class's default. Positions are those of text: `mrope_section` shares the
turns between rows and columns of images. Their heads for several tokens ahead (`mtp.`) are left in their file.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

from meshtrain.errors import ConfigError, short
from meshtrain.families import period_of
from meshtrain.hf_families import llama, mixture
from meshtrain.hf_families.family import HfFamily, WeightName
from meshtrain.hf_families.json_fields import Json, activation, positive, refuse_unless

KINDS = {"linear_attention": "linear", "full_attention": "full"}
TYPES = {ours: theirs for theirs, ours in KINDS.items()}
KV_HEADS = {"qwen3_5": 4}  # the others: 2
LINEAR = {
    "key_heads": ("linear_num_key_heads", 16),
    "value_heads": ("linear_num_value_heads", 32),
    "key_dim": ("linear_key_head_dim", 128),
    "value_dim": ("linear_value_head_dim", 128),
    "conv": ("linear_conv_kernel_dim", 4),
}
SHARE = "partial_rotary_factor"


def section(family: str, config: Json, where: str) -> dict[str, Any]:
    for key, legal in (
        ("attention_bias", False),
        ("attention_dropout", 0.0),
        *mixture.LEGAL.items(),
    ):
        refuse_unless(where, config, key, legal)
    has_experts = family != "qwen3_5"
    width = config.get("moe_intermediate_size", 512) if has_experts else None
    fields = {**config, "intermediate_size": width} if has_experts else config
    kv_heads = config.get("num_key_value_heads") or KV_HEADS.get(family, 2)
    model = llama.sizes_section(fields, where, kv_heads, tied=False)
    rope = dict(config.get("rope_parameters") or {})
    share = rope.pop(SHARE, config.get(SHARE))
    model |= llama.rope_section({**config, "rope_parameters": rope, SHARE: None}, where)
    model |= {
        "head_dim": config.get("head_dim") or 256,
        "rope_share": 0.25 if share is None else float(share),
        "activation": activation(config.get("hidden_act", "silu"), where),
        "pattern": _pattern(config, where),
        "linear": {
            ours: positive({theirs: default, **config}, theirs, where)
            for ours, (theirs, default) in LINEAR.items()
        },
    }
    if not has_experts:
        return model
    model["moe"] = {
        "experts": positive(config, "num_experts", where),
        "top_k": positive(config, "num_experts_per_tok", where),
        "d_ff": model.pop("d_ff"),
        "shared_experts": _shared(config, where),
        "router": "softmax",
        "normalize": config.get("norm_topk_prob", True)
        if family == "qwen3_next"
        else True,
    }
    return model


def _shared(config: Json, where: str) -> int:
    """Returns how many experts the shared one is as wide as."""
    shared = config.get("shared_expert_intermediate_size", 512)
    width = config.get("moe_intermediate_size", 512)
    if shared % width:
        raise ConfigError(
            f"{where}: shared_expert_intermediate_size {shared} is not computed here; it must be a multiple of "
            f"moe_intermediate_size {width}."
        )
    return shared // width


def _pattern(config: Json, where: str) -> tuple[str, ...]:
    """Returns the shortest sequence of kinds that the layers go through over and over."""
    layers = positive(config, "num_hidden_layers", where)
    every = config.get("full_attention_interval") or 4
    default = [
        TYPES["full" if (layer + 1) % every == 0 else "linear"]
        for layer in range(layers)
    ]
    types = config.get("layer_types") or default
    if len(types) != layers or not set(types) <= set(KINDS):
        raise ConfigError(
            f"{where}: layer_types {short(types)} is not computed here; there are {layers} layers, each of "
            f"{' or '.join(KINDS)}."
        )
    return period_of([KINDS[name] for name in types])


def config(model: Json, length: int) -> dict[str, Any]:
    fields = llama.sizes_config(model, length)
    rope = llama.rope_parameters(model) | {SHARE: model["rope_share"]}
    fields |= llama.rope_config(model, rope) | {
        "rope_parameters": rope,
        SHARE: rope[SHARE],
    }
    pattern = model["pattern"] or ("full",)
    fields["layer_types"] = [
        TYPES[pattern[layer % len(pattern)]] for layer in range(model["layers"])
    ]
    fields |= {
        theirs: getattr(model["linear"], ours) for ours, (theirs, _) in LINEAR.items()
    }
    moe = model["moe"]
    if not moe.experts:
        return fields
    width = moe.d_ff or model["d_ff"]
    fields |= {
        "num_experts": moe.experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": width,
        "shared_expert_intermediate_size": moe.shared_experts * width,
    }
    # of Qwen3-Next it is the width of layers without experts
    del fields["intermediate_size"]
    if model["family"] == "qwen3_next":
        fields |= {"norm_topk_prob": moe.normalize, "decoder_sparse_step": 1}
    return fields


def names(model: Json) -> Iterator[WeightName]:
    """Yields the names of layers that are all alike (`meshtrain.config.stacks`), and of what is outside of them."""
    layer = "model.layers.{}."
    linear = tuple(model["pattern"]) == ("linear",)
    replaced = (
        ("blocks.attention.", "blocks.mlp.")
        if model["moe"].experts
        else ("blocks.attention.",)
    )
    kept = (
        "blocks.attention.k",
        "blocks.attention.v",
        "blocks.attention.out",
        "blocks.attention.q_norm",
    )
    for name in llama.names(model):
        if not name.ours.startswith(replaced) or (
            not linear and name.ours.startswith(kept)
        ):
            yield name
    if model["moe"].experts:
        for ours in ("gate", "up", "down"):
            theirs = f"{layer}mlp.shared_expert.{ours}_proj.weight"
            yield WeightName(f"blocks.mlp.{ours}", theirs, "linear")
        yield WeightName(
            "blocks.mlp.token_gate", f"{layer}mlp.shared_expert_gate.weight", "linear"
        )
    if linear:
        yield from _linear_names(model, f"{layer}linear_attn.")
        return
    width = model["head_dim"]
    theirs = f"{layer}self_attn.q_proj.weight"
    for part, ours in enumerate(("q", "z")):
        rows = (model["heads"], 2 * width, part * width)
        yield WeightName(f"blocks.attention.{ours}", theirs, "rows", rows=rows)


def _linear_names(model: Json, at: str) -> Iterator[WeightName]:
    ours = "blocks.attention."
    sizes = model["linear"]
    keys = sizes.key_heads * sizes.key_dim
    values = sizes.value_heads * sizes.value_dim
    widths = {"q": keys, "k": keys, "v": values}
    gates = {"beta": sizes.value_heads, "decay": sizes.value_heads}
    yield from _rows(f"{ours}{{}}_conv", f"{at}conv1d.weight", widths)
    if model["family"] == "qwen3_next":
        heads = sizes.key_heads
        yield from _rows(
            f"{ours}{{}}", f"{at}in_proj_qkvz.weight", widths | {"z": values}, heads
        )
        yield from _rows(f"{ours}{{}}", f"{at}in_proj_ba.weight", gates, heads)
    else:
        yield from _rows(f"{ours}{{}}", f"{at}in_proj_qkv.weight", widths)
        for name, theirs in (("z", "z"), ("beta", "b"), ("decay", "a")):
            yield WeightName(f"{ours}{name}", f"{at}in_proj_{theirs}.weight", "linear")
    yield WeightName(f"{ours}decay_log", f"{at}A_log")
    yield WeightName(f"{ours}decay_bias", f"{at}dt_bias")
    yield WeightName(f"{ours}norm.scale", f"{at}norm.weight")
    yield WeightName(f"{ours}out", f"{at}out_proj.weight", "linear")


def _rows(
    ours: str, theirs: str, widths: dict[str, int], groups: int = 1
) -> Iterator[WeightName]:
    """Yields weights whose outputs are rows of one tensor, those of each of `groups` heads beside one another."""
    total = sum(widths.values()) // groups
    first = 0
    for name, width in widths.items():
        yield WeightName(ours.format(name), theirs, "rows", rows=(groups, total, first))
        first += width // groups


def _family(name: str, architecture: str, **options: Any) -> HfFamily:
    return HfFamily(
        name,
        architecture,
        partial(section, name),
        config,
        names,
        qk_norm=True,
        hybrid=True,
        **options,
    )


EXPERTS: dict[str, Any] = {
    "in_memory": mixture.in_memory,
    "router": "softmax",
    "normalize": None,
}
QWEN3_NEXT = _family("qwen3_next", "Qwen3NextForCausalLM", **EXPERTS)
QWEN3_5 = _family("qwen3_5", "Qwen3_5ForCausalLM", model_type="qwen3_5_text")
QWEN3_5_MOE = _family(
    "qwen3_5_moe",
    "Qwen3_5MoeForCausalLM",
    model_type="qwen3_5_moe_text",
    **EXPERTS | {"normalize": True},
)
