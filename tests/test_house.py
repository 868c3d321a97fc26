"""What keeps the package readable: a class name has one meaning, a file one topic."""

import ast
import re
from collections import defaultdict
from pathlib import Path

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "meshtrain"
FILES = {str(path.relative_to(PACKAGE)): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
# Each may only fall, but for the lines that a new feature was allowed: context parallelism, what a config imports, grouped products, loads of
# experts, merged experts in files, how others send rows to experts, pairs, experts over tensor,
# frozen weights and experts in float8, pairs that auto takes, searches by arrays, the order of a pair, gradients
# with the loss of a chunk, tiles of experts in groups, a device alone.
FILES_AT_MOST, LINES_AT_MOST, LONGEST_FILE = 367, 58_155, 420


def test_a_class_name_exists_once():
    where = defaultdict(list)
    for path, text in FILES.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                where[node.name].append(path)
    assert {name: paths for name, paths in where.items() if len(paths) > 1} == {}


def test_the_package_only_shrinks():
    lines = {path: text.count("\n") for path, text in FILES.items()}
    assert len(lines) <= FILES_AT_MOST and sum(lines.values()) <= LINES_AT_MOST
    assert {path: n for path, n in lines.items() if n > LONGEST_FILE} == {}


def test_a_test_that_spares_ci_a_fault_is_there():
    """A kind of `experiments/faults` that names the tests which cover it is not injected by CI."""
    faults = [path.read_text() for path in (TESTS.parent / "experiments/faults").glob("*.py")]
    named = {match for text in faults for match in re.findall(r'"([\w/]+\.py)::(test_\w+)"', text)}
    assert len(named) > 50
    assert {test for file, test in named if f"\ndef {test}(" not in (TESTS / file).read_text()} == set()
