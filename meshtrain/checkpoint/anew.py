"""A run that starts over: whether it may, and where what an earlier one left goes. Nothing is emptied or written over."""

from collections.abc import Callable
from pathlib import Path

from meshtrain.checkpoint import steps
from meshtrain.errors import ConfigError
from meshtrain.run.directory import CHECKPOINTS, CONFIG, METRICS, NEWEST, TRACES, WATCHED, noted_checkpoint, set_aside


def refuse_lost(root: Path) -> None:
    """ConfigError if the run had a checkpoint and none is there: a disk is not mounted, somebody removed or renamed something.

    A run that was killed before its first checkpoint, or could not save one, had none: it starts over by itself.
    """
    if steps.committed_in(root):
        return
    noted = noted_checkpoint(root.parent)
    # Their marker was written before they got their names, so that it has gone since.
    unmarked = [d.name for d in steps.directories(root) if d.is_dir() and any(d.iterdir())]
    if noted is None and not unmarked:
        return
    lost = f"{unmarked[-1]} has no {steps.COMMIT}" if unmarked else "there is none"
    had = f"had a checkpoint of step {noted}" if noted and noted.isdecimal() else "had checkpoints"
    raise ConfigError(
        f"the run in {root.parent} {had}, but in {root} {lost}; mount or restore {root.name} to go on, "
        "or start anew with --set checkpoint.resume=never, which sets aside what is there."
    )


def set_aside_earlier(root: Path, resume: str, say: Callable[[str], None]) -> None:
    """Moves what a run left, from which this one does not go on, out of its way."""
    run = root.parent
    has_steps = bool(steps.directories(root))
    has_rows = (run / METRICS).exists() and (run / METRICS).stat().st_size > 0
    if not (has_steps or has_rows or (run / NEWEST).exists()):
        return
    # The checkpoints first: without them the note makes a kill in between a refusal, and not a start over in the middle.
    earlier = set_aside(run, [*([CHECKPOINTS] if has_steps else []), NEWEST, METRICS, TRACES, *WATCHED, CONFIG])
    root.mkdir(exist_ok=True)
    what = "checkpoints and metrics" if has_steps else "metrics"
    why = f"checkpoint.resume is {resume}" if resume == "never" else "no checkpoint was written before the run ended"
    say(f"{why}: it starts anew, and the {what} of the run before are now in {earlier}.")
