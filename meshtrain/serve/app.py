"""The routes: OpenAI's models, completions and chat completions; health and metrics."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from meshtrain.errors import nearest, short
from meshtrain.generate.request import Sampling
from meshtrain.serve import answers, metrics, requests
from meshtrain.serve.answering import Answering, joined
from meshtrain.serve.answers import Answers, EventStream, unless_gone
from meshtrain.serve.errors import GONE, Refused, written
from meshtrain.serve.fields import Fields, parsed
from meshtrain.serve.gate import ROUTES, Gate, refusal
from meshtrain.serve.requests import Asked
from meshtrain.serve.service import READY, ServedModel, Service, health_body
from meshtrain.telemetry.exposition import OPENMETRICS, PLAIN, render, wants_openmetrics


def application(service: Service) -> Starlette:
    """The server without a port."""
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
        exception_handlers={Refused: _refused, HTTPException: _no_route, ClientDisconnect: _gone},
    )


class Routes:
    def __init__(self, service: Service) -> None:
        self._service = service

    @property
    def _served(self) -> ServedModel:
        # the gate lets nobody in before
        assert self._service.served is not None
        return self._service.served

    # --- what there is

    async def models(self, request: Request) -> Response:
        return _json({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        self._check_model(request.path_params["model"])
        return _json(self._model())

    def _model(self) -> dict[str, Any]:
        served = self._served
        # max_model_len: as vLLM names it
        return {"id": served.name, "object": "model", "created": served.made, "owned_by": "meshtrain", "max_model_len": served.length}  # fmt: skip

    def _check_model(self, name: str) -> None:
        if name != self._served.name:
            ending = nearest(name, [self._served.name]) or f"; there is {self._served.name}."
            raise Refused(404, f"there is no model {short(name)}{ending}", "model", "model_not_found")

    async def health(self, request: Request) -> Response:
        verdict = self._service.verdict()
        return _json(health_body(verdict, self._service.name, self._service.status), verdict.status)

    async def metrics(self, request: Request) -> Response:
        service, openmetrics = self._service, wants_openmetrics(request.headers.get("accept"))
        ready = service.verdict().state == READY
        families = metrics.families(service.counted, ready, service.open_requests, service.queue, service.status)
        return Response(render(families, openmetrics=openmetrics), media_type=OPENMETRICS if openmetrics else PLAIN)

    # --- answers

    async def completions(self, request: Request) -> Response:
        return await self._answered(request, requests.completion, answers.Completion)

    async def chat(self, request: Request) -> Response:
        return await self._answered(request, requests.chat, answers.Chat)

    async def _answered(
        self,
        request: Request,
        read: Callable[[Fields, int, Sampling], Asked],
        written_as: Callable[[Asked, int], Answers],
    ) -> Response:
        service, begun = self._service, time.monotonic()
        # The event loop's clock, from here on for all that this request takes.
        deadline = asyncio.get_running_loop().time() + service.request_timeout
        async with asyncio.timeout_at(deadline):
            asked = read(parsed(await _body(request, service.most_body)), service.queue, self._served.sampling)
            self._check_model(asked.model)
            wanted = await self._served.requests(asked)
        prompt = sum(len(each.tokens) for each in wanted[:: asked.n])
        answering = Answering(self._served.engine, wanted, asked.stream)
        service.enter(answering)

        def left() -> None:
            answering.close()
            service.leave(answering)
            service.counted.took(begun, time.monotonic(), answering.times)

        shape = written_as(asked, len(wanted))
        if asked.stream:
            try:
                answering.submit()
            except Exception:
                left()
                raise
            return EventStream(_chunks(answering, shape, prompt, asked.usage), deadline, left)
        try:
            answering.submit()
            task = asyncio.create_task(_whole(answering, shape, prompt, deadline))
            return await task if await unless_gone(task, request.receive) else Response(status_code=GONE)
        finally:
            left()


async def _chunks(answering: Answering, shape: Answers, prompt: int, counted: bool) -> AsyncGenerator[dict, None]:
    for chunk in shape.first():
        yield chunk
    async for choice, piece in answering.pieces():
        if piece.text or piece.chosen or piece.finish:
            yield shape.chunk(choice, piece)
    if counted:
        yield shape.total(answers.usage(prompt, answering.tokens))


async def _whole(answering: Answering, shape: Answers, prompt: int, deadline: float) -> Response:
    pieces: dict[int, list] = {}
    async with asyncio.timeout_at(deadline):
        async for choice, piece in answering.pieces():
            pieces.setdefault(choice, []).append(piece)
    whole = [joined(pieces[choice]) for choice in sorted(pieces)]
    return _json(shape.whole(whole, answers.usage(prompt, answering.tokens)))


async def _body(request: Request, most: int) -> bytes:
    """What was sent, if it says that it is JSON: a web page may send other kinds to any address without being asked."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Refused(415, f"the body is said to be {short(kind) or 'of no type'}; send it with Content-Type: application/json.")  # fmt: skip
    large = Refused(413, f"the body is larger than {most} bytes, which is all that is read.", code="too_large")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > most:
        raise large
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > most:
            raise large
    return bytes(body)


# --- what goes wrong


def _json(value: object, status: int = 200) -> Response:
    return Response(written(value), status, media_type="application/json")


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    return refusal(error)


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = short(request.url.path)
    if error.status_code == 404:
        ending = nearest(request.url.path, ROUTES) or f"; there are {', '.join(ROUTES)}."
        return refusal(Refused(404, f"there is no {path}{ending}", code="unknown_path"))
    allowed = (error.headers or {}).get("Allow", "")
    return refusal(
        Refused(error.status_code, f"{path} takes {allowed}, and not {request.method}.", None, "method_not_allowed", error.headers or {})
    )  # fmt: skip


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=GONE)
