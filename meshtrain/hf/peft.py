"""LoRA's adapters in PEFT's files, adapter_config.json and adapter_model.safetensors: read and written.

    ours                                theirs, transposed
    blocks.attention.q_lora_a [D, r]    base_model.model.model.layers.N.self_attn.q_proj.lora_A.weight [r, in]
    blocks.attention.q_lora_b [r, H, K] base_model.model.model.layers.N.self_attn.q_proj.lora_B.weight [out, r]

GPT-2's c_attn is q, k and v in one, so that PEFT has one A for the three, and its adapters are read as three with the
same A. Ours have one each, which are written as an adapter of c_attn of rank 3 r: A one below the other, B their block
diagonal, alpha 3 times as large; the file's metadata (THIRDS) say so, and they are read back as they were. As read in
peft 0.21: tuners/lora/config.py, utils/save_and_load.py.

Anything but plain LoRA of this model is refused by name. The tensors' names say which projections are adapted; no
pattern of a config is ever run, since one may run for ever.
"""

import dataclasses
import json
import math
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from meshtrain.config import Config
from meshtrain.config.follow import replaced
from meshtrain.config.model import PROJECTIONS, LoraConfig, ModelConfig, positions_of
from meshtrain.config.stacks import layers_of_stacks
from meshtrain.errors import ConfigError, short
from meshtrain.hf.hf_directory import DTYPES, ENDING, TensorFiles
from meshtrain.hf.mapping import Source, mappings
from meshtrain.hf_families import hf_family, read_json
from meshtrain.model.weights import (
    Weight,
    adapted,
    adapters,
    lora_difference,
    lora_scale,
    weights,
)

ADAPTER_CONFIG = "adapter_config.json"
STEM = "adapter_model"
PREFIX = "base_model.model."
A = ".lora_A.weight"
B = ".lora_B.weight"
THIRDS = (
    # In a file's metadata: which of q, k, v the adapter of a fused projection is made of
    "thirds"
)
# The fields that are read here, or change nothing of what an adapter computes.
LEGAL = frozenset(
    (
        "peft_type",
        "r",
        "lora_alpha",
        "use_rslora",
        "target_modules",
        "rank_pattern",
        "alpha_pattern",
        "lora_dropout",
        "init_lora_weights",
        "exclude_modules",
        "fan_in_fan_out",
        "base_model_name_or_path",
        "task_type",
        "inference_mode",
        "revision",
        "auto_mapping",
        "peft_version",
        "megatron_core",
        "qalora_group_size",
        "ensure_weight_tying",
        "runtime_config",
    )
)
# The initialisations that leave the base as it is.
INITIALISATIONS = (True, False, "gaussian", "eva", "orthogonal")
NEUTRAL: tuple[object, ...] = (None, False, "none", 0, [], {})


@dataclasses.dataclass(frozen=True)
class PeftModule:
    """A module of theirs that may have an adapter."""

    name: str  # {} stands for the number of the layer
    projections: tuple[Weight, ...]  # of ours: one, or q, k and v

    @property
    def fused(self) -> bool:
        return len(self.projections) > 1

    def tensor(self, factor: str, layer: int) -> str:
        return f"{PREFIX}{self.name.format(layer)}{factor}"


def peft_modules(model: ModelConfig) -> list[PeftModule]:
    """Returns the modules of a resolved config's model in the order in which a layer has them; ConfigError where PEFT
    has no name for them.
    """
    if positions_of(model):
        raise ConfigError(
            f"adapters of {model.family} are not exchanged with PEFT: transformers 4 and 5 call its modules "
            "differently; merge them, and export that."
        )
    if len(layers_of_stacks(model)) > 1:
        raise ConfigError(
            f"adapters of {model.family} are not exchanged with PEFT where its layers are of several kinds "
            "(model.dense_layers, model.pattern); merge them, and export that."
        )
    by_name = mappings(model)
    modules = dict[str, list[Weight]]()
    base = {
        _projection(weight): weight for weight in weights(model) if _projection(weight)
    }
    for weight in (base[name] for name in PROJECTIONS if name in base):
        modules.setdefault(
            by_name[weight.name].name.theirs.removesuffix(".weight"), []
        ).append(weight)
    return [
        PeftModule(name, tuple(projections)) for name, projections in modules.items()
    ]


