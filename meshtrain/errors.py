"""The errors that are a sentence in place of a traceback: of a user's input, of a disk that does not answer; and what goes into one."""

import contextlib
import difflib
import functools
import math
import sys
from collections.abc import Callable, Iterable

PREFIX = "meshtrain: "  # of every sentence on stderr
LINES = "\n\t"  # which a sentence of several lines keeps
LONGEST, ENDING = 200, 60  # characters of a user's value that a sentence repeats, and how many of them are its last


class ConfigError(ValueError):
    """Bad input, in one plain sentence: what, where, what is legal. The commands print it and exit with code 2."""

    def _render_traceback_(self) -> list[str]:
        """Shows a notebook the sentence, as a terminal does."""
        return [f"{PREFIX}{self}"]


class Unreadable(Exception):
    """Something cannot be read now, in one sentence, which says nothing of what is in it. The commands print it and exit with code 1.

    `what`: the sentence's first half, to stand within another one.
    """

    @property
    def what(self) -> str:
        return str(self.args[0])

    def __str__(self) -> str:
        return f"{self.what}; nothing is set aside or removed, run again once it can be read."


def not_installed(what: str, extra: str) -> ConfigError:
    """Returns the error of something that needs a library (`what` names both), with the extra that brings it."""
    return ConfigError(f"{what}, which is not installed: pip install 'meshtrain[{extra}]'.")


def refusal(error: OSError) -> str:
    """Returns the system's reason, to stand within a sentence: no space left on device."""
    return (error.strerror or str(error)).lower()


def short(value: object) -> str:
    """Returns a user's text as a sentence may repeat it: in one line, without its middle where it is huge."""
    text = str(value)
    if len(text) > LONGEST:
        text = f"{text[: LONGEST - ENDING]}…{text[-ENDING:]}"
    return printable(text)


def printable(text: str, and_also: str = "") -> str:
    """Escapes what no terminal shows: control characters, and those that turn letters round (U+202E)."""
    return "".join(c if c.isprintable() or c in and_also else ascii(c)[1:-1] for c in text)


def say(sentence: object) -> None:
    """Prints a sentence on stderr. A full disk or a closed terminal ends nothing."""
    with contextlib.suppress(OSError):
        print(f"{PREFIX}{printable(str(sentence), LINES)}", file=sys.stderr)


def nearest(word: str, legal: Iterable[str], shown: Callable[[str], object] = str) -> str:
    """Returns the end of a sentence on the legal word nearest to a wrong one, as it is `shown`; nothing if none is near."""
    near = difflib.get_close_matches(word, list(legal), n=1, cutoff=0.6)
    return f"; did you mean {shown(near[0])}?" if near else ""


@functools.lru_cache(maxsize=4096)
def divisors(n: int) -> tuple[int, ...]:
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return (*small, *(n // d for d in reversed(small) if d * d != n))


def listed_divisors(n: int) -> str:
    """Returns the divisors of n for a sentence; of many, the small ones and n itself."""
    all_divisors = divisors(n)
    return ", ".join(map(str, all_divisors if len(all_divisors) <= 12 else [*all_divisors[:11], "...", n]))
