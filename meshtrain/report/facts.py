"""All that the files of a run say, each read once: rows, samples, alerts, findings, checkpoints, history, config and its plan."""

import contextlib
import json
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from meshtrain.config import Config, ConfigError, load, short
from meshtrain.config.key import known
from meshtrain.plan.estimate import Plan, plan
from meshtrain.report import rows
from meshtrain.report.cluster import likely
from meshtrain.report.rows import Columns, Follower
from meshtrain.run.best import Best, best_in
from meshtrain.run.directory import ALERTS, CHECKPOINTS, CONFIG, FINDINGS, METRICS, RESOURCES
from meshtrain.run.lock import in_use
from meshtrain.survive import history as histories
from meshtrain.survive.history import History
from meshtrain.survive.ledger import Ledger, ledger
from meshtrain.survive.reliability import Reliability, reliability
from meshtrain.survive.store import SURVIVE

MOST_RANKS = 64  # whose samples are read: a page shows no more
MOST_ALERTS = 200  # the newest
LARGEST_FINDINGS, LARGEST_CONFIG = 1 << 24, 1 << 18  # bytes

Fields = Mapping[str, Any]


@dataclass(frozen=True)
class Checkpoint:
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
    """What the supervisors of a run have written, and what follows from it."""

    history: History
    ledger: Ledger
    reliability: Reliability


@dataclass(frozen=True)
class Facts:
    """Of one run directory. None, or empty: the run has no such file, or it says nothing."""

    directory: Path
    now: float  # seconds since 1970
    config: Config | None  # none: not there, or of another version
    values: Mapping[str, Fields]  # of config.yaml, by section
    plan: Plan | None
    steps: Columns  # metrics.jsonl
    torn: int  # lines of it that are no rows
    written: float | None  # when its last row was
    best: Best  # of the evaluations
    in_use: bool | None  # whether a process holds the directory; none: it cannot be told from here
    samples: Mapping[int, Columns] = field(default_factory=dict)  # resources, by rank
    ranks: int = 0  # that have written samples; of so many the first are read
    hosts: Mapping[int, str] = field(default_factory=dict)
    alerts: tuple[Fields, ...] = ()
    findings: tuple[Fields, ...] | None = None
    diagnosis: Fields = field(default_factory=dict)  # all of findings.json
    checkpoints: tuple[Checkpoint, ...] = ()
    survived: Survived | None = None
    notes: tuple[str, ...] = ()  # what could not be read, in sentences

    @property
    def name(self) -> str:
        return self.directory.name or str(self.directory)


def gather(directory: Path, cluster: str | None = None) -> Facts:
    """The facts of a run, planned for a cluster as `plan --cluster` takes it. ConfigError if `directory` is no run."""
    refuse_no_run(directory)
    notes: list[str] = []
    config, values = config_of(directory, notes)
    steps, torn = rows.read(directory / METRICS)
    if torn:
        lines = "line is no row and was" if torn == 1 else "lines are no rows and were"
        notes.append(f"{torn} {lines} left out of {METRICS}: cut off, or not what a run writes.")
    samples, ranks, hosts = _samples(directory)
    diagnosis = _findings(directory, notes)
    found = diagnosis.get("findings")
    return Facts(
        directory=directory,
        now=time.time(),
        config=config,
        values=values,
        plan=planned(config, cluster, steps, samples, notes),
        steps=steps,
        torn=torn,
        written=written(directory / METRICS),
        best=best(directory),
        in_use=in_use(directory),
        samples=samples,
        ranks=ranks,
        hosts=hosts,
        alerts=_alerts(directory),
        findings=tuple(f for f in found if isinstance(f, dict)) if isinstance(found, list) else None,
        diagnosis=diagnosis,
        checkpoints=_checkpoints(directory),
        survived=_survived(directory, notes),
        notes=tuple(notes),
    )


def refuse_no_run(directory: Path) -> None:
    """ConfigError, in a sentence, unless a run has begun to write there."""
    try:
        there = directory.is_dir()
        found = [name for name in (CONFIG, METRICS, CHECKPOINTS, SURVIVE) if (directory / name).exists()]
    # A NUL, or half a surrogate pair; no permission.
    except (OSError, ValueError):
        there, found = False, []
    if not there:
        raise ConfigError(f"there is no run directory {short(directory)}.")
    if not found:
        raise ConfigError(f"{short(directory)} is no run directory: it holds neither {CONFIG} nor {METRICS}.")