def _projection(weight: Weight) -> str:
    """Returns the name that a projection has in lora.targets, "" for any other weight."""
    last = weight.name.rpartition(".")[2]
    if last in PROJECTIONS and weight.stacked and "experts" not in weight.axes:
        return last
    return ""


def merged_delta(
    model: ModelConfig,
    lora: LoraConfig,
    source: Source,
    weight: Weight,
    layer: int,
) -> np.ndarray | None:
    """Returns scale * A B of one layer of a projection, float32, in the projection's shape; None for one without
    adapters.
    """
    factors = {w.name: w for w in adapters(model, lora)}
    a, b = (factors.get(f"{weight.name}_lora_{x}") for x in "ab")
    if a is None or b is None:
        return None
    left = source(a, layer).astype(np.float32).reshape(-1, lora.rank)
    right = source(b, layer).astype(np.float32).reshape(lora.rank, -1)
    return (np.float32(lora_scale(lora)) * (left @ right)).reshape(
        [n for _, n in weight.dims]
    )


# --- written


def adapter_config(
    model: ModelConfig, lora: LoraConfig, base: str | None
) -> dict[str, Any]:
    """Returns adapter_config.json of a resolved config's adapters; `base` is where the model is that they adapt."""
    number = lambda x: int(x) if x == int(x) else x
    ranks = {}
    alphas = {}
    targets = []
    for module, parts in _adapted_modules(model, lora):
        # q_proj; c_proj alone would be two modules
        name = (
            ".".join(module.name.split(".")[-2:])
            if model.family == "gpt2"
            else module.name.rpartition(".")[2]
        )
        targets.append(name)
        if parts > 1:
            ranks[name] = parts * lora.rank
            alphas[name] = number(lora.alpha * (parts**0.5 if lora.rslora else parts))
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": lora.rank,
        "lora_alpha": number(lora.alpha),
        "lora_dropout": lora.dropout,
        "use_rslora": lora.rslora,
        "target_modules": targets,
        "bias": "none",
        "fan_in_fan_out": model.family == "gpt2",
        "init_lora_weights": True,
        "modules_to_save": None,
        "rank_pattern": ranks,
        "alpha_pattern": alphas,
    }


