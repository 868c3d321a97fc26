"""Rounds of experts beside what else a run may have: the losses and gradients are those of one device, whose experts
have room for all rows.
"""

import json
from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import reference_experts
from covering import slow_but
from jax.extend.core import jaxprs_in_params
from short_runs import canonical_numbers, merged, place, start, token_batches

import meshtrain as mt
from meshtrain.config import Config, load
from meshtrain.parallel.rounds import add_rounds
from meshtrain.step import Program

EXPERTS, TOP_K, SHARED = 8, 2, 2
MODEL = {
    "layers": 2,
    "d_model": 32,
    "heads": 4,
    "kv_heads": 2,
    "vocab_size": 61,
    "moe": {
        "experts": EXPERTS,
        "top_k": TOP_K,
        "d_ff": 32,
        "balance": "bias",
        "shared_experts": 1,
    },
}
MESH = {"data": 2, "expert": SHARED}
STAGES = MESH | {"pipeline": 2}
GATHER, SWAP = (
    {"experts": {"dispatch": name}} for name in ("all_gather", "all_to_all")
)
# The experts that all tokens choose: one on each of two ranks, or both on the first.
ROUTINGS = {1: (0, EXPERTS // SHARED), 2: (0, 1)}
FLOAT32, FLOAT16, FLOAT8 = 1e-6, 5e-3, 0.03
# A mesh sums in another order; it may not be further from float64 than this many times one device's own rounding.
BESIDE_ONE_DEVICE = 1.5
SCALE = 64  # of losses, so that float16 holds the gradients
LOAD = "blocks.experts.load"
LORA = {"lora": {"rank": 4}}
EIGHT = {"precision": {"matmul": "float8", "float8_skip": [0, 1]}}
TABLE = {"microbatches": 4}


def names(key: str, *activations: str) -> dict[str, Any]:
    return {"remat": "names", key: list(activations)}


#       mesh, parallel, other sections, the distance allowed
CELLS: dict[str, tuple[dict[str, int], dict[str, Any], dict[str, Any], float]] = {
    "LoRA": (MESH, SWAP | {"zero_stage": 3}, LORA, FLOAT32),
    "LoRA, zero bubble": (
        STAGES,
        GATHER | TABLE | {"schedule": "zb_h1"},
        LORA,
        FLOAT32,
    ),
    "some trained": (
        MESH,
        GATHER,
        {"train": {"trainable": ["*experts.up", "*q"]}},
        FLOAT32,
    ),
    "float16": (MESH, SWAP, {"precision": {"compute": "float16"}}, FLOAT16),
    "float16, gathered": (MESH, GATHER, {"precision": {"compute": "float16"}}, FLOAT16),
    "float8": (MESH, SWAP | {"zero_stage": 3}, EIGHT, FLOAT8),
    "float8, blocks": (
        MESH,
        GATHER,
        {"precision": EIGHT["precision"] | {"float8_recipe": "blockwise"}},
        FLOAT8,
    ),
    "float8, in stages": (STAGES, SWAP | TABLE | {"schedule": "1f1b"}, EIGHT, FLOAT8),
    "float8, LoRA": (MESH, GATHER, EIGHT | LORA, FLOAT8),
    "full remat": (MESH, SWAP | {"remat": "full"}, {}, FLOAT32),
    "selective remat": (MESH, GATHER | {"remat": "selective"}, {}, FLOAT32),
    "products kept": (MESH, SWAP | {"remat": "dots"}, {}, FLOAT32),
    "rows kept": (
        MESH,
        GATHER | names("remat_keep", "dispatched", "mlp_hidden"),
        {},
        FLOAT32,
    ),
    "rows offloaded": (
        MESH,
        SWAP | names("remat_offload", "dispatched", "mlp_in"),
        {},
        FLOAT32,
    ),
    "state offloaded": (MESH, GATHER | {"offload_optimizer": True}, {}, FLOAT32),
    "1f1b": (STAGES, SWAP | TABLE | {"schedule": "1f1b"}, {}, FLOAT32),
    "zero bubble": (STAGES, SWAP | TABLE | {"schedule": "zb_h1"}, {}, FLOAT32),
    "pairs": (STAGES, GATHER | TABLE | {"schedule": "paired"}, {}, FLOAT32),
    "pairs of zero bubble": (
        STAGES,
        SWAP | TABLE | {"schedule": "zb_paired"},
        {},
        FLOAT32,
    ),
}
FEW = (
    "LoRA",
    "float16",
    "float8",
    "float8, LoRA",
    "rows kept",
    "rows offloaded",
    "zero bubble",
    "pairs",
    "pairs of zero bubble",
)


def configuration(
    mesh: dict[str, int], parallel: dict[str, Any], more: dict[str, Any]
) -> Config:
    train = {"global_batch_size": 8, "sequence_length": 16} | more.get("train", {})
    return load(
        {"model": MODEL, "mesh": mesh, "parallel": parallel, **more, "train": train}
    )


def favoured(program: Program, rounds: int) -> Any:
    """Canonical numbers with which all tokens choose the same experts."""
    numbers = canonical_numbers(program.layout)
    load = numbers["blocks"]["experts"]["load"]
    load[:] = 0
    load[:, ROUTINGS[rounds]] = 10
    return numbers


def batch_of(config: Config) -> dict[str, np.ndarray]:
    return dict(zip(("tokens", "labels"), token_batches(config, 1)[0], strict=True))


def run(config: Config, rounds: int) -> tuple[float, dict[str, np.ndarray]]:
    """Returns the loss and the gradients of the trained weights of one batch, by their paths."""
    program = Program(config)
    layout = program.layout
    loss, shards = jax.jit(program.gradients)(
        place(layout, favoured(program, rounds)),
        program.place(batch_of(config)),
        jnp.int32(0),
        jnp.float32(SCALE),
    )
    canonical = lambda w, x: (
        x
        if x is None
        else np.asarray(layout.canonical_leaf(w, x)) / (1 if w.counts else SCALE)
    )
    return float(loss), by_path(layout.map(canonical, shards))


def by_path(tree: Any) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): x for path, x in leaves
    }