def config_of(directory: Path, notes: list[str]) -> tuple[Config | None, Mapping[str, Fields]]:
    """The config of a run, and what its file says by section; `notes` gains why either is missing."""
    path = directory / CONFIG
    if not path.exists():
        notes.append(f"there is no {CONFIG}: what ran, and how fast it could be, is not known.")
        return None, {}
    values, why = _sections(path), "it is empty."
    try:
        config = load(path)
        # A run writes every key: the defaults would be the config of another.
        if values:
            return config, values
    except ConfigError as problem:
        why = str(problem)
    # Of a later version, which has more keys, or of an earlier one.
    if any((here := known(values, Config)).values()):
        with contextlib.suppress(ConfigError):
            config = load(here)
            notes.append(f"{CONFIG} is of another version; what this one knows of it is taken: {why}")
            return config, values
    notes.append(f"{CONFIG} cannot be read, so that nothing is planned for it: {why}")
    return None, values


def _sections(path: Path) -> dict[str, Fields]:
    """What a config file says by section, whether or not it is legal; {} of what is no YAML, of which `load` says why."""
    try:
        raw = yaml.safe_load(path.read_bytes()[:LARGEST_CONFIG])
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}
    return {str(k): v for k, v in raw.items() if isinstance(v, dict)} if isinstance(raw, dict) else {}


def planned(
    config: Config | None, cluster: str | None, steps: Columns, samples: Mapping[int, Columns], notes: list[str]
) -> Plan | None:
    """Its plan, for the devices that it seems to have run on. ConfigError for a cluster that was asked for and cannot be."""
    if config is None:
        return None
    name = cluster or likely(config, steps, samples)
    if name is None:
        notes.append("its devices are not known, so that it is held against H100s; --cluster names others.")
    try:
        return plan(config, name or "h100")
    except ConfigError as problem:
        # A cluster that was asked for is the user's to mend.
        if cluster is not None:
            raise
        notes.append(f"nothing is planned for this config: {problem}")
        return None


def written(path: Path) -> float | None:
    """When a file was written last."""
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def sampled(directory: Path) -> dict[int, Path]:
    """The files of samples, by rank."""
    try:
        found = [p for p in (directory / RESOURCES).iterdir() if p.suffix == ".jsonl" and p.stem.isdecimal()]
    except OSError:
        return {}
    return {int(path.stem): path for path in sorted(found, key=lambda p: int(p.stem))}


def _samples(directory: Path) -> tuple[dict[int, Columns], int, dict[int, str]]:
    paths, found, hosts = sampled(directory), {}, {}
    for rank in list(paths)[:MOST_RANKS]:
        columns = Columns()
        for row in Follower(paths[rank]).new():
            columns.add(row)
            if isinstance(row.get("host"), str):
                hosts[rank] = short(row["host"])
        found[rank] = columns
    return found, len(paths), hosts


def _alerts(directory: Path) -> tuple[Fields, ...]:
    return tuple(deque(Follower(directory / ALERTS).new(), maxlen=MOST_ALERTS))


def _findings(directory: Path, notes: list[str]) -> Fields:
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


def _checkpoints(directory: Path) -> tuple[Checkpoint, ...]:
    if not (directory / CHECKPOINTS).is_dir():
        return ()
    # Imports JAX, which takes longer than all else here.
    from meshtrain.checkpoint import digests, steps
    from meshtrain.checkpoint.manifest import Manifest

    listed = []
    for path in steps.directories(directory):
        try:
            m = Manifest.read(path)
            listed.append(Checkpoint(path.name, m.saved, m.loss, m.eval_loss, digests.total_bytes(path)))
        except (steps.Damaged, steps.NewerFormat) as problem:
            # One that was removed meanwhile is none.
            if path.exists():
                listed.append(Checkpoint(path.name, problem=str(problem)))
        except OSError as error:
            listed.append(Checkpoint(path.name, problem=f"it cannot be read: {error.strerror}"))
    lowest = min((c for c in listed if c.eval_loss is not None), key=lambda c: c.eval_loss or 0.0, default=None)
    return tuple(replace(c, best=True) if c is lowest else c for c in listed)


def best(directory: Path) -> Best:
    """The lowest held-out loss of a run so far."""
    try:
        return best_in(directory / METRICS)
    # Of what cannot be read the rows tell nothing either.
    except OSError:
        return Best()


def _survived(directory: Path, notes: list[str]) -> Survived | None:
    if not (directory / SURVIVE).is_dir():
        return None
    history = histories.read(directory)
    if not history.events:
        notes.append(f"the supervisors of {SURVIVE}/ have written nothing yet.")
        return None
    told = ledger(history)
    return Survived(history, told, reliability(history, told))
