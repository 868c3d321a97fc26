"""Shows how a run or an evaluation goes on: a line for each row that is due, and a bar below them on a terminal."""

import contextlib
import os
import shlex
import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from meshtrain.config import Config
from meshtrain.errors import LINES, printable, refusal, say
from meshtrain.families import FAMILIES
from meshtrain.run.hooks import Row, RunHook
from meshtrain.units import duration


class TerminalBar:
    """A bar for as long as the context is entered; none where there is no terminal."""

    bar: Progress | None = None

    def __enter__(self) -> Self:
        if self.bar:
            self.bar.start()
        return self

    def __exit__(
        self,
        kind: type | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.bar:
            self.bar.stop()


class Reporter(TerminalBar, RunHook):
    """Shows rows of metrics, samples too; use it as a context. `write` prints a sentence above the bar."""

    def __init__(self, steps: int, start: int, quiet: bool = False) -> None:
        self.steps = steps
        # In a notebook rich would make a picture of each line, or draw its bar in letters.
        terminal = sys.stdout is not None and sys.stdout.isatty()
        self.console = Console(
            file=sys.stdout,
            highlight=False,
            soft_wrap=True,
            quiet=quiet,
            force_jupyter=False,
            force_terminal=terminal,
        )
        self.seconds: list[float] = []
        if self.console.is_terminal:
            columns = (
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.description}"),
                TimeRemainingColumn(),
            )
            self.bar = Progress(*columns, console=self.console)
            self.task = self.bar.add_task("compiling", total=steps, completed=start)

    def write(self, sentence: str) -> None:
        """Prints a sentence; a reader that has gone, or a disk that is full, ends no run: from then on nothing is
        shown.
        """
        try:
            self.console.print(printable(sentence, LINES), markup=False)
            self.console.file.flush()
        except (OSError, ValueError, SystemExit) as error:
            self._lose(error)

    def _lose(self, error: BaseException) -> None:
        why = refusal(error) if isinstance(error, OSError) else "its reader has gone"
        say(f"standard output cannot be written: {why}; training goes on without it.")
        self.console.quiet = True
        # What waits in its buffer would fail once more at the end of the process.
        with (
            contextlib.suppress(OSError, ValueError),
            open(os.devnull, "wb") as nowhere,
        ):
            os.dup2(nowhere.fileno(), self.console.file.fileno())

    def after_metrics(self, row: Row, due: bool) -> None:
        """Shows a step's metrics as a line where they are due, and moves the bar."""
        self.seconds = [*self.seconds[-19:], row["step_seconds"]]
        text = f"loss {row['loss']:z.4f}  "
        for name, metric in (
            ("reward", "rl/reward"),
            ("from the teacher", "rl/teacher_kl"),
        ):
            if metric in row:
                text += f"{name} {row[metric]:z.3f}  "
        text += f"{row['tokens_per_second']:,.0f} tokens/s"
        if "rewards_accuracies" in row:
            text += f"  preferred {row['rewards_accuracies']:.0%}"
        if "eval_loss" in row:
            text += f"  eval loss {row['eval_loss']:.4f}"
        if "eval_accuracy" in row:
            text += f"  accuracy {row['eval_accuracy']:.1%}"
        if due:
            left = sorted(self.seconds)[len(self.seconds) // 2] * (
                self.steps - row["step"]
            )
            # Less than a second is still more than nothing; a bar says it itself.
            if self.bar:
                ending = ""
            else:
                ending = f"  {duration(round(left) or left)} left"
            self.write(f"step {row['step']}/{self.steps}  {text}{ending}")
        if self.bar:
            self.bar.update(self.task, completed=row["step"], description=text)
        for sample in row.get("samples", ()):
            self.write(f"sample: {sample['prompt']} │ {sample['text']}")


LINES_EVERY = 10.0  # seconds between two lines of an evaluation


class EvaluationProgress(TerminalBar):
    """Shows on stderr how far an evaluation is; called with (done, of how many; None where nobody knows)."""

    def __init__(self, doing: str, what: str, quiet: bool = False) -> None:
        """scoring answers: `doing` and `what`."""
        console = Console(stderr=True)
        self.doing = doing
        self.what = what
        self.quiet = quiet
        if console.is_terminal and not quiet:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
            )
            self.bar = Progress(*columns, console=console)
            self.task = self.bar.add_task(f"{doing} {what}", total=None)
        self._said = time.monotonic()

    def __call__(self, done: int, total: int | None) -> None:
        if self.bar:
            self.bar.update(self.task, completed=done, total=total)
        elif not self.quiet and time.monotonic() - self._said >= LINES_EVERY:
            say(
                f"{self.doing}: {done:,} {'' if total is None else f'of {total:,} '}{self.what}"
            )
            self._said = time.monotonic()


def next_commands(config: Config) -> str:
    """Returns where a run is, and the commands that look at it."""
    run = shlex.quote(config.run.directory)
    if FAMILIES[config.model.family].images:
        use = f"evaluate {run}"
    else:
        use = f"generate {run} --prompt TEXT"
    return "\n  meshtrain ".join(
        [f"the run is in {run}", f"report {run}", f"checkpoint ls {run}", use]
    )
