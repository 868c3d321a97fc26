"""The routes: OpenAI's models, completions and chat completions; health and metrics.

Before them the gate: the key, an end that is near, the count.
"""

import asyncio
import contextlib
import hmac
import ipaddress
import re
import time
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from meshtrain.errors import nearest, short
from meshtrain.generate.request import Piece, Sampling
from meshtrain.serve import answers, requests
from meshtrain.serve.answering import Answering, joined
from meshtrain.serve.answers import Answers, EventStream, unless_gone
from meshtrain.serve.errors import (
    GONE,
    MODEL,
    OUTCOME,
    Refused,
    as_refused,
    json_bytes,
    unavailable,
)
from meshtrain.serve.requests import Asked, Fields, parsed
from meshtrain.serve.service import Service, families
from meshtrain.telemetry.exposition import OPENMETRICS, PLAIN, render, wants_openmetrics

# Of other paths there would be as many series as somebody thinks of.
ROUTES = (
    "/v1/models",
    "/v1/completions",
    "/v1/chat/completions",
    "/health",
    "/metrics",
)


def application(service: Service) -> Starlette:
    """Returns the server without a port."""
    routes = Routes(service)
    return Starlette(
        routes=[
            Route("/v1/models", routes.models),
            Route("/v1/models/{model:path}", routes.model),
            Route("/v1/completions", routes.completions, methods=["POST"]),
            Route("/v1/chat/completions", routes.chat, methods=["POST"]),
            Route("/health", routes.health),
            Route("/metrics", routes.metrics),
        ],
        middleware=[Middleware(Gate, service=service)],
        exception_handlers={HTTPException: _no_route},
    )


