"""ViTForImageClassification, whose head reads the class token."""

from collections.abc import Iterator
from typing import Any

from meshtrain.errors import ConfigError, short
from meshtrain.hf_families.family import HfFamily, WeightName
from meshtrain.hf_families.json_fields import (
    HF_FUNCTIONS,
    Json,
    activation,
    dropout,
    positive,
    refuse_unless,
)

ARCHITECTURE = "ViTForImageClassification"
DROPOUTS = ("hidden_dropout_prob", "attention_probs_dropout_prob")


def section(config: Json, where: str) -> dict[str, Any]:
    architectures = config.get("architectures") or [ARCHITECTURE]
    if architectures != [ARCHITECTURE]:
        raise ConfigError(
            f"{where}: architectures {short(architectures)} has no classes, or more than them; load it with "
            f"{ARCHITECTURE}, and save that."
        )
    d_model = positive(config, "hidden_size", where)
    heads = positive(config, "num_attention_heads", where)
    refuse_unless(where, config, "head_dim", d_model // heads)
    return {
        "layers": positive(config, "num_hidden_layers", where),
        "d_model": d_model,
        "heads": heads,
        "d_ff": positive(config, "intermediate_size", where),
        "vocab_size": len(config.get("id2label") or ())
        or config.get("num_labels")
        or 2,
        "norm_eps": config.get("layer_norm_eps", 1e-12),
        "activation": activation(config.get("hidden_act", "gelu"), where),
        "dropout": dropout(config, where, 0.0, *DROPOUTS),
        "qkv_bias": config.get("qkv_bias", True),
        "image_size": _square(config, "image_size", 224, where),
        "patch_size": _square(config, "patch_size", 16, where),
        "channels": config.get("num_channels", 3),
        "pool": "class",
    }


def _square(config: Json, key: str, default: int, where: str) -> int:
    """Returns the side of a square, which may be given as height and width."""
    value = config.get(key, default)
    sides = value if isinstance(value, list) else [value]
    if len(set(map(str, sides))) != 1 or len(sides) > 2:
        raise ConfigError(
            f"{where}: {key} {short(value)} is not computed here; it must be a square's."
        )
    return positive({key: sides[0]}, key, where)


def config(model: Json, length: int) -> dict[str, Any]:
    labels = [f"LABEL_{i}" for i in range(model["vocab_size"])]
    return {
        "num_hidden_layers": model["layers"],
        "hidden_size": model["d_model"],
        "num_attention_heads": model["heads"],
        "intermediate_size": model["d_ff"],
        "hidden_act": HF_FUNCTIONS[model["activation"]],
        "layer_norm_eps": model["norm_eps"],
        "qkv_bias": model["qkv_bias"],
        **dict.fromkeys(DROPOUTS, model["dropout"]),
        "image_size": model["image_size"],
        "patch_size": model["patch_size"],
        "num_channels": model["channels"],
        "id2label": {str(i): label for i, label in enumerate(labels)},
        "label2id": {label: i for i, label in enumerate(labels)},
    }


def names(model: Json) -> Iterator[WeightName]:
    """Yields the names in the files, which transformers 4 has in memory too, and 5 others."""
    layer = "vit.encoder.layer.{}."
    embeddings = "vit.embeddings."
    yield WeightName(
        "embedding.patches",
        f"{embeddings}patch_embeddings.projection.weight",
        "patches",
    )
    yield WeightName("embedding.bias", f"{embeddings}patch_embeddings.projection.bias")
    yield WeightName("embedding.class_token", f"{embeddings}cls_token", ones=2)
    yield WeightName("embedding.positions", f"{embeddings}position_embeddings", ones=1)
    for ours, theirs in (
        ("attention_norm", "layernorm_before"),
        ("mlp_norm", "layernorm_after"),
    ):
        yield WeightName(f"blocks.{ours}.scale", f"{layer}{theirs}.weight")
        yield WeightName(f"blocks.{ours}.bias", f"{layer}{theirs}.bias")
    for ours, theirs in (
        ("attention.q", "attention.attention.query"),
        ("attention.k", "attention.attention.key"),
        ("attention.v", "attention.attention.value"),
        ("attention.out", "attention.output.dense"),
        ("mlp.up", "intermediate.dense"),
        ("mlp.down", "output.dense"),
    ):
        yield WeightName(f"blocks.{ours}", f"{layer}{theirs}.weight", "linear")
        yield WeightName(f"blocks.{ours}_bias", f"{layer}{theirs}.bias")
    yield WeightName("head.norm.scale", "vit.layernorm.weight")
    yield WeightName("head.norm.bias", "vit.layernorm.bias")
    yield WeightName("head.weight", "classifier.weight", "linear")
    yield WeightName("head.bias", "classifier.bias")


VIT = HfFamily(
    "vit",
    ARCHITECTURE,
    section,
    config,
    names,
    prefix="vit.",
    qkv_bias=None,
    window=False,
    shared_heads=False,
    wide_heads=False,
)
