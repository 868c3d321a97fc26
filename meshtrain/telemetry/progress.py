"""What a person sees while a run goes on: a bar on a terminal, one plain line a logged step elsewhere."""

import contextlib
import os
import sys
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from meshtrain.errors import refusal, say


class Reporter:
    """Shows rows of metrics; use it as a context. `write` prints a sentence above the bar."""

    def __init__(self, steps: int, start: int, quiet: bool = False) -> None:
        self.steps = steps
        # In a notebook rich would make a picture of each line, or draw its bar in letters.
        terminal = sys.stdout is not None and sys.stdout.isatty()
        self.console = Console(
            file=sys.stdout, highlight=False, soft_wrap=True, quiet=quiet, force_jupyter=False, force_terminal=terminal
        )
        self.bar: Progress | None = None
        self.seconds: list[float] = []
        if self.console.is_terminal:
            columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
            self.bar = Progress(*columns, console=self.console)
            self.task = self.bar.add_task("compiling", total=steps, completed=start)

    def __enter__(self) -> "Reporter":
        if self.bar:
            self.bar.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self.bar:
            self.bar.stop()

    def write(self, sentence: str) -> None:
        """Prints a sentence; a reader that has gone, or a disk that is full, ends no run: from then on nothing is shown."""
        try:
            self.console.print(sentence, markup=False)
            self.console.file.flush()
        except (OSError, ValueError, SystemExit) as error:
            self._lose(error)

    def _lose(self, error: BaseException) -> None:
        why = refusal(error) if isinstance(error, OSError) else "its reader has gone"
        say(f"standard output cannot be written: {why}; training goes on without it.")
        self.console.quiet = True
        # What waits in its buffer would fail once more at the end of the process.
        with contextlib.suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), self.console.file.fileno())

    def step(self, row: dict[str, Any], show: bool) -> None:
        """One step's metrics; `show` false only moves the bar."""
        self.seconds = [*self.seconds[-19:], row["step_seconds"]]
        text = f"loss {row['loss']:.4f}  {row['tokens_per_second']:,.0f} tokens/s"
        if "rewards_accuracies" in row:
            text += f"  preferred {row['rewards_accuracies']:.0%}"
        if "eval_loss" in row:
            text += f"  eval loss {row['eval_loss']:.4f}"
        if "eval_accuracy" in row:
            text += f"  accuracy {row['eval_accuracy']:.1%}"
        if self.bar:
            self.bar.update(self.task, completed=row["step"], description=text)
        elif show:
            left = sorted(self.seconds)[len(self.seconds) // 2] * (self.steps - row["step"])
            self.write(f"step {row['step']}/{self.steps}  {text}  {duration(left)} left")


def duration(seconds: float) -> str:
    """3 s, 4 min 5 s, 6 h 7 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
