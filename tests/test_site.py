"""The pages of the documentation are built without a warning and without a network, and every link leads somewhere."""

import os
import re
import subprocess
import sys

import pytest
from documented import GUIDES, ROOT
from html_links import HtmlPage, broken

from meshtrain.commands import COMMANDS
from meshtrain.config import Config
from meshtrain.config.key import keys

BUILDING = """
import sys

def refuse(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo"):
        raise RuntimeError(f"{event} {arguments}")

sys.addaudithook(refuse)
from mkdocs.__main__ import cli
cli(["build", "--strict", "--quiet", "--site-dir", sys.argv[1]])
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("material", reason="needs the extra docs")
    directory = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-c", BUILDING, str(directory)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return directory


@pytest.mark.thorough
def test_every_page_is_built_and_every_link_leads_somewhere(site):
    pages = {
        path.resolve(): path.read_text()
        for path in site.rglob("*.html")
        if path.name != "404.html"
    }
    for name in GUIDES:
        page = (
            site
            / (
                "."
                if name == "README.md"
                else name.removeprefix("docs/").removesuffix(".md")
            )
            / "index.html"
        )
        assert page.resolve() in pages, name
    # A blank line within a table ends it, and the rows behind it are shown as they are written.
    assert not [path for path, page in pages.items() if "<p>| " in page]
    lost, followed = broken(pages, "data:", "https://")
    assert not lost and followed > 1000
    # Nothing that a reader's browser would fetch from elsewhere.
    assert not [
        link
        for page in pages.values()
        for link in HtmlPage(page).found["src"]
        if link.startswith("http")
    ]


@pytest.mark.thorough
def test_a_record_that_is_wider_than_a_page_is_wrapped(site):
    style = (site / "pages.css").read_text()
    assert ".language-jsonl pre > code { white-space: pre-wrap; }" in style
    assert 'class="language-jsonl ' in (site / "fine-tuning/index.html").read_text()


@pytest.mark.thorough
def test_the_references_have_every_key_and_command(site):
    configuration, commands = (
        (site / name / "index.html").read_text()
        for name in ("configuration", "commands")
    )
    anchors = HtmlPage(configuration).found["id"]
    assert set(anchors) >= set(keys(Config)), "a key without an anchor"
    twice = [anchor for anchor in anchors if re.fullmatch(r"[a-z].*_1", anchor)]
    assert not twice, "a section stands in two tables"
    assert set(HtmlPage(commands).found["id"]) >= {
        f"meshtrain-{name}" for name in COMMANDS
    }
