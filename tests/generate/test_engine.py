"""Who gets a slot when, what a request is told, and what goes wrong; on a model without a device."""

import gc
import threading
import time
from itertools import pairwise

import numpy as np
import pytest
from fake_decoding import FakeDecoding, continuation, fake_opened, faked, saying
from refusals import tells

from meshtrain.errors import ConfigError
from meshtrain.generate.compiling import COMMON
from meshtrain.generate.engine import Engine
from meshtrain.generate.request import Busy, Closed, Request, Sampling


class Heard:
    """A listener that keeps what it is told."""

    def __init__(self) -> None:
        self.pieces = []
        self.over = threading.Event()

    def __call__(self, piece):
        assert not self.over.is_set(), "a piece behind the last"
        self.pieces.append(piece)
        if piece.finish:
            self.over.set()

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    @property
    def finish(self):
        return self.pieces[-1].finish if self.pieces else None


def asked(prompt: bytes = b"hello", most: int = 8, **settings) -> Request:
    return Request(np.frombuffer(prompt, np.uint8).astype(np.int32), most, **settings)


def engine_of(
    slots: int = 2, waiting: int = 64, length: int = 64, **settings
) -> Engine:
    return Engine(
        fake_opened(length), slots, waiting=waiting, decoding=faked(**settings)
    )


def run(engine: Engine) -> None:
    """Turns until nothing is left to do."""
    for _ in range(10_000):
        if not engine.step():
            return
    raise AssertionError("it does not end")


def answers(engine: Engine, *requests: Request) -> list[Heard]:
    """What is told to each, all submitted at once."""
    heards = [Heard() for _ in requests]
    for request, heard in zip(requests, heards, strict=True):
        engine.submit(request, heard)
    run(engine)
    return heards


def test_a_request_gets_what_it_gets_alone():
    (heard,) = answers(engine_of(), asked())
    assert list(heard.text.encode()) == continuation(b"hello", 8)
    assert (heard.finish, heard.pieces[-1].tokens, heard.pieces[-1].problem) == (
        "length",
        8,
        "",
    )


@pytest.mark.parametrize("synchronous", [False, True])
def test_what_runs_beside_changes_nothing(synchronous):
    requests = [
        asked(
            bytes([65 + i]) * (1 + i),
            3 + i,
            sampling=Sampling(0.8 * (i % 2), seed=i),
            logprobs=2 if i == 3 else None,
        )
        for i in range(11)
    ]
    for slots in (1, 3, 8):
        heards = answers(engine_of(slots, synchronous=synchronous), *requests)
        for request, heard in zip(requests, heards, strict=True):
            expected = continuation(
                bytes(request.tokens.tolist()), request.most, request.sampling
            )
            assert list(heard.text.encode()) == expected


def test_requests_are_admitted_in_order_while_others_decode():
    engine = engine_of(slots=2)
    heards = [Heard() for _ in range(4)]
    for heard, most in zip(heards, (30, 3, 3, 3), strict=True):
        engine.submit(asked(most=most), heard)
    ended = []
    while engine.step():
        ended += [
            i for i, heard in enumerate(heards) if heard.finish and i not in ended
        ]
    assert ended[:3] == [1, 2, 3] and heards[0].finish == "length"
    calls = engine._decoding.calls
    prefills = [at for at, call in enumerate(calls) if call[0] == "prefill"]
    assert [calls[at][1] for at in prefills] == [0, 1, 1, 1]
    assert all(("decode",) in calls[a:b] for a, b in pairwise(prefills[1:]))


def test_a_step_is_dispatched_before_the_one_before_it_is_read_and_none_that_nobody_asked_for():
    engine = engine_of(slots=1)
    answers(engine, asked(most=6))
    device = [call for call in engine._decoding.calls if call[0] != "prefill"]
    assert device[:4] == [
        ("decode",),
        ("read", "prefill", 0),
        ("decode",),
        ("read", "decode"),
    ]
    assert (
        device[4:6] == device[2:4]
        and device.count(("decode",)) == 5 == engine.status.steps
    )


def test_fake_cpu_devices_have_no_two_programs_under_way():
    engine = engine_of(slots=2, synchronous=True)
    answers(engine, *[asked(most=6)] * 3)
    calls = engine._decoding.calls
    assert len(calls) > 12 and all(read[0] == "read" for read in calls[1::2])


