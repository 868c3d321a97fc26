"""Error feedback: whatever compression leaves out of a step comes later, and nothing comes twice."""

import jax
import numpy as np
import pytest
from closing import Closing
from covering import slow_but

FLAT, CUBE = {"data": 4}, {"data": 4, "tensor": 2}
ISLANDS, ODD = {"data": 4, "islands": 2, "tensor": 2}, {"data": 6, "islands": 3}
ALONE, STAGES = {"data": 3, "islands": 3}, {"data": 2, "tensor": 2, "pipeline": 2}
KINDS = ("topk", "powersgd", "int4", "int8", "float8", "bfloat16")
PLACES = [(ISLANDS, "islands"), (ODD, "islands"), (ALONE, "islands")]
PLACES += [(mesh, "data") for mesh in (FLAT, CUBE, ISLANDS, ODD, ALONE, STAGES)]
NOW = [(ISLANDS, "int4", "data"), (ISLANDS, "powersgd", "islands")]
# Everywhere one that encodes numbers and one that leaves some out.
CELLS = NOW + [
    (mesh, kind, over)
    for number, (mesh, over) in enumerate(PLACES)
    for kind in (KINDS[number % 2], KINDS[2 + number % 4])
    if (mesh, kind, over) not in NOW
]


def closing(mesh, kind, over):
    stages = {"microbatches": 2} if mesh.get("pipeline", 1) > 1 else {}
    return Closing(
        mesh,
        {
            "compression": kind,
            "over": over,
            "feedback": True,
            "ratio": 0.05,
            "rank": 2,
            "block": 32,
        },
        **stages,
    )


# The other kinds, each once: on stages, on one axis, on three islands, and on islands of one.
FEW = [
    (STAGES, "topk", "data"),
    (FLAT, "bfloat16", "data"),
    (ODD, "int8", "islands"),
    (ALONE, "float8", "islands"),
]


@pytest.mark.thorough
@pytest.mark.parametrize("cell", slow_but(CELLS, NOW + FEW), ids=str)
def test_what_was_sent_and_what_is_still_owed_add_up_to_all_gradients(cell):
    """Over 5 steps, to 1e-5, though each step loses much; the loss scale changes on the way."""
    made, random = closing(*cell), np.random.default_rng(0)
    wanted = {name: 0.0 for name in made.weights}
    for scale in (1.0, 1024.0, 1024.0, 256.0, 3.0):
        gradients = made.draw(random)
        wanted = {name: wanted[name] + x for name, x in made.total(gradients).items()}
        _, statistics = made.close(gradients, scale)
    owed = made.residuals()
    for name, x in wanted.items():
        np.testing.assert_allclose(
            made.sent[name] + owed[name],
            x,
            rtol=0,
            atol=1e-5 * np.abs(x).max(),
            err_msg=name,
        )
    lost = {
        name
        for name in owed
        if np.abs(owed[name]).max() > 1e-4 * np.abs(wanted[name]).max()
    }
    assert lost == {
        weight.name for weight in made.weights.values() if weight.decayed
    }, "matrices lose something, norms nothing"
    whole = np.sqrt(sum(np.sum(np.square(x)) for x in leaves(made.kept.residual)))
    assert statistics["residual_norm"] == pytest.approx(whole, rel=1e-5)
    assert 0 < statistics["reduce_error"] < 1


@pytest.mark.parametrize(
    ("kind", "bad"),
    [
        pytest.param(
            kind,
            bad,
            marks=pytest.mark.thorough
            if kind in ("topk", "powersgd", "int8")
            else pytest.mark.slow,
        )
        for kind, bad in zip(KINDS, [np.inf, np.nan] * 3, strict=True)
    ],
)
def test_an_overflow_shows_in_the_sums_or_in_what_is_left_out(kind, bad):
    """By which float16 knows that a step is to be skipped; one number is enough, on one rank."""
    made = closing(CUBE, kind, "data")
    gradients = made.draw(np.random.default_rng(0))
    gradients["blocks.mlp.up"][3, 1, 0, 1, 5, 7] = bad
    sums, statistics = made.close(gradients)
    assert not (
        np.isfinite(sums["blocks.mlp.up"]).all()
        and np.isfinite(statistics["residual_norm"])
    )


def leaves(tree):
    return [np.asarray(x, np.float64) for x in jax.tree.leaves(tree)]
