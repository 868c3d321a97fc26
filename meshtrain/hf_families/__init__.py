"""Model classes of Hugging Face transformers: their config.json as our section `model` and back, and the names of their
weights.

    config.json ──model_section──► section `model` ──config_json──► config.json

An entry a class. A family with new computations is an entry in `meshtrain.families` too; one that only has other names
or fields stands
here alone: `llama` (Llama, Mistral, Qwen), `gemma`, `gpt2`, `deepseek`, `vit`. `family` says what an entry holds,
`json_fields` reads config.json.

Options of a model that a class cannot hold are refused by name, and not left out in silence:

                 biases of q, k, v   q and k normed   window   heads of another width, shared keys   Gemma's
    llama        no                  no               no       yes                                   no
    mistral      no                  no               yes      yes                                   no
    qwen2        yes                 no               yes      yes                                   no
    qwen3        no                  yes              yes      yes                                   no
    mixtral      no                  no               yes      yes                                   no
    qwen3_moe    no                  yes              yes      yes                                   no
    olmoe        no                  all heads'       no       shared keys                           no
    deepseek_v3  no                  no               no       latent attention                      no
    glm4_moe     either              either           no       yes                                   no
    gpt_oss      yes                 no               by turns yes                                   no
    gpt2         yes                 no               no       no                                    no
    gemma2       no                  no               always   yes                                   but another base
    gemma3       no                  yes              always   yes                                   but capped scores
    vit          either              no               no       no                                    no

Classes with experts have them in every layer, without shared ones, and routers of softmax; but DeepSeek's and GLM's,
whose first layers are dense and whose router is of sigmoid. Moonlight and Kimi-K2 are DeepSeek's class by other
numbers; GLM turns a part of a head. Gemma's are norms by 1 +
scale, also behind attention and MLP, and scaled embeddings, all three always; the scores' own scale, capped scores and
logits, layers that see all by turns, and another rotary base for those that do not. Read in transformers 5.23
(models/*/modeling_*.py). Each holds any of our functions in its MLP, and a head that is tied or is not. No JAX.
"""

from pathlib import Path
from typing import Any

from meshtrain.errors import ConfigError, short
from meshtrain.families import FAMILIES
from meshtrain.hf_families.deepseek import DEEPSEEK_V3, FP8, MOONLIGHT
from meshtrain.hf_families.family import HfFamily, WeightName
from meshtrain.hf_families.gemma import GEMMA2, GEMMA3
from meshtrain.hf_families.glm import GLM4_MOE
from meshtrain.hf_families.gpt2 import GPT2
from meshtrain.hf_families.gpt_oss import GPT_OSS, MXFP4
from meshtrain.hf_families.hybrid import QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT
from meshtrain.hf_families.json_fields import (
    Json,
    check_types,
    read_json,
    refuse_unless,
)
from meshtrain.hf_families.llama import LLAMA, MISTRAL, QWEN2, QWEN3
from meshtrain.hf_families.mixture import MIXTRAL, OLMOE, QWEN3_MOE
from meshtrain.hf_families.vit import VIT

__all__ = [
    "CONFIG",
    "HF_FAMILIES",
    "HfFamily",
    "WeightName",
    "is_hf_directory",
    "read_json",
    "section_of",
]

CONFIG = "config.json"
HF_FAMILIES = {
    family.name: family
    for family in (
        LLAMA,
        MISTRAL,
        QWEN2,
        QWEN3,
        MIXTRAL,
        QWEN3_MOE,
        OLMOE,
        DEEPSEEK_V3,
        MOONLIGHT,
        GLM4_MOE,
        GPT_OSS,
        QWEN3_NEXT,
        QWEN3_5,
        QWEN3_5_MOE,
        GPT2,
        GEMMA2,
        GEMMA3,
        VIT,
    )
}
MODEL_TYPES = {name: family.model_type or name for name, family in HF_FAMILIES.items()}
# of several families that are one class the first
BY_MODEL_TYPE = {
    model_type: HF_FAMILIES[
        next(name for name, of in MODEL_TYPES.items() if of == model_type)
    ]
    for model_type in MODEL_TYPES.values()
} | {"kimi_k2": DEEPSEEK_V3}


def is_hf_directory(directory: Path) -> bool:
    """Returns whether a directory has the config.json of a model, which no run and no checkpoint has."""
    return (directory / CONFIG).is_file()


def section_of(directory: Path) -> dict[str, Any]:
    """Returns the section `model` that a Hugging Face directory asks for."""
    return model_section(read_json(directory / CONFIG), short(directory / CONFIG))


def model_section(config: Json, where: str) -> dict[str, Any]:
    """Returns the section `model` that a config.json asks for; `where` it stands, for the sentence that refuses it."""
    check_types(config, where)
    model_type = config.get("model_type")
    if model_type in ("gemma3", "qwen3_5", "qwen3_5_moe"):
        raise ConfigError(
            f"{where}: model_type '{model_type}' has a vision tower, which is not computed here; take its text model "
            f"alone, {model_type}_text."
        )
    if model_type not in BY_MODEL_TYPE:
        known = ", ".join(BY_MODEL_TYPE)
        raise ConfigError(
            f"{where}: model_type {short(repr(model_type))} is not a known family; there are {known}."
        )
    family = BY_MODEL_TYPE[model_type]
    section = family.section(config, where)
    quantized = config.get("quantization_config")
    of_hub = {GPT_OSS.name: MXFP4, DEEPSEEK_V3.name: FP8}.get(family.name)
    if not (
        isinstance(quantized, dict)
        and of_hub
        and quantized.get("quant_method") == of_hub
    ):
        refuse_unless(where, config, "quantization_config", None)
    return {"family": family.name} | section


