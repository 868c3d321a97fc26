"""How far an evaluation is, on stderr: a bar on a terminal, elsewhere a line now and then."""

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from meshtrain.errors import say

SECONDS = 10.0  # between two lines


class Progress:
    """Use it as a context; called with (done, of how many; None where nobody knows)."""

    def __init__(self, doing: str, what: str, quiet: bool = False) -> None:
        """scoring answers: `doing` and `what`."""
        console = Console(stderr=True)
        self.doing, self.what, self.quiet = doing, what, quiet
        self.bar: Bar | None = None
        if console.is_terminal and not quiet:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self.bar = Bar(*columns, console=console)
            self.task = self.bar.add_task(f"{doing} {what}", total=None)
        self._said = time.monotonic()

    def __call__(self, done: int, total: int | None) -> None:
        if self.bar:
            self.bar.update(self.task, completed=done, total=total)
        elif not self.quiet and time.monotonic() - self._said >= SECONDS:
            say(f"{self.doing}: {done:,} {'' if total is None else f'of {total:,} '}{self.what}")
            self._said = time.monotonic()

    def __enter__(self) -> "Progress":
        if self.bar:
            self.bar.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self.bar:
            self.bar.stop()
