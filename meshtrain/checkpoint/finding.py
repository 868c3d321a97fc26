"""Which steps a run starts from and which it leaves: the newest intact one of its own, another run's, or none; what
stays on disk.
"""

import math
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax

from meshtrain.checkpoint import digests, steps
from meshtrain.checkpoint.manifest import Start, StepManifest
from meshtrain.config import CheckpointConfig, Config
from meshtrain.errors import ConfigError, Unreadable, nearest, refusal
from meshtrain.files import entries, is_address, retried
from meshtrain.run.directory import (
    CHECKPOINTS,
    CONFIG,
    METRICS,
    NEWEST,
    TRACES,
    WATCHED,
    noted_checkpoint,
    set_aside,
)
from meshtrain.run.processes import first_decides, gathered

Say = Callable[[str], None]


def find(config: Config, root: Path, say: Say) -> Start | None:
    """Returns the checkpoint to start from, None for a new run.

    `root` is the run's own directory of steps; damaged steps there are set aside.

    ConfigError if checkpoint.resume names nothing, if all that there is is damaged, of a newer format, or lost.
    Unreadable if a step that may be the one cannot be read now.
    """
    resume = config.checkpoint.resume
    if resume == "never":
        return None
    first_decides(partial(_refuse_lost, root))
    directory = _newest_intact(root, say, own=True)
    if directory is not None:
        if resume != "auto":
            say(
                f"checkpoint.resume {resume} is where this run began; it goes on from its own {directory}."
            )
        return Start(directory, StepManifest.read(directory), own=True)
    if resume == "auto":
        return None
    directory = _newest_intact(_place(resume, root.parent), say, own=False)
    if directory is None:
        raise ConfigError(
            f"checkpoint.resume is {resume}, but there is no checkpoint; give auto, never, or a run directory that "
            "has one" + (nearest(resume, ("auto", "never")) or ".")
        )
    return Start(directory, StepManifest.read(directory), own=False)


def _place(resume: str, run: Path) -> Path:
    """Returns the path that checkpoint.resume names; of an address a mirror in the run, which its nodes share."""
    if not is_address(resume):
        return Path(resume).expanduser().absolute()
    mirror = digests.object_stores().mirror
    return Path(first_decides(lambda: str(mirror(resume, run / ".started-from"))))


def _refuse_lost(root: Path) -> None:
    """Raises ConfigError if the run had a checkpoint and none is there: a disk is not mounted, somebody removed or
    renamed something.

    A run that was killed before its first checkpoint, or could not save one, had none: it starts over by itself.
    """
    if steps.committed_in(root):
        return
    noted = retried(lambda: noted_checkpoint(root.parent))
    # A step gets its marker before its name: of these it has gone since.
    unmarked = [d.name for d in steps.directories(root) if entries(d)]
    if noted is None and not unmarked:
        return
    lost = f"{unmarked[-1]} has no {steps.COMMIT}" if unmarked else "there is none"
    had = "had checkpoints"
    if noted and noted.isdecimal():
        had = f"had a checkpoint of step {noted}"
    raise ConfigError(
        f"the run in {root.parent} {had}, but in {root} {lost}; mount or restore {root.name} to go on, "
        "or start anew with --set checkpoint.resume=never, which sets aside what is there."
    )


def set_aside_earlier(root: Path, resume: str, say: Say) -> None:
    """Moves the files of a run, from which this one does not go on, out of its way; nothing is emptied or written
    over.
    """
    run = root.parent
    has_steps = bool(steps.directories(root))
    has_rows = (run / METRICS).exists() and (run / METRICS).stat().st_size > 0
    if not (has_steps or has_rows or (run / NEWEST).exists()):
        return
    # The checkpoints first: without them the note makes a kill in between a refusal, and not a start over in the
    # middle.
    earlier = set_aside(
        run,
        [
            *([CHECKPOINTS] if has_steps else []),
            NEWEST,
            METRICS,
            TRACES,
            *WATCHED,
            CONFIG,
        ],
    )
    root.mkdir(exist_ok=True)
    what = "checkpoints and metrics" if has_steps else "metrics"
    why = "no checkpoint was written before the run ended"
    if resume == "never":
        why = f"checkpoint.resume is {resume}"
    say(
        f"{why}: it starts anew, and the {what} of the run before are now in {earlier}."
    )


