"""Images on any mesh: what text has, a model of images has too.

Every layout gives the losses and gradients of one device (tests/helpers/reference.py), as `tests/test_equivalence.py`
asks of text; what is of text alone there (packing, the vocabulary's rows) has its counterpart here: patches cut over
the ranks, one label an image, two of a mixed one.
"""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from covering import slow_but, thorough_but
from image_batches import image_batch
from short_runs import canonical_numbers, first_moment, place, train_on

from meshtrain.config import Config, ConfigError, load, replaced
from meshtrain.inputs import LABELS, PATCHES
from meshtrain.mesh import AXES, make_mesh
from meshtrain.model.dropout import EMBEDDING_SITE, Dropout
from meshtrain.parallel.layout import Layout
from meshtrain.step import Program

STEPS = 4
CLIP = 0.5
# Nothing divides: 27 numbers a patch, 10 or 9 positions, 11 classes, 5 layers, 50 hidden.
MODEL = {
    "family": "vit", "layers": 5, "d_model": 24, "heads": 4, "d_ff": 50, "vocab_size": 11,
    "image_size": 9, "patch_size": 3, "channels": 3,
}  # fmt: skip
# 16 patches, so that ranks can share a sequence
EVEN = {**MODEL, "image_size": 12, "pool": "mean"}


@cache
def one_device(pool: str, dropout: float = 0.0) -> Config:
    model = EVEN if pool == "even" else {**MODEL, "pool": pool}
    return load(
        {
            "model": {**model, "dropout": dropout},
            "train": {"global_batch_size": 8, "steps": STEPS, "label_smoothing": 0.1},
            "optimizer": {"learning_rate": 0.01, "warmup_steps": 2, "grad_clip": CLIP},
            "data": {"source": "synthetic"},
        }
    )


def batches(config: Config, mixed: bool, weighted: bool) -> list[dict[str, np.ndarray]]:
    return [image_batch(config, step, mixed, weighted) for step in range(STEPS)]


def drops(config: Config, step: int) -> dict[str, jax.Array]:
    """What dropout multiplies with in a step: ones that went through it."""
    m, rows, length = (
        config.model,
        config.train.global_batch_size,
        config.train.sequence_length,
    )
    stream, scores = (
        jnp.ones((rows, length, m.d_model)),
        jnp.ones((rows, m.heads, length, length)),
    )
    key = jax.random.fold_in(jax.random.key(config.run.seed + 1), step)
    dropout = Dropout(m.dropout, key, jnp.arange(rows))

    def of_layer(layer: jax.Array) -> dict[str, jax.Array]:
        here = dropout.at(layer)
        attention, mlp = (here.at(site).stream(stream, 0) for site in (1, 2))
        return {
            "scores": here.at(0).attention(scores, 0),
            "attention": attention,
            "mlp": mlp,
        }

    layers = jax.vmap(of_layer, out_axes=1)(jnp.arange(m.layers))
    return layers | {"embedding": dropout.at(EMBEDDING_SITE).stream(stream, 0)}


@cache
def expected(
    pool: str, mixed: bool, weighted: bool, dropout: float
) -> tuple[Any, list[float], Any]:
    """Canonical parameters, and the reference's losses and first gradient."""
    config = one_device(pool, dropout)
    parameters = canonical_numbers(Layout(config, make_mesh(config)))
    given = batches(config, mixed, weighted)
    if dropout:
        given = [
            batch | {"drops": drops(config, step)} for step, batch in enumerate(given)
        ]
    recipe = reference.Recipe(0.01, 2, STEPS, clip=CLIP)
    return parameters, *reference.train(
        reference.Model("vit", label_smoothing=0.1), recipe, parameters, given
    )


# mesh, head, mixed, weighted, dropout, keys of the section parallel
CASES: dict[
    str, tuple[tuple[int, int, int], str, bool, bool, float, dict[str, Any]]
] = {
    "1x1x1": ((1, 1, 1), "class", True, True, 0.0, {"microbatches": 2}),
    "2x2x2": (
        (2, 2, 2),
        "class",
        True,
        True,
        0.0,
        {"zero_stage": 1, "microbatches": 2},
    ),
    "1x4x1": ((1, 4, 1), "class", True, True, 0.0, {}),
    "4x1x2-edge-zero3": (
        (4, 1, 2),
        "class",
        True,
        False,
        0.0,
        {"vocab": "edge", "zero_stage": 3, "microbatches": 2},
    ),
    "1x2x4-split-backward": (
        (1, 2, 4),
        "even",
        True,
        True,
        0.2,
        {"schedule": "zb_h1", "sequence_parallel": True, "microbatches": 4},
    ),
    "2x2x2-interleaved": (
        (2, 2, 2),
        "mean",
        True,
        False,
        0.2,
        {
            "schedule": "interleaved",
            "virtual_stages": 2,
            "microbatches": 4,
            "remat": "full",
            "zero_stage": 3,
        },
    ),
}


