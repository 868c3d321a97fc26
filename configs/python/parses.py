"""Rewards for the Python that a model writes behind the signature of a function."""

import ast
from typing import Any

CHARACTERS = 200
MOST = 4  # statements


def seen(answer: str) -> str:
    """Returns the lines that end within the first 200 characters, or a shorter answer as it stands."""
    cut = answer[:CHARACTERS]
    return cut if cut == answer else cut[: cut.rfind("\n") + 1]


def tree(text: str) -> ast.Module | None:
    try:
        return ast.parse(text)
    except SyntaxError:
        return None


def longest(prompt: str, answer: str) -> ast.Module | None:
    """Returns the tree of the signature and what is seen of the answer, if they are Python.

    A statement that the cut leaves unfinished is left out, if at least half of the text remains.
    """
    lines = seen(answer).splitlines(keepends=True)
    half = len(seen(answer)) / 2
    while lines and len("".join(lines)) >= half:
        if found := tree(prompt + "".join(lines)):
            return found
        lines.pop()
    return None


def parses(prompt: str, answer: str, record: Any = None) -> float:
    return float(longest(prompt, answer) is not None)


def code(prompt: str, answer: str, record: Any = None) -> float:
    """Returns the number of different statements of an answer that parses, up to four, as a share of four.

    Comments and docstrings count for nothing: a model that is paid to parse alone soon writes nothing else.
    """
    found = longest(prompt, answer)
    if found is None:
        return 0.0
    statements = {
        ast.unparse(node)
        for node in ast.walk(found)
        if isinstance(node, ast.stmt) and not is_text(node)
    }
    return min(len(statements) - 1, MOST) / MOST  # but for the function itself


def is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def repeats(prompt: str, answer: str, record: Any = None) -> float:
    """Returns the share of the lines that repeat an earlier one."""
    lines = [line for line in seen(answer).splitlines() if line.strip()]
    return 1 - len(set(lines)) / len(lines) if lines else 0.0


def process_results(doc: dict[str, str], results: list[str]) -> dict[str, float]:
    """Returns what lm-evaluation-harness averages: both scores of an answer."""
    case = doc["prompt"], results[0]
    return {"parses": parses(*case), "statements": MOST * code(*case)}
