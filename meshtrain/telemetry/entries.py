"""Where alerts may go, as `telemetry.alerts` names it.

    log                  a sentence on stderr
    file                 a line of RUN/alerts.jsonl
    webhook:URL          JSON, by POST
    command:WORD WORD    a program, which finds the JSON on its standard input

Imports no JAX and starts nothing, so that a config can be checked anywhere.
"""

import shlex
from typing import Literal, NamedTuple, cast
from urllib.parse import urlsplit

from meshtrain.errors import ConfigError, nearest, short

Kind = Literal["log", "file", "webhook", "command"]
PLAIN: tuple[Kind, ...] = ("log", "file")
ADDRESSED: tuple[Kind, ...] = ("webhook", "command")  # followed by a colon, and by where to


class Entry(NamedTuple):
    """One place for alerts. `target`: the URL, or the command's words in one line; empty for the plain ones."""

    kind: Kind
    target: str = ""


def check(entry: str) -> Entry:
    """One text of `telemetry.alerts`; ConfigError, a sentence, if no alert could go there."""
    name, colon, target = entry.partition(":")
    if name in PLAIN and not colon:
        return Entry(cast(Kind, name))
    where = f"telemetry.alerts has {short(repr(entry))}"
    if name in PLAIN:
        raise ConfigError(f"{where}; {name} takes nothing after it, so write {name} alone.")
    if name not in ADDRESSED:
        legal = "legal are log, file, webhook:URL and command:WORDS"
        raise ConfigError(f"{where}; {legal}{nearest(name, (*PLAIN, *ADDRESSED)) or '.'}")
    problem = _url_problem(target) if name == "webhook" else _words_problem(target)
    if problem:
        raise ConfigError(f"{where}; {problem}.")
    return Entry(cast(Kind, name), target)


def _url_problem(url: str) -> str | None:
    """Why nothing can be posted there; None if it can."""
    legal = "a webhook is an address such as webhook:https://host/path"
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        return legal
    if parts.scheme not in ("http", "https") or not host or port == 0 or not url.isascii() or " " in url:
        return legal
    return None


def _words_problem(words: str) -> str | None:
    """Why they are no command; None if they are."""
    try:
        found = shlex.split(words)
    except ValueError:
        return "a quotation mark of the command is not closed"
    return None if found and found[0] else "a command is missing after the colon, as in command:mail -s alert me"