@pytest.mark.thorough
@pytest.mark.parametrize("case", slow_but(CASES, ["2x2x2", "1x1x1"]))
def test_layout_computes_the_reference_run(case):
    mesh, pool, mixed, weighted, dropout, parallel = CASES[case]
    config = one_device(pool, dropout)
    config = replaced(
        config, mesh=dict(zip(AXES, mesh, strict=True)), parallel=parallel
    )
    parameters, losses, gradient = expected(pool, mixed, weighted, dropout)
    metrics, program, (after_one, _) = train_on(
        batches(config, mixed, weighted), config, parameters
    )
    np.testing.assert_allclose([m["loss"] for m in metrics], losses, rtol=2e-5, atol=0)
    norm = np.sqrt(sum(np.sum(g**2) for g in jax.tree.leaves(gradient)))
    np.testing.assert_allclose(metrics[0]["grad_norm"], norm, rtol=1e-5)
    clipping = min(
        1.0, CLIP / metrics[0]["grad_norm"]
    )  # Adam's first moment is now (1 - β1) x the clipped gradient
    seen = program.layout.canonical(first_moment(after_one))

    def close(leaf: Any, g: np.ndarray, right: np.ndarray) -> None:
        # a key's bias has no gradient in theory, only noise
        own = norm if leaf.name.endswith("k_bias") else np.linalg.norm(right)
        assert np.linalg.norm(g / (0.1 * clipping) - right) <= 1e-5 * own, leaf.name

    program.layout.map(close, seen, gradient)


# --- logits and accuracy


def built(mesh: tuple[int, int, int], **parallel: Any) -> Program:
    config = replaced(
        one_device("class"), mesh=dict(zip(AXES, mesh, strict=True)), parallel=parallel
    )
    return Program(config, make_mesh(config))


CUT: dict[tuple[int, int, int], dict[str, Any]] = {
    (2, 2, 2): {"microbatches": 2},
    (1, 2, 2): {"vocab": "edge"},
    (1, 1, 1): {},
}


@pytest.mark.thorough
@pytest.mark.parametrize(
    "mesh", thorough_but(CUT, [(2, 2, 2)].__contains__, [(1, 2, 2)])
)
def test_an_evaluation_tells_the_share_of_images_whose_likeliest_class_is_theirs_by_their_weights(
    mesh,
):
    """Against argmax of the reference's whole logits: of equals the first, wherever its share of the classes lies."""
    program, parameters = (
        built(mesh, **CUT[mesh]),
        canonical_numbers(Layout(one_device("class"), make_mesh(load({})))),
    )
    weight, bias = parameters["head"]["weight"], parameters["head"]["bias"]
    weight[:, 9], bias[[2, 9]] = weight[:, 2], 1.5  # two classes alike, and likely
    batch, params = (
        image_batch(program.config, 3, weighted=True),
        place(program.layout, parameters),
    )
    whole = jax.jit(
        jax.vmap(
            lambda p: reference.image_logits(reference.Model("vit"), parameters, p)
        )
    )(batch[PATCHES])
    logits = np.asarray(program.logits(params, program.place(batch)[PATCHES]))
    np.testing.assert_allclose(logits, whole, atol=1e-5)
    likeliest = logits[:, 0].argmax(-1)
    assert (
        (likeliest == 2).any()
        and (likeliest != 2).any()
        and (logits[..., 2] == logits[..., 9]).all()
    )
    labels = np.where(np.arange(8) % 2 == 0, likeliest, 9)[:, None].astype(np.int32)
    placed, kept = program.place(batch | {LABELS: labels}), batch["weights"]
    means = program.eval_metrics(params, placed)
    assert float(means["eval_accuracy"]) == pytest.approx(
        np.sum((likeliest[:, None] == labels) * kept) / kept.sum(), rel=1e-6
    )
    assert float(means["eval_loss"]) == pytest.approx(
        float(program.eval_step(params, placed)), rel=1e-6
    )


# --- what is given by hand


def test_what_is_no_batch_of_images_is_refused():
    program = built((1, 1, 1))
    good = image_batch(program.config, mixed=True)
    for changed, says in [
        (
            {"tokens": good[LABELS], LABELS: good[LABELS]},
            r"has patches, labels .* has tokens, labels",
        ),
        (
            {**good, PATCHES: good[PATCHES].reshape(8, 9, 9, 3)},
            r"patches are float32\[8, 9, 9, 3\]; .* \[B, 9, 27\]: .* 9 x 9 x 3 .* 3 x 3",
        ),
        (
            {**good, LABELS: good[LABELS][:, 0]},
            r"labels are int32\[8\]; .* whole numbers",
        ),
        (
            {**good, LABELS: good[LABELS][:4]},
            r"labels has shape \[4, 1\]; .* \[8, 1\]",
        ),
        ({**good, LABELS: good[LABELS] + 11}, r"labels have the id .* 0 to 10"),
        ({**good, "mix": good["mix"] + 1}, "mix is the share .* first class"),
        (
            {name: x for name, x in good.items() if name != "mix"},
            "images have both labels_b and mix",
        ),
    ]:
        with pytest.raises(ConfigError, match=says):
            program.place(changed)
    text = Program(
        load({"model": {"layers": 1, "d_model": 8, "heads": 1, "vocab_size": 300}})
    )
    with pytest.raises(ConfigError, match=r"has tokens, labels .* one has patches"):
        text.place(good)
