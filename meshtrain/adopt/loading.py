"""Weights straight from files onto a mesh: each device's box of each layer is read piece by piece, placed and forgotten.

    file (mapped) ── piece of a box of one layer ──► host, cast and padded ──► its place in the device's array

So that neither a model nor a stacked weight is ever in host memory, nor a whole embedding (experiments/adopt/memory.py).
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding

from meshtrain.adopt.adapters import Adapters
from meshtrain.adopt.files import DTYPES, Files
from meshtrain.adopt.mapping import Box, Source, layers, rows, whole
from meshtrain.config.model import ModelConfig
from meshtrain.errors import ConfigError, short
from meshtrain.model.weights import Weight, weights
from meshtrain.model.weights import adapters as of_lora
from meshtrain.parallel.layout import Layout
from meshtrain.parallel.placement import Placed

Tree = Any
Index = tuple[slice, ...]
PIECE = 2 << 20  # bytes read at a time, which cost three times as many while they are cut out, cast and copied
# What transformers also writes: what follows from the config, and ViT's pooler, which its classes of images never read.
PASSED_OVER = (
    ".rotary_emb.inv_freq",
    ".attn.bias",
    ".attn.masked_bias",
    "vit.pooler.dense.weight",
    "vit.pooler.dense.bias",
)


def check(model: ModelConfig, files: Files) -> None:
    """ConfigError where the files are not the weights of a resolved config's model: one is missing, too many, of another shape or no number."""
    named = rows(model)
    used = {"lm_head.weight"} if model.tied_head else set()
    for weight in weights(model):
        row = named[weight.name]
        for layer in layers(weight):
            name = row.name(layer)
            used.add(name)
            if files.shape(name) != row.shape(weight):
                raise ConfigError(
                    f"{name} in {short(files.directory)} is {list(files.shape(name))}; this model's is {list(row.shape(weight))}."
                )
            if files.dtype(name) not in DTYPES:
                raise ConfigError(
                    f"{name} in {short(files.directory)} is {files.dtype(name)}; it must be one of {', '.join(DTYPES)}."
                )
    if model.tied_head and "lm_head.weight" in files.names:
        _check_tied(files, named["embedding.tokens"].theirs)
    left = [name for name in files.names if name not in used and not name.endswith(PASSED_OVER)]
    if left:
        raise ConfigError(
            f"{short(files.directory)} has {short(left[0])}, for which this model has no place ({len(left)} such)."
        )


