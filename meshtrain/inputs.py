"""What the arrays of a batch are called, for whoever asks for the rows of one: without JAX. A row is a sequence or an image.

    text      tokens  int32 [B, T]          labels int32 [B, T]
    images    patches float32 [B, N, P]     labels int32 [B, 1]

N patches of P = patch_size² x channels numbers each, pixel by pixel.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

from meshtrain.config.model import patches_of
from meshtrain.config.schema import Config
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
