"""Each rule fires once when its cause begins and once more when it is over; healthy runs, however noisy, bring none."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from meshtrain.telemetry import signals
from meshtrain.telemetry.alerts import Judge
from meshtrain.telemetry.thresholds import BY_RULE, THRESHOLDS

BEGAN = 1.8e9
GIB = 2.0**30


class Run:
    """Rows of an imaginary run, and the alerts that they bring. A step takes `pace` seconds; samples come every ten."""

    def __init__(self, pace=1.0, ranks=1, seed=0):
        self.judge, self.now, self.alerts, self.step = Judge(), BEGAN, [], 0
        self.pace, self.ranks, self.random = pace, ranks, np.random.default_rng(seed)
        self.sampled = BEGAN

    def hear(self, row, heard):
        self.alerts += self.judge(row, heard, self.now)

    def take(self, steps=1, loss=2.0, slower=1.0, noise=0.0, **more):
        """Steps with heavy-tailed noise: Student's t with 3 degrees of freedom on the loss, lognormal with spikes on the seconds."""
        for _ in range(steps):
            seconds = self.pace * slower
            if noise:
                seconds *= math.exp(0.2 * self.random.standard_normal()) * (1 + (self.random.random() < 0.02) * 8)
            self.step, self.now = self.step + 1, self.now + seconds
            value = loss(self.step) if callable(loss) else loss
            row = {
                "step": self.step,
                "loss": value + noise * self.random.standard_t(3),
                "tokens_per_second": 1000 / seconds,
            }
            self.hear(row | more, "step")
            if self.now - self.sampled >= 10:
                self.sample(self.now - self.sampled)

    def sample(self, seconds=10.0, phases=None, advance=False, **more):
        """A sample of each rank over so many seconds; `phases(rank)` are their shares."""
        self.now += seconds if advance else 0.0
        self.sampled = self.now
        for rank in reversed(range(self.ranks)):
            shares = phases(rank) if phases else {"data": 0.02, "dispatch": 0.05, "wait": 0.9, "log": 0.03}
            row = {"rank": rank, "host": f"n{rank}", "phase_seconds": {k: v * seconds for k, v in shares.items()}}
            self.hear(row | more, "process")

    def said(self):
        return [(alert.rule, alert.state) for alert in self.alerts]


def evaluating(rank):
    return {"eval": 1.0}


def once(rule):
    return [(rule, "firing"), (rule, "resolved")]


def test_a_loss_that_is_no_number_fires_at_its_first_row():
    for bad in ({"loss": math.nan}, {"loss": math.inf}, {"loss": None, "not_finite": ["loss"]}):
        run = Run()
        run.take(3)
        for _ in range(4):
            run.hear({"step": 4} | bad, "step")
        run.take(3)
        assert run.said() == once("loss_not_finite")
        assert (run.alerts[0].step, run.alerts[0].severity) == (4, "critical")


def test_a_gradient_that_is_no_number_fires_too_unless_float16_skips_the_step():
    for more, expected in (({}, once("loss_not_finite")), ({"loss_scale": 65536.0}, [])):
        run = Run()
        run.take(3)
        run.hear({"step": 4, "loss": 2.5, "grad_norm": math.nan} | more, "step")
        run.take(3)
        assert run.said() == expected
        assert not expected or "the gradient norm of step 4 is nan" in run.alerts[0].sentence


def test_a_loss_that_rises_and_stays_fires_and_clears_when_it_falls():
    run = Run()
    run.take(100, loss=2.0, noise=0.02)
    run.take(300, loss=2.6, noise=0.02)
    assert run.said() == [("loss_spike", "firing")], "what lies within the spike is not usual"
    run.take(20, loss=2.0, noise=0.02)
    assert run.said() == once("loss_spike")
    assert run.alerts[0].step in (103, 104) and "where it was 2, " in run.alerts[0].sentence


