"""A line through times: seconds = latency + bytes / bandwidth, the alpha-beta model (Thakur et al. 2005, section 3)."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

ROUNDS = 20  # of reweighting: it settles in fewer
BEND = 1.345  # residuals beyond so many deviations weigh less (Huber 1964; 95% as efficient as least squares on Gaussian noise)


@dataclass(frozen=True)
class Line:
    latency: float  # seconds
    bandwidth: float  # bytes a second

    def seconds(self, nbytes: float) -> float:
        return self.latency + nbytes / self.bandwidth


def line(sizes: Sequence[float], seconds: Sequence[float]) -> Line:
    """The line of least relative error, so that small messages weigh as much as large ones; outliers weigh less.

    Neither figure is negative. Where chance made a large message no slower than a small one no line tells the bandwidth, and it is that of
    the largest message alone.
    """
    order = np.argsort(sizes)
    x, y = np.asarray(sizes, float)[order], np.asarray(seconds, float)[order]
    design = np.stack([np.ones_like(x), x], axis=1) / y[:, None]
    trust = np.ones_like(x)
    for _ in range(ROUNDS):
        root = np.sqrt(trust)
        alpha, beta = np.linalg.lstsq(design * root[:, None], root, rcond=None)[0]
        residuals = np.abs(design @ (alpha, beta) - 1)
        # Of a normal distribution the median absolute deviation is 0.6745 standard deviations.
        deviation = max(float(np.median(residuals)) / 0.6745, 1e-9)
        trust = np.minimum(1.0, BEND * deviation / np.maximum(residuals, 1e-12))
    if beta <= 0:
        return Line(max(float(alpha), 0.0), float(x[-1] / y[-1]))
    if alpha < 0:
        # The best line through the origin, by the same relative error.
        return Line(0.0, float(np.sum((x / y) ** 2) / np.sum(x / y)))
    return Line(float(alpha), float(1 / beta))


def left_out(sizes: Sequence[float], seconds: Sequence[float]) -> list[float]:
    """For each size the relative error (signed) of a line through all the others; none where two or fewer would be left."""
    if len(sizes) < 4:
        return []
    errors = []
    for kept in itertools.combinations(range(len(sizes)), len(sizes) - 1):
        (out,) = set(range(len(sizes))) - set(kept)
        found = line([sizes[i] for i in kept], [seconds[i] for i in kept])
        errors.append(found.seconds(sizes[out]) / seconds[out] - 1)
    return errors[::-1]
