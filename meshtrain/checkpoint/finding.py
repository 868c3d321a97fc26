"""Where a run starts from: the newest intact checkpoint of its own, another run's, or nothing."""

import dataclasses
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

import jax

from meshtrain.checkpoint import anew, digests, steps
from meshtrain.checkpoint.manifest import Manifest
from meshtrain.config import Config
from meshtrain.errors import ConfigError, nearest, refusal
from meshtrain.run.processes import first_decides, gathered

Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Start:
    """The verified step from which a run starts."""

    directory: Path
    manifest: Manifest
    own: bool  # of this run; else of the one that checkpoint.resume names


def find(config: Config, root: Path, say: Say) -> Start | None:
    """The checkpoint to start from, None for a new run. `root` is the run's own directory of steps; damaged steps there are set aside.

    ConfigError if checkpoint.resume names nothing, if all that there is is damaged, of a newer format, or lost.
    """
    resume = config.checkpoint.resume
    if resume == "never":
        return None
    first_decides(partial(anew.refuse_lost, root))
    directory = _newest_intact(root, say, own=True)
    if directory is not None:
        if resume != "auto":
            say(f"checkpoint.resume {resume} is where this run began; it goes on from its own {directory}.")
        return Start(directory, Manifest.read(directory), own=True)
    if resume == "auto":
        return None
    directory = _newest_intact(Path(resume).expanduser().absolute(), say, own=False)
    if directory is None:
        raise ConfigError(
            f"checkpoint.resume is {resume}, but there is no checkpoint; give auto, never, or a run directory that has one"
            + (nearest(resume, ("auto", "never")) or ".")
        )
    return Start(directory, Manifest.read(directory), own=False)


def best_step(directory: Path) -> int:
    """The intact step with the lowest eval loss, of equal ones the earlier, in a run directory or its checkpoints/.

    With several processes all of them call it alike. ConfigError if no step there has an eval loss, or if all that have one are damaged.
    """
    evaluated = list(map(Path, first_decides(lambda: [str(d) for d in by_eval_loss(directory)])))
    for best in evaluated:
        if not problems(best):
            return Manifest.read(best).step
    raise ConfigError(no_best(directory, evaluated))


def by_eval_loss(path: Path) -> list[Path]:
    """The steps that a path names and that have an eval loss, the lowest first, of equal ones the earlier; their arrays are not looked at."""
    found = []
    for directory in steps.directories(path):
        try:
            manifest = Manifest.read(directory)
        except (steps.Damaged, steps.NewerFormat):
            continue
        if manifest.eval_loss is not None:
            found.append((manifest.eval_loss, manifest.step, directory))
    return [directory for _, _, directory in sorted(found)]


def no_best(path: Path, damaged: Collection[Path]) -> str:
    """Why no step there is the best, in a sentence; `damaged`: those that have an eval loss."""
    if damaged:
        return f"every checkpoint in {path} that has an eval loss is damaged; give a step, or newest."
    return f"no checkpoint in {path} has an eval loss, so none is the best; give a step, or newest (eval.every has a run evaluate)."


def problems(directory: Path) -> list[str]:
    """What is wrong with a step, a sentence each; every process looks at a part and has all. ConfigError if its format is newer."""

    def manifest() -> str | None:
        try:
            Manifest.read(directory)
            return None
        except steps.Damaged as damage:
            return str(damage)
        except steps.NewerFormat as newer:
            raise ConfigError(
                f"checkpoint {directory} has format {newer.number}, and this meshtrain reads up to {steps.FORMAT}; "
                "update meshtrain, or give another run.directory."
            ) from None

    if problem := first_decides(manifest):
        return [problem]
    own = digests.problems(directory, jax.process_index(), jax.process_count())
    return sorted({sentence for part in gathered(own) for sentence in part})


def _newest_intact(path: Path, say: Say, own: bool) -> Path | None:
    """The newest intact step that `path` names; None if it names none that was ever committed."""
    bad: dict[Path, list[str]] = {}
    chosen = None
    # A run's own directory of steps is never taken for a step itself, whatever lies in it.
    found = steps.numbered if own else steps.directories
    for directory in map(Path, reversed(first_decides(lambda: [str(d) for d in found(path)]))):
        if not (wrong := problems(directory)):
            chosen = directory
            break
        bad[directory] = wrong
    committed = first_decides(lambda: [str(d) for d in bad if not steps.never_committed(d)])
    if chosen is None and committed:
        raise ConfigError(_all_damaged(path, Path(committed[0]), bad[Path(committed[0])], own))
    for directory, wrong in bad.items():
        place = first_decides(partial(_set_aside, directory)) if own else "it is passed over"
        say(f"checkpoint {directory} is damaged: {'; '.join(wrong)}; {place}.")
    for sentence in first_decides(lambda: _renamed_and_newer(path, chosen, bad)):
        say(sentence)
    return chosen


def _all_damaged(path: Path, newest: Path, wrong: list[str], own: bool) -> str:
    what = "; ".join(wrong)
    if newest == path:
        return f"checkpoint {path} is damaged: {what}; give another."
    way_out = "checkpoint.resume: never starts anew and moves them out of the way" if own else "give another"
    return f"every checkpoint in {path} is damaged ({newest.name}: {what}); {way_out}."


def _set_aside(directory: Path) -> str:
    """What became of a damaged step, in words."""
    try:
        return f"it is set aside as {steps.set_aside(directory).name}"
    except OSError as error:
        return f"it cannot be set aside ({refusal(error)}) and is passed over"


def _renamed_and_newer(path: Path, chosen: Path | None, reported: Collection[Path]) -> list[str]:
    """A sentence on each step that would have been chosen under its own name, and that is not `reported` yet."""
    # A step given by its own path was chosen for itself.
    if chosen == path:
        return []
    root, newest = (path, -1) if chosen is None else (chosen.parent, int(chosen.name))
    found = []
    for other in sorted(root.iterdir()) if root.is_dir() else ():
        if other in reported or steps.DAMAGED in other.name:
            continue
        try:
            step = Manifest.read(other).step
        except steps.Renamed as renamed:
            step = renamed.step
        except (steps.Damaged, steps.NewerFormat):
            continue
        if step > newest:
            found.append(
                f"checkpoint {other} is step {step}, renamed; it is passed over, and gone on from only as {step}."
            )
    return found
