"""What is shown of runs that go on, are not there yet, hang and end; and how the command ends."""

import io
import json
import math
import os
import pty
import random
import re
import signal
import subprocess
import sys
import termios
import time

import pytest
from refusals import tells
from rich.console import Console
from synthetic_history import Synthetic

from meshtrain.monitor import watched
from meshtrain.monitor.__main__ import head, line, main, screen
from meshtrain.monitor.watched import WatchedRun, lagging
from meshtrain.report.facts import gather
from meshtrain.report.summary import summarise
from meshtrain.report.text import render
from meshtrain.run.lock import RunLock
from meshtrain.survive.history import date, read
from meshtrain.survive.records import Node, encode
from meshtrain.survive.reliability import failures
from meshtrain.telemetry.catalogue import RECENT_ROWS
from meshtrain.telemetry.endpoint import Board

ROW = {
    "loss": 2.5,
    "tokens": 64,
    "tokens_per_second": 128.0,
    "step_seconds": 0.5,
    "data_wait_seconds": 0.01,
}


@pytest.fixture
def run(tmp_path):
    where = tmp_path / "mine"
    where.mkdir()
    (where / "config.yaml").write_text("run: {fake_devices: 8}\ntrain: {steps: 100}\n")
    return where


def test_a_directory_of_runs_shows_each_of_them(run, tmp_path, capsys):
    (tmp_path / "other").mkdir()
    (tmp_path / "empty").mkdir()
    (tmp_path / "other" / "metrics.jsonl").write_text("")
    assert main([str(tmp_path), "--json"]) == 0
    assert {look["run"] for look in json.loads(capsys.readouterr().out)} == {
        str(run),
        str(tmp_path / "other"),
    }
    for named in (run, tmp_path / "empty", tmp_path / "nowhere"):
        assert main([str(named), "--json"]) == 0
        assert [look["run"] for look in json.loads(capsys.readouterr().out)] == [
            str(named)
        ]


def write(run, *steps, **more):
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps({"step": k} | ROW | more) + "\n" for k in steps)


def sample(run, rank, time, **phases):
    (run / "resources").mkdir(exist_ok=True)
    with (run / "resources" / f"{rank}.jsonl").open("a") as file:
        file.write(
            json.dumps(
                {
                    "time": time,
                    "rank": rank,
                    "host": f"n{rank}",
                    "step": 3,
                    "phase_seconds": phases,
                }
            )
            + "\n"
        )


def shown(looks, width=80, height=40):
    file = io.StringIO()
    Console(file=file, width=10 * width, color_system=None).print(
        screen(looks, width, height)
    )
    return file.getvalue()


def test_a_run_that_is_not_there_yet_is_told_so_and_found_when_it_comes(tmp_path):
    watched = WatchedRun(tmp_path / "mine")
    assert "there is no run here yet" in shown([watched.look()]) and "yet" in line(
        watched.look()
    )
    (tmp_path / "mine").mkdir()
    assert "yet" in line(watched.look())
    (tmp_path / "mine" / "config.yaml").write_text("train: {steps: 100}")
    write(tmp_path / "mine", 1, 2, 3)
    assert "step 3/100  loss 2.5000" in line(watched.look())


def test_only_new_rows_are_read_and_steps_taken_again_stand_once(run):
    watched = WatchedRun(run)
    write(run, *range(1, 8))
    assert watched.look().columns.known("step").tolist() == list(range(1, 8))
    write(run, 5, 6, loss=9.0)
    columns = watched.look().columns
    assert columns.known("step").tolist() == [1, 2, 3, 4, 5, 6] and columns.known(
        "loss"
    ).tolist()[-2:] == [9.0, 9.0]


def test_the_state_of_a_run_is_told(run):
    write(run, *range(1, 51))
    assert watched_state(run) == "stopped"
    lock = RunLock(run)
    try:
        look = WatchedRun(run).look()
        assert look.summary.state == "going on" and look.left == pytest.approx(25.0)
        assert "25 s left" in line(look) and "25 s left" in shown([look])
        os.utime(run / "metrics.jsonl", (1, 1))
        stalled = WatchedRun(run).look()
        assert stalled.summary.state == "stalled" and "may hang" in shown([stalled])
    finally:
        lock.release()
    write(run, *range(51, 101))
    assert watched_state(run) == "done"


