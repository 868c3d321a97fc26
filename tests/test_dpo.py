"""Preferences: every layout learns from pairs what one device does by the paper's formula, its reference the base of
the adapters.
"""

import json
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from covering import slow_but
from short_runs import canonical_numbers, first_moment, merged, start

from meshtrain.config import Config, ConfigError, load, replaced
from meshtrain.config.check import check
from meshtrain.config.notes import notes
from meshtrain.mesh import AXES, make_mesh
from meshtrain.parallel.layout import Layout
from meshtrain.step import Program
from meshtrain.train import main

STEPS, CLIP, WARMUP, RATE, BETA, LENGTH = 3, 0.5, 2, 0.01, 0.4, 24

#          mesh        section parallel
LAYOUTS: dict[str, tuple[tuple[int, int, int], dict[str, Any]]] = {
    "2x2x1-zero1": ((2, 2, 1), {"sequence_parallel": True, "microbatches": 2}),
    "2x2x2-zero1": (
        (2, 2, 2),
        {"sequence_parallel": True, "microbatches": 4, "schedule": "1f1b"},
    ),
    "2x2x2-zero3-zb": (
        (2, 2, 2),
        {"zero_stage": 3, "microbatches": 4, "schedule": "zb_h1", "remat": "selective"},
    ),
    "2x1x4-edge-gpipe": (
        (2, 1, 4),
        {"vocab": "edge", "zero_stage": 0, "microbatches": 2, "schedule": "gpipe"},
    ),
    "2x1x1-context4": ((2, 1, 1), {"context_strategy": "ring", "zero_stage": 3}),
    "4x2x1-zero2": (
        (4, 2, 1),
        {"zero_stage": 2, "zero_hold": False, "microbatches": 2, "remat": "full"},
    ),
}


def one_device() -> Config:
    return load(
        {
            "model": {
                "layers": 5,
                "d_model": 24,
                "heads": 6,
                "kv_heads": 2,
                "d_ff": 50,
                "vocab_size": 257,
            },
            "data": {"format": "pairs"},
            "train": {
                "global_batch_size": 8,
                "steps": STEPS,
                "sequence_length": LENGTH,
                "objective": "dpo",
                "dpo_beta": BETA,
            },
            "optimizer": {
                "learning_rate": RATE,
                "warmup_steps": WARMUP,
                "grad_clip": CLIP,
            },
            "lora": {"rank": 3, "alpha": 5.0},
        }
    )


# of a pair: labels of the chosen conversation, of them of the answer; the same of the rejected one
Pair = tuple[int, int, int, int]


def rows_of(
    rows: list[list[Pair]], length: int = LENGTH, seed: int = 1
) -> dict[str, np.ndarray]:
    """A batch with these pairs in its rows. A pair's tokens follow from its sizes and the seed, wherever it stands."""
    names = ("tokens", "labels", "segments", "positions", "weights", "pairs")
    found = {
        name: np.zeros(
            (len(rows), length), np.float32 if name == "weights" else np.int32
        )
        for name in names
    }
    for row, pairs in enumerate(rows):
        at = 0
        for number, pair in enumerate(pairs, 1):
            text = np.random.default_rng([seed, *pair]).integers(
                0, 257, pair[0] + pair[2] + 2, np.int32
            )
            for side, labels, answer in ((0, *pair[:2]), (1, *pair[2:])):
                here, own = (
                    (row, slice(at, at + labels)),
                    text[side * (pair[0] + 1) :][: labels + 1],
                )
                found["tokens"][here], found["labels"][here] = own[:-1], own[1:]
                found["segments"][here], found["pairs"][here] = (
                    2 * number - 1 + side,
                    number,
                )
                found["positions"][here] = np.arange(labels)
                found["weights"][row, at + labels - answer : at + labels] = 1 - 2 * side
                at += labels
    return found


# Four microbatches on two data ranks: one has no pair, and rows have none, one, two and three.
ROWS: list[list[Pair]] = [
    [(7, 4, 5, 3), (4, 2, 6, 3)], [], [(12, 6, 12, 7)], [(3, 1, 4, 2), (2, 1, 3, 2), (5, 2, 6, 5)],
    [], [(8, 3, 3, 2)], [(9, 8, 8, 7)], [(6, 2, 4, 1), (5, 4, 7, 6)],
]  # fmt: skip


