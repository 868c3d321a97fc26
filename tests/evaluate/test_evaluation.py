"""Evaluations while a run goes on: their loss, the checkpoint of the best one, and the end by eval.patience."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from checkpoint_runs import config, program
from refusals import tells

from meshtrain import train
from meshtrain.checkpoint import steps
from meshtrain.config import ConfigError, load
from meshtrain.data import SplitBatches
from meshtrain.evaluate.evaluation import Evaluation, saves_for_best
from meshtrain.train import main

pytestmark = pytest.mark.usefixtures("shared_programs")

# Of a run, after each step; the least so far are those of 1, 2 and 4.
LOSSES = {1: 3.0, 2: 2.0, 3: 2.5, 4: 1.0, 5: 1.5, 6: 1.0, 7: float("nan"), 8: 0.5}


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Trains with these held-out losses; the exit code and what was said."""
    monkeypatch.setattr(
        train.Loop,
        "evaluate",
        lambda self, state: {"eval_loss": LOSSES[int(state.step)]},
    )

    def trained(steps=8, checkpoint=None, **evaluates):
        values = {
            "run": {"directory": str(tmp_path / "run")},
            "model": {
                "layers": 1,
                "d_model": 16,
                "heads": 2,
                "d_ff": 32,
                "vocab_size": 257,
            },
            "data": {"source": "synthetic"},
            "train": {"steps": steps, "global_batch_size": 4, "sequence_length": 16},
            "optimizer": {"schedule": "constant"},
            "checkpoint": {"keep": 9, **(checkpoint or {})},
            "eval": {"every": 1, "batches": 1, **evaluates},
        }
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
        code = main(["--config", str(tmp_path / "config.yaml")])
        return code, capsys.readouterr().out

    return trained


def of_batches(batches, shape):
    """Held-out data of these batches, which would come round again."""
    batch, many = lambda k, rows, columns: batches[k % len(batches)], len(batches)
    source = SimpleNamespace(
        batch=batch,
        batch_shape=lambda k: shape,
        batches_per_epoch=many,
        batches_once=many,
    )
    return SplitBatches(source, "held out", "")


def committed(tmp_path):
    return steps.committed_in(tmp_path / "run" / "checkpoints")


def rows(tmp_path):
    return [
        json.loads(line)
        for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]


@pytest.mark.thorough
def test_the_loss_is_the_mean_over_all_tokens_that_count_however_they_are_spread_over_batches(
    tmp_path,
):
    built = program()
    random, length = np.random.default_rng(0), built.config.train.sequence_length
    batches = []
    for answers, each in ((1, 1), (60, 1), (0, 1), (5, 1e-3)):
        weights = np.zeros((8, length), np.float32)
        weights.flat[random.choice(weights.size, answers, replace=False)] = each
        tokens, labels = random.integers(0, 257, (2, 8, length), np.int32)
        batches.append({"tokens": tokens, "labels": labels, "weights": weights})
    held_out = of_batches(batches, (8, length))
    settings = config(eval={"every": 1, "batches": 4})
    how = {"part": built.part, "place": built.place, "eval_metrics": built.eval_metrics}
    asked = SimpleNamespace(config=settings, **how)
    # Larger weights, so that losses differ.
    params = train.jax.tree.map(lambda x: x * 8, built.init().params)
    whole = {
        name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]
    }
    found = Evaluation(asked, held_out, tmp_path / "none", 0).measure(params, True)
    assert found["eval_loss"] == pytest.approx(
        float(built.eval_step(params, built.place(whole))), rel=1e-6
    )


def test_of_preferences_it_is_the_mean_over_all_pairs(tmp_path):
    pairs = [np.int32([[1, 1, 2, 2, 3, 3]]), np.int32([[1, 1, 0, 0, 0, 0]])]
    batches = [
        {
            "labels": p,
            "pairs": p,
            "weights": np.float32([[1, -1] * 3]) * (p > 0),
            "loss": x,
        }
        for p, x in zip(pairs, (1.0, 3.0), strict=True)
    ]
    held_out = of_batches(batches, (1, 6))
    asked = SimpleNamespace(
        config=config(eval={"every": 1, "batches": 3}),
        part=lambda shape: (slice(None), None),
        place=lambda batch: batch,
        eval_metrics=lambda params, batch: {"eval_loss": batch["loss"]},
    )
    found = Evaluation(asked, held_out, tmp_path / "none", 0).measure(None, True)
    assert found == {"eval_loss": (3 * 1.0 + 3.0) / 4}


