"""Whether a notebook prints what it printed when it was committed."""

import re
from collections import Counter
from html.parser import HTMLParser
from itertools import zip_longest
from urllib.parse import unquote

from experiments.notebooks.notebook import BINARY, Output
from experiments.notebooks.source import Cell

# Of a number with a decimal point: sums in another order, another compiler
RELATIVE = 1e-3
SHAPES = {"rect", "circle", "ellipse", "line", "polyline", "polygon", "path"}
# A whole number, with commas between thousands or not, or one with decimals; none within a word, a version or another
# number.
_NUMBER = re.compile(
    r"(?<![\w.])([-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?(?:[eE][-+]?\d+)?)(?!\.?\d)"
)

# Of a line of the source only the file counts: what stands above it may be edited.
_LINE = re.compile(r"\.py:\d+\b")


def differences(
    cells: list[Cell], committed: list[list[Output]], executed: list[list[Output]]
) -> list[str]:
    """Of each cell the first difference that matters, as a sentence; nothing if all agree.

    Text is compared word by word, of text/html and SVG what a reader sees, and how many shapes of each kind there are;
    of PNG and JPEG only that one is there. Whole numbers agree exactly, those with decimals within RELATIVE or one unit
    of the last digit printed. Of a cell that varies only the number and the kinds of its outputs count.
    """
    found = []
    for position, (cell, olds, news) in enumerate(
        zip(cells, committed, executed, strict=True), 1
    ):
        kinds = [[_kind(output) for output in side] for side in (olds, news)]
        if kinds[0] != kinds[1]:
            found.append(
                f"cell {position} gave {_listed(kinds[0])}, gives {_listed(kinds[1])}."
            )
        elif not cell.varies:
            pairs = (_difference(old, new) for old, new in zip(olds, news, strict=True))
            found += [
                f"cell {position} {text}"
                for text in [next(filter(None, pairs), None)]
                if text
            ]
    return found


def _kind(output: Output) -> str:
    if output["output_type"] == "stream":
        return output["name"]
    return "+".join(sorted(output["data"])) + (
        " as result" if output["output_type"] == "execute_result" else ""
    )


def _listed(kinds: list[str]) -> str:
    return ", ".join(kinds) or "nothing"


def _difference(old: Output, new: Output) -> str | None:
    if old["output_type"] == "stream":
        return _of_texts(old["text"], new["text"])
    for kind in sorted(old["data"].keys() - BINARY):
        texts = old["data"][kind], new["data"][kind]
        if kind in ("text/html", "image/svg+xml"):
            seen = [_Seen(text) for text in texts]
            for shape in sorted(SHAPES):
                counts = [s.shapes[shape] for s in seen]
                if counts[0] != counts[1]:
                    return f"drew {counts[0]} × {shape}, draws {counts[1]}."
            texts = seen[0].text, seen[1].text
        if difference := _of_texts(*texts):
            return difference
    return None


def _of_texts(old: str, new: str) -> str | None:
    """The first lines that differ; blanks count only as the ends of words, since a column is as wide as its numbers."""
    lines = (
        [line for text_line in text.splitlines() if (line := text_line.strip())]
        for text in (old, new)
    )
    for one, other in zip_longest(*lines, fillvalue=""):
        if not _agree(one, other):
            return f"printed «{one}», prints «{other}»."
    return None


def _agree(old: str, new: str) -> bool:
    old, new = (_LINE.sub(".py", text) for text in (old, new))
    olds, news = _NUMBER.split(old), _NUMBER.split(new)
    if len(olds) != len(news):
        return False
    # Odd are the numbers, even what stands between them.
    words = all(
        a.split() == b.split() for a, b in zip(olds[::2], news[::2], strict=True)
    )
    return words and all(map(_near, olds[1::2], news[1::2]))


def _near(old: str, new: str) -> bool:
    if old == new:
        return True
    units = []
    for text in (old, new):
        whole = re.fullmatch(r"[-+\d,]+", text)
        mantissa, _, exponent = text.lower().partition("e")
        if whole:
            return False
        units.append(10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2])))
    # Of 2. and 3. no digit behind the point is printed: they are whole.
    if min(units) == max(units) == 1 and old.endswith(".") and new.endswith("."):
        return False
    a, b = (float(text.replace(",", "")) for text in (old, new))
    return abs(a - b) <= max(RELATIVE * max(abs(a), abs(b)), min(units)) * (1 + 1e-9)


class _Seen(HTMLParser):
    """What a reader sees of HTML or SVG: its text, a line for each piece, and how many shapes of each kind."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.shapes: Counter[str] = Counter()
        self._pieces: list[str] = []
        self._hidden = False
        self.feed(text)
        self.close()
        self.text = "\n".join(self._pieces)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._hidden = tag in ("style", "script")
        if tag in SHAPES:
            self.shapes[tag] += 1
        drawn = dict(attrs).get("src") or ""
        if tag == "img" and drawn.startswith("data:image/svg+xml,"):
            within = _Seen(unquote(drawn.partition(",")[2]))
            self.shapes += within.shapes
            self._pieces.append(within.text)

    def handle_endtag(self, tag: str) -> None:
        self._hidden = False

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self._pieces.append(data)
