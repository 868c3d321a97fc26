"""Log-probabilities of tokens: those of the logits, whatever the batch, the padding and the mesh; and whether each is
the likeliest.
"""

import jax
import numpy as np
import pytest
from golden import GOLDEN

import meshtrain as mt
from meshtrain.config import ConfigError
from meshtrain.evaluate import scoring
from meshtrain.evaluate.scoring import Scorer, TokenRow

RANDOM = np.random.default_rng(3)


def model(family="llama3", **mesh):
    config = mt.load({"mesh": mesh, "train": {"uneven_batch": "pad"}} if mesh else {})
    return mt.read_model(GOLDEN / family, mesh=mt.make_mesh(config))


def rows(vocabulary: int, lengths=(40, 3, 2, 17, 18, 33, 9)) -> list[TokenRow]:
    made = [RANDOM.integers(0, vocabulary, n).astype(np.int32) for n in lengths]
    return [
        TokenRow(tokens, 1 + k * 5 % (len(tokens) - 1)) for k, tokens in enumerate(made)
    ]


def logits_of(read, tokens: np.ndarray) -> np.ndarray:
    """Of the tokens alone, in a row as long as the longest, so that one program is compiled: none sees what comes after
    it.
    """
    return np.asarray(
        read(np.pad(tokens, (0, 40 - len(tokens)))[None])[0, : len(tokens)]
    )


def by_hand(read, row: TokenRow) -> tuple[np.ndarray, np.ndarray]:
    """From the whole logits of the row alone, in float64."""
    logits = logits_of(read, row.tokens[:-1])[row.begin - 1 :].astype(np.float64)
    wanted = row.tokens[row.begin :]
    top = logits.max(-1, keepdims=True)
    log_z = top[:, 0] + np.log(np.exp(logits - top).sum(-1))
    return logits[np.arange(len(wanted)), wanted] - log_z, logits.argmax(-1) == wanted


@pytest.fixture(scope="module")
def one():
    return model()


@pytest.fixture(scope="module")
def some(one):
    found = rows(one.config.model.vocab_size)
    # the likeliest token at the end of some, so that both answers of greedy occur
    for row in found[::2]:
        row.tokens[-1] = int(logits_of(one, row.tokens[:-1])[-1].argmax())
    return found


@pytest.fixture(scope="module")
def right(one, some):
    return [by_hand(one, row) for row in some]


def same(found, right, atol=2e-5):
    greedy = [np.concatenate([scores[1] for scores in each]) for each in (found, right)]
    np.testing.assert_array_equal(*greedy)
    assert 3 < greedy[0].sum() < len(greedy[0]), "both answers occur"
    for scores, (logprobs, _) in zip(found, right, strict=True):
        assert scores.logprobs.dtype == np.float32
        np.testing.assert_allclose(scores.logprobs, logprobs, atol=atol)


@pytest.mark.thorough
@pytest.mark.parametrize("at_once", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_scores_are_those_of_the_logits_however_many_rows_meet_in_a_batch(
    one, some, right, at_once
):
    same(Scorer(one, at_once)(some), right)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param({"data": 3, "tensor": 2}, marks=pytest.mark.slow),
        {"tensor": 2, "pipeline": 2},
    ],
    ids=str,
)
def test_scores_are_the_same_on_any_mesh(some, right, mesh):
    same(Scorer(model(**mesh), 2)(some), right)


@pytest.mark.thorough
def test_logits_cut_into_pieces_give_the_same(one, some, right, monkeypatch):
    monkeypatch.setattr(scoring, "LOGITS", 4 * one.config.model.vocab_size * 8 * 3)
    assert scoring._chunks(64, 4 * one.config.model.vocab_size * 8) == 32
    same(Scorer(one, 8)(some), right)


@pytest.mark.thorough
def test_no_logits_of_a_whole_row_are_ever_anywhere(one):
    """The largest array of the compiled program with the vocabulary in it has as many places as are scored, not as the
    row is long.
    """
    scorer = Scorer(one, 2)
    places, vocabulary = 16, one.config.model.vocab_size
    shapes = [jax.ShapeDtypeStruct((2, n), np.int32) for n in (64, places, places)]
    text = scorer._program.lower(one.params, *shapes).as_text()
    assert f"tensor<2x{places}x{vocabulary}xf32>" in text
    assert (
        f"tensor<2x64x{vocabulary}x" not in text
        and f"tensor<128x{vocabulary}x" not in text
    )


@pytest.mark.thorough
def test_rows_come_back_in_the_order_given_and_progress_is_told(one, some):
    told = []
    backwards = Scorer(one, 3)(
        some[::-1], lambda done, total: told.append((done, total))
    )
    assert [len(scores.logprobs) for scores in backwards] == [
        row.scored for row in some[::-1]
    ]
    assert told == [(3, 7), (6, 7), (7, 7)]


def test_of_equal_logits_the_first_is_the_greedy_one(one):
    """As jax.numpy.argmax has it; here all logits are zero."""
    zero = mt.reader.Model(
        one.program, jax.tree.map(lambda x: x * 0, one.params), 0, one.directory
    )
    (found,) = Scorer(zero, 1)([TokenRow(np.array([5, 0, 1], np.int32))])
    assert found.greedy.tolist() == [True, False]
    np.testing.assert_allclose(
        found.logprobs, -np.log(one.config.model.vocab_size), rtol=1e-6
    )


@pytest.mark.thorough
def test_what_cannot_be_scored_is_a_sentence(one):
    with pytest.raises(
        ConfigError,
        match=rf"token 1000, .* are 0 to {one.config.model.vocab_size - 1}; it",
    ):
        Scorer(one)([TokenRow(np.array([1, 1000]))])
    gpt2 = model("gpt2")
    longest = gpt2.config.model.max_positions
    says = f"{longest + 1} positions .* learned {longest}"
    with pytest.raises(ConfigError, match=says):
        Scorer(gpt2)([TokenRow(np.zeros(longest + 2, np.int32))])
    (full,) = Scorer(gpt2)([TokenRow(np.zeros(longest + 1, np.int32))])
    assert len(full.logprobs) == longest


@pytest.mark.thorough
def test_a_model_that_gives_no_number_is_a_sentence(one):
    broken = mt.reader.Model(
        one.program, jax.tree.map(lambda x: x * np.nan, one.params), 0, one.directory
    )
    with pytest.raises(ConfigError, match=r"gives no numbers \(NaN\)"):
        Scorer(broken)([TokenRow(np.array([1, 2], np.int32))])
