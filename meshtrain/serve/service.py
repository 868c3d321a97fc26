"""State that the routes share: the model once it is there, who is answered, whether requests should be sent here.

    loading ──► ready ◄──► stuck     there are requests, and no step has ended for too long
                  ├──────► broken    the device's programs fail, again and again
                  └──────► draining  the server was asked to end; what runs is finished, and others should be asked

That is what /health says to a balancer and to Kubernetes' probes: 200 when ready, else 503.
"""

import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from meshtrain.generate.request import EngineStatus, Request
from meshtrain.serve.answering import Answering
from meshtrain.serve.cache import AnswerCache
from meshtrain.serve.errors import Refused
from meshtrain.serve.metrics import METRICS, Counted
from meshtrain.serve.models import Models, ServedModel
from meshtrain.serve.requests import Asked
from meshtrain.telemetry.exposition import MetricFamily

MOST_BODY = 8 << 20  # bytes of a request
READY = "ready"
COMPILING_SECONDS = (
    # That a program which runs for the first time may take, if a step may take no more
    1800.0
)


class Verdict(NamedTuple):
    """`state`: ready, loading, stuck, broken or draining; `why`: a sentence."""

    state: str
    why: str

    @property
    def status(self) -> int:
        return 200 if self.state == READY else 503


def verdict(
    status: EngineStatus | None,
    begun: float,
    draining: bool,
    stuck_after: float,
    now: float,
) -> Verdict:
    """Judges a server.

    `status`: None while the model is loaded; `begun`: since when there have been requests; `now`: by time.monotonic.
    """
    if draining:
        return Verdict(
            "draining",
            "the server ends when what runs is done; send requests to another.",
        )
    if status is None:
        return Verdict("loading", "the model is being loaded.")
    if status.broken:
        return Verdict("broken", status.broken)
    # An engine that had nothing to do took no step either.
    still = now - max(status.turn_began or status.last_step, begun)
    patience = max(stuck_after, COMPILING_SECONDS) if status.compiling else stuck_after
    if status.busy + status.waiting and still > patience:
        return Verdict(
            "stuck",
            f"{status.busy} requests are in slots, and no step has ended for {still:.0f} s.",
        )
    return Verdict(READY, "requests are answered.")


