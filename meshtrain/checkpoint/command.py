"""Looks at checkpoints: what `python -m meshtrain.checkpoint` does once its words are read."""

import argparse
import contextlib
import dataclasses
import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from meshtrain import units
from meshtrain.checkpoint import arrays, digests, steps
from meshtrain.checkpoint.finding import no_best, rank_by_eval_loss
from meshtrain.checkpoint.manifest import StepManifest
from meshtrain.checkpoint.stored import mirrored
from meshtrain.config.follow import differences
from meshtrain.errors import ConfigError, Unreadable, short

# diff: the same, different
INTACT = 0
DAMAGED = 1
NO_STEP = (steps.Damaged, steps.NewerFormat, Unreadable)


def ls(options: argparse.Namespace) -> int:
    entries = _list(options.directory)
    if options.json:
        print(json.dumps(entries, indent=2))
        return INTACT
    print(f"{'step':>9}  {'saved':<20} {'loss':>10} {'eval loss':>10} {'size':>9}")
    for entry in entries:
        name = entry["name"] if entry["name"].isprintable() else ascii(entry["name"])
        if "problem" in entry:
            print(f"{name:>9}  {entry['problem']}")
            continue
        saved = entry["saved"].replace("+00:00", "Z")
        mark = "  best" if entry["best"] else ""
        loss = _number(entry["loss"])
        eval_loss = _number(entry["eval_loss"])
        print(
            f"{entry['step']:>9}  {saved:<20} {loss:>10} {eval_loss:>10} {units.size(entry['bytes']):>9}{mark}"
        )
    return INTACT


def _list(path: Path) -> list[dict[str, Any]]:
    """Returns an entry for each step of a run or of its checkpoints, and for what lies beside them."""
    path = mirrored(path)
    directories = _directories(path)
    best = list[Path]()
    # Which is the best is not known while one cannot be read.
    with contextlib.suppress(Unreadable):
        best = rank_by_eval_loss(path.absolute())[:1]
    entries: list[dict[str, Any]] = []
    for directory in directories:
        try:
            m = StepManifest.read(directory)
            size = digests.total_bytes(directory)
        except NO_STEP as problem:
            if isinstance(problem, Unreadable) or os.path.lexists(directory):
                entries.append({"name": directory.name, "problem": str(problem)})
            continue
        figures = {
            "step": m.step,
            "saved": m.saved,
            "loss": m.loss,
            "eval_loss": m.eval_loss,
        }
        entries.append(
            {"name": directory.name}
            | figures
            | {"bytes": size, "best": directory in best}
        )
    if directories != [path.absolute()]:
        for beside in sorted(set(directories[0].parent.iterdir()) - set(directories)):
            entries.append(
                {"name": beside.name, "problem": f"no checkpoint: {_kind(beside)}"}
            )
    return entries


def _kind(path: Path) -> str:
    aside = (
        "damaged, set aside"
        if steps.DAMAGED in path.name
        else "unfinished"
        if steps.is_left_over(path)
        else ""
    )
    try:
        return "; ".join(
            filter(None, (aside, f"it is step {StepManifest.read(path).step}, renamed"))
        )
    except NO_STEP:
        return aside or "something else"


def show(options: argparse.Namespace) -> int:
    directory = _named(options)[-1]
    m = _manifest(directory)
    if options.json:
        print(
            json.dumps(
                dataclasses.asdict(m) | {"bytes": digests.total_bytes(directory)},
                indent=2,
            )
        )
        return INTACT
    print(f"step {m.step} in {short(directory)}")
    size = units.size(digests.total_bytes(directory))
    print(
        f"saved {m.saved}; loss {_number(m.loss)}; eval loss {_number(m.eval_loss)}; {size}"
    )
    digest = f" of text with digest {m.data['digest']}" if "digest" in m.data else ""
    print(
        f"data: {m.data['batches']:,} global batches read{digest}; seed {m.rng['seed']}"
    )
    print(
        "versions: "
        + ", ".join(f"{name} {version}" for name, version in m.versions.items())
    )
    for section, keys in m.config.items():
        print(
            f"{section}: " + ", ".join(f"{key} {value}" for key, value in keys.items())
        )
    print("arrays:")
    _print_arrays(m.leaves)
    return INTACT


def _print_arrays(leaves: Mapping[str, Mapping[str, Any]]) -> None:
    """Prints a line for each array, beneath its parents' names."""
    printed: tuple[str, ...] = ()
    for name, record in leaves.items():
        *parents, last = name.split(".")
        for depth, parent in enumerate(parents):
            if printed[: depth + 1] != tuple(parents[: depth + 1]):
                print(f"{'  ' * (depth + 1)}{parent}")
        printed = tuple(parents)
        size = units.size(
            math.prod(record["shape"]) * np.dtype(record["dtype"]).itemsize
        )
        line = f"{'  ' * (len(parents) + 1)}{last:<{max(1, 34 - 2 * len(parents))}} {record['dtype']:<9}"
        print(
            f"{line} {record['shape']!s:<22} {size:>9}{'  frozen' if record.get('frozen') else ''}"
        )


