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
USUAL = {"data": 0.02, "dispatch": 0.05, "wait": 0.9, "log": 0.03}


class Run:
    """Rows of an imaginary run, and the alerts that they bring. A step takes `pace` seconds; samples come every ten."""

    def __init__(self, pace=1.0, ranks=1, seed=0):
        self.judge, self.now, self.alerts, self.step = Judge(), BEGAN, [], 0
        self.pace, self.ranks, self.random = pace, ranks, np.random.default_rng(seed)
        self.sampled = BEGAN

    def hear(self, row, heard):
        self.alerts += self.judge(row, heard, self.now)

    def take(self, steps=1, loss=2.0, slower=1.0, noise=0.0, **more):
        """Steps with heavy-tailed noise: Student's t with 3 degrees of freedom on the loss, lognormal with spikes on
        the seconds.
        """
        for _ in range(steps):
            seconds = self.pace * slower
            if noise:
                seconds *= math.exp(0.2 * self.random.standard_normal()) * (
                    1 + (self.random.random() < 0.02) * 8
                )
            self.step, self.now = self.step + 1, self.now + seconds
            value = (
                loss(self.step) if callable(loss) else loss
            ) + noise * self.random.standard_t(3)
            self.hear(
                {"step": self.step, "loss": value, "tokens_per_second": 1000 / seconds}
                | more,
                "step",
            )
            if self.now - self.sampled >= 10:
                self.sample(self.now - self.sampled)

    def sample(self, seconds=10.0, phases=lambda rank: USUAL, advance=False, **more):
        """A sample of each rank over so many seconds; `phases(rank)` are their shares."""
        self.now += seconds if advance else 0.0
        self.sampled = self.now
        for rank in reversed(range(self.ranks)):
            spent = {name: share * seconds for name, share in phases(rank).items()}
            self.hear(
                {"rank": rank, "host": f"n{rank}", "phase_seconds": spent} | more,
                "process",
            )

    def samples(self, count, phases=USUAL, **more):
        for _ in range(count):
            self.sample(advance=True, phases=lambda rank: phases, **more)

    def said(self):
        return [(alert.rule, alert.state) for alert in self.alerts]


EVALUATING, WAITING = {"eval": 1.0}, {"wait": 1.0}


def fires(rule):
    return [(rule, "firing")]


def once(rule):
    return [(rule, "firing"), (rule, "resolved")]


@pytest.mark.parametrize(
    ("bad", "sentence"),
    [
        ({"loss": math.nan}, "loss of step 4 is nan"),
        ({"loss": math.inf}, "loss of step 4 is inf"),
        ({"loss": None, "not_finite": ["loss"]}, "loss of step 4 is not finite"),
        ({"loss": 2.5, "grad_norm": math.nan}, "gradient norm of step 4 is nan"),
        (
            {"loss": 2.5, "grad_norm": math.nan, "loss_scale": 65536.0},
            None,
        ),  # float16 skips the step
    ],
)
def test_a_loss_or_gradient_that_is_no_number_fires_at_its_first_row(bad, sentence):
    run = Run()
    run.take(3)
    for _ in range(4):
        run.hear({"step": 4} | bad, "step")
    run.take(3)
    assert run.said() == (once("loss_not_finite") if sentence else [])
    if sentence:
        alert = run.alerts[0]
        assert (alert.step, alert.severity, alert.sentence) == (
            4,
            "critical",
            f"the {sentence}.",
        )


def test_a_loss_that_rises_and_stays_fires_and_clears_when_it_falls():
    run = Run()
    run.take(100, loss=2.0, noise=0.02)
    run.take(300, loss=2.6, noise=0.02)
    assert run.said() == fires("loss_spike"), "the spike is not usual"
    run.take(20, loss=2.0, noise=0.02)
    assert run.said() == once("loss_spike")
    assert (
        run.alerts[0].step in (103, 104)
        and "where it was 2, " in run.alerts[0].sentence
    )


def test_one_bad_batch_is_no_spike():
    run = Run()
    run.take(100, noise=0.02)
    run.take(2, loss=9.0)
    run.take(100, noise=0.02)
    assert run.said() == []


def test_throughput_that_drops_for_good_fires_once():
    run = Run()
    run.take(200, noise=1e-3)
    run.take(2000, slower=2.0, noise=1e-3)
    assert run.said() == fires("throughput_drop")
    run.take(300, noise=1e-3)
    assert run.said() == once("throughput_drop")
    assert 0.4 < run.alerts[0].value < 0.7