def test_one_bad_batch_is_no_spike():
    run = Run()
    run.take(100, noise=0.02)
    run.take(2, loss=9.0)
    run.take(100, noise=0.02)
    assert run.said() == []


def test_throughput_that_drops_for_good_fires_once():
    run = Run(pace=1.0)
    run.take(200, noise=1e-3)
    run.take(2000, slower=2.0, noise=1e-3)
    assert run.said() == [("throughput_drop", "firing")]
    run.take(300, noise=1e-3)
    assert run.said() == once("throughput_drop")
    assert 0.4 < run.alerts[0].value < 0.7


def test_throughput_that_drops_for_half_a_minute_is_no_alert():
    run = Run(pace=0.1)
    run.take(500)
    run.take(100, slower=3.0)
    run.take(500)
    assert run.said() == []


def test_saves_and_evaluations_are_no_drop():
    run = Run(pace=0.5)
    for _ in range(40):
        run.take(19)
        run.take(1, slower=60, checkpoint_seconds=30.0, checkpoint_bytes=1e9)
    assert run.said() == []


def test_the_rank_that_waits_least_is_named_and_no_other():
    run = Run(ranks=4)
    usual = {"data": 0.02, "dispatch": 0.05, "wait": 0.9, "log": 0.03}
    slow = {"data": 0.6, "dispatch": 0.05, "wait": 0.3, "log": 0.05}
    for phases in [usual] + [slow] * 8 + [usual] * 12:
        run.sample(advance=True, phases=lambda rank, phases=phases: phases if rank == 2 else usual)
    assert run.said() == once("slow_rank")
    assert [alert.rank for alert in run.alerts] == [2, 2]
    assert "rank 2 on n2" in run.alerts[0].sentence and "it gets its batch" in run.alerts[0].sentence


def test_samples_are_looked_at_though_the_first_rank_gives_none(monkeypatch):
    monkeypatch.setattr(signals, "MOST_WAITING", 8)
    run = Run()
    for k in range(80):
        run.now += 5
        waiting = 0.3 if k % 2 else 0.9
        run.hear({"rank": 1 + k % 2, "phase_seconds": {"data": 1 - waiting, "wait": waiting}}, "process")
    assert run.said() == [("slow_rank", "firing")] and run.alerts[0].rank == 2


def test_a_loader_that_starves_all_ranks_alike_makes_none_of_them_slow():
    run = Run(ranks=4)
    for _ in range(50):
        run.sample(advance=True, phases=lambda rank: {"data": 0.7, "dispatch": 0.05, "wait": 0.25, "log": 0.0})
    assert run.said() == []


@pytest.mark.parametrize(
    "rule, near, far, rank",
    [
        ("memory_limit", {"memory_limit_used_ratio": 0.95}, {"memory_limit_used_ratio": 0.5}, 0),
        ("machine_memory", {"memory_used_ratio": 0.97}, {"memory_used_ratio": 0.5}, 0),
        (
            "device_memory",
            {"device_memory_used_bytes": {"0": 10, "1": 99}, "device_memory_limit_bytes": {"0": 100, "1": 100}},
            {"device_memory_used_bytes": {"0": 10, "1": 50}, "device_memory_limit_bytes": {"0": 100, "1": 100}},
            0,
        ),
        ("disk_space", {"disk_free_bytes": 0.5 * GIB}, {"disk_free_bytes": 50 * GIB}, None),
    ],
)
def test_what_runs_out_is_told_once_and_once_more_when_it_no_longer_does(rule, near, far, rank):
    run = Run()
    for values in (far, near, near, near, near, far, far, far, far, near, far):
        run.sample(advance=True, **values)
    expected = once(rule) if BY_RULE[rule].seconds else once(rule) * 2
    assert run.said() == expected
    assert {alert.rank for alert in run.alerts} == {rank}


