"""Each rule fires on its own evidence, and on no other's."""

import dataclasses
import random
import re

import pytest

from meshtrain.config import load
from meshtrain.plan.estimate import plan
from meshtrain.report.diagnosis import rules
from meshtrain.report.diagnosis.diagnose import diagnose
from meshtrain.report.diagnosis.evidence import Evidence
from meshtrain.report.rows import Columns
from meshtrain.report.trace.attribution import Attribution
from meshtrain.telemetry.alerts import Judge
from meshtrain.telemetry.thresholds import SAMPLES, prometheus_rules

CONFIG = (
    "run.fake_devices=2", "mesh.data=2", "model.layers=4", "model.d_model=128", "model.heads=8", "model.vocab_size=260",
    "train.global_batch_size=16", "train.sequence_length=128",
)  # fmt: skip
# A process that has the machine to itself; each step takes 0.2 s.
ALONE = {
    "cpu_ratio": 0.9,
    "machine_cpu_ratio": 0.92,
    "pressure_cpu_ratio": 0.97,
    "memory_limit_used_ratio": 0.4,
    "memory_used_ratio": 0.3,
    "phase_seconds": {"data": 0.01, "dispatch": 0.01, "wait": 0.96, "log": 0.02},
}


def columns(rows):
    found = Columns()
    for row in rows:
        found.add(row)
    return found


def steps(count=20, every=1, **values):
    """Rows of healthy steps. Of `values` each row has those, or every so manyth."""
    rows = []
    for step in range(1, count + 1):
        row = {
            "step": step,
            "time": 1000.0 + 0.2 * step,
            "step_seconds": 0.2,
            "data_wait_seconds": 0.0001,
            "loss": 3.0,
        }
        rows.append(row | (values if step % every == 0 else {}))
    return columns(rows)


def samples(*ranks, count=4):
    """Of each rank samples with these values, all ranks on one machine unless they say other."""
    return {
        r: columns([{"time": 1001.0 + k} | ALONE | values for k in range(count)])
        for r, values in enumerate(ranks)
    }


def evidence(*settings, trace=None, rows=None, ranks=({},), hosts=None, cluster="cpu"):
    config = load({}, [*CONFIG, *settings])
    attribution = None
    if trace is not None:
        seconds = {"forward": 0.3, "backward": 0.6} | trace
        whole = sum(seconds.values())
        attribution = Attribution(
            "cpu",
            config.mesh.devices,
            3,
            1.0,
            {kind: s / whole for kind, s in seconds.items()},
        )
    taken = samples(*ranks)
    hosts = hosts or dict.fromkeys(taken, "m")
    return Evidence(
        config, rows or steps(), taken, hosts, attribution, plan(config, cluster)
    )


BUBBLE = (
    "mesh.data=1",
    "mesh.pipeline=2",
    "parallel.microbatches=2",
    "parallel.schedule=1f1b",
    "parallel.virtual_stages=1",
)
TENSOR = ("run.fake_devices=8", "mesh.data=1", "mesh.tensor=8")
PIPELINE = (
    "run.fake_devices=4",
    "mesh.data=1",
    "mesh.pipeline=4",
    "parallel.microbatches=16",
)
SLOW_SAVES = {
    "checkpoint_blocked_seconds": 0.5,
    "checkpoint_seconds": 5.0,
    "checkpoint_bytes": 9.7e6,
}
SICK = {
    "shared": evidence(ranks=({"cpu_ratio": 0.5, "machine_cpu_ratio": 0.99},)),
    "memory": evidence(ranks=({"memory_limit_used_ratio": 0.97},)),
    "faults": dataclasses.replace(evidence(), lost=0.3),
    "router": evidence(
        "model.d_ff=null",
        "model.moe.experts=8",
        "model.moe.d_ff=32",
        rows=steps(expert_load=3.9),
    ),
    "slow_rank": evidence(
        ranks=(
            {"cpu_ratio": 0.45},
            {
                "cpu_ratio": 0.45,
                "phase_seconds": {"data": 0.6, "dispatch": 0.01, "wait": 0.4},
            },
        )
    ),
    "compiling": evidence(
        "data.batching=grouped", rows=steps(compile_seconds=1.0, compiles=1, every=2)
    ),
    "loader": evidence(rows=steps(data_wait_seconds=0.1)),
    "disk": evidence("checkpoint.every=5", rows=steps(every=5, **SLOW_SAVES)),
    "saving": evidence(
        "checkpoint.every=5",
        rows=steps(every=5, **SLOW_SAVES | {"checkpoint_seconds": 0.6}),
    ),
    "host": evidence(
        ranks=(
            {
                "phase_seconds": {
                    "data": 0.01,
                    "dispatch": 0.3,
                    "wait": 0.6,
                    "log": 0.05,
                }
            },
        )
    ),
    "throttled": evidence(
        ranks=(
            {"device_throttled": {"0": {"heat": 0}, "1": {"heat": 1, "power_cap": 1}}},
        )
    ),
    "bubble": evidence(*BUBBLE, ranks=({"cpu_ratio": 0.7, "machine_cpu_ratio": 0.7},)),
    "tensor": evidence(*TENSOR, trace={"tensor": 0.5}),
    "pipeline": evidence(*PIPELINE, trace={"pipeline": 0.5}),
    "recomputation": evidence("parallel.remat=full", trace={"recomputation": 0.3}),
}


