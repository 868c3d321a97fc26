"""The engine on a real model: what it answers is what the model itself would say, whatever runs beside, on any mesh."""

import jax
import numpy as np
import pytest
from tiny_models import hugging_face

pytest.importorskip("safetensors")

from meshtrain.generate.engine import Engine
from meshtrain.generate.opened import open_model
from meshtrain.generate.request import Request, Sampling

RANDOM = np.random.default_rng(3)
# Of 1 to 30 tokens: buckets of 16 and 32.
PROMPTS = [
    RANDOM.integers(6, 45, n).astype(np.int32) for n in (1, 3, 16, 17, 30, 5, 2, 9)
]
HOW = [
    Sampling(),
    Sampling(0.9, seed=1),
    Sampling(1.0, top_k=5, seed=2),
    Sampling(0.7, top_p=0.8, seed=3),
] * 2
LENGTHS = range(12, 20)
REQUESTS = [
    Request(*each, ignore_ends=True) for each in zip(PROMPTS, LENGTHS, HOW, strict=True)
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return hugging_face(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def opened(directory):
    return open_model(directory)


class Tokens:
    """Listens for the tokens of an answer."""

    def __init__(self) -> None:
        self.ids, self.finish = [], None

    def __call__(self, piece):
        self.ids += [chosen.token for chosen in piece.chosen]
        self.finish = piece.finish or self.finish


def answered(engine: Engine, requests, together: bool) -> list[list[int]]:
    """The tokens of each; submitted all at once, or each when the one before has ended."""
    heard = [Tokens() for _ in requests]
    for request, listener in zip(requests, heard, strict=True):
        engine.submit(Request(**{**vars(request), "logprobs": 0}), listener)
        while not together and engine.step():
            pass
    while engine.step():
        pass
    assert {listener.finish for listener in heard} == {"length"}
    return [listener.ids for listener in heard]


@pytest.fixture(scope="module")
def engine(opened) -> Engine:
    return Engine(opened, 8, 64)


@pytest.fixture(scope="module")
def alone(engine) -> list[list[int]]:
    """What each request gets with nothing beside it."""
    return answered(engine, REQUESTS, together=False)


@pytest.mark.thorough
def test_eight_at_once_get_what_each_gets_alone_token_for_token(engine, alone):
    assert answered(engine, REQUESTS, together=True) == alone
    # more than there are slots: each is admitted when another has left
    assert answered(engine, REQUESTS[::-1] * 2, together=True) == alone[::-1] * 2


@pytest.mark.thorough
def test_a_hybrid_in_two_slots_says_what_it_says_alone(tmp_path):
    model = open_model(hugging_face(tmp_path / "hybrid", "qwen3_next"))
    engine = Engine(model, 2, 64)
    requests = REQUESTS[:5]
    alone = answered(engine, requests, together=False)
    assert answered(engine, requests, together=True) == alone


@pytest.mark.thorough
def test_greedy_is_what_the_model_itself_finds_likeliest(opened, alone):
    for request, ids in zip(REQUESTS, alone, strict=True):
        if not request.sampling.temperature:
            whole = np.concatenate([request.tokens, ids])
            logits = np.asarray(
                opened.model(np.pad(whole, (0, 64 - len(whole)))[None])[0]
            )
            at = np.arange(len(request.tokens) - 1, len(whole) - 1)
            two = np.sort(logits[at], axis=1)[:, -2:]
            clear = two[:, 1] - two[:, 0] > 1e-3
            assert clear.sum() > 6
            np.testing.assert_array_equal(
                np.argmax(logits[at], axis=1)[clear], np.array(ids)[clear]
            )


@pytest.mark.thorough
@pytest.mark.parametrize("mesh", ["tensor=2", "data=2,tensor=2"])
def test_another_mesh_gives_the_same_tokens(directory, alone, mesh):
    engine = Engine(open_model(directory, mesh=mesh, slots=8), 8, 64, keep=False)
    assert answered(engine, REQUESTS, together=True) == alone
    assert engine.status.failures == 0


@pytest.mark.thorough
def test_a_cancelled_request_leaves_nothing_behind_in_its_slot(engine, alone):
    for request in REQUESTS:
        ticket = engine.submit(request, Tokens())
        engine.step()
        engine.step()
        ticket.cancel()
    heard = Tokens()
    engine.submit(Request(**{**vars(REQUESTS[1]), "logprobs": 0}), heard)
    while engine.step():
        pass
    assert heard.ids == alone[1]


@pytest.mark.thorough
def test_nothing_grows_over_a_thousand_requests(opened):
    engine = Engine(opened, 8, 64, waiting=100)

    def work(rounds: int) -> int:
        for i in range(rounds):
            for k in range(100):
                ticket = engine.submit(
                    Request(PROMPTS[k % 8], 3, HOW[k % 8]), lambda piece: None
                )
                if (i + k) % 7 == 0:
                    ticket.cancel()
            while engine.step():
                pass
        return len(jax.live_arrays())

    before = work(1)
    assert work(10) <= before
    assert engine.status.requests == 1100 and engine.status.compiled == 3
