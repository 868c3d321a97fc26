"""Every metric of a server once, and what the server has counted of them: /metrics in Prometheus' text format.

Written by the exposition that a run's endpoint uses (meshtrain.telemetry.exposition); the names end on their unit
likewise.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from meshtrain.serve.answering import TokenTimes
from meshtrain.telemetry.catalogue import PREFIX
from meshtrain.telemetry.exposition import Distribution

SERVE = PREFIX + "serve_"
# Rising by about 1.8 each: of a step of a large model, of what a client waits for a first token, and of whole answers.
TOKEN = (0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
FIRST = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
WHOLE = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


@dataclass(frozen=True)
class ServeMetric:
    """`name` without what goes before it, and without a counter's _total. `bounds`: of a histogram."""

    name: str
    kind: str  # gauge, counter or histogram
    unit: str
    meaning: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()

    @property
    def exposed(self) -> str:
        return SERVE + self.name

    @property
    def sample(self) -> str:
        """The name that a query uses; of a histogram, before _bucket, _sum and _count."""
        return self.exposed + ("_total" if self.kind == "counter" else "")


METRICS: tuple[ServeMetric, ...] = (
    ServeMetric(
        "ready", "gauge", "", "1: requests are answered; 0: loading, stuck or draining"
    ),
    ServeMetric(
        "loaded",
        "gauge",
        "",
        "1: the model is loaded; 0: it is set aside until it is asked for",
    ),
    ServeMetric("slots", "gauge", "", "sequences that are decoded at once, at most"),
    ServeMetric("busy_slots", "gauge", "", "of these, how many hold a sequence"),
    ServeMetric("waiting", "gauge", "", "answers that wait for a slot"),
    ServeMetric("queue", "gauge", "", "how many may wait; more are refused with 429"),
    ServeMetric(
        "open_requests",
        "gauge",
        "",
        "requests for answers that are not ended, waiting ones too",
    ),
    ServeMetric(
        "requests",
        "counter",
        "",
        "requests by route and HTTP status (499: the client went away; of a stream that broke off: what of)",
        ("route", "code"),
    ),
    ServeMetric("tokens", "counter", "tokens", "tokens chosen"),
    ServeMetric(
        "prompt_tokens", "counter", "tokens", "tokens of prompts that were read"
    ),
    ServeMetric(
        "steps", "counter", "", "steps of decoding, each a token for every busy slot"
    ),
    ServeMetric("drafts", "counter", "", "drafts (--draft) that a step has checked"),
    ServeMetric(
        "accepted_drafts", "counter", "", "of these, so that a step gave two tokens"
    ),
    ServeMetric(
        "compiled",
        "counter",
        "",
        "programs compiled: one for each length of prompts, up to a power of two, and for decoding",
    ),
    ServeMetric("cache_hits", "counter", "", "answers that were known (--cache)"),
    ServeMetric(
        "cache_misses", "counter", "", "answers that might have been, and were not"
    ),
    ServeMetric("cache_bytes", "gauge", "bytes", "of the answers that are kept"),
    ServeMetric(
        "first_token_seconds",
        "histogram",
        "seconds",
        "from a request to the first token of an answer, waiting for a slot included",
        bounds=FIRST,
    ),
    ServeMetric(
        "token_seconds",
        "histogram",
        "seconds",
        "from one token of an answer to its next, a mean over the answer",
        bounds=TOKEN,
    ),
    ServeMetric(
        "request_seconds",
        "histogram",
        "seconds",
        "of requests for answers, from their first byte to the last one of the answer",
        bounds=WHOLE,
    ),
)


class Counted:
    """Counts the requests and times that the event loop has seen so far."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()
        self.distributions = {
            metric.name: Distribution(metric.bounds)
            for metric in METRICS
            if metric.bounds
        }

    def took(self, begun: float, ended: float, answers: Sequence[TokenTimes]) -> None:
        """Counts a request for answers, and when its tokens came; seconds of time.monotonic."""
        self.distributions["request_seconds"].add(ended - begun)
        for times in answers:
            if times.tokens:
                self.distributions["first_token_seconds"].add(times.first - begun)
            # one that was known has come at once
            if times.tokens > 1 and times.last > times.first:
                self.distributions["token_seconds"].add(
                    (times.last - times.first) / (times.tokens - 1)
                )
