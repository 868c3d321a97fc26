"""What the arrays of a batch are called, and the checks of what people pass by hand: without JAX. A row is a sequence or an image.

    text      tokens  int32 [B, T]          labels int32 [B, T]
    images    patches float32 [B, N, P]     labels int32 [B, 1]

N patches of P = patch_size² x channels numbers each, pixel by pixel. The checks come before JAX does: a config where a path was meant, ids
that no vocabulary has, half a batch.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from meshtrain.config import Config, ConfigError, ModelConfig, short
from meshtrain.config.model import patches_of
from meshtrain.families import FAMILIES

Array = TypeVar("Array")
TOKENS, PATCHES, LABELS, WEIGHTS = "tokens", "patches", "labels", "weights"
# The second class of a mixed image, and the share of the first: [B, 1] each.
OTHER_LABELS, MIX = "labels_b", "mix"
FLOATS = (PATCHES, MIX, WEIGHTS)  # float32; all others are int32


def input_name(batch: Mapping[str, Any]) -> str:
    """What the embedding reads is called."""
    return PATCHES if PATCHES in batch else TOKENS


def inputs(batch: Mapping[str, Array]) -> Array:
    """What the embedding reads: rows along the first axis (behind microbatches, where they are cut)."""
    return batch[input_name(batch)]


def row_shape(name: str, config: Config) -> tuple[int, ...]:
    """The shape of one row of an array of a batch."""
    if not FAMILIES[config.model.family].images:
        return (config.train.sequence_length,)
    return patches_of(config.model) if name == PATCHES else (1,)


def pad_rows(batch: Mapping[str, np.ndarray], missing: int) -> dict[str, np.ndarray]:
    """Returns the batch with `missing` rows of zeros behind its own, whose `weights` are 0; those of its own are 1 where it has none."""
    if LABELS in batch:
        batch = {WEIGHTS: np.ones(batch[LABELS].shape, np.float32), **batch}
    return {name: np.pad(x, [(0, missing), *[(0, 0)] * (x.ndim - 1)]) for name, x in batch.items()}


# of a batch, beside tokens and labels
OTHERS = {"positions": np.int32, "segments": np.int32, "weights": np.float32, "pairs": np.int32}
OF_IMAGES = (OTHER_LABELS, MIX, WEIGHTS)  # beside patches and labels
PAIRS = ("segments", "positions", "weights", "pairs")  # what a batch of pairs cannot do without


def a_config(given: Any, taker: str) -> Config:
    """The config that `taker` was given; ConfigError for a path, a dict and whatever else is none."""
    if isinstance(given, Config):
        return given
    raise ConfigError(f"{taker} takes a config, and was given {short(repr(given))}; make one with mt.load(...).")


def a_batch(given: Mapping[str, ArrayLike], config: Config) -> dict[str, np.ndarray]:
    """A batch as `mt.open_data` gives them: int32 tokens and labels [B, T], perhaps positions, segments, float32 weights and pairs;
    of images see `meshtrain.inputs`.

    ConfigError for arrays that are missing or unknown, of different shapes, or with ids beyond the vocabulary; for a batch without
    pairs where the objective is dpo, and with them where it is not.
    """
    of_images = FAMILIES[config.model.family].images
    read, others = (PATCHES, OF_IMAGES) if of_images else (TOKENS, tuple(OTHERS))
    if not isinstance(given, Mapping) or not {read, LABELS} <= given.keys() <= {read, LABELS, *others}:
        found = ", ".join(map(str, given)) if isinstance(given, Mapping) else f"a {type(given).__name__}"
        what = "a batch of images" if of_images else "a batch"
        raise ConfigError(f"{what} has {read}, labels and perhaps {', '.join(others)}; this one has {found}.")
    return _images(given, config) if of_images else _text(given, config)


def _text(given: Mapping[str, ArrayLike], config: Config) -> dict[str, np.ndarray]:
    objective, missing = config.train.objective, [name for name in PAIRS if name not in given]
    if objective == "dpo" and missing:
        raise ConfigError(
            f"train.objective is dpo, and a batch of pairs has {', '.join(PAIRS)}; this one lacks {', '.join(missing)}."
        )
    if objective != "dpo" and "pairs" in given:
        raise ConfigError(
            f"this batch has pairs, which train.objective {objective} does not learn from; leave them out."
        )
    arrays = {name: some_ids(name, given[name], config.model.vocab_size) for name in ("tokens", "labels")}
    arrays |= {name: np.asarray(given[name], kind) for name, kind in OTHERS.items() if name in given}
    for name, array in arrays.items():
        if array.shape != arrays["tokens"].shape:
            raise ConfigError(f"{name} has shape {list(array.shape)}, but tokens {list(arrays['tokens'].shape)}.")
    if "pairs" in arrays:
        pairs, most = arrays["pairs"], arrays["pairs"].shape[1] // 2
        if pairs.min() < 0 or pairs.max() > most:
            wrong = pairs.min() if pairs.min() < 0 else pairs.max()
            raise ConfigError(
                f"pairs have the number {wrong}; in a row of {pairs.shape[1]} labels they are 1 to {most}, 0: none."
            )
    return arrays


def _images(given: Mapping[str, ArrayLike], config: Config) -> dict[str, np.ndarray]:
    if (OTHER_LABELS in given) != (MIX in given):
        raise ConfigError(f"mixed images have both {OTHER_LABELS} and {MIX}; this batch has only one of them.")
    labels = [name for name in (LABELS, OTHER_LABELS) if name in given]
    arrays = {PATCHES: some_patches(given[PATCHES], config.model)}
    arrays |= {name: some_ids(name, given[name], config.model.vocab_size) for name in labels}
    arrays |= {name: np.asarray(given[name], np.float32) for name in (MIX, WEIGHTS) if name in given}
    wanted = (len(arrays[PATCHES]), 1)
    for name, array in arrays.items():
        if name != PATCHES and array.shape != wanted:
            raise ConfigError(f"{name} has shape {list(array.shape)}; of {wanted[0]} images it must be {list(wanted)}.")
    if MIX in arrays and not (arrays[MIX].min() >= 0 and arrays[MIX].max() <= 1):
        raise ConfigError(f"{MIX} is the share of an image's first class, so it must be from 0 to 1.")
    return arrays


def some_patches(given: ArrayLike, model: ModelConfig) -> np.ndarray:
    """Patches [B, N, P] as float32; ConfigError for anything else, such as the images themselves."""
    try:
        found = np.asarray(given)
    except ValueError:
        raise ConfigError("patches are rows of different lengths; they must be numbers [B, N, P].") from None
    number, size = patches_of(model)
    if found.ndim != 3 or not len(found) or found.shape[1:] != (number, size) or found.dtype.kind not in "fiu":
        raise ConfigError(
            f"patches are {found.dtype}{list(found.shape)}; they must be numbers [B, {number}, {size}]: of images of {model.image_size} x "
            f"{model.image_size} x {model.channels} cut into patches of {model.patch_size} x {model.patch_size}, row by row."
        )
    return found.astype(np.float32, copy=False)


def some_ids(name: str, given: ArrayLike, vocabulary: int) -> np.ndarray:
    """Ids [B, T] as int32; ConfigError for anything else, which would be computed with all the same."""
    try:
        ids = np.asarray(given)
    except ValueError:
        raise ConfigError(f"{name} are rows of different lengths; they must be whole numbers [B, T].") from None
    if ids.ndim != 2 or not ids.size or not np.issubdtype(ids.dtype, np.integer):
        raise ConfigError(f"{name} are {ids.dtype}{list(ids.shape)}; they must be whole numbers [B, T].")
    if ids.min() < 0 or ids.max() >= vocabulary:
        wrong = ids.min() if ids.min() < 0 else ids.max()
        away = "; what should not count in the loss has the weight 0 in `weights`" if name == "labels" else ""
        raise ConfigError(f"{name} have the id {wrong}; the model's are 0 to {vocabulary - 1}{away}.")
    return ids.astype(np.int32, copy=False)
