"""Run directories as they are found: half of them, of other versions, gone on from, and what is none."""

import json
import os
import random
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from refusals import tells
from synthetic_history import Synthetic

from experiments.watch.page import write_run
from meshtrain.config import ConfigError, load
from meshtrain.plan.shapes import model_flops
from meshtrain.report.facts import gather
from meshtrain.report.measured import MemoryUse
from meshtrain.report.sections import Section, _memory, ladder
from meshtrain.report.summary import settings, summarise
from meshtrain.report.text import render, section_text
from meshtrain.run.lock import RunLock

OLD = {
    "step": 7,
    "loss": 2.5,
    "grad_norm": 1.0,
    "learning_rate": 1e-3,
    "tokens": 64,
    "tokens_per_second": 64.0,
    "step_seconds": 1.0,
}


@pytest.fixture
def run(tmp_path):
    (tmp_path / "config.yaml").write_text(
        "run: {fake_devices: 8}\ntrain: {steps: 10}\n"
    )
    return tmp_path


def write(run, *rows, end=""):
    (run / "metrics.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows) + end
    )


def write_sample(run, **values):
    (run / "resources").mkdir(exist_ok=True)
    (run / "resources" / "0.jsonl").write_text(
        json.dumps({"time": 1.0, "rank": 0} | values) + "\n"
    )


def told(run):
    facts = gather(run)
    summary = summarise(facts)
    return summary, render(facts, summary)


def remarks(run):
    return " ".join(reason.sentence for reason in told(run)[0].reasons)


@pytest.mark.parametrize(("padding", "share"), [(16, "20%"), (0, None)])
def test_padding_is_told_where_positions_hold_it(run, padding, share):
    write(run, *(OLD | {"step": k, "padding_tokens": padding} for k in range(1, 10)))
    said = told(run)[1]
    assert "64 tokens/s" in said
    assert (f"Padding fills {share}" in said) if share else ("Padding" not in said)


def accelerator(run):
    return gather(run).plan.cluster.accelerator.name


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("missing", "there is no run directory"),
        ("\0", "there is no run directory"),
        ("file", "there is no run directory"),
        (".", r"run directory: .*config.yaml .*metrics.jsonl\.$"),
    ],
)
def test_what_is_no_run_is_refused_in_a_sentence(tmp_path, name, sentence):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=sentence):
        gather(tmp_path / name)


def test_a_run_that_has_taken_no_step_says_so(run):
    summary, text = told(run)
    assert summary.state == "not begun" and text.startswith(
        "not begun: no step has been taken\n"
    )


def test_a_run_from_before_telemetry_is_told_of(run):
    write(run, *(OLD | {"step": k} for k in range(1, 8)))
    summary, text = told(run)
    assert (summary.state, summary.step, summary.steps) == ("stopped", 7, 10)
    assert "with remarks; stopped, after step 7 of 10" in text and "1 s a step" in text


def test_a_row_that_was_cut_off_is_a_note_and_one_that_is_being_written_is_none(run):
    write(run, OLD, end='{"step": 8, "lo\n')
    assert tells(told(run)[1], "1 line is not a row", "metrics.jsonl")
    write(run, OLD, end='{"step": 8, "lo')
    summary, text = told(run)
    assert summary.step == 7 and "no row" not in text


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"[1, 2]",
        b"a: {b: [",
        b"train: {steps: many}",
        b"sorcery: {on: true}",
        None,
    ],
)
def test_a_config_that_is_none_costs_the_plan_and_no_more(run, content):
    write(run, OLD)
    said = "config.yaml cannot be read, "
    if content is None:
        (run / "config.yaml").unlink()
        said = "there is no config.yaml"
    else:
        (run / "config.yaml").write_bytes(content)
    summary, text = told(run)
    assert summary.step == 7 and "loss" in text and said in text
    assert "the planned step" not in text


def test_a_run_that_holds_its_directory_goes_on_and_one_that_says_nothing_hangs(run):
    write(run, *(OLD | {"step": k} for k in range(1, 8)))
    lock = RunLock(run)
    try:
        assert told(run)[0].state == "going on"
        os.utime(run / "metrics.jsonl", (1, 1))
        summary, text = told(run)
        assert (
            summary.state == "stalled"
            and summary.level == "bad"
            and "the run may hang" in text
        )
        os.utime(run / "metrics.jsonl", (time.time() - 300,) * 2)
        write_sample(run, phase_seconds={"wait": 1.0, "eval": 9.0})
        assert told(run)[0].state == "going on", "evaluations take their time"
        write_sample(run, phase_seconds={"wait": 9.0})
        assert told(run)[0].state == "stalled"
    finally:
        lock.release()