def test_an_end_token_ends_the_text_and_is_no_part_of_it():
    good = faked(choose=saying("good"))
    engine = Engine(fake_opened(), 2, decoding=good)
    heard, beyond = answers(
        engine, asked(b">", 20, logprobs=0), asked(b">", 20, ignore_ends=True)
    )
    assert (heard.text, heard.finish, heard.pieces[-1].tokens) == ("good", "stop", 5)
    # it is told of all the same, with its log-probability
    chosen = [chosen for piece in heard.pieces for chosen in piece.chosen]
    assert [one.token for one in chosen] == [*b"good", 256] and chosen[
        -1
    ].logprob == -2.56
    assert (beyond.finish, beyond.pieces[-1].tokens) == ("length", 20)
    several = fake_opened(ends=frozenset({256, ord("x"), ord("d")}))
    (heard,) = answers(Engine(several, 1, decoding=good), asked(b">", 20))
    assert (heard.text, heard.finish) == ("goo", "stop")


def test_a_text_ends_before_the_first_stop_string_and_nothing_of_one_is_given_out():
    (heard,) = answers(
        engine_of(choose=saying("one STO two STOP three")),
        asked(b">", 40, stop=("STOP", "three")),
    )
    assert (heard.text, heard.finish) == ("one STO two ", "stop")


def test_an_answer_ends_where_the_slot_has_no_more_positions():
    (heard,) = answers(engine_of(length=16), asked(b"0123456789", 50))
    assert (heard.finish, heard.pieces[-1].tokens) == ("length", 6)


def test_the_likeliest_tokens_are_told_where_they_are_asked_for():
    told, untold = answers(engine_of(), asked(most=4, logprobs=3), asked(most=4))
    chosen = [each for piece in told.pieces for each in piece.chosen]
    assert [each.token for each in chosen] == continuation(b"hello", 4)
    for each in chosen:
        assert each.text == chr(each.token) and each.logprob == -each.token / 100
        assert [token for token, _, _ in each.likeliest] == [
            each.token,
            each.token + 1,
            each.token + 2,
        ]
    assert not any(piece.chosen for piece in untold.pieces)


def test_a_cancelled_request_frees_its_slot_within_a_step():
    engine, first, second, third = engine_of(slots=1), Heard(), Heard(), Heard()
    ticket = engine.submit(asked(most=50), first)
    engine.submit(asked(b"two", most=4), second)
    waiting = engine.submit(asked(most=4), third)
    engine.step()
    engine.step()
    ticket.cancel()
    waiting.cancel()
    engine.step()
    assert (first.finish, third.finish) == ("cancelled", "cancelled") and third.pieces[
        -1
    ].tokens == 0
    assert engine.status.busy == 1 and engine.status.waiting == 0
    run(engine)
    assert list(second.text.encode()) == continuation(b"two", 4)
    # of one that has ended nothing is left to cancel
    ticket.cancel()
    assert (
        engine.step() is False
        and len([piece for piece in first.pieces if piece.finish]) == 1
    )


