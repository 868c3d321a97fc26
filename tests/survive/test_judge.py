"""The judge of experiments/survive is judged: what a fault could do to a run's training is found, and put to the fault
before it.
"""

import json
from types import SimpleNamespace

import pytest

from experiments.survive import judge
from experiments.survive.judge import Judged, judge_training

LOSSES = [5.0 + step / 100 for step in range(30)]
ROWS = [[step, step + 1] for step in range(30)]
REFERENCE = {"losses": LOSSES, "rows": ROWS}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run of two ranks and 30 steps, that went on from step 10 after a fault: generation 2."""
    monkeypatch.setattr(judge, "checkpoint_problem", lambda run: None)
    rows = [{"step": step + 1, "loss": loss} for step, loss in enumerate(LOSSES)]
    batches = {1: range(15), 2: range(10, 30)}
    return SimpleNamespace(
        path=tmp_path, rows=rows, batches=batches, members={1: 2, 2: 2}, changed={}
    )


def judged(run) -> list[list[str]]:
    """The problems of two faults, after which the run went on from steps 0 and 10."""
    text = "".join(json.dumps(row) + "\n" for row in run.rows)
    (run.path / "metrics.jsonl").write_text(text)
    for generation, steps in run.batches.items():
        for rank in (0, 1):
            path = (
                run.path
                / "survive"
                / f"gen-{generation}"
                / f"rank-{rank}.batches.jsonl"
            )
            path.parent.mkdir(parents=True, exist_ok=True)
            read = {
                step: run.changed.get((generation, step), ROWS[step])[rank]
                for step in steps
            }
            lines = [
                {"step": step + 1, "first": rank, "rows": [row]}
                for step, row in read.items()
            ]
            path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    going = [
        {"event": "going", "generation": 1, "start": 0},
        {"event": "going", "generation": 2, "start": 10},
    ]
    survive, members = (
        {"survive": {"wanted": 2}},
        lambda generation: ["n0", "n1"][: run.members[generation]],
    )
    cluster = SimpleNamespace(
        run=run.path, values=survive, of=lambda name: going, members=members
    )
    found = [Judged("kill", 2, 0, since=0), Judged("kill", 2, 0, since=10)]
    judge_training(cluster, found, REFERENCE)
    return [one.problems for one in found]


def test_a_run_that_lost_nothing_is_right(run):
    assert judged(run) == [[], []]


def test_a_step_that_is_missing_or_there_twice_is_found(run):
    del run.rows[20]
    assert judged(run)[1][0] == "metrics.jsonl goes wrong at step 22"
    run.rows.insert(5, run.rows[4])
    assert judged(run)[0][0] == "metrics.jsonl goes wrong at step 5"


def test_another_loss_is_found_by_its_last_bit_on_the_same_mesh_and_by_the_tolerance_on_another(
    run,
):
    run.rows[15]["loss"] *= 1 + 1e-15
    assert judged(run) == [[], ["losses differ from step 16 on, by 1.0e-15"]]
    run.members[2] = 1
    assert judged(run) == [[], []]
    run.rows[15]["loss"] *= 1 + 3e-5
    assert judged(run)[1] == ["losses differ from step 16 on, by 3.0e-05"]


def test_a_batch_counts_by_the_generation_that_took_it_last(run):
    run.changed[1, 12] = [7, 7]
    assert judged(run) == [[], []]
    run.changed[2, 12] = [7, 7]
    first, (sentence,) = judged(run)
    assert first == [] and sentence.startswith("the batch of step 13 ")
