"""Pages that are made when the documentation is built, from what holds the facts; a hook of mkdocs.

    README.md, CONTRIBUTING.md, CHANGELOG.md, SECURITY.md, experiments/README.md    as pages, with links that lead to pages
    the lines of the config's keys, the parsers of the commands                      tables in place of <!-- generated: ... -->
    docstrings                                                                       the API reference in api/, by pdoc

A fact stays where it is; what is made here has no source of its own.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # for experiments

from experiments import api_reference  # noqa: E402
from meshtrain import completion, keys  # noqa: E402

# Files of the repository that are pages, and pictures that they show.
PAGES = {
    "README.md": "index.md",
    "experiments/README.md": "measurements.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
}
PICTURES = {
    name: name for name in ("experiments/interleaved.svg", "experiments/transfer.svg")
}
ALONE = ("LICENSE", "CITATION.cff")  # linked to in the repository, but no pages
served = False


def on_startup(command: str, **_: Any) -> None:
    """Leaves the API reference out of `mkdocs serve`, which would make it at every change."""
    global served
    served = command == "serve"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages and pictures that lie elsewhere in the repository, and the API reference."""
    for source, page in PAGES.items():
        files.append(
            File.generated(
                config, page, content=_with_links((ROOT / source).read_text())
            )
        )
    for source, picture in PICTURES.items():
        files.append(File.generated(config, picture, abs_src_path=str(ROOT / source)))
    if served:
        files.append(
            File.generated(config, "api/index.html", content="left out of mkdocs serve")
        )
        return files
    with tempfile.TemporaryDirectory() as directory:
        api_reference.build(Path(directory), sources=False)
        for path in sorted(
            path for path in Path(directory).rglob("*") if path.is_file()
        ):
            name = f"api/{path.relative_to(directory).as_posix()}"
            files.append(File.generated(config, name, content=path.read_bytes()))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Puts tables in place of the comments that ask for them."""
    for word, made in (("keys", keys.markdown), ("commands", completion.markdown)):
        comment = f"<!-- generated: {word} -->"
        if comment in markdown:
            markdown = markdown.replace(comment, made())
    return markdown


def _with_links(text: str) -> str:
    """Returns the text of a file of the repository with links to files as links to pages."""
    text = text.replace("](docs/", "](").replace("](../docs/", "](")
    for source, page in PAGES.items():
        text = text.replace(f"]({source})", f"]({page})")
    for name in ALONE:
        for words in ("how to cite", "license"):
            text = text.replace(f"[{words}]({name})", f"{words}: `{name}`")
    return text
