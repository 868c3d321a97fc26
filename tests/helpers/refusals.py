"""How a command refuses: with one sentence on standard error, nothing on standard output, and exit code 2."""

import re
from collections.abc import Callable, Sequence


def code_of(main: Callable[[Sequence[str]], int], words: Sequence[str]) -> object:
    """The exit code of a command in this process, however it ends."""
    try:
        return main(list(words))
    except SystemExit as ended:
        return ended.code


def pattern_of(*parts: str) -> str:
    """Returns the pattern of these parts in this order, each as whole words; ` ... ` in one stands for any words."""

    def whole(piece: str) -> str:
        before = r"(?<!\w)" * piece[0].isalnum()
        after = r"(?!\w)" * piece[-1].isalnum()
        return before + re.escape(piece) + after

    pieces = " ... ".join(parts).removesuffix(" ...").split(" ... ")
    return ".*?".join(map(whole, pieces))


def tells(text: str, *parts: str) -> bool:
    """Returns whether a text has these parts (a key, its value, what is legal) in this order, in whatever wording."""
    return re.search(pattern_of(*parts), text) is not None


def refused(main: Callable[[Sequence[str]], int], capsys, *words: str) -> str:
    """The sentence with which a command refuses."""
    code = code_of(main, words)
    out, err = capsys.readouterr()
    assert (
        (code, out) == (2, "")
        and err.startswith("meshtrain: ")
        and err.count("\n") == 1
    ), err
    assert err.rstrip()[-1] in ".?", err
    return err
