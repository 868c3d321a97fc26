"""The hooks of the model on a mesh: Megatron's collectives forward and, by the types alone, backward."""

from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from meshtrain.compat import vary, varying
from meshtrain.config import Config, load
from meshtrain.hlo import collectives
from meshtrain.mesh import make_mesh
from meshtrain.model.loss import Vocabulary, cross_entropy
from meshtrain.parallel.tensor import MeshCollectives

P = PartitionSpec
MODEL = ("tensor", "pipeline")
WIDTH, HIDDEN, LENGTH = 12, 32, 8


def on_mesh(
    tensor: int, pipeline: int = 1, **parallel: object
) -> tuple[Config, Mesh, MeshCollectives]:
    config = load(
        {
            "model": {"layers": 4, "d_model": 64, "heads": 8},
            "mesh": {"tensor": tensor, "pipeline": pipeline},
            "parallel": {"microbatches": 4, **parallel},
        }
    )
    return config, make_mesh(config), MeshCollectives(config, "cpu")


def numbers(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def stream_spec(hooks: MeshCollectives) -> P:
    return P(None, "tensor") if hooks.sequence_parallel else P()


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_column_then_row_parallel_is_the_dense_product_forward_and_backward(
    sequence_parallel,
):
    _, mesh, hooks = on_mesh(4, sequence_parallel=sequence_parallel)
    x, scale, up, down, cotangent = (
        numbers(*shape, seed=i)
        for i, shape in enumerate(
            [
                (2, LENGTH, WIDTH),
                (WIDTH,),
                (WIDTH, HIDDEN),
                (HIDDEN, WIDTH),
                (2, LENGTH, WIDTH),
            ]
        )
    )
    spec = stream_spec(hooks)
    in_specs = (spec, P(), P(None, "tensor"), P("tensor"))

    def local(x, scale, up, down):
        scale = vary(
            scale, ("tensor",)
        )  # as weights do: its partial gradients are summed at the end of the step
        return hooks.leave(jnp.tanh(hooks.enter(x * scale) @ up) @ down)

    def local_gradient(x, scale, up, down, cotangent):
        gx, gs, gu, gd = jax.vjp(local, x, scale, up, down)[1](cotangent)
        return gx, gs, gu, gd

    def dense(x, scale, up, down):
        return jnp.tanh((x * scale) @ up) @ down

    y = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=spec))(
        x, scale, up, down
    )
    np.testing.assert_allclose(y, dense(x, scale, up, down), rtol=1e-4, atol=1e-5)
    backward = jax.shard_map(
        local_gradient, mesh=mesh, in_specs=(*in_specs, spec), out_specs=in_specs
    )
    found = jax.jit(backward)(x, scale, up, down, cotangent)
    right = jax.vjp(dense, x, scale, up, down)[1](cotangent)
    for g, r in zip(found, right, strict=True):
        np.testing.assert_allclose(g, r, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("sequence_parallel", "expected"),
    [(False, {"all-reduce": 2}), (True, {"all-gather": 2, "reduce-scatter": 2})],
)
def test_half_a_block_costs_the_papers_collectives_forward_and_backward(
    sequence_parallel, expected
):
    _, mesh, hooks = on_mesh(4, sequence_parallel=sequence_parallel)
    spec = stream_spec(hooks)

    def local(x, up, down, cotangent):
        run = lambda x, up, down: hooks.leave(
            jnp.tanh(hooks.enter(x * vary(jnp.ones(WIDTH), ("tensor",))) @ up) @ down
        )
        y, vjp = jax.vjp(run, x, up, down)
        return y, vjp(vary(cotangent, varying(y)))

    in_specs = (spec, P(None, "tensor"), P("tensor"), spec)
    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=in_specs, out_specs=(spec, in_specs[:3])
    )
    shapes = [(2, LENGTH, WIDTH), (WIDTH, HIDDEN), (HIDDEN, WIDTH), (2, LENGTH, WIDTH)]
    compiled = (
        jax.jit(mapped)
        .lower(*(jax.ShapeDtypeStruct(s, np.float32) for s in shapes))
        .compile()
    )
    found: Counter[str] = Counter()
    bsh = 4 * 2 * LENGTH * WIDTH
    for c in collectives(compiled, mesh):
        found[c.kind] += c.bytes // bsh  # XLA may join two of a kind
    assert found == expected and {c.axis for c in collectives(compiled, mesh)} == {
        "tensor"
    }


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("vocab", ["spread", "edge"])
def test_embedding_sums_leave_as_the_stream_of_every_rank(vocab, sequence_parallel):
    _, mesh, hooks = on_mesh(2, 4, vocab=vocab, sequence_parallel=sequence_parallel)
    # What each of 8 devices looked up, tensor rank major
    x = numbers(8, 2, LENGTH, WIDTH)
    per_device = P(MODEL)
    out = jax.jit(
        jax.shard_map(
            lambda x: vary(hooks.leave_embedding(x[0]), MODEL)[None],
            mesh=mesh,
            in_specs=per_device,
            out_specs=per_device,
        )
    )(x)
    x = np.asarray(x).reshape(2, 4, 2, LENGTH, WIDTH)
    right = x.sum((0, 1)) if vocab == "spread" else x.sum(0)
    length = LENGTH // 2 if sequence_parallel else LENGTH
    for t in range(2):
        for p in range(4):
            whole = right if vocab == "spread" else right[p]
            part = whole[:, t * length :][:, :length] if sequence_parallel else whole
            np.testing.assert_allclose(out[t * 4 + p], part, rtol=1e-5, atol=1e-5)


