"""Names of the arrays of a batch, and checks of the arrays that people pass by hand, without JAX.

A row is a sequence or an image.

    text      tokens  int32 [B, T]          labels int32 [B, T]
    images    patches float32 [B, N, P]     labels int32 [B, 1]

N patches of P = patch_size² x channels numbers each, pixel by pixel. The checks come before JAX does: a config where a
path was meant, ids that no vocabulary has, half a batch.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from meshtrain.config import Config, ConfigError, ModelConfig, short
from meshtrain.config.model import patches_of
from meshtrain.families import FAMILIES

Given = Mapping[str, ArrayLike]
Arrays = dict[str, np.ndarray]
Array = TypeVar("Array")
TOKENS = "tokens"
PATCHES = "patches"
LABELS = "labels"
WEIGHTS = "weights"
# The second class of a mixed image, and the share of the first: [B, 1] each.
OTHER_LABELS = "labels_b"
MIX = "mix"
# The experts that took each token in each layer where it was drawn: int32 [B, T, layers, top_k].
EXPERTS = "experts"
FLOATS = (PATCHES, MIX, WEIGHTS, "advantages", "drawn")  # float32; all others are int32


def input_name(batch: Mapping[str, Any]) -> str:
    """Returns the name of what the embedding reads."""
    return PATCHES if PATCHES in batch else TOKENS


def inputs(batch: Mapping[str, Array]) -> Array:
    """Returns what the embedding reads: rows along the first axis (behind microbatches, where they are cut)."""
    return batch[input_name(batch)]


def row_shape(name: str, config: Config) -> tuple[int, ...]:
    """Returns the shape of one row of an array of a batch."""
    if not FAMILIES[config.model.family].images:
        routes: tuple[int, ...] = ()
        if name == EXPERTS:
            routes = (config.model.layers, config.model.moe.top_k)
        return (config.train.sequence_length, *routes)
    if name == PATCHES:
        return patches_of(config.model)
    return (1,)


def pad_rows(batch: Mapping[str, np.ndarray], missing: int) -> Arrays:
    """Returns the batch with `missing` rows of zeros behind its own, whose `weights` are 0; those of its own are 1
    where it has none.
    """
    if LABELS in batch:
        batch = {WEIGHTS: np.ones(batch[LABELS].shape, np.float32), **batch}

    def padded(x: np.ndarray) -> np.ndarray:
        of_row = [(0, 0)] * (x.ndim - 1)
        return np.pad(x, [(0, missing), *of_row])

    return {name: padded(x) for name, x in batch.items()}


# of a batch, beside tokens and labels
OTHERS = {
    "positions": np.int32,
    "segments": np.int32,
    "weights": np.float32,
    "pairs": np.int32,
    "advantages": np.float32,
    "drawn": np.float32,
    EXPERTS: np.int32,
}
OF_IMAGES = (OTHER_LABELS, MIX, WEIGHTS)  # beside patches and labels
# The arrays of a batch beside tokens and labels, by objective. `drawn`: the log-probability of each label when it was
# drawn.
NEEDED = {
    "dpo": ("segments", "positions", "weights", "pairs"),
    "grpo": ("segments", "positions", "weights", "advantages", "drawn"),
}


def needed(config: Config) -> tuple[str, ...]:
    """Returns the arrays of a batch beside tokens and labels that a config's objective learns from."""
    objective = config.train.objective
    replays = objective == "grpo" and config.rl.replay_routing
    return NEEDED.get(objective, ()) + (EXPERTS,) * replays


def a_config(value: Any, taker: str) -> Config:
    """Returns the config that `taker` was called with; ConfigError for a path, a dict and whatever else is none."""
    if isinstance(value, Config):
        return value
    raise ConfigError(
        f"{taker} takes a config, and was given {short(repr(value))}; make one with mt.load(...)."
    )


def a_batch(batch: Given, config: Config) -> Arrays:
    """Returns a batch as `mt.open_data` gives them: int32 tokens and labels [B, T], perhaps positions, segments,
    float32 weights and pairs; of images see `meshtrain.inputs`.

    ConfigError for arrays that are missing or unknown, of different shapes, or with ids beyond the vocabulary; for a
    batch without pairs where the objective is dpo, and with them where it is not.
    """
    of_images = FAMILIES[config.model.family].images
    read = TOKENS
    others = tuple(OTHERS)
    if of_images:
        read = PATCHES
        others = OF_IMAGES
    if not isinstance(batch, Mapping) or not {read, LABELS} <= batch.keys() <= {
        read,
        LABELS,
        *others,
    }:
        if isinstance(batch, Mapping):
            has = ", ".join(map(str, batch))
        else:
            has = f"a {type(batch).__name__}"
        what = "a batch of images" if of_images else "a batch"
        raise ConfigError(
            f"{what} has {read}, labels and perhaps {', '.join(others)}; this one has {has}."
        )
    if of_images:
        return _images(batch, config)
    return _text(batch, config)


