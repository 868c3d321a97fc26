"""Weights of ours as a Hugging Face directory: safetensors in parts with their index, config.json, the tokenizer's files or, of images,
preprocessor_config.json.

    live masters, files ── a layer of a weight ──► host ── cast, their way ──► part 1, 2 ...      aside, and renamed when all of it is there

One part is in host memory at a time. All processes take part in gathering, the first writes.
"""

import contextlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from meshtrain.adopt import beside, peft, preprocessor
from meshtrain.adopt.aside import written_aside
from meshtrain.adopt.exportable import check_exportable
from meshtrain.adopt.files import ENDING, INDEX, SINGLE
from meshtrain.adopt.mapping import Row, Source, layers, rows
from meshtrain.adopt.theirs import config_json
from meshtrain.config import Config
from meshtrain.config.model import ModelConfig, positions_of
from meshtrain.config.theirs import CONFIG
from meshtrain.errors import ConfigError
from meshtrain.model.weights import Weight, weights
from meshtrain.parallel.layout import Layout

Tree = Any
DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}
PART = 5 * 10**9  # bytes of a file, at most, as transformers has it
Piece = tuple[int | None, list[tuple[Weight, Row]]]  # layer, the weights of one of their tensors


def export(
    config: Config,
    source: Source,
    to: Path,
    dtype: str = "bfloat16",
    tokenizer: Mapping[str, Path] | None = None,
    theirs: Mapping[str, Any] | None = None,
    part: int = PART,
) -> None:
    """Writes a directory that transformers loads: the weights of `source`, files of a tokenizer by name, and what `theirs`, the
    config.json that the model came from, says besides.

    ConfigError if it is there already, cannot be written, or the model is none of theirs.
    """
    given = config_json(config.model, config.train.sequence_length, dtype)
    beside.check_tokenizer(tokenizer or {}, config.model.vocab_size)
    first = jax.process_index() == 0
    with written_aside(to) if first else contextlib.nullcontext() as aside:
        _write(config.model, source, aside, DTYPES[dtype], part)
        if aside is not None:
            (aside / CONFIG).write_text(beside.written_config(given, theirs or {}))
            beside.copy_tokenizer(tokenizer or {}, aside)
            if positions_of(config.model):
                (aside / preprocessor.PREPROCESSOR).write_text(preprocessor.written(config))


def export_adapter(config: Config, source: Source, to: Path, dtype: str, base: str | None) -> None:
    """Writes the adapters as PEFT does; `base`: where the model that they adapt is. ConfigError if `to` is there already."""
    from safetensors.numpy import save_file

    check_exportable(config.model)
    held = peft.tensors(config.model, config.lora, source)
    with written_aside(to) as aside:
        cast = {name: _cast(array, DTYPES[dtype], name) for name, array in held}
        save_file(cast, str(aside / f"{peft.STEM}{ENDING}"), metadata=peft.metadata(config.model, config.lora))
        (aside / peft.CONFIG).write_text(
            json.dumps(peft.adapter_config(config.model, config.lora, base), indent=2) + "\n"
        )


def live(layout: Layout, params: Tree) -> Source:
    """The live weights of a layout."""
    by_name = dict(zip((p.name for p in layout.flat), jax.tree.leaves(params), strict=True))

    def read(weight: Weight, layer: int | None) -> np.ndarray:
        stacked = by_name[weight.name]
        array = stacked if layer is None else stacked[int(layout.places[layer])]
        if not array.is_fully_addressable:
            from jax.experimental.multihost_utils import process_allgather

            array = process_allgather(array, tiled=True)
        return np.asarray(array)[tuple(slice(0, n) for _, n in weight.dims)]

    return read


def _write(model: ModelConfig, source: Source, to: Path | None, dtype: np.dtype, part: int) -> None:
    """The parts and their index."""
    from safetensors.numpy import save_file

    parts = list(_parts(model, dtype, part))
    index: dict[str, str] = {}
    total = 0
    for number, names in enumerate(parts, 1):
        file = SINGLE if len(parts) == 1 else f"model-{number:05}-of-{len(parts):05}.safetensors"
        held = {}
        for name, (layer, pieces) in names.items():
            thirds = [row.made(weight, source(weight, layer)) for weight, row in pieces]
            held[name] = _cast(np.concatenate(thirds, -1) if len(thirds) > 1 else thirds[0], dtype, name)
            index[name], total = file, total + held[name].nbytes
        if to is not None:
            save_file(held, str(to / file), metadata={"format": "pt"})
    if to is not None and len(parts) > 1:
        whole = {"metadata": {"total_size": total}, "weight_map": dict(sorted(index.items()))}
        (to / INDEX).write_text(json.dumps(whole, indent=2) + "\n")


def _cast(array: np.ndarray, dtype: np.dtype, name: str) -> np.ndarray:
    """In one piece: safetensors writes what is not contiguous wrong, and says nothing."""
    with np.errstate(over="ignore"):
        cast = np.ascontiguousarray(array, dtype)
    if dtype == np.float16 and not np.isfinite(cast).all():
        raise ConfigError(
            f"{name} has numbers beyond float16, whose largest is 65504; give --dtype bfloat16 or float32."
        )
    return cast


def _parts(model: ModelConfig, dtype: np.dtype, part: int) -> Iterator[dict[str, Piece]]:
    """Their tensors by name, file by file."""
    found: dict[str, Piece] = {}
    size = 0
    for name, piece in _pieces(model).items():
        nbytes = dtype.itemsize * sum(math.prod(n for _, n in weight.dims) for weight, _ in piece[1])
        if found and size + nbytes > part:
            yield found
            found, size = {}, 0
        found[name] = piece
        size += nbytes
    yield found


def _pieces(model: ModelConfig) -> dict[str, Piece]:
    """Layer by layer; what several weights of ours make up stands once."""
    named, found = rows(model), dict[str, Piece]()
    of_all: Sequence[Weight] = weights(model)
    for layer in (None, *range(model.layers)):
        for weight in of_all:
            if layer in layers(weight):
                row = named[weight.name]
                found.setdefault(row.name(layer), (layer, []))[1].append((weight, row))
    return found