def test_a_healthy_run_has_no_finding():
    assert diagnose(evidence(trace={"data": 0.02})).first == "none"


@pytest.mark.thorough
@pytest.mark.parametrize("name", SICK)
def test_a_rule_fires_on_its_own_evidence_and_no_other_does(name):
    found = diagnose(SICK[name]).findings
    assert [finding.name for finding in found] == [name]
    assert 0 < found[0].severity <= 1
    assert found[0].excess > 0
    assert found[0].sentence.endswith(".") and found[0].advice.endswith(".")


def test_findings_come_by_what_curing_them_would_win():
    rows = steps(
        every=1,
        data_wait_seconds=0.1,
        checkpoint_blocked_seconds=0.04,
        checkpoint_seconds=0.04,
        checkpoint_bytes=1e6,
    )
    found = diagnose(evidence(rows=rows)).findings
    assert [f.name for f in found] == ["loader", "saving"]
    assert [f.severity for f in found] == pytest.approx([0.5, 0.2])


def test_on_a_shared_machine_there_is_no_other_verdict_on_speed_but_memory_stays():
    sick = evidence(
        rows=steps(data_wait_seconds=0.1),
        ranks=(
            {
                "cpu_ratio": 0.3,
                "machine_cpu_ratio": 1.0,
                "memory_limit_used_ratio": 0.99,
            },
        ),
    )
    assert [f.name for f in diagnose(sick).findings] == ["shared", "memory"]