def _check_objective(batch: Given, config: Config) -> None:
    """ConfigError for a batch without what its objective learns from, or with what others learn from."""
    objective = config.train.objective
    learned = needed(config)
    if missing := [name for name in learned if name not in batch]:
        has = f"its batches have {', '.join(learned)}"
        raise ConfigError(
            f"train.objective is {objective}, and {has}; this one lacks {', '.join(missing)}."
        )
    for name in ("pairs", "advantages", "drawn", EXPERTS):
        if name in batch and name not in learned:
            unused = f"which train.objective {objective} does not learn from"
            raise ConfigError(f"this batch has {name}, {unused}; leave them out.")


def _text(batch: Given, config: Config) -> Arrays:
    _check_objective(batch, config)
    arrays = {
        name: some_ids(name, batch[name], config.model.vocab_size)
        for name in (TOKENS, LABELS)
    }
    arrays |= {
        name: np.asarray(batch[name], kind)
        for name, kind in OTHERS.items()
        if name in batch
    }
    for name, array in arrays.items():
        legal_shape = arrays[TOKENS].shape + row_shape(name, config)[1:]
        if array.shape != legal_shape:
            raise ConfigError(
                f"{name} has shape {list(array.shape)}, but tokens {list(arrays[TOKENS].shape)}."
            )
    if EXPERTS in arrays:
        most = config.model.moe.experts - 1
        if (wrong := _outside(arrays[EXPERTS], most)) is not None:
            raise ConfigError(f"experts have the number {wrong}; they are 0 to {most}.")
    if "pairs" in arrays:
        length = arrays["pairs"].shape[1]
        most = length // 2
        if (wrong := _outside(arrays["pairs"], most)) is not None:
            legal = f"in a row of {length} labels they are 1 to {most}, 0: none"
            raise ConfigError(f"pairs have the number {wrong}; {legal}.")
    return arrays


def _outside(numbers: np.ndarray, most: int) -> int | None:
    """Returns a number below 0 or above `most`; None if there is none."""
    if numbers.min() < 0:
        return numbers.min()
    if numbers.max() > most:
        return numbers.max()
    return None


def _images(batch: Given, config: Config) -> Arrays:
    if (OTHER_LABELS in batch) != (MIX in batch):
        raise ConfigError(
            f"mixed images have both {OTHER_LABELS} and {MIX}; this batch has only one of them."
        )
    labels = [name for name in (LABELS, OTHER_LABELS) if name in batch]
    arrays = {PATCHES: some_patches(batch[PATCHES], config.model)}
    arrays |= {
        name: some_ids(name, batch[name], config.model.vocab_size) for name in labels
    }
    arrays |= {
        name: np.asarray(batch[name], np.float32)
        for name in (MIX, WEIGHTS)
        if name in batch
    }
    wanted = (len(arrays[PATCHES]), 1)
    for name, array in arrays.items():
        if name != PATCHES and array.shape != wanted:
            raise ConfigError(
                f"{name} has shape {list(array.shape)}; of {wanted[0]} images it must be {list(wanted)}."
            )
    if MIX in arrays and not (arrays[MIX].min() >= 0 and arrays[MIX].max() <= 1):
        raise ConfigError(
            f"{MIX} is the share of an image's first class, so it must be from 0 to 1."
        )
    return arrays


def some_patches(values: ArrayLike, model: ModelConfig) -> np.ndarray:
    """Returns patches [B, N, P] as float32; ConfigError for anything else, such as the images themselves."""
    patches = _array(PATCHES, values, "numbers [B, N, P]")
    number, numbers = patches_of(model)
    if (
        patches.ndim != 3
        or not len(patches)
        or patches.shape[1:] != (number, numbers)
        or patches.dtype.kind not in "fiu"
    ):
        side = model.image_size
        patch = model.patch_size
        raise ConfigError(
            f"patches are {patches.dtype}{list(patches.shape)}; they must be numbers [B, {number}, {numbers}]: of "
            "images of "
            f"{side} x {side} x {model.channels} cut into patches of {patch} x {patch}, row by row."
        )
    return patches.astype(np.float32, copy=False)


def some_ids(name: str, values: ArrayLike, vocabulary: int) -> np.ndarray:
    """Returns ids [B, T] as int32; ConfigError for anything else, which would be computed with all the same."""
    ids = _array(name, values, "whole numbers [B, T]")
    if ids.ndim != 2 or not ids.size or not np.issubdtype(ids.dtype, np.integer):
        raise ConfigError(
            f"{name} are {ids.dtype}{list(ids.shape)}; they must be whole numbers [B, T]."
        )
    if (wrong := _outside(ids, vocabulary - 1)) is not None:
        away = ""
        if name == LABELS:
            away = "; what should not count in the loss has the weight 0 in `weights`"
        raise ConfigError(
            f"{name} have the id {wrong}; the model's are 0 to {vocabulary - 1}{away}."
        )
    return ids.astype(np.int32, copy=False)


def _array(name: str, values: ArrayLike, legal: str) -> np.ndarray:
    try:
        return np.asarray(values)
    except ValueError:
        raise ConfigError(
            f"{name} are rows of different lengths; they must be {legal}."
        ) from None
