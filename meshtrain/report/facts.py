"""All that the files of a run say, each read once: rows, samples, alerts, findings, checkpoints, history, config and
its plan.
"""

import json
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from meshtrain.cluster.accelerators import ACCELERATORS, KINDS
from meshtrain.config import Config, ConfigError, load, short
from meshtrain.errors import Unreadable
from meshtrain.plan.estimate import Plan, plan
from meshtrain.plan.shapes import model_flops
from meshtrain.report import answers, experts, rows
from meshtrain.report import samples as texts
from meshtrain.report.answers import AnswerSamples, Cells
from meshtrain.report.experts import ExpertLoads
from meshtrain.report.rows import Columns
from meshtrain.run.best import Best, best_in
from meshtrain.run.directory import (
    ALERTS,
    ANSWERS,
    CHECKPOINTS,
    CONFIG,
    FINDINGS,
    GAPS,
    METRICS,
    RESOURCES,
)
from meshtrain.run.lock import in_use
from meshtrain.run.rows import RowReader
from meshtrain.survive import history as histories
from meshtrain.survive.history import History
from meshtrain.survive.ledger import Ledger, ledger
from meshtrain.survive.reliability import Reliability, reliability
from meshtrain.survive.store import SURVIVE

MOST_RANKS = 64  # whose samples are read: a page shows no more
MOST_ALERTS = 200  # the newest
SAME_PEAK = 0.01  # share by which the peaks of one accelerator differ
LEAST_MFU = 1e-9  # that tells anything
LARGEST_FINDINGS = 1 << 24  # bytes

Fields = Mapping[str, Any]


@dataclass(frozen=True)
class CheckpointFacts:
    """A step that is on disk. `problem`: why it is none to go on from."""

    name: str
    saved: str = ""
    loss: float | None = None
    eval_loss: float | None = None
    nbytes: int | None = None
    problem: str = ""
    best: bool = False  # by its eval loss


@dataclass(frozen=True)
class Survived:
    """The files of a run's supervisors, and what follows from them."""

    history: History
    ledger: Ledger
    reliability: Reliability


@dataclass(frozen=True)
class RunFacts:
    """The facts of one run directory. None, or empty: the run has no such file, or it says nothing."""

    directory: Path
    now: float  # seconds since 1970
    config: Config | None  # none: not there, or of another version
    plan: Plan | None
    steps: Columns  # metrics.jsonl
    torn: int  # lines of it that are no rows
    written: float | None  # when its last row was
    best: Best  # of the evaluations
    # Whether a process holds the directory; none: it cannot be told from here
    in_use: bool | None
    samples: Mapping[int, Columns] = field(default_factory=dict)  # resources, by rank
    ranks: int = 0  # that have written samples; of so many the first are read
    hosts: Mapping[int, str] = field(default_factory=dict)
    alerts: tuple[Fields, ...] = ()
    findings: tuple[Fields, ...] | None = None
    diagnosis: Fields = field(default_factory=dict)  # all of findings.json
    checkpoints: tuple[CheckpointFacts, ...] = ()
    survived: Survived | None = None
    loads: ExpertLoads | None = None  # of the newest row that tells them
    answers: AnswerSamples | None = None
    texts: tuple[Cells, ...] = ()  # that evaluations have drawn
    disagreed: int | None = None  # the last step in which drawing and training did
    notes: tuple[str, ...] = ()  # what could not be read, in sentences

    @property
    def name(self) -> str:
        return self.directory.name or str(self.directory)