def test_only_so_many_requests_wait():
    engine = engine_of(slots=2, waiting=3)
    for _ in range(5):
        engine.submit(asked(), Heard())
    with pytest.raises(Busy, match="5 requests wait already"):
        engine.submit(asked(), Heard())
    engine.step()
    with pytest.raises(Busy, match="3 requests wait already"):
        engine.submit(asked(), Heard())
    run(engine)
    engine.submit(asked(), Heard())


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (asked(b""), "a prompt must be one token"),
        (
            asked(b"x" * 64),
            "the prompt is 64 tokens ... 64 positions",
        ),
        (
            Request(np.array([3, 257]), 4),
            "the prompt has the token 257; ... 257",
        ),
        (Request(np.array([-1]), 4), "the prompt has the token -1;"),
        (Request(np.array([[1]]), 4), "a prompt must be one token"),
        (Request(np.array([1.5]), 4), "a prompt must be one token"),
        (asked(most=0), "0 tokens are asked for"),
        (asked(logprobs=21), "logprobs is 21; ... from 0 to 20."),
        (asked(sampling=Sampling(-1)), "temperature is -1; ... number from 0."),
        (asked(sampling=Sampling(float("nan"))), "temperature is nan"),
        (asked(sampling=Sampling(float("inf"))), "temperature is inf"),
        (
            asked(sampling=Sampling(1, top_p=0)),
            "top_p is 0; ... above 0 and at most 1.",
        ),
        (asked(sampling=Sampling(1, top_k=-1)), "top_k is -1"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_cannot_be_answered_is_refused_in_a_sentence(wrong, says):
    engine = engine_of()
    with pytest.raises(ConfigError) as refused:
        engine.submit(wrong, Heard())
    assert tells(str(refused.value), says)
    assert engine.status.waiting == 0


def failing(what: str, times: int):
    """The first `times` calls of a kind fail."""
    left = [times]

    def fails(called: str) -> None:
        if called == what and left[0] > 0:
            left[0] -= 1
            raise RuntimeError("out of memory.")

    return fails


@pytest.mark.parametrize("what", ["prefill", "decode", "read", "empty"])
def test_where_the_device_fails_its_requests_end_with_an_error_and_the_others_are_answered(
    what, caplog
):
    engine = engine_of(slots=2, fails=failing(what, 1))
    heards = answers(engine, *[asked()] * 5)
    lost = [heard for heard in heards if heard.finish == "error"]
    assert (
        1 <= len(lost) <= 2 and engine.status.failures == 1 and not engine.status.broken
    )
    assert "program failed: out of memory" in lost[0].pieces[-1].problem
    for heard in heards:
        assert heard in lost or list(heard.text.encode()) == continuation(b"hello", 8)


def test_a_device_that_fails_again_and_again_breaks_the_engine_and_nobody_waits(caplog):
    engine = engine_of(slots=1, fails=failing("read", 1000))
    assert [heard.finish for heard in answers(engine, *[asked()] * 6)] == ["error"] * 6
    assert (
        "program failed: out of memory" in engine.status.broken
        and engine.status.failures == 3
    )
    with pytest.raises(Closed, match="out of memory"):
        engine.submit(asked(), Heard())


def test_logits_that_are_no_numbers_end_their_request_alone():
    def decoding(model, slots, length, keep):
        found = FakeDecoding(slots, length)
        picked = found._picked
        found._picked = lambda tokens, call, likeliest, alone=False: picked(
            tokens, call, likeliest, alone
        )._replace(**{"logprobs": np.float32("nan")} if alone and call[2] == 0 else {})
        return found

    lost, other = answers(Engine(fake_opened(), 2, decoding=decoding), asked(), asked())
    assert lost.finish == "error" and "logits are not finite" in lost.pieces[-1].problem
    assert other.finish == "length"


def test_a_listener_that_raises_loses_its_own_request_alone(caplog):
    def deaf(piece):
        raise BrokenPipeError("gone")

    engine, heard = engine_of(), Heard()
    engine.submit(asked(most=50), deaf)
    engine.submit(asked(), heard)
    for _ in range(3):
        engine.step()
    assert engine.status.busy == 1
    run(engine)
    assert (
        list(heard.text.encode()) == continuation(b"hello", 8)
        and engine.status.requests == 2
    )
    assert "who listens to a request has failed" in caplog.text


def test_counts_are_what_was_done():
    engine = engine_of()
    answers(engine, asked(most=3), asked(most=5))
    answers(engine, asked(b"x" * 20, most=2))
    status = engine.status
    assert (status.requests, status.tokens, status.prompt_tokens) == (3, 10, 30)
    assert (
        status.compiled == 3
        and status.turn_began is None
        and 0 < status.last_step <= time.monotonic()
    )


def test_threads_submit_and_the_engine_answers_all_of_them():
    heards = [Heard() for _ in range(40)]
    with engine_of(slots=4) as engine:

        def submit(own):
            for heard in own:
                engine.submit(asked(), heard)

        threads = [
            threading.Thread(target=submit, args=(heards[i::4],)) for i in range(4)
        ]
        for thread in threads:
            thread.start()
        for heard in heards:
            assert heard.over.wait(30)
    for thread in threads:
        thread.join()
    assert {heard.text for heard in heards} == {
        bytes(continuation(b"hello", 8)).decode()
    }


def slowly(history, how):
    time.sleep(0.002)
    return ord("a")


def test_closing_ends_what_runs_and_draining_answers_it():
    for drain, finish in ((False, "cancelled"), (True, "length")):
        engine, heards = (
            engine_of(slots=1, choose=slowly).start(),
            [Heard() for _ in range(3)],
        )
        for heard in heards:
            engine.submit(asked(most=20), heard)
        engine.close(drain=drain)
        assert [heard.finish for heard in heards] == [finish] * 3
        with pytest.raises(Closed, match="the engine is closed"):
            engine.submit(asked(), Heard())
        # once more is no mistake
        engine.close()


def test_an_engine_without_a_thread_drains_too():
    engine, heard = engine_of(), Heard()
    engine.submit(asked(), heard)
    engine.close(drain=True)
    assert heard.finish == "length"


@pytest.mark.thorough
def test_nothing_grows_over_thousands_of_requests():
    engine = engine_of(slots=4)

    def work(requests: int) -> int:
        for _ in range(requests // 40):
            for i in range(40):
                ticket = engine.submit(
                    asked(most=3, logprobs=1 if i == 3 else None), lambda piece: None
                )
                if i % 5 == 0:
                    ticket.cancel()
            run(engine)
        engine._decoding.calls.clear()
        gc.collect()
        return len(gc.get_objects())

    before = work(200)
    assert work(2000) <= before + 50
    assert (
        engine.status.requests == 2200
        and not engine._unread
        and engine.status.busy == 0
    )


def test_a_request_whose_program_is_not_compiled_waits_for_it_alone():
    go, left = threading.Event(), []

    def compiles(name):
        left.append((name, threading.current_thread().name))
        if name == ("prefill", 32):
            assert go.wait(200), "nobody lets it on"

    engine, heards = (
        engine_of(slots=3, length=600, compiles=compiles),
        [Heard() for _ in range(3)],
    )
    long, beside, later = asked(b"l" * 20, 3), asked(most=40), asked(b"x" * 16, 3)
    with engine:
        threading.Thread(target=engine.warm, args=(0.0,), daemon=True).start()
        until(lambda: ("prefill", 32) in [name for name, _ in left])
        for request, heard in zip((long, beside, later), heards, strict=True):
            engine.submit(request, heard)
        assert heards[1].over.wait(90) and heards[2].over.wait(90), "the others go on"
        assert not heards[0].pieces and engine.status.compiling
        assert (engine.status.waiting, engine.status.busy) == (1, 0)
        turns = engine.status.last_step
        time.sleep(0.05)
        assert engine.status.last_step == turns, "waiting for a program is not busy"
        go.set()
        assert heards[0].over.wait(90) and not engine.status.compiling
        assert list(heards[0].text.encode()) == continuation(b"l" * 20, 3)
        until(lambda: not engine.warming)
    assert [name for name, _ in left] == engine._decoding.names, (
        "in their order, each once"
    )
    assert {thread for _, thread in left} == {"meshtrain compiler"}


def test_the_commonest_programs_are_waited_for_and_what_a_request_needs_comes_before_the_others():
    go, compiled = threading.Semaphore(0), []

    def compiles(name):
        assert go.acquire(timeout=20)
        compiled.append(name)

    engine, left, heard = engine_of(length=5000, compiles=compiles), [], Heard()
    with engine:
        warming = threading.Thread(
            target=lambda: left.append(engine.warm(0.0)), daemon=True
        )
        warming.start()
        go.release(COMMON - 1)
        until(lambda: len(compiled) == COMMON - 1)
        assert not left
        engine.submit(asked(b"l" * 3000, 3), heard)
        go.release(2)
        assert heard.over.wait(90)
        warming.join(20)
        assert (
            compiled[-1] == ("prefill", 4096)
            and left[0] >= len(engine._decoding.names) - COMMON - 1
        )
        go.release(20)


def test_a_program_that_cannot_be_compiled_ahead_is_tried_again_by_who_needs_it(caplog):
    failed = []

    def compiles(name):
        if name == ("prefill", 32) and not failed:
            failed.append(name)
            raise RuntimeError("no memory")

    engine, heard = engine_of(compiles=compiles), Heard()
    with engine:
        assert engine.warm(20.0) == 0 and not engine.warming, (
            "nothing is compiled while it answers"
        )
        engine.submit(asked(b"l" * 20, 3), heard)
        assert heard.over.wait(90) and heard.finish == "length"
    assert "cannot be compiled ahead (no memory)" in caplog.text


def until(true, seconds=20.0):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it has not come to be"
        time.sleep(0.005)


# --- drafts


@pytest.mark.parametrize("synchronous", [False, True])
def test_drafts_change_no_answer_and_are_counted(synchronous):
    requests = [asked(b"ab" * (i + 1), 5 + 3 * i, logprobs=1) for i in range(5)]
    right = lambda position: position % 3 > 0
    engine = engine_of(slots=2, synchronous=synchronous, drafts=right)
    heards = answers(engine, *requests)
    drafts = accepted = saved = 0
    for request, heard in zip(requests, heards, strict=True):
        expected = continuation(bytes(request.tokens.tolist()), request.most)
        assert list(heard.text.encode()) == expected and heard.finish == "length"
        chosen = [chosen for piece in heard.pieces for chosen in piece.chosen]
        assert [(c.token, c.logprob) for c in chosen] == [
            (t, -t / 100) for t in expected
        ]
        # one token came of the prompt
        left = request.most - 1
        position = len(request.tokens) + 1
        while left:
            second = right(position) and left > 1
            drafts += 1
            accepted += right(position)
            saved += second
            left -= 1 + second
            position += 1 + right(position)
    status = engine.status
    assert (status.drafts, status.accepted_drafts, status.saved) == (
        drafts,
        accepted,
        saved,
    )
    assert status.tokens == sum(request.most for request in requests)
    assert 0 < saved < accepted < drafts


def test_an_end_hides_what_was_drafted_behind_it():
    engine = engine_of(choose=saying("abc"), drafts=lambda position: True)
    (heard,) = answers(engine, asked(b">", 20))
    assert (heard.text, heard.finish, heard.pieces[-1].tokens) == ("abc", "stop", 4)
    # b c, then the end, behind which nothing counts
    status = engine.status
    assert (status.drafts, status.accepted_drafts, status.saved) == (2, 2, 1)
