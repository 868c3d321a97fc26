"""What holds for every request before its route sees it, and after: the key, an end that is near, the count."""

import hmac
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from meshtrain.serve.errors import Refused, told, unavailable, written
from meshtrain.serve.service import Service

# Of other paths there would be as many series as somebody thinks of.
ROUTES = ("/v1/models", "/v1/completions", "/v1/chat/completions", "/health", "/metrics")
OUTCOME = "meshtrain.outcome"


def outcome(scope: Scope, code: int) -> None:
    """How a request is counted whose HTTP status had gone out before it was known."""
    scope[OUTCOME] = code


def refusal(refused: Refused) -> Response:
    return Response(written(refused.body), refused.status, dict(refused.headers), "application/json")


class Gate:
    """Around the application."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        service, path = self._service, scope["path"]
        status = 0

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if service.draining:
                    # The next request is for another server.
                    MutableHeaders(scope=message)["Connection"] = "close"
            await send(message)

        answered = scope["method"] == "POST"
        service.open_requests += answered
        try:
            refused = self._refused(scope)
            await (self._app if refused is None else refusal(refused))(scope, receive, noted)
        except Exception as error:
            if status:
                raise
            await refusal(told(error))(scope, receive, noted)
        finally:
            service.open_requests -= answered
            route = next((each for each in ROUTES if path == each or path.startswith(f"{each}/")), "other")
            service.counted.requests[route, scope.get(OUTCOME, status)] += 1

    def _refused(self, scope: Scope) -> Refused | None:
        """Probes and scrapes need no key, and are answered to the last."""
        if not scope["path"].startswith("/v1/"):
            return None
        if self._service.key is not None and not _shown(Headers(scope=scope), self._service.key):
            return Refused(
                401,
                "a key is needed: send it as Authorization: Bearer KEY.",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        if self._service.closed:
            return unavailable("this server ends; ask another.", "draining")
        if self._service.served is None:
            return unavailable(self._service.verdict().why, "loading")
        return None


def _shown(headers: Any, key: str) -> bool:
    kind, _, given = headers.get("authorization", "").partition(" ")
    # in a time that tells nothing of how much of it is right
    return hmac.compare_digest(given.strip().encode("latin-1", "replace"), key.encode()) and kind.lower() == "bearer"
