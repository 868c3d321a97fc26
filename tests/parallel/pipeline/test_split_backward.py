"""I and W together are B: the same numbers, each matrix product once, and W is left only what it needs."""

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas
from jax.extend.core import Jaxpr
from jax.interpreters.partial_eval import dce_jaxpr
from jax.sharding import PartitionSpec

from meshtrain.compat import vary
from meshtrain.config import load
from meshtrain.mesh import AXES, make_mesh
from meshtrain.model.grouped import grouped
from meshtrain.parallel.pipeline.buffers import empty
from meshtrain.parallel.pipeline.split_backward import Halves, split_backward
from meshtrain.parallel.pipeline.stage import Stage
from meshtrain.schedule.table import Slot
from meshtrain.step import Program

BATCH, WIDTH, HIDDEN = 5, 7, 11


def layer(x: jax.Array, weights: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
    scale, up, down = weights
    normed = x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-5) * scale
    return x + jax.nn.silu(normed @ up) @ down


def arguments() -> tuple[Any, jax.Array, jax.Array]:
    """Weights, input and cotangent."""
    random = np.random.default_rng(0)
    shapes = [
        (WIDTH,),
        (WIDTH, HIDDEN),
        (HIDDEN, WIDTH),
        (BATCH, WIDTH),
        (BATCH, WIDTH),
    ]
    scale, up, down, x, cotangent = (
        jnp.asarray(random.standard_normal(s), jnp.float32) for s in shapes
    )
    return (scale, up, down), x, cotangent


def backward(remat: bool) -> Any:
    """(x, residuals, cotangent) -> (input gradient, weight gradients), over residuals as the executor stashes them."""
    weights, x, _ = arguments()
    _, vjp = jax.vjp(
        lambda w, x: (jax.checkpoint(layer) if remat else layer)(x, w), weights, x
    )
    kept, tree = jax.tree.flatten(vjp)

    def run(kept: list[jax.Array], cotangent: jax.Array) -> tuple[jax.Array, Any]:
        gradient, gx = jax.tree.unflatten(tree, kept)(cotangent)
        return gx, gradient

    return run, kept


def products(jaxpr: Jaxpr, times: int = 1) -> Counter:
    """Matrix products by their shapes, each as often as it is done: a scan's as often as it turns."""
    found: Counter = Counter()
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            found[
                (*sorted(str(v.aval) for v in eqn.invars), str(eqn.outvars[0].aval))
            ] += times
        turns = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        for value in jax.tree.leaves(
            eqn.params, is_leaf=lambda p: hasattr(p, "eqns") or hasattr(p, "jaxpr")
        ):
            if hasattr(value, "jaxpr"):
                value = value.jaxpr
            if hasattr(value, "eqns"):
                found += products(value, times * turns)
    return found


def total(counted: Counter) -> int:
    return sum(counted.values())


def split(remat: bool) -> tuple[Any, list[jax.Array], jax.Array, Halves]:
    run, kept = backward(remat)
    cotangent = arguments()[2]
    return run, kept, cotangent, split_backward(run, (False, True), kept, cotangent)


@pytest.mark.thorough
@pytest.mark.parametrize("remat", [False, True])
def test_the_two_halves_give_the_gradients_of_the_whole(remat):
    run, kept, cotangent, halves = split(remat)
    (gx,), stash = halves.first(kept, cotangent)
    weights = halves.second(stash, kept, None)
    right_gx, right = run(kept, cotangent)
    np.testing.assert_allclose(gx, right_gx, rtol=1e-6)
    for ours, theirs in zip(weights, jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)


def test_no_matrix_product_is_done_twice():
    run, kept, cotangent, halves = split(remat=False)
    stash = jax.eval_shape(halves.first, kept, cotangent)[1]
    whole = products(jax.make_jaxpr(run)(kept, cotangent).jaxpr)
    first = products(jax.make_jaxpr(halves.first)(kept, cotangent).jaxpr)
    second = products(
        jax.make_jaxpr(lambda s, k: halves.second(s, k, None))(stash, kept).jaxpr
    )
    assert first + second == whole
    assert (
        total(whole) == 4
    )  # two products, each with a gradient of its input and one of its weight
    assert total(first) == total(second) == 2


