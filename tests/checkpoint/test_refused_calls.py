"""Calls that the system refuses, whoever makes them: cells of the table that experiments/faults/calls.py prints."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.faults import calls

ROOT = Path(__file__).parents[2]
READ = """
import errno, os, sys
try:
    print(len(open(sys.argv[1], "rb", buffering=0).read(100)))
except OSError as error:
    print(errno.errorcode[error.errno])
"""


def test_the_table_has_each_call_with_each_error_on_each_file_once_and_each_time():
    table = calls.cells()
    assert len(table) == len(set(table))
    for name, command in calls.COMMANDS.items():
        of = [cell for cell in table if cell.command == name]
        assert {(cell.file, cell.call, cell.how) for cell in of} >= {
            (file, call, how)
            for file in command.files
            for call in calls.CALLS
            for how in calls.ERRORS
        }
        assert {cell.times for cell in of} == {0, 1}


def test_a_few_cells_have_every_call_and_every_error():
    some = calls.few(calls.cells(), 200)
    assert len(set(some)) == 200
    assert {cell.call for cell in some} == set(calls.CALLS) and {
        cell.how for cell in some
    } > set(calls.ERRORS)
    assert {cell.command for cell in some} == set(calls.COMMANDS)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    made = calls.library(tmp_path_factory.mktemp("library"))
    if made is None:
        pytest.skip("there is no C compiler here")
    return made


@pytest.mark.parametrize(
    ("call", "how", "times", "printed"),
    [
        ("open", "5", "1", "EIO"),
        ("read", "116", "0", "ESTALE"),
        ("read", "short", "1", "50"),
        ("write", "5", "0", "100"),
    ],
)
def test_a_call_is_refused_as_it_was_asked(
    call, how, times, printed, library, tmp_path
):
    (tmp_path / "file").write_bytes(bytes(100))
    asked = dict(
        zip(
            calls.VARIABLES,
            (call, "*/file", how, str(tmp_path / "log"), times),
            strict=True,
        )
    )
    environment = {**os.environ, **asked, "LD_PRELOAD": str(library)}
    command = [sys.executable, "-ISc", READ, str(tmp_path / "file")]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == printed, done.stderr
    assert (tmp_path / "log").exists() == (call != "write")


@pytest.mark.thorough
@pytest.mark.parametrize("command", ["resume", "save", "prepare", "export"])
def test_no_cell_is_silent_lost_a_traceback_or_a_hang(command, library):
    arguments = [
        "--command",
        command,
        "--few",
        "8",
        "--scale",
        "0.02",
        "--jobs",
        "2",
        "--json",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "experiments.faults.calls", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    found = json.loads(done.stdout)
    assert not [cell for cell in found if cell["verdict"] in calls.WRONG], done.stderr
    assert any(cell["verdict"] in calls.WELL for cell in found)
