"""Links of built pages: what each page has, and which lead nowhere."""

from collections import defaultdict
from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote


class HtmlPage(HTMLParser):
    """The attributes of a page by name; what a script builds while one searches, and code that is shown, are none."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: dict[str, list[str]] = defaultdict(list)
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            self.found[name].append(value or "")

    @property
    def links(self) -> list[str]:
        return [*self.found["href"], *self.found["src"]]


def broken(
    pages: Mapping[Path, str], *outside: str
) -> tuple[list[tuple[str, str]], int]:
    """Returns the links that lead to no page, file or anchor, each with its page, and how many were followed; not those
    that begin as `outside`.
    """
    read = {path: HtmlPage(page) for path, page in pages.items()}
    anchors = {
        path: {*page.found["id"], *page.found["name"]} for path, page in read.items()
    }
    lost, followed = [], 0
    for path, page in read.items():
        for link in page.links:
            if link.startswith(outside):
                continue
            followed += 1
            file, _, anchor = unquote(link).partition("#")
            target = (path.parent / file).resolve() if file else path
            target = target / "index.html" if target.is_dir() else target
            known = (
                anchor in anchors.get(target, ()) or not anchor or anchor == "__skip"
            )
            if not target.is_file() or not known:
                lost.append((path.name, link))
    return lost, followed