@pytest.mark.parametrize(
    ("patience", "state"), [(2, "done"), (3, "stopped"), (0, "stopped")]
)
def test_a_run_that_eval_patience_ended_is_done(run, patience, state):
    evaluated = f"eval: {{every: 1, patience: {patience}}}\n"
    (run / "config.yaml").write_text(
        "run: {fake_devices: 8}\ntrain: {steps: 10}\n" + evaluated
    )
    write(
        run,
        *(
            OLD | {"step": k, "eval_loss": loss}
            for k, loss in ((1, 2.0), (2, 1.5), (3, 1.5), (4, None))
        ),
    )
    summary, text = told(run)
    assert summary.state == state and (summary.eval_least, summary.eval_least_step) == (
        1.5,
        2,
    )
    assert tells(text, "done, ", "eval.patience after step 4 of 10") is (
        state == "done"
    )
    assert ("ends after 1 more evaluation" in text) is (patience == 3)


@pytest.mark.parametrize(
    ("evals", "said"),
    [
        ((2.0, 1.5, 1.6, 1.7, 1.8), True),
        ((2.0, 1.5, 1.6, 1.8), False),
        ((1.5, 1.51, 1.52, 1.53), False),
    ],
)
def test_validation_text_that_is_learned_no_longer_is_a_remark(run, evals, said):
    write(
        run, *(OLD | {"step": k, "eval_loss": loss} for k, loss in enumerate(evals, 1))
    )
    lowest = ("lowest after step 2, 1.5", "1.8, 3 evaluations later: ")
    assert tells(remarks(run), "validation text", *lowest) is said


def test_a_loss_that_was_not_finite_is_not_healthy(run):
    write(run, OLD, OLD | {"step": 8, "loss": None, "not_finite": ["loss"]})
    summary, text = told(run)
    assert summary.level == "bad" and "not finite in 1 row." in text


def test_a_loss_that_rises_is_a_remark(run):
    write(
        run,
        *(
            OLD | {"step": k, "loss": 3.0 - 0.02 * min(k, 50) + 0.02 * max(k - 50, 0)}
            for k in range(1, 101)
        ),
    )
    assert "has risen from" in remarks(run)
    write(run, *(OLD | {"step": k, "loss": 3.0 - 0.01 * k} for k in range(1, 101)))
    assert "risen" not in remarks(run)


@pytest.mark.parametrize("seed", range(5))
def test_a_loss_that_is_noisy_has_not_risen(run, seed):
    noise = np.random.default_rng(seed).normal(0, 0.15, 60)
    write(run, *(OLD | {"step": k + 1, "loss": 2.5 + noise[k]} for k in range(60)))
    assert "risen" not in remarks(run)


def test_a_loader_that_is_waited_for_is_a_remark(run):
    write(run, *(OLD | {"step": k, "data_wait_seconds": 0.3} for k in range(1, 11)))
    assert told(run)[0].speed.waiting == pytest.approx(0.3)
    assert tells(remarks(run), "30% of", "waiting for data")


def test_only_an_alert_that_has_not_cleared_is_a_reason(run):
    write(run, OLD)
    alert = {
        "time": 1.0,
        "step": 7,
        "rule": "spike",
        "severity": "warning",
        "sentence": "the loss jumped",
    }
    firing, resolved = (
        json.dumps(alert | {"state": state}) + "\n" for state in ("firing", "resolved")
    )
    (run / "alerts.jsonl").write_text(firing)
    assert "alert spike: the loss jumped." in told(run)[1]
    (run / "alerts.jsonl").write_text(firing + resolved)
    assert (
        "alert spike" not in told(run)[1]
        and "1 × spike; none still firing" in told(run)[1]
    )


@pytest.mark.parametrize(
    "content",
    [b"[", b"3", b'{"findings": [3, {}]}', b'{"findings": {"a": 1}, "parts": 7}'],
)
def test_findings_that_are_none_are_passed_over(run, content):
    write(run, OLD)
    (run / "findings.json").write_bytes(content)
    assert told(run)[0].step == 7


def test_findings_are_reasons_with_what_their_cure_would_win_and_stand_in_the_headline(
    run,
):
    write(run, *(OLD | {"step": k} for k in range(1, 11)))
    finding = {
        "name": "loader",
        "sentence": "the loader is slow.",
        "severity": 0.25,
        "advice": "make it fast",
    }
    part = {"name": "layers", "seconds": 0.5, "planned": 0.25}
    (run / "findings.json").write_text(
        json.dumps({"findings": [finding], "parts": [part]})
    )
    summary, text = told(run)
    assert summary.verdict.startswith("healthy, but something was found; ")
    assert all(
        words in text
        for words in (
            "1. the loader is slow.",
            "25% of a step. make it fast",
            "layers",
            "500 ms",
            "250 ms",
        )
    )


