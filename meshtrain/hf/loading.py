"""Weights straight from files onto a mesh: each device's box of each layer is read piece by piece, placed and
forgotten.

    file (mapped) ── piece of a box of one layer ──► host, cast and padded ──► its place in the device's array

So that neither a model nor a stacked weight is ever in host memory, nor a whole embedding
(experiments/adopt/memory.py).
"""

import itertools
import logging
import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding

from meshtrain.config.model import ModelConfig
from meshtrain.errors import ConfigError, short
from meshtrain.hf.hf_directory import DTYPES, TensorFiles
from meshtrain.hf.mapping import Box, Source, full_box, layers, mappings
from meshtrain.hf.peft import Adapters
from meshtrain.hf_families import hf_family
from meshtrain.model.weights import Weight
from meshtrain.model.weights import adapters as adapter_weights
from meshtrain.parallel.layout import Layout
from meshtrain.parallel.placement import Placed

log = logging.getLogger(__name__)
Tree = Any
PIECE = (
    2 << 20
    # Bytes read at a time, which cost three times as many while they are cut out, cast and copied
)
AHEAD = 16  # tokens that a model predicts further, at most
LOG_EVERY = 10.0  # seconds
# Tensors that transformers also writes: those that follow from the config, and ViT's pooler, which its class never
# reads.
IGNORED = (
    ".rotary_emb.inv_freq",
    ".attn.bias",
    ".attn.masked_bias",
    "vit.pooler.dense.weight",
    "vit.pooler.dense.bias",
)


def check(model: ModelConfig, files: TensorFiles) -> None:
    """ConfigError where the files are not the weights of a resolved config's model: one is missing, too many, of
    another shape or no number.
    """
    where = short(files.directory)
    used = {"lm_head.weight"} if model.tied_head else set()
    if (head := mappings(model, files).get("head.weight")) and not set(
        head.tensors(None)
    ) <= set(files.names):
        missing = (
            f"{where} has no {head.tensors(None)[0]}: it is a model without its head"
        )
        raise ConfigError(
            f"{missing}, which has to be trained with it; give one with its head."
        )
    for mapping in mappings(model, files).values():
        for layer in layers(mapping.weight):
            for name in mapping.tensors(layer):
                used.add(name)
                shape = files.shape(name)
                dtype = files.dtype(name)
                if shape != mapping.shape():
                    raise ConfigError(
                        f"{name} in {where} is {list(shape)}; this model's is {list(mapping.shape())}."
                    )
                if dtype not in DTYPES:
                    raise ConfigError(
                        f"{name} in {where} is {dtype}; it must be one of {', '.join(DTYPES)}."
                    )
    if model.tied_head and "lm_head.weight" in files.names:
        _check_tied(files, *mappings(model)["embedding.tokens"].tensors(None))
    # layers behind the last one predict further tokens, and have copies of embedding and head
    behind = tuple(f"model.layers.{model.layers + n}." for n in range(AHEAD))
    unused = [
        name
        for name in files.names
        if name not in used
        and not _ignored(name)
        and not (hf_family(model.family).latent and name.startswith(behind))
    ]
    if unused:
        raise ConfigError(
            f"{where} has {short(unused[0])}, for which this model has no place ({len(unused)} such)."
        )


def _ignored(name: str) -> bool:
    """Returns whether no model of text has a place for a tensor: also those of heads for several tokens ahead."""
    return name.endswith(IGNORED) or name.startswith("mtp.")


def check_finite(files: TensorFiles) -> None:
    """ConfigError where a weight has NaN or infinity: all is read once, a piece at a time."""
    numbers = sum(math.prod(files.shape(name)) for name in files.names)
    read = 0
    logged = time.monotonic()
    for name in files.names:
        shape = files.shape(name)
        for box in _rows(shape) if shape and not _ignored(name) else ():
            if not np.isfinite(files.read(name, box)).all():
                where = short(files.directory)
                raise ConfigError(f"{short(name)} in {where} contains NaN or infinity.")
        read += math.prod(shape)
        if time.monotonic() - logged > LOG_EVERY:
            logged = time.monotonic()
            percent = 100 * read / numbers
            log.info(
                "%.0f%% of the weights in %s are looked through for NaN",
                percent,
                short(files.directory),
            )


