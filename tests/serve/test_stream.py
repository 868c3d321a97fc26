"""Streams: the order of chunks, exactly one end whatever happens, and clients that go away or read slowly."""

import asyncio
import json

import numpy as np
import pytest
from asgi import asking
from fake_decoding import continuation
from fake_serving import fake

from meshtrain.generate.request import Request
from meshtrain.serve.app import application

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
BODY = {
    "model": "fake",
    "prompt": "abc",
    "max_tokens": 6,
    "temperature": 0,
    "stream": True,
}


def events(text: str) -> list:
    """What a stream held: the JSON of each event, and the words of its end."""
    assert text.endswith("\n\n")
    lines = text.removesuffix("\n\n").split("\n\n")
    assert all(line.startswith("data: ") and "\n" not in line for line in lines)
    found = [line.removeprefix("data: ") for line in lines]
    assert found[-1] == "[DONE]" and found.count("[DONE]") == 1
    return [json.loads(each) for each in found[:-1]]


def test_a_streamed_completion_is_the_whole_one_in_pieces():
    with fake() as server:
        server.pace.seconds = 0.002
        answer = server.completion(**BODY, logprobs=1)
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["x-accel-buffering"] == "no"
        found = events(answer.text)
        assert len(found) > 2 and len({each["id"] for each in found}) == 1
        assert all(
            "usage" not in each and each["object"] == "text_completion"
            for each in found
        )
        said = [each["choices"][0] for each in found]
        assert (
            "".join(each["text"] for each in said)
            == bytes(continuation(b"abc", 6)).decode()
        )
        assert [each["finish_reason"] for each in said] == [None] * (len(said) - 1) + [
            "length"
        ]
        # offsets go on from chunk to chunk
        assert [at for each in said for at in each["logprobs"]["text_offset"]] == list(
            range(6)
        )


def test_a_streamed_conversation_begins_with_the_role_of_each_answer_and_ends_with_what_it_took():
    with fake() as server:
        found = events(
            server.chat(
                n=2, stream=True, stream_options={"include_usage": True}, logprobs=True
            ).text
        )
        begins, said, total = found[:2], found[2:-1], found[-1]
        assert [each["choices"][0]["delta"] for each in begins] == [
            {"role": "assistant", "content": ""}
        ] * 2
        assert [each["choices"][0]["index"] for each in begins] == [0, 1]
        assert total["choices"] == [] and total["usage"]["completion_tokens"] == 8
        assert all(
            each["usage"] is None and each["object"] == "chat.completion.chunk"
            for each in found[:-1]
        )
        for index in (0, 1):
            own = [
                each["choices"][0]
                for each in said
                if each["choices"][0]["index"] == index
            ]
            assert [each["finish_reason"] for each in own if each["finish_reason"]] == [
                "length"
            ]
            text = "".join(each["delta"].get("content", "") for each in own)
            tokens = [
                token["token"] for each in own for token in each["logprobs"]["content"]
            ]
            assert len(text) == 4 and "".join(tokens) == text


def test_an_error_in_mid_stream_is_told_and_then_the_stream_ends():
    async def run(server):
        async with asking(application(server.service), CHAT, chat()) as asked:
            assert (await asked.read())["status"] == 200
            assert b'"role":"assistant"' in (await asked.read())["body"]
            assert b'"content"' in (await asked.read())["body"]
            server.pace.error = RuntimeError("the device is on fire")
            return (await asked.rest()).decode()

    with fake() as server:
        server.pace.seconds = 0.005
        *_, last = events(asyncio.run(run(server)))
        assert (
            "on fire" in last["error"]["message"]
            and last["error"]["type"] == "server_error"
        )
        assert server.service.counted.requests["/v1/chat/completions", 500] == 1
        assert server.completion().status_code == 200


def chat(**fields):
    return {
        "model": "fake",
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 40,
        "stream": True,
        **fields,
    }


def test_a_stream_that_takes_too_long_is_told_so_and_ends():
    with fake(request_timeout=0.2) as server:
        server.pace.seconds = 0.02
        *_, last = events(server.completion(**BODY | {"max_tokens": 60}).text)
        assert last["error"]["code"] == "timeout"
        server.until(lambda status: status.busy == 0)


def test_what_goes_wrong_in_the_server_ends_a_stream_too(monkeypatch, capsys):
    with fake() as server:
        monkeypatch.setattr(
            "meshtrain.serve.answers.Completion.chunk", lambda *_: 1 / 0
        )
        (only,) = events(server.completion(**BODY).text)
        assert (
            only["error"]["code"] == "failed"
            and "division" not in only["error"]["message"]
        )
        assert "ZeroDivisionError" in capsys.readouterr().err
        server.until(lambda status: status.busy == 0)


def test_a_stream_that_has_no_room_is_an_error_and_no_stream():
    with fake(slots=1, waiting=1) as server:
        server.pace.hold()
        for busy, waiting in ((1, 0), (1, 1)):
            server.engine.submit(Request(np.array([1, 2]), 60), lambda piece: None)
            server.until(
                lambda status, now=(busy, waiting): (status.busy, status.waiting) == now
            )
        refused = server.completion(stream=True, n=1)
        assert (
            refused.status_code == 429
            and refused.headers["content-type"] == "application/json"
        )


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_slots_within_a_step(stream):
    async def run(server):
        async with asking(
            application(server.service), CHAT, chat(n=2, max_tokens=50, stream=stream)
        ) as asked:
            while server.engine.status.busy < 2:
                await asyncio.sleep(0.005)
            if stream:
                await asked.read()
            steps = server.pace.steps
            asked.go_away()
            # nobody reads, and yet it ends
            await asyncio.wait_for(asked.task, 10)
            while server.engine.status.busy:
                await asyncio.sleep(0.001)
            return server.pace.steps - steps

    with fake() as server:
        server.pace.seconds = 0.02
        assert asyncio.run(run(server)) <= 4
        assert server.service.counted.requests["/v1/chat/completions", 499] == 1
        assert server.service.open_requests == len(server.service.running) == 0


def test_a_client_that_reads_slowly_holds_up_nobody_and_finds_the_rest_in_one_piece():
    async def run(server):
        async with asking(
            application(server.service), CHAT, chat(max_tokens=50)
        ) as asked:
            assert (await asked.read())["status"] == 200
            # the engine is through with it while the client has read one chunk
            while server.engine.status.tokens < 50 or server.engine.status.busy:
                await asyncio.sleep(0.005)
            return (await asked.rest()).decode()

    with fake() as server:
        found = events(asyncio.run(run(server)))
        text = "".join(each["choices"][0]["delta"].get("content", "") for each in found)
        assert len(text) == 50 and len(found) < 6
