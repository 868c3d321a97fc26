"""Adapters that PEFT has written, or we: read, and refused by name where they are not plain LoRA of this model.

What the tensors are called says which projections are adapted; no pattern of a config is ever run, since one may run for ever. An
adapter of GPT-2's fused c_attn is read as three, of q, k and v, with the same A; one that we have written as the three that it was
(see `meshtrain.adopt.peft`).
"""

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from meshtrain.adopt.files import DTYPES, ENDING, Files
from meshtrain.adopt.peft import CONFIG, STEM, THIRDS, A, B, Module, modules, projection
from meshtrain.config import Config
from meshtrain.config.follow import replaced
from meshtrain.config.model import PROJECTIONS, LoraConfig, ModelConfig
from meshtrain.config.theirs import read_json
from meshtrain.errors import ConfigError, short
from meshtrain.model.weights import Weight, adapted, adapters, lora_difference

# What is read here, or changes nothing of what an adapter computes.
READ = frozenset((
    "peft_type", "r", "lora_alpha", "use_rslora", "target_modules", "rank_pattern", "alpha_pattern", "lora_dropout", "init_lora_weights",
    "exclude_modules", "fan_in_fan_out", "base_model_name_or_path", "task_type", "inference_mode", "revision", "auto_mapping", "peft_version",
    "megatron_core", "qalora_group_size", "ensure_weight_tying", "runtime_config",
))  # fmt: skip
# How adapters begin without the base being changed.
BEGINNINGS = (True, False, "gaussian", "eva", "orthogonal")
NEUTRAL = (None, False, "none", 0)


