"""The run directory: config.yaml, metrics.jsonl, checkpoints/; what a run that was started over had left is in
earlier-1/, earlier-2/ ...
"""

import contextlib
import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path

from meshtrain.config import Config
from meshtrain.errors import ConfigError, refusal
from meshtrain.files import sync, write_atomically
from meshtrain.run.lock import LOCK, in_use

CONFIG = "config.yaml"
METRICS = "metrics.jsonl"
CHECKPOINTS = "checkpoints"
TRACES = "traces"  # a directory each: `telemetry.trace`
# Samples of every process, alerts, findings of a report; what trackers call the run; samples of the answers it drew,
# and rows whose log-probabilities disagreed.
RESOURCES, ALERTS, FINDINGS, TRACKERS, ANSWERS, GAPS, WAITING = WATCHED = (
    "resources",
    "alerts.jsonl",
    "findings.json",
    "trackers.json",
    "answers.jsonl",
    "gaps",
    "waiting",
)
# The newest step that was ever committed: beside the checkpoints, of whose loss it is to warn.
NEWEST = ".newest-checkpoint"


def run_directory(config: Config) -> Path:
    """Makes and returns the run directory; ConfigError if it, or the metrics in it, cannot be written."""
    directory = Path(config.run.directory)
    elsewhere = "give another with --set run.directory=PATH"
    try:
        directory = directory.absolute()
        directory.mkdir(parents=True, exist_ok=True)
        probe = directory / f".writable-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"run.directory {directory} cannot be written: {refusal(error)}; {elsewhere}."
        ) from None
    for rows in (directory / METRICS, directory / ANSWERS):
        if problem := _unwritable(rows):
            raise ConfigError(f"{rows} {problem}; mend that, or {elsewhere}.")
    if (directory / CONFIG).is_dir():
        raise ConfigError(
            f"{directory / CONFIG} is a directory; remove it, or {elsewhere}."
        )
    return directory


def remove_if_unused(config: Config) -> Callable[[], None]:
    """Returns a function that removes a run directory, and those above it, as far as they are not there yet and nothing
    came into them.
    """
    directory = Path(config.run.directory).absolute()
    new = [
        path for path in (directory, *directory.parents) if not os.path.lexists(path)
    ]

    def remove() -> None:
        # What is not empty stays, and so do those above it.
        with contextlib.suppress(OSError):
            if (
                new
                and set(os.listdir(directory)) <= {CHECKPOINTS, LOCK}
                and in_use(directory) is False
            ):
                if (directory / CHECKPOINTS).is_dir():
                    (directory / CHECKPOINTS).rmdir()
                (directory / LOCK).unlink(missing_ok=True)
            for path in new:
                path.rmdir()

    return remove


def _unwritable(path: Path) -> str | None:
    """Returns why rows cannot be appended to what stands there, if anything does."""
    if not os.path.lexists(path):
        return None
    try:
        # Opening a pipe would wait for ever.
        if not stat.S_ISREG(path.stat().st_mode):
            return "is not a file"
        path.open("ab").close()
    except FileNotFoundError:
        return f"is a link to {os.readlink(path)}, which is not there"
    except OSError as error:
        return f"cannot be written: {refusal(error)}"
    return None


def set_aside(directory: Path, names: Sequence[str]) -> Path:
    """Moves what there is of `names` in a run directory out of the way of a run; returns where it is now."""
    k = 1
    while os.path.lexists(earlier := directory / f"earlier-{k}"):
        k += 1
    earlier.mkdir()
    for name in names:
        path = directory / name
        if path.is_symlink():
            # A relative link would lead elsewhere from there.
            (earlier / name).symlink_to(path.resolve())
            path.unlink()
        elif path.exists():
            os.rename(path, earlier / name)
    sync(earlier)
    sync(directory)
    return earlier


def note_checkpoint(directory: Path, step: int) -> None:
    """Remembers that a step was committed; once it is, or a kill in between would have lost it."""
    write_atomically(directory / NEWEST, f"{step}\n".encode())


def noted_checkpoint(directory: Path) -> str | None:
    """Returns the step of the newest checkpoint that a run ever committed, by its note or by its rows; None if there
    was none.
    """
    note = directory / NEWEST
    metrics = directory / METRICS
    if note.is_file():
        return note.read_text(errors="replace").strip()
    if not metrics.is_file():
        return None
    with metrics.open("rb") as rows:
        if any(b'"checkpoint_bytes"' in row for row in rows):
            return "unknown"
        return None
