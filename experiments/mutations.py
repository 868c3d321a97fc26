"""Breaks the package line by line and asks which suite notices: python -m experiments.mutations record, then run.

    record quick|thorough [TESTS]   runs tests of a suite under coverage.py (pip install coverage), so that each line knows who executes it
    run [--number N]                draws mutations from every room, makes each in a copy of the checkout and runs the tests of its line

A mutation counts as caught if one of these tests fails, and passes without it. A later run tries this test first; the
lines of the record may have moved by then, but not what was caught. An edit elsewhere hardly changes the draw. What
nothing catches is
printed with its line: either nobody can see it, or a test is missing.
"""

import ast
import hashlib
import itertools
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from experiments import bench
from experiments.bench import Table

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "meshtrain"
COPIED = (
    "meshtrain",
    "tests",
    "experiments",
    "configs",
    "docs",
    "README.md",
    "CONTRIBUTING.md",
    "pyproject.toml",
    ".ci",
)
SUITES = {"quick": "not slow and not thorough", "thorough": "thorough"}
# of a line that are run at most: of its own room first, the cheapest first
TESTS = 64
CHEAP = 25.0  # processor seconds for all of them; the first is run whatever it costs
SECONDS = 300  # by the clock for the tests of one mutation

COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Lt: ">=", ast.GtE: "<", ast.Gt: "<=", ast.LtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.In: "not in", ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is",
}  # fmt: skip
OPERATORS: dict[type[ast.operator], str] = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "+",
    ast.Div: "*",
    ast.FloorDiv: "*",
}


# by the name of a mutation: the suite and the test
Caught = dict[str, dict[str, str]]


class Mutation(NamedTuple):
    """One change of one file: its bytes from `start` to `end` become `text`."""

    path: str
    line: int
    start: int
    end: int
    text: str
    before: str

    @property
    def room(self) -> str:
        return room(Path(self.path))

    @property
    def name(self) -> str:
        return f"{self.path}: {' '.join(self.before.split())} -> {' '.join(self.text.split())}"


def room(path: Path) -> str:
    return path.parts[0] if len(path.parts) > 1 else "top level"


def mutations(path: Path) -> Iterator[Mutation]:
    """Yields the mutations of a file's functions: comparisons, arithmetic, conditions, results and calls for their
    effect.
    """
    source = (PACKAGE / path).read_bytes()
    offsets = [0]
    for line in source.splitlines(keepends=True):
        offsets.append(offsets[-1] + len(line))

    def change(node: ast.expr, text: str) -> Mutation:
        assert node.end_lineno is not None and node.end_col_offset is not None
        start, end = (
            offsets[node.lineno - 1] + node.col_offset,
            offsets[node.end_lineno - 1] + node.end_col_offset,
        )
        return Mutation(
            str(path), node.lineno, start, end, text, source[start:end].decode()
        )

    functions = [
        n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef)
    ]
    for node in {
        id(n): n for function in functions for n in ast.walk(function)
    }.values():
        match node:
            case ast.Compare(left=left, ops=[operator], comparators=[right]) if (
                type(operator) in COMPARISONS
            ):
                yield change(
                    node,
                    f"(({ast.unparse(left)}) {COMPARISONS[type(operator)]} ({ast.unparse(right)}))",
                )
            case ast.BinOp(left=left, op=operator, right=right) if type(
                operator
            ) in OPERATORS and not any(
                isinstance(n, ast.JoinedStr | ast.List | ast.Tuple)
                or isinstance(getattr(n, "value", None), str)
                for n in (left, right)
            ):
                yield change(
                    node,
                    f"(({ast.unparse(left)}) {OPERATORS[type(operator)]} ({ast.unparse(right)}))",
                )
            case ast.If(test=test) | ast.IfExp(test=test):
                yield change(test, f"(not ({ast.unparse(test)}))")
            case ast.Return(value=ast.expr() as value) if not isinstance(
                value, ast.Constant
            ):
                yield change(value, "None")
            case ast.Expr(value=ast.Call() as call):
                yield change(call, "None")