def gather(directory: Path, cluster: str | None = None) -> RunFacts:
    """Returns the facts of a run, planned for a cluster as `plan --cluster` takes it.

    ConfigError if `directory` is not a run.
    """
    refuse_no_run(directory)
    notes: list[str] = []
    config = config_of(directory, notes)
    steps, torn = rows.read(directory / METRICS)
    if torn:
        lines = (
            "line is not a row and was" if torn == 1 else "lines are not rows and were"
        )
        notes.append(
            f"{torn} {lines} left out of {METRICS}: cut off, or not what a run writes."
        )
    drawn = answers.read(directory / ANSWERS)
    if drawn.left_out:
        notes.append(
            f"{drawn.left_out:,} lines of {ANSWERS} are not samples and were left out."
        )
    samples, ranks, hosts = _samples(directory)
    diagnosis = _diagnosis(directory, notes)
    findings = diagnosis.get("findings")
    return RunFacts(
        directory=directory,
        now=time.time(),
        config=config,
        plan=planned(config, cluster, steps, samples, notes),
        steps=steps,
        torn=torn,
        written=written(directory / METRICS),
        best=best(directory),
        in_use=in_use(directory),
        samples=samples,
        ranks=ranks,
        hosts=hosts,
        alerts=tuple(deque(RowReader(directory / ALERTS).new(), maxlen=MOST_ALERTS)),
        findings=tuple(f for f in findings if isinstance(f, dict))
        if isinstance(findings, list)
        else None,
        diagnosis=diagnosis,
        checkpoints=_checkpoints(directory),
        survived=_survived(directory, notes),
        loads=experts.newest(directory / METRICS)
        if config and config.model.moe.experts
        else None,
        answers=drawn,
        texts=texts.read(directory / METRICS),
        disagreed=_disagreed(directory),
        notes=tuple(notes),
    )


def refuse_no_run(directory: Path) -> None:
    """ConfigError, in a sentence, unless a run has begun to write there."""
    try:
        exists = directory.is_dir()
        begun = any(
            (directory / name).exists()
            for name in (CONFIG, METRICS, CHECKPOINTS, SURVIVE)
        )
    # A NUL, or half a surrogate pair; no permission.
    except (OSError, ValueError):
        exists = begun = False
    if not exists:
        raise ConfigError(f"there is no run directory {short(directory)}.")
    if not begun:
        raise ConfigError(
            f"{short(directory)} is not a run directory: it holds neither {CONFIG} nor {METRICS}."
        )


def config_of(directory: Path, notes: list[str]) -> Config | None:
    """Returns the config of a run; None with a note where it is missing, or cannot be read."""
    try:
        text = (directory / CONFIG).read_text()
        # A run writes every key: the defaults would be the config of another.
        if text.strip():
            return load(directory / CONFIG, reading=True)
        why = "it is empty."
    except FileNotFoundError:
        notes.append(
            f"there is no {CONFIG}: what ran, and how fast it could be, is not known."
        )
        return None
    except (OSError, ValueError) as problem:
        why = str(problem)
    notes.append(f"{CONFIG} cannot be read, so that nothing is planned for it: {why}")
    return None


def planned(
    config: Config | None,
    cluster: str | None,
    steps: Columns,
    samples: Mapping[int, Columns],
    notes: list[str],
) -> Plan | None:
    """Returns the plan of a run, for the devices that it seems to have had.

    ConfigError for a cluster that was asked for and cannot be.
    """
    if config is None:
        return None
    name = cluster or likely(config, steps, samples)
    if name is None:
        notes.append(
            "its devices are not known, so that it is held against H100s; --cluster names others."
        )
    try:
        return plan(config, name or "h100")
    except ConfigError as problem:
        # A cluster that was asked for is the user's to mend.
        if cluster is not None:
            raise
        notes.append(f"nothing is planned for this config: {problem}")
        return None


def likely(
    config: Config, steps: Columns, samples: Mapping[int, Columns]
) -> str | None:
    """Returns the accelerator that a run had, as far as rows and samples tell; None if it cannot be told.

    It is the one whose peak the rows' MFU is a share of, of equal ones that with the memory of the devices; the cpu
    where no row and no sample knows of a device.
    """
    rate = steps["tokens_per_second"]
    mfu = steps["mfu"]
    useful = (rate > 0) & (mfu > LEAST_MFU)
    names = [
        (columns, name)
        for columns in samples.values()
        for name in columns.names("device_memory_limit_bytes")
    ]
    limits = [columns.known(name) for columns, name in names]
    if useful.any():
        flops_per_token = model_flops(config) / (
            config.train.global_batch_size * config.train.sequence_length
        )
        peak = (
            float(np.median(rate[useful] / mfu[useful]))
            * flops_per_token
            / config.mesh.devices
        )
        known = [ACCELERATORS[name] for name in dict.fromkeys(KINDS.values())]
        equal = [
            a
            for a in known
            if abs(a.flops(config.precision.compute) / peak - 1) < SAME_PEAK
        ]
        if limit := max(
            (float(values.max()) for values in limits if values.size), default=None
        ):
            equal.sort(key=lambda a: abs(a.memory_bytes - limit))
        return equal[0].name if equal else None
    if (
        limits
        or "memory_in_use_bytes" in steps
        or any(columns.names("device_") for columns in samples.values())
    ):
        return None
    # The same config runs on accelerators where there are some: what rows and samples know of comes first.
    return "cpu" if samples or config.run.fake_devices else None


