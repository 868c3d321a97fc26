"""A batch that the mesh does not divide is filled up with rows that weigh nothing: all else is as on one device without
them.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from data_configs import config as text_config
from short_runs import canonical_numbers, first_moment, start
from train_in_processes import train_in_processes

from meshtrain.config import Config, load, replaced
from meshtrain.config.follow import microbatch_rows, padded_batch_size
from meshtrain.data import open_data
from meshtrain.hlo import collectives
from meshtrain.plan import named, plan
from meshtrain.plan.search import candidates
from meshtrain.plan.traffic import by_axis
from meshtrain.step import Program
from meshtrain.train import train

STEPS = 3
LOSS, GRADIENT = 2e-5, 1e-5  # relative, as in test_equivalence


def one_device(rows: int, **others: dict[str, Any]) -> Config:
    sections: dict[str, dict[str, Any]] = {
        "model": {
            "layers": 5,
            "d_model": 24,
            "heads": 6,
            "kv_heads": 2,
            "d_ff": 50,
            "vocab_size": 257,
            "dropout": 0.1,
        },
        "data": {"source": "synthetic"},
        "train": {"global_batch_size": rows, "sequence_length": 16, "steps": STEPS},
        "optimizer": {"learning_rate": 0.01, "warmup_steps": 2, "grad_clip": 0.0},
    }
    return load(
        {
            name: {**sections.get(name, {}), **others.get(name, {})}
            for name in {**sections, **others}
        }
    )


def run(config: Config) -> tuple[list[float], list[np.ndarray], float]:
    """Losses of all steps, the first gradient in its canonical layout, the held-out loss after the last step."""
    (data, held_out), program = open_data(config), Program(config)
    state, losses, gradient = (
        start(program, canonical_numbers(program.layout)),
        [],
        None,
    )
    for k in range(STEPS):
        state, metrics = program.train_step(state, program.place(data.batch(k)))
        losses.append(float(metrics["loss"]))
        if gradient is None:
            gradient = jax.tree.map(
                np.asarray, program.layout.canonical(first_moment(state))
            )
    assert held_out is not None
    return (
        losses,
        jax.tree.leaves(gradient),
        float(program.eval_step(state.params, program.place(held_out.batch(0)))),
    )


@cache
def expected(rows: int, compute: str) -> tuple[list[float], list[np.ndarray], float]:
    return run(one_device(rows, precision={"compute": compute}))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("rows", "filled", "mesh", "parallel", "compute"),
    [
        pytest.param(
            7,
            8,
            {"data": 4},
            {"microbatches": 2, "zero_stage": 0},
            "float32",
            marks=pytest.mark.slow,
        ),
        # the last rank has empty rows alone
        (10, 16, {"data": 4}, {"microbatches": 2, "zero_stage": 2}, "float32"),
        pytest.param(
            10,
            12,
            {"data": 3, "pipeline": 2},
            {"microbatches": 2, "zero_stage": 3},
            "float32",
            marks=pytest.mark.slow,
        ),
        (
            7,
            8,
            {"data": 2, "context": 4},
            {"microbatches": 2, "zero_stage": 3, "context_strategy": "ring"},
            "float32",
        ),
        (
            7,
            12,
            {"data": 2, "pipeline": 2, "tensor": 2},
            {"microbatches": 3, "schedule": "zb_h1", "sequence_parallel": True},
            "float32",
        ),
        pytest.param(
            10,
            12,
            {"data": 3},
            {"microbatches": 4, "remat": "full"},
            "float16",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_losses_and_gradients_are_those_of_the_rows_alone(
    rows, filled, mesh, parallel, compute
):
    config = replaced(
        one_device(rows, precision={"compute": compute}),
        mesh=mesh,
        parallel=parallel,
        train={"uneven_batch": "pad"},
    )
    assert padded_batch_size(config) == filled
    losses, gradient, held_out = run(config)
    right, right_gradient, right_held_out = expected(rows, compute)
    coarser = 500 if compute == "float16" else 1
    np.testing.assert_allclose(
        [*losses, held_out], [*right, right_held_out], rtol=LOSS * coarser
    )
    # A key's bias has no gradient in theory, so only noise; llama has none.
    for seen, its in zip(gradient, right_gradient, strict=True):
        assert np.linalg.norm(seen - its) <= GRADIENT * coarser * np.linalg.norm(its)


@pytest.mark.thorough
def test_where_nothing_is_filled_up_the_program_is_the_same():
    config = replaced(one_device(8), mesh={"data": 2}, parallel={"microbatches": 2})
    padded = replaced(config, train={"uneven_batch": "pad"})
    assert "weights" not in open_data(padded)[0].batch(0)
    assert Program(padded).lower().as_text() == Program(config).lower().as_text()
    odd = replaced(padded, parallel={"microbatches": 3})
    assert Program(odd).batch_shapes()["weights"].shape == (12, 16)


@pytest.mark.parametrize(
    "batching", ["window", "packed", "grouped", "budget", "mixture"]
)
def test_every_batching_keeps_its_rows_and_is_filled_up_at_the_end(batching, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("\n".join("abcdefgh" * n for n in range(1, 80)))
    options: dict[str, Any] = {"batching": batching, "lengths": 3, "validation": 0.0}
    if batching == "budget":
        options["rows_multiple"] = 2
    if batching == "mixture":
        options |= {
            "batching": "packed",
            "mixture": [str(text), str(text)],
            "weights": [0.5, 0.5],
        }
    given = text_config(
        "mixture" if batching == "mixture" else text, batch=7, **options
    )
    config = replaced(
        given,
        mesh={"data": 5},
        parallel={"microbatches": 3},
        train={"uneven_batch": "pad"},
    )
    (plain, _), (data, _) = open_data(given), open_data(config)
    assert set(data.shapes) == {
        (-(-rows // 15) * 15, length) for rows, length in plain.shapes
    }
    for k in range(6):
        before, batch, rows = plain.batch(k), data.batch(k), data.batch_shape(k)[0]
        real = len(before["tokens"])
        assert rows % 15 == 0 and rows > real
        before.setdefault("weights", np.ones_like(batch["weights"][:real]))
        assert data.tokens(k) == plain.tokens(k) == before["weights"].sum()
        assert data.tokens(k) + data.padding_tokens(k) == batch["weights"].size
        assert batch.keys() == before.keys()
        for name, array in batch.items():
            assert array.dtype == before[name].dtype and len(array) == rows
            np.testing.assert_array_equal(array[:real], before[name])
            assert not array[real:].any()
            # Of five processes the last holds no real row.
            shares = [
                data.batch(k, slice(n * rows // 5, (n + 1) * rows // 5))[name]
                for n in range(5)
            ]
            np.testing.assert_array_equal(np.concatenate(shares), array)


@pytest.mark.thorough
def test_a_run_counts_its_own_tokens_alone(tmp_path):
    training = {"global_batch_size": 7, "uneven_batch": "pad", "steps": 2}
    config = one_device(
        7,
        mesh={"data": 4},
        train=training,
        run={"directory": str(tmp_path)},
        eval={"every": 2, "batches": 1},
    )
    assert train(config).exit_code == 0
    rows = [
        json.loads(line)
        for line in (tmp_path / "metrics.jsonl").read_text().splitlines()
    ]
    assert [row["tokens"] for row in rows] == [7 * 16, 7 * 16]
    assert rows[0]["tokens_per_second"] == pytest.approx(
        7 * 16 / rows[0]["step_seconds"]
    )


def test_the_planner_counts_filled_rows_as_work_and_not_as_tokens():
    even = replaced(one_device(12), mesh={"data": 3}, parallel={"microbatches": 2})
    odd = replaced(even, train={"global_batch_size": 10, "uneven_batch": "pad"})
    assert microbatch_rows(odd) == microbatch_rows(even) == 2
    full, padded = plan(even, "h100"), plan(odd, "h100")
    assert (padded.bytes, padded.seconds) == (full.bytes, full.seconds)
    assert padded.tokens_per_second == pytest.approx(full.tokens_per_second * 10 / 12)
    assert padded.mfu == pytest.approx(full.mfu * 10 / 12)


@pytest.mark.thorough
def test_the_program_sends_what_the_planner_says():
    mesh, parallel = {"data": 3, "pipeline": 2}, {"microbatches": 2, "zero_stage": 2}
    config = replaced(
        one_device(10), mesh=mesh, parallel=parallel, train={"uneven_batch": "pad"}
    )
    program, planned = Program(config), plan(config, "cpu")
    found = collectives(program.lower().compile(), program.mesh, program.taken)
    sent = {
        axis: sum(c.sent * c.times for c in found if c.axis == axis)
        for axis in {c.axis for c in found}
    }
    for axis, nbytes in by_axis(planned.transfers).items():
        assert sent.get(axis, 0) == pytest.approx(nbytes, rel=0.01, abs=256), (
            axis
        )  # scalars, such as the tokens that count


@pytest.mark.thorough
def test_a_search_takes_data_axes_that_do_not_divide_the_batch():
    config = replaced(one_device(10), train={"uneven_batch": "pad"})
    found = {
        (c.config.mesh.data, c.config.parallel.microbatches)
        for c in candidates(config, named("h100", 6), 6)
    }
    assert {(6, 1), (6, 2), (3, 1), (3, 2), (3, 4)} <= found and (3, 3) not in found
    assert all(
        padded_batch_size(
            replaced(config, mesh={"data": d}, parallel={"microbatches": m})
        )
        < 20
        for d, m in found
    )


@pytest.mark.slow
def test_three_processes_of_which_one_holds_the_first_and_the_last_rows(tmp_path):
    """Data 3 x pipeline 2 on two devices each: the second process ends the first stage and begins the second, without
    the rows between.
    """
    config = replaced(
        one_device(7, eval={"every": STEPS, "batches": 1}),
        mesh={"data": 3, "pipeline": 2},
        parallel={"microbatches": 2, "schedule": "gpipe"},
        train={"uneven_batch": "pad"},
        run={"directory": str(tmp_path / "run"), "fake_devices": 2},
    )
    train_in_processes(config, 3, tmp_path / "config.yaml")
    seen = _rows(tmp_path / "run")
    alone = one_device(
        7,
        eval={"every": STEPS, "batches": 1},
        run={"directory": str(tmp_path / "alone")},
    )
    assert train(alone).exit_code == 0
    right = _rows(tmp_path / "alone")
    for name in ("loss", "grad_norm", "tokens"):
        np.testing.assert_allclose(
            [row[name] for row in seen], [row[name] for row in right], rtol=LOSS
        )
    np.testing.assert_allclose(seen[-1]["eval_loss"], right[-1]["eval_loss"], rtol=LOSS)


def _rows(run: Path) -> list[dict[str, float]]:
    return [
        json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()
    ]
