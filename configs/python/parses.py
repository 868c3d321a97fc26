"""Rewards for Python that a model writes behind a signature."""

import ast
from typing import Any

CHARACTERS = 200


def whole_lines(text: str) -> str:
    """Returns the lines that end within the first 200 characters."""
    cut = text[:CHARACTERS]
    return cut[: cut.rfind("\n") + 1]


def code_lines(text: str) -> list[str]:
    return [line for line in whole_lines(text).splitlines() if line.strip()]


def parses(prompt: str, answer: str, record: Any = None) -> float:
    """Returns 1 if the signature and the whole lines behind it are Python."""
    if not code_lines(answer):
        return 0.0
    try:
        ast.parse(prompt + whole_lines(answer))
    except SyntaxError:
        return 0.0
    return 1.0


def repeats(prompt: str, answer: str, record: Any = None) -> float:
    """Returns the share of the lines that repeat an earlier one."""
    lines = code_lines(answer)
    return 1 - len(set(lines)) / len(lines) if lines else 0.0
