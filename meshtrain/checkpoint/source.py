"""Where a run starts from: the newest intact checkpoint of its own, another run's, or nothing."""

import dataclasses
import difflib
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax

from meshtrain.checkpoint import digests, steps
from meshtrain.checkpoint.manifest import Manifest
from meshtrain.config import Config, ConfigError
from meshtrain.run.processes import first_decides, gathered

Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Source:
    """A verified step."""

    directory: Path
    manifest: Manifest
    own: bool  # of this run; else of the one that checkpoint.resume names


def find(config: Config, root: Path, say: Say) -> Source | None:
    """The checkpoint to start from, None for a new run. `root` is the run's own directory of steps; damaged steps there are set aside.

    ConfigError if checkpoint.resume names nothing, if all that there is is damaged, or of a newer format.
    """
    resume = config.checkpoint.resume
    if resume == "never":
        first_decides(lambda: _start_anew(root, say))
        return None
    directory = _newest_intact(root, say, own=True)
    if directory is not None:
        if resume != "auto":
            say(f"checkpoint.resume {resume} is where this run began; it goes on from its own {directory}.")
        return Source(directory, Manifest.read(directory), own=True)
    if resume == "auto":
        return None
    directory = _newest_intact(Path(resume).expanduser().absolute(), say, own=False)
    if directory is None:
        near = difflib.get_close_matches(resume, ("auto", "never"), n=1)
        raise ConfigError(
            f"checkpoint.resume is {resume}, but there is no checkpoint; give auto, never, or a run directory that has one"
            + (f"; did you mean {near[0]}?" if near else ".")
        )
    return Source(directory, Manifest.read(directory), own=False)


def problems(directory: Path) -> list[str]:
    """What is wrong with a step, a sentence each; every process looks at a part and hears of all. ConfigError if its format is newer."""

    def marker() -> str | None:
        try:
            return steps.commit_problem(directory)
        except steps.NewerFormat as newer:
            raise ConfigError(
                f"checkpoint {directory} has format {newer.number}, and this meshtrain reads up to {steps.FORMAT}; "
                "update meshtrain, or give another run.directory."
            ) from None

    if problem := first_decides(marker):
        return [problem]
    own = digests.problems(directory, jax.process_index(), jax.process_count())
    return sorted({sentence for part in gathered(own) for sentence in part})


def _newest_intact(path: Path, say: Say, own: bool) -> Path | None:
    """The newest intact step that `path` names; None if it names none that was ever committed."""
    bad: dict[Path, list[str]] = {}
    chosen = None
    for name in reversed(first_decides(lambda: [str(d) for d in steps.directories(path)])):
        found = problems(Path(name))
        if not found:
            chosen = Path(name)
            break
        bad[Path(name)] = found
    committed = first_decides(lambda: [str(d) for d in bad if (d / steps.COMMIT).exists()])
    if chosen is None and committed:
        damaged = Path(committed[0])
        raise ConfigError(
            f"every checkpoint in {path} is damaged ({damaged.name}: {'; '.join(bad[damaged])}); "
            + ("checkpoint.resume: never starts anew and moves them out of the way." if own else "give another.")
        )
    for directory, found in bad.items():
        place = f"it is set aside as {first_decides(partial(_set_aside, directory))}" if own else "it is passed over"
        say(f"checkpoint {directory} is damaged: {'; '.join(found)}; {place}.")
    return chosen


def _set_aside(directory: Path) -> str:
    return steps.set_aside(directory).name


def _start_anew(root: Path, say: Say) -> None:
    """Moves what an earlier run left out of the way of one that starts at step 0."""
    metrics = root.parent / "metrics.jsonl"
    if not steps.steps_in(root) and not metrics.exists():
        return
    k = 1
    while (earlier := root.parent / f"earlier-{k}").exists():
        k += 1
    earlier.mkdir()
    for path in (root, metrics):
        if path.exists():
            os.rename(path, earlier / path.name)
    root.mkdir()
    say(f"checkpoint.resume is never: the checkpoints and metrics of the run before are now in {earlier}.")
