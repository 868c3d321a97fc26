"""What a reader sees of colours, and what every page and picture must have."""

import re
from html import unescape
from html.parser import HTMLParser
from itertools import combinations
from xml.etree import ElementTree

from meshtrain.draw.svg import DARK, INK

# How dichromats see linear RGB (Machado, Oliveira and Fernandes 2009, severity 1).
SEEN_BY = {
    "all": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopes": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopes": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "tritanopes": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}


def linear(colour: str) -> list[float]:
    channels = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return [
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels
    ]


def contrast(one: str, other: str) -> float:
    """By WCAG 2.2: 4.5 for text."""
    weights = (0.2126, 0.7152, 0.0722)
    low, high = sorted(
        sum(w * c for w, c in zip(weights, linear(x), strict=True))
        for x in (one, other)
    )
    return (high + 0.05) / (low + 0.05)


def _lab(colour: str, eyes: str) -> tuple[float, float, float]:
    r, g, b = (
        min(max(sum(a * c for a, c in zip(row, linear(colour), strict=True)), 0), 1)
        for row in SEEN_BY[eyes]
    )
    xyz = (
        (0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.9505,
        0.2126 * r + 0.7152 * g + 0.0722 * b,
        (0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.089,
    )
    x, y, z = (t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def apart(one: str, other: str, eyes: str) -> float:
    """How far two colours are apart in CIELAB; 2.3 can just be told."""
    return (
        sum(
            (a - b) ** 2
            for a, b in zip(_lab(one, eyes), _lab(other, eyes), strict=True)
        )
        ** 0.5
    )


def least_apart(colours) -> tuple[float, str, str, str]:
    pairs = combinations(dict.fromkeys(colours), 2)
    return min((apart(a, b, eyes), a, b, eyes) for a, b in pairs for eyes in SEEN_BY)


def axes(drawing: str) -> list[str]:
    """The small words of a drawing, or of all on a page, that are no numbers: the names of its axes."""
    small = re.findall(r'<text x="[^>]* font-size="11" fill="[^"]*">([^<]+)<', drawing)
    return [
        unescape(words)
        for words in small
        if not re.match(r"-?[\d.]|to \d|over \d", words)
    ]


def check_drawing(drawing: str) -> None:
    """A drawing has a text for who cannot see it, and its text a colour that turns in the dark or stands on a coloured
    cell.
    """
    root = ElementTree.fromstring(drawing)
    assert root.get("role") == "img" and root.get("aria-label")
    assert root.get("fill") in DARK
    left, top, width, height = map(float, root.get("viewBox").split())
    for box in (
        e
        for e in root.iter()
        if e.tag.endswith("rect") and "%" not in e.get("width", "%")
    ):
        x, y = float(box.get("x", 0)) - left, float(box.get("y", 0)) - top
        inside = (
            x >= 0
            and y >= 0
            and x + float(box.get("width")) <= width
            and y + float(box.get("height")) <= height
        )
        assert inside, ElementTree.tostring(box)
    texts = [e for e in root.iter() if e.tag.endswith("text")]
    assert {e.get("fill") for e in texts} <= {None, INK, *DARK} and not any(
        "fill" in e.get("style", "") for e in texts
    )


class _Elements(HTMLParser):
    """Notes unclosed elements, scripts and whatever would be fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.open, self.fetched = list[str](), list[str]()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "br", "link"):
            self.open.append(tag)
        self.fetched += [
            v or ""
            for k, v in attrs
            if k in ("src", "href") and not (v or "").startswith(("#", "data:"))
        ]
        self.fetched += [k for k, _ in attrs if k.startswith("on")] + [tag] * (
            tag in ("script", "iframe", "object")
        )

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def check_page(page: str) -> None:
    """It closes what it opens and fetches nothing; every drawing is fit to be read; what may be too wide scrolls by
    itself; it is dark where its reader's screen is.
    """
    elements = _Elements()
    elements.feed(page)
    assert (
        elements.open == []
        and elements.fetched == []
        and "@import" not in page
        and "url(http" not in page
    )
    assert (
        "@media screen and (prefers-color-scheme: dark)" in page
        and 'name="viewport"' in page
    )
    for drawing in re.findall(r"<svg.*?</svg>", page, re.S):
        check_drawing(drawing)
    assert page.count("<table>") == len(
        re.findall(r'<div class="table[^>]*><table>', page)
    )
    assert len(re.findall(r'<svg[^>]* width="', page)) == len(
        re.findall(r'<div class="wide"[^>]*><svg', page)
    )
