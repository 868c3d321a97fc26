"""The one error that a user's input may cause: a sentence, not a traceback; what goes into such a sentence, and how it is said."""

import difflib
import math
import sys
from collections.abc import Callable, Iterable

PREFIX = "meshtrain: "  # of every sentence on stderr
LONGEST, ENDING = 200, 60  # characters of a user's value that a sentence repeats, and how many of them are its last


class ConfigError(ValueError):
    """Bad input, in one plain sentence: what, where, what is legal. The commands print it and exit with code 2."""

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows of it: the sentence, as a terminal does."""
        return [f"{PREFIX}{self}"]


def refusal(error: OSError) -> str:
    """What the system said, to stand within a sentence: no space left on device."""
    return (error.strerror or str(error)).lower()


def short(value: object) -> str:
    """A user's text as a sentence may repeat it: in one line, its middle left out where it is huge."""
    text = str(value)
    if len(text) > LONGEST:
        text = f"{text[: LONGEST - ENDING]}…{text[-ENDING:]}"
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def say(sentence: object) -> None:
    """To whoever started the command, on stderr: what it did or could not do."""
    print(f"{PREFIX}{sentence}", file=sys.stderr)


def nearest(word: str, legal: Iterable[str], shown: Callable[[str], object] = str) -> str:
    """How a sentence ends on the right spelling that is nearest to a wrong one, as it is `shown`; nothing if none is near."""
    near = difflib.get_close_matches(word, list(legal), n=1, cutoff=0.5)
    return f"; did you mean {shown(near[0])}?" if near else ""


def divisors(n: int) -> str:
    """The divisors of n, for a sentence; of many, the small ones and n itself."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    found = small + [n // d for d in reversed(small) if d * d != n]
    return ", ".join(map(str, found if len(found) <= 12 else [*found[:11], "...", n]))
