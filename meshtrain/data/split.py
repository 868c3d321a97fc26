"""The batches of one split, of text or of images: all that a run asks of its data."""

import math
from dataclasses import dataclass, field
from typing import Protocol

from meshtrain.config.rows import filled_up
from meshtrain.data.filling import filled
from meshtrain.data.loader import Batch


class GlobalBatches(Protocol):
    """Batches in one global order, of a bounded set of shapes (rows, T)."""

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]: ...

    @property
    def places_per_batch(self) -> float: ...

    @property
    def batches_per_epoch(self) -> int: ...

    @property
    def tokens_per_batch(self) -> float: ...

    def batch_shape(self, k: int) -> tuple[int, int]: ...

    def batch(self, k: int, rows: slice = slice(None)) -> Batch: ...


@dataclass(frozen=True, repr=False)
class SplitBatches:
    """The batches of one split in one global order.

    With train.uneven_batch: pad the rows of a batch are followed by as many empty ones, of weight 0, as the mesh needs.
    """

    batches: GlobalBatches
    source: str
    digest: str  # of what each source holds for this split, joined by +, wherever it lies; empty if nothing is read
    multiple: int = field(default=1, kw_only=True)  # rows are filled up to a multiple of this
    said: tuple[str, ...] = field(
        default=(), kw_only=True
    )  # what there is to say of what is learned and what is left out

    def __repr__(self) -> str:
        return self.describe()

    def batch(self, k: int, rows: slice = slice(None)) -> Batch:
        """These rows of global batch k. A pure function of (seed, k), so that the whole state of the data is k."""
        return filled(self.batches, k, rows, self.batch_shape(k)[0])

    def batch_shape(self, k: int) -> tuple[int, int]:
        """(rows, T) of global batch k, with the rows that fill it up; T positions of a row."""
        rows, length = self.batches.batch_shape(k)
        return filled_up(rows, self.multiple), length

    def tokens(self, k: int) -> int:
        """Positions of global batch k, padding of its own rows counted, but not the rows that fill it up."""
        return math.prod(self.batches.batch_shape(k))

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """Every (rows, T) that a batch can have."""
        return tuple((filled_up(rows, self.multiple), length) for rows, length in self.batches.shapes)

    @property
    def tokens_per_batch(self) -> float:
        """Labels that count in a batch, on average over an epoch."""
        return self.batches.tokens_per_batch

    @property
    def batches_per_epoch(self) -> int:
        """Batches until the data comes round again."""
        return self.batches.batches_per_epoch

    def describe(self) -> str:
        """What an epoch of it is, in one line."""
        raise NotImplementedError
