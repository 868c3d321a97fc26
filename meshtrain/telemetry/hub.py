"""Between the step loop and all that watch it: the loop leaves a row and goes on, a thread hands it to whoever listens.

    loop ── row() ──► a list ──┐
                               ├──► thread, once a second ──► listeners: alerts, trackers, endpoint
    samples ── every 10 s ─────┘

What a listener raises is said once, and from then on it hears no more: what watches a run never ends it.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from meshtrain.config import Config
from meshtrain.errors import say, short
from meshtrain.telemetry.catalogue import METRICS, Source

Row = dict[str, Any]
Listener = Callable[[Row, Source], None]

LATEST = 1.0  # seconds after which listeners have a row
TICK = 5.0  # seconds after which a listener that has a `tick` hears that time has passed
MOST_WAITING = 10_000  # rows that a listener may be behind
PATIENCE = 10.0  # seconds that the end of a run waits for what listeners still have to do


@dataclass
class _Task:
    """Something that gives samples now and then."""

    seconds: float  # from one time to the next
    give: Callable[[], Iterable[Row]]
    due: float  # by time.monotonic


class Hub:
    """Of one process; use it as a context. `row` is the main thread's, listeners are called on a thread of their own.

    `totals`: what the counters among a step's metrics have come to, over all steps.
    """

    def __init__(self, config: Config, directory: Path) -> None:
        self.config, self.directory = config, directory
        self._listeners: list[Listener] = []
        self._tasks: list[_Task] = []
        self._ticked = 0.0
        self.totals = dict.fromkeys((m.name for m in METRICS if m.source == "step" and m.kind == "counter"), 0.0)
        self._rows: deque[Row] = deque(maxlen=MOST_WAITING)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="meshtrain-telemetry", daemon=True)
        self._started = self._behind = False

    def listen(self, listener: Listener) -> None:
        """`listener(row, source)` is called for each row of metrics.jsonl (step) and of resources/ (process) from now on.

        A `tick(now)` that it has is called every TICK seconds, and a `close()` after the last row; `failing()` first of all, where an error
        ends the run.
        """
        self._listeners.append(listener)
        self._start()

    def repeat(self, seconds: float, give: Callable[[], Iterable[Row]], first: float | None = None) -> None:
        """The rows that `give` has, every so many seconds, at first after `first`, and once more at the end, go to all listeners."""
        self._tasks.append(_Task(seconds, give, time.monotonic() + (seconds if first is None else first)))
        self._start()

    def _start(self) -> None:
        if not self._started:
            self._started = True
            self._thread.start()

    def row(self, row: Row, due: bool = True) -> None:
        """A row of each step, which stands in metrics.jsonl too if `due`. Returns at once: nothing is written, and no thread is woken."""
        for name in self.totals:
            self.totals[name] += row.get(name, 0.0)
        if due:
            if len(self._rows) == MOST_WAITING and not self._behind:
                self._behind = True
                say(f"what watches the run is {MOST_WAITING:,} rows behind, and misses some; all are in metrics.jsonl.")
            self._rows.append(row)

    def __enter__(self) -> "Hub":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if error is not None:
            for listener in self._listeners:
                getattr(listener, "failing", lambda: None)()
        self.close()

    def close(self) -> None:
        """Hands out what is left, and waits for it no longer than PATIENCE."""
        self._ending.set()
        if self._started:
            self._thread.join(PATIENCE)
            if self._thread.is_alive():
                say(f"what watches the run was not done {PATIENCE:.0f} s after its end, and is left.")

    # --- the thread

    def _run(self) -> None:
        while not self._ending.wait(LATEST):
            self._hand_out()
            self._sample(time.monotonic())
            self._tick()
        self._hand_out()
        self._sample(math.inf)
        for listener in list(self._listeners):
            self._call(listener, listener, getattr(listener, "close", lambda: None))

    def _hand_out(self) -> None:
        while self._rows:
            self._tell(self._rows.popleft(), "step")

    def _sample(self, now: float) -> None:
        for task in [task for task in self._tasks if task.due <= now]:
            task.due = now + task.seconds
            for row in self._call(task, task.give, partial(_listed, task.give)) or ():
                self._tell(row, "process")

    def _tick(self) -> None:
        if time.monotonic() - self._ticked < TICK:
            return
        self._ticked = time.monotonic()
        for listener in list(self._listeners):
            if tick := getattr(listener, "tick", None):
                self._call(listener, listener, partial(tick, time.time()))

    def _tell(self, row: Row, source: Source) -> None:
        for listener in list(self._listeners):
            self._call(listener, listener, partial(listener, row, source))

    def _call(self, entry: Any, named: Any, call: Callable[[], Any]) -> Any:
        """What `call` gives; an `entry` (a listener, a task) whose call fails is left out."""
        try:
            return call()
        # Whatever it is: a listener may be anybody's.
        except Exception as error:
            name = getattr(named, "name", type(named).__name__)
            say(f"{name} is left out of watching the run from here on: {short(error) or type(error).__name__}")
            self._listeners = [one for one in self._listeners if one is not entry]
            self._tasks = [one for one in self._tasks if one is not entry]
        return None


def _listed(give: Callable[[], Iterable[Row]]) -> list[Row]:
    return list(give())
