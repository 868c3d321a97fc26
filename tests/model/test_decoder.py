"""The decoder computes the reference's logits; its numbers and its dropout follow from what a value is, not from where it lies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from flax import nnx
from short_runs import canonical_numbers, packed_batch, place, token_batches, train

from meshtrain.config import Config, load
from meshtrain.mesh import make_mesh
from meshtrain.model.collectives import Collectives
from meshtrain.model.decoder import Decoder, Embedding
from meshtrain.parallel.layout import Layout
from meshtrain.step import Program


def configuration(family: str = "llama", mesh: tuple[int, int, int] = (1, 1, 1), **sections: dict) -> Config:
    model = {"layers": 3, "d_model": 24, "heads": 4, "kv_heads": 2, "d_ff": 36, "vocab_size": 61}
    return load(
        {
            **sections,
            "model": {**model, "family": family, **sections.get("model", {})},
            "mesh": dict(zip(("data", "tensor", "pipeline"), mesh, strict=True)),
            "train": {"global_batch_size": 4, "sequence_length": 20},
        }
    )


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_logits_on_one_device_are_the_references(family, tied):
    config = configuration(family, model={"tied_head": tied})
    parameters = jax.tree.map(jnp.asarray, canonical_numbers(Layout(config, make_mesh(config))))
    decoder = Decoder(config.model, nnx.Rngs(0))
    nnx.update(decoder, parameters)
    tokens, _ = token_batches(config, 1)[0]
    right = jax.vmap(lambda t: reference.logits(reference.Model(family), parameters, t))(tokens)
    np.testing.assert_allclose(jax.jit(decoder)(tokens), right, atol=2e-5)


def test_gradient_of_the_embedding_in_bfloat16_counts_every_token():
    graph, weights = nnx.split(Embedding(configuration().model, nnx.Rngs(0)))
    weights = jax.tree.map(lambda x: x.astype(jnp.bfloat16), weights)
    tokens = jnp.full((4, 1000), 7)

    def total(weights: nnx.State) -> jax.Array:
        return jnp.sum(nnx.merge(graph, weights)(tokens, jnp.arange(1000), Collectives()).astype(jnp.float32))

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


@pytest.fixture(scope="module")
def initial() -> dict:
    program = Program(configuration("gpt2"), make_mesh(configuration("gpt2")))
    return jax.tree.map(np.asarray, program.layout.canonical(program.init().params))


@pytest.mark.parametrize("where", PLACES)
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
    residual = (2 * 3) ** -0.5  # GPT-2: 1/sqrt of the layers' number on what is added to the residual stream
    assert measured == pytest.approx({"embedding": 1, "in": 1, "out": residual, "attention out": residual}, rel=0.06)
    assert not initial["blocks"]["mlp"]["up_bias"].any() and (initial["head"]["norm"]["scale"] == 1).all()


def test_layers_start_from_different_numbers_that_do_not_depend_on_how_many_there_are(initial):
    up = initial["blocks"]["mlp"]["up"]
    assert not np.array_equal(up[0], up[1])
    shallow = nnx.to_pure_dict(nnx.state(Decoder(configuration("gpt2", model={"layers": 2}).model, nnx.Rngs(params=jax.random.key(0)))))  # fmt: skip
    np.testing.assert_allclose(shallow["blocks"]["mlp"]["up"], up[:2], rtol=1e-6)


@pytest.fixture(scope="module")
def dropped() -> list[float]:
    return [m["loss"] for m in train(configuration("gpt2", model={"dropout": 0.2}), 3)[0]]


def test_dropout_changes_the_loss(dropped):
    assert all(abs(m["loss"] - d) > 1e-3 for m, d in zip(train(configuration("gpt2"), 3)[0], dropped, strict=True))


@pytest.mark.parametrize("where", ["tensor", "all"])
def test_dropout_drops_the_same_values_on_every_mesh(where, dropped):
    mesh, parallel = PLACES[where]
    metrics, _, _ = train(configuration("gpt2", mesh, parallel=parallel, model={"dropout": 0.2}), 3)
    np.testing.assert_allclose([m["loss"] for m in metrics], dropped, rtol=2e-5)


# --- evaluation, and batches of packed documents


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("where", "family"), [("tensor", "gpt2"), ("data", "llama"), ("all", "llama")])
def test_evaluation_computes_the_references_loss(where, family, packed):
    mesh, parallel = PLACES[where]
    config = configuration(family, mesh, parallel=parallel, model={"dropout": 0.5})  # which evaluation leaves out
    program = Program(config, make_mesh(config))
    parameters = canonical_numbers(program.layout)
    batch = packed_batch(*token_batches(config, 1)[0])
    batch = batch if packed else {name: batch[name] for name in ("tokens", "labels")}
    loss = program.eval_step(place(program.layout, parameters), jax.device_put(batch, program.batch_sharding))
    right = jax.jit(lambda p, b: reference.loss(reference.Model(family), p, **b))(parameters, batch)
    np.testing.assert_allclose(loss, right, rtol=1e-5)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_gradient_of_packed_documents_is_the_references(family):
    mesh, parallel = PLACES["all"]
    config = configuration(family, mesh, parallel=parallel)
    program = Program(config, make_mesh(config))
    parameters, batch = canonical_numbers(program.layout), packed_batch(*token_batches(config, 1)[0])
    placed = jax.device_put(batch, program.batch_sharding)
    step, scale = jnp.zeros((), jnp.int32), jnp.ones(())
    _, gradient = jax.jit(program.gradients)(place(program.layout, parameters), placed, step, scale)
    right = jax.jit(jax.grad(lambda p: reference.loss(reference.Model(family), p, **batch)))(parameters)
    close = lambda g, r: np.testing.assert_allclose(g, r, atol=1e-5 * np.abs(r).max() + 1e-7)  # noqa: E731
    jax.tree.map(close, program.layout.canonical(jax.tree.map(np.asarray, gradient)), right)
