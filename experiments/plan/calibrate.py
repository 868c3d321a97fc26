"""Fits the efficiency numbers of an accelerator on published runs; `sources` says how well they predict those of teams
they have not seen.

Six numbers and a few dozen runs: so each number is also held near what it is known to be (`prior`, with `SPREAD` as the
standard deviation of its logarithm), which is the maximum a posteriori estimate under log-normal errors. What cuDNN's
attention reaches is known from tables of the kernel alone (`kernels`), and so is what NCCL makes of NVLink: these two
are held closest.
"""

from collections.abc import Sequence
from dataclasses import asdict, replace

import numpy as np

from meshtrain.cluster.accelerators import ACCELERATORS, Efficiency

from . import kernels
from .published import Run

NAMES = ("matmul", "half_size", "attention", "memory", "link", "exposed")
SPREAD = np.array([0.2, 0.7, 0.05, 0.2, 0.05, 0.7])
MOST = np.array([0.95, 1e4, 0.9, 0.95, 0.95, 1.0])
ERROR = 0.05  # standard deviation of the logarithm of a published time

MEASURED = {"Ampere": "a100", "Hopper": "h200"}  # whose attention was timed alone
# Of NVLink, by nccl-tests (`tests/cluster/test_nccl.py`)
LINK = {"Ampere": 0.75, "Hopper": 0.8}
FAMILIES = {
    "a100-40": "Ampere",
    "a100-80": "Ampere",
    "h100": "Hopper",
    "h200": "Hopper",
}


def prior(family: str) -> np.ndarray:
    """What the numbers are before any run is seen."""
    return np.array(
        [0.75, 100.0, kernels.share("cudnn", MEASURED[family]), 0.75, LINK[family], 0.3]
    )


def fit(runs: Sequence[Run], rounds: int = 8) -> Efficiency:
    """The efficiency numbers that explain the runs of a family best, by Gauss-Newton on logarithms."""
    start = np.log(prior(FAMILIES[runs[0].accelerator]))
    x = start
    for _ in range(rounds):
        residual, jacobian = _linearised(x, start, runs)
        step, *_ = np.linalg.lstsq(jacobian, -residual, rcond=None)
        step *= min(1.0, 0.5 / max(1e-9, float(np.abs(step).max())))
        x = np.minimum(x + step, np.log(MOST))
        if np.abs(step).max() < 1e-4:
            break
    return _efficiency(x)


def _efficiency(x: np.ndarray) -> Efficiency:
    return Efficiency(**dict(zip(NAMES, np.exp(x).tolist(), strict=True)))


def predict(run: Run, efficiency: Efficiency) -> float:
    """Seconds of a run's step by other numbers than its accelerator's own."""
    return run.predicted(replace(ACCELERATORS[run.accelerator], efficiency=efficiency))


def _residuals(x: np.ndarray, start: np.ndarray, runs: Sequence[Run]) -> np.ndarray:
    efficiency = _efficiency(x)
    errors = [np.log(predict(run, efficiency) / run.seconds) / ERROR for run in runs]
    return np.concatenate([errors, (x - start) / SPREAD])


def _linearised(
    x: np.ndarray, start: np.ndarray, runs: Sequence[Run]
) -> tuple[np.ndarray, np.ndarray]:
    base, h = _residuals(x, start, runs), 1e-3
    columns = [
        (_residuals(x + h * np.eye(len(x))[i], start, runs) - base) / h
        for i in range(len(x))
    ]
    return base, np.stack(columns, axis=1)


def rounded(efficiency: Efficiency) -> Efficiency:
    """Three digits: what stands in `accelerators`."""
    return Efficiency(
        **{name: float(f"{value:.3g}") for name, value in asdict(efficiency).items()}
    )
