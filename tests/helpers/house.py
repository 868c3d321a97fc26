"""Measures what decays unseen in a package of Python: its size in syntax nodes, its density, its circles of files, its
words.

Lines are not measured as a size: a limit on lines is met by denser lines.

    python tests/helpers/house.py              prints the figures of meshtrain/ and of the core that `import meshtrain.train` brings
"""

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parents[1]
PACKAGE = TESTS.parent / "meshtrain"
WIDTH = 120  # columns
# A key such as mesh.data or the name of a file is what a test matches, and no wording.
PLAIN_WORD = re.compile(r"(?<![\w.\\/-])[A-Za-z][a-z']+(?![\w/-]|\\?\.\w)")
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
PREPOSITION = re.compile(
    r"_*(of|by|in|at|on|as|to|over|under|beside|near|with|without|from)(_|$)"
)
OPENING = re.compile(r"^(Of|What|Those|That of)\b")
NO_NOUN = re.compile(
    r"(?<!there )\b(is|are|was|were) no (?!longer|more|less|fewer|other)[a-z]+"
)
SUBJECTLESS = re.compile(
    r"(What|Of|How|Whether|Those|That|Likewise|The same|By|Over|Where|In which)\b"
)


@cache
def files() -> dict[str, str]:
    """Returns the text of each file of the package, by its path in it."""
    return {
        str(path.relative_to(PACKAGE)): path.read_text()
        for path in sorted(PACKAGE.rglob("*.py"))
    }


@cache
def tree(path: str) -> ast.Module:
    """Returns the syntax tree of a file, by its path in the package."""
    return ast.parse(files()[path])