def test_of_a_machine_with_several_ranks_one_tells():
    run = Run()
    for k in range(8):
        run.now += 10
        for rank, host in ((1, "a"), (0, "a"), (2, "b"), (3, "b")):
            run.hear(
                {"rank": rank, "host": host, "memory_used_ratio": 0.97, "memory_limit_used_ratio": k / 100}, "process"
            )
    assert [(alert.rule, alert.rank) for alert in run.alerts] == [("machine_memory", 1), ("machine_memory", 2)]


def test_a_device_of_which_the_limit_is_not_known_is_no_alert():
    run = Run()
    for limit in ({}, {"1": 100}, {"0": None}, None):
        run.sample(advance=True, device_memory_used_bytes={"0": 99}, device_memory_limit_bytes=limit)
    assert run.said() == []


def test_a_save_that_will_not_fit_fires_before_it_is_made():
    run = Run()
    run.take(5, checkpoint_bytes=80 * GIB)
    run.sample(disk_free_bytes=79 * GIB)
    run.sample(disk_free_bytes=300 * GIB)
    assert run.said() == once("disk_space")


def test_a_disk_that_fills_is_told_hours_before():
    run, free = Run(), 900 * GIB
    for _ in range(400):
        free -= 0.5 * GIB
        run.sample(advance=True, disk_free_bytes=free, disk_used_ratio=0.7, phases=evaluating)
    assert run.said() == [("disk_filling", "firing")]
    assert 3.5 < run.alerts[0].value <= 4
    for _ in range(400):
        run.sample(advance=True, disk_free_bytes=free, disk_used_ratio=0.7, phases=evaluating)
    assert run.said() == once("disk_filling")


def test_saves_that_come_and_go_and_a_disk_that_is_nearly_empty_fill_nothing():
    saves, empty = Run(), Run()
    for k in range(1000):
        saves.sample(advance=True, disk_free_bytes=(100 - k % 60 / 3) * GIB, disk_used_ratio=0.9, phases=evaluating)
        empty.sample(advance=True, disk_free_bytes=(900 - k * 0.5) * GIB, disk_used_ratio=0.3, phases=evaluating)
    assert saves.said() == [] and empty.said() == []


def test_of_looks_at_the_disk_only_those_some_seconds_apart_are_kept():
    disk = signals.Disk()
    for second in range(100):
        list(disk.hear({"rank": 0, "disk_free_bytes": GIB}, "process", BEGAN + second))
    assert len(disk.free) == 100 / signals.BETWEEN


def test_no_row_for_ten_usual_intervals_is_a_stall_and_a_row_ends_it():
    run = Run(pace=20.0)
    run.take(40)
    for _ in range(18):
        run.sample(advance=True, phases=lambda rank: {"wait": 1.0})
    assert run.said() == []
    for _ in range(30):
        run.sample(advance=True, phases=lambda rank: {"wait": 1.0})
    assert run.said() == [("stalled", "firing")]
    assert run.alerts[0].time - BEGAN - 40 * 20 == pytest.approx(210, abs=11)
    run.take(40)
    assert run.said() == once("stalled")


def test_quick_steps_may_rest_for_the_better_part_of_a_minute():
    run = Run(pace=0.05)
    run.take(100)
    for _ in range(5):
        run.sample(advance=True, phases=lambda rank: {"wait": 1.0})
    run.take(100)
    assert run.said() == []


def test_compiling_evaluating_and_saving_are_no_stall():
    run = Run(pace=1.0)
    for phase in ("compile", "eval", "save"):
        run.take(50)
        for _ in range(100):
            run.sample(advance=True, phases=lambda rank, phase=phase: {phase: 1.0})
    run.take(50)
    assert [rule for rule, _ in run.said() if rule == "stalled"] == []


def test_a_first_step_that_never_ends_is_a_stall():
    run = Run()
    for _ in range(200):
        run.sample(advance=True, phases=lambda rank: {"wait": 1.0})
    assert run.said() == [("stalled", "firing")]