BOTH = ({"cpu_ratio": 0.48, "machine_cpu_ratio": 0.98},) * 2
SLOWER = {"cpu_ratio": 0.45, "phase_seconds": {"data": 0.05, "log": 0.1, "wait": 0.85}}
OLD = columns(
    [{"time": 10.0} | ALONE | {"cpu_ratio": 0.1, "machine_cpu_ratio": 1.0}] * 9
    + [{"time": 1002.0} | ALONE]
)
HEALTHY = {
    "pressure of the run's own devices": evidence(
        ranks=(
            {"cpu_ratio": 0.97, "machine_cpu_ratio": 0.99, "pressure_cpu_ratio": 1.0},
        )
    ),
    "ranks on one machine": evidence(ranks=BOTH),
    "busy others while cores are idle": evidence(
        ranks=({"cpu_ratio": 0.4, "machine_cpu_ratio": 0.7},)
    ),
    "busy others while nobody waits for a core": evidence(
        ranks=(
            {"cpu_ratio": 0.05, "machine_cpu_ratio": 0.95, "pressure_cpu_ratio": 0.01},
        )
    ),
    "a board at its power cap": evidence(
        ranks=({"device_throttled": {"0": {"power_cap": 1}}},)
    ),
    "a rank that is a little slower": evidence(ranks=({"cpu_ratio": 0.45}, SLOWER)),
    "a few compilations of evaluation and saving": evidence(
        rows=steps(every=7, compile_seconds=3.0, compiles=1)
    ),
    "idle slots of fake devices while all cores are busy": evidence(*BUBBLE),
    "samples from before the rows that are looked at": dataclasses.replace(
        evidence(), samples={0: OLD}
    ),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_what_looks_like_a_reason_is_none(name):
    assert diagnose(HEALTHY[name]).first == "none"


def test_ranks_on_two_machines_are_strangers_to_each_other():
    assert diagnose(evidence(ranks=BOTH, hosts={0: "a", 1: "b"})).first == "shared"


def test_a_rank_that_waits_for_data_alone_is_slow_and_the_loader_is_not_to_blame():
    alone = {"cpu_ratio": 0.45, "phase_seconds": {"data": 0.5, "wait": 0.5}}
    rows = steps(data_wait_seconds=0.1)
    assert [
        f.name
        for f in diagnose(
            evidence(rows=rows, ranks=(alone, {"cpu_ratio": 0.45}))
        ).findings
    ] == ["slow_rank"]
    found = diagnose(evidence(rows=rows, ranks=(alone, alone))).findings
    assert [f.name for f in found] == ["loader"]


@pytest.mark.thorough
def test_the_live_alert_the_report_and_prometheus_call_the_same_ranks_slow():
    dice, config, rows, found = random.Random(0), load({}, [*CONFIG]), steps(), []
    share, *others = prometheus_rules()["groups"][0]["rules"]
    host, whole = (
        re.findall(r'phase=~"([a-z|]+)"', share["expr"])[k].split("|") for k in (0, 1)
    )
    (limit,) = re.findall(
        r"< ([0-9.]+)$",
        next(rule["expr"] for rule in others if rule["labels"]["rule"] == "slow_rank"),
    )
    for _ in range(1000):
        spent = []
        for _ in range(dice.randint(2, 5)):
            own = dice.random() ** 2 * 0.7
            weights = [dice.random() ** 2 for _ in host]
            seconds = {
                phase: 10 * own * weight / sum(weights)
                for phase, weight in zip(host, weights, strict=True)
            }
            spent.append(seconds | {"wait": 10 * (1 - own)})
        shares = [
            sum(s[phase] for phase in host) / sum(s[phase] for phase in whole)
            for s in spent
        ]
        by_prometheus = {
            rank
            for rank, one in enumerate(shares)
            if 1 - (one - min(shares)) < float(limit)
        }

        judge, live = Judge(), set()
        for sample in range(SAMPLES):
            for rank in reversed(range(len(spent))):
                row = {"rank": rank, "phase_seconds": spent[rank]}
                live |= {
                    alert.rank for alert in judge(row, "process", 1000.0 + 15 * sample)
                }

        taken = samples(*({"phase_seconds": s} for s in spent), count=1)
        reported = set()
        for finding in rules.slow_rank(Evidence(config, rows, taken)):
            named = re.findall(
                r"^Rank (\d+)|; likewise rank ([\d, ]+)", finding.sentence
            )
            reported = {
                int(rank)
                for pair in named
                for rank in ", ".join(pair).split(",")
                if rank.strip()
            }
            assert finding.excess == pytest.approx(max(shares) - min(shares))
        assert live == reported == by_prometheus, (
            shares,
            live,
            reported,
            by_prometheus,
        )
        found.append(len(live))
    assert {0, 1, 2, 3} <= set(found)


def test_what_is_missing_is_named():
    bare = Evidence(load({}, [*CONFIG]), columns([]))
    said = " ".join(diagnose(bare).cannot_tell)
    for word in ("rows of metrics", "samples of resources", "trace", "plan"):
        assert word in said
    assert diagnose(bare).first == "none"


def test_the_parts_of_a_step_add_up_to_it():
    found = diagnose(evidence(rows=steps(data_wait_seconds=0.05), trace={"data": 0.1}))
    assert sum(part.seconds for part in found.parts if part.seconds) == pytest.approx(
        0.2
    )
    layers = next(part for part in found.parts if part.name == "layers")
    assert layers.seconds == pytest.approx(0.15 * 0.9) and layers.planned > 0
