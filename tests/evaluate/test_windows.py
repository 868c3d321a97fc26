"""A document as rows: each token scored once, with the context that a stride promises, never more than a row holds."""

import numpy as np
import pytest

from meshtrain.evaluate.windows import windows

CASES = [
    (n, length, stride)
    for n in (1, 2, 7, 8, 9, 30, 31)
    for length in (1, 5, 8)
    for stride in (1, 3, 5, 8)
    if stride <= length
]


@pytest.mark.parametrize(("n", "length", "stride"), CASES)
def test_each_token_is_scored_once_with_the_context_that_there_is(n, length, stride):
    tokens = np.arange(100, 100 + n)
    whole = [7, *tokens]
    scored, rows = [], list(windows(tokens, 7, length, stride))
    for row in rows:
        at = len(scored) + 1
        # what stands before what is scored is what stands there in the document
        assert row.tokens.tolist() == whole[at - row.begin : at + row.scored]
        assert len(row.tokens) - 1 <= length and row.tokens.dtype == np.int32
        assert row.begin >= min(at, length - stride + 1)
        scored += row.tokens[row.begin :].tolist()
    assert scored == tokens.tolist()
    assert n <= length or len(rows[-1].tokens) - 1 == length
    assert len(rows) == 1 + max(0, -(-(n - length) // stride))


def test_a_document_without_a_token_has_no_row():
    assert list(windows(np.array([], np.int64), 7, 8, 4)) == []


def test_the_drawing_is_what_is_made():
    rows = [(row.tokens.tolist(), row.scored) for row in windows(np.arange(10), -1, 5, 2)]
    assert rows == [([-1, 0, 1, 2, 3, 4], 5), ([1, 2, 3, 4, 5, 6], 2), ([3, 4, 5, 6, 7, 8], 2), ([4, 5, 6, 7, 8, 9], 1)]