def test_half_a_minute_and_saves_and_evaluations_are_no_drop():
    run = Run(pace=0.1)
    for slower in (1.0, 3.0, 1.0):
        run.take(100 if slower > 1 else 500, slower=slower)
    assert run.said() == []
    run = Run(pace=0.5)
    for _ in range(40):
        run.take(19)
        run.take(1, slower=60, checkpoint_seconds=30.0, checkpoint_bytes=1e9)
    assert run.said() == []


def test_the_rank_that_waits_least_is_named_and_no_other():
    run = Run(ranks=4)
    run.samples(50, {"data": 0.7, "dispatch": 0.05, "wait": 0.25, "log": 0.0})
    assert run.said() == [], "a loader that starves all alike"
    run.samples(20)
    slow = {"data": 0.6, "dispatch": 0.05, "wait": 0.3, "log": 0.05}
    for phases in [USUAL] + [slow] * 8 + [USUAL] * 12:
        run.sample(
            advance=True,
            phases=lambda rank, phases=phases: phases if rank == 2 else USUAL,
        )
    assert run.said() == once("slow_rank") and [alert.rank for alert in run.alerts] == [
        2,
        2,
    ]
    assert (
        "rank 2 on n2" in run.alerts[0].sentence
        and "it gets its batch" in run.alerts[0].sentence
    )


def test_samples_are_looked_at_though_the_first_rank_gives_none(monkeypatch):
    monkeypatch.setattr(signals, "MOST_WAITING", 8)
    run = Run()
    for k in range(80):
        run.now += 5
        waiting = 0.3 if k % 2 else 0.9
        run.hear(
            {
                "rank": 1 + k % 2,
                "phase_seconds": {"data": 1 - waiting, "wait": waiting},
            },
            "process",
        )
    assert run.said() == fires("slow_rank") and run.alerts[0].rank == 2


def device(used):
    return {
        "device_memory_used_bytes": {"0": 10, "1": used},
        "device_memory_limit_bytes": {"0": 100, "1": 100},
    }


@pytest.mark.parametrize(
    "rule, near, far, rank",
    [
        (
            "memory_limit",
            {"memory_limit_used_ratio": 0.95},
            {"memory_limit_used_ratio": 0.5},
            0,
        ),
        ("machine_memory", {"memory_used_ratio": 0.97}, {"memory_used_ratio": 0.5}, 0),
        ("device_memory", device(99), device(50), 0),
        (
            "disk_space",
            {"disk_free_bytes": 0.5 * GIB},
            {"disk_free_bytes": 50 * GIB},
            None,
        ),
    ],
)
def test_what_runs_out_is_told_once_and_once_more_when_it_no_longer_does(
    rule, near, far, rank
):
    run = Run()
    for values in (far, near, near, near, near, far, far, far, far, near, far):
        run.sample(advance=True, **values)
    assert run.said() == (once(rule) if BY_RULE[rule].seconds else once(rule) * 2)
    assert {alert.rank for alert in run.alerts} == {rank}


def test_of_a_machine_with_several_ranks_one_tells():
    run = Run()
    for k in range(8):
        run.now += 10
        for rank, host in ((1, "a"), (0, "a"), (2, "b"), (3, "b")):
            ratios = {"memory_used_ratio": 0.97, "memory_limit_used_ratio": k / 100}
            run.hear({"rank": rank, "host": host} | ratios, "process")
    assert [(alert.rule, alert.rank) for alert in run.alerts] == [
        ("machine_memory", 1),
        ("machine_memory", 2),
    ]


def test_what_a_row_does_not_say_is_no_alert():
    run = Run()
    for limit in ({}, {"1": 100}, {"0": None}, None):
        run.sample(
            advance=True,
            device_memory_used_bytes={"0": 99},
            device_memory_limit_bytes=limit,
        )
    for _ in range(100):
        run.now += 10
        run.hear({"rank": 0}, "process")
        run.hear({"step": 1}, "step")
        run.hear(
            {
                "rank": 1,
                "phase_seconds": {},
                "memory_used_ratio": None,
                "disk_free_bytes": None,
            },
            "process",
        )
    assert run.said() == []


def test_a_save_that_will_not_fit_fires_before_it_is_made_and_a_disk_that_fills_hours_before():
    run = Run()
    run.take(5, checkpoint_bytes=80 * GIB)
    for free in (79, 300):
        run.sample(disk_free_bytes=free * GIB)
    assert run.said() == once("disk_space")
    run, free = Run(), 900 * GIB
    for _ in range(400):
        free -= 0.5 * GIB
        run.samples(1, EVALUATING, disk_free_bytes=free, disk_used_ratio=0.7)
    assert run.said() == fires("disk_filling") and 3.5 < run.alerts[0].value <= 4
    run.samples(400, EVALUATING, disk_free_bytes=free, disk_used_ratio=0.7)
    assert run.said() == once("disk_filling")


