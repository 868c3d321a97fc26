"""The weights of whatever has some: a run, a step, a checkpoint that was imported, or a Hugging Face directory."""

import math
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from meshtrain.adopt import beside, loading
from meshtrain.adopt.adapters import Adapters, with_adapters
from meshtrain.adopt.files import Files
from meshtrain.adopt.mapping import Source
from meshtrain.adopt.peft import delta
from meshtrain.adopt.theirs import config_of
from meshtrain.adopt.writing import live
from meshtrain.config import Config
from meshtrain.config.theirs import CONFIG, is_theirs, read_json
from meshtrain.errors import ConfigError, short
from meshtrain.model.weights import Weight
from meshtrain.reader import read_model

NAMES = {"F64": "float32", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
Step = int | Literal["newest", "best"]


@dataclass(frozen=True)
class Opened:
    """Weights to be written, and what is known of them."""

    config: Config
    source: Source
    dtype: str  # that they are written in unless another is asked for
    theirs: dict[str, Any]  # the config.json they came from
    tokenizer: dict[str, Path]
    step: int | None  # None: of no run


def opened(path: Path, step: Step = "newest", adapter: Path | None = None) -> Opened:
    """The weights that a path names, with the adapters of a directory of PEFT's; ConfigError if it names none, or they have their own."""
    found = _opened(path, step)
    if adapter is None:
        return found
    if found.config.lora.rank:
        raise ConfigError(f"{short(path)} has adapters of its own; --adapter is for a model without.")
    adapters = Adapters(adapter, found.config.model)

    def source(weight: Weight, layer: int | None) -> np.ndarray:
        return (adapters.read if weight.adapter else found.source)(weight, layer)

    return replace(found, config=with_adapters(found.config, adapters), source=source)


def _opened(path: Path, step: Step) -> Opened:
    """Of a Hugging Face directory the weights are read as they are asked for."""
    if is_theirs(path):
        files, config = Files(path), config_of(path)
        loading.check(config.model, files)
        sizes = Counter[str]()
        for name in files.names:
            sizes[NAMES.get(files.dtype(name), "float32")] += math.prod(files.shape(name))
        theirs = read_json(path / CONFIG)
        tokenizer = beside.tokenizer_files(path)
        of_layer = loading.of_layer(config.model, files)
        return Opened(config, of_layer, sizes.most_common(1)[0][0], theirs, tokenizer, None)
    model = read_model(path, step)
    source, config = live(model.program.layout, model.params), model.config
    theirs, tokenizer = beside.found_config(path, config), beside.found_tokenizer(path, config)
    return Opened(config, source, config.precision.compute, theirs, tokenizer, model.step)


def merged(found: Opened) -> Source:
    """The weights with scale * A B added to each that has an adapter, in float32 (Hu et al. 2021, section 4.1)."""
    model, lora, source = found.config.model, found.config.lora, found.source

    def read(weight: Weight, layer: int | None) -> np.ndarray:
        base = source(weight, layer)
        if layer is None or (more := delta(model, lora, source, weight, layer)) is None:
            return base
        return base.astype(np.float32) + more

    return read