@cache
def one_device(more: str, rounds: int) -> tuple[float, dict[str, np.ndarray]]:
    return run(configuration({}, {}, json.loads(more)), rounds)


@cache
def dense(more: str, rounds: int) -> tuple[float, dict[str, np.ndarray]]:
    """The same by a loop over each token's experts, in float64."""
    config = configuration({}, {}, json.loads(more))
    numbers = favoured(Program(config), rounds)
    with jax.enable_x64(True):
        exact = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), numbers)
        whole, vjp = jax.vjp(partial(merged, config), exact)
        loss, gradients, _ = reference_experts.run(
            reference.Model("llama"), vars(config.model.moe), whole, batch_of(config)
        )
        return loss, by_path(jax.tree.map(np.asarray, vjp(gradients)[0]))


def errors(
    got: dict[str, np.ndarray], right: dict[str, np.ndarray]
) -> dict[str, float]:
    return {
        name: float(np.linalg.norm(x - right[name]) / np.linalg.norm(right[name]))
        for name, x in got.items()
        if name != LOAD
    }


@pytest.mark.thorough
@pytest.mark.parametrize("rounds", ROUTINGS)
@pytest.mark.parametrize("cell", slow_but(CELLS, FEW))
def test_losses_and_gradients_are_those_of_a_dense_loop_or_in_fewer_bits_of_one_device(
    cell, rounds
):
    mesh, parallel, more, within = CELLS[cell]
    loss, gradients = run(configuration(mesh, parallel, more), rounds)
    if (load := gradients.get(LOAD)) is not None:
        tokens = load[:, :EXPERTS].sum(1) / TOP_K
        assert np.array_equal(load[:, EXPERTS], rounds * tokens)
    alone, rounded = one_device(json.dumps(more), rounds)
    limits = dict.fromkeys(rounded, within)
    want, right = alone, rounded
    if within == FLOAT32:
        want, right = dense(json.dumps(more), rounds)
        limits = {
            name: max(within, BESIDE_ONE_DEVICE * x)
            for name, x in errors(rounded, right).items()
        }
    assert loss == pytest.approx(want, rel=within)
    found = errors(gradients, right)
    assert found and found.keys() == errors(rounded, right).keys()
    assert all(found[name] <= limits[name] for name in found), (found, limits)