def formula(base: Any, parameters: Any, batch: dict[str, np.ndarray]) -> jax.Array:
    """Equation 7 of Rafailov et al. 2023, a pair at a time."""

    def log_p(parameters: Any) -> jax.Array:
        z = jax.vmap(
            lambda *of: reference.logits(reference.Model("llama"), parameters, *of)
        )(batch["tokens"], batch["positions"], batch["segments"])
        return jnp.take_along_axis(
            jax.nn.log_softmax(z), batch["labels"][..., None], -1
        )[..., 0]

    model, before = log_p(parameters), log_p(base)
    found = []
    for row, number in zip(
        *np.nonzero(batch["pairs"].max(1)[:, None] >= np.arange(1, 4)), strict=True
    ):
        of = (batch["pairs"][row] == number + 1) & (batch["weights"][row] != 0)
        chosen, rejected = (
            (of & (np.sign(batch["weights"][row]) == side)).astype(np.float32)
            for side in (1, -1)
        )
        gained = model[row] - before[row]
        found.append(
            -jnp.log(
                1
                / (
                    1
                    + jnp.exp(
                        -BETA * ((gained * chosen).sum() - (gained * rejected).sum())
                    )
                )
            )
        )
    return jnp.stack(found).mean()


@cache
def expected() -> tuple[Any, list[float], Any]:
    """Parameters, the losses of steps on the formula, and its first gradient."""
    config = one_device()
    layout = Layout(config, make_mesh(config))
    parameters = canonical_numbers(layout)
    numbers = jax.tree.map(jnp.asarray, parameters)
    base = merged(
        config, layout.map(lambda w, x: 0 * x if "_lora_" in w.name else x, numbers)
    )
    trained = layout.only_trained(numbers)
    optimizer = reference.Recipe(RATE, WARMUP, STEPS, clip=CLIP).optimizer(trained)
    batch = rows_of(ROWS)

    @jax.jit
    def step(trained: Any, state: Any) -> Any:
        of = lambda t: formula(
            base, merged(config, layout.add_frozen(t, numbers)), batch
        )
        loss, gradient = jax.value_and_grad(of)(trained)
        updates, state = optimizer.update(gradient, state, trained)
        return optax.apply_updates(trained, updates), state, loss, gradient

    state, losses, first = optimizer.init(trained), [], None
    for _ in range(STEPS):
        trained, state, loss, gradient = step(trained, state)
        losses.append(float(loss))
        first = gradient if first is None else first
    return parameters, losses, first


@pytest.mark.thorough
@pytest.mark.parametrize("layout", slow_but(LAYOUTS, ["2x2x1-zero1", "2x1x1-context4"]))
def test_every_layout_learns_from_pairs_as_the_formula_does(layout):
    mesh, parallel = LAYOUTS[layout]
    parameters, losses, gradient = expected()
    train = {
        "loss_chunk": 7
        if "microbatches" in parallel and "zero_stage" not in parallel
        else "auto"
    }
    context = 4 if "context_strategy" in parallel else 1
    sections = {
        "mesh": {"context": context, **dict(zip(AXES, mesh, strict=True))},
        "parallel": {"microbatches": 1, **parallel},
        "train": train,
    }
    program = Program(replaced(one_device(), **sections))
    state, batch = start(program, parameters), program.place(rows_of(ROWS))
    evaluated = float(program.eval_step(state.params, batch))
    seen = []
    for step in range(STEPS):
        state, metrics = program.train_step(state, batch)
        seen.append({name: float(value) for name, value in metrics.items()})
        if not step:
            first = jax.tree.map(np.asarray, first_moment(state))
    np.testing.assert_allclose([m["loss"] for m in seen], losses, rtol=0, atol=1e-5)
    assert losses[-1] < losses[0] and evaluated == pytest.approx(
        seen[0]["loss"], rel=1e-6
    )
    clipping = min(1.0, CLIP / seen[0]["grad_norm"])
    found = program.layout.map(
        lambda w, m: (
            program.layout.canonical_leaf(w, m / (0.1 * clipping))
            if w.trained
            else None
        ),
        first,
    )
    norms = [np.linalg.norm(g) for g in jax.tree.leaves(gradient)]
    for found_leaf, right in zip(
        jax.tree.leaves(found), jax.tree.leaves(gradient), strict=True
    ):
        assert np.linalg.norm(found_leaf - right) <= 1e-5 * max(
            np.linalg.norm(right), 1e-2 * max(norms)
        )


