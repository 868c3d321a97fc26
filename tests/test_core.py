"""How much of the package a plain run reads: what only some runs need is imported when a config asks for it."""

import json
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

ARCHITECTURE = Path(__file__).parents[1] / "docs" / "architecture.md"
COUNT = """
import importlib, json, sys
importlib.import_module(sys.argv[1])
files = {name: m.__file__ for name, m in sys.modules.items() if name.split(".")[0] == "meshtrain"}
print(json.dumps({name: open(file, encoding="utf-8").read().count("\\n") for name, file in files.items()}))
"""


@cache
def read_by(module: str) -> dict[str, int]:
    """Lines of each module that importing this one reads."""
    printed = subprocess.run([sys.executable, "-c", COUNT, module], capture_output=True, text=True, check=True).stdout
    return json.loads(printed)


# Each may only fall, but for the lines that a new feature was allowed: context parallelism, what a config imports, whether auto has pairs.
@pytest.mark.thorough
@pytest.mark.parametrize(
    "module, files, lines",
    [("meshtrain.train", 104, 15_390), ("meshtrain.step", 64, 9_970), ("meshtrain.mesh", 32, 4_820)],
)
def test_what_an_import_reads(module, files, lines):
    count, total = len(read_by(module)), sum(read_by(module).values())
    assert count <= files and total <= lines, f"{module} reads {count} files, {total:,} lines"


@pytest.mark.thorough
def test_the_architecture_page_says_how_large_the_core_is_by_room():
    header, numbers = re.search(
        r"^\| (config \| .*) \|\n\|[-| ]+\|\n\| (.*) \|$", ARCHITECTURE.read_text(), re.M
    ).groups()
    stated = dict(zip(header.split(" | "), (int(n.replace(",", "")) for n in numbers.split(" | ")), strict=True))
    rooms: Counter[str] = Counter()
    for module, lines in read_by("meshtrain.train").items():
        room = [*module.split("."), ""][1]
        rooms[room if room in stated else "all else"] += lines
    rooms["together"] = rooms.total()
    assert all(n % 100 == 0 for n in stated.values()) and rooms.keys() == stated.keys()
    wrong = {room: lines for room, lines in rooms.items() if abs(lines - stated[room]) > 100}
    assert not wrong, f"the table of docs/architecture.md says otherwise of {wrong}"