@cache
def imported_by(module: str) -> tuple[str, ...]:
    """Returns the files of the package that importing `module` reads, by their paths in the package."""
    code = (
        f"import sys, {module}; print(*(m.__file__ for n, m in sys.modules.items() if n.split('.')[0] == "
        "'meshtrain'))"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    return tuple(str(Path(file).relative_to(PACKAGE)) for file in printed.split())


def docstring(node: ast.AST) -> ast.Expr | None:
    """Returns the statement that is the docstring of a module, class or function; None if it has none."""
    if not isinstance(node, FUNCTIONS | ast.ClassDef | ast.Module) or not node.body:
        return None
    first = node.body[0]
    is_text = (
        isinstance(first, ast.Expr)
        and isinstance(first.value, ast.Constant)
        and isinstance(first.value.value, str)
    )
    return first if is_text else None


def size(node: ast.AST) -> int:
    """Returns the number of syntax nodes of a tree."""
    return sum(1 for _ in ast.walk(node))


def code_lines(path: str) -> int:
    """Returns how many lines of a file are neither empty, nor a comment, nor of a docstring."""
    prose: set[int] = set()
    for node in ast.walk(tree(path)):
        if (doc := docstring(node)) is not None:
            prose.update(range(doc.lineno, doc.end_lineno + 1))
    lines = enumerate(files()[path].splitlines(), 1)
    return sum(
        bool(line.strip()) and not line.strip().startswith("#") and n not in prose
        for n, line in lines
    )


def circles() -> list[list[str]]:
    """Returns the groups of files that import each other, in functions and for types too.

    Faces (`__init__.py`) are left out.
    """
    modules = {
        ".".join(("meshtrain", *Path(path).with_suffix("").parts)): path
        for path in files()
        if not path.endswith("__init__.py")
    }
    graph = {
        module: set(_imports(tree(path))) & modules.keys() - {module}
        for module, path in modules.items()
    }
    reached = {module: _reachable(graph, module) for module in graph}
    groups = {
        frozenset(other for other in reached[m] if m in reached[other])
        for m in graph
        if m in reached[m]
    }
    return sorted(map(sorted, groups))


def _imports(module: ast.Module) -> Iterator[str]:
    for node in ast.walk(module):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    reached: set[str] = set()
    waiting = [start]
    while waiting:
        new = graph[waiting.pop()] - reached
        reached |= new
        waiting += new
    return reached


def count(paths: Iterable[str]) -> Counter[str]:
    """Returns the counts of some files, by what is counted."""
    counts: Counter[str] = Counter()
    for path in paths:
        counts["nodes"] += size(tree(path))
        counts["code lines"] += code_lines(path)
        counts["lines over 120"] += sum(
            len(line) > WIDTH for line in files()[path].splitlines()
        )
        counts["formatter switched off"] += files()[path].count("fmt: skip")
        for node in ast.walk(tree(path)):
            if isinstance(node, FUNCTIONS):
                counts.update(_of_function(node))
            if isinstance(node, ast.Assign):
                pair = isinstance(node.targets[0], ast.Tuple) and isinstance(
                    node.value, ast.Tuple
                )
                alias = isinstance(node.value, ast.Name) and node.value.id == "Any"
                counts.update(
                    {"assignments": 1, "pairs": pair, "aliases of Any": alias}
                )
    return counts


def _of_function(node: ast.FunctionDef | ast.AsyncFunctionDef) -> dict[str, int]:
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    parameters = [a for a in arguments if a.arg not in ("self", "cls")]
    inner = [n for statement in node.body for n in ast.walk(statement)]
    late = [
        n
        for n in inner
        if isinstance(n, ast.ImportFrom) and (n.module or "").startswith("meshtrain")
    ]
    doc = docstring(node)
    return {
        "functions over 400 nodes": size(node) > 400,
        "functions over 6 parameters": len(parameters) > 6,
        "functions named by a preposition": bool(PREPOSITION.match(node.name)),
        "docstrings without a subject": doc is not None
        and bool(SUBJECTLESS.match(doc.value.value)),
        "imports inside functions": len(late),
    }


def sentences(text: str) -> Iterator[str]:
    """Yields the sentences and clauses of prose; tables, drawings and code in backticks are left out."""
    for paragraph in re.split(r"\n\s*\n", re.sub(r"`[^`]*`", "X", text)):
        if not re.search(r"\S {3,}\S|^\s*\||[─├└│►◄]", paragraph, re.M):
            flat = " ".join(paragraph.split())
            yield from (s for s in re.split(r"(?<=[.!?;:])\s+", flat) if s)


def prose() -> Iterator[tuple[str, str]]:
    """Yields (a file, its text) of docstrings, help texts and meanings of keys in the package, and of the pages of
    docs/.
    """
    for path in files():
        for node in ast.walk(tree(path)):
            if (doc := docstring(node)) is not None:
                yield path, doc.value.value
            if isinstance(node, ast.Call):
                is_key = isinstance(node.func, ast.Name) and node.func.id == "key"
                texts = [
                    k.value for k in node.keywords if k.arg in ("help", "description")
                ] + node.args * is_key
                yield from (
                    (path, n.value)
                    for n in texts
                    if isinstance(n, ast.Constant) and isinstance(n.value, str)
                )
    for page in [*(PACKAGE.parent / "docs").glob("*.md"), PACKAGE.parent / "README.md"]:
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
        lines = [line for line in text.splitlines() if not line.startswith(("|", "#"))]
        yield page.name, "\n".join(lines)


def odd_sentences() -> dict[str, list[str]]:
    """Returns the sentences that a native reads twice, by what is odd in them."""
    kinds = {
        "sentences that open with Of, What or Those": OPENING,
        "sentences with `is no NOUN`": NO_NOUN,
    }
    found: dict[str, list[str]] = {
        name: [] for name in (*kinds, "sentences over 30 words")
    }
    for path, text in prose():
        for sentence in sentences(text):
            for name, pattern in kinds.items():
                if pattern.search(sentence):
                    found[name].append(f"{path}: {sentence}")
            if len(re.findall(r"[\w'-]+", sentence)) > 30:
                found["sentences over 30 words"].append(f"{path}: {sentence}")
    return found


def pinned_sentences() -> list[str]:
    """Returns the literals of seven words and more in tests: each holds a message's wording."""
    pinned = []
    for path in sorted(TESTS.rglob("test_*.py")):
        for function in ast.walk(ast.parse(path.read_text())):
            if not isinstance(
                function, ast.FunctionDef
            ) or not function.name.startswith("test_"):
                continue
            doc = docstring(function)
            body = [n for n in function.body if n is not doc]
            literals = [
                n for part in (*function.decorator_list, *body) for n in ast.walk(part)
            ]
            for node in literals:
                if (
                    isinstance(node, ast.Constant)
                    and isinstance(node.value, str)
                    and "\n" not in node.value
                ):
                    is_code = re.search(r"import |def |lambda|print\(|\{%", node.value)
                    if len(PLAIN_WORD.findall(node.value)) >= 7 and not is_code:
                        pinned.append(f"{path.relative_to(TESTS)}: {node.value}")
    return pinned


@cache
def measure() -> dict[str, float]:
    """Returns the figures that `tests/test_house.py` limits."""
    counts = count(files())
    core = count(imported_by("meshtrain.train"))
    kept = [
        "functions over 400 nodes", "functions over 6 parameters", "functions named by a preposition",
        "docstrings without a subject", "imports inside functions", "aliases of Any", "lines over 120",
        "formatter switched off",
    ]  # fmt: skip
    return {
        "files": len(files()),
        "thousand nodes": counts["nodes"] / 1000,
        "nodes a code line": counts["nodes"] / counts["code lines"],
        "thousand nodes of the core": core["nodes"] / 1000,
        "nodes a code line of the core": core["nodes"] / core["code lines"],
        "a, b = x, y, % of assignments": 100 * counts["pairs"] / counts["assignments"],
        "circles of files": len(circles()),
        **{name: counts[name] for name in kept},
        **{name: len(found) for name, found in odd_sentences().items()},
        "literals of seven words in tests": len(pinned_sentences()),
    }


if __name__ == "__main__":
    for name, value in measure().items():
        print(
            f"{name:36s} {value:9,.2f}"
            if isinstance(value, float)
            else f"{name:36s} {value:9,}"
        )
    for circle in circles():
        print("circle:", *circle)
    if sys.argv[1:]:
        # The findings of a room: python tests/helpers/house.py serve
        found = [*odd_sentences().values(), pinned_sentences()]
        print(
            *(
                line
                for lines in found
                for line in lines
                if line.startswith(sys.argv[1])
            ),
            sep="\n",
        )
