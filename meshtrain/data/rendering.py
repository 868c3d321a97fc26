"""Renders a chat template in a process of its own, which `template.ChatTemplate` starts, feeds and, if need be, sees killed.

A template comes with a model from anywhere and is a program. Jinja's sandbox keeps it from Python's insides, but not from a loop
without end or an allocation without bounds, and no exception stops what runs in C. So the kernel does: this process may compute for a
while at a request (a timer whose signal kills it), have so much memory and open no file (resource limits). It reads and writes
lines of JSON, and imports nothing of ours, so that it starts in a tenth of a second:

    {"template": ..., "now": seconds, "seconds": limits, "memory":, "characters":} -> {"marks": whether it has {% generation %}}
    {"messages": [...], "values": {...}, "cuts": [[count, prompt], ...]} -> {"texts": [...], "spans": [[begin, end], ...]}

A cut renders the first `count` messages, with `prompt` also the beginning of an answer; spans are of the first text, in characters.
{"problem": ...}: the template does not take these messages; {"refused": ...}: it does what none may.
"""

import contextlib
import json
import re
import resource
import signal
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from itertools import islice
from typing import Any

import jinja2

# Imported now, since no file can be opened later.
import jinja2.debug
import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes

PRIVATE = tuple(
    map(chr, range(0xF0000, 0xF0400))
)  # characters of no script, of which two that a request has not are its marks


class Generation(jinja2.ext.Extension):
    """{% generation %} ... {% endgeneration %}: what stands between is put between two marks."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        self.environment.used = True  # type: ignore[attr-defined]
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Callable[[], str]) -> str:
        begin, end = self.environment.marks  # type: ignore[attr-defined]
        return f"{begin}{caller()}{end}"


class Namespace(jinja2.utils.Namespace):
    """Without names that begin with an underscore, by which Python's insides are reached."""

    def __init__(*given: Any, **values: Any) -> None:
        self: Any = given[0]
        jinja2.utils.Namespace.__init__(self)
        for name, value in dict(*given[1:], **values).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise jinja2.exceptions.SecurityError(f"the name {name} in a namespace")
        super().__setitem__(name, value)


def no_file(name: str) -> str:
    raise jinja2.exceptions.SecurityError(f"the file {name}")


def environment(now: float) -> jinja2.Environment:
    """What chat templates expect, as transformers' documentation says ("Writing a chat template"): blocks trimmed, and these functions.

    `strftime_now` tells a time that the input decides, so that the same input becomes the same tokens on any day.
    """
    made = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Generation, jinja2.ext.loopcontrols],
        loader=jinja2.FunctionLoader(no_file),
    )
    made.extend(marks=("", ""), used=False)
    made.filters["tojson"] = lambda value, ensure_ascii=False, indent=None, separators=None, sort_keys=False: (
        json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    )

    def raise_exception(message: str) -> None:
        raise jinja2.exceptions.TemplateError(message)

    made.globals.update(
        raise_exception=raise_exception,
        strftime_now=lambda form: datetime.fromtimestamp(now, UTC).strftime(form),
        namespace=Namespace,
    )
    del made.globals["lipsum"]
    return made


def unmarked(text: str, begin: str, end: str) -> tuple[str, list[tuple[int, int]]]:
    """A text without its marks, and what stood between them: characters [begin, end)."""
    kept, spans, depth, at, began = [], [], 0, 0, 0
    for piece in re.split(f"([{begin}{end}])", text):
        if piece not in (begin, end):
            kept.append(piece)
            at += len(piece)
            continue
        depth += 1 if piece == begin else -1
        if piece == begin and depth == 1:
            began = at
        elif piece == end and depth == 0 and at > began:
            spans.append((began, at))
    return "".join(kept), spans


def rendered(template: jinja2.Template, request: dict[str, Any], begin: str, end: str, most: int) -> dict[str, Any]:
    texts: list[str] = []
    spans: list[tuple[int, int]] = []
    for count, prompt in request["cuts"]:
        # Only of the first are spans asked for.
        template.environment.marks = ("", "") if texts else (begin, end)  # type: ignore[attr-defined]
        text = template.render(messages=request["messages"][:count], add_generation_prompt=prompt, **request["values"])
        if len(text) > most:
            return {"refused": f"makes more than {most:,} characters"}
        if not texts:
            text, spans = unmarked(text, begin, end)
        texts.append(text)
    return {"texts": texts, "spans": spans}


def answer(first: dict[str, Any], compiled: jinja2.Template, line: str) -> dict[str, Any]:
    """What is said to one request, whatever the template does."""
    try:
        begin, end = islice((mark for mark in PRIVATE if mark not in line and mark not in first["template"]), 2)
        return rendered(compiled, json.loads(line), begin, end, first["characters"])
    except MemoryError:
        return {"refused": f"needs more than {first['memory'] >> 20} MiB of memory"}
    except RecursionError:
        return {"refused": "calls itself without end"}
    except jinja2.exceptions.SecurityError as error:
        return {"refused": f"asks for what no template may have ({error})"}
    except Exception as error:
        return {"problem": str(error) or type(error).__name__}


def limit(kind: int, most: int) -> None:
    """Sets a resource limit, where the system has it."""
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(kind, (most, resource.getrlimit(kind)[1]))


def main() -> None:
    def say(said: dict[str, Any]) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(said, ensure_ascii=False), flush=True)

    sys.stdin.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
    sys.stdout.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
    first = json.loads(sys.stdin.readline())
    made = environment(first["now"])
    # Python opens files for what it uses for the first time: codecs of strings, the calendar.
    made.from_string("{{ '\\n' ~ strftime_now('%B') ~ messages | tojson }}").render(messages=[])
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    limit(resource.RLIMIT_AS, first["memory"])
    limit(resource.RLIMIT_NOFILE, 0)
    limit(resource.RLIMIT_FSIZE, 0)
    # Compiling computes what is constant. The signal's default is the end of this process.
    signal.setitimer(signal.ITIMER_PROF, first["seconds"])
    try:
        compiled = made.from_string(first["template"])
    except jinja2.TemplateSyntaxError as error:
        return say({"refused": f"is not Jinja (line {error.lineno}: {error.message})"})
    except (MemoryError, RecursionError, jinja2.TemplateError) as error:
        return say({"refused": f"cannot be compiled ({error or type(error).__name__})"})
    say({"marks": made.used})  # type: ignore[attr-defined]
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, first["seconds"])
        say(answer(first, compiled, line))


if __name__ == "__main__":
    main()