def test_with_remat_the_forward_is_recomputed_for_the_input_gradient_only():
    """What W needs of it is in the stash: recomputing it once more would cost as much as it saves."""
    run, kept, cotangent, halves = split(remat=True)
    stash = jax.eval_shape(halves.first, kept, cotangent)[1]
    whole = products(jax.make_jaxpr(run)(kept, cotangent).jaxpr)
    first = products(jax.make_jaxpr(halves.first)(kept, cotangent).jaxpr)
    second = products(
        jax.make_jaxpr(lambda s, k: halves.second(s, k, None))(stash, kept).jaxpr
    )
    assert total(second) == 2
    assert first + second == whole


def test_the_stash_holds_only_what_w_reads_of_i():
    _, kept, cotangent, halves = split(remat=False)
    stash = jax.eval_shape(halves.first, kept, cotangent)[1]
    second = jax.make_jaxpr(lambda s, k: halves.second(s, k, None))(stash, kept).jaxpr
    read = {
        v for eqn in second.eqns for v in eqn.invars if not hasattr(v, "val")
    } | set(second.outvars)
    assert all(v in read for v in second.invars[: len(stash)])
    elements = sum(np.prod(s.shape) for s in stash)
    # the output cotangent of each product (HIDDEN and WIDTH), and what the norm's scale needs (WIDTH)
    assert elements <= BATCH * (HIDDEN + 2 * WIDTH)


def test_the_second_half_runs_without_what_is_lost():
    _, kept, cotangent, halves = split(remat=False)
    _, stash = halves.first(kept, cotangent)
    assert all(np.isfinite(leaf).all() for leaf in halves.second(stash, kept, None))


