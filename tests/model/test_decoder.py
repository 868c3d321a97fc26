"""The decoder computes the reference's logits; its numbers and its dropout follow from what a value is, not from where
it lies; images come in patches.
"""

from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import reference_vit
from covering import slow_but
from flax import nnx
from jax.sharding import PartitionSpec as P
from short_runs import canonical_numbers, packed_batch, place, token_batches, train

from meshtrain.config import Config, load
from meshtrain.mesh import make_mesh
from meshtrain.model.collectives import Collectives
from meshtrain.model.decoder import Decoder, Embedding, PatchEmbedding
from meshtrain.parallel.layout import Layout
from meshtrain.parallel.tensor import MeshCollectives
from meshtrain.step import Program


def configuration(
    family: str = "llama", mesh: tuple[int, int, int] = (1, 1, 1), **sections: dict
) -> Config:
    model = {
        "layers": 3,
        "d_model": 24,
        "heads": 4,
        "kv_heads": 2,
        "d_ff": 36,
        "vocab_size": 61,
    }
    return load(
        {
            **sections,
            "model": {**model, "family": family, **sections.get("model", {})},
            "mesh": dict(zip(("data", "tensor", "pipeline"), mesh, strict=True)),
            "train": {"global_batch_size": 4, "sequence_length": 20},
        }
    )


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("family", "tied"),
    [
        ("llama", False),
        ("gpt2", True),
        ("llama", True),
        ("gpt2", False),
    ],
)
def test_logits_on_one_device_are_the_references(family, tied):
    config = configuration(family, model={"tied_head": tied})
    parameters = jax.tree.map(
        jnp.asarray, canonical_numbers(Layout(config, make_mesh(config)))
    )
    decoder = Decoder(config.model, nnx.Rngs(0))
    nnx.update(decoder, parameters)
    tokens, _ = token_batches(config, 1)[0]
    right = jax.jit(
        jax.vmap(lambda t: reference.logits(reference.Model(family), parameters, t))
    )(tokens)
    np.testing.assert_allclose(jax.jit(decoder)(tokens), right, atol=2e-5)


@pytest.mark.thorough
def test_gradient_of_the_embedding_in_bfloat16_counts_every_token():
    graph, weights = nnx.split(Embedding(configuration().model, nnx.Rngs(0)))
    weights = jax.tree.map(lambda x: x.astype(jnp.bfloat16), weights)
    tokens = jnp.full((4, 1000), 7)

    def total(weights: nnx.State) -> jax.Array:
        return jnp.sum(
            nnx.merge(graph, weights)(tokens, jnp.arange(1000), Collectives()).astype(
                jnp.float32
            )
        )

    gradient = jax.jit(jax.grad(total))(weights)["tokens"][...]
    assert gradient.dtype == jnp.bfloat16
    # Ones that are added up in bfloat16 end at 256.
    assert jnp.all(gradient[7] == tokens.size) and not jnp.any(gradient[:7])


# --- on every mesh

PLACES = {
    "data": ((4, 1, 1), {"zero_stage": 3}),
    "tensor": ((1, 4, 1), {"sequence_parallel": True}),
    "pipeline": ((1, 1, 2), {"microbatches": 2, "schedule": "gpipe"}),
    "all": ((2, 2, 2), {"microbatches": 2, "sequence_parallel": True, "zero_stage": 2}),
}


def begun(config: Config) -> dict:
    """A decoder's own initial numbers."""
    return jax.jit(
        lambda: nnx.to_pure_dict(
            nnx.state(Decoder(config.model, nnx.Rngs(params=jax.random.key(0))))
        )
    )()


@pytest.fixture(scope="module")
def initial() -> dict:
    program = Program(configuration("gpt2"), make_mesh(configuration("gpt2")))
    return jax.tree.map(np.asarray, program.layout.canonical(program.init().params))


@pytest.mark.thorough
@pytest.mark.parametrize("where", slow_but(PLACES, ["all"]))
def test_initial_numbers_are_the_same_on_every_mesh(where, initial):
    mesh, parallel = PLACES[where]
    config = configuration("gpt2", mesh, parallel=parallel)
    program = Program(config, make_mesh(config))
    there = program.layout.canonical(jax.tree.map(np.asarray, program.init().params))
    jax.tree.map(np.testing.assert_array_equal, there, initial)


def test_initial_numbers_have_the_deviations_of_gpt2(initial):
    deviations = {
        "embedding": initial["embedding"]["tokens"],
        "in": initial["blocks"]["mlp"]["up"],
        "out": initial["blocks"]["mlp"]["down"],
        "attention out": initial["blocks"]["attention"]["out"],
    }
    measured = {name: x.std() / 0.02 for name, x in deviations.items()}
    residual = (
        2 * 3
        # GPT-2: 1/sqrt of the layers' number on what is added to the residual stream
    ) ** -0.5
    assert measured == pytest.approx(
        {"embedding": 1, "in": 1, "out": residual, "attention out": residual}, rel=0.06
    )
    assert (
        not initial["blocks"]["mlp"]["up_bias"].any()
        and (initial["head"]["norm"]["scale"] == 1).all()
    )


