"""An answer as server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html), as OpenAI streams.

    data: {chunk}                   the role first, of conversations
    data: {chunk}                   ...
    data: {usage}                   if stream_options.include_usage asks for it
    data: {"error": {...}}          instead of all that, where it went wrong behind the first byte
    data: [DONE]                    always, once: clients wait for it

Nothing is sent behind the last line.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from meshtrain.serve.errors import GONE, told, written
from meshtrain.serve.gate import outcome

DONE = b"data: [DONE]\n\n"
# Nothing between here and the client may keep chunks back (nginx's own name for that).
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


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
