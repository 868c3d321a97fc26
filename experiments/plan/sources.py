"""Whole sources left out: numbers fitted on all other sources of a family of GPUs, judged on every row of the one left
out.

python -m experiments.plan.sources          the table by source, feature, GPU, tensor degree, model size, length and devices (3 minutes)
python -m experiments.plan.sources --shipped   the same by the numbers that ship, which know every source (seconds)
"""

import functools
import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from experiments import bench
from experiments.bench import Table
from meshtrain.model.weights import parameters

from . import aleph_alpha, calibrate, dgxc, experts, foundry, internlm, kempner, tpu
from .published import ELSEWHERE, FITTED, FLOAT8, HELD_OUT, Run

# A fit has so many rows of a source, spread over it, so that none outvotes the others.
MOST = 8
# Judged and never fitted on: KempnerForge's report does not say which of its rows compute again, and by their speeds
# not all do; products in float8 and mixtures of experts have costs of their own.
NEVER_FITTED = (
    "KempnerForge",
    "torchtitan float8",
    "Megatron-Bridge",
    "AutoModel",
    "JaxPP",
    "marin",
    "MaxText experts",
    "ModelZoo",
    "XTuner",
    "dgxc",
)
# Whose rate of products comes from one source alone.
ONE_SOURCE = {"gb200": "NeMo", "h100-96": "torchtitan"}


@dataclass(frozen=True)
class Judged:
    """A row, and its relative error by numbers that know nothing of its source."""

    run: Run
    error: float


@functools.cache
def every() -> tuple[Run, ...]:
    """All published rows."""
    rows = (
        *FITTED,
        *HELD_OUT,
        *ELSEWHERE,
        *kempner.RUNS,
        *foundry.runs(),
        *aleph_alpha.runs(),
        *internlm.runs(),
    )
    return (
        *rows,
        *dgxc.runs(),
        *tpu.FITTED,
        *tpu.HELD_OUT,
        *FLOAT8,
        *experts.runs(),
        *experts.others(),
        *experts.megatrons(),
    )


def of_family(family: str) -> dict[str, list[Run]]:
    """Rows by source."""
    rows: dict[str, list[Run]] = {}
    for run in every():
        if calibrate.FAMILIES.get(run.accelerator) == family:
            rows.setdefault(run.source, []).append(run)
    return rows


def fitted_on(family: str, without: str = "") -> list[Run]:
    """The rows of a fit."""
    chosen: list[Run] = []
    for source, rows in of_family(family).items():
        if source not in (without, *NEVER_FITTED):
            chosen += rows[:: math.ceil(len(rows) / MOST)]
    return chosen


def left_out(family: str) -> list[Judged]:
    """Every row of a family, by numbers that know nothing of its source."""
    judged: list[Judged] = []
    for source, rows in of_family(family).items():
        efficiency = calibrate.fit(fitted_on(family, source))
        judged += [
            Judged(run, calibrate.predict(run, efficiency) / run.seconds - 1)
            for run in rows
        ]
    return judged


def shipped() -> list[Judged]:
    """Every row by the numbers that ship."""
    return [Judged(run, run.predicted() / run.seconds - 1) for run in every()]


def spread(errors: Iterable[float]) -> list[str]:
    """Median, ninetieth percentile and worst of the sizes; the median with its sign."""
    signed = sorted(errors)
    sizes = sorted(map(abs, signed))
    percentile = sizes[min(len(sizes) - 1, int(0.9 * len(sizes)))]
    return [
        f"{size:.1%}" for size in (statistics.median(sizes), percentile, sizes[-1])
    ] + [f"{statistics.median(signed):+.1%}"]


def _size(run: Run) -> str:
    billions = parameters(run.config.model) / 1e9
    return next(
        name
        for most, name in (
            (1, "below 1B"),
            (10, "1B to 10B"),
            (40, "10B to 40B"),
            (200, "40B to 200B"),
            (math.inf, "above 200B"),
        )
        if billions < most
    )


def _feature(run: Run) -> str:
    """What a row has beside dense layers of 16 bits in rows of one device."""
    config = run.config
    features = {
        "float8": config.precision.matmul == "float8",
        "experts": config.model.moe.experts > 0,
        "context": config.mesh.context > 1,
        "pipeline": config.mesh.pipeline > 1,
        "tensor": config.mesh.tensor > 1,
        "data": config.mesh.data > 1,
    }
    return next((name for name, has in features.items() if has), "one device")


@functools.cache
def seen() -> frozenset[int]:
    """The rows that the shipped rates were fitted on, by `id`."""
    alone = [run for run in every() if run.source == ONE_SOURCE.get(run.accelerator)]
    rows = [*fitted_on("Ampere"), *fitted_on("Hopper"), *tpu.FITTED, *alone]
    return frozenset(map(id, rows))


GROUPS: dict[str, Callable[[Run], str]] = {
    "source": lambda run: run.source,
    "the first feature": _feature,
    "the fit": lambda run: "has seen it" if id(run) in seen() else "has not seen it",
    "GPU": lambda run: run.accelerator,
    "tensor": lambda run: (
        str(run.config.mesh.tensor)
        + " with sequence parallelism" * run.config.parallel.sequence_parallel
    ),
    "model": _size,
    "tokens a row": lambda run: f"{run.config.train.sequence_length:6,}",
    "devices": lambda run: (
        "to 64"
        if run.config.mesh.devices <= 64
        else "to 512"
        if run.config.mesh.devices <= 512
        else "above 512"
    ),
}


def tables(judged: list[Judged]) -> None:
    """Prints the spread of all rows, and of each group."""
    for title, group in GROUPS.items():
        table = Table(
            title.ljust(30), "rows", "median", "  p90", "worst", "middle, with sign"
        )
        groups: dict[str, list[float]] = {}
        for row in judged:
            groups.setdefault(group(row.run), []).append(row.error)
        for name, errors in (
            groups.items() if title == "source" else sorted(groups.items())
        ):
            table.row(name, len(errors), *spread(errors))
        if title == "source":
            table.row("all", len(judged), *spread(row.error for row in judged))
        print()


def main() -> None:
    parser = bench.parser(__doc__)
    parser.add_argument("--shipped", action="store_true")
    if parser.parse_args().shipped:
        tables(shipped())
        return
    for family in ("Ampere", "Hopper"):
        print(f"{family}: {calibrate.rounded(calibrate.fit(fitted_on(family)))}")
    tables([*left_out("Ampere"), *left_out("Hopper")])


if __name__ == "__main__":
    main()