def written(path: Path) -> float | None:
    """When a file was written last."""
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def sampled(directory: Path) -> dict[int, Path]:
    """The files of samples, by rank."""
    try:
        paths = [
            p
            for p in (directory / RESOURCES).iterdir()
            if p.suffix == ".jsonl" and p.stem.isdecimal()
        ]
    except OSError:
        return {}
    return {int(path.stem): path for path in sorted(paths, key=lambda p: int(p.stem))}


def _samples(directory: Path) -> tuple[dict[int, Columns], int, dict[int, str]]:
    paths = sampled(directory)
    samples = {}
    hosts = {}
    for rank in list(paths)[:MOST_RANKS]:
        columns = Columns()
        for row in RowReader(paths[rank]).new():
            columns.add(row)
            if isinstance(row.get("host"), str):
                hosts[rank] = short(row["host"])
        samples[rank] = columns
    return samples, len(paths), hosts


def _diagnosis(directory: Path, notes: list[str]) -> Fields:
    path = directory / FINDINGS
    try:
        if not path.is_file():
            return {}
        with path.open("rb") as file:
            value = json.loads(file.read(LARGEST_FINDINGS))
    except (OSError, ValueError, RecursionError):
        notes.append(f"{FINDINGS} cannot be read; --diagnose writes it again.")
        return {}
    return value if isinstance(value, dict) else {"findings": value}


def _disagreed(directory: Path) -> int | None:
    names = [path.stem for path in (directory / GAPS).glob("*.npz")]
    return max((int(name) for name in names if name.isdecimal()), default=None)


def _checkpoints(directory: Path) -> tuple[CheckpointFacts, ...]:
    if not (directory / CHECKPOINTS).is_dir():
        return ()
    # Imports JAX, which takes longer than all else here.
    from meshtrain.checkpoint import digests, manifest, steps

    checkpoints = []
    for path in steps.directories(directory):
        try:
            m = manifest.StepManifest.read(path)
            checkpoints.append(
                CheckpointFacts(
                    path.name, m.saved, m.loss, m.eval_loss, digests.total_bytes(path)
                )
            )
        except (steps.Damaged, steps.NewerFormat, Unreadable) as problem:
            # One that was removed meanwhile is none.
            if isinstance(problem, Unreadable) or path.exists():
                checkpoints.append(CheckpointFacts(path.name, problem=str(problem)))
        except OSError as error:
            checkpoints.append(
                CheckpointFacts(
                    path.name, problem=f"it cannot be read: {error.strerror}"
                )
            )
    lowest = min(
        (c for c in checkpoints if c.eval_loss is not None),
        key=lambda c: c.eval_loss or 0.0,
        default=None,
    )
    return tuple(replace(c, best=True) if c is lowest else c for c in checkpoints)


def best(directory: Path) -> Best:
    """The lowest eval loss of a run so far."""
    try:
        return best_in(directory / METRICS)
    # Of what cannot be read the rows tell nothing either.
    except OSError:
        return Best()


def _survived(directory: Path, notes: list[str]) -> Survived | None:
    if not (directory / SURVIVE).is_dir():
        return None
    try:
        history = histories.read(directory)
    except Unreadable as error:
        notes.append(f"{error.what}.")
        return None
    if not history.events:
        notes.append(f"the supervisors of {SURVIVE}/ have written nothing yet.")
        return None
    spent = ledger(history)
    return Survived(history, spent, reliability(history, spent))
