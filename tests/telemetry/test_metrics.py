"""metrics.jsonl holds what was measured, line by line."""

import json

from meshtrain.telemetry.metrics import MetricsFile


def test_rows_keep_the_full_precision_of_a_number(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.write({"step": 1, "loss": 0.1 + 0.2})
    file.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["loss"] == 0.1 + 0.2


def test_a_row_is_on_disk_before_the_next_one_is_written(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    for step in (1, 2):
        file.write({"step": step})
        assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == step


def test_numbers_that_are_not_finite_stay_valid_json_and_are_named(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.write({"step": 3, "loss": float("nan"), "grad_norm": float("inf"), "learning_rate": 0.1})
    row = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=lambda name: 1 / 0)
    assert row == {
        "step": 3,
        "loss": None,
        "grad_norm": None,
        "learning_rate": 0.1,
        "not_finite": ["loss", "grad_norm"],
    }


def test_rows_are_appended_to_those_of_the_run_before(tmp_path):
    for step in (1, 2):
        file = MetricsFile(tmp_path / "metrics.jsonl")
        file.write({"step": step})
        file.close()
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1, 2]


def test_a_process_that_does_not_write_leaves_no_file(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl", writes=False)
    file.write({"step": 1})
    file.close()
    assert not (tmp_path / "metrics.jsonl").exists()


def test_rows_that_a_full_disk_refuses_are_written_when_it_has_room_again(tmp_path, monkeypatch):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    with open("/dev/full", "ab", buffering=0) as full, monkeypatch.context() as patch:
        patch.setattr(file, "_file", full)
        file.write({"step": 1})
        file.write({"step": 2})
    file.write({"step": 3})
    file.close()
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3]


def test_rows_that_never_found_room_are_told(tmp_path, monkeypatch, capsys):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    monkeypatch.setattr(file, "_file", open("/dev/full", "ab", buffering=0))  # noqa: SIM115
    file.write({"step": 1})
    file.close()
    assert "1 rows of /dev/full are lost" in capsys.readouterr().err