@pytest.mark.thorough
@pytest.mark.parametrize("dispatch", [GATHER, SWAP], ids=["all_gather", "all_to_all"])
def test_a_step_is_skipped_where_only_a_later_round_overflows(dispatch):
    """One token in a batch has what overflows in the first layer's experts, the last that goes to the first rank."""
    precision = {"compute": "float16", "loss_scale": 16.0, "loss_scale_hysteresis": 1}
    config = configuration(MESH, dispatch, {"precision": precision})
    program = Program(config)
    numbers = favoured(program, rounds=2)
    word = MODEL["vocab_size"] - 1
    numbers["embedding"]["tokens"][:, 0] = 0
    numbers["embedding"]["tokens"][word, 0] = 10
    numbers["blocks"]["attention"]["out"][0, ..., 0] = 0
    for name in ("gate", "up"):
        numbers["blocks"]["experts"][name][0, :, 0] = 100
    found = []
    for last in (0, word):
        state = start(program, numbers)
        before = jax.tree.map(np.array, (state.params, state.optimizer))
        batch = {name: x % word for name, x in batch_of(config).items()}
        batch["tokens"][-1, -1] = last
        state, metrics = program.train_step(state, program.place(batch))
        after = jax.tree.map(np.array, (state.params, state.optimizer))
        same = jax.tree.all(jax.tree.map(np.array_equal, before, after))
        scale = float(metrics["loss_scale"])
        found.append((int(metrics["skipped"]), scale, same))
        assert last == word or metrics["expert_rounds"] == 2
    assert found == [(0, 16, False), (1, 8, True)]


@pytest.mark.thorough
@pytest.mark.parametrize("ranks", [(4, 2), (1, 4)])
def test_a_checkpoint_of_a_run_with_rounds_goes_on_with_others_on_another_mesh(
    tmp_path, ranks
):
    """Of so few tokens four ranks need several rounds, one needs none."""

    def losses(name: str, *runs: tuple[int, dict[str, Any]]) -> list[float]:
        for steps, mesh in runs:
            sections = {
                "run": {"directory": str(tmp_path / name)},
                "model": MODEL | {"vocab_size": 260},
                "mesh": mesh,
                "parallel": SWAP | {"zero_stage": 3},
                "data": {"source": "synthetic"},
                "train": {
                    "steps": steps,
                    "global_batch_size": 8,
                    "sequence_length": 16,
                },
                "optimizer": {"schedule": "constant"},
            }
            mt.train(load(sections))
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        several = [row["expert_rounds"] > 1 for row in rows]
        assert any(several) == (name == "moved"), rows
        return [row["loss"] for row in rows]

    alone = losses("alone", (4, {}))
    meshes = [{"data": n, "expert": n} for n in ranks]
    moved = losses("moved", *zip((2, 4), meshes, strict=True))
    assert len(moved) == 4 and np.allclose(moved, alone, rtol=2e-5)


@pytest.mark.parametrize("apart", [False, True])
def test_an_overflow_of_the_last_round_alone_is_in_the_output_and_the_gradients(apart):
    rows, weight, g = (jnp.full((8, 8), 300, jnp.float16) for _ in range(3))

    @jax.jit
    def outputs(rounds):
        def add(rows, weight):
            one = lambda number, rows: jnp.where(number == 2, rows, 0) @ weight
            return add_rounds(jnp.zeros_like(rows), one, rounds, apart, rows)

        y, vjp = jax.vjp(add, rows, weight)
        return y, *vjp(g)

    for rounds, overflows in ((2, False), (3, True)):
        for x in outputs(jnp.int32(rounds)):
            assert jnp.isinf(x).all() if overflows else (x == 0).all()


@pytest.mark.parametrize("apart", [False, True])
def test_rounds_have_no_gradient_of_a_frozen_weight(apart):
    """Of the loops of the backward none carries anything in the frozen weight's shape."""
    rows, frozen, trained = (jnp.ones(shape) for shape in ((4, 3), (3, 5), (5, 3)))

    def gradients(rows, frozen, trained):
        def add(rows, trained):
            one = lambda number, rows: number * (rows @ frozen @ trained)
            return add_rounds(rows, one, jnp.int32(2), apart, rows).sum()

        return jax.grad(add, (0, 1))(rows, trained)

    jaxpr = jax.make_jaxpr(gradients)(rows, frozen, trained).jaxpr
    carried = [
        shapes for shapes in loops(jaxpr) if (4, 3) in shapes or (5, 3) in shapes
    ]
    assert any((5, 3) in shapes for shapes in carried)
    assert not any((3, 5) in shapes for shapes in carried)


def loops(jaxpr: Any) -> Iterator[list[tuple[int, ...]]]:
    """Yields the shapes that each while loop carries."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "while":
            yield [v.aval.shape for v in eqn.outvars]
        for inner in jaxprs_in_params(eqn.params):
            yield from loops(inner)
