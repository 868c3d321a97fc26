"""What a sentence repeats of a user's text: one line, whole where it can be, its middle left out where it is huge."""

import pytest

from meshtrain.config import short
from meshtrain.errors import LONGEST


@pytest.mark.parametrize("text", ["", "runs/x", "läufe/日本", "a" * LONGEST])
def test_what_is_readable_is_repeated_as_it_is(text):
    assert short(text) == text


def test_of_a_huge_text_the_ends_stay():
    shown = short("begin" + "9" * 5000 + "end")
    assert (
        len(shown) == LONGEST + 1
        and shown.startswith("begin999")
        and "9…9" in shown
        and shown.endswith("999end")
    )


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\nb", r"a\nb"),
        ("a\0b", r"a\x00b"),
        ("\udcff", r"\udcff"),
        ("\u2028", r"\u2028"),
        ("a\u202eb", r"a\u202eb"),
    ],
)
def test_a_sentence_stays_one_line_that_every_terminal_takes(text, shown):
    assert short(text) == shown
