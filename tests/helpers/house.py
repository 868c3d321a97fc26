"""Measures what decays unseen in a package of Python: its size in syntax nodes, its density, its circles of files, its words.

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

PACKAGE = Path(__file__).parents[2] / "meshtrain"
WIDTH = 120  # columns
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
PREPOSITION = re.compile(r"_*(of|by|in|at|on|as|to|over|under|beside|near|with|without|from)(_|$)")
SUBJECTLESS = re.compile(r"(What|Of|How|Whether|Those|That|Likewise|The same|By|Over|Where|In which)\b")


@cache
def files() -> dict[str, str]:
    """Returns the text of each file of the package, by its path in it."""
    return {str(path.relative_to(PACKAGE)): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def tree(path: str) -> ast.Module:
    """Returns the syntax tree of a file, by its path in the package."""
    return ast.parse(files()[path])


@cache
def imported_by(module: str) -> tuple[str, ...]:
    """Returns the files of the package that importing `module` reads, by their paths in the package."""
    code = (
        f"import sys, {module}; print(*(m.__file__ for n, m in sys.modules.items() if n.split('.')[0] == 'meshtrain'))"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    return tuple(str(Path(file).relative_to(PACKAGE)) for file in printed.split())


def docstring(node: ast.AST) -> ast.Expr | None:
    """Returns the statement that is the docstring of a module, class or function; None if it has none."""
    if not isinstance(node, FUNCTIONS | ast.ClassDef | ast.Module) or not node.body:
        return None
    first = node.body[0]
    is_text = (
        isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
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
    return sum(bool(line.strip()) and not line.strip().startswith("#") and n not in prose for n, line in lines)


def circles() -> list[list[str]]:
    """Returns the groups of files that import each other, in functions and for types too. Faces (`__init__.py`) are left out."""
    modules = {
        ".".join(("meshtrain", *Path(path).with_suffix("").parts)): path
        for path in files()
        if not path.endswith("__init__.py")
    }
    graph = {module: set(_imports(tree(path))) & modules.keys() - {module} for module, path in modules.items()}
    reached = {module: _reachable(graph, module) for module in graph}
    groups = {frozenset(other for other in reached[m] if m in reached[other]) for m in graph if m in reached[m]}
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
        counts["lines over 120"] += sum(len(line) > WIDTH for line in files()[path].splitlines())
        counts["formatter switched off"] += files()[path].count("fmt: skip")
        for node in ast.walk(tree(path)):
            if isinstance(node, FUNCTIONS):
                counts.update(_of_function(node))
            if isinstance(node, ast.Assign):
                pair = isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)
                alias = isinstance(node.value, ast.Name) and node.value.id == "Any"
                counts.update({"assignments": 1, "pairs": pair, "aliases of Any": alias})
    return counts


def _of_function(node: ast.FunctionDef | ast.AsyncFunctionDef) -> dict[str, int]:
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    parameters = [a for a in arguments if a.arg not in ("self", "cls")]
    inner = [n for statement in node.body for n in ast.walk(statement)]
    late = [n for n in inner if isinstance(n, ast.ImportFrom) and (n.module or "").startswith("meshtrain")]
    doc = docstring(node)
    return {
        "functions over 400 nodes": size(node) > 400,
        "functions over 6 parameters": len(parameters) > 6,
        "functions named by a preposition": bool(PREPOSITION.match(node.name)),
        "docstrings without a subject": doc is not None and bool(SUBJECTLESS.match(doc.value.value)),
        "imports inside functions": len(late),
    }


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
    }


if __name__ == "__main__":
    for name, value in measure().items():
        print(f"{name:36s} {value:9,.2f}" if isinstance(value, float) else f"{name:36s} {value:9,}")
    for circle in circles():
        print("circle:", *circle)
