"""What is compared between runs is the likelihood alone, on every mesh, whole or by chunks; what regularises stands
beside it.
"""

import numpy as np
import pytest

from meshtrain.config import load
from meshtrain.step import Program

BATCH = np.random.default_rng(0).integers(0, 61, (4, 17)).astype(np.int32)
REGULARIZED = {"label_smoothing": 0.1, "z_loss": 0.01}


def measured(**sections) -> dict[str, float]:
    """The rows of an evaluation and of a step on the same weights."""
    train = {"global_batch_size": 4, "sequence_length": 16, **sections.pop("train", {})}
    model = {
        "layers": 2,
        "d_model": 16,
        "heads": 2,
        "kv_heads": 2,
        "d_ff": 16,
        "vocab_size": 61,
    }
    program = Program(load({"model": model, "train": train, **sections}))
    state, batch = (
        program.init(),
        program.place({"tokens": BATCH[:, :-1], "labels": BATCH[:, 1:]}),
    )
    found = dict(
        program.eval_metrics(state.params, batch),
        eval_step=program.eval_step(state.params, batch),
    )
    return {
        name: float(x)
        for name, x in (found | program.train_step(state, batch)[1]).items()
    }


@pytest.mark.thorough
@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"train": {"loss_chunk": 8}},
        {"mesh": {"pipeline": 2}, "parallel": {"microbatches": 2}},
        {"mesh": {"data": 2, "tensor": 2}},
    ],
    ids=["one", "chunks", "stages", "tensor"],
)
def test_a_loss_that_regularises_leaves_the_likelihood_as_it_is(sections):
    plain, found = (
        measured(),
        measured(**sections | {"train": sections.get("train", {}) | REGULARIZED}),
    )
    assert "nll" not in plain and "eval_regularized_loss" not in plain
    for name in ("eval_loss", "eval_step", "nll"):
        assert found[name] == pytest.approx(plain["loss"], rel=1e-6), name
    assert found["loss"] == pytest.approx(found["eval_regularized_loss"], rel=1e-6)
    assert found["loss"] > found["nll"] + 0.1
