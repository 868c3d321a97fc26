"""Refusals of requests, in OpenAI's shape: {"error": {"message", "type", "param", "code"}}."""

import json
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import ClientDisconnect

# By HTTP status; all others are the request's own fault.
KINDS = {
    401: "authentication_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
    504: "server_error",
}
# A client that went away before its answer (nginx's number); nobody reads it but the metrics.
GONE = 499
# In a scope: how a request is counted whose HTTP status had gone out before it was known
OUTCOME = "meshtrain.outcome"
MODEL = "meshtrain.model"  # in a scope: which one a request is for
# Seconds after which a client that found no room may come again
AGAIN = {"Retry-After": "1"}


@dataclass
class Refused(Exception):
    """A request that gets no answer, or no more of it: an HTTP status and one sentence; `param` names the field at
    fault.
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def body(self) -> dict[str, Any]:
        kind = KINDS.get(self.status, "invalid_request_error")
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.code,
            }
        }


def unavailable(message: str, code: str) -> Refused:
    """Returns a 503: not now, or not here."""
    return Refused(503, message, code=code, headers=AGAIN)


def queue_full(waiting: int) -> Refused:
    sentence = f"{waiting} requests wait already, which is all that may; come again in a moment."
    return Refused(429, sentence, code="queue_full", headers=AGAIN)


def failed(message: str) -> Refused:
    return Refused(500, message, code="failed")


def as_refused(error: Exception) -> Refused:
    """Returns what a client is told of whatever went wrong; what is nobody's fault but ours is written on stderr."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, TimeoutError):
        return Refused(
            504,
            "this request has taken longer than --request-timeout allows.",
            code="timeout",
        )
    if isinstance(error, ClientDisconnect):
        return Refused(GONE, "the client went away.")
    traceback.print_exception(error)
    return failed("something went wrong in the server, which has written down what.")


def json_bytes(value: object) -> bytes:
    """Returns JSON as it goes out: without spaces, and never NaN, which is none."""
    return json.dumps(
        value, ensure_ascii=False, allow_nan=False, separators=(",", ":")
    ).encode()
