"""The errors that are a sentence in place of a traceback: of a user's input, of a disk that does not answer; and what
goes into one.
"""

import contextlib
import difflib
import functools
import math
import re
import sys
from collections.abc import Callable, Iterable

PREFIX = "meshtrain: "  # of every sentence on stderr
LINES = "\n\t"  # which a sentence of several lines keeps
# characters of a user's value that a sentence repeats, and how many of them are its last
LONGEST = 200
ENDING = 60


# Texts that log somebody in, each behind what comes before it: a URL's user and password, a value under a telling name,
# tokens by their shape. What begins with $ is a variable of the environment's.
_SECRETS = re.compile(
    r"""(://)[^/\s@'"$][^/\s@'"]*(?=@)
    | ((?:token|secret|passw(?:or)?d|pwd|passphrase|credentials?|signature|\bsig|[-_]key|[?&]key|apikey)["']?=["']?)
        [^\s&"',\]$][^\s&"',\]]*
    | (authorization["']?:\s*(?:(?:bearer|basic|token)\s+|(?!bearer|basic|token))|\bbearer\s+)[^\s"'$][^\s"',\]]*
    | (\s--[\w-]*(?:token|secret|passw(?:or)?d|key)\s+|\s(?:-u|--user)[\s=]+["']?[^\s:"'$]+:)[^\s"'$-][^\s"']*
    | ()(?:\bhf_[a-z0-9]{20,}|\bgh[opsru]_[a-z0-9]{20,}|\bgithub_pat_\w{20,}|\bglpat-[\w-]{16,}
        |\bsk-(?:proj-|ant-\w+-)?[a-z0-9]{20,}|\bxox[a-z]-[\w-]{8,}|\bAKIA[0-9A-Z]{16}|\bAIza[\w-]{30,}
        |\beyJ[\w-]{16,}\.[\w.-]+)""",
    re.VERBOSE | re.IGNORECASE,
)
# Services whose webhooks ask for no password: the rest of the path is one.
_WEBHOOK = re.compile(
    r"""(\w+://[^\s'"]*?/(?:services|hooks?|webhooks?|webhookb2|workflows|bot[0-9]+)[/:])[^\s'"\],]+"""
)
_SECRET_NAME = re.compile(
    r"(^|_)(token|secret|passwd|password|credentials?|webhook_url|(api|access|auth|private)_?key)(_|$)",
    re.IGNORECASE,
)
_SPECIAL_TOKEN = re.compile(
    "(pad|eos|bos|unk|mask|sep|cls|special|end)_token", re.IGNORECASE
)


class ConfigError(ValueError):
    """Bad input, in one plain sentence: what, where, what is legal. The commands print it and exit with code 2."""

    def _render_traceback_(self) -> list[str]:
        """Shows a notebook the sentence, as a terminal does."""
        return [f"{PREFIX}{self}"]


class PortTaken(ConfigError):
    """Something else listens where the first process is to."""


class Unreadable(Exception):
    """Something cannot be read now, in one sentence, which says nothing of what is in it.

    The commands print it and exit with code 1.

    `what`: the sentence's first half, to stand within another one.
    """

    @property
    def what(self) -> str:
        return str(self.args[0])

    def __str__(self) -> str:
        return f"{self.what}; nothing is set aside or removed, run again once it can be read."


def not_installed(what: str, extra: str, libraries: int = 1) -> ConfigError:
    """Returns the error of something that needs a library or several (`what` names both), with the extra that brings
    them.
    """
    return ConfigError(
        f"{what}, which {'is' if libraries == 1 else 'are'} not installed: {install_command(extra)}."
    )


def install_command(extra: str) -> str:
    """Returns what brings an extra, to stand within a sentence. The package index has another project's `meshtrain`."""
    return f"pip install -e '.[{extra}]' in the checkout of meshtrain"


def refusal(error: OSError) -> str:
    """Returns the system's reason, to stand within a sentence: no space left on device."""
    return (error.strerror or str(error)).lower()


def short(value: object) -> str:
    """Returns a user's text as a sentence may repeat it: in one line, without secrets, and without its middle where it
    is huge.
    """
    text = masked(str(value))
    if len(text) > LONGEST:
        text = f"{text[: LONGEST - ENDING]}…{text[-ENDING:]}"
    return printable(text)


def masked(text: str) -> str:
    """Returns a text with … in the place of each secret in it."""
    return _WEBHOOK.sub(
        r"\1…",
        _SECRETS.sub(lambda found: next(filter(None, found.groups()), "") + "…", text),
    )


def names_secret(key: str) -> bool:
    """Returns whether a key's name says that its value is a secret."""
    return _SECRET_NAME.search(key) is not None and _SPECIAL_TOKEN.search(key) is None


def printable(text: str, and_also: str = "") -> str:
    """Escapes what no terminal shows: control characters, and those that turn letters round (U+202E)."""
    return "".join(
        c if c.isprintable() or c in and_also else ascii(c)[1:-1] for c in text
    )


def say(sentence: object) -> None:
    """Prints a sentence on stderr. A full disk or a closed terminal ends nothing."""
    with contextlib.suppress(OSError):
        print(f"{PREFIX}{printable(str(sentence), LINES)}", file=sys.stderr)


def nearest(
    word: str, legal: Iterable[str], shown: Callable[[str], object] = str
) -> str:
    """Returns the end of a sentence on the legal word nearest to a wrong one, as it is `shown`; nothing if none is
    near.
    """
    spellings = {name.casefold(): name for name in legal}
    near = difflib.get_close_matches(word.casefold(), spellings, n=1, cutoff=0.6)
    if near:
        return f"; did you mean {shown(spellings[near[0]])}?"
    return ""


@functools.lru_cache(maxsize=4096)
def divisors(n: int) -> tuple[int, ...]:
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    large = [n // d for d in reversed(small) if d * d != n]
    return (*small, *large)


def listed_divisors(n: int) -> str:
    """Returns the divisors of n for a sentence; of many, the small ones and n itself."""
    all_divisors = divisors(n)
    return ", ".join(
        map(
            str,
            all_divisors if len(all_divisors) <= 12 else [*all_divisors[:11], "...", n],
        )
    )


def name_of(function: object) -> str:
    """Returns the name of a function, for a sentence."""
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return name.rpartition("<locals>.")[2]
