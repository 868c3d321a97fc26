"""Answers that are kept: the same as before, only for requests that draw nothing new, and for no other weights."""

import json

import numpy as np
import pytest
from fake_serving import fake

from meshtrain.generate.request import Piece, Request, Sampling
from meshtrain.serve.cache import AnswerCache, digest
from meshtrain.serve.metrics import SERVE
from meshtrain.serve.models import ServedModel

PLAIN = {"temperature": 0}
KNOWN = {
    "greedy": PLAIN,
    "a seed": {"temperature": 1, "seed": 3},
    "several": {"temperature": 1, "seed": 3, "n": 3},
    "log-probabilities": {**PLAIN, "logprobs": 3},
    "two prompts": {**PLAIN, "prompt": ["ab", "cd"]},
    "a stop": {**PLAIN, "stop": "e", "max_tokens": 30},
}


@pytest.fixture
def server():
    with fake(cache=AnswerCache(1 << 20)) as made:
        yield made


def body(answer):
    """An answer without what names it."""
    return {
        name: value
        for name, value in answer.json().items()
        if name not in ("id", "created")
    }


def events(answer):
    return [
        json.loads(line[6:])
        for line in answer.text.splitlines()
        if line.startswith("data: {")
    ]


@pytest.mark.parametrize("what", KNOWN)
def test_a_known_answer_is_the_same_with_its_usage_and_asks_nothing_of_the_device(
    server, what
):
    first = body(server.completion(**KNOWN[what]))
    steps, hits = server.pace.steps, server.service.cache.hits
    assert (
        body(server.completion(**KNOWN[what])) == first
        and first["usage"]["completion_tokens"]
    )
    assert server.pace.steps == steps and server.service.cache.hits - hits == len(
        first["choices"]
    )


@pytest.mark.parametrize(
    "fields", [{"temperature": 1}, {"temperature": 0.5, "top_p": 0.9}]
)
def test_what_draws_anew_is_never_kept(server, fields):
    server.completion(**fields)
    cache = server.service.cache
    assert (cache.bytes, cache.hits, cache.misses) == (0, 0, 0)
    steps = server.pace.steps
    server.completion(**fields)
    assert server.pace.steps > steps


@pytest.mark.parametrize(
    "other",
    [
        {"prompt": "abd"},
        {"max_tokens": 5},
        {"stop": "zz"},
        {"ignore_eos": True},
        {"logprobs": 1},
        {"temperature": 1, "seed": 1},
    ],
)
def test_a_request_that_differs_is_another(server, other):
    server.completion(**PLAIN)
    server.completion(**PLAIN | other)
    assert server.service.cache.hits == 0


def test_a_conversation_and_a_stream_have_what_was_known_and_a_stream_is_kept_too(
    server,
):
    whole = server.completion(**PLAIN, max_tokens=8).json()
    streamed = events(
        server.completion(
            **PLAIN, max_tokens=8, stream=True, stream_options={"include_usage": True}
        )
    )
    assert server.service.cache.hits == 1 and streamed[-1]["usage"] == whole["usage"]
    assert (
        "".join(e["choices"][0]["text"] for e in streamed[:-1])
        == whole["choices"][0]["text"]
    )
    said = events(server.chat(temperature=0, stream=True))
    text = "".join(e["choices"][0]["delta"].get("content", "") for e in said)
    assert server.chat(temperature=0).json()["choices"][0]["message"]["content"] == text
    assert server.service.cache.hits == 2


def test_an_answer_that_ended_early_is_not_kept():
    with fake(cache=AnswerCache(1 << 20), request_timeout=0.2) as server:
        server.pace.seconds = 0.05
        assert server.completion(**PLAIN, max_tokens=40).status_code == 504
        server.pace.seconds = 0
        server.until(lambda status: status.busy == 0)
        server.pace.error = RuntimeError("on fire")
        assert server.completion(**PLAIN).status_code == 500
        assert server.service.cache.bytes == 0


def test_other_weights_of_the_same_name_have_nothing_in_common(server):
    server.completion(**PLAIN)
    server.service.served = ServedModel("fake", server.engine)
    server.completion(**PLAIN)
    assert server.service.cache.hits == 0


def test_the_oldest_go_where_there_is_no_room_and_all_after_their_time():
    now = [0.0]
    piece = Piece("x" * 100, tokens=1, finish="stop")
    cache = AnswerCache(1000, 10.0, lambda: now[0])
    cache.put(b"0", piece)
    most = 1000 // cache.bytes
    for k in range(1, most):
        cache.put(bytes([48 + k]), piece)
    assert cache.get(b"0") == piece
    cache.put(b"new", piece)
    assert cache.get(b"1") is None and cache.get(b"0") == piece and cache.bytes <= 1000
    now[0] = 10.5
    assert cache.get(b"0") is None and cache.get(b"new") is None
    cache.put(b"large", Piece("x" * 2000, finish="stop"))
    assert cache.get(b"large") is None


def test_a_digest_is_of_all_that_decides_an_answer():
    requests = [
        Request(np.array([1, 2]), 3),
        Request(np.array([12]), 3),
        Request(np.array([1, 2]), 4),
        Request(np.array([1, 2]), 3, Sampling(1.0)),
        Request(np.array([1, 2]), 3, Sampling(1.0, 5)),
        Request(np.array([1, 2]), 3, Sampling(1.0, 0, 0.5)),
        Request(np.array([1, 2]), 3, Sampling(1.0, seed=1)),
        Request(np.array([1, 2]), 3, stop=("a",)),
        Request(np.array([1, 2]), 3, ignore_ends=True),
        Request(np.array([1, 2]), 3, logprobs=0),
        Request(np.arange(2000), 3),
        Request(np.arange(2000)[::-1], 3),
    ]
    assert len(
        {digest(weights, request) for request in requests for weights in ("a", "b")}
    ) == 2 * len(requests)
    assert digest("a", requests[0]) == digest(
        "a", Request(np.array([1, 2], np.int32), 3)
    )


def test_without_a_size_nothing_is_kept_and_hits_are_counted_on_the_page():
    with fake() as server:
        server.completion(**PLAIN)
        server.completion(**PLAIN)
        assert server.service.cache.misses == server.service.cache.bytes == 0
    with fake(cache=AnswerCache(1 << 20)) as server:
        server.completion(**PLAIN)
        server.completion(**PLAIN)
        page = server.client.get("/metrics").text.splitlines()
        assert (
            f"{SERVE}cache_hits_total 1" in page
            and f"{SERVE}cache_misses_total 1" in page
        )