def _check_tied(files: Files, embedding: str) -> None:
    """ConfigError where a head that is said to be the embedding is another one: it would be lost."""
    shape = files.shape(embedding)
    rows_each = max(1, PIECE // (4 * shape[1]))
    same = files.shape("lm_head.weight") == shape
    for start in range(0, shape[0], rows_each) if same else ():
        box = (slice(start, min(start + rows_each, shape[0])), slice(0, shape[1]))
        same = same and np.array_equal(files.read(embedding, box), files.read("lm_head.weight", box))
    if not same:
        raise ConfigError(
            f"{short(files.directory)} has an lm_head.weight that is not {embedding}, but its config.json ties the two; set tie_word_embeddings to false there."
        )


def read(layout: Layout, directory: Path, drawn: Tree | None = None, adapters: Adapters | None = None) -> Tree:
    """The live weights of a layout, from a Hugging Face directory; LoRA's from `adapters`, or as they are `drawn`.

    ConfigError if they are not its model's.
    """
    files = Files(directory)
    check(layout.config.model, files)
    return load(layout, files, drawn, adapters)


def of_layer(model: ModelConfig, files: Files) -> Source:
    """Reads one layer's whole weight, in its own dtype, from files that `check` has passed."""
    named = rows(model)

    def read(weight: Weight, layer: int | None) -> np.ndarray:
        row, box = named[weight.name], whole(weight)
        return row.cut(weight, box, files.read(row.name(layer), row.box(weight, box)))

    return read


def load(layout: Layout, files: Files, drawn: Tree | None = None, adapters: Adapters | None = None) -> Tree:
    """The live weights of a layout, from files that `check` has passed."""
    config = layout.config
    named, canonical = rows(config.model), {weight.name: weight for weight in weights(config.model)}
    factors = {weight.name: weight for weight in of_lora(config.model, config.lora)}

    def leaf(placed: Placed, master: jax.ShapeDtypeStruct, drawn: jax.Array | None = None) -> jax.Array:
        if placed.name in canonical:
            weight, row = canonical[placed.name], named[placed.name]
            along = row.first(weight)
            read = lambda layer, box: row.cut(weight, box, files.read(row.name(layer), row.box(weight, box)))  # noqa: E731
        elif adapters is not None:
            weight, along = factors[placed.name], 0
            read = lambda layer, box: adapters.read(weight, layer)[box]  # noqa: E731
        else:
            assert drawn is not None
            return drawn
        return _Leaf(layout, placed, weight, along, read).on(master)

    return layout.map(leaf, layout.masters, *([] if drawn is None else [drawn]))


class _Leaf:
    """One weight on its way. `read` gives a box of one layer of it, fastest where it is cut `along` that dimension."""

    def __init__(
        self, layout: Layout, placed: Placed, weight: Weight, along: int, read: Callable[[int | None, Box], np.ndarray]
    ) -> None:
        self.layout, self.placed, self.weight, self.along, self.read = layout, placed, weight, along, read

    def on(self, master: jax.ShapeDtypeStruct) -> jax.Array:
        sharding = master.sharding
        assert isinstance(sharding, NamedSharding)
        shape = master.shape
        found, indices = [], sharding.addressable_devices_indices_map(shape)
        same: dict[Any, jax.Array] = {}
        for device, index in indices.items():
            box = tuple(slice(*s.indices(n)[:2]) for s, n in zip(index or (), shape, strict=True))
            key = tuple((s.start, s.stop) for s in box)
            # read once for all devices that hold the same
            same[key] = jax.device_put(same[key], device) if key in same else self._shard(device, box, master.dtype)
            found.append(same[key])
        return jax.make_array_from_single_device_arrays(shape, sharding, found)

    def _shard(self, device: Any, box: Index, dtype: Any) -> jax.Array:
        """What one device holds: live places are filled one after the other, padding stays zero."""
        stacked = self.placed.stacked
        inner = box[stacked:]
        pieces = list(self._pieces(inner, dtype.itemsize))
        if not stacked and len(pieces) == 1:
            return jax.device_put(self._read(None, inner, dtype), device)
        array = _zeros(tuple(s.stop - s.start for s in box), device, dtype)
        for place, layer in self._layers(box[0]) if stacked else [(0, None)]:
            for piece in pieces:
                start = [s.start - whole.start for s, whole in zip(piece, inner, strict=True)]
                read = self._read(layer, piece, dtype)
                # the one before is copied while this one is read, and no more of them wait
                jax.block_until_ready(array)
                array = _put(array, read[None] if stacked else read, [place, *start] if stacked else start)
        return jax.block_until_ready(array)

    def _pieces(self, box: Index, itemsize: int) -> Iterator[Index]:
        """The box in boxes of at most PIECE bytes, where one place of the dimension that is cut is no more."""
        sizes = [s.stop - s.start for s in box]
        along = self.along
        each = max(1, PIECE // max(1, itemsize * math.prod(sizes) // max(1, sizes[along])))
        for start in range(box[along].start, box[along].stop, each):
            stop = min(start + each, box[along].stop)
            yield (*box[:along], slice(start, stop), *box[along + 1 :])

    def _layers(self, places: slice) -> Iterator[tuple[int, int]]:
        """(place in the shard, layer) of a stretch of live places."""
        at = self.layout.layer_at.reshape(-1)
        for place, layer in enumerate(at[places]):
            if layer >= 0:
                yield place, int(layer)

    def _read(self, layer: int | None, box: Index, dtype: Any) -> np.ndarray:
        """Padded to the box."""
        dims = [n for _, n in self.weight.dims]
        inside: Box = tuple(slice(min(s.start, n), min(s.stop, n)) for s, n in zip(box, dims, strict=True))
        array = np.zeros([s.stop - s.start for s in box], dtype)
        if all(s.stop > s.start for s in inside):
            ours = self.read(layer, inside)
            array[tuple(slice(0, n) for n in ours.shape)] = ours
        return array


def _zeros(shape: tuple[int, ...], device: Any, dtype: Any) -> jax.Array:
    return jax.jit(partial(jnp.zeros, shape, dtype), out_shardings=SingleDeviceSharding(device))()


@partial(jax.jit, donate_argnums=0)
def _put(array: jax.Array, piece: jax.Array, start: list[int]) -> jax.Array:
    return jax.lax.dynamic_update_slice(array, piece, start)