@pytest.mark.slow  # the run on a file of pairs begins so, too
def test_a_run_begins_at_log_2_with_no_reward_on_any_mesh():
    config = replaced(
        one_device(), mesh={"tensor": 2, "pipeline": 2}, parallel={"microbatches": 2}
    )
    program = Program(config)
    state, metrics = program.train_step(program.init(), program.place(rows_of(ROWS)))
    assert float(metrics["loss"]) == pytest.approx(np.log(2), abs=1e-7)
    assert (
        abs(float(metrics["rewards_margins"])) < 1e-6
        and float(metrics["grad_norm"]) > 1e-3
    )
    after = program.train_step(state, program.place(rows_of(ROWS)))[1]
    assert float(after["rewards_chosen"]) > 0 > float(after["rewards_rejected"])


@pytest.mark.thorough
def test_pairs_side_by_side_cost_what_each_does_in_a_row_of_its_own():
    config = one_device()
    parameters = expected()[0]
    losses = []
    alone = [[pair] for row in ROWS for pair in row]
    for rows in (ROWS, [*alone, *([[]] * (-len(alone) % 8))]):
        program = Program(replaced(config, train={"global_batch_size": len(rows)}))
        losses.append(
            float(
                program.eval_step(
                    start(program, parameters).params, program.place(rows_of(rows))
                )
            )
        )
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


@pytest.mark.slow
def test_float16_scales_the_gradient_alone():
    parameters = expected()[0]
    found = []
    for compute in ("float16", "float32"):
        program = Program(
            replaced(
                one_device(),
                precision={"compute": compute},
                mesh={"pipeline": 2},
                parallel={"microbatches": 2},
            )
        )
        found.append(
            program.train_step(
                start(program, parameters), program.place(rows_of(ROWS))
            )[1]
        )
    assert not found[0]["skipped"]
    for name in ("loss", "grad_norm", "rewards_margins"):
        assert float(found[0][name]) == pytest.approx(float(found[1][name]), rel=0.03)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            {"train": {"label_smoothing": 0.1}},
            "label_smoothing is 0.1, but train.objective",
        ),
        ({"train": {"z_loss": 1e-4}}, "train.z_loss is 0.0001, but train.objective"),
        (
            {"train": {"trainable": ("head.weight",)}},
            "which train.trainable would have move",
        ),
    ],
)
def test_what_would_change_the_log_probabilities_or_the_reference_is_refused(
    given, says
):
    with pytest.raises(ConfigError) as error:
        check(replaced(one_device(), **given))
    assert says in str(error.value)


def test_batches_without_pairs_are_refused_and_so_are_pairs_where_tokens_are_learned():
    program, batch = Program(one_device()), rows_of(ROWS)
    with pytest.raises(ConfigError, match="this one lacks pairs"):
        program.place({name: x for name, x in batch.items() if name != "pairs"})
    with pytest.raises(ConfigError, match=r"number 13; .* 24 labels .* 1 to 12"):
        program.place({**batch, "pairs": batch["pairs"] + 10})
    plain = replaced(
        one_device(), train={"objective": "next_token"}, data={"format": "text"}
    )
    with pytest.raises(ConfigError, match=r"train\.objective next_token does not"):
        Program(plain).place(batch)


