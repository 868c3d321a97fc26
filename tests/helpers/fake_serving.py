"""A server over the real engine and a model without a device (fake_decoding), whose steps a test may hold up or let
fail.

Run as a script, with a port or without one, it is a process of its own.
"""

import contextlib
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from fake_decoding import fake_opened, faked, letters
from starlette.testclient import TestClient

from meshtrain.data.messages import text_of
from meshtrain.errors import ConfigError
from meshtrain.generate.engine import Engine
from meshtrain.generate.text import encoded
from meshtrain.serve.app import application
from meshtrain.serve.listening import Server, listening, url
from meshtrain.serve.service import ServedModel, Service


@dataclass
class Pace:
    """When the device's programs run: `hold` stops them, `go` lets them on; `seconds` that each takes; an `error` is
    raised by the next.
    """

    seconds: float = 0.0
    error: Exception | None = None
    steps: int = 0
    _free: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._free.set()

    def hold(self) -> None:
        self._free.clear()

    def go(self) -> None:
        self._free.set()

    def __call__(self, what: str) -> None:
        if what in ("prefill", "decode"):
            assert self._free.wait(30), "held for too long"
            time.sleep(self.seconds)
            self.steps += 1
            error, self.error = self.error, None
            if error is not None:
                raise error


class Template:
    """As prompts.Conversations: role and text of each message, and a `>`."""

    source = SimpleNamespace(name="fake", text="{{ messages }}{{ tools }}")
    reads_tools = True

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def tokens(self, messages: Any, tools: Any = None, most: int | None = None) -> Any:
        if any(message["content"] == "refuse me" for message in messages):
            raise ConfigError("the chat template fake does not take these messages.")
        said = "".join(
            f"{message['role']}:{text_of(message['content'])};" for message in messages
        )
        return encoded(self._tokenizer, f"{'tools;' if tools else ''}{said}>", most)


@dataclass
class Fake:
    """A server without a port: `client` asks it, `pace` is its device's."""

    service: Service
    engine: Engine
    pace: Pace
    client: TestClient

    def completion(self, **fields: Any) -> Any:
        return self.client.post(
            "/v1/completions",
            json={"model": "fake", "prompt": "abc", "max_tokens": 4, **fields},
        )

    def chat(self, text: str = "hello", **fields: Any) -> Any:
        body = {
            "model": "fake",
            "messages": [{"role": "user", "content": text}],
            "max_tokens": 4,
            **fields,
        }
        return self.client.post("/v1/chat/completions", json=body)

    def later(self, **fields: Any) -> Callable[[], Any]:
        """A completion that another thread asks for; its answer, once it is there."""
        found: list[Any] = []
        thread = threading.Thread(
            target=lambda: found.append(self.completion(**fields)), daemon=True
        )
        thread.start()

        def answer() -> Any:
            thread.join(20)
            return found[0]

        return answer

    def until(self, true: Any, seconds: float = 10.0) -> None:
        until(lambda: true(self.engine.status), seconds)


def until(true: Any, seconds: float = 10.0) -> None:
    """Waits until something is so."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it has not come to be"
        time.sleep(0.005)


@contextlib.contextmanager
def fake(
    slots: int = 2,
    length: int = 64,
    waiting: int = 4,
    template: bool = True,
    choose: Any = letters,
    **settings: Any,
) -> Iterator[Fake]:
    """A server that is ready, and ends with the context. `settings`: of the service."""
    pace = Pace()
    opened = fake_opened(length)
    if template:
        object.__setattr__(opened, "template", Template(opened.tokenizer))
    # What is asked of the device is not recorded: that alone would grow with each request.
    calls: deque[tuple] = deque(maxlen=0)
    engine = Engine(
        opened,
        slots,
        waiting=waiting,
        decoding=faked(choose=choose, fails=pace, calls=calls),
    )
    service = Service("fake", waiting, **settings)
    service.served = ServedModel("fake", engine.start())
    try:
        yield Fake(
            service,
            engine,
            pace,
            TestClient(application(service), raise_server_exceptions=False),
        )
    finally:
        pace.go()
        service.served.close()


@contextlib.contextmanager
def on_a_port(
    service: Service, notice: float = 0.0, patience: float = 5.0, stalled: int = 60
) -> Iterator[tuple[str, Server]]:
    """Its address, and the server, which a thread runs."""
    door = listening("127.0.0.1", 0, stalled)
    server = Server(application(service), service, notice, patience, access_log=False)
    thread = threading.Thread(
        target=server.run, kwargs={"sockets": [door]}, daemon=True
    )
    thread.start()
    until(lambda: server.started)
    try:
        yield url(door), server
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive(), "the server has not ended"


def main(port: int) -> None:
    with fake(slots=8, length=8192, waiting=64) as made:
        made.pace.seconds = 0.001
        door = listening("127.0.0.1", port)
        server = Server(
            application(made.service),
            made.service,
            notice=1.0,
            patience=30.0,
            access_log=False,
        )
        print(f"fake at {url(door)}", file=sys.stderr, flush=True)
        server.run(sockets=[door])


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
