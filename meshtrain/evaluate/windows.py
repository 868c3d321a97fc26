"""A document of any length as rows of at most `length` places, so that each of its tokens is scored once.

    tokens      b 0 1 2 3 4 5 6 7 8 9            b: what a document begins with; it is not scored
    row 0       b 0 1 2 3|                       length 5, stride 2: a row puts in 5 tokens, and scores what comes after each,
    scored        0 1 2 3 4                      but for those that a row before it has scored
    row 1           1 2 3 4 5|
    scored                  5 6                  at least length - stride = 3 tokens of context, where there are so many
    row 2               3 4 5 6 7|
    scored                      7 8
    row 3                 4 5 6 7 8|
    scored                        9              the last has all the context that a row holds

The last row is moved back so that it is full.
"""

from collections.abc import Iterator

import numpy as np

from meshtrain.evaluate.scoring import Row


def windows(tokens: np.ndarray, begin: int, length: int, stride: int) -> Iterator[Row]:
    """The rows of a document's tokens [n] behind the token `begin`; 1 <= stride <= length. None of a document without any."""
    whole = np.concatenate([[begin], tokens]).astype(np.int32)
    scored = 1
    while scored < len(whole):
        # the first row scores all that it can
        end = min(scored + (length if scored == 1 else stride), len(whole))
        first = max(end - 1 - length, 0)
        yield Row(whole[first:end], scored - first)
        scored = end
