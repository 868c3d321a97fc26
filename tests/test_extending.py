"""What docs/extending.md says one touches to add something: each added here from outside the package, trained on 2 x 2
x 2 and planned.
"""

from dataclasses import replace
from functools import cache

import jax
import numpy as np
import optax
import pytest
from image_batches import image_batch
from short_runs import train, train_on

import meshtrain as mt
from meshtrain.allreduce import ALGORITHMS, Algorithm
from meshtrain.compression import COMPRESSIONS, Compression
from meshtrain.config import Config, load
from meshtrain.families import FAMILIES, Family
from meshtrain.hlo import live_bytes
from meshtrain.optimizers import OPTIMIZERS, Optimizer
from meshtrain.parallel.reduce.algorithms import Programs
from meshtrain.schedule.generators import SCHEDULES, Schedule
from meshtrain.step import Program

MODEL = {"layers": 5, "d_model": 24, "heads": 4, "kv_heads": 2, "vocab_size": 67}
ON_EIGHT = {"data": 2, "tensor": 2, "pipeline": 2}


def config(mesh: dict[str, int], **sections) -> Config:
    train = {"global_batch_size": 8, "sequence_length": 16, "steps": 3}
    parallel = {
        "microbatches": 4,
        "zero_stage": 2 if len(mesh) == 3 else 0,
    } | sections.pop("parallel", {})
    model = MODEL | sections.pop("model", {})
    optimizer = {"warmup_steps": 0, "learning_rate": 0.01} | sections.pop(
        "optimizer", {}
    )
    return load(
        {
            "mesh": mesh,
            "model": model,
            "train": train,
            "parallel": parallel,
            "optimizer": optimizer,
            **sections,
        }
    )


def losses(of: Config) -> list[float]:
    return [metrics["loss"] for metrics in train(of, of.train.steps)[0]]


@cache
def plain() -> list[float]:
    """Losses of the model on one device, without what a test adds."""
    return losses(config({}))


def check(**sections) -> None:
    """Trained on 2 x 2 x 2 as on one device, and planned to the byte of its state."""
    there, alone = config(ON_EIGHT, **sections), config({}, **sections)
    metrics, program, _ = train(there, there.train.steps)
    np.testing.assert_allclose([m["loss"] for m in metrics], losses(alone), rtol=2e-5)
    planned = mt.plan(there)
    assert planned.seconds > 0 and planned.bytes > 0
    between = sum(item.nbytes for item in planned.memory if item.between_steps)
    assert between == pytest.approx(program.state_bytes, rel=0.01)


def parallel_block(block, x, sequence, collectives, dropout):
    """Attention and MLP side by side, from one norm (GPT-J)."""
    h = collectives.enter(block.attention_norm(x))
    y = block.attention(h, sequence, collectives, dropout.at(0)) + block.mlp(
        h, collectives
    )
    return x + dropout.at(1).stream(y, collectives.first_position(x.shape[1]))


@pytest.fixture
def register():
    """Adds an entry for a test."""
    added = []

    def add(registry, entry):
        added.append((registry, entry.name))
        registry.register(entry)

    yield add
    for registry, name in added:
        registry.forget(name)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "block",
    [
        pytest.param(None, id="options", marks=pytest.mark.slow),
        pytest.param(parallel_block, id="a block of its own"),
    ],
)
def test_a_family_is_one_entry(register, block):
    register(
        FAMILIES,
        Family(
            name="toy",
            centred_norms=False,
            positions="learned",
            gated=True,
            activation="relu",
            biases=True,
            tied_head=True,
            d_ff=lambda d_model: 3 * d_model + 2,
            block=block,
        ),
    )
    check(model={"family": "toy"})
    resolved = config({}, model={"family": "toy"}).model
    assert (resolved.d_ff, resolved.tied_head) == (74, True)


@pytest.mark.thorough
def test_a_family_of_images_is_one_entry(register):
    """With what ViT has not: rotary positions, RMSNorm, a gated MLP, and no bias anywhere."""
    register(
        FAMILIES,
        replace(
            FAMILIES["llama"], name="toy", images=True, causal=False, activation="relu"
        ),
    )
    model = {
        "family": "toy",
        "image_size": 9,
        "patch_size": 3,
        "channels": 1,
        "pool": "mean",
        "vocab_size": 7,
    }

    def of(mesh: dict[str, int]) -> Config:
        given = {
            "model": MODEL | model,
            "mesh": mesh,
            "data": {"source": "synthetic"},
            "train": {"global_batch_size": 8},
        }
        return load(
            given
            | {
                "parallel": {"microbatches": 2},
                "optimizer": {"warmup_steps": 0, "learning_rate": 0.01},
            }
        )

    there, alone = (
        train_on([image_batch(c, i) for i in range(3)], c)[0]
        for c in (of(ON_EIGHT), of({}))
    )
    np.testing.assert_allclose(
        [m["loss"] for m in there], [m["loss"] for m in alone], rtol=2e-5
    )
    assert alone[-1]["loss"] != alone[0]["loss"]
    planned = mt.plan(of(ON_EIGHT))
    between = sum(item.nbytes for item in planned.memory if item.between_steps)
    assert between == pytest.approx(live_bytes(Program(of(ON_EIGHT)).init()), rel=0.01)