def test_a_loop_is_taken_whole():
    w, x, cotangent = (
        jnp.ones((WIDTH, WIDTH)),
        jnp.arange(float(WIDTH)),
        jnp.ones(WIDTH),
    )

    def run(x: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
        _, vjp = jax.vjp(
            lambda w, x: lax.fori_loop(0, 3, lambda _, x: jnp.tanh(x @ w), x), w, x
        )
        gradient, gx = vjp(cotangent)
        return gx, gradient

    halves = split_backward(run, (False, True), x, cotangent)
    (gx,), stash = halves.first(x, cotangent)
    (gradient,) = halves.second(stash, x, None)
    right_gx, right = run(x, cotangent)
    np.testing.assert_allclose(gx, right_gx)
    np.testing.assert_allclose(gradient, right)


@pytest.mark.thorough
@pytest.mark.parametrize("platform, product", [("cpu", "scan"), ("gpu", "pallas_call")])
def test_a_weight_gradient_that_is_a_loop_or_kernel_of_products_is_left_for_w(
    monkeypatch, platform, product
):
    """As those of experts are. A loop without products is run at once, like any other gradient that takes none."""
    call = pallas.pallas_call
    monkeypatch.setattr(
        pallas,
        "pallas_call",
        lambda *given, **keys: call(*given, **{**keys, "interpret": True}),
    )
    random = np.random.default_rng(0)
    up, down, rows, cotangent = (
        jnp.asarray(random.standard_normal(s), jnp.float32)
        for s in ((2, 16, 32), (2, 32, 16), (48, 16), (48, 16))
    )

    def run(
        rows: jax.Array, blocks: jax.Array, cotangent: jax.Array
    ) -> tuple[jax.Array, Any]:
        def layer(weights: tuple[jax.Array, ...], rows: jax.Array) -> jax.Array:
            up, down, scale = weights
            hidden = jax.nn.silu(
                grouped(rows, up, jnp.array([0, 1, 1]), blocks, platform)
            )
            hidden = hidden * lax.fori_loop(0, 2, lambda _, s: s * s, scale)
            return grouped(hidden, down, jnp.array([0, 1, 1]), blocks, platform)

        _, vjp = jax.vjp(layer, (up, down, jnp.float32(1.5)), rows)
        gradients, to_rows = vjp(cotangent)
        return to_rows, gradients

    given = rows, jnp.int32(3), cotangent
    halves = split_backward(run, (False, False, True), *given)
    (to_rows,), stash = halves.first(*given)
    gradients = halves.second(stash, *given[:2], None)
    right_to_rows, right = run(*given)
    for ours, theirs in zip(
        (to_rows, *gradients), (right_to_rows, *right), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)
    first = jax.make_jaxpr(halves.first)(*given).jaxpr
    second = jax.make_jaxpr(lambda stash, *kept: halves.second(stash, *kept, None))(
        stash, *given[:2]
    ).jaxpr
    names = [eqn.primitive.name for eqn in second.eqns]
    assert [name for name in names if name in ("while", "scan", "pallas_call")] == [
        product
    ] * 2
    turns = 2 if product == "scan" else 1  # one for each expert
    assert (
        total(products(first)) == 3 * turns
    )  # the first product once more, and the input gradients of both
    assert total(products(second)) == 2 * turns


# --- the model's own layers, inside the executor


def slots_products(**parallel: Any) -> list[Counter]:
    """Matrix products of one B, one I and one W of a stage of 3 llama layers."""
    mesh = {"data": 2, "tensor": 2, "pipeline": 2}
    model = {
        "layers": 6,
        "d_model": 16,
        "heads": 4,
        "kv_heads": 2,
        "d_ff": 24,
        "vocab_size": 37,
    }
    schedule = {"schedule": "zb_h1", "microbatches": 2, **parallel}
    train = {"global_batch_size": 4, "sequence_length": 8}
    config = load({"model": model, "mesh": mesh, "parallel": schedule, "train": train})
    program = Program(config, make_mesh(config))
    counted: list[Counter] = []

    def local(masters: Any, batch: Any) -> jax.Array:
        batches, _ = program.local.microbatches(batch)
        stage = Stage(
            program.local.forward,
            1,
            program.local.zero.gather_params(masters),
            batches,
            None,
        )
        zero, x = jnp.int32(0), stage.zeros()
        work = Slot(jnp.array(True), zero, zero, zero, cot=zero)
        stash, left = (
            empty((1, stage.slots), of) for of in stage.stash_shapes(split=True)
        )
        sums = vary(
            jax.tree.map(lambda w: jnp.zeros(w.shape), stage.blocks.differentiated),
            AXES,
        )
        for function, *given in (
            (
                lambda stash, x, sums: stage.backward(stash, x, sums, work),
                stash,
                x,
                sums,
            ),
            (
                lambda stash, x, left: stage.input_gradient(stash, x, left, work),
                stash,
                x,
                left,
            ),
            (
                lambda stash, left, sums: stage.weight_gradient(
                    stash, left, sums, work
                ),
                stash,
                left,
                sums,
            ),
        ):
            traced = jax.make_jaxpr(function)(*given)
            # less the forward that a vjp traces, where its residuals are in the stash
            counted.append(
                products(dce_jaxpr(traced.jaxpr, [True] * len(traced.jaxpr.outvars))[0])
            )
        return jnp.zeros(())

    specs = (program.layout.shards, PartitionSpec("data"))
    mapped = jax.shard_map(
        local, mesh=program.mesh, in_specs=specs, out_specs=PartitionSpec()
    )
    jax.eval_shape(mapped, program.layout.masters, program.batch_shapes())
    return counted


@pytest.mark.parametrize(
    ("zero", "remat"),
    [
        pytest.param(
            zero,
            remat,
            marks=pytest.mark.thorough
            if (zero, remat) in ((1, "dots"), (3, "none"), (3, "full"))
            else pytest.mark.slow,
        )
        for zero in (1, 3)
        for remat in ("none", "full", "dots")
    ],
)
def test_of_a_stage_i_and_w_together_do_the_products_of_b(zero, remat):
    whole, first, second = slots_products(zero_stage=zero, remat=remat)
    assert total(second) == 3 * 7  # the weights: q, k, v, out, gate, up, down
    assert first + second == whole
