"""Whether requests should be sent here, by what an engine's status says."""

from types import SimpleNamespace

import pytest
from fake_serving import fake

from meshtrain.data.tokenizer import ByteTokenizer
from meshtrain.errors import ConfigError
from meshtrain.generate.request import EngineStatus
from meshtrain.serve.errors import Refused
from meshtrain.serve.models import ServedModel
from meshtrain.serve.service import COMPILING_SECONDS, verdict


def status(busy=1, waiting=0, **times):
    return EngineStatus(slots=2, busy=busy, waiting=waiting, **times)


@pytest.mark.parametrize(
    ("status", "begun", "draining", "expected"),
    [
        (None, 0, False, "loading"),
        (status(last_step=95), 50, False, "ready"),
        (status(last_step=80), 50, False, "stuck"),
        (status(busy=0, waiting=2, last_step=80), 50, False, "stuck"),
        (status(busy=0, last_step=5), 50, False, "ready"),  # nothing to do
        (status(last_step=5), 95, False, "ready"),  # and then something
        (status(last_step=95, turn_began=80), 50, False, "stuck"),
        (status(last_step=5, turn_began=80, compiling=True), 50, False, "ready"),
        (
            status(busy=0, last_step=99, broken="the device's program failed."),
            50,
            False,
            "broken",
        ),
        (status(last_step=80), 50, True, "draining"),
        (None, 0, True, "draining"),
    ],
)
def test_the_verdict_follows_from_the_last_step(status, begun, draining, expected):
    found = verdict(status, begun, draining, stuck_after=10, now=100)
    assert (found.state, found.status) == (
        expected,
        200 if expected == "ready" else 503,
    )
    assert found.why.endswith(".")


def test_a_program_that_compiles_forever_is_stuck_at_last():
    compiling = status(turn_began=1.0, compiling=True)
    assert verdict(compiling, 1, False, 10, now=COMPILING_SECONDS).state == "ready"
    assert verdict(compiling, 1, False, 10, now=COMPILING_SECONDS + 2).state == "stuck"


def test_a_server_whose_device_stands_still_says_so_and_is_ready_again():
    with fake(stuck_after=0.1) as server:
        assert server.completion().status_code == 200
        server.pace.hold()
        assert server.client.get("/health").status_code == 200
        answered = server.later()
        server.until(lambda status: status.busy == 1)
        server.until(lambda _: server.client.get("/health").json()["status"] == "stuck")
        found = server.client.get("/health")
        assert found.status_code == 503 and found.json() | {"message": ""} == {
            "status": "stuck",
            "model": "fake",
            "message": "",
            "slots": 2,
            "busy": 1,
            "waiting": 0,
        }
        server.pace.go()
        assert answered().status_code == 200
        assert server.client.get("/health").json()["status"] == "ready"


def test_a_device_that_fails_again_and_again_is_broken():
    with fake() as server:
        for _ in range(3):
            server.pace.error = RuntimeError("on fire")
            assert server.completion().status_code == 500
        assert server.client.get("/health").json()["status"] == "broken"
        refused = server.completion()
        assert (
            refused.status_code == 503
            and "on fire" in refused.json()["error"]["message"]
        )


def test_a_text_that_the_tokenizer_cannot_read_is_the_requests_fault():
    class Tokenizer(ByteTokenizer):
        def encode(self, texts):
            raise ConfigError("tokenizer.json cannot make tokens (Missing [UNK]).")

    served = ServedModel.__new__(ServedModel)
    served._opened = SimpleNamespace(tokenizer=Tokenizer())
    served.length = 256
    with pytest.raises(Refused, match="cannot make tokens") as refused:
        served._requests(SimpleNamespace(messages=(), prompts=("zebra",), n=1))
    assert refused.value.status == 400
