"""A check is wrong where the accelerator's losses are, where a run fails, and where it tells nothing."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from refusals import refused

from meshtrain.check_gpu import __main__ as command
from meshtrain.check_gpu import compared
from meshtrain.check_gpu.cases import CASES
from meshtrain.check_gpu.compared import Children, difference
from meshtrain.config import load

RIGHT: dict[str, Any] = {"steps": [[6.0, 1.0], [5.0, 2.0]]}


@pytest.mark.parametrize("name", CASES)
def test_each_check_is_a_config(name: str) -> None:
    assert load(CASES[name]).model.layers == 2


@pytest.mark.parametrize(
    ("steps", "is_right"),
    [
        ([[6.0, 1.0], [5.0, 2.0]], True),
        ([[6.0, 1.0], [5.004, 9.0]], True),
        ([[6.0, 1.0], [5.01, 2.0]], False),
        ([[6.0, 1.01], [5.0, 2.0]], False),
        ([[math.nan, 1.0], [5.0, 2.0]], False),
    ],
)
def test_losses_and_the_first_norm_are_held_against_the_cpus(
    steps: list[list[float]], is_right: bool
) -> None:
    found = difference("bfloat16", {"steps": steps}, RIGHT)
    assert found.is_right is is_right
    assert bool(found.verdict) is not is_right


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        (None, RIGHT, "here"),
        (RIGHT, None, "on the CPU"),
        ({"error": "XlaRuntimeError: no kernel"}, RIGHT, "no kernel"),
    ],
)
def test_a_run_that_gives_no_losses_is_wrong(ours: Any, theirs: Any, said: str) -> None:
    found = difference("bfloat16", ours, theirs)
    assert not found.is_right
    assert said in found.verdict


def test_an_unknown_check_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(command.main, capsys, "bflot16")
    assert "'bflot16'" in said
    assert "did you mean bfloat16?" in said


@pytest.mark.thorough
def test_a_report_holds_device_differences_and_rates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "report.json"
    assert command.main(["bfloat16", "LoRA", "--output", str(file)]) == 0
    report = json.loads(file.read_text())
    assert report["device"]["platform"] == "cpu"
    assert {name for name, check in report["checks"].items() if check["right"]} == {
        "bfloat16",
        "LoRA",
    }
    assert report["rates"]["measured"]["float32"] > 0
    captured = capsys.readouterr()
    assert "compared with itself" in captured.err

    # One device whose second loss is another.
    def other(name: str, ours: Any, theirs: Any) -> compared.Difference:
        wrong = {"steps": [ours["steps"][0], [2 * loss for loss in ours["steps"][1]]]}
        return difference(name, wrong, theirs)

    monkeypatch.setattr(command, "difference", other)
    assert command.main(["bfloat16"]) == 1
    assert "1 of 1 checks are wrong: bfloat16" in capsys.readouterr().err


def test_what_a_child_says_before_it_fails_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = "import sys; print('noise'); sys.exit('no such device')"
    monkeypatch.setattr(compared, "CHILD", ("-c", script))
    children = Children("cpu")
    for thread in children.start(["bfloat16"], lambda: None):
        thread.join()
    assert children.lines == {}
    assert {error.strip() for error in children.errors} == {"no such device"}
