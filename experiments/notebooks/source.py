"""Reads a notebook's source, a script in jupytext's percent format, and says what it lacks."""

import ast
import re
from dataclasses import dataclass
from pathlib import Path

from meshtrain.errors import ConfigError, nearest

SOURCES = Path(__file__).parent
NOTEBOOKS = SOURCES.parent
LAST_HEADING = "## Things to try"
# Committed with their outputs; the others are built
KEPT = ("4_pipelines", "12_fine_tuning")
VARIES = "varies"  # the tag of a cell that may print anything
_MARKER = re.compile(r'# %%(?P<markdown> \[markdown\])?(?: tags=\["(?P<tag>\w+)"\])?')


@dataclass(frozen=True)
class Cell:
    """A cell: Markdown or code, without empty lines around it."""

    kind: str  # "markdown" or "code"
    text: str
    varies: bool = False


def names() -> list[str]:
    """The names of all notebooks, `1_mesh`, by their numbers."""
    found = {path.stem for path in SOURCES.glob("[0-9]*.py")}
    return sorted(found, key=lambda name: (int(re.match("[0-9]*", name)[0] or 0), name))


def read(text: str) -> list[Cell]:
    """The cells of a source.

    Raises ConfigError for what jupytext might read in another way than is meant here: a text before the first cell,
    other marks behind `# %%`, a line of Markdown that is no comment.
    """
    cells: list[Cell] = []
    lines: list[str] = []
    marker: re.Match | None = None
    # One mark more, so that the last cell ends as the others do.
    for number, line in enumerate([*text.splitlines(), "# %%"], 1):
        if not line.startswith("# %%"):
            lines.append(line)
            continue
        if marker:
            cells.append(_cell(marker, lines, number - len(lines)))
        elif any(map(str.strip, lines)):
            raise ConfigError("line 1: a source begins with `# %% [markdown]`.")
        marker, lines = _MARKER.fullmatch(line.rstrip()), []
        if marker is None:
            raise ConfigError(
                f'line {number}: {line} is not one of `# %%`, `# %% [markdown]`, `# %% tags=["{VARIES}"]`.'
            )
        if marker["tag"] and marker["tag"] != VARIES:
            ending = nearest(marker["tag"], [VARIES]) or f"; legal is {VARIES}."
            raise ConfigError(f"line {number}: there is no tag {marker['tag']}{ending}")
    return cells


def _cell(marker: re.Match, lines: list[str], first: int) -> Cell:
    """The cell of these lines, the first of which has this number in its file."""
    if marker["markdown"] is None:
        return Cell(
            "code", "\n".join(lines).strip("\n"), varies=marker["tag"] == VARIES
        )
    for number, line in enumerate(lines, first):
        if line and not re.match("#( |$)", line):
            raise ConfigError(
                f"line {number}: a line of Markdown is a comment, `# ...`."
            )
    return Cell("markdown", "\n".join(line[2:] for line in lines).strip("\n"))


def lacks(name: str, cells: list[Cell]) -> list[str]:
    """What the notebook of this name should have and has not, a sentence each.

    A section that shows anything asserts something.
    """
    found = []
    if not (number := re.match("([0-9]+)_[a-z0-9_]+$", name)):
        found.append("a name is a number and a word, as in 1_mesh.")
    title, _, told = cells[0].text.partition("\n") if cells else ("", "", "")
    expected = f"# {number[1] if number else 'N'} "
    if (
        not cells
        or cells[0].kind != "markdown"
        or not title.startswith(expected)
        or not told.strip()
    ):
        found.append(
            f"the first cell is no Markdown of a title `{expected}...` and what the notebook tells."
        )
    if (
        not cells
        or cells[-1].kind != "markdown"
        or LAST_HEADING not in cells[-1].text.splitlines()
    ):
        found.append(f"the last cell is no Markdown with the heading `{LAST_HEADING}`.")
    section = ""
    shows = False
    asserts = False
    for position, cell in enumerate([*cells, Cell("markdown", "## The end")], 1):
        if not cell.text.strip():
            found.append(f"cell {position} is empty.")
        elif cell.kind == "markdown":
            if headings := [
                line for line in cell.text.splitlines() if line.startswith("## ")
            ]:
                if section and shows and not asserts and name not in KEPT:
                    found.append(f"no cell of {section} asserts anything.")
                section = headings[-1]
                shows = False
                asserts = False
        else:
            try:
                tree = ast.parse(cell.text)
            except SyntaxError as error:
                found.append(
                    f"cell {position}, line {error.lineno} is no Python: {error.msg}."
                )
                continue
            shows |= any(isinstance(node, ast.Expr) for node in tree.body)
            asserts |= any(map(_asserts, ast.walk(tree)))
    return found


def _asserts(node: ast.AST) -> bool:
    """Whether a node is an assertion, or one of NumPy's."""
    return isinstance(node, ast.Assert) or (
        isinstance(node, ast.Attribute) and node.attr.startswith("assert_")
    )
