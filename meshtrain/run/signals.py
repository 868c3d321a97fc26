"""Stopping on request: the first SIGTERM or SIGINT asks the loop to stop after its step, a second one ends the process at once."""

import os
import signal
import sys
from types import FrameType
from typing import Self

import jax
from jax.experimental import multihost_utils

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """While entered, `requested` becomes true on SIGTERM, SIGINT or a cluster's preemption notice.

    With several processes all of them must read `requested` equally often, once a step: it is true on every one of them at the
    same step, whichever was told first. There SIGTERM belongs to JAX's preemption service, and SIGINT is passed on as SIGTERM.
    """

    def __init__(self) -> None:
        self._signalled = self._reached = False
        self._asked = 0
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> Self:
        self._cluster = jax.distributed.is_initialized()
        for number in (signal.SIGINT,) if self._cluster else SIGNALS:
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    @property
    def requested(self) -> bool:
        if not self._cluster:
            return self._signalled
        if not self._reached:
            self._asked += 1
            self._reached = multihost_utils.reached_preemption_sync_point(self._asked)
        return self._reached

    def _handle(self, number: int, _: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self._signalled:
            print(f"meshtrain: second {name}: stopping at once.", file=sys.stderr, flush=True)
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self._signalled = True
        print(f"meshtrain: {name}: stopping after this step, with a checkpoint.", file=sys.stderr, flush=True)
        if self._cluster:
            os.kill(os.getpid(), signal.SIGTERM)
