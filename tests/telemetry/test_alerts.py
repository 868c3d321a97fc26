"""The listener: rows become lines of alerts.jsonl, each alert once, over restarts too; what cannot be written ends
nothing.
"""

import json
import math
from types import SimpleNamespace

from meshtrain.run.directory import ALERTS
from meshtrain.telemetry.alerts import Alerts


def config(*alerts):
    return SimpleNamespace(telemetry=SimpleNamespace(alerts=alerts))


def lines(directory):
    return [json.loads(line) for line in (directory / ALERTS).read_text().splitlines()]


def test_rows_of_steps_and_of_all_processes_become_lines(tmp_path, capsys):
    alerts = Alerts(config("log", "file"), tmp_path)
    alerts.on_row(
        {"step": 5, "time": 1000.0, "loss": math.nan, "tokens_per_second": 1.0}, "step"
    )
    alerts.on_row(
        {"rank": 3, "host": "n3", "time": 1.0, "disk_free_bytes": 1}, "process"
    )
    alerts.on_row(
        {"rank": 0, "host": "n0", "time": 1.0, "disk_free_bytes": 1}, "process"
    )
    alerts.on_tick(2000.0)
    alerts.close()
    nan, disk = lines(tmp_path)
    assert nan == {
        "time": 1000.0,
        "step": 5,
        "rule": "loss_not_finite",
        "state": "firing",
        "severity": "critical",
        "value": 1,
        "limit": 0,
        "sentence": "the loss of step 5 is nan.",
    }
    assert (disk["rule"], disk["step"], disk["state"]) == ("disk_space", 5, "firing")
    assert disk["time"] > 1e9, "another machine's clock is unknown"
    assert "the loss of step 5 is nan" in capsys.readouterr().err


def test_what_an_earlier_process_left_firing_is_over_when_the_next_one_begins(tmp_path):
    for _ in range(2):
        alerts = Alerts(config("file"), tmp_path)
        alerts.on_row({"step": 5, "loss": math.nan}, "step")
        alerts.close()
    for _ in range(2):
        Alerts(config("file"), tmp_path).close()
    assert [row["state"] for row in lines(tmp_path)] == ["firing", "resolved"] * 2
    assert "has ended" in lines(tmp_path)[1]["sentence"]
    (tmp_path / ALERTS).write_text(
        '{"rule": "stalled", "state": "fir\n[]\nnull\n'
    )  # torn lines are left out
    Alerts(config("file"), tmp_path).close()
    assert (tmp_path / ALERTS).read_text().count("\n") == 3


def test_a_file_that_cannot_be_written_is_said_and_the_others_are_told(
    tmp_path, capsys
):
    (tmp_path / ALERTS).mkdir()
    alerts = Alerts(config("file", "log"), tmp_path)
    alerts.on_row({"step": 5, "loss": math.nan}, "step")
    alerts.close()
    said = capsys.readouterr().err
    assert "alerts are not written" in said and "the loss of step 5 is nan" in said


def test_an_error_that_ends_the_run_is_said_once(tmp_path, capsys):
    """The run says it itself; the file and other places are told all the same."""
    alerts = Alerts(config("log", "file"), tmp_path)
    alerts.on_failure()
    alerts.on_row({"step": 1, "loss": math.nan, "time": 1.0}, "step")
    alerts.close()
    assert capsys.readouterr().err == ""
    assert [line["rule"] for line in lines(tmp_path)] == ["loss_not_finite"]
