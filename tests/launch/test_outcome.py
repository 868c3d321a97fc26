"""What a run came to, of the codes of its supervisors or of what they have written down."""

import subprocess
import sys
from itertools import permutations
from pathlib import Path

import pytest

from meshtrain.launch import outcome
from meshtrain.survive.records import Plan, encode


@pytest.mark.parametrize(
    "codes, whole",
    [
        ([0, 0], 0),
        ([0, -9], 0),  # killed, and the others went on to the end
        ([0, 137, 75], 0),
        ([3, 3, -9], 3),
        ([75, 3, 2], 3),
        ([2, 75, 75], 2),  # or it would be started again for ever
        ([75, 75, -9], 75),
        ([1, 75], 75),
        ([1, 137, -15], 1),
        ([255], 1),
        ([], 1),
    ],
)
def test_one_code_of_many(codes, whole):
    assert {outcome.outcome(order) for order in permutations(codes)} == {whole}


def _plan(run: Path, number: int, **plan) -> None:
    path = run / "survive" / "plans" / f"{number:06d}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encode(Plan(number, generation=1, leader="n0", wall=0.0, kind="start", reason="", **plan)))


def test_what_the_supervisors_agreed_on_counts_if_it_is_of_this_start(tmp_path):
    assert outcome.newest(tmp_path) == 0 and outcome.agreed(tmp_path, 0) is None
    _plan(tmp_path, 1, state="forming")
    _plan(tmp_path, 9, state="over", code=75)
    _plan(tmp_path, 10, state="running")
    assert outcome.newest(tmp_path) == 10
    assert outcome.agreed(tmp_path, 8) is None, "it goes on"
    _plan(tmp_path, 11, state="over", code=3)
    assert outcome.agreed(tmp_path, 10) == 3
    assert outcome.agreed(tmp_path, 11) is None, "of an earlier start"


@pytest.mark.parametrize(
    "text", ['{"state": "over", "co', "[]", '{"state": "over", "code": "75"}', '{"state": "over", "code": 300}', "\x00"]
)
def test_a_damaged_plan_says_nothing(tmp_path, text):
    _plan(tmp_path, 1, state="over")
    (tmp_path / "survive" / "plans" / "000001.json").write_text(text)
    (tmp_path / "survive" / "plans" / "000002.json.new").write_text(text)
    assert outcome.newest(tmp_path) == 1
    assert outcome.agreed(tmp_path, 0) is None


@pytest.mark.parametrize("otherwise, code", [("0", 0), ("137", 1), ("2", 2), ("75", 75)])
def test_the_command_falls_back_on_the_engines_code(tmp_path, otherwise, code):
    assert outcome.main([str(tmp_path), "--after", "0", "--otherwise", otherwise]) == code
    _plan(tmp_path, 1, state="over", code=3)
    assert outcome.main([str(tmp_path), "--after", "0", "--otherwise", otherwise]) == 3
    assert outcome.main([str(tmp_path), "--after", "1", "--otherwise", otherwise]) == code


def test_the_command_prints_the_newest_number_alone(tmp_path):
    _plan(tmp_path, 12, state="running")
    words = [sys.executable, "-m", "meshtrain.launch.outcome", str(tmp_path)]
    assert subprocess.run(words, capture_output=True, text=True, check=True).stdout == "12\n"
