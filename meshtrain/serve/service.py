"""What the routes share: the model, once it is there, who is answered, and what was counted."""

import time
from dataclasses import dataclass, field

from meshtrain.generate.engine import EngineStatus
from meshtrain.serve import health
from meshtrain.serve.answered import Answered
from meshtrain.serve.answering import Answering
from meshtrain.serve.errors import Refused
from meshtrain.serve.metrics import Counted
from meshtrain.serve.served import Served

MOST_BODY = 8 << 20  # bytes of a request


@dataclass
class Service:
    """`key`: what clients must show, if anything; `queue`: answers that may wait, and that one request may have."""

    name: str
    queue: int = 64
    key: str | None = None
    request_timeout: float = 600.0
    stuck_after: float = 60.0
    most_body: int = MOST_BODY
    kept: Answered | None = None
    counted: Counted = field(default_factory=Counted)
    # Set by another thread, once.
    served: Served | None = None
    draining: bool = False  # /health says so, and requests are still taken
    closed: bool = False  # none is taken any more
    open_requests: int = 0
    running: set[Answering] = field(default_factory=set)
    begun: float = 0.0  # since when some run, by time.monotonic

    @property
    def status(self) -> EngineStatus | None:
        return None if self.served is None else self.served.engine.status

    def verdict(self) -> health.Verdict:
        return health.verdict(self.status, self.begun, self.draining, self.stuck_after, time.monotonic())

    def enter(self, answering: Answering) -> None:
        if not self.running:
            self.begun = time.monotonic()
        self.running.add(answering)

    def leave(self, answering: Answering) -> None:
        self.running.discard(answering)

    def end(self, refused: Refused) -> None:
        """Whoever still waits for an answer is told why there is none; in the event loop."""
        for answering in self.running:
            answering.end(refused)