def verify(options: argparse.Namespace) -> int:
    entries: list[dict[str, Any]] = []
    for directory in _named(options):
        began = time.perf_counter()
        read = True
        try:
            StepManifest.read(directory)
            problems = digests.problems(directory, keep=False)
            size = digests.total_bytes(directory)
        except NO_STEP as problem:
            problems = [str(problem)]
            size = 0
            read = not isinstance(problem, Unreadable)
        seconds = time.perf_counter() - began
        removed = bool(problems) and read and not os.path.lexists(directory)
        if not removed:
            # null: not known.
            intact = not problems if read else None
            entries.append(
                {
                    "name": directory.name,
                    "intact": intact,
                    "problems": problems,
                    "bytes": size,
                }
            )
        if removed:
            line = "removed meanwhile"
        elif problems:
            line = f"{'DAMAGED' if read else 'not verified'}: {'; '.join(problems)}"
        else:
            line = f"intact, {units.size(size)} at {size / seconds / 1e9:.2f} GB/s"
        if not options.json:
            print(f"{directory.name}: {line}")
    if options.json:
        print(json.dumps(entries, indent=2))
    return INTACT if all(entry["intact"] for entry in entries) else DAMAGED


def diff(options: argparse.Namespace) -> int:
    first, second = (_directories(path)[-1] for path in (options.first, options.second))
    a = _manifest(first)
    b = _manifest(second)
    lines = list(_differences(a, b))
    if not options.no_values:
        for directory in (first, second):
            if damage := digests.problems(directory):
                damaged = f"{directory} is damaged: {'; '.join(damage)}"
                raise ConfigError(
                    f"{damaged}; --no-values compares all but the arrays."
                )
        for name in sorted(a.leaves.keys() & b.leaves.keys()):
            if _type(a, name) == _type(b, name):
                lines += _compare(name, _array(first, name, a), _array(second, name, b))
    print(
        json.dumps(lines, indent=2) if options.json else "\n".join(lines) or "the same"
    )
    return DAMAGED if lines else INTACT


def _differences(a: StepManifest, b: StepManifest) -> Iterator[str]:
    numbers = ("step", "loss", "eval_loss")
    versions = sorted(a.versions.keys() | b.versions.keys())
    leaves = sorted(a.leaves.keys() | b.leaves.keys())
    pairs = [
        *((name, getattr(a, name), getattr(b, name)) for name in numbers),
        *(
            (f"data {n}", a.data.get(n), b.data.get(n))
            for n in ("digest", "validation_digest")
        ),
        *(
            (f"config {name}", old, new)
            for name, old, new in differences(a.config, b.config)
        ),
        *((f"version {n}", a.versions.get(n), b.versions.get(n)) for n in versions),
        *((f"array {name}", _type(a, name), _type(b, name)) for name in leaves),
    ]
    return (f"{what}: {old} | {new}" for what, old, new in pairs if old != new)


def _type(manifest: StepManifest, name: str) -> str:
    record = manifest.leaves.get(name)
    return f"{record['dtype']}{record['shape']}" if record else "absent"


def _array(directory: Path, name: str, manifest: StepManifest) -> np.ndarray:
    record = manifest.leaves[name]
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target = jax.ShapeDtypeStruct(
        tuple(record["shape"]), record["dtype"], sharding=device
    )
    return np.asarray(
        arrays.read(directory / steps.place(record), {name: target})[name]
    )


def _compare(name: str, a: np.ndarray, b: np.ndarray) -> Iterator[str]:
    different = (a != b) & ~((a != a) & (b != b))  # NaNs are the same
    if different.any():
        largest = np.max(np.abs(a.astype(np.float64) - b.astype(np.float64)))
        by = f"by up to {largest:.3g} (largest {np.max(np.abs(a)):.3g})"
        yield f"array {name}: {int(different.sum()):,} of {a.size:,} numbers differ, {by}"


def _directories(path: Path) -> list[Path]:
    path = mirrored(path)
    if not path.is_dir():
        raise ConfigError(
            f"there is no directory {path}; give a run directory, its checkpoints/, or one step."
        )
    directories = steps.directories(path.absolute())
    if not directories:
        raise ConfigError(
            f"there is no checkpoint in {path}; give a run directory, its checkpoints/, or one step."
        )
    return directories


def _named(options: argparse.Namespace) -> list[Path]:
    directories = _directories(options.directory)
    if options.step is None:
        return directories
    if options.step == "newest":
        return directories[-1:]
    if options.step == "best":
        if best := rank_by_eval_loss(mirrored(options.directory).absolute())[:1]:
            return best
        raise ConfigError(no_best(options.directory, ()))
    if named := [d for d in directories if d.name == options.step]:
        return named
    numbers = ", ".join(d.name for d in directories)
    raise ConfigError(
        f"there is no step {options.step} in {options.directory}; it has {numbers}."
    )


def _manifest(directory: Path) -> StepManifest:
    try:
        return StepManifest.read(directory)
    except (steps.Damaged, steps.NewerFormat) as problem:
        raise ConfigError(f"{directory} cannot be read: {problem}.") from None


def _number(x: float | None) -> str:
    return "-" if x is None else f"{x:.6f}" if abs(x) < 1000 else f"{x:.4e}"