def test_a_supervised_run_has_goodput_and_faults(tmp_path):
    summary, text = told(
        Synthetic(random.Random(1), nodes=2, faults=3).play().write(tmp_path / "run")
    )
    assert summary.goodput is not None and summary.faults > 0
    assert (
        "Goodput" in text and "by the supervisors' ledger" in text and "fault" in text
    )


def test_what_follows_from_other_keys_and_defaults_is_no_setting(run):
    assert dict(settings(gather(run))) == {"run.fake_devices": 8, "train.steps": 10}
    # Which schedule follows from a pipeline is not what somebody has set.
    (run / "config.yaml").write_text("mesh: {pipeline: 2}\n")
    facts = gather(run)
    assert facts.config.parallel.schedule != load(None).parallel.schedule
    assert dict(settings(facts)) == {"mesh.pipeline": 2}


def test_samples_give_memory_and_phases(tmp_path):
    facts = gather(write_run(tmp_path / "run", 300))
    summary = summarise(facts)
    assert (
        facts.ranks == 2
        and set(facts.samples) == {0, 1}
        and facts.hosts == {0: "n0", 1: "n1"}
    )
    assert {spent.name for spent in summary.wall} == {
        "data",
        "dispatch",
        "wait",
        "log",
        "save",
    }
    assert sum(spent.share for spent in summary.wall) == pytest.approx(1.0)
    assert max(held.used for held in summary.held) > 60e9


def write_at_half_of(run, peak):
    """Rows of a run at half of the peak FLOP/s of its devices."""
    config = load(run / "config.yaml")
    of_a_token = model_flops(config) / (
        config.train.global_batch_size * config.train.sequence_length
    )
    rate = 0.5 * peak * config.mesh.devices / of_a_token
    write(
        run,
        *(
            OLD | {"step": k, "tokens_per_second": rate, "mfu": 0.5}
            for k in range(1, 4)
        ),
    )


def test_a_config_that_fakes_devices_where_there_are_none_may_have_run_on_real_ones(
    tmp_path,
):
    (tmp_path / "config.yaml").write_text(
        "run: {fake_devices: 8}\nprecision: {compute: bfloat16}\n"
    )
    write_at_half_of(tmp_path, 459e12)
    assert accelerator(tmp_path) == "tpu-v5p"
    write(tmp_path, OLD)
    assert accelerator(tmp_path) == "cpu"


@pytest.mark.parametrize(
    ("peak", "memory", "name"),
    [
        (312e12, None, "a100-40"),
        (312e12, 79e9, "a100-80"),
        (989.4e12, 145e9, "h200"),
        (459e12, None, "tpu-v5p"),
    ],
)
def test_the_devices_are_told_from_what_they_reach(tmp_path, peak, memory, name):
    (tmp_path / "config.yaml").write_text("precision: {compute: bfloat16}\n")
    write_at_half_of(tmp_path, peak)
    write_sample(
        tmp_path, **({"device_memory_limit_bytes": {"0": memory}} if memory else {})
    )
    assert accelerator(tmp_path) == name
    assert gather(tmp_path, "b200").plan.cluster.accelerator.name == "b200"


def test_memory_is_told_with_its_limit_where_there_is_one():
    uses = [
        MemoryUse("a device", 6 * 2**30, 8 * 2**30),
        MemoryUse("the host", 2**30, None),
    ]
    figures = list(_memory(SimpleNamespace(plan=None), uses))
    lines = section_text(Section("Memory", figures=figures)).splitlines()[2:]
    assert [line.split()[2:-1] for line in lines] == [
        ["6", "GiB", "of", "8", "GiB"],
        ["1", "GiB"],
    ]


def test_devices_that_nothing_tells_of_are_said_to_be_unknown(tmp_path):
    (tmp_path / "config.yaml").write_text("train: {steps: 10}\n")
    write(tmp_path, OLD)
    assert accelerator(tmp_path) == "h100" and "held against H100s" in " ".join(
        gather(tmp_path).notes
    )
    write_sample(tmp_path, machine_cpu_ratio=0.5)
    assert accelerator(tmp_path) == "cpu"
    write(tmp_path, OLD | {"memory_in_use_bytes": 1e9})
    assert accelerator(tmp_path) == "h100"


def test_a_step_is_held_against_the_peak_the_roofline_and_the_plan(tmp_path):
    facts = gather(write_run(tmp_path / "run", 100), "cpu")
    summary = summarise(facts)
    bounds, speed = summary.bounds, summary.speed
    names = [
        name for name, _ in ladder(speed, replace(bounds, links=bounds.compute * 2))
    ]
    assert names == [
        "compute at the peak",
        "roofline, bound by links",
        "planned",
        "measured",
    ]
    assert [name for name, _ in ladder(speed, bounds)] == [
        "compute at the peak",
        "planned",
        "measured",
    ]
    assert bounds.compute / bounds.planned == pytest.approx(facts.plan.mfu)
