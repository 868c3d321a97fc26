"""What the documentation tells people to type and to open: README.md, the pages in docs/, the configs' comments,
docstrings of the package.
"""

import ast
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from meshtrain.commands import MODULES as MODULES_OF

ROOT = Path(__file__).parents[2]
# What users read, by its path: the README and the guides.
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
GUIDES = {path.relative_to(ROOT).as_posix(): path.read_text() for path in PAGES}
GUIDE = "\n".join(GUIDES.values())
YOURS = ("mine.py",)  # what a reader writes
MODULES = sorted((ROOT / "meshtrain").rglob("*.py"))
FENCED = re.compile(r"^ *```(\w*)[^\n]*\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
# What is typed: to the end of the code, else to where the sentence around it goes on.
IN_CODE = re.compile(r"`((?:(?:python(?: -m)?|pip|srun) \w|meshtrain [a-z-])[^`]*)`")
IN_TEXT = re.compile(
    r"(?<!`)(python -m (?:meshtrain|experiments)\S*?(?: .*?)?)(?=: |:?$|\)| {2})",
    re.MULTILINE,
)
PATH = re.compile(r"(?<![\w./-])(?:meshtrain|tests|configs|experiments)/[\w./-]*[\w/]")
NEIGHBOUR = re.compile(r"(?<![\w./-])\w+\.py\b")


def fenced(text: str) -> list[tuple[str, str]]:
    """The language of each fenced block, and what it holds."""
    return FENCED.findall(text)


def docstrings() -> list[tuple[Path, str, str]]:
    """Every docstring of the package: its file, the name that it belongs to (of a module: none) and its text."""
    return [(path, name, text) for path in MODULES for name, text in _docstrings(path)]


@cache
def _docstrings(path: Path) -> list[tuple[str, str]]:
    documented = _documented(ast.parse(path.read_text()))
    return [
        (getattr(node, "name", ""), text)
        for node in documented
        if (text := ast.get_docstring(node))
    ]


def _documented(node: ast.AST) -> Iterator[ast.Module | ast.ClassDef | ast.FunctionDef]:
    """What can have a docstring: statements alone are looked through, since most of a tree is expressions."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
        yield node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            yield from _documented(child)


def commands() -> dict[str, list[str]]:
    """Each command once, in the order of the documentation, with its words: without comments, quotes and line
    breaks.
    """
    typed = []
    for language, block in fenced(GUIDE):
        if language == "bash":
            typed += block.replace("\\\n", " ").splitlines()
    # Of the others no syntax tree is made.
    typing = [
        path
        for path in MODULES
        if re.search(r"`pip |`srun |python -m", path.read_text())
    ]
    texts = [
        FENCED.sub("", GUIDE),
        *(text for path in typing for _, text in _docstrings(path)),
    ]
    texts += [
        path.read_text().replace("#", " ")
        for path in sorted((ROOT / "configs").rglob("*.yaml"))
    ]
    for text in texts:
        typed += [*IN_CODE.findall(text), *IN_TEXT.findall(IN_CODE.sub("", text))]
    found: dict[str, list[str]] = {}
    for line in typed:
        words = shlex.split(line, comments=True)
        while words:
            end = words.index("&&") if "&&" in words else len(words)
            command = _by_module(words[:end])
            found[" ".join(command)] = command
            words = words[end + 1 :]
    return found


def _by_module(words: list[str]) -> list[str]:
    """Returns a command by its module, as Python takes it: `meshtrain train` and `python -m meshtrain.train` are the
    same.
    """
    if words[0] != "meshtrain" or len(words) == 1:
        return words
    _, name, *rest = words
    module = (
        ["meshtrain", name]
        if name[0] == "-"
        else [f"meshtrain.{MODULES_OF.get(name, name)}"]
    )
    return ["python", "-m", *module, *rest]


def paths() -> Iterator[tuple[str, Path]]:
    """Every path that the guides and the docstrings name, with where it is named."""
    for page, line in (
        (page, line) for page, text in GUIDES.items() for line in text.splitlines()
    ):
        folder = ROOT
        for match in re.finditer(f"{PATH.pattern}|{NEIGHBOUR.pattern}", line):
            # The first of a row is whole, those after it lie beside it.
            whole = "/" in match[0]
            if match[0] not in YOURS:
                yield page, (ROOT if whole else folder) / match[0]
            folder = (ROOT / match[0]).parent if whole else folder
    for path, _, text in docstrings():
        where = path.relative_to(ROOT).as_posix()
        yield from ((where, ROOT / name) for name in PATH.findall(text))
        yield from ((where, path.parent / name) for name in NEIGHBOUR.findall(text))