def test_saves_that_come_and_go_and_a_disk_that_is_nearly_empty_fill_nothing():
    saves, empty = Run(), Run()
    for k in range(1000):
        saves.samples(
            1, EVALUATING, disk_free_bytes=(100 - k % 60 / 3) * GIB, disk_used_ratio=0.9
        )
        empty.samples(
            1, EVALUATING, disk_free_bytes=(900 - k * 0.5) * GIB, disk_used_ratio=0.3
        )
    assert saves.said() == [] and empty.said() == []


def test_no_row_for_ten_usual_intervals_is_a_stall_and_a_row_ends_it():
    run = Run(pace=20.0)
    run.take(40)
    run.samples(18, WAITING)
    assert run.said() == []
    run.samples(30, WAITING)
    assert run.said() == fires("stalled")
    assert run.alerts[0].time - BEGAN - 40 * 20 == pytest.approx(210, abs=11)
    run.take(40)
    assert run.said() == once("stalled")


def test_a_rest_of_quick_steps_compiling_evaluating_and_saving_are_no_stall():
    run = Run(pace=0.05)
    run.take(100)
    run.samples(5, WAITING)
    run.take(100)
    assert run.said() == []
    run = Run()
    for phase in ("compile", "eval", "save"):
        run.take(50)
        run.samples(100, {phase: 1.0})
    run.take(50)
    assert "stalled" not in [rule for rule, _ in run.said()]


def test_a_first_step_that_never_ends_and_half_an_hour_without_a_row_where_nobody_samples_are_stalls():
    run = Run()
    run.samples(200, WAITING)
    assert run.said() == fires("stalled")
    run = Run()
    for step in range(1, 51):
        run.now += 1
        run.hear({"step": step, "loss": 2.0, "tokens_per_second": 1.0}, "step")
    for expected in ([], fires("stalled")):
        for _ in range(100):
            run.now += 10
            run.hear({}, "tick")
        assert run.said() == expected


def test_goodput_is_of_the_last_hour_and_the_start_is_no_part_of_it():
    run = Run()
    run.samples(400, {"init": 0.5, "compile": 0.5})
    run.take(1)

    def hour_of(phases):
        for _ in range(500):
            run.samples(1, phases)
            run.step += 1
            run.hear({"step": run.step, "loss": 2.0}, "step")

    hour_of({"wait": 0.9, "data": 0.1})
    assert run.said() == []
    for share in (0.4, 0.95):
        hour_of({"wait": share, "save": 1 - share})
    assert run.said() == once("goodput_low")


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(6))
def test_a_healthy_run_with_heavy_tailed_noise_brings_no_alert(seed):
    run = Run(pace=(0.05, 1.0, 30.0)[seed % 3], ranks=2, seed=seed)
    run.take(4000, loss=lambda step: 2 + 4 * math.exp(-step / 200), noise=0.05)
    assert run.said() == []


def test_a_real_quickstart_run_on_a_shared_machine_brings_no_alert_until_its_loss_is_raised():
    """Its rows and samples, time counted from the first one; other processes took two thirds of its 2 cores."""
    rows = [
        json.loads(line)
        for line in (Path(__file__).parent / "quickstart_rows.jsonl")
        .read_text()
        .splitlines()
    ]
    for factor, expected in ((1.0, []), (1.5, fires("loss_spike"))):
        run = Run()
        for row in rows:
            run.now = BEGAN + row["time"]
            raised = {"loss": row["loss"] * factor} if row.get("step", 0) > 110 else {}
            run.hear(row | raised, "process" if "rank" in row else "step")
        assert run.said() == expected


def test_between_firing_and_clearing_nothing_changes():
    run = Run()
    for ratio in ([0.95] * 4 + [0.90] * 6 + [0.93] * 2 + [0.84, 0.90]) * 3:
        run.sample(advance=True, memory_limit_used_ratio=ratio)
    assert run.said() == fires("memory_limit")


def test_thresholds_stand_once_with_a_reason_and_do_not_flap():
    assert len(BY_RULE) == len(THRESHOLDS)
    for threshold in THRESHOLDS:
        assert threshold.reason and threshold.counts
        assert threshold.is_good(threshold.clears) and not threshold.is_bad(
            threshold.clears
        )
        assert not (
            threshold.is_good(threshold.fires) and threshold.fires != threshold.clears
        )