def test_where_nobody_samples_half_an_hour_without_a_row_is_a_stall():
    run = Run()
    for _ in range(50):
        run.step, run.now = run.step + 1, run.now + 1
        run.hear({"step": run.step, "loss": 2.0, "tokens_per_second": 1.0}, "step")
    for expected in ([], [("stalled", "firing")]):
        for _ in range(100):
            run.now += 10
            run.hear({}, "tick")
        assert run.said() == expected


def test_goodput_is_of_the_last_hour_and_the_start_is_no_part_of_it():
    run = Run()
    for _ in range(400):
        run.sample(advance=True, phases=lambda rank: {"init": 0.5, "compile": 0.5})
    run.take(1)
    for _ in range(500):
        run.sample(advance=True, phases=lambda rank: {"wait": 0.9, "data": 0.1})
        run.step += 1
        run.hear({"step": run.step, "loss": 2.0}, "step")
    assert run.said() == []
    for share in (0.4, 0.95):
        for _ in range(500):
            run.sample(advance=True, phases=lambda rank, share=share: {"wait": share, "save": 1 - share})
            run.step += 1
            run.hear({"step": run.step, "loss": 2.0}, "step")
    assert run.said() == once("goodput_low")


@pytest.mark.parametrize("seed", range(6))
def test_a_healthy_run_with_heavy_tailed_noise_brings_no_alert(seed):
    run = Run(pace=(0.05, 1.0, 30.0)[seed % 3], ranks=2, seed=seed)
    falling = lambda step: 2 + 4 * math.exp(-step / 200)  # noqa: E731
    run.take(4000, loss=falling, noise=0.05)
    assert run.said() == []


def test_a_real_quickstart_run_on_a_shared_machine_brings_no_alert_until_its_loss_is_raised():
    """Its rows and samples, time counted from the first one; other processes took two thirds of its 2 cores."""
    rows = [json.loads(line) for line in (Path(__file__).parent / "quickstart_rows.jsonl").read_text().splitlines()]
    for factor, expected in ((1.0, []), (1.5, [("loss_spike", "firing")])):
        run = Run()
        for row in rows:
            run.now = BEGAN + row["time"]
            raised = {"loss": row["loss"] * factor} if row.get("step", 0) > 110 else {}
            run.hear(row | raised, "process" if "rank" in row else "step")
        assert run.said() == expected


def test_what_a_row_does_not_say_is_no_alert():
    run = Run()
    for _ in range(100):
        run.now += 10
        run.hear({"rank": 0}, "process")
        run.hear({"step": 1}, "step")
        run.hear({"rank": 1, "phase_seconds": {}, "memory_used_ratio": None, "disk_free_bytes": None}, "process")
    assert run.said() == []


def test_between_firing_and_clearing_nothing_changes():
    run = Run()
    for ratio in ([0.95] * 4 + [0.90] * 6 + [0.93] * 2 + [0.84, 0.90]) * 3:
        run.sample(advance=True, memory_limit_used_ratio=ratio)
    assert run.said() == [("memory_limit", "firing")]


def test_an_alert_says_in_its_row_what_is_known():
    run = Run()
    run.hear({"step": 7, "loss": math.nan}, "step")
    assert run.alerts[0].row() == {
        "time": BEGAN, "step": 7, "rule": "loss_not_finite", "state": "firing", "severity": "critical", "value": 1, "limit": 0,
        "sentence": "the loss of step 7 is nan.",
    }  # fmt: skip


def test_thresholds_stand_once_with_a_reason_and_do_not_flap():
    assert len(BY_RULE) == len(THRESHOLDS)
    for threshold in THRESHOLDS:
        assert threshold.reason and threshold.counts
        assert not threshold.is_bad(threshold.clears)
        assert threshold.is_good(threshold.clears)
        assert not (threshold.is_good(threshold.fires) and threshold.fires != threshold.clears)
