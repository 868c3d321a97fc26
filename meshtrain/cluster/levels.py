"""Levels of links found in a measured matrix: which devices stand together, what each level costs, and an order that
keeps to them.

    measured [from, to]              clustered                      levels
    .  1  9  9  1                    0 ─┐                           2 devices    α, β of pairs within
    1  .  9  9 ...     ──►           4 ─┴─┐            ──►          all          α, β of the others
    9  9  .  1                       1 ─┐ │                         order 0, 4, 1, ...
    ...                              2 ─┴─┘

Devices are joined by average linkage (Sokal & Michener 1958): the two clusters between which messages take least, on
average, become one, until one is left. On the way there are partitions into blocks of one size; those are levels
between which messages become `ALIKE` times slower. That factor separates a level from pairs that noise joins
first inside a block: 20% more or less are 1.5 times at most.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from meshtrain.config import MeshConfig

ALIKE = 1.6  # times: figures of links that differ by less are one level
Blocks = list[list[int]]


@dataclass(frozen=True)
class MeasuredLevel:
    """Blocks of devices, and the messages between those that no inner level joins."""

    blocks: tuple[tuple[int, ...], ...]
    latency: float  # seconds
    bandwidth: float  # bytes/s

    @property
    def devices(self) -> int:
        """Devices of a block."""
        return len(self.blocks[0])


@dataclass(frozen=True)
class Clustered:
    """Levels, innermost first, and an order [devices] in which blocks of every level are neighbours; where devices
    stand in such an order already, it is 0, 1, 2, ...
    """

    levels: tuple[MeasuredLevel, ...]
    order: tuple[int, ...]

    @property
    def is_ordered(self) -> bool:
        return self.order == tuple(range(len(self.order)))


def clustered(sizes: Sequence[int], seconds: np.ndarray) -> Clustered:
    """Clusters devices by messages of `sizes` bytes, ascending, and their seconds [sizes, from, to], NaN where none was
    sent.
    """
    # Levels may differ in latency, in bandwidth or in both: the smallest and the largest message count alike.
    far = np.log(seconds[[0, -1]]).mean(0)
    everything = list(range(len(far)))
    partitions = [[[i] for i in everything], *_partitions(far)]
    while len(partitions) > 2:
        steps = [
            _typical(far, inner, outer)
            for inner, outer in itertools.pairwise(partitions)
        ]
        least, at = min(
            (outer - inner, i)
            for i, (inner, outer) in enumerate(itertools.pairwise(steps))
        )
        if least > math.log(ALIKE):
            break
        del partitions[at + 1]
    levels = tuple(
        MeasuredLevel(
            tuple(map(tuple, outer)), *_line(sizes, seconds, _between(inner, outer))
        )
        for inner, outer in itertools.pairwise(partitions)
    )
    order = everything
    for level in levels:
        # Blocks by their first devices, inner order kept.
        block_of = {device: min(block) for block in level.blocks for device in block}
        order = sorted(order, key=block_of.__getitem__)
    return Clustered(levels, tuple(order))


def cost(
    seconds: np.ndarray,
    order: Sequence[int],
    mesh: MeshConfig,
    nbytes: Mapping[str, float],
) -> float:
    """Seconds that rings over each axis of a mesh take in an order of devices [devices]: bytes of the axis times the
    slowest neighbours' seconds [from, to].
    """
    placed = np.asarray(order)
    total = 0.0
    for axis, weight in nbytes.items():
        members = mesh.ways(axis)
        stride = mesh.stride(axis)
        rings = placed.reshape(-1, members, stride)
        if members > 1:
            total += weight * seconds[rings, np.roll(rings, -1, axis=1)].max()
    return total


def _partitions(far: np.ndarray) -> Iterator[Blocks]:
    """Yields the partitions into blocks of one size on the way from single devices to all of them, by average
    linkage.
    """
    known = ~np.isnan(far)
    total = np.where(known, far, 0.0)
    count = known.astype(float)
    total = total + total.T
    count = count + count.T
    mean = _mean(total, count)
    np.fill_diagonal(mean, np.inf)
    blocks: dict[int, list[int]] = {i: [i] for i in range(len(far))}
    while len(blocks) > 1:
        i, j = sorted(map(int, np.unravel_index(np.argmin(mean), mean.shape)))
        # Where no pair left was measured, any two that are left.
        i, j = (i, j) if i in blocks and j in blocks else sorted(blocks)[:2]
        blocks[i] = sorted(blocks[i] + blocks.pop(j))
        for sums in (total, count):
            sums[i] += sums[j]
            sums[:, i] += sums[:, j]
        mean[j] = mean[:, j] = np.inf
        others = [k for k in blocks if k != i]
        mean[i, others] = mean[others, i] = _mean(total[i, others], count[i, others])
        if len({len(block) for block in blocks.values()}) == 1:
            yield sorted(blocks.values())


def _mean(total: np.ndarray, count: np.ndarray) -> np.ndarray:
    return np.divide(total, count, out=np.full_like(total, np.inf), where=count > 0)


def _between(inner: Blocks, outer: Blocks) -> np.ndarray:
    """Returns, for two devices [from, to], if they share a block of `outer` and none of `inner`."""
    devices = sum(map(len, outer))
    share = []
    for blocks in (inner, outer):
        block = np.empty(devices, int)
        for number, members in enumerate(blocks):
            block[members] = number
        share.append(block[:, None] == block)
    return share[1] & ~share[0]


def _typical(far: np.ndarray, inner: Blocks, outer: Blocks) -> float:
    among = far[_between(inner, outer)]
    return float(np.nanmedian(among)) if np.isfinite(among).any() else math.inf


def _line(
    sizes: Sequence[int], seconds: np.ndarray, pairs: np.ndarray
) -> tuple[float, float]:
    """(latency, bandwidth) through the middle of the smallest and the largest messages of some pairs [from, to]."""
    small, large = (float(np.nanmedian(seconds[i][pairs])) for i in (0, -1))
    a_byte = max(large - small, 1e-3 * large) / (sizes[-1] - sizes[0])
    return max(0.0, small - a_byte * sizes[0]), 1 / a_byte