def test_ranks_know_their_first_head_token_and_position():
    _, mesh, hooks = on_mesh(2, 2, sequence_parallel=True)

    def local() -> jax.Array:
        found = (hooks.first_head(3), hooks.first_token_id(10), hooks.first_position(5))
        return jnp.stack([vary(jnp.asarray(n), MODEL) for n in found])[None]

    found = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(), out_specs=P(MODEL)))()
    # (tensor, pipeline) = (0,0), (0,1), (1,0), (1,1); the vocabulary is dealt to stages first
    assert found.tolist() == [[0, 0, 0], [0, 20, 0], [3, 10, 5], [3, 30, 5]]


def test_without_sequence_parallelism_every_rank_has_the_sequence_from_its_start():
    assert on_mesh(2)[2].first_position(5) == 0
    assert not on_mesh(1, sequence_parallel=True)[2].sequence_parallel, (
        "one rank has nothing to split"
    )


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("tensor", "pipeline", "vocab"),
    [(8, 1, "spread"), (2, 4, "spread"), (4, 2, "edge")],
)
def test_cross_entropy_of_shares_is_that_of_the_whole_vocabulary(
    tensor, pipeline, vocab
):
    size, ranks = 11, tensor * (pipeline if vocab == "spread" else 1)
    rows = -(-size // ranks)
    _, mesh, hooks = on_mesh(tensor, pipeline, vocab=vocab)
    logits, labels = (
        3 * numbers(2, 5, size),
        jnp.asarray(np.random.default_rng(1).integers(0, size, (2, 5))),
    )
    padded = jnp.pad(
        logits, ((0, 0), (0, 0), (0, rows * ranks - size)), constant_values=9.0
    )

    def sharded(z, labels):
        value, vjp = jax.vjp(
            lambda z: cross_entropy(
                z, labels, Vocabulary(size, hooks), 0.1, 0.01
            ).sum(),
            z,
        )
        return value, vjp(jnp.ones_like(value))[0]

    spec = P(None, None, hooks.vocabulary)
    value, gradient = jax.jit(
        jax.shard_map(sharded, mesh=mesh, in_specs=(spec, P()), out_specs=(P(), spec))
    )(padded, labels)
    whole = partial(definition, labels=labels)
    np.testing.assert_allclose(value, whole(logits), rtol=1e-5)
    np.testing.assert_allclose(gradient[..., :size], jax.grad(whole)(logits), atol=2e-6)
    assert not gradient[..., size:].any()


def definition(logits: jax.Array, labels: jax.Array) -> jax.Array:
    target = 0.9 * jax.nn.one_hot(labels, 11) + 0.1 / 11
    return (
        -(target * jax.nn.log_softmax(logits)).sum(-1)
        + 0.01 * jax.nn.logsumexp(logits, -1) ** 2
    ).sum()


def test_last_stages_value_reaches_all_and_all_gradients_reach_it():
    _, mesh, hooks = on_mesh(1, 4)
    values = numbers(4, 3)  # one a stage; stage 2 is asked
    stages = P("pipeline")

    def local(y: jax.Array) -> tuple[jax.Array, jax.Array]:
        stage = jax.lax.axis_index("pipeline")
        run = lambda y: (stage + 1.0) * hooks.share_last_stage(y, stage == 2)
        out, vjp = jax.vjp(run, y)
        return out, vjp(jnp.ones_like(out))[0]

    out, gradient = jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=stages, out_specs=(stages, stages))
    )(values)
    np.testing.assert_allclose(
        out, np.arange(1, 5)[:, None] * values[2][None], rtol=1e-6
    )
    np.testing.assert_array_equal(gradient, [[0] * 3, [0] * 3, [10] * 3, [0] * 3])


def test_vocabulary_on_the_edges_needs_no_broadcast():
    hooks = on_mesh(1, 4, vocab="edge")[2]
    y = numbers(3)
    assert hooks.share_last_stage(y, jnp.array(True)) is y
