"""What a gradient is sent as, in bytes; no JAX, so that the planner stands on the same figures as the program.

k numbers of a row that goes to one device:

    bfloat16      2 k                             of k numbers
    float8, int8  k + 4 ceil(k / block)           a float32 scale a block; the last block is as short as it is
    int4          ceil(k / 2) + 4 ceil(k / block)
"""

import math
from dataclasses import dataclass
from typing import Protocol

from meshtrain.config import Config
from meshtrain.config.reduce import ReduceConfig
from meshtrain.parallel.placement import Placed
from meshtrain.parallel.reduce import kept

SCALE = 4  # bytes of a block's float32
PAIR = 8  # bytes of a float32 and its int32 place


class Sized(Protocol):
    """What knows how many bytes it makes of a row."""

    def nbytes(self, k: int) -> int:
        """Bytes of a row of k numbers."""
        ...


@dataclass(frozen=True)
class BlockSizes:
    """Numbers of `bits` each, `block` of which share a scale; 0: there is none."""

    bits: int
    block: int

    def blocks(self, k: int) -> int:
        """Scales of a row of k numbers."""
        return math.ceil(k / self.block) if self.block else 0

    def nbytes(self, k: int) -> int:
        """Bytes of a row of k numbers, scales included."""
        return math.ceil(k * self.bits / 8) + SCALE * self.blocks(k)


BITS = {"bfloat16": 16, "float8": 8, "int8": 8, "int4": 4}


@dataclass(frozen=True)
class TopKSizes:
    """Pairs of a float32 and its int32 place, of the largest numbers of a row: `ratio` of them."""

    ratio: float

    def count(self, k: int) -> int:
        """Numbers that are sent of a row of k."""
        return max(1, round(self.ratio * k))

    def nbytes(self, k: int) -> int:
        """Bytes of a row of k numbers."""
        return PAIR * self.count(k)


def block_sizes(reduce: ReduceConfig) -> BlockSizes:
    """Of bfloat16, float8, int8 or int4."""
    return BlockSizes(BITS[reduce.compression], 0 if reduce.compression == "bfloat16" else reduce.block)


def sized(reduce: ReduceConfig) -> Sized:
    """Of any compression that sends a row as bytes: all but PowerSGD."""
    return TopKSizes(reduce.ratio) if reduce.compression == "topk" else block_sizes(reduce)


def scatters_compressed(config: Config, weight: Placed) -> bool:
    """Whether a weight's gradient is compressed on its way to the shards of an island."""
    return kept.compresses(config, weight) and not kept.across_islands(config)


def crosses_compressed(config: Config, weight: Placed) -> bool:
    """Whether it is on its way across islands. PowerSGD over data sums over all of data at once."""
    at_once = config.parallel.reduce.compression == "powersgd" and not kept.across_islands(config)
    return config.mesh.islands > 1 and kept.compresses(config, weight) and not at_once


def chunk(k: int, islands: int) -> int:
    """Numbers of a shard of k of which an island makes the sum (`exchange.all_reduce`); the last ones are filled up with zeros."""
    return math.ceil(k / islands)
