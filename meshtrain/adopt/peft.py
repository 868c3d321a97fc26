"""LoRA's adapters as PEFT's files have them: adapter_config.json and adapter_model.safetensors; how they are written.

    ours                                     theirs
    blocks.attention.q_lora_a [D, r]         base_model.model.model.layers.N.self_attn.q_proj.lora_A.weight [r, in]    transposed
    blocks.attention.q_lora_b [r, H, K]      base_model.model.model.layers.N.self_attn.q_proj.lora_B.weight [out, r]

GPT-2's c_attn is q, k and v in one, so that PEFT has one A for the three. Ours have one each, which is an adapter of c_attn of rank
3 r: A one below the other, B their block diagonal, alpha 3 times as large. The file's metadata tell it, and `meshtrain.adopt.adapters`
reads it back as it was. As read in peft 0.21: tuners/lora/config.py, utils/save_and_load.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshtrain.adopt.mapping import Source, rows
from meshtrain.config.model import PROJECTIONS, LoraConfig, ModelConfig, positions_of
from meshtrain.errors import ConfigError
from meshtrain.model.weights import Weight, adapted, adapters, lora_scale, weights

CONFIG, STEM = "adapter_config.json", "adapter_model"
PREFIX, A, B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
THIRDS = "thirds"  # in a file's metadata: which of q, k, v the adapter of a fused projection is made of


@dataclass(frozen=True)
class Module:
    """One of their modules that may have an adapter."""

    name: str  # with {} where the layer's number stands
    held: tuple[Weight, ...]  # projections of ours that it is made of: one, or q, k, v

    def tensor(self, factor: str, layer: int) -> str:
        return f"{PREFIX}{self.name.format(layer)}{factor}"


def modules(model: ModelConfig) -> list[Module]:
    """Those of a resolved config's model, in the order in which a layer has them; ConfigError where PEFT has no name for them."""
    if positions_of(model):
        raise ConfigError(
            f"adapters of {model.family} are not exchanged with PEFT: transformers 4 and 5 call its modules differently; merge them, and export that."
        )
    named, found = rows(model), dict[str, list[Weight]]()
    base = {projection(weight): weight for weight in weights(model) if projection(weight)}
    for name in filter(base.__contains__, PROJECTIONS):
        weight = base[name]
        found.setdefault(named[weight.name].theirs.removesuffix(".weight"), []).append(weight)
    return [Module(name, tuple(held)) for name, held in found.items()]


def projection(weight: Weight) -> str:
    """The name of a projection among `lora.targets`; of another weight none."""
    last = weight.name.rpartition(".")[2]
    return last if last in PROJECTIONS and weight.stacked else ""


def adapter_config(model: ModelConfig, lora: LoraConfig, base: str | None) -> dict[str, Any]:
    """adapter_config.json of a resolved config's adapters; `base`: where the model that they adapt is."""
    number = lambda x: int(x) if x == int(x) else x  # noqa: E731
    ranks, alphas, targets = {}, {}, []
    for module, shares in _written(model, lora):
        # q_proj; c_proj alone would be two modules
        name = ".".join(module.name.split(".")[-2:]) if model.family == "gpt2" else module.name.rpartition(".")[2]
        targets.append(name)
        if shares > 1:
            ranks[name] = shares * lora.rank
            alphas[name] = number(lora.alpha * (shares**0.5 if lora.rslora else shares))
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "inference_mode": True, "r": lora.rank,
        "lora_alpha": number(lora.alpha), "lora_dropout": lora.dropout, "use_rslora": lora.rslora, "target_modules": targets, "bias": "none",
        "fan_in_fan_out": model.family == "gpt2", "init_lora_weights": True, "modules_to_save": None, "rank_pattern": ranks, "alpha_pattern": alphas,
    }  # fmt: skip


def tensors(model: ModelConfig, lora: LoraConfig, source: Source) -> Iterator[tuple[str, np.ndarray]]:
    """Their tensors by name; `source(weight, layer)` gives one layer of a factor."""
    factors = {weight.name: weight for weight in adapters(model, lora)}
    for module, _ in _written(model, lora):
        for layer in range(model.layers):
            own = [(i, w.name) for i, w in enumerate(module.held) if f"{w.name}_lora_a" in factors]
            a = [source(factors[f"{name}_lora_a"], layer).reshape(-1, lora.rank).T for _, name in own]
            b = [source(factors[f"{name}_lora_b"], layer).reshape(lora.rank, -1).T for _, name in own]
            outputs = len(b[0])
            whole = np.zeros((outputs * len(module.held), lora.rank * len(own)), b[0].dtype)
            for share, ((i, _), block) in enumerate(zip(own, b, strict=True)):
                whole[i * outputs : (i + 1) * outputs, share * lora.rank : (share + 1) * lora.rank] = block
            yield module.tensor(A, layer), np.concatenate(a)
            yield module.tensor(B, layer), whole


def metadata(model: ModelConfig, lora: LoraConfig) -> dict[str, str]:
    """Of the file of the tensors."""
    thirds = [name for name in PROJECTIONS[:3] if name in adapted(model, lora)]
    fused = any(len(module.held) > 1 for module, _ in _written(model, lora))
    return {"format": "pt"} | ({THIRDS: ",".join(thirds)} if fused else {})


def _written(model: ModelConfig, lora: LoraConfig) -> Iterator[tuple[Module, int]]:
    """The modules that are adapted, and of how many of ours each."""
    chosen = adapted(model, lora)
    for module in modules(model):
        if shares := sum(projection(weight) in chosen for weight in module.held):
            yield module, shares


def delta(model: ModelConfig, lora: LoraConfig, source: Source, weight: Weight, layer: int) -> np.ndarray | None:
    """scale * A B of one layer of a projection, float32, as the projection lies; None for one without adapters."""
    factors = {w.name: w for w in adapters(model, lora)}
    a, b = (factors.get(f"{weight.name}_lora_{x}") for x in "ab")
    if a is None or b is None:
        return None
    left = source(a, layer).astype(np.float32).reshape(-1, lora.rank)
    right = source(b, layer).astype(np.float32).reshape(lora.rank, -1)
    return (np.float32(lora_scale(lora)) * (left @ right)).reshape([n for _, n in weight.dims])