@pytest.mark.parametrize(
    ("ago", "state"), [(0, "going on"), (watched.FRESH + 60, "stopped")]
)
def test_between_two_generations_a_supervised_run_goes_on(run, ago, state):
    write(run, 1, 2, 3)
    nodes = run / "survive" / "nodes"
    nodes.mkdir(parents=True)
    (nodes / "n0.json").write_bytes(
        encode(Node("n0", wall=time.time() - ago, state="idle"))
    )
    assert watched_state(run) == state


def watched_state(run):
    return WatchedRun(run).look().summary.state


def test_a_run_from_before_telemetry_has_all_but_what_it_does_not_say(run):
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    words = shown([WatchedRun(run).look()])
    assert "loss 2.0000" in words and "tokens/s" not in words and "memory" not in words


def test_alerts_that_fire_are_told_until_they_clear(run):
    write(run, 1, 2)
    watched = WatchedRun(run)
    alert = {
        "rule": "spike",
        "state": "firing",
        "sentence": "the loss jumped",
        "step": 2,
        "time": 1.0,
    }
    with (run / "alerts.jsonl").open("a") as file:
        file.write(json.dumps(alert) + "\n")
    assert "! spike: the loss jumped" in shown([watched.look()])
    with (run / "alerts.jsonl").open("a") as file:
        file.write(json.dumps(alert | {"state": "resolved"}) + "\n")
    assert "spike" not in shown([watched.look()])


def test_phases_and_processes_that_lag_are_told(run):
    write(run, 1, 2)
    for time_ in (100.0, 110.0):
        sample(run, 0, time_, data=0.2, dispatch=0.1, wait=9.0)
        sample(run, 1, time_, data=0.2, dispatch=0.1, wait=9.0)
        sample(run, 2, time_, data=4.0, dispatch=0.1, wait=5.0)
    assert "phases" not in shown([WatchedRun(run).look()])  # nobody is at work
    lock = RunLock(run)
    told = shown([WatchedRun(run).look()], 120)
    lock.release()
    assert "phases: wait 97%" in told and tells(told, "rank 2 on n2 is slow", "45%")
    assert "rank 1" not in told


def samples(*times, host=None, **phases):
    return [{"time": t, "host": host, "phase_seconds": phases} for t in times]


def test_who_lags_or_is_silent_is_told_and_nobody_else():
    even = {rank: samples(0, 10, data=1.0 + rank, wait=9.0 - rank) for rank in range(3)}
    assert lagging(even) == []
    even[3] = samples(0, 10, data=4.0, wait=6.0)
    assert len(lagging(even)) == 1
    assert lagging({0: samples(0, 10, data=5.0)}) == [] and lagging({}) == []
    assert lagging({0: samples(90, 100), 1: samples(40, 50, host="n7")}) == [
        "rank 1 on n7 has said nothing for 50 s"
    ]
    odd = [{"time": "x", "phase_seconds": 3}, {"phase_seconds": {"data": "y"}}]
    assert lagging({0: odd, 1: odd, 2: samples(0, 10, data=None)}) == []


@pytest.mark.parametrize("width", [40, 80, 120])
def test_no_line_is_wider_than_the_terminal(run, width):
    write(run, *range(1, 100), eval_loss=2.0, memory_in_use_bytes=1e9, mfu=0.5)
    (run / "alerts.jsonl").write_text(
        json.dumps({"rule": "r", "state": "firing", "sentence": "x" * 300}) + "\n"
    )
    told = shown([WatchedRun(run).look()] * 2, width)
    assert max(map(len, told.splitlines())) <= width and "mine" in told


@pytest.mark.parametrize("width", [80, 160])
def test_bars_and_lines_use_the_width_there_is(run, width):
    write(run, *range(1, 401), eval_loss=2.0, mfu=0.5)
    state, loss, speed, *_ = shown([WatchedRun(run).look()], width).splitlines()
    assert min(map(len, (state, loss, speed))) >= width - 1


