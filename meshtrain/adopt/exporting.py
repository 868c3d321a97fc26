"""Weights as a Hugging Face directory: of a run, a step, an imported checkpoint, or another Hugging Face directory;
merged or not.

    live weights, files ── a layer of a weight ──► host ── cast, in their layout ──► part 1, 2 ...
                                                             written aside, and renamed when complete

The directory has safetensors in parts with their index, config.json, the tokenizer's files or, of images,
preprocessor_config.json. One part is in host memory at a time. All processes take part in gathering, the first writes.
"""

import contextlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import jax
import ml_dtypes
import numpy as np

from meshtrain import hub
from meshtrain.adopt import extra_files
from meshtrain.adopt.extra_files import written_aside
from meshtrain.checkpoint.manifest import StepManifest
from meshtrain.config import Config
from meshtrain.config.model import ModelConfig, positions_of
from meshtrain.config.stacks import stack_of
from meshtrain.errors import ConfigError, short
from meshtrain.hf import fp8, loading, peft
from meshtrain.hf.hf_directory import (
    ENDING,
    INDEX,
    PREPROCESSOR,
    SINGLE,
    TensorFiles,
    config_of,
    preprocessor_json,
)
from meshtrain.hf.mapping import ABSENT, NoTensor, Source, TensorMapping, mappings
from meshtrain.hf_families import (
    CONFIG,
    check_exportable,
    config_json,
    hf_family,
    is_hf_directory,
    read_json,
)
from meshtrain.model.weights import Weight
from meshtrain.parallel.layout import Layout
from meshtrain.reader import read_model