def drawn(number: int) -> list[Mutation]:
    """Returns about `number` mutations that can be seen, of each room in proportion to its lines and at least two, from
    as many files as may be.
    """
    files = sorted(
        path.relative_to(PACKAGE)
        for path in PACKAGE.rglob("*.py")
        if path.name != "__main__.py"
    )
    sizes = Counter[str]()
    by_file: dict[str, dict[Path, list[Mutation]]] = defaultdict(dict)
    for path in files:
        sizes[room(path)] += (PACKAGE / path).read_text().count("\n")
        # ordered by what is changed and not by its place, so that lines elsewhere do not change the draw
        order = sorted(
            mutations(path),
            key=lambda m: random.Random(f"{m.path} {m.before} {m.text}").random(),
        )
        if order:
            by_file[room(path)][path] = order
    chosen = []
    for name, here in sorted(by_file.items()):
        count = max(2, round(number * sizes[name] / sizes.total()))
        largest = sorted(here, key=lambda path: -len(here[path]))
        for at in range(count):
            pool = here[largest[at % len(largest)]]
            if at // len(largest) < len(pool):
                chosen.append(pool[at // len(largest)])
    return chosen


# --- which tests execute a line


def record(suite: str, directory: Path, tests: list[str]) -> None:
    """Runs tests of a suite under coverage.py in one process, each as the context of the lines that it executes."""
    data = directory / suite / hashlib.sha1(" ".join(tests).encode()).hexdigest()
    data.parent.mkdir(exist_ok=True)
    settings = data.with_suffix(".ini")
    settings.write_text(
        f"[run]\nsource = meshtrain\ndata_file = {data}\nrelative_files = true\n"
    )
    words = [
        "coverage",
        "run",
        f"--rcfile={settings}",
        "-m",
        "pytest",
        "-n",
        "0",
        "-p",
        "experiments.mutations",
    ]
    subprocess.run(
        [sys.executable, "-m", *words, "-m", SUITES[suite], *tests],
        cwd=ROOT,
        check=False,
    )


SPENT: dict[
    str, float
    # Processor seconds of the tests that passed while this module was a plugin of pytest
] = {}


def pytest_runtest_setup(item) -> None:
    """Names the context of coverage.py after the test."""
    import coverage

    if measured := coverage.Coverage.current():
        measured.switch_context(item.nodeid)
        item.begun = sum(os.times()[:4])


def pytest_runtest_makereport(item, call) -> None:
    if call.when == "call" and call.excinfo is None and hasattr(item, "begun"):
        SPENT[item.nodeid] = sum(os.times()[:4]) - item.begun


def pytest_sessionfinish() -> None:
    import coverage

    if measured := coverage.Coverage.current():
        Path(f"{measured.get_data().data_filename()}.json").write_text(
            json.dumps(SPENT)
        )


def tests_of(mutation: Mutation, records: Path) -> list[str]:
    """Returns tests that execute the line of a mutation, those of its own room first, the cheapest first.

    The line may run where coverage.py does not see it, in a process that a test starts: so all of the file's own tests
    come next, and are all that there is where nothing was recorded.
    """
    from coverage import CoverageData

    parts = Path(mutation.path)
    own = (
        f"tests/{mutation.room}/"
        if mutation.room != "top level"
        else f"tests/test_{parts.stem}"
    )
    mirror = f"tests/{parts.parent / f'test_{parts.stem}.py'}::"
    spent: dict[str, float] = {}
    executing: set[str] = set()
    for seconds in records.glob("*.json"):
        data = CoverageData(str(seconds.with_suffix("")))
        data.read()
        passed = json.loads(seconds.read_text())
        spent |= {test: passed[test] for test in passed if test.startswith(mirror)}
        files = [
            file
            for file in data.measured_files()
            if file.endswith(f"meshtrain/{mutation.path}")
        ]
        by_line = data.contexts_by_lineno(files[0]) if files else {}
        # Of a statement over several lines only some are recorded.
        for line in range(mutation.line, mutation.line - 6, -1):
            if seen := {
                test: passed[test] for test in by_line.get(line, ()) if test in passed
            }:
                spent |= seen
                executing |= set(seen)
                break
    order = sorted(
        (not test.startswith(own), test not in executing, seconds, test)
        for test, seconds in spent.items()
    )
    chosen: list[str] = []
    left = CHEAP
    for *_, test in order[:TESTS]:
        if spent[test] <= left or not chosen:
            chosen.append(test)
            left -= spent[test]
    file = mirror.removesuffix("::")
    if not any(test.startswith(mirror) for test in chosen) and (ROOT / file).exists():
        chosen.append(file)
    return chosen


# --- a mutation and its tests


def red(tests: list[str], checkout: Path, marks: str) -> str:
    """Runs tests in a checkout until one is red, and returns it; none if they do not end."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-n",
        "0",
        "-rfE",
        "-x",
        "-p",
        "no:cacheprovider",
        "-m",
        marks,
    ]
    environment = os.environ | {"PYTHONPATH": str(checkout), "COLUMNS": "1000"}
    while tests:
        try:
            ended = subprocess.run(
                [*command, *tests],
                cwd=checkout,
                env=environment,
                capture_output=True,
                text=True,
                timeout=SECONDS,
            )
        except subprocess.TimeoutExpired:
            break
        if not (
            gone := re.findall(
                r"ERROR: (?:not found|file or directory not found): (.*)", ended.stderr
            )
        ):
            if ended.returncode in (0, pytest.ExitCode.NO_TESTS_COLLECTED):
                break
            said = re.search(
                r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", ended.stdout, re.MULTILINE
            )
            return said[1] if said else "pytest itself"
        tests = [
            test for test in tests if not any(name.endswith(test) for name in gone)
        ]
    return ""


@contextmanager
def made(mutation: Mutation, checkout: Path) -> Iterator[Path]:
    """Makes a mutation in a copy of the checkout for a while."""
    file = checkout / "meshtrain" / mutation.path
    source = file.read_bytes()
    file.write_bytes(
        source[: mutation.start] + mutation.text.encode() + source[mutation.end :]
    )
    try:
        yield file
    finally:
        file.write_bytes(source)


def judge(suite: str, tests: dict[Mutation, list[str]], checkout: Path) -> Caught:
    """Returns the test of a suite that catches each mutation, which passes without it."""
    caught: Caught = {}
    for mutation in tests:
        with made(mutation, checkout):
            failing = red(tests[mutation], checkout, SUITES[suite])
        if failing and not red([failing], checkout, SUITES[suite]):
            caught[mutation.name] = {"suite": suite, "test": failing}
    return caught


def run(number: int, directory: Path, only: list[str]) -> None:
    """Judges the mutations of the rooms that no test is known to catch, then shows the table of all."""
    here = [m for m in drawn(number) if not only or m.room in only]
    remembered = directory / "caught.json"
    before = json.loads(remembered.read_text()) if remembered.exists() else {}
    caught: Caught = {}
    with tempfile.TemporaryDirectory() as temporary:
        checkout = Path(temporary)
        for name in COPIED:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, checkout / name)
        for suite, name in itertools.product(SUITES, sorted({m.room for m in here})):
            tests: dict[Mutation, list[str]] = {}
            for mutation in here:
                if mutation.room == name and mutation.name not in caught:
                    known = before.get(mutation.name, {"suite": "", "test": ""})
                    first = [known["test"]] if known["suite"] == suite else []
                    others = tests_of(mutation, directory / suite)
                    tests[mutation] = list(dict.fromkeys([*first, *others]))
            if tests:
                caught |= judge(suite, tests, checkout)
                remembered.write_text(json.dumps(before | caught, indent=1))
                found = sum(m.name in caught for m in tests)
                print(f"{suite}, {name}: {found} of {len(tests)}", flush=True)
    for mutation in here:
        if mutation.name not in caught:
            print(f"nothing catches line {mutation.line} of {mutation.name}")
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for mutation in here:
        of = caught.get(mutation.name, {"suite": "nothing"})["suite"]
        counts[mutation.room][of] += 1
        counts["together"][of] += 1
    heads = "mutations", "caught by the quick suite", "by all of CI"
    table = Table("room      ", *heads, title=f"about {number} mutations")
    for name, by in counts.items():
        table.row(name, by.total(), by["quick"], by["quick"] + by["thorough"])


def main() -> None:
    parser = bench.parser(__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="which tests execute which lines")
    recording.add_argument("suite", choices=SUITES)
    recording.add_argument(
        "tests", nargs="*", help="files or folders of tests; none for all"
    )
    running = commands.add_parser("run", help="mutations, and what catches them")
    running.add_argument("--number", type=int, default=125)
    running.add_argument("--room", nargs="*", default=[], help="these rooms alone")
    parser.add_argument(
        "--directory",
        type=Path,
        default=Path(tempfile.gettempdir(), "meshtrain-mutations"),
    )
    options = parser.parse_args()
    options.directory.mkdir(exist_ok=True)
    if options.command == "record":
        record(options.suite, options.directory, options.tests)
    else:
        run(options.number, options.directory, options.room)


if __name__ == "__main__":
    main()
