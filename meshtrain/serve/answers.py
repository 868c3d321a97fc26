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
import math
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from meshtrain.generate.request import Chosen, Piece
from meshtrain.serve.errors import GONE, told, written
from meshtrain.serve.gate import outcome
from meshtrain.serve.requests import Asked

UNLIKELY = -9999.0  # what OpenAI writes where a log-probability has no number
HALF = "\N{REPLACEMENT CHARACTER}"
DONE = b"data: [DONE]\n\n"
# Nothing between here and the client may keep chunks back (nginx's own name for that).
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def usage(prompt: int, chosen: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": chosen, "total_tokens": prompt + chosen}


class Answers(Protocol):
    """How answers to one request are written. `choices`: how many there are."""

    def first(self) -> list[dict[str, Any]]:
        """The chunks that go before all others."""

    def chunk(self, choice: int, piece: Piece) -> dict[str, Any]: ...

    def whole(self, pieces: Sequence[Piece], tokens: dict[str, int]) -> dict[str, Any]: ...

    def total(self, tokens: dict[str, int]) -> dict[str, Any]:
        """The chunk that comes after all others: what it took."""


class Envelope:
    """What is around every answer and chunk: id, kind, time, model, and what it took."""

    kind = chunk_kind = prefix = ""

    def __init__(self, asked: Asked, choices: int) -> None:
        self._head = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}", "object": "", "created": int(time.time()), "model": asked.model,
        }  # fmt: skip
        self._counted = asked.stream and asked.usage
        self._choices = choices

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        # Who has asked for a count finds the field in every chunk.
        return self._head | {"object": self.chunk_kind, "choices": choices} | ({"usage": None} if self._counted else {})

    def _whole(self, choices: list[dict[str, Any]], tokens: dict[str, int]) -> dict[str, Any]:
        return self._head | {"object": self.kind, "choices": choices, "usage": tokens}

    def total(self, tokens: dict[str, int]) -> dict[str, Any]:
        return self._chunk([]) | {"usage": tokens}


class Completion(Envelope):
    kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def __init__(self, asked: Asked, choices: int) -> None:
        super().__init__(asked, choices)
        self._offsets = [0] * choices
        self._logprobs = asked.logprobs

    def first(self) -> list[dict[str, Any]]:
        return []

    def chunk(self, choice: int, piece: Piece) -> dict[str, Any]:
        return self._chunk([self._choice(choice, piece)])

    def whole(self, pieces: Sequence[Piece], tokens: dict[str, int]) -> dict[str, Any]:
        return self._whole([self._choice(i, piece) for i, piece in enumerate(pieces)], tokens)

    def _choice(self, choice: int, piece: Piece) -> dict[str, Any]:
        logprobs = None if self._logprobs is None else self._of_chosen(choice, piece.chosen)
        return {"index": choice, "text": piece.text, "logprobs": logprobs, "finish_reason": piece.finish}

    def _of_chosen(self, choice: int, chosen: Sequence[Chosen]) -> dict[str, Any]:
        offsets = []
        for each in chosen:
            offsets.append(self._offsets[choice])
            self._offsets[choice] += len(each.text)
        likeliest = [
            {text: _number(p) for _, text, p in each.likeliest} | {each.text: _number(each.logprob)} for each in chosen
        ]
        return {
            "tokens": [each.text for each in chosen],
            "token_logprobs": [_number(each.logprob) for each in chosen],
            "top_logprobs": likeliest if self._logprobs else None,
            "text_offset": offsets,
        }


class Chat(Envelope):
    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(self, asked: Asked, choices: int) -> None:
        super().__init__(asked, choices)
        self._logprobs = asked.logprobs

    def first(self) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        return [self._chunk([_choice(i, "delta", delta, None, None)]) for i in range(self._choices)]

    def chunk(self, choice: int, piece: Piece) -> dict[str, Any]:
        delta = {"content": piece.text} if piece.text or piece.chosen else {}
        return self._chunk([_choice(choice, "delta", delta, self._of_chosen(piece), piece.finish)])

    def whole(self, pieces: Sequence[Piece], tokens: dict[str, int]) -> dict[str, Any]:
        choices = [
            _choice(i, "message", {"role": "assistant", "content": piece.text, "refusal": None}, self._of_chosen(piece), piece.finish)
            for i, piece in enumerate(pieces)
        ]  # fmt: skip
        return self._whole(choices, tokens)

    def _of_chosen(self, piece: Piece) -> dict[str, Any] | None:
        if self._logprobs is None:
            return None
        tokens = [
            _token(each.text, each.logprob) | {"top_logprobs": [_token(text, p) for _, text, p in each.likeliest]}
            for each in piece.chosen
        ]
        return {"content": tokens, "refusal": None}


def _choice(index: int, said: str, what: dict[str, Any], logprobs: Any, finish: str | None) -> dict[str, Any]:
    return {"index": index, said: what, "logprobs": logprobs, "finish_reason": finish}


def _token(text: str, logprob: float) -> dict[str, Any]:
    # The bytes of a token that is half a character are not known from its text.
    return {"token": text, "logprob": _number(logprob), "bytes": None if HALF in text else list(text.encode())}


def _number(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else UNLIKELY


# --- as a stream


class EventStream(Response):
    """`chunks`: JSON objects, of which the last one ends the answer; Refused is told to the client. `left` is called at the end of all."""

    media_type = "text/event-stream"

    def __init__(self, chunks: AsyncGenerator[dict, None], deadline: float, left: Callable[[], None]) -> None:
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]
        self._chunks, self._deadline, self._left = chunks, deadline, left

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            sent = asyncio.create_task(self._send(scope, send))
            if not await unless_gone(sent, receive):
                outcome(scope, GONE)
        finally:
            self._left()

    async def _send(self, scope: Scope, send: Send) -> None:
        async def out(event: bytes, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": event, "more_body": more})

        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with contextlib.aclosing(self._chunks):
            try:
                async with asyncio.timeout_at(self._deadline):
                    async for chunk in self._chunks:
                        await out(b"data: " + written(chunk) + b"\n\n")
            except Exception as error:
                problem = told(error)
                outcome(scope, problem.status)
                await out(b"data: " + written(problem.body) + b"\n\n")
        await out(DONE, more=False)


async def unless_gone(task: asyncio.Task, receive: Receive) -> bool:
    """Waits for a task, and cancels it when the client goes away; whether it was let end."""

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
