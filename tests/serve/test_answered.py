"""Answers that are kept: found again for the same request alone, and bounded in number, bytes and age."""

from dataclasses import replace

import numpy as np
import pytest
from fake_serving import fake

from meshtrain.generate.request import Chosen, Piece, Request, Sampling
from meshtrain.serve import answered
from meshtrain.serve.answered import Answered, key

REQUEST = Request(np.array([1, 2], np.int32), 4)


def answer(text):
    return Piece(text, tokens=1, finish="length")


@pytest.mark.parametrize(
    "other",
    [
        replace(REQUEST, tokens=np.array([1, 3], np.int32)), replace(REQUEST, most=5), replace(REQUEST, stop=("x",)),
        replace(REQUEST, sampling=Sampling(1.0, seed=3)), replace(REQUEST, ignore_ends=True), replace(REQUEST, logprobs=0),
    ],
)  # fmt: skip
def test_only_the_same_request_finds_an_answer(other):
    kept = Answered(10, 60)
    kept.keep(key(REQUEST), answer("a"))
    assert kept.find(key(other)) is None
    assert kept.find(key(replace(REQUEST, tokens=REQUEST.tokens.copy()))) == answer("a")
    assert (kept.hits, kept.misses, len(kept)) == (1, 1, 1)


def test_of_too_many_the_one_that_was_not_asked_for_longest_goes():
    kept = Answered(2, 60)
    keys = [key(replace(REQUEST, most=most)) for most in (1, 2, 3)]
    kept.keep(keys[0], answer("0"))
    kept.keep(keys[1], answer("1"))
    assert kept.find(keys[0])
    kept.keep(keys[2], answer("2"))
    assert [kept.find(each) is not None for each in keys] == [True, False, True]


def test_bytes_are_bounded_and_come_back_to_nothing(monkeypatch):
    kept = Answered(100, 60, most_bytes=10_000)
    for most in range(1, 40):
        kept.keep(key(replace(REQUEST, most=most)), answer("x" * 500))
        assert kept.bytes <= 10_000
    assert 2 <= len(kept) < 6
    told = tuple(Chosen(1, "a", 0.0, ((1, "a", 0.0),) * 20) for _ in range(10))
    kept.keep(key(replace(REQUEST, most=99)), replace(answer(""), chosen=told))
    assert kept.find(key(replace(REQUEST, most=99))) is None, "larger than all that may be kept"
    monkeypatch.setattr(answered.time, "monotonic", lambda: 1e12)
    for most in range(1, 40):
        assert kept.find(key(replace(REQUEST, most=most))) is None
    assert (len(kept), kept.bytes) == (0, 0)


def test_an_answer_is_kept_only_where_it_would_be_the_same_again():
    with fake(kept=Answered(10, 60)) as server:
        for fields in ({"temperature": 0}, {"temperature": 1, "seed": 3}, {"temperature": 0, "logprobs": 2}):
            before = server.engine.status.tokens
            first, again = (server.completion(**fields).json() for _ in range(2))
            assert (
                first["choices"] == again["choices"] and first["usage"] == again["usage"] and first["id"] != again["id"]
            )
            assert server.engine.status.tokens == before + 4, "computed once"
        assert server.service.kept.hits == 3
        for _ in range(2):
            before = server.engine.status.tokens
            server.completion(temperature=1)
            assert server.engine.status.tokens == before + 4
        streamed = server.completion(temperature=0, stream=True).text
        assert (
            server.completion(temperature=0).json()["choices"][0]["text"] in streamed and server.service.kept.hits == 5
        )


def test_what_broke_off_is_not_kept():
    with fake(kept=Answered(10, 60)) as server:
        server.pace.error = RuntimeError("on fire")
        assert server.completion(temperature=0).status_code == 500
        assert len(server.service.kept) == 0
        assert server.completion(temperature=0).status_code == 200 and len(server.service.kept) == 1
