"""A run whose gradients are summed by one of our programs of messages is the run that psum makes."""

import dataclasses
from collections import defaultdict
from functools import cache

import jax
import numpy as np
import pytest
from short_runs import canonical_numbers, train

from meshtrain.checkpoint.restoring import compare
from meshtrain.config import ConfigError, load
from meshtrain.hlo import collectives
from meshtrain.mesh import make_mesh
from meshtrain.parallel.layout import Layout

STEPS = 3


def configuration(algorithm, mesh, zero, reduce=None, **parallel):
    rows = 12 if mesh.get("data") == 3 else 8
    return load(
        {
            "model": {
                "layers": 3,
                "d_model": 24,
                "heads": 4,
                "kv_heads": 2,
                "d_ff": 50,
                "vocab_size": 97,
            },
            "mesh": mesh,
            "parallel": {
                "zero_stage": zero,
                "reduce": {"algorithm": algorithm, **(reduce or {})},
                **parallel,
            },
            "train": {"global_batch_size": rows, "sequence_length": 16, "steps": STEPS},
            "optimizer": {"learning_rate": 0.01, "grad_clip": 0.5},
        }
    )


@cache
def run(algorithm, mesh, zero, **parallel):
    """Losses, the program, the last weights, and bytes that a device sends over data by kind, the loss's and the norm's
    few left out.
    """
    config = configuration(algorithm, dict(mesh), zero, **parallel)
    numbers = canonical_numbers(Layout(config, make_mesh(config)))
    metrics, program, (_, last) = train(config, STEPS, numbers)
    sent = defaultdict(float)
    for c in collectives(program.lower().compile(), program.mesh, program.taken):
        if c.axes and set(c.axes) <= {"island", "data"} and c.bytes > 100:
            sent[c.kind] += c.sent * c.senders * c.times
    return (
        [m["loss"] for m in metrics],
        jax.tree.leaves(program.layout.canonical(last.params)),
        dict(sent),
    )


CASES = {
    "two-way-zero1-uneven": ("two_way_ring", {"data": 3}, 1, {}),
    "hierarchical-zero0-islands2": ("hierarchical", {"data": 4, "islands": 2}, 0, {}),
}
MORE = {
    "ring-zero2-at-use": ("ring", {"data": 4, "tensor": 2}, 2, {"zero_hold": False, "microbatches": 2}),
    "ring-zero3-all-three": ("ring", {"data": 2, "tensor": 2, "pipeline": 2}, 3, {"microbatches": 2, "zero_hold": True}),
    "halving-zero0-folded": ("halving_doubling", {"data": 3, "pipeline": 2}, 0, {}),
    "halving-zero2-held-pipeline": ("halving_doubling", {"data": 4, "pipeline": 2}, 2, {"zero_hold": True, "microbatches": 2}),
    "tree-zero0-all-three": ("double_tree", {"data": 2, "tensor": 2, "pipeline": 2}, 0, {"microbatches": 2}),
    "tree-zero1-across-islands-alone": ("double_tree", {"data": 4, "islands": 4}, 1, {}),
    "hierarchical-zero1-islands2-tensor2": ("hierarchical", {"data": 4, "islands": 2, "tensor": 2}, 1, {}),
    "hierarchical-zero2-islands4-at-use": ("hierarchical", {"data": 8, "islands": 4}, 2, {"zero_hold": False}),
}  # fmt: skip
FEW = (
    "ring-zero3-all-three",
    "halving-zero2-held-pipeline",
    "tree-zero1-across-islands-alone",
)  # each algorithm once


@pytest.mark.thorough
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=name) for name, case in CASES.items()]
    + [
        pytest.param(case, id=name, marks=() if name in FEW else pytest.mark.slow)
        for name, case in MORE.items()
    ],
)
def test_a_run_is_that_of_psum_and_its_gradients_travel_in_messages_alone(case):
    algorithm, mesh, zero, parallel = case
    losses, weights, sent = run(algorithm, tuple(mesh.items()), zero, **parallel)
    right, right_weights, by_psum = run("psum", tuple(mesh.items()), zero, **parallel)
    np.testing.assert_allclose(losses, right, rtol=2e-5)
    for seen, wanted in zip(weights, right_weights, strict=True):
        np.testing.assert_allclose(seen, wanted, atol=2e-4)
    # Weights are gathered as before.
    assert sent.pop("all-gather", 0) == by_psum.pop("all-gather", 0)
    assert sent.keys() == {"collective-permute"} and by_psum.keys() <= {
        "all-reduce",
        "reduce-scatter",
    }
    # Of a leaf that the devices do not divide some numbers are padding.
    assert sent["collective-permute"] == pytest.approx(sum(by_psum.values()), rel=0.03)


@pytest.mark.parametrize(
    ("algorithm", "mesh", "zero", "parallel", "said"),
    [
        (
            "ring",
            {"data": 2},
            1,
            {"reduce": {"compression": "int8"}},
            "compression.* int8.* leave one of them out",
        ),
        (
            "hierarchical",
            {"data": 2},
            0,
            {},
            "mesh.islands is 1; .* mesh.islands, or algorithm ring",
        ),
        (
            "double_tree",
            {"data": 2},
            1,
            {},
            "no reduce-scatter, .*parallel.zero_stage is 1 .*; give zero_stage 0",
        ),
        (
            "halving_doubling",
            {"data": 6, "islands": 2},
            2,
            {},
            "is for powers of two, .* 3 data ranks shard",
        ),
        (
            "ring",
            {"data": 2, "pipeline": 2},
            3,
            {"zero_hold": False},
            "each stage scatters .*; set parallel.zero_hold to true",
        ),
    ],
)
def test_what_an_algorithm_cannot_do_is_refused_in_a_sentence(
    algorithm, mesh, zero, parallel, said
):
    with pytest.raises(
        ConfigError, match=f"^parallel.reduce.algorithm is {algorithm}, .*{said}"
    ):
        configuration(algorithm, mesh, zero, **parallel)


@pytest.mark.parametrize("algorithm", ["hierarchical", "double_tree"])
def test_of_one_data_rank_nothing_is_refused(algorithm):
    assert (
        configuration(algorithm, {"tensor": 2}, 1).parallel.reduce.algorithm
        == algorithm
    )


def test_another_algorithm_is_reported_at_a_resume_since_its_sums_end_in_other_bits():
    old, new = (
        configuration(name, {"data": 2}, 1) for name in ("psum", "two_way_ring")
    )
    said = compare(dataclasses.asdict(old), new, "step 3", weights_only=False)
    assert said == [
        "parallel.reduce.algorithm was psum and is two_way_ring from here on."
    ]