@pytest.mark.parametrize("width", [80, 160])
def test_the_line_above_has_a_clock_the_keys_and_of_what_the_figures_are(width):
    words = head(width, 2).plain
    assert len(words) == width and words.endswith(f"  of the last {RECENT_ROWS} rows")
    assert re.match(
        r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC  every 2 s  q ends, any key looks ", words
    )


def test_faults_are_told_with_who_and_when_and_the_last_sign_of_life(tmp_path):
    where = (
        Synthetic(random.Random(1), nodes=3, faults=12, skew=0.0)
        .play()
        .write(tmp_path / "run")
    )
    write(where, 1, 2, 3)
    watched_run = WatchedRun(where)
    look = watched_run.look()
    wanted = failures(read(where))
    assert [(f.generation, f.kind, f.blamed) for f in look.faults] == [
        (f.generation, f.kind, f.blamed) for f in wanted
    ]
    told = shown([look])
    newest = look.faults[-1]
    who = ", ".join(newest.blamed)
    assert (
        f"{date(newest.time):%m-%d %H:%M:%S}  generation {newest.generation}  {newest.kind} of {who}"
        in told
    )
    assert told.count("  fault ") == 4 and f"and {len(wanted) - 4} before these" in told
    assert "over in generation" in told
    for plan in sorted((where / "survive" / "plans").iterdir())[-1:]:
        plan.unlink()
    (where / "survive" / "nodes" / "n1.json").write_bytes(
        encode(Node("n1", wall=time.time() - 43, state="running"))
    )
    (where / "survive" / "nodes" / "n0.json").write_bytes(
        encode(Node("n0", wall=time.time(), state="running"))
    )
    told = shown([watched_run.look()], 120)
    assert (
        "; last sign of life of n1 43 s ago" in told
        and f"generation {newest.generation + 1} on " in told
    )


def test_a_program_gets_one_look_at_each_run(run, tmp_path, capsys):
    write(run, *range(1, 31), mfu=0.4)
    assert main([str(run), str(tmp_path / "later"), "--json"]) == 0
    look, later = json.loads(capsys.readouterr().out)
    assert (look["run"], look["summary"]["step"], look["summary"]["speed"]["mfu"]) == (
        str(run),
        30,
        0.4,
    )
    assert look["faults"] == [] and later["summary"] is None


def test_a_run_has_one_mfu(run):
    """The median of the last 50 rows, wherever it is shown; none where no row knows the devices' peak."""
    for step in range(1, 121):
        write(run, step, mfu=step / 1000)
    rows = [
        json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()
    ]
    wanted = 0.0955
    board = Board(0, "", "", {"tokens": 0.0}, 10)
    for row in rows:
        board(row, "step")
    assert samples_of(board, "meshtrain_mfu") == pytest.approx([wanted])
    summary = summarise(gather(run))
    assert (
        summary.speed.mfu
        == pytest.approx(wanted)
        == WatchedRun(run).look().summary.speed.mfu
    )
    assert f"MFU {wanted:.1%} over the last 50 rows" in render(gather(run), summary)
    assert (
        f"MFU {wanted:.1%}" in shown([WatchedRun(run).look()])
        and summary.figures["MFU"] == f"{wanted:.1%}"
    )
    (run / "metrics.jsonl").unlink()
    write(run, *range(1, 31))
    board = Board(0, "", "", {"tokens": 0.0}, 10)
    board(rows[0] | {"mfu": math.nan}, "step")
    assert samples_of(board, "meshtrain_mfu") == []
    assert (
        "MFU" not in shown([WatchedRun(run).look()])
        and "MFU" not in summarise(gather(run)).figures
    )


def samples_of(board, name):
    return [
        value
        for family in board.families()
        if family.name == name
        for _, value in family.samples
    ]