@pytest.mark.thorough
def test_a_run_on_a_file_of_pairs_comes_to_prefer_the_chosen(tmp_path, capsys):
    said = [("red", "blue"), ("sun", "rain"), ("yes", "no"), ("tea", "milk")]
    pairs = [
        {"prompt": f"{n}?", "chosen": said[n % 4][0], "rejected": said[n % 4][1]}
        for n in range(32)
    ]
    (tmp_path / "pairs.jsonl").write_text(
        "".join(json.dumps(pair) + "\n" for pair in pairs)
    )
    (tmp_path / "template.jinja").write_text(
        "{% for m in messages %}{{ m.role[0] ~ m.content ~ '.' }}{% endfor %}"
    )
    config = {
        "model": {
            "layers": 2,
            "d_model": 32,
            "heads": 2,
            "d_ff": 64,
            "vocab_size": 258,
        },
        "data": {
            "source": str(tmp_path / "pairs.jsonl"),
            "format": "pairs",
            "template": str(tmp_path / "template.jinja"),
            "validation": 0.25,
            "last": "pad",
        },
        "train": {
            "objective": "dpo",
            "dpo_beta": 0.5,
            "steps": 12,
            "global_batch_size": 3,
            "sequence_length": 48,
            "uneven_batch": "pad",
        },
        "mesh": {"pipeline": 2},
        "parallel": {"microbatches": 2},
        "lora": {"rank": 4},
        "optimizer": {"learning_rate": 0.01, "warmup_steps": 1, "schedule": "constant"},
        "eval": {"every": 4, "batches": 1},
        "log": {"every": 1},
        "run": {"directory": str(tmp_path / "run")},
        "checkpoint": {"every": 0},
    }
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    assert main(["--config", str(tmp_path / "config.yaml")]) == 0
    rows = [
        json.loads(line)
        for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert rows[0]["loss"] == pytest.approx(np.log(2), abs=1e-6)
    assert rows[0]["rewards_accuracies"] < 0.5 and rows[-1]["rewards_accuracies"] == 1.0
    assert rows[-1]["rewards_chosen"] > 0 > rows[-1]["rewards_rejected"]
    assert (
        rows[-1]["eval_loss"] < 0.5 * np.log(2)
        and "preferred 100%" in capsys.readouterr().out
    )


def with_router_losses(**moe: Any) -> Config:
    model = {
        "family": "mixtral",
        "layers": 1,
        "moe": {"experts": 4, "top_k": 2, "d_ff": 16, **moe},
    }
    return replaced(one_device(), model=model, mesh={})


def router_gradient(batch: dict[str, np.ndarray], **moe: Any) -> np.ndarray:
    """The gradient of the adapters with the router's losses less that without, as one vector."""
    both = []
    for how in (moe, {}):
        config = with_router_losses(**how)
        program = Program(config, make_mesh(config))
        state = start(program, canonical_numbers(program.layout))
        given = state.params, program.place(batch), jnp.int32(0), jnp.float32(1)
        _, shards = jax.jit(program.gradients)(*given)
        both.append(
            np.concatenate(
                [
                    np.ravel(x)
                    for x in jax.tree.leaves(program.layout.only_updated(shards))
                ]
            )
        )
    return both[0] - both[1]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "moe",
    [{"z_loss": 1.0}, {"balance": "sequence", "balance_weight": 1.0}],
    ids=["z", "balance"],
)
def test_router_losses_have_the_same_direction_whichever_answer_is_longer(moe):
    longer = rows_of([[(12, 9, 6, 3)]] * 8)
    swapped = longer | {"weights": -longer["weights"]}
    equal = rows_of([[(8, 4, 8, 4)]] * 8)
    one, other, even = (
        router_gradient(batch, **moe) for batch in (longer, swapped, equal)
    )
    sizes = [np.linalg.norm(x) for x in (one, other, even)]
    assert min(sizes) > 1e-4, "equal lengths weigh too"
    assert one @ other / (sizes[0] * sizes[1]) > 0.9999


@pytest.mark.thorough
@pytest.mark.parametrize(
    "rates",
    [{"model": {"dropout": 0.3}}, {"lora": {"dropout": 0.3}}],
    ids=["model", "lora"],
)
def test_the_policy_drops_nothing_as_its_reference_does_not(rates):
    losses = []
    for sections in ({}, rates):
        program = Program(replaced(one_device(), **sections))
        state = start(program, canonical_numbers(program.layout))
        losses.append(
            float(program.train_step(state, program.place(rows_of(ROWS)))[1]["loss"])
        )
    assert losses[0] == losses[1]


@pytest.mark.parametrize("section", ["model", "lora"])
def test_a_rate_of_dropout_that_pairs_do_not_use_is_noted(section):
    sentences = notes(replaced(one_device(), **{section: {"dropout": 0.3}}))
    assert [f"{section}.dropout" in sentence for sentence in sentences].count(True) == 1
    assert not any("dropout" in sentence for sentence in notes(one_device()))