def problems(directory: Path) -> list[str]:
    """Returns a sentence on each damage of a step; every process looks at a part and has all.

    ConfigError if its format is newer, Unreadable on all processes if one of them cannot read its part now.
    """

    def manifest() -> str | None:
        try:
            StepManifest.read(directory)
            return None
        except steps.Damaged as damage:
            return str(damage)
        except steps.NewerFormat as newer:
            reads = f"this meshtrain reads up to {steps.FORMAT}; update meshtrain, or give another run.directory"
            raise ConfigError(
                f"checkpoint {directory} has format {newer.number}, and {reads}."
            ) from None

    if problem := first_decides(manifest):
        return [problem]
    own: dict[str, Any] = {}
    try:
        own["problems"] = digests.problems(
            directory, jax.process_index(), jax.process_count()
        )
    except Unreadable as error:
        own["unreadable"] = error.what
    parts = gathered(own)
    for part in parts:
        if "unreadable" in part:
            raise Unreadable(part["unreadable"])
    return sorted({sentence for part in parts for sentence in part["problems"]})


def _newest_intact(path: Path, say: Say, own: bool) -> Path | None:
    """Returns the newest intact step that `path` names; None if it names none that was ever committed."""
    damaged: dict[Path, list[str]] = {}
    intact = None
    # A run's own directory of steps is never taken for a step itself, whatever lies in it.
    listing = steps.numbered if own else steps.directories
    for directory in map(
        Path, reversed(first_decides(lambda: [str(d) for d in listing(path)]))
    ):
        if not (wrong := problems(directory)):
            intact = directory
            break
        damaged[directory] = wrong
    committed = first_decides(
        lambda: [str(d) for d in damaged if not steps.never_committed(d)]
    )
    if intact is None and committed:
        newest = Path(committed[0])
        what = "; ".join(damaged[newest])
        if newest == path:
            raise ConfigError(f"checkpoint {path} is damaged: {what}; give another.")
        way_out = "give another"
        if own:
            way_out = (
                "checkpoint.resume: never starts anew and moves them out of the way"
            )
        raise ConfigError(
            f"every checkpoint in {path} is damaged ({newest.name}: {what}); {way_out}."
        )
    for directory, wrong in damaged.items():
        place = "it is passed over"
        if own:
            place = first_decides(partial(_set_aside, directory))
        say(f"checkpoint {directory} is damaged: {'; '.join(wrong)}; {place}.")
    for sentence in first_decides(lambda: _renamed_and_newer(path, intact, damaged)):
        say(sentence)
    return intact


def _set_aside(directory: Path) -> str:
    try:
        return f"it is set aside as {steps.set_aside(directory).name}"
    except OSError as error:
        return f"it cannot be set aside ({refusal(error)}) and is passed over"


def _renamed_and_newer(
    path: Path, intact: Path | None, reported: Collection[Path]
) -> list[str]:
    """Returns a sentence on each step that would have been chosen under its own name, and that is not `reported`
    yet.
    """
    # A step given by its own path was chosen for itself.
    if intact == path:
        return []
    root, newest = (path, -1) if intact is None else (intact.parent, int(intact.name))
    sentences = []
    for other in entries(root):
        if other in reported or steps.DAMAGED in other.name:
            continue
        try:
            step = StepManifest.read(other).step
        except steps.Renamed as renamed:
            step = renamed.step
        except Unreadable as error:
            sentences.append(
                f"whether {other} is a newer step is not known: {error.what}."
            )
            continue
        except (steps.Damaged, steps.NewerFormat):
            continue
        if step > newest:
            passed_over = f"it is passed over, and gone on from only as {step}"
            sentences.append(
                f"checkpoint {other} is step {step}, renamed; {passed_over}."
            )
    return sentences


# --- the best, and what stays


def rank_by_eval_loss(path: Path) -> list[Path]:
    """Returns the steps that a path names and that have an eval loss, the lowest first, of equal ones the earlier;
    their arrays are not looked at.
    """
    evaluated = []
    for directory in steps.directories(path):
        try:
            manifest = StepManifest.read(directory)
        except (steps.Damaged, steps.NewerFormat):
            continue
        if manifest.eval_loss is not None:
            evaluated.append((manifest.eval_loss, manifest.step, directory))
    return [directory for _, _, directory in sorted(evaluated)]


def no_best(path: Path, damaged: Collection[Path]) -> str:
    """Returns why no step there is the best, in a sentence; `damaged`: those that have an eval loss."""
    if damaged:
        return f"every checkpoint in {path} that has an eval loss is damaged; give a step, or newest."
    none = f"no checkpoint in {path} has an eval loss, so none is the best"
    return f"{none}; give a step, or newest (eval.every has a run evaluate)."


def retained(
    eval_losses: Mapping[int, float | None], config: CheckpointConfig
) -> set[int]:
    """Returns the steps that stay; `eval_losses` has every committed step (None: not evaluated)."""
    evaluated = [
        (loss, step)
        for step, loss in eval_losses.items()
        if loss is not None and not math.isnan(loss)
    ]
    newest = sorted(eval_losses)[-config.keep :]
    best = [step for _, step in sorted(evaluated)[: config.keep_best]]
    multiples = [
        step
        for step in eval_losses
        if config.keep_every and step % config.keep_every == 0
    ]
    return {*newest, *best, *multiples}
