"""Images to logits: the embedding is a convolution however its weight is cut, and the model is a ViT written plainly."""

from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_vit
from covering import thorough_but
from flax import nnx
from jax.sharding import PartitionSpec as P
from short_runs import canonical_numbers, place

from meshtrain.config import Config, load
from meshtrain.mesh import make_mesh
from meshtrain.model.collectives import Collectives
from meshtrain.model.decoder import Decoder
from meshtrain.model.patches import PatchEmbedding
from meshtrain.parallel.layout import Layout
from meshtrain.parallel.tensor import MeshCollectives
from meshtrain.step import Program

SIZE, PATCH, CHANNELS = 15, 5, 3  # 9 patches of 75 numbers, which 2 and 4 do not divide


def configuration(mesh: tuple[int, int, int] = (1, 1, 1), parallel: dict | None = None, **model) -> Config:
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
    return np.random.default_rng(3).standard_normal((rows, SIZE, SIZE, CHANNELS), np.float32)


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
    config = configuration(shape, {**parallel, "zero_stage": 0})
    layout = Layout(config, make_mesh(config))
    canonical = canonical_numbers(layout)
    live = place(layout, canonical)["embedding"]
    graph = nnx.split(nnx.eval_shape(lambda: PatchEmbedding(config.model, nnx.Rngs(0))))[0]
    collectives = MeshCollectives(config, "cpu")

    def local(weights, patches):
        return nnx.merge(graph, weights)(patches, jnp.arange(10), collectives)

    rows, specs = P(config.mesh.data_axes), jax.tree.map(lambda x: x.sharding.spec, live)
    out = P(config.mesh.data_axes, *collectives.stream_axes())
    mapped = jax.shard_map(local, mesh=layout.mesh, in_specs=(specs, rows), out_specs=out)
    found = jax.jit(mapped)(live, cut(images()))

    parts = canonical["embedding"]
    kernel = parts["patches"].reshape(PATCH, PATCH, CHANNELS, -1)
    layouts = ("NHWC", "HWIO", "NHWC")
    convolved = jax.lax.conv_general_dilated(images(), kernel, (PATCH, PATCH), "VALID", dimension_numbers=layouts)
    right = convolved.reshape(4, 9, -1) + parts["bias"]
    right = jnp.concatenate([jnp.broadcast_to(parts["class_token"], (4, 1, 20)), right], axis=1) + parts["positions"]
    np.testing.assert_allclose(found, right, atol=2e-5)


NOW = [("one device", "mean"), ("all", "class")]


@pytest.mark.parametrize("case", thorough_but(list(product(MESHES, ("class", "mean"))), NOW.__contains__), ids=str)
def test_logits_are_those_of_a_vit_written_in_numpy(case):
    where, pool = case
    shape, parallel = MESHES[where]
    # the mean's positions are 9, which 2 do not divide
    config = configuration(shape, parallel if pool == "class" else {"microbatches": 2}, pool=pool, norm_eps=1e-6)
    program = Program(config, make_mesh(config))
    canonical = canonical_numbers(program.layout)
    found = program.logits(place(program.layout, canonical), jax.device_put(cut(images()), program.batch_sharding))
    right = [reference_vit.logits(canonical, image, PATCH, 1e-6) for image in images()]
    np.testing.assert_allclose(found[:, 0], right, atol=1e-5)


@pytest.mark.thorough
def test_the_decoder_gives_the_same_logits_on_its_own():
    config = configuration(norm_eps=1e-6)
    canonical = canonical_numbers(Layout(config, make_mesh(config)))
    decoder = Decoder(config.model, nnx.Rngs(0))
    nnx.update(decoder, jax.tree.map(jnp.asarray, canonical))
    right = [reference_vit.logits(canonical, image, PATCH, 1e-6) for image in images()]
    np.testing.assert_allclose(jax.jit(decoder)(cut(images()))[:, 0], right, atol=1e-5)


def test_the_mean_is_of_the_patches_of_all_ranks():
    config = configuration((1, 2, 1), {"sequence_parallel": True}, pool="mean", image_size=20)
    program = Program(config, make_mesh(config))
    canonical, given = canonical_numbers(program.layout), np.random.default_rng(4).standard_normal((4, 20, 20, 3))
    found = program.logits(place(program.layout, canonical), jax.device_put(cut(given).astype(np.float32), program.batch_sharding))  # fmt: skip
    right = [reference_vit.logits(canonical, image, PATCH, 1e-5) for image in given]
    np.testing.assert_allclose(found[:, 0], right, atol=1e-5)


def test_patches_are_read_in_float32_and_embedded_in_the_dtype_of_the_weights():
    graph, weights = nnx.split(PatchEmbedding(configuration().model, nnx.Rngs(0)))
    run = partial(nnx.merge(graph, jax.tree.map(lambda x: x.astype(jnp.bfloat16), weights)), collectives=Collectives())
    assert run(jnp.asarray(cut(images())), jnp.arange(10)).dtype == jnp.bfloat16


def test_a_model_begins_as_the_paper_has_it():
    weights = nnx.to_pure_dict(nnx.state(Decoder(configuration(d_model=64).model, nnx.Rngs(0))))
    assert weights["embedding"]["patches"].std() == pytest.approx(75**-0.5, rel=0.05)
    assert weights["embedding"]["positions"].std() == pytest.approx(0.02, rel=0.1)
    assert not weights["embedding"]["class_token"].any() and not weights["head"]["bias"].any()
