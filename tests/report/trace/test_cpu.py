"""Fake devices share the wall, in traces made by hand: what waits counts only where nothing runs, and products go on
after their event.
"""

import dataclasses
from pathlib import Path

import pytest
from xspaces import FACTS_OF_GPUS, HLO, Told, microseconds, written

from meshtrain.errors import ConfigError
from meshtrain.report.trace import attribute, read_trace
from meshtrain.report.trace.attribution import Attribution
from meshtrain.telemetry.trace import EVENTS, FACTS

FACTS_OF_CPUS = dataclasses.replace(FACTS_OF_GPUS, platform="cpu")


def event(op: str, device: int, begin: float, end: float, number: int = 0) -> Told:
    return (
        op,
        begin,
        end,
        {
            "hlo_op": op,
            "hlo_module": "jit__train",
            "device_ordinal": device,
            "_p": number,
        },
    )


def waiting(begin: float, end: float) -> Told:
    return "Rendezvous", begin, end, {"name": "all reduce"}


def seen(directory: Path, *lines: list[Told], facts=FACTS_OF_CPUS) -> Attribution:
    """What is told of one step of 100 µs, whose events are on these threads."""
    threads = {f"thread {k}": line for k, line in enumerate(lines)}
    host = {"main": [("train", 0, 100, {"step_num": 5})]}
    return attribute(
        read_trace(written(directory, HLO, {"/host:CPU": host | threads}, facts))
    )


def test_two_devices_that_run_have_half_the_wall_each(tmp_path):
    told = seen(tmp_path, [event("forward", 0, 0, 60)], [event("backward", 1, 40, 100)])
    assert microseconds(told) == {"forward": 50, "backward": 50}
    assert told.devices == 2 and told.attributed == pytest.approx(1)


def test_a_collective_that_waits_leaves_the_wall_to_those_that_run(tmp_path):
    told = seen(
        tmp_path,
        [event("reduce-start", 0, 0, 100), waiting(10, 70), waiting(90, 100)],
        [event("forward", 1, 10, 50)],
    )
    # moves 0-10, waits alone 50-70 and 90-100, moves 70-90
    assert microseconds(told) == {"tensor": 60, "forward": 40}
    assert told.moving == pytest.approx(
        {"tensor": 30e-6}
    ) and told.waiting == pytest.approx({"tensor": 30e-6})


def test_waiting_on_another_thread_is_no_part_of_a_collective(tmp_path):
    told = seen(tmp_path, [event("gather-start", 0, 0, 100)], [waiting(10, 70)])
    assert told.moving == pytest.approx({"data": 100e-6}) and told.waiting == {}


def test_a_stage_that_waits_for_another_is_the_bubble(tmp_path):
    told = seen(tmp_path, [event("send-start", 0, 0, 100), waiting(20, 100)])
    assert microseconds(told) == {"pipeline": 20, "bubble": 80}


def test_between_processes_a_collective_ranks_behind_compute_as_a_whole(tmp_path):
    facts = dataclasses.replace(FACTS_OF_CPUS, processes=2, local=[0, 1, 2, 3])
    told = seen(
        tmp_path,
        [event("gather-start", 0, 0, 100)],
        [event("forward", 1, 20, 60)],
        facts=facts,
    )
    assert microseconds(told) == {"data": 60, "forward": 40}
    assert told.moving == told.waiting == {} and any(
        "wait and move in one" in s for s in told.cannot_tell
    )


def test_a_product_handed_to_other_threads_lasts_until_its_end_comes_or_its_device_goes_on(
    tmp_path,
):
    ends = [("end: forward", 50, 50, {"_c": 1}), ("end: backward", 99, 99, {"_c": 2})]
    told = seen(
        tmp_path,
        [
            event("forward", 0, 0, 10, 1),
            event("backward", 0, 60, 70, 2),
            event("head", 0, 80, 100),
            *ends,
        ],
    )
    assert microseconds(told) == {"forward": 50, "backward": 20, "head": 20, "idle": 10}


def test_loops_and_calls_are_no_time_of_their_own(tmp_path):
    told = seen(tmp_path, [event("called", 0, 0, 100)], [event("head", 0, 0, 50)])
    assert microseconds(told) == {"head": 50, "host": 50}


def test_steps_that_were_not_asked_for_are_not_looked_at(tmp_path):
    host = {
        "main": [
            ("train", 0, 100, {"step_num": 5}),
            ("train", 100, 300, {"step_num": 6}),
        ]
    }
    planes = {
        "/host:CPU": host
        | {"thread": [event("forward", 0, 0, 50), event("backward", 0, 110, 300)]}
    }
    assert microseconds(
        attribute(read_trace(written(tmp_path, HLO, planes, FACTS_OF_CPUS)))
    ) == {
        "forward": 50,
        "host": 50,
    }


def test_the_untraced_steps_around_are_told_by_the_runs_rows(tmp_path):
    rows = [(step, 9.0 if step == 5 else step / 10) for step in range(5, 9)] + [
        (40, 70.0)
    ]
    (tmp_path / "metrics.jsonl").write_text(
        "".join(f'{{"step": {step}, "step_seconds": {s}}}\n' for step, s in rows)
    )
    told = seen(tmp_path / "traces" / "5", [event("forward", 0, 0, 100)])
    # steps 6 to 8
    assert told.untraced_seconds == 0.7


@pytest.mark.parametrize("name", [EVENTS, FACTS])
def test_a_trace_of_which_a_file_is_missing_or_broken_is_refused_in_a_sentence(
    name, tmp_path
):
    seen(tmp_path, [event("forward", 0, 0, 100)])
    (tmp_path / name).write_bytes(b"{nothing")
    with pytest.raises(ConfigError, match=rf"{tmp_path}.*\.$"):
        read_trace(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(ConfigError, match=r"no whole trace: .*: no such file .*\.$"):
        read_trace(tmp_path)


def test_a_trace_without_its_steps_is_refused(tmp_path):
    written(
        tmp_path,
        HLO,
        {"/host:CPU": {"thread": [event("forward", 0, 0, 100)]}},
        FACTS_OF_CPUS,
    )
    with pytest.raises(ConfigError, match=r"holds none of the steps \[5\]"):
        read_trace(tmp_path)
