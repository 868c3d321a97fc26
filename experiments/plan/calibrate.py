"""Fits the efficiency numbers of an accelerator on published runs, and says how well they predict runs they have not seen.

Six numbers and a handful of runs: so each number is also held near what it is known to be (`prior`, with `SPREAD` as the
standard deviation of its logarithm), which is the maximum a posteriori estimate under log-normal errors. What cuDNN's attention reaches
is known from tables of the kernel alone (`kernels`); none of Ampere's runs has it, so that there it is all that is known.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from meshtrain.cluster.accelerators import ACCELERATORS, Efficiency

from . import kernels
from .published import FITTED, Run

NAMES = ("matmul", "half_size", "attention", "memory", "link", "exposed")
SPREAD = np.array([0.2, 0.7, 0.2, 0.2, 0.3, 0.7])
MOST = np.array([0.95, 1e4, 0.9, 0.95, 0.95, 1.0])
ERROR = 0.05  # standard deviation of the logarithm of a published time

MEASURED = {"Ampere": "a100", "Hopper": "h200"}  # whose attention was timed alone
FAMILIES = {"a100-40": "Ampere", "a100-80": "Ampere", "h100": "Hopper", "h100-96": "Hopper", "h200": "Hopper"}


@dataclass(frozen=True)
class Left:
    """A run predicted by numbers fitted on the others of its family."""

    run: Run
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted / self.run.seconds - 1


def family(name: str, runs: Sequence[Run] = FITTED) -> list[Run]:
    return [run for run in runs if FAMILIES[run.accelerator] == name]


def prior(family: str) -> np.ndarray:
    """What the numbers are before any run is seen."""
    return np.array([0.75, 100.0, kernels.share("cudnn", MEASURED[family]), 0.75, 0.75, 0.3])


def fit(runs: Sequence[Run], rounds: int = 12) -> Efficiency:
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


def leave_one_out(runs: Sequence[Run]) -> list[Left]:
    """Each run predicted by a fit on the others."""
    found = []
    for run in runs:
        efficiency = fit([other for other in runs if other is not run])
        found.append(Left(run, _predict(run, efficiency)))
    return found


def _efficiency(x: np.ndarray) -> Efficiency:
    return Efficiency(**dict(zip(NAMES, np.exp(x).tolist(), strict=True)))


def _predict(run: Run, efficiency: Efficiency) -> float:
    return run.predicted(replace(ACCELERATORS[run.accelerator], efficiency=efficiency))


def _residuals(x: np.ndarray, start: np.ndarray, runs: Sequence[Run]) -> np.ndarray:
    efficiency = _efficiency(x)
    errors = [np.log(_predict(run, efficiency) / run.seconds) / ERROR for run in runs]
    return np.concatenate([errors, (x - start) / SPREAD])


def _linearised(x: np.ndarray, start: np.ndarray, runs: Sequence[Run]) -> tuple[np.ndarray, np.ndarray]:
    base, h = _residuals(x, start, runs), 1e-3
    columns = [(_residuals(x + h * np.eye(len(x))[i], start, runs) - base) / h for i in range(len(x))]
    return base, np.stack(columns, axis=1)


def rounded(efficiency: Efficiency) -> Efficiency:
    """Three digits: what stands in `accelerators`."""
    return Efficiency(**{name: float(f"{value:.3g}") for name, value in asdict(efficiency).items()})
