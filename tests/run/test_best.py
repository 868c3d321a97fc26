"""The lowest held-out loss so far, and for how long it has stood."""

import json
import math

from meshtrain.run.best import Best, best_in


def test_a_lower_loss_is_best_and_an_equal_one_or_none_at_all_is_not():
    best = Best()
    losses = [3.0, 2.0, 2.0, math.nan, 2.5, -math.inf, 1.0]
    assert [k for k, loss in enumerate(losses, 1) if best.add(10 * k, loss)] == [
        1,
        2,
        7,
    ]
    assert (best.step, best.loss, best.since) == (70, 1.0, 0)


def test_patience_counts_evaluations_in_a_row_without_a_lower_loss():
    for losses, ends in (
        ([3, 2, 2], False),
        ([3, 2, 2, 2], True),
        ([3, 2, 2, 1], False),
        ([math.nan] * 2, True),
    ):
        best = Best()
        for step, loss in enumerate(losses, 1):
            best.add(step, loss)
        assert best.ends(2) is ends and not best.ends(0), losses


def test_of_the_rows_each_evaluation_counts_once_whatever_else_stands_there(tmp_path):
    rows = [
        {"step": 1, "loss": 9.0},
        *[{"step": 2, "eval_loss": 2.5}] * 2,
        {"step": 4, "eval_loss": None},
    ]
    odd = [
        '{"step": 6, "eval_loss": "x"}',
        '{"eval_loss": 1}',
        '{"step": 8, "eval_loss": 1.',
    ]
    lines = [json.dumps(row) for row in rows] + odd
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    assert best_in(tmp_path / "metrics.jsonl") == Best(2, 2.5, 1, 4)
    assert best_in(tmp_path / "none.jsonl") == Best()
