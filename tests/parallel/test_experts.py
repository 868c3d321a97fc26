"""Experts over the ranks of a mesh give the losses and gradients of a loop over each token's experts, in float64."""

import json
import math
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import reference_experts
from covering import slow_but
from short_runs import canonical_numbers, packed_batch, place, token_batches

import meshtrain as mt
from meshtrain.config import Config, load
from meshtrain.model.experts import route
from meshtrain.model.slots import slots_of
from meshtrain.step import Program

WITHIN = 1e-6
# A mesh sums in another order; it may not be further from float64 than this many times one device's own rounding.
BESIDE_ONE_DEVICE = 1.5
ROUTERS: dict[str, dict[str, Any]] = {
    "losses": {
        "experts": 8,
        "d_ff": 24,
        "z_loss": 0.01,
        "balance": "sequence",
        "balance_weight": 0.1,
    },
    "bias": {
        "experts": 8,
        "top_k": 3,
        "d_ff": 20,
        "router": "sigmoid",
        "balance": "bias",
        "groups": [4, 2],
        "route_scale": 2.5,
        "shared_experts": 1,
    },
    "chosen": {
        "experts": 4,
        "top_k": 1,
        "d_ff": 25,
        "router": "softmax_top_k",
        "balance": "sequence",
        "balance_weight": 0.05,
    },
    "plain": {"experts": 12, "top_k": 4, "d_ff": 16, "normalize": False},
}


def configuration(
    router: str, mesh: dict[str, int], parallel: dict[str, Any]
) -> Config:
    return load(
        {
            "model": {
                "layers": 2,
                "d_model": 24,
                "heads": 4,
                "kv_heads": 2,
                "vocab_size": 61,
                "moe": ROUTERS[router],
            },
            "train": {"global_batch_size": 8, "sequence_length": 24, "steps": 4},
            "parallel": parallel,
            "mesh": mesh,
        }
    )


def crowded(config: Config, packed: bool) -> dict[str, np.ndarray]:
    """A batch in which half of the tokens are one word, so that most choose the same experts."""
    tokens, labels = token_batches(config, 1)[0]
    tokens = np.where(
        np.random.default_rng(5).random(tokens.shape) < 0.5, 7, tokens
    ).astype(np.int32)
    if not packed:
        return {"tokens": tokens, "labels": labels}
    batch = packed_batch(tokens, labels)
    batch["segments"] = batch["segments"] + 1
    batch["segments"][:, -5:] = 0
    batch["weights"][:, -5:] = 0
    return batch


@cache
def one_device(router: str, packed: bool) -> tuple[Any, float, Any, np.ndarray]:
    """Canonical numbers, and what the reference makes of them: loss, gradients, counts."""
    config = configuration(router, {}, {})
    layout = Program(config).layout
    numbers = canonical_numbers(layout)
    numbers["blocks"]["experts"]["load"] *= np.float32(0.3)
    return numbers, *reference_experts.run(
        reference.Model("llama"),
        vars(config.model.moe),
        numbers,
        crowded(config, packed),
    )


def errors_of(got: Any, want: Any) -> Any:
    """The distance of each weight's gradient, over its norm; counts of loads are compared apart."""

    def without_load(tree: Any) -> Any:
        experts = dict(tree["blocks"]["experts"])
        experts.pop("load", None)
        return {**tree, "blocks": {**tree["blocks"], "experts": experts}}

    def apart(a: np.ndarray, b: np.ndarray) -> float:
        return float(np.linalg.norm(a - b) / np.linalg.norm(b))

    return jax.tree.map(apart, without_load(got), without_load(want))


@cache
def one_device_errors(router: str, packed: bool) -> Any:
    """What float32 rounds on one device, beside the reference in float64."""
    numbers, _, gradients, _ = one_device(router, packed)
    config = configuration(router, {}, {})
    program = Program(config)
    _, shards = jax.jit(program.gradients)(
        place(program.layout, numbers),
        program.place(crowded(config, packed)),
        jnp.int32(0),
        jnp.float32(1),
    )
    return errors_of(
        jax.tree.map(np.asarray, program.layout.canonical(shards)), gradients
    )