@pytest.mark.thorough
def test_layers_start_from_different_numbers_that_do_not_depend_on_how_many_there_are(
    initial,
):
    up = initial["blocks"]["mlp"]["up"]
    assert not np.array_equal(up[0], up[1])
    shallow = begun(configuration("gpt2", model={"layers": 2}))
    np.testing.assert_allclose(shallow["blocks"]["mlp"]["up"], up[:2], rtol=1e-6)


@pytest.fixture(scope="module")
def dropped() -> tuple[list[float], Program, list]:
    """Losses of three steps with dropout, their program, and the states after the first and the last."""
    metrics, program, states = train(configuration("gpt2", model={"dropout": 0.2}), 3)
    return [m["loss"] for m in metrics], program, states


@pytest.mark.thorough
def test_dropout_changes_the_loss(dropped):
    """Of the second step, beside an evaluation, which drops nothing, of the weights and the batch that it began
    with.
    """
    losses, program, (after_one, _) = dropped
    tokens, labels = token_batches(program.config, 3)[1]
    assert (
        abs(
            program.eval_step(after_one.params, {"tokens": tokens, "labels": labels})
            - losses[1]
        )
        > 1e-3
    )


@pytest.mark.thorough
@pytest.mark.parametrize(
    "where", [pytest.param("tensor", marks=pytest.mark.slow), "all"]
)
def test_dropout_drops_the_same_values_on_every_mesh(where, dropped):
    mesh, parallel = PLACES[where]
    metrics, _, _ = train(
        configuration("gpt2", mesh, parallel=parallel, model={"dropout": 0.2}), 3
    )
    np.testing.assert_allclose([m["loss"] for m in metrics], dropped[0], rtol=2e-5)


# --- evaluation, and batches of packed documents


EVALUATED = list(product(("tensor gpt2", "data llama", "all llama"), (False, True)))
FEW_EVALUATED = [("tensor gpt2", True), ("all llama", False), ("data llama", True)]


@pytest.mark.thorough
@pytest.mark.parametrize("case", slow_but(EVALUATED, FEW_EVALUATED), ids=str)
def test_evaluation_computes_the_references_loss(case):
    (where, family), packed = case[0].split(), case[1]
    mesh, parallel = PLACES[where]
    config = configuration(
        family, mesh, parallel=parallel, model={"dropout": 0.5}
    )  # which evaluation leaves out
    program = Program(config, make_mesh(config))
    parameters = canonical_numbers(program.layout)
    batch = packed_batch(*token_batches(config, 1)[0])
    batch = batch if packed else {name: batch[name] for name in ("tokens", "labels")}
    loss = program.eval_step(
        place(program.layout, parameters), jax.device_put(batch, program.batch_sharding)
    )
    right = jax.jit(lambda p, b: reference.loss(reference.Model(family), p, **b))(
        parameters, batch
    )
    np.testing.assert_allclose(loss, right, rtol=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "family", [pytest.param("llama", marks=pytest.mark.slow), "gpt2"]
)
def test_gradient_of_packed_documents_is_the_references(family):
    mesh, parallel = PLACES["all"]
    config = configuration(family, mesh, parallel=parallel)
    program = Program(config, make_mesh(config))
    parameters, batch = (
        canonical_numbers(program.layout),
        packed_batch(*token_batches(config, 1)[0]),
    )
    placed = jax.device_put(batch, program.batch_sharding)
    step, scale = jnp.zeros((), jnp.int32), jnp.ones(())
    _, gradient = jax.jit(program.gradients)(
        place(program.layout, parameters), placed, step, scale
    )
    right = jax.jit(
        jax.grad(lambda p: reference.loss(reference.Model(family), p, **batch))
    )(parameters)
    close = lambda g, r: np.testing.assert_allclose(
        g, r, atol=1e-5 * np.abs(r).max() + 1e-7
    )
    jax.tree.map(
        close, program.layout.canonical(jax.tree.map(np.asarray, gradient)), right
    )


SIZE, PATCH, CHANNELS = 15, 5, 3  # 9 patches of 75 numbers, which 2 and 4 do not divide


def image_configuration(
    mesh: tuple[int, int, int] = (1, 1, 1), parallel: dict | None = None, **model
) -> Config:
    given = {
        "family": "vit", "layers": 3, "d_model": 20, "heads": 4, "d_ff": 36, "vocab_size": 7, "image_size": SIZE,
        "patch_size": PATCH, "channels": CHANNELS,
    }  # fmt: skip
    return load(
        {
            "model": {**given, **model},
            "mesh": dict(zip(("data", "tensor", "pipeline"), mesh, strict=True)),
            "parallel": parallel or {},
            "train": {"global_batch_size": 4},
            "data": {"source": "synthetic"},
        }
    )


def images(rows: int = 4) -> np.ndarray:
    return np.random.default_rng(3).standard_normal(
        (rows, SIZE, SIZE, CHANNELS), np.float32
    )


def cut(given: np.ndarray) -> np.ndarray:
    """Patches [B, N, P]."""
    return np.stack([reference_vit.patches(image, PATCH) for image in given])


