"""How much of the package a plain run reads: what only some runs need is imported when a config asks for it."""

import re
from pathlib import Path

import house
import pytest

ARCHITECTURE = Path(__file__).parents[1] / "docs" / "architecture.md"


# Each may only fall. The size of the core in syntax nodes is limited in `test_house.py`.
@pytest.mark.thorough
@pytest.mark.parametrize(
    "module, files",
    [("meshtrain.train", 111), ("meshtrain.step", 70), ("meshtrain.mesh", 35)],
)
def test_an_import_reads_few_files(module, files):
    assert len(house.imported_by(module)) <= files


@pytest.mark.thorough
def test_the_architecture_page_says_how_large_the_core_is_by_room():
    table = re.compile(
        r"^\| \| (.*) \|\n\|[-| ]+\|\n\| lines \| (.*) \|\n\| thousand nodes \| (.*) \|$",
        re.M,
    )
    header, lines, nodes = (
        row.split(" | ") for row in table.search(ARCHITECTURE.read_text()).groups()
    )
    stated = {
        room: (int(n.replace(",", "")), float(k))
        for room, n, k in zip(header, lines, nodes, strict=True)
    }
    counted = {room: [0, 0.0] for room in stated}
    for path in house.imported_by("meshtrain.train"):
        room = path.split("/")[0].removesuffix(".py")
        for name in (room if room in stated else "all else", "together"):
            counted[name][0] += house.files()[path].count("\n")
            counted[name][1] += house.size(house.tree(path)) / 1000
    wrong = {
        room: counted[room]
        for room, (n, k) in stated.items()
        if abs(counted[room][0] - n) > 100 or abs(counted[room][1] - k) > 1
    }
    assert not wrong, f"the table of docs/architecture.md says otherwise of {wrong}"