@pytest.mark.thorough
@pytest.mark.parametrize("key, ends", [("q", True), ("x", False)])
def test_q_ends_it_and_the_terminal_is_as_before(run, key, ends):
    write(run, 1, 2)
    main_end, terminal = pty.openpty()
    before = termios.tcgetattr(terminal)
    command = [sys.executable, "-m", "meshtrain.monitor", "--every", "60", str(run)]
    told, environment = b"", os.environ | {"TERM": "xterm", "COLUMNS": "80"}
    with subprocess.Popen(
        command, stdin=terminal, stdout=terminal, stderr=terminal, env=environment
    ) as process:
        while b"step 2 of 100" not in told:
            told += os.read(main_end, 4096)
        os.write(main_end, key.encode())
        if not ends:
            told = b""
            while b"step 2 of 100" not in told:
                # Another look, long before the minute is over
                told += os.read(main_end, 4096)
            os.write(main_end, b"q")
        assert process.wait(20) == 0
    assert termios.tcgetattr(terminal) == before
    os.close(main_end)
    os.close(terminal)


def test_many_runs_have_a_line_each(run):
    write(run, 1, 2)
    told = shown([WatchedRun(run).look()] * 12, 100, height=10).splitlines()
    assert (
        len(told) == 10
        and told[0].startswith("mine: stopped  step 2/100")
        and told[-1] == "and 3 more"
    )


def test_the_lowest_eval_loss_is_that_of_the_whole_run_and_patience_is_counted_down(
    run,
):
    (run / "config.yaml").write_text(
        "run: {fake_devices: 8}\ntrain: {steps: 9999}\neval: {every: 1, patience: 4}\n"
    )
    lock = RunLock(run)
    try:
        write(run, 1, eval_loss=1.5)
        # More than are kept.
        write(run, *range(2, 2000))
        write(run, 2000, eval_loss=2.0)
        watched = WatchedRun(run)
        told = shown([watched.look()])
        assert "eval 2.0000  lowest 1.5000, step 1\n" in told and tells(
            told, "ends after 3 more", "eval loss"
        )
        write(run, 2001, eval_loss=1.75)
        assert "ends after 2 more" in shown([watched.look()])
        write(run, 2001, 2002, eval_loss=1.25)
        assert "lowest 1.2500, step 2,001" in shown([watched.look()])
    finally:
        lock.release()


def test_the_loss_and_the_speed_that_are_shown_are_those_of_now(run):
    write(run, *range(1, 201))
    write(run, *range(201, 261), loss=1.25, step_seconds=2.0, tokens_per_second=32.0)
    words = line(WatchedRun(run).look())
    assert (
        "loss 1.2500" in words
        and "loss 1.2500" in shown([WatchedRun(run).look()])
        and "32 tokens/s  2 s a step" in words
    )


def test_once_shows_and_ends_and_so_does_the_last_step(run, capsys):
    write(run, 1, 2)
    assert main(["--once", str(run), str(run / "nowhere")]) == 0
    words = capsys.readouterr().out
    assert "step 2 of 100" in words and "there is no run here yet" in words
    write(run, *range(3, 101))
    # The last step ends it.
    assert main([str(run)]) == 0 and capsys.readouterr().out.count("\n") == 1


@pytest.mark.parametrize("arguments", [[], ["x", "--every", "0"], ["x", "--evry", "1"]])
def test_wrong_usage_is_a_sentence_and_exit_code_2(arguments, capsys):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2 and capsys.readouterr().err.count("\n") == 1


@pytest.mark.thorough
def test_ctrl_c_ends_it_well(run):
    write(run, 1, 2)
    command = [sys.executable, "-m", "meshtrain.monitor", "--every", "1", str(run)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert "step 2/100" in process.stdout.readline()
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0 and process.stderr.read() == ""


def test_a_run_that_learns_from_its_answers_shows_their_reward_and_gap(run):
    write(run, 1, 2, **{"rl/reward": 0.25, "rl/gap_max": 2e-6})
    write(run, 3, **{"rl/reward": 0.75, "rl/gap_max": 1e-6})
    look = WatchedRun(run).look()
    assert tells(line(look), "reward 0.7500", "gap 2e-06")
    assert tells(shown([look]), "reward 0.7500", "gap 2e-06")


def test_a_run_without_rewards_shows_none(run):
    write(run, 1, 2)
    assert "reward" not in line(WatchedRun(run).look())