class Adapters:
    """The adapters of a directory that PEFT has written, for a resolved config's model; ConfigError if they are of another one."""

    def __init__(self, directory: Path, model: ModelConfig) -> None:
        self.directory, self.model = directory, model
        self.where = short(directory / CONFIG)
        given = read_json(directory / CONFIG)
        _refuse(given, self.where)
        self.files = Files(directory, STEM)
        self._modules = self._named()
        self._check_targets(given)
        self._thirds = self._of_fused()
        self.lora = self._section(given)
        self._check_tensors()

    def read(self, weight: Weight, layer: int | None) -> np.ndarray:
        """One layer of a factor of `model.weights.adapters`, as ours, in the file's dtype."""
        assert layer is not None
        base, _, factor = weight.name.rpartition("_lora_")
        module = next(m for m in self._modules if any(w.name == base for w in m.held))
        inside = [w.name for w in module.held].index(base)
        array = self.files.whole(module.tensor(A if factor == "a" else B, layer))
        rank, fused = self.lora.rank, len(module.held) > 1
        if fused and factor == "b":
            array = np.split(array, len(module.held))[inside]
        if fused and self._thirds:
            at = rank * self._thirds.index(PROJECTIONS[inside])
            array = array[at : at + rank] if factor == "a" else array[:, at : at + rank]
        return array.T.reshape([n for _, n in weight.dims])

    # --- what is checked

    def _named(self) -> list[Module]:
        """The modules that have adapters, each in all layers."""
        every, used, found = modules(self.model), set[str](), []
        held = set(self.files.names)
        for module in every:
            wanted = {module.tensor(factor, layer) for layer in range(self.model.layers) for factor in (A, B)}
            if wanted & held:
                if missing := sorted(wanted - held):
                    raise ConfigError(
                        f"{short(self.directory)} has no {short(missing[0])}; here a projection has adapters in all layers."
                    )
                found.append(module)
                used |= wanted
        if left := sorted(held - used):
            raise ConfigError(
                f"{short(self.directory)} has {short(left[0])}, for which this {self.model.family} of {self.model.layers} layers has no place "
                f"({len(left)} such): it is the adapter of another model."
            )
        if not found:
            raise ConfigError(f"{short(self.directory)} has no adapters.")
        return found

    def _check_targets(self, given: Mapping[str, Any]) -> None:
        """What a list of names asks for is there; a pattern is not run."""
        targets = given.get("target_modules")
        for module in modules(self.model):
            name = module.name.format(0)
            listed = isinstance(targets, list) and any(f".{name}".endswith(f".{target}") for target in targets)
            if (listed or targets == "all-linear") and module not in self._modules and not given.get("exclude_modules"):
                raise ConfigError(
                    f"{self.where}: target_modules asks for {name}, but {short(self.directory)} has no adapter of it."
                )

    def _of_fused(self) -> tuple[str, ...]:
        """Which of q, k and v have a share of their own in a fused adapter that we have written; () for any other."""
        said = self.files.metadata().get(THIRDS, "")
        thirds = tuple(said.split(",")) if said else ()
        if any(name not in PROJECTIONS[:3] for name in thirds) or len(set(thirds)) < len(thirds):
            raise ConfigError(
                f"{short(self.directory / STEM)}{ENDING} has {THIRDS} {short(repr(said))}, which are not among q, k, v."
            )
        return thirds

    def _section(self, given: Mapping[str, Any]) -> LoraConfig:
        """The section lora that they need: one rank and one scale for all."""
        rslora = bool(given.get("use_rslora"))
        found: set[tuple[int, float]] = set()
        for module in self._modules:
            shares = len(self._thirds) if self._thirds and len(module.held) > 1 else 1
            for layer in range(self.model.layers):
                name = module.name.format(layer)
                rank = _whole(_of_pattern(given, "rank_pattern", name, given.get("r"), self.where), "r", self.where)
                alpha = _number(
                    _of_pattern(given, "alpha_pattern", name, given.get("lora_alpha"), self.where),
                    "lora_alpha",
                    self.where,
                )
                if rank % shares:
                    raise ConfigError(f"{self.where}: the rank {rank} of {name} is no multiple of its {shares} shares.")
                # what is shared out keeps its scale
                found.add((rank // shares, alpha / (shares**0.5 if rslora else shares)))
        ranks = sorted({rank for rank, _ in found})
        if len(ranks) > 1:
            raise ConfigError(
                f"{self.where}: rank_pattern makes ranks of {ranks[0]} and {ranks[1]}; here all adapters have one."
            )
        alphas = sorted({alpha for _, alpha in found})
        if not math.isclose(alphas[0], alphas[-1], rel_tol=1e-12):
            raise ConfigError(
                f"{self.where}: alpha_pattern makes alphas of {alphas[0]:g} and {alphas[-1]:g}; here all adapters have one."
            )
        stated = given.get("lora_alpha")
        alpha = float(stated) if math.isclose(stated, alphas[0], rel_tol=1e-12) else alphas[0]  # type: ignore[arg-type]
        have = [
            projection(w)
            for m in self._modules
            for w in m.held
            if not (self._thirds and len(m.held) > 1) or projection(w) in self._thirds
        ]
        every = [name for name in PROJECTIONS if name in have]
        dropout = _number(given.get("lora_dropout") or 0.0, "lora_dropout", self.where)
        lora = LoraConfig(rank=ranks[0], alpha=alpha, targets=tuple(every), dropout=dropout, rslora=rslora)
        # all of them is what an empty list says
        return (
            lora
            if adapted(self.model, LoraConfig(rank=1)) != lora.targets
            else LoraConfig(**vars(lora) | {"targets": ()})
        )

    def _check_tensors(self) -> None:
        for module in self._modules:
            fused = len(module.held) > 1
            rank = self.lora.rank * (len(self._thirds) if fused and self._thirds else 1)
            factors = {w.name: w for w in adapters(self.model, self.lora)}
            a, b = next(
                (factors[f"{w.name}_lora_a"], factors[f"{w.name}_lora_b"])
                for w in module.held
                if f"{w.name}_lora_a" in factors
            )
            inputs = math.prod(n for _, n in a.dims[:-1])
            outputs = math.prod(n for _, n in b.dims[1:]) * len(module.held)
            for layer in range(self.model.layers):
                for factor, shape in ((A, (rank, inputs)), (B, (outputs, rank))):
                    name = module.tensor(factor, layer)
                    if self.files.shape(name) != shape:
                        raise ConfigError(
                            f"{short(name)} in {short(self.directory)} is {list(self.files.shape(name))}; of this model and rank {self.lora.rank} it is {list(shape)}."
                        )
                    if self.files.dtype(name) not in DTYPES:
                        raise ConfigError(
                            f"{short(name)} in {short(self.directory)} is {self.files.dtype(name)}; it must be one of {', '.join(DTYPES)}."
                        )
                if fused and self._thirds:
                    self._check_blocks(module, layer)

    def _check_blocks(self, module: Module, layer: int) -> None:
        """Nothing beside the block diagonal: it would be lost."""
        array = self.files.whole(module.tensor(B, layer))
        for part, third in zip(np.split(array, len(module.held)), PROJECTIONS, strict=False):
            for share, own in enumerate(self._thirds):
                block = part[:, share * self.lora.rank : (share + 1) * self.lora.rank]
                if own != third and block.any():
                    raise ConfigError(
                        f"{short(module.tensor(B, layer))} in {short(self.directory)} is not what its {THIRDS} say: {third} depends on the share of {own}."
                    )


def with_adapters(config: Config, adapters: Adapters | None) -> Config:
    """The config with the section lora that adapters need; ConfigError if it has another one."""
    found = LoraConfig() if adapters is None else adapters.lora
    name = lora_difference(config.model, config.lora, found) if config.lora.rank else None
    if adapters is not None and name is not None:
        asked, has = getattr(config.lora, name), getattr(found, name)
        raise ConfigError(
            f"lora.{name} is {asked}, but the adapters in {short(adapters.directory)} have {has}; leave the key out."
        )
    return replaced(config, lora=dataclasses.asdict(found))


def _refuse(given: Mapping[str, Any], where: str) -> None:
    """ConfigError, by name, for what PEFT would compute otherwise than LoRA of a projection."""
    kind = given.get("peft_type")
    if kind != "LORA":
        raise ConfigError(f"{where}: peft_type {short(repr(kind))} is not computed here; only LORA is.")
    for key, value in given.items():
        if key not in READ and value not in NEUTRAL and value not in ([], {}):
            raise ConfigError(f"{where}: {short(key)} {short(json.dumps(value))} is not computed here.")
    if given.get("init_lora_weights", True) not in BEGINNINGS:
        raise ConfigError(
            f"{where}: init_lora_weights {short(repr(given['init_lora_weights']))} changes the base itself; save it converted to plain LoRA."
        )


def _of_pattern(given: Mapping[str, Any], key: str, module: str, otherwise: Any, where: str) -> Any:
    """The value that a pattern has for a module; only plain names are read, since a regular expression could run for ever."""
    patterns = given.get(key) or {}
    if not isinstance(patterns, dict):
        raise ConfigError(f"{where}: {key} must be a mapping of names.")
    for name, value in patterns.items():
        if not re.fullmatch(r"[A-Za-z0-9_.]+", name):
            raise ConfigError(f"{where}: {key} has the pattern {short(repr(name))}; only names of modules are read.")
        if f".{module}".endswith(f".{name}"):
            return value
    return otherwise


def _whole(value: Any, key: str, where: str) -> int:
    if type(value) is not int or not 1 <= value <= 3 * 4096:
        raise ConfigError(f"{where}: {key} is {short(repr(value))}; it must be a whole number above 0.")
    return value


def _number(value: Any, key: str, where: str) -> float:
    if type(value) not in (int, float) or not math.isfinite(value) or value < 0:
        raise ConfigError(f"{where}: {key} is {short(repr(value))}; it must be a number, and not negative.")
    return float(value)