def test_a_run_says_that_it_evaluates_on_fewer_batches_than_it_was_asked_for(tmp_path):
    for batches, said in (
        (2, []),
        (5, ["2 batches ... fewer than eval.batches 5"]),
    ):
        asked = SimpleNamespace(
            config=config(
                eval={"every": 1, "batches": batches}, checkpoint={"keep_best": 0}
            )
        )
        opening = Evaluation(
            asked, of_batches([{}, {}], (8, 4)), tmp_path / "none", 0
        ).opening()
        assert len(opening) == len(said) and all(map(tells, opening, said))


@pytest.mark.thorough
def test_each_evaluation_with_the_lowest_loss_so_far_is_saved_and_the_run_says_so(
    run, tmp_path
):
    code, said = run(steps=7, checkpoint={"every": 6})
    assert code == 0 and committed(tmp_path) == [1, 2, 4, 6, 7]
    assert tells(said, "saves also ... lowest so far ... 5 times")
    assert "lowest eval loss 1.0000, of step 4\n" in said


def test_with_keep_best_0_no_save_is_for_an_evaluation(tmp_path):
    for keep_best, saved in ((0, [False, False, False]), (1, [True, False, True])):
        asked = SimpleNamespace(
            config=config(
                eval={"every": 1}, checkpoint={"keep_best": keep_best, "every": 0}
            )
        )
        evaluation = Evaluation(asked, None, tmp_path / "none", 0)
        assert len(evaluation.opening()) == keep_best
        assert [evaluation.is_best(step, LOSSES[step]) for step in (2, 3, 4)] == saved


@pytest.mark.parametrize(
    ("every", "saved", "start", "most"),
    [(2, 5, 0, 4), (2, 2, 0, 0), (5, 0, 0, 1), (2, 0, 4, 2), (0, 1, 0, 0)],
)
def test_saves_for_the_best_are_at_most_the_evaluations_that_are_not_saved_anyway(
    every, saved, start, most
):
    asked = load(
        {
            "eval": {"every": every},
            "checkpoint": {"every": saved},
            "train": {"steps": 10},
        }
    )
    assert saves_for_best(asked, start) == most


@pytest.mark.thorough
def test_patience_ends_the_run_done_with_its_checkpoint_and_a_sentence(run, tmp_path):
    code, said = run(patience=3)
    assert (
        code == 0
        and committed(tmp_path) == [1, 2, 4, 7]
        and rows(tmp_path)[-1]["step"] == 7
    )
    why = "ended by eval.patience ... 3 in ... 1.0000, ... step 4"
    assert tells(said, f"{why}; the checkpoint of step 7 is written\n")
    before = rows(tmp_path)
    code, said = run(patience=3, steps=9)
    assert code == 0 and tells(said, f"{why}: nothing is left ... larger eval.patience")
    assert "going on after" not in said
    assert rows(tmp_path) == before
    code, said = run(patience=4)
    assert code == 0 and rows(tmp_path)[-1]["step"] == 8 and "ended by" not in said


@pytest.mark.thorough
def test_a_killed_run_ends_by_patience_where_it_would_have_ended(run, tmp_path):
    run(patience=3)
    before = [
        (row["step"], row["loss"], row.get("eval_loss")) for row in rows(tmp_path)
    ]
    for step in (4, 7):
        steps.remove(tmp_path / "run" / "checkpoints" / str(step))
    code, said = run(patience=3)
    assert (
        code == 0
        and "going on after step 2" in said
        and committed(tmp_path) == [1, 2, 4, 7]
    )
    assert [
        (row["step"], row["loss"], row.get("eval_loss")) for row in rows(tmp_path)
    ] == before


def test_patience_without_evaluations_is_refused():
    with pytest.raises(ConfigError, match=r"eval\.patience is 3 .*eval\.every is 0"):
        load({"eval": {"patience": 3}})