@dataclass
class Service:
    """`key`: what clients must show, if anything; `queue`: answers that may wait, and that one request may have.

    `hosts`: the names by which it may be asked besides localhost and addresses (None: any). A page that a browser shows
    can have a name of its own lead to this machine (DNS rebinding), and without a key nothing else tells it from a
    client.
    """

    name: str
    queue: int = 64
    key: str | None = None
    hosts: frozenset[str] | None = None
    request_timeout: float = 600.0
    stuck_after: float = 60.0
    most_body: int = MOST_BODY
    counted: Counted = field(default_factory=Counted)
    cache: AnswerCache = field(default_factory=AnswerCache)
    # Set by another thread, once.
    served: ServedModel | None = None
    draining: bool = False  # /health says so, and requests are still taken
    closed: bool = False  # none is taken any more
    open_requests: int = 0
    running: set[Answering] = field(default_factory=set)
    begun: dict[str, float] = field(
        default_factory=dict
    )  # by model, since when some run, by time.monotonic
    # in place of `served`, where there are several; there once as many are loaded as may be
    models: Models | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    counted_of: dict[str, Counted] = field(default_factory=lambda: defaultdict(Counted))

    @property
    def statuses(self) -> dict[str, EngineStatus]:
        """The status of each engine, by model; empty while the first models are loaded."""
        if self.models is not None:
            return {name: model.status for name, model in self.models.by_name.items()}
        if self.served is None:
            return {}
        return {self.served.name: self.served.engine.status}

    @property
    def loaded(self) -> list[ServedModel]:
        if self.models is not None:
            return self.models.loaded
        return [] if self.served is None else [self.served]

    def verdict(self) -> Verdict:
        """Judges the server by the model that fares worst."""
        now = time.monotonic()
        verdicts = [
            verdict(
                status, self.begun.get(name, 0.0), self.draining, self.stuck_after, now
            )
            for name, status in self.statuses.items()
        ] or [verdict(None, 0.0, self.draining, self.stuck_after, now)]
        return next((one for one in verdicts if one.state != READY), verdicts[0])

    def health(self) -> tuple[int, dict[str, Any]]:
        """Returns the HTTP status and the body of /health."""
        verdict = self.verdict()
        statuses = self.statuses.values()
        body: dict[str, Any] = {
            "status": verdict.state,
            "model": self.name,
            "message": verdict.why,
        }
        if statuses:
            body |= {
                name: sum(getattr(status, name) for status in statuses)
                for name in ("slots", "busy", "waiting")
            }
        if self.models is not None:
            body["loaded"] = [served.name for served in self.loaded]
        return verdict.status, body

    def counting(self, model: str | None) -> Counted:
        """Returns what counts requests for a model, or those that name none."""
        if self.models is None or model is None:
            return self.counted
        return self.counted_of[model]

    async def use(self, name: str) -> ServedModel:
        """Returns a model of `statuses`, until `done`."""
        if self.models is not None:
            return await self.models.enter(name)
        # the gate lets nobody in before
        assert self.served is not None
        return self.served

    def done(self, name: str) -> None:
        if self.models is not None:
            self.models.leave(name)

    def answering(
        self, served: ServedModel, asked: Asked, wanted: list[Request]
    ) -> Answering:
        cache = self.cache if self.cache.size and asked.repeatable else None
        return Answering(
            served.engine,
            wanted,
            asked.stream,
            model=served.name,
            cache=cache,
            weights=served.identity,
        )

    def enter(self, answering: Answering) -> None:
        if all(one.model != answering.model for one in self.running):
            self.begun[answering.model] = time.monotonic()
        self.running.add(answering)

    def leave(self, answering: Answering, begun: float) -> None:
        """Cancels what is not answered, and counts what the request took since it `begun`."""
        answering.close()
        self.running.discard(answering)
        self.counting(answering.model).took(begun, time.monotonic(), answering.times)

    def end(self, refused: Refused) -> None:
        """Tells whoever still waits for an answer why there is none; in the event loop."""
        for answering in self.running:
            answering.end(refused)


def families(service: Service) -> Iterator[MetricFamily]:
    """Yields each metric with its values; none of the engine's while it is made.

    Where there are several models, by model.
    """
    several = service.models is not None
    labelled = lambda name: (("model", name),) if several else ()
    loaded = {served.name for served in service.loaded}
    engines = {
        labelled(name): asdict(status)
        | {"busy_slots": status.busy, "loaded": int(name in loaded)}
        for name, status in service.statuses.items()
    }
    counted = {labelled(name): service.counting(name) for name in service.statuses} or {
        (): service.counted
    }
    values = _server_values(service)
    for metric in METRICS:
        family = MetricFamily(metric.exposed, metric.kind, metric.meaning, metric.unit)
        if metric.bounds:
            family.distributions = [
                (labels, of.distributions[metric.name])
                for labels, of in counted.items()
            ]
        elif metric.labels:
            family.samples = [
                ((("route", route), ("code", str(code)), *labels), count)
                for labels, of in (counted | {(): service.counted}).items()
                for (route, code), count in sorted(of.requests.items())
            ]
        elif metric.name in values:
            family.samples = [((), values[metric.name])]
        else:
            family.samples = [
                (labels, status[metric.name])
                for labels, status in engines.items()
                if metric.name in status
            ]
        yield family


def _server_values(service: Service) -> dict[str, int]:
    """Returns the metrics that a server has once, however many models it has."""
    cache = service.cache
    return {
        "ready": int(service.verdict().state == READY),
        "queue": service.queue,
        "open_requests": service.open_requests,
        "cache_hits": cache.hits,
        "cache_misses": cache.misses,
        "cache_bytes": cache.bytes,
    }