def _rows(shape: tuple[int, ...]) -> Iterator[Box]:
    """Yields boxes of at most PIECE bytes of a tensor, or one row where that is more."""
    rows = max(1, PIECE // max(1, 4 * math.prod(shape[1:])))
    for start in range(0, shape[0], rows):
        yield (
            slice(start, min(start + rows, shape[0])),
            *(slice(0, n) for n in shape[1:]),
        )


def _check_tied(files: TensorFiles, embedding: str) -> None:
    """ConfigError where a head that is said to be the embedding is another one: it would be lost."""
    shape = files.shape(embedding)
    head = "lm_head.weight"
    equal = (
        np.array_equal(files.read(embedding, box), files.read(head, box))
        for box in _rows(shape)
    )
    if files.shape(head) != shape or not all(equal):
        raise ConfigError(
            f"{short(files.directory)} has an {head} that is not {embedding}, but its config.json ties the two; "
            "set tie_word_embeddings to false there."
        )


def layer_source(model: ModelConfig, files: TensorFiles) -> Source:
    """Returns a function that reads one layer's full weight, in its own dtype, from files that `check` has passed."""
    by_name = mappings(model, files)

    def read(weight: Weight, layer: int | None) -> np.ndarray:
        return by_name[weight.name].read(files, layer, full_box(weight))

    return read


def read(
    layout: Layout,
    directory: Path,
    initial: Tree | None = None,
    adapters: Adapters | None = None,
) -> Tree:
    """Returns the live weights of a layout, from a Hugging Face directory; LoRA's from `adapters`, or from the
    `initial` parameters.

    ConfigError if they are not its model's.
    """
    files = TensorFiles(directory)
    check(layout.config.model, files)
    return load(layout, files, initial, adapters)


def load(
    layout: Layout,
    files: TensorFiles,
    initial: Tree | None = None,
    adapters: Adapters | None = None,
) -> Tree:
    """Returns the live weights of a layout, from files that `check` has passed; else as `read`."""
    config = layout.config
    by_name = mappings(config.model, files)
    factors = {
        weight.name: weight for weight in adapter_weights(config.model, config.lora)
    }

    def leaf(placed: Placed, initial: Any = None) -> Any:
        master = layout.array(placed)
        if (mapping := by_name.get(placed.name)) is not None:
            x = _Leaf(
                layout,
                placed,
                mapping.weight,
                mapping.outer(),
                partial(mapping.read, files),
            ).on(master)
            return layout.stored(placed, x)
        if adapters is not None:
            weight = factors[placed.name]
            return _Leaf(
                layout,
                placed,
                weight,
                (0,),
                lambda layer, box: adapters.read(weight, layer)[box],
            ).on(master)
        assert initial is not None
        return initial

    return layout.map(leaf, *([] if initial is None else [initial]))


class _Leaf:
    """Reads one weight onto its devices.

    `read(layer, box)` is fastest where the box is cut `along` these dimensions, and of all but the last has one place.
    """

    def __init__(
        self,
        layout: Layout,
        placed: Placed,
        weight: Weight,
        along: tuple[int, ...],
        read: Callable[[int | None, Box], np.ndarray],
    ) -> None:
        self.layout = layout
        self.placed = placed
        self.weight = weight
        self.along = along
        self.read = read

    def on(self, master: jax.ShapeDtypeStruct) -> jax.Array:
        sharding = master.sharding
        shape = master.shape
        assert isinstance(sharding, NamedSharding)
        shards: list[jax.Array] = []
        by_box: dict[Any, jax.Array] = {}
        for device, index in sharding.addressable_devices_indices_map(shape).items():
            box = tuple(
                slice(*s.indices(n)[:2])
                for s, n in zip(index or (), shape, strict=True)
            )
            key = tuple((s.start, s.stop) for s in box)
            # read once for all devices that hold the same
            shard = (
                jax.device_put(by_box[key], device)
                if key in by_box
                else self._shard(device, box, master.dtype)
            )
            by_box[key] = shard
            shards.append(shard)
        return jax.make_array_from_single_device_arrays(shape, sharding, shards)

    def _shard(self, device: Any, box: Box, dtype: Any) -> jax.Array:
        """Returns one device's shard: live places are filled one after the other, padding stays zero."""
        stacked = self.placed.stacked
        inner = box[stacked:]
        pieces = list(self._pieces(inner, dtype.itemsize))
        if not stacked and len(pieces) == 1:
            return jax.device_put(self._read_piece(None, inner, dtype), device)
        zeros = partial(jnp.zeros, tuple(s.stop - s.start for s in box), dtype)
        array = jax.jit(zeros, out_shardings=SingleDeviceSharding(device))()
        layer_at = self.layout.stack(self.placed).layer_at if stacked else None
        at = [None] if layer_at is None else layer_at.reshape(-1)[box[0]]
        for place, layer in enumerate(at):
            # a place that only fills up its stage has layer -1
            for piece in pieces if layer is None or layer >= 0 else ():
                start = [
                    s.start - within.start
                    for s, within in zip(piece, inner, strict=True)
                ]
                numbers = self._read_piece(
                    None if layer is None else int(layer), piece, dtype
                )
                # the piece before is copied while this one is read, and no more of them wait
                jax.block_until_ready(array)
                array = _put(
                    array,
                    numbers[None] if stacked else numbers,
                    [place, *start] if stacked else start,
                )
        return jax.block_until_ready(array)

    def _pieces(self, box: Box, itemsize: int) -> Iterator[Box]:
        """Yields the box in boxes of at most PIECE bytes, or one place of the dimension that is cut where that is
        more.
        """
        *single, along = self.along
        sizes = [s.stop - s.start for s in box]
        row = itemsize * math.prod(
            n for d, n in enumerate(sizes) if d not in self.along
        )
        steps = {**dict.fromkeys(single, 1), along: max(1, PIECE // max(1, row))}
        for starts in itertools.product(
            *(range(box[d].start, box[d].stop, step) for d, step in steps.items())
        ):
            piece = list(box)
            for (d, step), start in zip(steps.items(), starts, strict=True):
                piece[d] = slice(start, min(start + step, box[d].stop))
            yield tuple(piece)

    def _read_piece(self, layer: int | None, box: Box, dtype: Any) -> np.ndarray:
        dims = [n for _, n in self.weight.dims]
        inside = tuple(
            slice(min(s.start, n), min(s.stop, n))
            for s, n in zip(box, dims, strict=True)
        )
        array = np.zeros([s.stop - s.start for s in box], dtype)
        if all(s.stop > s.start for s in inside):
            numbers = self.read(layer, inside)
            array[tuple(slice(0, n) for n in numbers.shape)] = numbers
        return array


@partial(jax.jit, donate_argnums=0)
def _put(array: jax.Array, piece: jax.Array, start: list[int]) -> jax.Array:
    return jax.lax.dynamic_update_slice(array, piece, start)