def adapter_tensors(
    model: ModelConfig, lora: LoraConfig, source: Source
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields their tensors by name; `source(weight, layer)` returns one layer of a factor."""
    factors = {weight.name: weight for weight in adapters(model, lora)}
    for module, _ in _adapted_modules(model, lora):
        for layer in range(model.layers):
            places = [
                i
                for i, weight in enumerate(module.projections)
                if f"{weight.name}_lora_a" in factors
            ]
            names = [module.projections[i].name for i in places]
            a = [
                source(factors[f"{name}_lora_a"], layer).reshape(-1, lora.rank).T
                for name in names
            ]
            b = [
                source(factors[f"{name}_lora_b"], layer).reshape(lora.rank, -1).T
                for name in names
            ]
            outputs = len(b[0])
            diagonal = np.zeros(
                (len(module.projections), outputs, len(b), lora.rank), b[0].dtype
            )
            for at, (i, block) in enumerate(zip(places, b, strict=True)):
                diagonal[i, :, at] = block
            yield module.tensor(A, layer), np.concatenate(a)
            yield (
                module.tensor(B, layer),
                diagonal.reshape(len(module.projections) * outputs, -1),
            )


def adapter_metadata(model: ModelConfig, lora: LoraConfig) -> dict[str, str]:
    """Returns the metadata of the file of the tensors."""
    thirds = [name for name in PROJECTIONS[:3] if name in adapted(model, lora)]
    fused = any(module.fused for module, _ in _adapted_modules(model, lora))
    return {"format": "pt"} | ({THIRDS: ",".join(thirds)} if fused else {})


def _adapted_modules(
    model: ModelConfig, lora: LoraConfig
) -> Iterator[tuple[PeftModule, int]]:
    chosen = adapted(model, lora)
    for module in peft_modules(model):
        if parts := sum(_projection(weight) in chosen for weight in module.projections):
            yield module, parts


# --- read


def _written_name(prefix: str, name: str) -> str:
    """Returns the name that PEFT writes for a tensor of an adapter of the class with a head, whose names begin with
    `prefix`.

    An adapter of the class without a head, and the state of a module itself (with the adapter's name in it, without
    PEFT's own prefix), have other ones.
    """
    module = re.sub(
        r"(\.lora_[AB])\.[^.]+(\.weight)$", r"\1\2", name.removeprefix(PREFIX)
    )
    return PREFIX + (module if module.startswith(prefix) else prefix + module)


class Adapters:
    """The adapters of a directory that PEFT has written, for a resolved config's model; ConfigError if they are of
    another one.
    """

    def __init__(self, directory: Path, model: ModelConfig) -> None:
        self.directory = directory
        self.model = model
        self.where = short(directory / ADAPTER_CONFIG)
        self._given = read_json(directory / ADAPTER_CONFIG)
        self._refuse_other_methods()
        self.files = TensorFiles(
            directory, STEM, partial(_written_name, hf_family(model.family).prefix)
        )
        self._modules = self._find_modules()
        self._check_targets()
        self._thirds = self._read_thirds()
        self.lora = self._section()
        self._check_tensors()

    def read(self, weight: Weight, layer: int | None) -> np.ndarray:
        """Returns one layer of a factor of `model.weights.adapters`, as ours, in the file's dtype."""
        assert layer is not None
        base, _, factor = weight.name.rpartition("_lora_")
        module = next(
            m for m in self._modules if any(w.name == base for w in m.projections)
        )
        part = [w.name for w in module.projections].index(base)
        array = self.files.tensor(module.tensor(A if factor == "a" else B, layer))
        if module.fused and factor == "b":
            array = np.split(array, len(module.projections))[part]
        if module.fused and self._thirds:
            at = self.lora.rank * self._thirds.index(PROJECTIONS[part])
            array = (
                array[at : at + self.lora.rank]
                if factor == "a"
                else array[:, at : at + self.lora.rank]
            )
        return array.T.reshape([n for _, n in weight.dims])

    def _refuse_other_methods(self) -> None:
        """ConfigError, by name, for what PEFT would compute otherwise than LoRA of a projection."""
        kind = self._given.get("peft_type")
        start = self._given.get("init_lora_weights", True)
        if kind != "LORA":
            raise ConfigError(
                f"{self.where}: peft_type {short(repr(kind))} is not computed here; only LORA is."
            )
        for key, value in self._given.items():
            if key not in LEGAL and value not in NEUTRAL:
                raise ConfigError(
                    f"{self.where}: {short(key)} {short(json.dumps(value))} is not computed here."
                )
        if start not in INITIALISATIONS:
            changes = f"init_lora_weights {short(repr(start))} changes the base itself"
            raise ConfigError(
                f"{self.where}: {changes}; save it converted to plain LoRA."
            )

    def _parts(self, module: PeftModule) -> int:
        """Returns how many adapters of ours an adapter of theirs holds."""
        return len(self._thirds) if self._thirds and module.fused else 1

    def _find_modules(self) -> list[PeftModule]:
        present = set(self.files.names)
        used = set[str]()
        modules = []
        directory = short(self.directory)
        for module in peft_modules(self.model):
            tensors = {
                module.tensor(factor, layer)
                for layer in range(self.model.layers)
                for factor in (A, B)
            }
            if tensors & present:
                if missing := sorted(tensors - present):
                    all_layers = "here a projection has adapters in all layers"
                    raise ConfigError(
                        f"{directory} has no {short(missing[0])}; {all_layers}."
                    )
                modules.append(module)
                used |= tensors
        if unused := sorted(present - used):
            raise ConfigError(
                f"{directory} has {short(unused[0])}, for which this {self.model.family} of {self.model.layers} "
                "layers has no place "
                f"({len(unused)} such): it is the adapter of another model."
            )
        if not modules:
            raise ConfigError(f"{directory} has no adapters.")
        return modules

    def _check_targets(self) -> None:
        """ConfigError where a list of names asks for a module that has no adapter; a pattern is not run."""
        targets = self._given.get("target_modules")
        excluded = self._given.get("exclude_modules")
        for module in peft_modules(self.model):
            name = module.name.format(0)
            listed = isinstance(targets, list) and any(
                f".{name}".endswith(f".{target}") for target in targets
            )
            if (
                (listed or targets == "all-linear")
                and module not in self._modules
                and not excluded
            ):
                asks = f"target_modules asks for {name}"
                raise ConfigError(
                    f"{self.where}: {asks}, but {short(self.directory)} has no adapter of it."
                )

    def _read_thirds(self) -> tuple[str, ...]:
        """Returns which of q, k and v have a part of their own in a fused adapter that we have written; () for any
        other.
        """
        text = self.files.metadata().get(THIRDS, "")
        thirds = tuple(text.split(",")) if text else ()
        if any(name not in PROJECTIONS[:3] for name in thirds) or len(
            set(thirds)
        ) < len(thirds):
            file = f"{short(self.directory / STEM)}{ENDING}"
            raise ConfigError(
                f"{file} has {THIRDS} {short(repr(text))}, which are not among q, k, v."
            )
        return thirds

    def _section(self) -> LoraConfig:
        """Returns the section lora that they need: one rank and one scale for all."""
        given = self._given
        rslora = bool(given.get("use_rslora"))
        scales: set[tuple[int, float]] = set()
        for module in self._modules:
            parts = self._parts(module)
            for layer in range(self.model.layers):
                name = module.name.format(layer)
                rank = self._match_pattern("rank_pattern", name, "r")
                if type(rank) is not int or not 1 <= rank <= 3 * 4096:
                    raise ConfigError(
                        f"{self.where}: r is {short(repr(rank))}; it must be a whole number above 0."
                    )
                alpha = self._number(
                    self._match_pattern("alpha_pattern", name, "lora_alpha"),
                    "lora_alpha",
                )
                if rank % parts:
                    raise ConfigError(
                        f"{self.where}: the rank {rank} of {name} is not a multiple of its {parts} shares."
                    )
                # a part of the rank keeps the scale of all of it
                scales.add((rank // parts, alpha / (parts**0.5 if rslora else parts)))
        ranks = sorted({rank for rank, _ in scales})
        alphas = sorted({alpha for _, alpha in scales})
        several = ""
        if len(ranks) > 1:
            several = f"rank_pattern makes ranks of {ranks[0]} and {ranks[1]}"
        elif not math.isclose(alphas[0], alphas[-1], rel_tol=1e-12):
            several = f"alpha_pattern makes alphas of {alphas[0]:g} and {alphas[-1]:g}"
        if several:
            raise ConfigError(f"{self.where}: {several}; here all adapters have one.")
        stated = given.get("lora_alpha")
        alpha = alphas[0]
        if math.isclose(stated, alpha, rel_tol=1e-12):  # type: ignore[arg-type]
            alpha = float(stated)  # type: ignore[arg-type]
        present: set[str] = set()
        for module in self._modules:
            present |= (
                set(self._thirds)
                if self._thirds and module.fused
                else {*map(_projection, module.projections)}
            )
        targets = tuple(name for name in PROJECTIONS if name in present)
        # an empty list stands for all of them
        if adapted(self.model, LoraConfig(rank=1)) == targets:
            targets = ()
        dropout = self._number(given.get("lora_dropout") or 0.0, "lora_dropout")
        return LoraConfig(
            rank=ranks[0], alpha=alpha, targets=targets, dropout=dropout, rslora=rslora
        )

    def _match_pattern(self, patterns_key: str, module: str, key: str) -> Any:
        """Returns a module's value among patterns, else that of `key`; only plain names: a regular expression could run
        for ever.
        """
        patterns = self._given.get(patterns_key) or {}
        if not isinstance(patterns, dict):
            raise ConfigError(
                f"{self.where}: {patterns_key} must be a mapping of names."
            )
        for name, value in patterns.items():
            if not re.fullmatch(r"[A-Za-z0-9_.]+", name):
                pattern = f"{patterns_key} has the pattern {short(repr(name))}"
                raise ConfigError(
                    f"{self.where}: {pattern}; only names of modules are read."
                )
            if f".{module}".endswith(f".{name}"):
                return value
        return self._given.get(key)

    def _number(self, value: Any, key: str) -> float:
        if type(value) not in (int, float) or not math.isfinite(value) or value < 0:
            number = "it must be a number, and not negative"
            raise ConfigError(f"{self.where}: {key} is {short(repr(value))}; {number}.")
        return float(value)

    def _check_tensors(self) -> None:
        factors = {w.name: w for w in adapters(self.model, self.lora)}
        where = short(self.directory)
        for module in self._modules:
            rank = self.lora.rank * self._parts(module)
            base = next(
                weight.name
                for weight in module.projections
                if f"{weight.name}_lora_a" in factors
            )
            a = factors[f"{base}_lora_a"]
            b = factors[f"{base}_lora_b"]
            inputs = math.prod(n for _, n in a.dims[:-1])
            outputs = math.prod(n for _, n in b.dims[1:]) * len(module.projections)
            for layer in range(self.model.layers):
                for factor, shape in ((A, (rank, inputs)), (B, (outputs, rank))):
                    name = module.tensor(factor, layer)
                    actual = self.files.shape(name)
                    dtype = self.files.dtype(name)
                    tensor = f"{short(name)} in {where}"
                    if actual != shape:
                        right = f"of this model and rank {self.lora.rank} it is {list(shape)}"
                        raise ConfigError(f"{tensor} is {list(actual)}; {right}.")
                    if dtype not in DTYPES:
                        raise ConfigError(
                            f"{tensor} is {dtype}; it must be one of {', '.join(DTYPES)}."
                        )
                    if not np.isfinite(self.files.tensor(name)).all():
                        raise ConfigError(f"{tensor} contains NaN or infinity.")
                if module.fused and self._thirds:
                    self._check_blocks(module, layer)

    def _check_blocks(self, module: PeftModule, layer: int) -> None:
        """ConfigError for numbers beside the block diagonal: they would be lost."""
        array = self.files.tensor(module.tensor(B, layer))
        for rows, third in zip(
            np.split(array, len(module.projections)), PROJECTIONS, strict=False
        ):
            for at, part in enumerate(self._thirds):
                if (
                    part != third
                    and rows[:, at * self.lora.rank : (at + 1) * self.lora.rank].any()
                ):
                    tensor = short(module.tensor(B, layer))
                    why = f"{third} depends on the share of {part}"
                    raise ConfigError(
                        f"{tensor} in {short(self.directory)} is not what its {THIRDS} say: {why}."
                    )


def with_adapters(config: Config, adapters: Adapters | None) -> Config:
    """Returns the config with the section lora that adapters need; ConfigError if it has another one."""
    lora = LoraConfig() if adapters is None else adapters.lora
    name = (
        lora_difference(config.model, config.lora, lora) if config.lora.rank else None
    )
    if adapters is not None and name is not None:
        theirs = (
            f"the adapters in {short(adapters.directory)} have {getattr(lora, name)}"
        )
        raise ConfigError(
            f"lora.{name} is {getattr(config.lora, name)}, but {theirs}; leave the key out."
        )
    return replaced(config, lora=dataclasses.asdict(lora))
