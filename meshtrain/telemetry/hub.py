"""Between the step loop and all that watch it: the loop leaves a row and goes on, a thread hands it to whoever listens.

    loop ── rows ────► a list ─┐
                               ├──► thread, once a second ──► listeners: alerts, trackers, endpoint
    samples ── every 10 s ─────┘

A listener that raises is reported once, and hears no more from then on: what watches a run never ends it.
"""

import math
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import jax

from meshtrain.config import Config
from meshtrain.errors import say, short
from meshtrain.run.hooks import Listener, Row, RowSource, RunHook
from meshtrain.run.processes import gathered
from meshtrain.survive.heartbeat import Heartbeat

LATEST = 1.0  # seconds after which listeners have a row
TICK = 5.0  # seconds after which listeners hear that time has passed
MOST_WAITING = 10_000  # rows that a listener may be behind
# Seconds that the end of a run waits for what listeners still have to do
PATIENCE = 10.0


@dataclass
class _Task:
    seconds: float  # from one time to the next
    give: Callable[[], Iterable[Row]]
    due: float  # by time.monotonic

    def rows(self) -> list[Row]:
        return list(self.give())


class Hub(RunHook):
    """Hands the rows and samples of one process to its listeners; use it as a context.

    `after_metrics` is the main thread's, listeners are called on a thread of their own.

    `totals`: the sums over all steps of the metrics that `add_up` named.
    """

    def __init__(self, config: Config, directory: Path) -> None:
        self.config = config
        self.directory = directory
        self._listeners: list[Listener] = []
        self._tasks: list[_Task] = []
        self._ticked = 0.0
        self.totals: dict[str, float] = {}
        self._rows: deque[Row] = deque(maxlen=MOST_WAITING)
        self._ending = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name="meshtrain-telemetry", daemon=True
        )
        self._started = self._behind = False

    def listen(self, listener: Listener) -> None:
        """Hands rows of metrics.jsonl and resources/ to a listener from now on, and a tick every TICK seconds."""
        self._listeners.append(listener)
        self._start()

    def add_up(self, names: Iterable[str]) -> dict[str, float]:
        """Returns the `totals` of such metrics from now on."""
        self.totals = dict.fromkeys(names, 0.0)
        return self.totals

    def repeat(
        self,
        seconds: float,
        give: Callable[[], Iterable[Row]],
        first: float | None = None,
    ) -> None:
        """Hands the rows that `give` has to all listeners every so many seconds, at first after `first`, and once more
        at the end.
        """
        self._tasks.append(
            _Task(
                seconds, give, time.monotonic() + (seconds if first is None else first)
            )
        )
        self._start()

    def _start(self) -> None:
        if not self._started:
            self._started = True
            self._thread.start()

    def after_metrics(self, row: Row, due: bool) -> None:
        """Returns at once: nothing is written, and no thread is woken."""
        for name in self.totals:
            self.totals[name] += row.get(name, 0.0)
        if due:
            if len(self._rows) == MOST_WAITING and not self._behind:
                self._behind = True
                say(
                    f"what watches the run is {MOST_WAITING:,} rows behind, and misses some; all are in metrics.jsonl."
                )
            self._rows.append(row)

    def __enter__(self) -> "Hub":
        return self

    def __exit__(
        self,
        kind: type | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            for listener in self._listeners:
                listener.on_failure()
        self.close()

    def close(self) -> None:
        """Hands out what is left, and waits for it no longer than PATIENCE."""
        self._ending.set()
        if self._started:
            self._thread.join(PATIENCE)
            if self._thread.is_alive():
                say(
                    f"what watches the run was not done {PATIENCE:.0f} s after its end, and is left."
                )

    # --- the thread

    def _run(self) -> None:
        while not self._ending.wait(LATEST):
            self._hand_out()
            self._sample(time.monotonic())
            if time.monotonic() - self._ticked >= TICK:
                self._ticked = time.monotonic()
                self._call_each(lambda listener: listener.on_tick(time.time()))
        self._hand_out()
        self._sample(math.inf)
        self._call_each(lambda listener: listener.close())

    def _hand_out(self) -> None:
        while self._rows:
            self._hand(self._rows.popleft(), "step")

    def _hand(self, row: Row, source: RowSource) -> None:
        self._call_each(lambda listener: listener.on_row(row, source))

    def _sample(self, now: float) -> None:
        for task in [task for task in self._tasks if task.due <= now]:
            task.due = now + task.seconds
            for row in self._call(task, task.rows, task.give) or ():
                self._hand(row, "process")

    def _call_each(self, call: Callable[[Listener], None]) -> None:
        for listener in list(self._listeners):
            self._call(listener, partial(call, listener), listener)

    def _call(self, entry: Any, call: Callable[[], Any], named: Any) -> Any:
        """Returns what `call` gives; an `entry` (a listener, a task) whose call fails is left out."""
        try:
            return call()
        # Whatever it is: a listener may be anybody's.
        except Exception as error:
            name = getattr(named, "name", type(named).__name__)
            say(
                f"{name} is left out of watching the run from here on: {short(error) or type(error).__name__}"
            )
            self._listeners = [one for one in self._listeners if one is not entry]
            self._tasks = [one for one in self._tasks if one is not entry]
        return None


def watch(
    config: Config, directory: Path, heartbeat: Heartbeat, mesh: jax.sharding.Mesh
) -> Hub:
    """Returns the hub of this process, with all that the config asks for. All processes must call it.

    Each process samples what it uses and serves its page of metrics; the first one also reads the samples of all, and
    has alerts and trackers.
    """
    telemetry = config.telemetry
    rank = jax.process_index()
    hub = Hub(config, directory)
    # A program without a run has none of these.
    from meshtrain.telemetry import alerts, endpoint, samples, trackers

    if telemetry.every:
        samples.sample_processes(config, directory, heartbeat, mesh, hub.repeat)
    if telemetry.endpoint:
        host = socket.gethostname()
        # Once, before the first step; what is sampled later goes over files.
        of_machine = gathered(host)[:rank].count(host)
        totals = hub.add_up(metric.name for metric in endpoint.counters("step"))
        every = samples.read_every(telemetry.every, jax.process_count())
        board = endpoint.Board(rank, host, str(directory), totals, every)
        server = endpoint.Endpoint(
            telemetry.bind, telemetry.endpoint + of_machine, board
        )
        if server.url:
            hub.listen(server)
    if rank == 0:
        if telemetry.alerts:
            hub.listen(alerts.Alerts(config, directory))
        for name in telemetry.trackers:
            hub.listen(trackers.Tracked(name, config, directory))
    return hub
