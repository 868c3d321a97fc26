"""What the arrays of a batch are called, for whoever asks for the rows of one: without JAX. A row is a sequence or an image.

    text      tokens  int32 [B, T]          labels int32 [B, T]
    images    patches float32 [B, N, P]     labels int32 [B, 1]

N patches of P = patch_size² x channels numbers each, pixel by pixel.
"""

from collections.abc import Mapping
from typing import TypeVar

Array = TypeVar("Array")
TOKENS, PATCHES, LABELS = "tokens", "patches", "labels"
# The second class of a mixed image, and the share of the first: [B, 1] each.
OTHER_LABELS, MIX = "labels_b", "mix"


def inputs(batch: Mapping[str, Array]) -> Array:
    """What the embedding reads: rows along the first axis (behind microbatches, where they are cut)."""
    return batch[PATCHES] if PATCHES in batch else batch[TOKENS]