@pytest.mark.thorough
def test_a_schedule_is_one_entry(register):
    def late_backward(stages, microbatches, chunks):
        """Idles a clock between forwards and backwards."""
        forward = np.arange(stages)[:, None] + np.arange(microbatches)
        backward = (
            forward.max()
            + 2
            + np.arange(microbatches)
            + (stages - 1 - np.arange(stages))[:, None]
        )
        return forward, backward

    register(SCHEDULES, Schedule("late", late_backward))
    there = config(ON_EIGHT, parallel={"schedule": "late"})
    np.testing.assert_allclose(losses(there), plain(), rtol=2e-5)
    planned = mt.plan(there)
    assert planned.timeline.table.name == "late" and planned.peak_in_flight == 4
    assert planned.clocks == 2 * (4 + 1) + 1


@pytest.mark.thorough
def test_an_optimizer_is_one_entry(register):
    register(
        OPTIMIZERS,
        Optimizer(
            "toy",
            make=lambda o, rate, mask, weights: optax.sgd(
                rate, momentum=o.beta1, nesterov=True
            ),
            moments=lambda o, weight: [range(weight.stacked, len(weight.axes))],
        ),
    )
    check(optimizer={"name": "toy"})


def data_parallel(**reduce: str) -> Config:
    return config(
        {"data": 2},
        parallel={
            "microbatches": 1,
            "zero_stage": int("compression" in reduce),
            "reduce": reduce,
        },
    )


@pytest.mark.thorough
def test_a_compression_is_one_entry(register):
    class Exact:
        """float32 as it is, as bytes."""

        def nbytes(self, k):
            return 4 * k

        def encode(self, rows):
            return jax.lax.bitcast_convert_type(rows, "uint8").reshape(len(rows), -1)

        def decode(self, sent, k):
            return jax.lax.bitcast_convert_type(
                sent.reshape(len(sent), k, 4), "float32"
            )

    register(COMPRESSIONS, Compression("exact", codec=lambda reduce: Exact()))
    there = data_parallel(compression="exact")
    metrics, program, _ = train(there, there.train.steps)
    assert "all_to_all" in program.lower().as_text()
    np.testing.assert_allclose([m["loss"] for m in metrics], plain(), rtol=2e-5)
    assert any(item.axis == "data" for item in mt.plan(there).transfers)


@pytest.mark.thorough
def test_an_all_reduce_algorithm_is_one_entry(register):
    def all_reduce(x, axes):
        return jax.lax.all_gather(x, axes).sum(0)

    register(
        ALGORITHMS,
        Algorithm(
            "gathered",
            programs=lambda: Programs(all_reduce),
            seconds=lambda links, nbytes: 1.0 * links.size,
            no_scatter=lambda devices: "which sums all at once",
        ),
    )
    there = data_parallel(algorithm="gathered")
    np.testing.assert_allclose(losses(there), plain(), rtol=2e-5)
    assert mt.plan(there).seconds > 2
    with pytest.raises(mt.ConfigError, match=r"gathered, .* parallel\.zero_stage is 1"):
        config(
            {"data": 2},
            parallel={
                "microbatches": 1,
                "zero_stage": 1,
                "reduce": {"algorithm": "gathered"},
            },
        )


def test_what_is_registered_is_named_where_a_word_is_wrong(register):
    register(
        FAMILIES,
        Family(
            "gemini",
            True,
            "rotary",
            False,
            "gelu",
            False,
            False,
            lambda d_model: d_model,
        ),
    )
    with pytest.raises(mt.ConfigError, match="vit, gemini; did you mean gemini"):
        config({}, model={"family": "gemin1"})
    with pytest.raises(ValueError, match="gemini is registered already"):
        FAMILIES.register(
            Family(
                "gemini",
                True,
                "learned",
                False,
                "gelu",
                False,
                False,
                lambda d_model: d_model,
            )
        )
