"""GPT2LMHeadModel, whose Conv1D holds [in, out] as we do, and q, k and v in one."""

from collections.abc import Iterator
from typing import Any

from meshtrain.hf_families.family import HfFamily, WeightName
from meshtrain.hf_families.json_fields import (
    HF_FUNCTIONS,
    Json,
    activation,
    dropout,
    positive,
    refuse_unless,
)

DROPOUTS = ("resid_pdrop", "embd_pdrop", "attn_pdrop")


def section(config: Json, where: str) -> dict[str, Any]:
    refuse_unless(where, config, "scale_attn_weights", True)
    refuse_unless(where, config, "scale_attn_by_inverse_layer_idx", False)
    refuse_unless(where, config, "add_cross_attention", False)
    d_model = positive(config, "n_embd", where)
    return {
        "layers": positive(config, "n_layer", where),
        "d_model": d_model,
        "heads": positive(config, "n_head", where),
        "d_ff": config.get("n_inner") or 4 * d_model,
        "vocab_size": positive(config, "vocab_size", where),
        "max_positions": positive(config, "n_positions", where),
        "norm_eps": config.get("layer_norm_epsilon", 1e-5),
        "tied_head": config.get("tie_word_embeddings", True),
        "activation": activation(config.get("activation_function", "gelu_new"), where),
        "dropout": dropout(config, where, 0.1, *DROPOUTS),
    }


def config(model: Json, length: int) -> dict[str, Any]:
    return {
        "n_layer": model["layers"],
        "n_embd": model["d_model"],
        "n_head": model["heads"],
        "n_inner": model["d_ff"],
        "n_positions": model["max_positions"],
        "n_ctx": model["max_positions"],
        "layer_norm_epsilon": model["norm_eps"],
        "activation_function": HF_FUNCTIONS[model["activation"]],
        **dict.fromkeys(DROPOUTS, model["dropout"]),
    }


def names(model: Json) -> Iterator[WeightName]:
    layer = "transformer.h.{}."
    yield WeightName("embedding.tokens", "transformer.wte.weight")
    yield WeightName("embedding.positions", "transformer.wpe.weight")
    for ours, theirs in (("attention_norm", "ln_1"), ("mlp_norm", "ln_2")):
        yield WeightName(f"blocks.{ours}.scale", f"{layer}{theirs}.weight")
        yield WeightName(f"blocks.{ours}.bias", f"{layer}{theirs}.bias")
    for third, ours in enumerate("qkv"):
        yield WeightName(
            f"blocks.attention.{ours}", f"{layer}attn.c_attn.weight", "third", third
        )
        yield WeightName(
            f"blocks.attention.{ours}_bias", f"{layer}attn.c_attn.bias", "third", third
        )
    for ours, theirs in (
        ("attention.out", "attn.c_proj"),
        ("mlp.up", "mlp.c_fc"),
        ("mlp.down", "mlp.c_proj"),
    ):
        yield WeightName(f"blocks.{ours}", f"{layer}{theirs}.weight")
        yield WeightName(f"blocks.{ours}_bias", f"{layer}{theirs}.bias")
    yield WeightName("head.norm.scale", "transformer.ln_f.weight")
    yield WeightName("head.norm.bias", "transformer.ln_f.bias")
    yield WeightName("head.weight", "lm_head.weight", "linear")


GPT2 = HfFamily(
    "gpt2",
    "GPT2LMHeadModel",
    section,
    config,
    names,
    prefix="transformer.",
    qkv_bias=True,
    window=False,
    shared_heads=False,
    wide_heads=False,
)