def dropped(counts: np.ndarray, config: Config, room: float) -> int:
    """Rows that ranks have no room for, where all of data shares the experts."""
    by_rank = counts.reshape(len(counts), config.mesh.expert, -1).sum(-1)
    return int(np.maximum(by_rank - room, 0).sum())


@pytest.mark.thorough
@pytest.mark.parametrize("dispatch", ["all_gather", "all_to_all"])
def test_rows_beyond_the_capacity_are_dropped_and_counted_exactly(dispatch):
    mesh = {"data": 2, "expert": 2}
    config = configuration(
        "plain", mesh, {"experts": {"dispatch": dispatch, "capacity": 1.1}}
    )
    program = Program(config)
    batch = crowded(config, packed=False)
    # Both ranks have the same rows, and so send as much to each.
    batch = {name: np.concatenate([x[: len(x) // 2]] * 2) for name, x in batch.items()}
    numbers = place(program.layout, one_device("plain", False)[0])
    _, shards = jax.jit(program.gradients)(
        numbers, program.place(batch), jnp.int32(0), jnp.float32(1)
    )
    load = np.asarray(program.layout.canonical(shards)["blocks"]["experts"]["load"])
    counts, pairs = (
        load[:, : config.model.moe.experts],
        batch["tokens"].size * config.model.moe.top_k,
    )
    if dispatch == "all_gather":
        want = dropped(counts, config, math.ceil(1.1 * pairs / 2))
    else:
        want = 2 * dropped(counts / 2, config, math.ceil(1.1 * pairs / 4))
    assert want > 0, "nothing is too much"
    assert load[:, config.model.moe.experts].sum() == want


@pytest.mark.thorough
def test_what_is_routed_nowhere_takes_no_slot_and_no_block():
    """An idle stage's zeros tie between all experts, and would all go to the first ones."""
    moe = configuration("plain", {}, {}).model.moe
    tied = route(moe, jnp.zeros((96, 12)), jnp.zeros(12), jnp.zeros(96, bool))
    slots = slots_of(tied.chosen, 12, tied.chosen.size)
    assert slots.blocks == 0 and slots.dropped == 0
    assert (slots.pairs == tied.chosen.size).all() and (
        slots.places == len(slots.pairs)
    ).all()
    routed = route(moe, jnp.zeros((96, 12)), jnp.zeros(12), None)
    assert slots_of(routed.chosen, 12, routed.chosen.size).blocks > 0


@pytest.mark.thorough
def test_what_idle_stages_and_padding_compute_with_chooses_no_expert(monkeypatch):
    """Where a ring goes round they compute too, as on accelerators: zeros, which tie, and would all be rows of the
    first experts.
    """
    config = configuration(*CELLS["idle and padded"][:3])
    routed: list[int] = []

    def slots(chosen: jax.Array, local: int, room: int, skipped: Any) -> Any:
        if isinstance(skipped, int):  # a first round
            jax.debug.callback(lambda n: routed.append(int(n)), jnp.sum(chosen < local))
        return slots_of(chosen, local, room, skipped)

    monkeypatch.setattr("meshtrain.model.experts.slots_of", slots)
    program = Program(config)
    batch, moe = crowded(config, packed=False), config.model.moe
    arguments = (
        place(program.layout, one_device("bias", False)[0]),
        program.place(batch),
        jnp.int32(0),
        jnp.float32(1),
    )
    jax.block_until_ready(jax.jit(program.gradients)(*arguments))
    jax.effects_barrier()
    assert 0 in routed, "no stage is idle"
    assert sum(routed) == 2 * batch["tokens"].size * moe.top_k * config.model.layers, (
        "forward, and again for the backward"
    )


@pytest.mark.thorough
@pytest.mark.parametrize(
    "meshes",
    [
        ({"data": 4, "expert": 4}, {}),
        ({"data": 2, "context": 2, "expert": 4}, {"data": 4, "expert": 2}),
    ],
    ids=("alone", "folded"),
)
def test_a_checkpoint_of_shared_experts_goes_on_alone_or_shared_by_others(
    tmp_path, meshes
):
    def sections(name: str, mesh: dict[str, int], steps: int) -> dict[str, Any]:
        model = {
            "layers": 2,
            "d_model": 24,
            "heads": 4,
            "vocab_size": 260,
            "moe": ROUTERS["bias"],
        }
        return {
            "run": {"directory": str(tmp_path / name)},
            "model": model,
            "mesh": mesh,
            "data": {"source": "synthetic"},
            "train": {"steps": steps, "global_batch_size": 8, "sequence_length": 24},
            "optimizer": {"schedule": "constant"},
        }

    before, after = meshes
    mt.train(load(sections("moved", before, 4)))
    mt.train(load(sections("moved", after, 6)))
    mt.train(load(sections("alone", {}, 6)))
    losses = [
        [
            json.loads(line)["loss"]
            for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        ]
        for name in ("moved", "alone")
    ]
    assert len(losses[0]) == 6 and np.allclose(*losses, rtol=2e-5)


GATHER, SWAP = {"dispatch": "all_gather"}, {"dispatch": "all_to_all"}
NODES: dict[str, Any] = {"ranks_per_node": 2}
CELLS: dict[str, tuple[str, dict[str, int], dict[str, Any], bool]] = {
    "one device": ("losses", {}, {}, False),
    "2 ranks share": (
        "losses",
        {"data": 4, "expert": 2},
        {"zero_stage": 2, "microbatches": 2, "experts": GATHER},
        False,
    ),
    "swapped": (
        "bias",
        {"data": 4, "expert": 4},
        {"zero_stage": 3, "experts": SWAP},
        False,
    ),
    "all of data": (
        "bias",
        {"data": 8, "expert": 8},
        {"zero_stage": 1, "experts": GATHER},
        False,
    ),
    "swapped by 8": (
        "losses",
        {"data": 8, "expert": 8},
        {"zero_stage": 2, "experts": SWAP, "remat": "full"},
        False,
    ),
    "tensor": (
        "bias",
        {"data": 2, "expert": 2, "tensor": 2},
        {"zero_stage": 2, "experts": SWAP},
        False,
    ),
    "sequences split": (
        "losses",
        {"data": 2, "expert": 2, "tensor": 4},
        {"zero_stage": 3, "sequence_parallel": True},
        False,
    ),
    "parts swapped": (
        "losses",
        {"data": 2, "expert": 2, "tensor": 2},
        {"zero_stage": 3, "sequence_parallel": True, "experts": SWAP},
        False,
    ),
    "parts swapped, packed": (
        "losses",
        {"data": 4, "expert": 2, "tensor": 2},
        {"zero_stage": 1, "remat": "full", "sequence_parallel": True, "experts": SWAP},
        True,
    ),
    "parts swapped, shared experts, zero bubble": (
        "bias",
        {"data": 2, "expert": 2, "tensor": 2, "pipeline": 2},
        {
            "microbatches": 4,
            "schedule": "zb_h1",
            "zero_stage": 2,
            "sequence_parallel": True,
            "experts": SWAP,
        },
        False,
    ),
    "parts of parts swapped": (
        "losses",
        {"data": 2, "expert": 2, "tensor": 2, "context": 2},
        {"sequence_parallel": True, "experts": SWAP},
        False,
    ),
    "parts that do not divide experts": (
        "chosen",
        {"data": 2, "expert": 2, "tensor": 4},
        {"sequence_parallel": True, "experts": SWAP},
        False,
    ),
    "stages": (
        "chosen",
        {"data": 2, "expert": 2, "pipeline": 2},
        {"microbatches": 4, "experts": SWAP},
        False,
    ),
    "zero bubble": (
        "bias",
        {"data": 2, "expert": 2, "pipeline": 2},
        {"microbatches": 4, "schedule": "zb_h1", "zero_stage": 2},
        False,
    ),
    "zero bubble, all split": (
        "losses",
        {"data": 2, "expert": 2, "tensor": 2, "pipeline": 2},
        {
            "microbatches": 4,
            "schedule": "zb_h1",
            "remat": "selective",
            "sequence_parallel": True,
            "zero_stage": 3,
        },
        False,
    ),
    "interleaved": (
        "plain",
        {"data": 2, "expert": 2, "pipeline": 2},
        {
            "microbatches": 4,
            "schedule": "interleaved",
            "virtual_stages": 2,
            "layer_split": [1, 0, 0, 1],
        },
        False,
    ),
    "rows split": (
        "losses",
        {"data": 2, "expert": 2, "context": 2},
        {"experts": SWAP, "zero_stage": 3},
        False,
    ),
    "rows split over a ring": (
        "bias",
        {"data": 2, "expert": 2, "context": 2, "tensor": 2},
        {"context_strategy": "ring", "sequence_parallel": True},
        False,
    ),
    # where a ring goes round idle stages and places without a layer compute too, as on accelerators
    "idle and padded": (
        "bias",
        {"data": 2, "expert": 2, "context": 2, "pipeline": 2},
        {
            "context_strategy": "ring",
            "microbatches": 2,
            "schedule": "interleaved",
            "virtual_stages": 2,
            "layer_split": [1, 0, 0, 1],
        },
        False,
    ),
    "islands": (
        "plain",
        {"data": 8, "islands": 2, "expert": 4},
        {"zero_stage": 2},
        False,
    ),
    "folded over context": (
        "losses",
        {"context": 2, "expert": 2},
        {"experts": GATHER, "zero_stage": 1, "microbatches": 2},
        False,
    ),
    "folded and swapped": (
        "bias",
        {"context": 2, "expert": 2},
        {"experts": SWAP, "zero_stage": 3},
        True,
    ),
    "folded over all of context 4": (
        "losses",
        {"context": 4, "expert": 4},
        {"experts": SWAP, "zero_stage": 2, "remat": "full", "context_strategy": "ring"},
        False,
    ),
    "folded over data and context": (
        "bias",
        {"data": 2, "context": 4, "expert": 8},
        {"experts": GATHER, "zero_stage": 3, "context_strategy": "all_gather"},
        False,
    ),
    "folded by all of data 2": (
        "plain",
        {"data": 2, "context": 2, "expert": 4},
        {"experts": SWAP, "zero_stage": 3, "context_strategy": "ulysses"},
        False,
    ),
    "folded in stages": (
        "chosen",
        {"data": 2, "context": 2, "expert": 4, "pipeline": 2},
        {"microbatches": 4, "experts": SWAP},
        False,
    ),
    "folded, zero bubble": (
        "losses",
        {"context": 2, "expert": 2, "pipeline": 2},
        {"microbatches": 4, "schedule": "zb_h1", "zero_stage": 2, "experts": GATHER},
        False,
    ),
    "folded pairs": (
        "bias",
        {"context": 2, "expert": 2, "pipeline": 2},
        {"microbatches": 4, "schedule": "paired", "experts": SWAP},
        False,
    ),
    "folded parts": (
        "losses",
        {"context": 2, "expert": 2, "tensor": 2},
        {"sequence_parallel": True, "experts": SWAP, "zero_stage": 3},
        False,
    ),
    "folded in islands": (
        "plain",
        {"data": 2, "islands": 2, "context": 4, "expert": 4},
        {"zero_stage": 2, "experts": SWAP},
        False,
    ),
    "by nodes, zero bubble": (
        "losses",
        {"data": 4, "expert": 4, "pipeline": 2},
        {"microbatches": 2, "schedule": "zb_h1", "zero_stage": 2, "experts": NODES},
        False,
    ),
    "by nodes of tensor": (
        "bias",
        {"data": 2, "expert": 2, "tensor": 2},
        {"sequence_parallel": True, "experts": NODES, "zero_stage": 3, "remat": "full"},
        False,
    ),
    "packed": (
        "losses",
        {"data": 4, "expert": 2, "tensor": 2},
        {"zero_stage": 1, "experts": SWAP},
        True,
    ),
    "packed in stages": (
        "bias",
        {"data": 2, "expert": 2, "pipeline": 2},
        {"microbatches": 2, "remat": "dots"},
        True,
    ),
}


FEW = (
    "one device",
    "2 ranks share",
    "parts swapped",
    "parts swapped, shared experts, zero bubble",
    "parts that do not divide experts",
    "stages",
    "zero bubble, all split",
    "interleaved",
    "rows split",
    "idle and padded",
    "islands",
    "packed",
    *(name for name in CELLS if name.startswith(("folded", "by nodes"))),
)


@pytest.mark.thorough
@pytest.mark.parametrize("cell", slow_but(CELLS, ["swapped", *FEW]))
def test_losses_gradients_and_counts_are_those_of_a_loop_over_experts(cell):
    router, mesh, parallel, packed = CELLS[cell]
    config = configuration(router, mesh, parallel)
    numbers, loss, gradients, counts = one_device(router, packed)
    program = Program(config)
    batch = program.place(crowded(config, packed))
    ours, shards = jax.jit(program.gradients)(
        place(program.layout, numbers), batch, jnp.int32(0), jnp.float32(1)
    )
    ours_of = jax.tree.map(np.asarray, program.layout.canonical(shards))
    assert abs(float(ours) / loss - 1) < WITHIN
    load = ours_of["blocks"]["experts"].pop("load")
    experts = config.model.moe.experts
    assert np.array_equal(load[:, :experts], counts)
    tokens = counts[0].sum() / config.model.moe.top_k
    assert counts.max() > tokens / 2, "no expert is crowded"
    # of each token its rounds: more than one where many ranks share experts, of which one is crowded
    rounds = load[:, experts] / tokens
    ranks = config.mesh.expert
    assert (
        (rounds == 1).all()
        if ranks == 1
        else (rounds >= 1 + (ranks > 2) / tokens).all()
    )

    errors = errors_of(ours_of, gradients)
    limits = jax.tree.map(
        lambda rounding: max(WITHIN, BESIDE_ONE_DEVICE * rounding),
        one_device_errors(router, packed),
    )
    assert jax.tree.all(jax.tree.map(float.__le__, errors, limits)), (errors, limits)


RAGGED = (5, 9, 3, 16, 1, 12, 8, 15)


def ragged(config: Config) -> dict[str, np.ndarray]:
    """A batch whose rows end at RAGGED, with places inside that do not weigh, two of them a chunk's last."""
    tokens, labels = token_batches(config, 1)[0]
    weights = (np.arange(tokens.shape[1]) < np.array(RAGGED)[:, None]).astype(
        np.float32
    )
    for row, token in ((1, 2), (1, 5), (3, 11)):
        weights[row, token] = 0
    return {"tokens": tokens, "labels": labels, "weights": weights}


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", ["all_gather", "ring", "ulysses"])
@pytest.mark.parametrize("router", ["losses", "bias"])
def test_padding_behind_a_row_chooses_no_expert_where_context_splits_rows(
    router, strategy
):
    sums = []
    for mesh, parallel in (({}, {}), ({"context": 2}, {"context_strategy": strategy})):
        program = Program(configuration(router, mesh, parallel))
        numbers = place(program.layout, one_device(router, False)[0])
        given = (
            numbers,
            program.place(ragged(program.config)),
            jnp.int32(0),
            jnp.float32(1),
        )
        loss, shards = jax.jit(program.gradients)(*given)
        sums.append((float(loss), program.layout.canonical(shards)))
    (loss, right), (found, gradient) = sums
    counts = [
        np.asarray(g["blocks"]["experts"]["load"])[:, :-2] for g in (right, gradient)
    ]
    np.testing.assert_array_equal(*counts)
    assert (counts[0].sum(-1) == sum(RAGGED) * program.config.model.moe.top_k).all()
    assert found == pytest.approx(loss, rel=WITHIN)
    for mine, theirs in zip(
        jax.tree.leaves(gradient), jax.tree.leaves(right), strict=True
    ):
        np.testing.assert_allclose(
            mine, theirs, atol=2e-5 * np.abs(theirs).max() + 1e-9
        )
