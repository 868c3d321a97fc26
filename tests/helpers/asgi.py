"""An ASGI application asked without a port, by a client that may read slowly or go away."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any


class Asking:
    """One POST under way. `read` takes the next bytes; nothing more is sent until they are taken."""

    def __init__(self, app: Any, path: str, body: Any) -> None:
        self._scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "headers": [(b"content-type", b"application/json")],
            "client": None,
            "server": None,
            "state": {},
        }
        self._body: bytes | None = json.dumps(body).encode()
        self._gone = asyncio.Event()
        self._out: asyncio.Queue[dict] = asyncio.Queue(1)
        self.task = asyncio.create_task(app(self._scope, self._receive, self._send))

    async def _receive(self) -> dict:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        # As a server does: what is sent to nobody is dropped.
        if not self._gone.is_set():
            await self._out.put(message)

    async def read(self) -> dict:
        return await asyncio.wait_for(self._out.get(), 10)

    async def rest(self) -> bytes:
        """All that is left of the body."""
        found, message = b"", {"more_body": True}
        while message.get("more_body"):
            message = await self.read()
            found += message.get("body", b"")
        return found

    def go_away(self) -> None:
        self._gone.set()


@contextlib.asynccontextmanager
async def asking(app: Any, path: str, body: Any) -> AsyncIterator[Asking]:
    asked = Asking(app, path, body)
    try:
        yield asked
        await asyncio.wait_for(asked.task, 10)
    finally:
        asked.task.cancel()
