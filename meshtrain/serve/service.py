"""What the routes share: the model once it is there, who is answered, whether requests should be sent here.

    loading ──► ready ◄──► stuck     there are requests, and no step has ended for too long
                  ├──────► broken    the device's programs fail, again and again
                  └──────► draining  the server was asked to end; what runs is finished, and others should be asked

That is what /health says to a balancer and to Kubernetes' probes: 200 when ready, else 503.
"""

import asyncio
import secrets
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from meshtrain.errors import ConfigError
from meshtrain.generate.engine import Engine
from meshtrain.generate.request import EngineStatus, Request, Sampling
from meshtrain.generate.text import describe_length, text_tokens
from meshtrain.serve.answering import Answering
from meshtrain.serve.cache import AnswerCache
from meshtrain.serve.errors import Refused
from meshtrain.serve.metrics import Counted
from meshtrain.serve.requests import SEEDS, Asked, too_long

if TYPE_CHECKING:
    from meshtrain.serve.models import Models

MOST_BODY = 8 << 20  # bytes of a request
READY = "ready"
COMPILING_SECONDS = (
    1800.0  # that a program which runs for the first time may take, if a step may take no more
)


class Verdict(NamedTuple):
    """`state`: ready, loading, stuck, broken or draining; `why`: a sentence."""

    state: str
    why: str

    @property
    def status(self) -> int:
        return 200 if self.state == READY else 503


def verdict(
    status: EngineStatus | None, begun: float, draining: bool, stuck_after: float, now: float
) -> Verdict:
    """Judges a server.

    `status`: None while the model is loaded; `begun`: since when there have been requests; `now`: by time.monotonic.
    """
    if draining:
        return Verdict(
            "draining", "the server ends when what runs is done; send requests to another."
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


class ServedModel:
    """An engine that has started, under the name that clients use."""

    def __init__(self, name: str, engine: Engine) -> None:
        self.name = name
        self.engine = engine
        self.length = engine.length
        # what is loaded once more may be another step
        self.identity = f"{name} {secrets.token_hex(16)}"
        self._opened = engine.opened
        self.sampling = self._opened.sampling or Sampling(1.0)
        self._thread = ThreadPoolExecutor(1, "meshtrain-prompts")

    async def requests(self, asked: Asked) -> list[Request]:
        """Returns what the engine is asked for: n requests for each prompt, one after the other."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._requests, asked)

    def _requests(self, asked: Asked) -> list[Request]:
        if asked.messages:
            prompts = [self._conversation(asked)]
        else:
            try:
                prompts = [self._tokens(prompt) for prompt in asked.prompts]
            except ConfigError as error:
                raise Refused(400, str(error), "prompt", "invalid_value") from None
        return [self._request(asked, tokens, k) for tokens in prompts for k in range(asked.n)]

    def _tokens(self, prompt: str | tuple[int, ...]) -> np.ndarray:
        if isinstance(prompt, str):
            return text_tokens(self._opened.tokenizer, prompt, self.length)
        return np.asarray(prompt, np.int32)

    def _conversation(self, asked: Asked) -> np.ndarray:
        template = self._opened.template
        if template is None:
            raise Refused(
                400,
                f"{self._opened.without} /v1/completions takes texts.",
                "messages",
                "no_chat_template",
            )
        if asked.tools and not template.reads_tools:
            raise Refused(
                400,
                "this model's chat template knows of no tools; leave them out.",
                "tools",
                "unsupported",
            )
        try:
            return template.tokens(list(asked.messages), asked.tools, self.length)
        except ConfigError as error:
            raise Refused(400, str(error), "messages", "invalid_value") from None

    def _request(self, asked: Asked, tokens: np.ndarray, k: int) -> Request:
        where = "messages" if asked.messages else "prompt"
        sampling = asked.sampling
        if not len(tokens):
            raise Refused(
                400, f"{where} is empty: there is no token to go on from.", where, "invalid_value"
            )
        room = self.length - len(tokens)
        if room < (asked.most or 1):
            wanted = f"{describe_length(len(tokens), self.length)} tokens of {where} and {asked.most or 1} to choose"
            raise too_long(wanted, where, self.length)
        if sampling.temperature:
            # Several answers to one prompt differ.
            sampling = replace(sampling, seed=(sampling.seed + k) % SEEDS)
        return Request(
            tokens, asked.most or room, sampling, asked.stop, asked.ignore_ends, asked.logprobs
        )

    def close(self) -> None:
        """Ends the engine and frees the device's memory."""
        self.engine.close()
        self.engine.free()
        self._thread.shutdown(wait=False, cancel_futures=True)


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
    models: "Models | None" = None
    created: int = field(default_factory=lambda: int(time.time()))
    counted_of: dict[str, Counted] = field(default_factory=lambda: defaultdict(Counted))

    @property
    def statuses(self) -> dict[str, EngineStatus]:
        """What the engines do, by model; nothing while the first models are loaded."""
        if self.models is not None:
            return {name: model.status for name, model in self.models.by_name.items()}
        return {} if self.served is None else {self.served.name: self.served.engine.status}

    @property
    def loaded(self) -> list[ServedModel]:
        if self.models is not None:
            return self.models.loaded
        return [] if self.served is None else [self.served]

    def verdict(self) -> Verdict:
        """Judges the server by the model that fares worst."""
        now = time.monotonic()
        verdicts = [
            verdict(status, self.begun.get(name, 0.0), self.draining, self.stuck_after, now)
            for name, status in self.statuses.items()
        ] or [verdict(None, 0.0, self.draining, self.stuck_after, now)]
        return next((one for one in verdicts if one.state != READY), verdicts[0])

    def health(self) -> tuple[int, dict[str, Any]]:
        """Returns the HTTP status and the body of /health."""
        verdict = self.verdict()
        statuses = self.statuses.values()
        body: dict[str, Any] = {"status": verdict.state, "model": self.name, "message": verdict.why}
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
        return self.counted if self.models is None or model is None else self.counted_of[model]

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

    def answering(self, served: ServedModel, asked: Asked, wanted: list[Request]) -> Answering:
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
