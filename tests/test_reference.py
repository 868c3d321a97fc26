"""The API reference: every public module and name says what it is, every page is built, every link leads somewhere."""

import html
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from documented import MODULES, ROOT, docstrings
from html_links import broken

import meshtrain as mt

# A drawing, a table or code: columns, or what draws lines.
COLUMNS = re.compile(r"\S {2,}\S|[─│┌┐└┘├┤┬┴►◄╰╭]")
# What Markdown may take for its own and lose: a word, a comparison, a heading, a column.
MEANS = re.compile(r"\w+|[<>#|]")


def test_every_module_says_what_it_is():
    assert not set(MODULES) - {path for path, name, _ in docstrings() if not name}


def test_every_public_name_says_what_it_is():
    for name in mt.__all__:
        found = getattr(getattr(mt, name), "function", getattr(mt, name))
        # A dataclass that says nothing is given its signature.
        assert found.__doc__ and not found.__doc__.startswith(f"{found.__name__}("), (
            name
        )


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def text_of(page: str) -> str:
    return html.unescape(re.sub(r"<[^>]+>", "", page))


@pytest.mark.thorough
def test_docstrings_are_shown_as_they_are_written():
    to_html = pytest.importorskip("pdoc.render_helpers").to_html
    wrong = {}
    for path, name, text in docstrings():
        shown = to_html(text)
        code = text_of("\n".join(re.findall(r"<pre>.*?</pre>", shown, re.DOTALL)))
        loose = [
            line
            for line in text.splitlines()
            if COLUMNS.search(line) and line.strip() not in code
        ]
        if loose or MEANS.findall(text) != MEANS.findall(text_of(shown)):
            wrong[f"{relative(path)} {name}".strip()] = (
                loose or "not all of it is shown"
            )
    assert not wrong, (
        "a drawing, a table or code is indented by 4 more than some line after the docstring's first"
    )


# --- the pages

BUILDING = """
import json, sys
from pathlib import Path

def refuse(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo"):
        raise RuntimeError(f"{event} {arguments}")

sys.addaudithook(refuse)
from experiments.api_reference import build
pages = build(Path(sys.argv[1]), sources=False)  # which take most of the time, and have no links
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized()
print(json.dumps(pages))
"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """The built pages by path: no warning, no backend and no network."""
    pytest.importorskip("pdoc")
    directory = tmp_path_factory.mktemp("reference")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", BUILDING, str(directory)]
    ended = subprocess.run(
        command,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return {path.resolve(): path.read_text() for path in directory.rglob("*.html")}


@pytest.mark.thorough
def test_every_module_has_a_page_and_every_link_leads_somewhere(pages):
    shown = {
        match[1]
        for page in pages.values()
        if (match := re.search(r"<title>(meshtrain\S*) API", page))
    }
    public = (
        path for path in map(relative, MODULES) if not path.endswith("__main__.py")
    )
    assert shown == {
        path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for path in public
    }

    lost, followed = broken(pages, "data:", "https://pdoc.dev")
    assert not lost and followed > 10 * len(pages)