Tree = Any
Step = int | Literal["newest", "best"]
DtypeOf = Callable[[str], np.dtype]
# layer, the weights that a tensor holds, each with its number among theirs
Tensor = tuple[int | None, list[tuple[TensorMapping, int]]]
DTYPES = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}
DTYPE_NAMES = {"F64": "float32", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
PART = 5 * 10**9  # bytes of a file, at most, as transformers has it


# --- what is exported


@dataclass(frozen=True)
class ExportSource:
    """Weights to be written, and what is known of them."""

    config: Config
    source: Source
    dtype: str  # that they are written in unless another is asked for
    # Of their tensors by name, where they have not been trained since
    dtypes: Mapping[str, str]
    hf_config: dict[str, Any]  # the config.json they came from
    tokenizer: dict[str, Path]
    step: int | None  # None: of no run
    losses: Mapping[str, float | None] = field(
        default_factory=dict
    )  # loss, eval loss; of no run none


def open_weights(
    path: Path, step: Step = "newest", adapter: Path | None = None
) -> ExportSource:
    """Returns the weights that a path names, with the adapters of a directory of PEFT's; ConfigError if it names none,
    or they have their own.
    """
    path = hub.directory(path)
    weights = _open_directory(path) if is_hf_directory(path) else _open_run(path, step)
    if adapter is None:
        return weights
    if weights.config.lora.rank:
        raise ConfigError(
            f"{short(path)} has adapters of its own; --adapter is for a model without."
        )
    adapters = peft.Adapters(hub.directory(adapter), weights.config.model)

    def source(weight: Weight, layer: int | None) -> np.ndarray:
        return (adapters.read if weight.adapter else weights.source)(weight, layer)

    return replace(
        weights, config=peft.with_adapters(weights.config, adapters), source=source
    )


def _open_directory(path: Path) -> ExportSource:
    files = TensorFiles(path)
    config = config_of(path)
    loading.check(config.model, files)
    loading.check_finite(files)
    dtypes = {
        name: DTYPE_NAMES.get(files.dtype(name), "float32") for name in files.names
    }
    sizes = Counter[str]()
    for name, dtype in dtypes.items():
        sizes[dtype] += math.prod(files.shape(name))
    hf_config = read_json(path / CONFIG)
    tokenizer = extra_files.tokenizer_files(path)
    source = loading.layer_source(config.model, files)
    return ExportSource(
        config, source, sizes.most_common(1)[0][0], dtypes, hf_config, tokenizer, None
    )


def _open_run(path: Path, step: Step) -> ExportSource:
    model = read_model(path, step)
    source = live_source(model.program.layout, model.params)
    config = model.config
    hf_config = extra_files.find_hf_config(path, config)
    tokenizer = extra_files.find_tokenizer(path, config)
    # what is trained is float32, whatever it began with
    dtypes = _imported_dtypes(path) if model.step == 0 else {}
    dtype = (
        Counter(dtypes.values()).most_common(1)[0][0]
        if dtypes
        else config.precision.compute
    )
    saved = StepManifest.read(model.directory)
    losses = {"loss": saved.loss, "eval loss": saved.eval_loss}
    return ExportSource(
        config, source, dtype, dtypes, hf_config, tokenizer, model.step, losses
    )


def _imported_dtypes(path: Path) -> dict[str, str]:
    """Returns the dtypes that an import's tensors had; {} of any other run."""
    note = extra_files.run_of(path) / extra_files.HF_CONFIG
    dtypes = read_json(note).get(extra_files.DTYPES) if note.is_file() else None
    return {
        name: DTYPE_NAMES.get(dtype, "float32")
        for name, dtype in (dtypes or {}).items()
    }


def merged(weights: ExportSource) -> Source:
    """Returns the weights with scale * A B added to each that has an adapter, in float32 (Hu et al. 2021, section
    4.1).
    """
    model = weights.config.model
    lora = weights.config.lora
    source = weights.source

    def read(weight: Weight, layer: int | None) -> np.ndarray:
        base = source(weight, layer)
        if (
            layer is None
            or (delta := peft.merged_delta(model, lora, source, weight, layer)) is None
        ):
            return base
        return base.astype(np.float32) + delta

    return read


def live_source(layout: Layout, params: Tree) -> Source:
    """Returns a function that gathers one layer of the live weights of a layout."""
    by_name = dict(
        zip((p.name for p in layout.flat), jax.tree.leaves(params), strict=True)
    )

    def read(weight: Weight, layer: int | None) -> np.ndarray:
        stacked = by_name[weight.name]
        array = (
            stacked
            if layer is None
            else stacked[int(layout.stacks[stack_of(weight.name)].places[layer])]
        )
        if not array.is_fully_addressable:
            from jax.experimental.multihost_utils import process_allgather

            array = process_allgather(array, tiled=True)
        return np.asarray(array)[tuple(slice(0, n) for _, n in weight.dims)]

    return read


# --- how it is written


def export(
    config: Config,
    source: Source,
    to: Path,
    dtype: str = "bfloat16",
    tokenizer: Mapping[str, Path] | None = None,
    hf_config: Mapping[str, Any] | None = None,
    dtypes: Mapping[str, str] | None = None,
    part: int = PART,
) -> None:
    """Writes a directory that transformers loads: the weights of `source`, a tokenizer's files and config.json.

    Weights are in one dtype, or in the dtype that `dtypes` has for a tensor; float8 is that of `hf.fp8`, with others in
    bfloat16. `hf_config` is the config.json that the model came from; fields of it that no section `model` has are
    carried over.

    ConfigError if it is there already, cannot be written, or the model is none of theirs.
    """
    blocks = dtype == "float8"
    others = "bfloat16" if blocks else dtype
    fields = config_json(vars(config.model), config.train.sequence_length, others)
    if blocks:
        _check_float8(config.model)
        fields["quantization_config"] = fp8.CONFIG
    _check_load(config.model, source)
    extra_files.check_tokenizer(tokenizer or {}, config.model.vocab_size)
    first = jax.process_index() == 0
    with written_aside(to) if first else contextlib.nullcontext() as aside:

        def dtype_of(name: str) -> np.dtype:
            if blocks and fp8.is_quantized(name):
                return fp8.NUMPY
            return DTYPES[(dtypes or {}).get(name, others)]

        _write_tensors(config.model, source, aside, dtype_of, part)
        if aside is not None:
            (aside / CONFIG).write_text(
                extra_files.merged_config(fields, hf_config or {})
            )
            extra_files.copy_tokenizer(tokenizer or {}, aside)
            if positions_of(config.model):
                (aside / PREPROCESSOR).write_text(preprocessor_json(config))


def export_adapter(
    config: Config,
    source: Source,
    to: Path,
    dtype: str,
    base: str | None,
) -> None:
    """Writes the adapters as PEFT does; `base`: where the model that they adapt is.

    ConfigError if `to` is there already.
    """
    from safetensors.numpy import save_file

    model = config.model
    lora = config.lora
    check_exportable(vars(model))
    with written_aside(to) as aside:
        tensors = {
            n: _cast(array, DTYPES[dtype], n)
            for n, array in peft.adapter_tensors(model, lora, source)
        }
        save_file(
            tensors,
            str(aside / f"{peft.STEM}{ENDING}"),
            metadata=peft.adapter_metadata(model, lora),
        )
        fields = json.dumps(peft.adapter_config(model, lora, base), indent=2) + "\n"
        (aside / peft.ADAPTER_CONFIG).write_text(fields)


def _check_load(model: ModelConfig, source: Source) -> None:
    """ConfigError where the scores of a router have a bias, which chooses other experts than their class would."""
    load = mappings(model).get("blocks.experts.load")
    if (
        isinstance(load, NoTensor)
        and model.moe.balance == "bias"
        and any(source(load.weight, n).any() for n in range(load.weight.layers))
    ):
        raise ConfigError(
            f"{hf_family(model.family).architecture} of transformers has no bias of its routers' scores, but "
            "model.moe.balance bias has "
            "trained one; train with balance sequence to export it."
        )


def _check_float8(model: ModelConfig) -> None:
    if not model.mla.kv_rank:
        raise ConfigError(
            f"--dtype float8 is how files of DeepSeek's class are, not of model.family {model.family}; legal are "
            "bfloat16, float16 and float32."
        )


def _write_tensors(
    model: ModelConfig,
    source: Source,
    to: Path | None,
    dtype_of: DtypeOf,
    part: int,
) -> None:
    from safetensors.numpy import save_file

    # the experts of a layer come one after the other
    parts = list(_parts(model, dtype_of, part))
    source = lru_cache(maxsize=1)(source)
    index: dict[str, str] = {}
    total = 0
    for number, names in enumerate(parts, 1):
        file = (
            SINGLE
            if len(parts) == 1
            else f"model-{number:05}-of-{len(parts):05}.safetensors"
        )
        tensors: dict[str, np.ndarray] = {}
        for name, (layer, weights) in names.items():
            arrays = [
                mapping.converted(source(mapping.weight, layer), number)
                for mapping, number in weights
            ]
            array = weights[0][0].joined(arrays) if len(arrays) > 1 else arrays[0]
            tensors |= _tensors(array, dtype_of(name), name)
        index |= dict.fromkeys(tensors, file)
        total += sum(array.nbytes for array in tensors.values())
        if to is not None:
            save_file(tensors, str(to / file), metadata={"format": "pt"})
    if to is not None and len(parts) > 1:
        content = {
            "metadata": {"total_size": total},
            "weight_map": dict(sorted(index.items())),
        }
        (to / INDEX).write_text(json.dumps(content, indent=2) + "\n")


def _tensors(array: np.ndarray, dtype: np.dtype, name: str) -> dict[str, np.ndarray]:
    if dtype == fp8.NUMPY:
        return fp8.quantized(name, array)
    return {name: _cast(array, dtype, name)}


def _cast(array: np.ndarray, dtype: np.dtype, name: str) -> np.ndarray:
    """Returns a contiguous array: safetensors writes any other wrong, and says nothing."""
    with np.errstate(over="ignore"):
        cast = np.ascontiguousarray(array, dtype)
    if dtype == np.float16 and not np.isfinite(cast).all():
        largest = "numbers beyond float16, whose largest is 65504"
        raise ConfigError(f"{name} has {largest}; give --dtype bfloat16 or float32.")
    return cast


def _parts(
    model: ModelConfig, dtype_of: DtypeOf, part: int
) -> Iterator[dict[str, Tensor]]:
    by_name = mappings(model)
    tensors = dict[str, Tensor]()
    for layer in (None, *range(model.layers)):
        for mapping in by_name.values():
            if (at := mapping.at(layer)) == ABSENT:
                continue
            for number, name in enumerate(mapping.tensors(at)):
                tensors.setdefault(name, (at, []))[1].append((mapping, number))
    names: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors.items():
        nbytes = dtype_of(name).itemsize * sum(
            mapping.numbers for mapping, _ in tensor[1]
        )
        if names and size + nbytes > part:
            yield names
            names = {}
            size = 0
        names[name] = tensor
        size += nbytes
    yield names
