"""Several models behind one server, of which some are loaded: the request's `model` chooses.

    request for B ──► loaded? ──yes──► answered
                         │ no
                         └─► in its turn: while too many are loaded, the one used least lately takes no more requests,
                             finishes those it has, and its device memory is freed; then B is loaded

No request is cut off. Requests for a model that is leaving come after those that it leaves for, so that none waits for
ever.
"""

import asyncio
import itertools
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from meshtrain.errors import ConfigError, say, short
from meshtrain.generate.compiling import reason
from meshtrain.generate.engine import Engine
from meshtrain.generate.request import EngineStatus, Request, Sampling
from meshtrain.generate.text import describe_length, text_tokens
from meshtrain.serve.errors import Refused, queue_full, unavailable
from meshtrain.serve.requests import SEEDS, Asked, too_long

COUNTS = (
    "requests",
    "tokens",
    "prompt_tokens",
    "steps",
    "drafts",
    "accepted_drafts",
    "compiled",
    "failures",
)  # of an engine's status, which never fall


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
        return await asyncio.get_running_loop().run_in_executor(
            self._thread, self._requests, asked
        )

    def _requests(self, asked: Asked) -> list[Request]:
        if asked.messages:
            prompts = [self._conversation(asked)]
        else:
            try:
                prompts = [self._tokens(prompt) for prompt in asked.prompts]
            except ConfigError as error:
                raise Refused(400, str(error), "prompt", "invalid_value") from None
        return [
            self._request(asked, tokens, k)
            for tokens in prompts
            for k in range(asked.n)
        ]

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
                400,
                f"{where} is empty: there is no token to go on from.",
                where,
                "invalid_value",
            )
        room = self.length - len(tokens)
        if room < (asked.most or 1):
            wanted = f"{describe_length(len(tokens), self.length)} tokens of {where} and {asked.most or 1} to choose"
            raise too_long(wanted, where, self.length)
        if sampling.temperature:
            # Several answers to one prompt differ.
            sampling = replace(sampling, seed=(sampling.seed + k) % SEEDS)
        return Request(
            tokens,
            asked.most or room,
            sampling,
            asked.stop,
            asked.ignore_ends,
            asked.logprobs,
        )

    def close(self) -> None:
        """Ends the engine and frees the device's memory."""
        self.engine.close()
        self.engine.free()
        self._thread.shutdown(wait=False, cancel_futures=True)


@dataclass
class NamedModel:
    """A model that may be loaded. `load` takes as long as it does, on a thread, and raises where it cannot."""

    name: str
    load: Callable[[], ServedModel]
    served: ServedModel | None = None
    leaving: bool = False
    users: int = 0  # requests that are answered, or wait until it is loaded
    used: int = 0  # the larger, the later
    coming: "asyncio.Task[str] | None" = None
    # What engines that are gone have counted
    before: Counter[str] = field(default_factory=Counter)

    @property
    def status(self) -> EngineStatus:
        """The engine's status; the counts include earlier engines of this model."""
        now = (
            EngineStatus(0, 0, 0) if self.served is None else self.served.engine.status
        )
        return replace(
            now, **{name: getattr(now, name) + self.before[name] for name in COUNTS}
        )

    @property
    def counts(self) -> dict[str, int]:
        status = self.status
        return {name: getattr(status, name) for name in COUNTS}


class Models:
    """The models of a server, at most `resident` of them loaded; in the event loop.

    `queue`: requests that may wait for one.
    """

    def __init__(self, models: Sequence[NamedModel], resident: int, queue: int) -> None:
        self.by_name = {model.name: model for model in models}
        self._resident = resident
        self._queue = queue
        self._waiting = 0
        self._turn = asyncio.Lock()
        self._changed = asyncio.Event()
        self._clock = itertools.count(1)

    @property
    def loaded(self) -> list[ServedModel]:
        return [
            model.served for model in self.by_name.values() if model.served is not None
        ]

    @property
    def is_changing(self) -> bool:
        """True while a thread loads or frees a model, which nothing interrupts."""
        return self._turn.locked()

    async def enter(self, name: str) -> ServedModel:
        """Returns a model, loaded if need be, which stays until `leave`; Refused where it cannot be loaded."""
        model = self.by_name[name]
        if model.served is None or model.leaving:
            if self._waiting >= self._queue:
                raise queue_full(self._waiting)
            self._waiting += 1
            try:
                await self._wait_until(lambda: not model.leaving)
                await self._claim(model)
            finally:
                self._waiting -= 1
        else:
            model.users += 1
        model.used = next(self._clock)
        assert model.served is not None
        return model.served

    def leave(self, name: str) -> None:
        self.by_name[name].users -= 1
        self._changed.set()

    async def _claim(self, model: NamedModel) -> None:
        """Counts a user, so that the model is not set aside before it has been used, and waits until it is loaded."""
        model.users += 1
        try:
            while model.served is None:
                model.coming = model.coming or asyncio.create_task(self._bring(model))
                # a client that goes away does not end the loading that others wait for
                if problem := await asyncio.shield(model.coming):
                    raise unavailable(problem, "not_loaded")
        except BaseException:
            self.leave(model.name)
            raise

    async def _bring(self, model: NamedModel) -> str:
        """Loads a model in its turn; returns why it cannot be, a sentence, or nothing."""
        try:
            async with self._turn:
                if not model.users:
                    # whoever asked for it has gone
                    return ""
                while len(self.loaded) >= self._resident:
                    await self._set_aside()
                model.served = await run_on_thread(model.load)
                say(f"{short(model.name)} is loaded.")
            return ""
        except Exception as error:
            problem = (
                f"the model {short(model.name)} cannot be loaded: {reason(error)}."
            )
            say(problem)
            return problem
        finally:
            model.coming = None

    async def _set_aside(self) -> None:
        """Frees the model that was used least lately, of those that are idle if there are any, once its requests are
        answered.
        """
        there = [model for model in self.by_name.values() if model.served is not None]
        model = min(there, key=lambda model: (model.users > 0, model.used))
        served = model.served
        assert served is not None
        model.leaving = True
        try:
            await self._wait_until(lambda: not model.users)
            await run_on_thread(served.close)
            model.before = Counter(model.counts)
            model.served = None
            say(f"{short(model.name)} is set aside.")
        finally:
            model.leaving = False
            self._changed.set()

    async def _wait_until(self, true: Callable[[], bool]) -> None:
        while not true():
            self._changed.clear()
            await self._changed.wait()


async def run_on_thread(function: Callable[[], Any]) -> Any:
    """Returns what a function does that takes long; its thread keeps no process from ending."""
    done = Future[Any]()

    def run() -> None:
        try:
            done.set_result(function())
        except BaseException as error:
            done.set_exception(error)

    # from now on nobody can cancel it, so that it can always be told
    done.set_running_or_notify_cancel()
    threading.Thread(target=run, name="meshtrain-loading", daemon=True).start()
    return await asyncio.wrap_future(done)
