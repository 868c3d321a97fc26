"""Every experiment that a page names starts: it tells its options, with all that it imports."""

import re
import subprocess
import sys
from importlib.util import find_spec

import pytest
from documented import GUIDE, ROOT

NAMED = re.compile(r"python (-m experiments\.[\w.]+|experiments/\w+\.py)")
# What an experiment imports that not every environment of the tests has, and experiments that take words instead of
# options.
NEEDS = {
    "experiments.adopt.golden": "peft",
    "experiments.adopt.chats": "transformers",
}
NEEDS |= {"experiments.mutations": "pytest"}
WORDS = {"experiments.plan.timed", "experiments.api_reference"}
COMMANDS = sorted(
    {
        found
        for text in (GUIDE, (ROOT / "experiments/README.md").read_text())
        for found in NAMED.findall(text)
    }
)


@pytest.mark.thorough
@pytest.mark.parametrize("command", COMMANDS)
def test_an_experiment_starts(command):
    module = command.removeprefix("-m ")
    if module in NEEDS and not find_spec(NEEDS[module]):
        pytest.skip(f"needs {NEEDS[module]}")
    words = (
        ["-c", f"import {module}"] if module in WORDS else [*command.split(), "--help"]
    )
    ended = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert module in WORDS or ended.stdout.startswith("usage:")


def test_experiments_are_named():
    assert len(COMMANDS) > 30
