"""What holds for every request before its route sees it, and after: the key, an end that is near, the count."""

import hmac
import ipaddress
import re
from collections.abc import Collection
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from meshtrain.errors import short
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
        headers, hosts = Headers(scope=scope), self._service.hosts
        if "content-length" in headers and "transfer-encoding" in headers:
            # what is before us may see another end of it, and then another request behind it
            return Refused(400, "Content-Length and Transfer-Encoding are given; send one of the two.", code="two_lengths", headers={"Connection": "close"})  # fmt: skip
        if not scope["path"].startswith("/v1/"):
            return None
        if self._service.key is not None and not _shown(headers, self._service.key):
            return Refused(
                401,
                "a key is needed: send it as Authorization: Bearer KEY.",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        if hosts is not None and not _is_known(headers.get("host", ""), hosts):
            return Refused(421, f"this server is not called {short(headers['host'])}; ask it by its address, or give it a key.", code="unknown_host")  # fmt: skip
        if self._service.closed:
            return unavailable("this server ends; ask another.", "draining")
        if self._service.served is None:
            return unavailable(self._service.verdict().why, "loading")
        return None


def _is_known(host: str, names: Collection[str]) -> bool:
    name = re.sub(r":\d*$", "", host.strip().lower()).rstrip(".")
    if name in ("", "localhost", *names):
        return True
    try:
        return bool(ipaddress.ip_address(name.removeprefix("[").removesuffix("]")))
    except ValueError:
        return False


def _shown(headers: Any, key: str) -> bool:
    kind, _, credential = headers.get("authorization", "").partition(" ")
    # in a time that tells nothing of how much of it is right
    return (
        hmac.compare_digest(credential.strip().encode("latin-1", "replace"), key.encode()) and kind.lower() == "bearer"
    )
