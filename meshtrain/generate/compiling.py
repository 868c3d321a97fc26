"""Programs compiled ahead, on a thread of its own while others run.

    programs   decode, decode with log-probabilities, prefill of 16, 32, ... tokens
               └──────────── COMMON: waited for ───────────────┘ └─ the rest, perhaps while requests are answered

Programs that a request waits for come first, the others in their order.
"""

import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from meshtrain.errors import short

if TYPE_CHECKING:
    from meshtrain.generate.programs import Name

log = logging.getLogger(__name__)
# Programs to wait for at least: both that decode, and prompts of up to 256 tokens
COMMON = 7
LOG_EVERY = 10.0  # seconds


class CompilingAhead:
    """Begins with `start`. `changed` is notified of each program; `wanted` names those that requests wait for."""

    def __init__(
        self,
        decoding: Any,
        changed: threading.Condition,
        wanted: "Callable[[], list[Name]]",
    ) -> None:
        self._decoding = decoding
        self._changed = changed
        self._wanted = wanted
        self._closing = False
        self.running = True
        self._thread = threading.Thread(
            target=self._run, name="meshtrain compiler", daemon=True
        )

    def start(self) -> None:
        """Begins to compile: not before the engine knows of it, or it would compile beside it what is under way."""
        self._thread.start()

    def wait(self, patience: float) -> int:
        """Waits for all programs, after `patience` seconds for the COMMON ones; how many are still to come."""
        until = time.monotonic() + patience
        with self._changed:
            while self.running and (time.monotonic() < until or self._left(COMMON)):
                self._changed.wait(1.0)
        return len(self._left()) if self.running else 0

    def close(self) -> None:
        """Waits for the program that is being compiled, which nothing interrupts."""
        self._closing = True
        self._thread.join()

    def _run(self) -> None:
        logged = time.monotonic()
        try:
            while name := self._next():
                self._decoding.compile(name)
                with self._changed:
                    self._changed.notify_all()
                if time.monotonic() - logged > LOG_EVERY:
                    logged = time.monotonic()
                    log.info(
                        "compiled %d of %d programs",
                        self._decoding.compiled,
                        len(self._decoding.names),
                    )
        except Exception as error:
            log.warning(
                "a program cannot be compiled ahead (%s); whoever needs it waits for it",
                reason(error),
            )
        finally:
            with self._changed:
                self.running = False
                self._changed.notify_all()

    def _next(self) -> "Name | None":
        names = self._wanted() + ([] if self._closing else self._left())
        return next(
            (name for name in names if not self._decoding.is_compiled(name)), None
        )

    def _left(self, most: int | None = None) -> "list[Name]":
        return [
            name
            for name in self._decoding.names[:most]
            if not self._decoding.is_compiled(name)
        ]


def reason(error: Exception) -> str:
    """Returns what an error says, for the middle of a sentence."""
    return short(str(error).strip().rstrip(".") or type(error).__name__)
