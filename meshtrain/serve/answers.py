"""Answers as OpenAI writes them: completions and conversations, whole or as server-sent events.

    data: {chunk}                   the role first, of conversations
    data: {chunk}                   ...
    data: {usage}                   if stream_options.include_usage asks for it
    data: {"error": {...}}          instead of all that, where it went wrong behind the first byte
    data: [DONE]                    always, once: clients wait for it

Nothing is sent behind the last line (https://html.spec.whatwg.org/multipage/server-sent-events.html).
"""

import asyncio
import contextlib
import itertools
import math
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from meshtrain.generate.request import Chosen, Piece
from meshtrain.serve.errors import GONE, OUTCOME, as_refused, json_bytes
from meshtrain.serve.requests import Asked

Json = dict[str, Any]

UNLIKELY = -9999.0  # what OpenAI writes where a log-probability has no number
HALF = "\N{REPLACEMENT CHARACTER}"
# Nothing between here and the client may keep chunks back (nginx's own name for that).
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def usage(prompt: int, chosen: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": chosen,
        "total_tokens": prompt + chosen,
    }


class Answers:
    """Writes the answers to one request: one object, or chunks. `choices`: how many answers there are."""

    kind = chunk_kind = prefix = ""

    def __init__(self, asked: Asked, choices: int) -> None:
        name = f"{self.prefix}-{secrets.token_hex(12)}"
        self._head = {
            "id": name,
            "object": self.kind,
            "created": int(time.time()),
            "model": asked.model,
        }
        self._asked = asked
        self._choices = choices

    def whole(self, pieces: Sequence[Piece], tokens: dict[str, int]) -> Json:
        choices = [
            self._choice(index, piece, "message") for index, piece in enumerate(pieces)
        ]
        return self._head | {"choices": choices, "usage": tokens}

    def first(self) -> list[Json]:
        """Returns the chunks that go before all others."""
        return []

    def chunk(self, index: int, piece: Piece) -> Json:
        return self._chunk([self._choice(index, piece, "delta")])

    def total(self, tokens: dict[str, int]) -> Json:
        """Returns the chunk that comes after all others: what it took."""
        return self._chunk([]) | {"usage": tokens}

    def _chunk(self, choices: list[Json]) -> Json:
        # Who has asked for a count finds the field in every chunk.
        count = {"usage": None} if self._asked.usage else {}
        return self._head | {"object": self.chunk_kind, "choices": choices} | count

    def _choice(self, index: int, piece: Piece, form: str) -> Json:
        raise NotImplementedError


class Completion(Answers):
    kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def __init__(self, asked: Asked, choices: int) -> None:
        super().__init__(asked, choices)
        self._offsets = [0] * choices

    def _choice(self, index: int, piece: Piece, form: str) -> Json:
        logprobs = (
            None
            if self._asked.logprobs is None
            else self._logprobs(index, piece.chosen)
        )
        return {
            "index": index,
            "text": piece.text,
            "logprobs": logprobs,
            "finish_reason": piece.finish,
        }

    def _logprobs(self, index: int, chosen: Sequence[Chosen]) -> Json:
        offsets = list(
            itertools.accumulate(
                (len(each.text) for each in chosen), initial=self._offsets[index]
            )
        )
        self._offsets[index] = offsets.pop()
        top = [
            {text: _number(p) for _, text, p in each.likeliest}
            | {each.text: _number(each.logprob)}
            for each in chosen
        ]
        return {
            "tokens": [each.text for each in chosen],
            "token_logprobs": [_number(each.logprob) for each in chosen],
            "top_logprobs": top if self._asked.logprobs else None,
            "text_offset": offsets,
        }


class Chat(Answers):
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    prefix = "chatcmpl"

    def first(self) -> list[Json]:
        return [
            self._chunk(
                [
                    {
                        "index": i,
                        "delta": {"role": "assistant", "content": ""},
                        "logprobs": None,
                        "finish_reason": None,
                    }
                ]
            )
            for i in range(self._choices)
        ]

    def _choice(self, index: int, piece: Piece, form: str) -> Json:
        content: Json = {
            "role": "assistant",
            "content": piece.text,
            "refusal": None,
        }
        if form == "delta":
            content = {"content": piece.text} if piece.text or piece.chosen else {}
        tokens = [
            _token(each.text, each.logprob)
            | {"top_logprobs": [_token(text, p) for _, text, p in each.likeliest]}
            for each in piece.chosen
        ]
        logprobs = (
            None
            if self._asked.logprobs is None
            else {"content": tokens, "refusal": None}
        )
        return {
            "index": index,
            form: content,
            "logprobs": logprobs,
            "finish_reason": piece.finish,
        }


def _token(text: str, logprob: float) -> Json:
    # The bytes of a token that is half a character are not known from its text.
    return {
        "token": text,
        "logprob": _number(logprob),
        "bytes": None if HALF in text else list(text.encode()),
    }


def _number(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else UNLIKELY


# --- as a stream


class EventStream(Response):
    """Sends `chunks`, JSON objects, and what goes wrong among them; `left` is called at the end of all."""

    media_type = "text/event-stream"

    def __init__(
        self,
        chunks: AsyncGenerator[dict, None],
        deadline: float,
        left: Callable[[], None],
    ) -> None:
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]
        self._chunks = chunks
        self._deadline = deadline
        self._left = left

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            sent = asyncio.create_task(self._send(scope, send))
            if not await unless_gone(sent, receive):
                scope[OUTCOME] = GONE
        finally:
            self._left()

    async def _send(self, scope: Scope, send: Send) -> None:
        async def out(event: bytes, more: bool = True) -> None:
            await send(
                {
                    "type": "http.response.body",
                    "body": b"data: " + event + b"\n\n",
                    "more_body": more,
                }
            )

        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )
        async with contextlib.aclosing(self._chunks):
            try:
                async with asyncio.timeout_at(self._deadline):
                    async for chunk in self._chunks:
                        await out(json_bytes(chunk))
            except Exception as error:
                problem = as_refused(error)
                scope[OUTCOME] = problem.status
                await out(json_bytes(problem.body))
        await out(b"[DONE]", more=False)


async def unless_gone(task: asyncio.Task, receive: Receive) -> bool:
    """Waits for a task, and cancels it when the client goes away; returns whether it was let end."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    watch = asyncio.create_task(gone())
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            await task
            return True
        return False
    finally:
        for each in (task, watch):
            each.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)
