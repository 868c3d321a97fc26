"""A model that is ready to answer: an engine, and tokens of texts and conversations.

Text becomes tokens in one thread of its own: a long one must not hold up the streams of others, and a template's process takes one at a time.
"""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from meshtrain.errors import ConfigError
from meshtrain.generate import prompts
from meshtrain.generate.engine import Engine
from meshtrain.generate.request import Request
from meshtrain.serve.errors import Refused
from meshtrain.serve.requests import SEEDS, Asked


class Served:
    """An engine that has started, under the name that clients use."""

    def __init__(self, name: str, engine: Engine) -> None:
        self.name, self.engine, self.length = name, engine, engine.length
        self._opened = engine.opened
        self.made = int(time.time())
        self._thread = ThreadPoolExecutor(1, "meshtrain-prompts")

    async def requests(self, asked: Asked) -> list[Request]:
        """For the engine: n for each prompt, one after the other."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._requests, asked)

    def _requests(self, asked: Asked) -> list[Request]:
        if asked.messages:
            prompts = [self._conversation(asked)]
        else:
            prompts = [self._prompt(prompt) for prompt in asked.prompts]
        return [self._request(asked, tokens, k) for tokens in prompts for k in range(asked.n)]

    def _prompt(self, prompt: str | tuple[int, ...]) -> np.ndarray:
        if isinstance(prompt, str):
            return prompts.of_text(self._opened.tokenizer, prompt)
        return np.asarray(prompt, np.int32)

    def _conversation(self, asked: Asked) -> np.ndarray:
        template = self._opened.template
        if template is None:
            raise Refused(400, f"{self._opened.without} /v1/completions takes texts.", "messages", "no_chat_template")
        if asked.tools and "tools" not in template.found.text:
            raise Refused(400, "this model's chat template knows of no tools; leave them out.", "tools", "unsupported")
        try:
            return template.tokens(list(asked.messages), asked.tools)
        except ConfigError as error:
            raise Refused(400, str(error), "messages", "invalid_value") from None

    def _request(self, asked: Asked, tokens: np.ndarray, k: int) -> Request:
        where = "messages" if asked.messages else "prompt"
        if not len(tokens):
            raise Refused(400, f"{where} is empty: there is no token to go on from.", where, "invalid_value")
        room = self.length - len(tokens)
        if room < (asked.most or 1):
            wanted = f"{len(tokens)} tokens of {where} and {asked.most or 1} to choose"
            raise Refused(400, f"{wanted} are more than the {self.length} positions that there are.", where, "context_length_exceeded")  # fmt: skip
        # Several answers to one prompt differ.
        sampling = replace(asked.sampling, seed=(asked.sampling.seed + k) % SEEDS) if asked.sampling.temperature else asked.sampling  # fmt: skip
        return Request(tokens, asked.most or room, sampling, asked.stop, asked.ignore_ends, asked.logprobs)

    def close(self) -> None:
        self.engine.close()
        self._thread.shutdown(wait=False, cancel_futures=True)
