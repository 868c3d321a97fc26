"""Every layout learns from drawn answers as one device does, and tells how far drawing and training are apart."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from covering import slow_but
from short_runs import canonical_numbers, packed_batch, place, token_batches

from meshtrain.config import Config, ConfigError, load, replaced
from meshtrain.mesh import make_mesh
from meshtrain.parallel.forward import ROW_GAPS
from meshtrain.parallel.layout import Layout
from meshtrain.step import Program

TEMPERATURE = 0.7

LAYOUTS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "data4-zero3": ({"data": 4}, {"zero_stage": 3, "microbatches": 2}),
    "2x2x2-1f1b": (
        {"data": 2, "tensor": 2, "pipeline": 2},
        {"microbatches": 4, "schedule": "1f1b"},
    ),
    "zb": (
        {"data": 2, "pipeline": 2},
        {"microbatches": 4, "schedule": "zb_h1", "zero_stage": 3},
    ),
    "edge": (
        {"pipeline": 4},
        {"microbatches": 2, "schedule": "gpipe", "vocab": "edge", "zero_stage": 0},
    ),
    "context4": (
        {"data": 2, "context": 4},
        {"context_strategy": "ring", "zero_stage": 3},
    ),
    "ulysses": ({"context": 2, "tensor": 2}, {"context_strategy": "ulysses"}),
}


def one_device(**rl: Any) -> Config:
    model = {
        "layers": 4,
        "d_model": 24,
        "heads": 4,
        "kv_heads": 4,
        "d_ff": 50,
        "vocab_size": 61,
    }
    train = {
        "global_batch_size": 8,
        "steps": 3,
        "sequence_length": 24,
        "objective": "grpo",
    }
    rl = {
        "prompts": "prompts.jsonl",
        "reward": "exact",
        "group": 4,
        "answers": 8,
        "temperature": TEMPERATURE,
        **rl,
    }
    return load(
        {"model": model, "train": train, "rl": rl, "run": {"directory": "/nowhere"}}
    )


def log_pi(parameters: Any, batch: dict[str, np.ndarray]) -> jax.Array:
    """The log-probability of each label by an independent model, at the temperature of drawing."""
    logits = jax.vmap(
        lambda *of: reference.logits(reference.Model("llama"), parameters, *of)
    )(batch["tokens"], batch["positions"], batch["segments"])
    by_id = jax.nn.log_softmax(logits / TEMPERATURE)
    return jnp.take_along_axis(by_id, batch["labels"][..., None], -1)[..., 0]


@cache
def drawn() -> tuple[Any, dict[str, np.ndarray]]:
    """Parameters, and a batch whose answers were drawn by a model that is not quite this one."""
    config = one_device()
    parameters = canonical_numbers(Layout(config, make_mesh(config)))
    batch = packed_batch(*token_batches(config, 1)[0])
    random = np.random.default_rng(3)
    shape = batch["tokens"].shape
    before = np.asarray(log_pi(jax.tree.map(jnp.asarray, parameters), batch))
    batch["drawn"] = (before + random.normal(0, 0.3, shape)).astype(np.float32)
    batch["weights"] *= random.uniform(0.5, 2, shape).astype(np.float32)
    each = random.normal(0, 1, (len(shape) * 8, 8)).astype(np.float32)
    batch["advantages"] = np.take_along_axis(each[: shape[0]], batch["segments"], 1)
    return parameters, batch


def step_of(config: Config) -> tuple[float, Any, dict[str, np.ndarray]]:
    """The loss, the canonical gradient and the metrics of a step."""
    parameters, batch = drawn()
    program = Program(config)
    given = (
        place(program.layout, parameters),
        program.place(batch),
        jnp.int32(0),
        jnp.float32(1),
        None,
    )
    found = jax.jit(program._gradients)(*given)
    shards, measured = jax.device_get(
        (program.layout.canonical(found.shards), found.measured)
    )
    return float(found.loss), shards, measured


@cache
def right(loss: str) -> tuple[float, Any, dict[str, np.ndarray]]:
    return step_of(one_device(loss=loss))


def same(mine: Any, theirs: Any) -> None:
    for found, wanted in zip(
        jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True
    ):
        assert np.linalg.norm(found - wanted) <= 1e-5 * max(
            np.linalg.norm(wanted), 1e-3
        )


@pytest.mark.thorough
@pytest.mark.parametrize("loss", ["ppo_clip", "reinforce"])
def test_one_device_learns_as_the_formula_does(loss):
    parameters, batch = drawn()
    low, high = 0.2, 0.28

    def formula(parameters: Any) -> jax.Array:
        pi = log_pi(parameters, batch)
        ratio = jnp.exp(pi - batch["drawn"])
        gain = jnp.minimum(
            ratio * batch["advantages"],
            jnp.clip(ratio, 1 - low, 1 + high) * batch["advantages"],
        )
        gain = batch["advantages"] * pi if loss == "reinforce" else gain
        return -(gain * batch["weights"]).sum() / (batch["weights"] != 0).sum()

    value, gradient = jax.value_and_grad(formula)(jax.tree.map(jnp.asarray, parameters))
    found, shards, _ = right(loss)
    assert found == pytest.approx(float(value), rel=1e-5)
    same(shards, gradient)


@pytest.mark.thorough
@pytest.mark.parametrize("loss", ["ppo_clip", "gspo"])
@pytest.mark.parametrize(
    "layout", slow_but(LAYOUTS, ["data4-zero3", "2x2x2-1f1b", "context4"])
)
def test_every_layout_learns_from_answers_as_one_device_does(layout, loss):
    mesh, parallel = LAYOUTS[layout]
    config = replaced(
        one_device(loss=loss), mesh=mesh, parallel={"microbatches": 1, **parallel}
    )
    found, shards, measured = step_of(config)
    value, gradient, wanted = right(loss)
    assert found == pytest.approx(value, rel=1e-5)
    same(shards, gradient)
    for name in ("rl/gap_mean", "rl/gap_max", "rl/clipped", "rl/entropy"):
        assert float(measured[name]) == pytest.approx(float(wanted[name]), rel=1e-5), (
            name
        )
    gaps = measured[ROW_GAPS].reshape(8, -1).max(1)
    np.testing.assert_allclose(gaps, wanted[ROW_GAPS], rtol=1e-4)


@pytest.mark.thorough
@pytest.mark.parametrize("tokens", [5, 24])
def test_chunks_of_the_loss_change_nothing(tokens):
    config = replaced(one_device(loss="ppo_clip"), train={"loss_chunk": tokens})
    value, gradient, _ = right("ppo_clip")
    found, shards, _ = step_of(config)
    assert found == pytest.approx(value, rel=1e-5)
    same(shards, gradient)


@pytest.mark.parametrize(
    ("key", "sections"),
    [
        ("rl.prompts", {"rl": {"prompts": None}}),
        ("rl.reward", {"rl": {"reward": None}}),
        ("rl.clip", {"rl": {"clip": [0.2]}}),
        ("rl.group", {"rl": {"group": 3}}),
        ("rl.answers", {"rl": {"answers": 24}}),
        ("rl.beta", {"rl": {"beta": 0.1}}),
        ("train.z_loss", {"train": {"z_loss": 0.1}}),
        ("eval.every", {"eval": {"every": 5}}),
        ("train.objective", {"train": {"objective": "next_token"}}),
    ],
)
def test_what_does_not_go_together_is_refused_by_its_key(key, sections):
    with pytest.raises(ConfigError, match=key):
        from meshtrain.config.check import check

        check(replaced(one_device(), **sections))


@pytest.mark.thorough
def test_a_batch_without_what_drawing_told_is_refused():
    _, batch = drawn()
    program = Program(one_device())
    with pytest.raises(ConfigError, match="drawn"):
        program.place({name: x for name, x in batch.items() if name != "drawn"})