def config_json(model: Json, length: int, dtype: str) -> dict[str, Any]:
    """Returns the config.json of a resolved section `model`, trained on sequences of `length` tokens; ConfigError where
    no class holds it.
    """
    check_exportable(model)
    family = hf_family(model["family"])
    config = {
        "model_type": MODEL_TYPES[family.name],
        "architectures": [family.architecture],
    }
    if not FAMILIES[family.name].images:
        config |= {
            "vocab_size": model["vocab_size"],
            "tie_word_embeddings": model["tied_head"],
        }
    return (
        config | {"dtype": dtype, "torch_dtype": dtype} | family.config(model, length)
    )


def hf_family(name: str) -> HfFamily:
    """Returns the class that holds a family of ours; ConfigError if there is none."""
    if name not in HF_FAMILIES:
        raise ConfigError(
            f"model.family {name} is not a family of transformers; exported are {', '.join(HF_FAMILIES)}: see "
            "meshtrain.hf_families."
        )
    return HF_FAMILIES[name]


def check_exportable(model: Json) -> None:
    """ConfigError where no class of transformers computes what this section `model` does."""
    family = hf_family(model["family"])
    if (problem := _problem(family, model)) is None:
        return
    same_names = [
        other for other in HF_FAMILIES.values() if other.names is family.names
    ]
    others = [other.name for other in same_names if _problem(other, model) is None]
    way_out = f"; train it as model.family {others[0]} to export it" if others else ""
    raise ConfigError(
        f"{family.architecture} of transformers cannot hold {problem}{way_out}."
    )


def _problem(family: HfFamily, model: Json) -> str | None:
    """Returns the first key of a section `model` that a class of transformers cannot hold, with its value; None if it
    holds all.
    """
    legal = {
        "qkv_bias": family.qkv_bias,
        "pool": "class" if FAMILIES[family.name].images else None,
        "qk_norm": family.qk_norm,
        "activation": family.activation or None,
        "window": None if family.window else 0,
    }
    if (problem := _other_than(legal, model)) is not None:
        return problem
    heads = model["heads"]
    d_model = model["d_model"]
    if not family.shared_heads and model["kv_heads"] != heads:
        return f"model.kv_heads {model['kv_heads']} beside model.heads {heads}"
    if not family.wide_heads and model["head_dim"] * heads != d_model:
        return f"model.head_dim {model['head_dim']} with {heads} heads in model.d_model {d_model}"
    if (problem := _expert_problem(family, model["moe"])) is not None:
        return problem
    flags = dict.fromkeys(("post_norms", "scaled_embedding"), family.gemma)
    flags["norm_plus_one"] = family.gemma or family.hybrid
    if (problem := _other_than(flags, model)) is not None:
        return problem
    if family.window_by_turns and not model["window"] and model["global_every"] != 1:
        return "model.window 0"
    if bool(model["mla"].kv_rank) != family.latent:
        return f"model.mla.kv_rank {model['mla'].kv_rank}"
    if family.hybrid and model["linear"].kind != "gated_delta":
        return f"model.linear.kind {model['linear'].kind}"
    if model["mtp"] and not family.latent:
        return f"model.mtp {model['mtp']}"
    return _other_than(_required(family, model), model)


def _required(family: HfFamily, model: Json) -> Json:
    """Returns the one value that a class of transformers computes with, of each key that it does not have."""
    scaled = family.gemma or (family.latent and model["rope_scaling"] == "yarn")
    required = {} if scaled else {"query_scalar": model["head_dim"]}
    required |= {} if family.gemma else {"logit_cap": 0.0}
    required |= {} if family.window_by_turns else {"global_every": 0}
    required |= {} if family.score_cap else {"score_cap": 0.0}
    required |= {} if family.local_theta else {"rope_theta_local": 0.0}
    required |= {} if family.part_turned or family.hybrid else {"rope_share": 1.0}
    required |= {} if family.dense_first else {"dense_layers": 0}
    return required | ({} if family.hybrid else {"pattern": ()})


def _other_than(legal: Json, model: Json) -> str | None:
    """Returns the first key whose value is not the legal one, with it; None is legal where any value is."""
    for name, value in legal.items():
        if value is not None and model[name] != value:
            given = (
                f"{model[name]:g}"
                if isinstance(model[name], float)
                else str(model[name]).lower()
            )
            return f"model.{name} {given}"
    return None


def _expert_problem(family: HfFamily, moe: Any) -> str | None:
    if bool(moe.experts) != bool(family.router):
        return f"model.moe.experts {moe.experts}"
    legal: dict[str, Any] = {"router": family.router}
    legal |= {} if family.dense_first or family.hybrid else {"shared_experts": 0}
    legal |= {} if family.dense_first else {"route_scale": 1.0, "groups": ()}
    legal |= {} if family.normalize is None else {"normalize": family.normalize}
    wrong = (
        name
        for name, value in legal.items()
        if moe.experts and getattr(moe, name) != value
    )
    return next(
        (f"model.moe.{name} {short(getattr(moe, name))}" for name in wrong), None
    )