class Gate:
    """Around the application."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        service = self._service
        path = scope["path"]
        status = 0

        async def counted_send(message: Message) -> None:
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
            self._check(scope)
            await self._app(scope, receive, counted_send)
        except Exception as error:
            if status:
                raise
            await _refusal(as_refused(error))(scope, receive, counted_send)
        finally:
            service.open_requests -= answered
            route = next(
                (
                    each
                    for each in ROUTES
                    if path == each or path.startswith(f"{each}/")
                ),
                "other",
            )
            service.counting(scope.get(MODEL)).requests[
                route, scope.get(OUTCOME, status)
            ] += 1

    def _check(self, scope: Scope) -> None:
        """Refuses what no route may see. Probes and scrapes need no key, and are answered to the last."""
        headers = Headers(scope=scope)
        service = self._service
        if "content-length" in headers and "transfer-encoding" in headers:
            # what is before us may see another end of it, and then another request behind it
            raise Refused(
                400,
                "Content-Length and Transfer-Encoding are given; send one of the two.",
                code="two_lengths",
                headers={"Connection": "close"},
            )
        if not scope["path"].startswith("/v1/"):
            return
        if service.key is not None and not _has_key(headers, service.key):
            raise Refused(
                401,
                "a key is needed: send it as Authorization: Bearer KEY.",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        if service.hosts is not None and not _is_known(
            headers.get("host", ""), service.hosts
        ):
            raise Refused(
                421,
                f"this server is not called {short(headers['host'])}; ask it by its address, or give it a key.",
                code="unknown_host",
            )
        if service.closed:
            raise unavailable("this server ends; ask another.", "draining")
        if not service.statuses:
            raise unavailable(service.verdict().why, "loading")


def _is_known(host: str, names: Collection[str]) -> bool:
    name = re.sub(r":\d*$", "", host.strip().lower()).rstrip(".")
    if name in ("", "localhost", *names):
        return True
    try:
        return bool(ipaddress.ip_address(name.removeprefix("[").removesuffix("]")))
    except ValueError:
        return False


def _has_key(headers: Headers, key: str) -> bool:
    kind, _, credential = headers.get("authorization", "").partition(" ")
    # in a time that tells nothing of how much of it is right
    is_right = hmac.compare_digest(
        credential.strip().encode("latin-1", "replace"), key.encode()
    )
    return is_right and kind.lower() == "bearer"


class Routes:
    """The routes. The gate turns refusals and other errors in them into responses."""

    def __init__(self, service: Service) -> None:
        self._service = service

    # --- what there is

    async def models(self, request: Request) -> Response:
        return _json(
            {
                "object": "list",
                "data": [self._model(name) for name in self._service.statuses],
            }
        )

    async def model(self, request: Request) -> Response:
        return _json(self._model(self._known(request.path_params["model"])))

    def _model(self, name: str) -> dict[str, Any]:
        served = next(
            (served for served in self._service.loaded if served.name == name), None
        )
        # as vLLM names it
        length = {} if served is None else {"max_model_len": served.length}
        return {
            "id": name,
            "object": "model",
            "created": self._service.created,
            "owned_by": "meshtrain",
        } | length

    def _known(self, name: str) -> str:
        names = self._service.statuses
        if name not in names:
            ending = nearest(name, names) or f"; there is {', '.join(names)}."
            raise Refused(
                404,
                f"there is no model {short(name)}{ending}",
                "model",
                "model_not_found",
            )
        return name

    async def health(self, request: Request) -> Response:
        status, body = self._service.health()
        return _json(body, status)

    async def metrics(self, request: Request) -> Response:
        openmetrics = wants_openmetrics(request.headers.get("accept"))
        text = render(families(self._service), openmetrics=openmetrics)
        return Response(text, media_type=OPENMETRICS if openmetrics else PLAIN)

    # --- answers

    async def completions(self, request: Request) -> Response:
        return await self._answered(request, requests.completion, answers.Completion)

    async def chat(self, request: Request) -> Response:
        return await self._answered(request, requests.chat, answers.Chat)

    async def _answered(
        self,
        request: Request,
        read: Callable[[Fields, int, Sampling, int], Asked],
        form: type[Answers],
    ) -> Response:
        service, begun = self._service, time.monotonic()
        # The event loop's clock, from here on for all that this request takes.
        deadline = asyncio.get_running_loop().time() + service.request_timeout
        with contextlib.ExitStack() as ending:
            async with asyncio.timeout_at(deadline):
                fields = parsed(await _body(request, service.most_body))
                fields.needed("model")
                name = request.scope[MODEL] = self._known(fields.text("model"))
                served = await service.use(name)
                ending.callback(service.done, name)
                asked = read(fields, service.queue, served.sampling, served.length)
                wanted = await served.requests(asked)
            prompt = sum(len(each.tokens) for each in wanted[:: asked.n])
            answering, shape = (
                service.answering(served, asked, wanted),
                form(asked, len(wanted)),
            )
            ending.callback(lambda: service.leave(answering, begun))
            service.enter(answering)
            answering.submit()
            if asked.stream:
                chunks = _chunks(answering, shape, prompt, asked.usage)
                return EventStream(chunks, deadline, ending.pop_all().close)
            task = asyncio.create_task(_whole(answering, shape, prompt, deadline))
            if await unless_gone(task, request.receive):
                return await task
            return Response(status_code=GONE)


async def _chunks(
    answering: Answering, shape: Answers, prompt: int, counted: bool
) -> AsyncGenerator[dict, None]:
    for chunk in shape.first():
        yield chunk
    async for choice, piece in answering.pieces():
        if piece.text or piece.chosen or piece.finish:
            yield shape.chunk(choice, piece)
    if counted:
        yield shape.total(answers.usage(prompt, answering.tokens))


async def _whole(
    answering: Answering, shape: Answers, prompt: int, deadline: float
) -> Response:
    pieces: dict[int, list[Piece]] = {}
    async with asyncio.timeout_at(deadline):
        async for choice, piece in answering.pieces():
            pieces.setdefault(choice, []).append(piece)
    whole = [joined(pieces[choice]) for choice in sorted(pieces)]
    return _json(shape.whole(whole, answers.usage(prompt, answering.tokens)))


async def _body(request: Request, most: int) -> bytes:
    """Returns what was sent, if it says that it is JSON: a web page may send other kinds to any address without being
    asked.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Refused(
            415,
            f"the body is said to be {short(kind) or 'of no type'}; send it with Content-Type: application/json.",
        )
    large = Refused(
        413,
        f"the body is larger than {most} bytes, which is all that is read.",
        code="too_large",
    )
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > most:
        raise large
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > most:
            raise large
    return bytes(body)


def _json(
    value: object, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(json_bytes(value), status, headers, "application/json")


def _refusal(refused: Refused) -> Response:
    return _json(refused.body, refused.status, refused.headers)


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = short(request.url.path)
    headers = error.headers or {}
    if error.status_code == 404:
        ending = (
            nearest(request.url.path, ROUTES) or f"; there are {', '.join(ROUTES)}."
        )
        return _refusal(
            Refused(404, f"there is no {path}{ending}", code="unknown_path")
        )
    sentence = f"{path} takes {headers.get('Allow', '')}, and not {request.method}."
    return _refusal(
        Refused(error.status_code, sentence, code="method_not_allowed", headers=headers)
    )
