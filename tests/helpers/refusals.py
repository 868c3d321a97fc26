"""How a command refuses: with one sentence on standard error, nothing on standard output, and exit code 2."""

import re
from collections.abc import Callable, Sequence


def code_of(main: Callable[[Sequence[str]], int], words: Sequence[str]) -> object:
    """The exit code of a command in this process, however it ends."""
    try:
        return main(list(words))
    except SystemExit as ended:
        return ended.code


def pattern_of(sentence: str) -> str:
    """Returns the pattern of a sentence in which ` ... ` stands for any words."""
    return ".*".join(map(re.escape, sentence.split(" ... ")))


def refused(main: Callable[[Sequence[str]], int], capsys, *words: str) -> str:
    """The sentence with which a command refuses."""
    code = code_of(main, words)
    out, err = capsys.readouterr()
    assert (code, out) == (2, "") and err.startswith("meshtrain: ") and err.count("\n") == 1, err
    assert err.rstrip()[-1] in ".?", err
    return err


def tells(text: str, sentence: str) -> bool:
    """Returns whether a text holds a sentence in which ` ... ` stands for any words."""
    return re.search(pattern_of(sentence), text, re.DOTALL) is not None