MESHES = {
    "one device": ((1, 1, 1), {}),
    "tensor": ((1, 4, 1), {}),
    "sequence split": ((1, 2, 1), {"sequence_parallel": True}),
    "all": ((2, 2, 2), {"sequence_parallel": True}),
    "edge": ((1, 2, 2), {"vocab": "edge"}),
}


@pytest.mark.parametrize("where", MESHES)
def test_the_embedding_is_a_convolution_whose_stride_is_its_width(where):
    shape, parallel = MESHES[where]
    config = image_configuration(shape, {**parallel, "zero_stage": 0})
    layout = Layout(config, make_mesh(config))
    canonical = canonical_numbers(layout)
    live = place(layout, canonical)["embedding"]
    graph = nnx.split(
        nnx.eval_shape(lambda: PatchEmbedding(config.model, nnx.Rngs(0)))
    )[0]
    collectives = MeshCollectives(config, "cpu")

    def local(weights, patches):
        return nnx.merge(graph, weights)(patches, jnp.arange(10), collectives)

    rows, specs = (
        P(config.mesh.data_axes),
        jax.tree.map(lambda x: x.sharding.spec, live),
    )
    out = P(config.mesh.data_axes, *collectives.stream_axes())
    mapped = jax.shard_map(
        local, mesh=layout.mesh, in_specs=(specs, rows), out_specs=out
    )
    found = jax.jit(mapped)(live, cut(images()))

    parts = canonical["embedding"]
    kernel = parts["patches"].reshape(PATCH, PATCH, CHANNELS, -1)
    layouts = ("NHWC", "HWIO", "NHWC")
    convolved = jax.lax.conv_general_dilated(
        images(), kernel, (PATCH, PATCH), "VALID", dimension_numbers=layouts
    )
    right = convolved.reshape(4, 9, -1) + parts["bias"]
    right = (
        jnp.concatenate(
            [jnp.broadcast_to(parts["class_token"], (4, 1, 20)), right], axis=1
        )
        + parts["positions"]
    )
    np.testing.assert_allclose(found, right, atol=2e-5)


FEW = [("one device", "mean"), ("all", "class"), ("all", "mean")]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "case", slow_but(product(MESHES, ("class", "mean")), FEW), ids=str
)
def test_logits_are_those_of_a_vit_written_in_numpy(case):
    where, pool = case
    shape, parallel = MESHES[where]
    # the mean's positions are 9, which 2 do not divide
    config = image_configuration(
        shape,
        parallel if pool == "class" else {"microbatches": 2},
        pool=pool,
        norm_eps=1e-6,
    )
    program = Program(config, make_mesh(config))
    canonical = canonical_numbers(program.layout)
    found = program.logits(
        place(program.layout, canonical),
        jax.device_put(cut(images()), program.batch_sharding),
    )
    right = [reference_vit.logits(canonical, image, PATCH, 1e-6) for image in images()]
    np.testing.assert_allclose(found[:, 0], right, atol=1e-5)


@pytest.mark.thorough
def test_the_decoder_gives_the_same_logits_on_its_own():
    config = image_configuration(norm_eps=1e-6)
    canonical = canonical_numbers(Layout(config, make_mesh(config)))
    decoder = Decoder(config.model, nnx.Rngs(0))
    nnx.update(decoder, jax.tree.map(jnp.asarray, canonical))
    right = [reference_vit.logits(canonical, image, PATCH, 1e-6) for image in images()]
    np.testing.assert_allclose(jax.jit(decoder)(cut(images()))[:, 0], right, atol=1e-5)


def test_the_mean_is_of_the_patches_of_all_ranks():
    config = image_configuration(
        (1, 2, 1), {"sequence_parallel": True}, pool="mean", image_size=20
    )
    program = Program(config, make_mesh(config))
    canonical, given = (
        canonical_numbers(program.layout),
        np.random.default_rng(4).standard_normal((4, 20, 20, 3)),
    )
    found = program.logits(
        place(program.layout, canonical),
        jax.device_put(cut(given).astype(np.float32), program.batch_sharding),
    )
    right = [reference_vit.logits(canonical, image, PATCH, 1e-5) for image in given]
    np.testing.assert_allclose(found[:, 0], right, atol=1e-5)


@pytest.mark.thorough
def test_patches_are_read_in_float32_and_embedded_in_the_dtype_of_the_weights():
    graph, weights = nnx.split(PatchEmbedding(image_configuration().model, nnx.Rngs(0)))
    run = partial(
        nnx.merge(graph, jax.tree.map(lambda x: x.astype(jnp.bfloat16), weights)),
        collectives=Collectives(),
    )
    assert run(jnp.asarray(cut(images())), jnp.arange(10)).dtype == jnp.bfloat16


@pytest.mark.thorough
def test_a_model_begins_as_the_paper_has_it():
    weights = begun(image_configuration(d_model=64))
    assert weights["embedding"]["patches"].std() == pytest.approx(75**-0.5, rel=0.05)
    assert weights["embedding"]["positions"].std() == pytest.approx(0.02, rel=0.1)
    assert (
        not weights["embedding"]["class_token"].any()
        and not weights["head"]["bias"].any()
    )
