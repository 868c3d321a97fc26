"""What a layer of experts counts and sums, looked at without a mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import meshtrain as mt
from meshtrain.compat import residuals
from meshtrain.model.collectives import Collectives
from meshtrain.model.experts import Experts, recorded
from meshtrain.model.slots import collected, slots_of, spread
from meshtrain.optim import make_optimizer

CONFIG = mt.load(
    {
        "model": {
            "layers": 2,
            "d_model": 8,
            "heads": 2,
            "vocab_size": 32,
            "moe": {"experts": 4, "top_k": 2, "d_ff": 8, "balance": "bias"},
        },
        "optimizer": {
            "name": "sgd",
            "schedule": "constant",
            "grad_clip": 0.5,
            "weight_decay": 0.0,
        },
    }
)


def primitives(jaxpr):
    """Every operation of a program, those of its loops and branches too, with what it gives."""
    for eqn in jaxpr.eqns:
        yield eqn.primitive.name, [out.aval for out in eqn.outvars]
        for value in jax.tree.leaves(
            eqn.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
        ):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from primitives(inner)


def test_no_sum_is_scattered_forward_or_backward():
    """In whatever order a scatter adds: sums are of gathers, in one order.

    Whole numbers, which counts are, add up alike in any.
    """
    experts = Experts("blocks.experts", CONFIG.model, nnx.Rngs(0))
    graph, state = nnx.split(experts)
    rows, chosen, weights = (
        jnp.ones((6, 8)),
        jnp.zeros((6, 2), jnp.int32),
        jnp.ones((6, 2)),
    )

    def run(state, rows, weights):
        return nnx.merge(graph, state).compute(
            Collectives(), rows, chosen, weights, chosen.size
        )[0]

    def both(state, rows, weights):
        out, vjp = jax.vjp(run, state, rows, weights)
        return out, vjp(out)

    found = list(primitives(jax.make_jaxpr(both)(state, rows, weights).jaxpr))
    assert "gather" in [name for name, _ in found]
    adding = [
        name
        for name, outs in found
        if name == "scatter-add" and jnp.issubdtype(outs[0].dtype, jnp.floating)
    ]
    assert adding == []


@pytest.mark.thorough
def test_experts_of_a_token_are_summed_in_their_order():
    """1e8 + 1 - 1e8 is 0 in float32, and another sum in another order."""
    slots, places = jnp.float32([[1e8], [1.0], [-1e8]]), jnp.int32([[0, 1, 2]])
    source = jnp.zeros(3, jnp.int32)
    assert collected(slots, source, places) == 0.0
    to_rows = jax.vjp(lambda x: spread(x, source, places), jnp.zeros((1, 1)))[1](slots)[
        0
    ]
    assert to_rows == 0.0
    assert collected(slots, source, places[:, [0, 2, 1]]) == 1.0


def test_counts_leave_as_a_gradient_whatever_the_loss_is():
    counts = jnp.float32([3, 0, 5])
    for scale in (0.0, 1.0, 2.0**15):
        gradient = jax.grad(
            lambda load, s=scale: s * recorded(jnp.ones(2), load, counts).sum()
        )(jnp.zeros(3))
        assert np.array_equal(gradient, counts)


@pytest.mark.thorough
@pytest.mark.parametrize("balance, moved", [("bias", True), ("none", False)])
def test_counts_neither_clip_other_gradients_nor_are_a_step_of_their_own(
    balance, moved
):
    program = mt.Program(mt.load(CONFIG, [f"model.moe.balance={balance}"]))
    optimizer = make_optimizer(program.config, program.layout)
    params = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), program.layout.masters)
    gradients = jax.tree.map(lambda x: jnp.full(x.shape, 0.01), params)
    update, updates = (
        jax.jit(lambda tree: optimizer.update(tree, optimizer.init(params), params)[0]),
        [],
    )
    for count in (0.0, 1e6):
        load = jnp.zeros((2, 6)).at[:, 0].set(count)
        of_experts = gradients["blocks"]["experts"] | {"load": load}
        tree = gradients | {"blocks": gradients["blocks"] | {"experts": of_experts}}
        updates.append(update(tree))
    few, many = (update["blocks"]["experts"].pop("load") for update in updates)
    assert jax.tree.all(jax.tree.map(np.array_equal, *updates))
    assert not few.any() and np.array_equal(
        np.sign(many[0]), [-1, 1, 1, 1, 0, 0] if moved else np.zeros(6)
    )
    assert np.abs(many).max() == (
        np.float32(program.config.model.moe.bias_rate) if moved else 0
    )


FAMILIES = {"llama": {}, "gpt_oss": {"router": "softmax_top_k"}}


def layer_of(family: str, dtype):
    """The products of three experts of biases that are not zero, of rows that choose the first and the third of them or
    none.
    """
    sizes = {"family": family, "layers": 2, "d_model": 16, "heads": 2, "vocab_size": 32}
    config = mt.load(
        {
            "model": sizes
            | {"moe": {"experts": 3, "top_k": 2, "d_ff": 8, **FAMILIES[family]}}
        }
    )
    random = np.random.default_rng(3)
    graph, state = nnx.split(Experts("blocks.experts", config.model, nnx.Rngs(0)))
    state = jax.tree.map(
        lambda w: jnp.asarray(random.standard_normal(w.shape), dtype), state
    )
    chosen = jnp.asarray(random.choice([0, 2, 3], (40, 2)), jnp.int32)
    rows, cotangent = (
        jnp.asarray(random.standard_normal((40, 16)), dtype) for _ in range(2)
    )
    weights = jnp.asarray(random.random((40, 2)), jnp.float32)

    def vjp(slotted: bool):
        def run(state, rows, weights):
            experts = nnx.merge(graph, state)
            if not slotted:
                return experts.compute(Collectives(), rows, chosen, weights, 400)[0]
            return experts.compute_slots(
                Collectives(), rows, weights, slots_of(chosen, 3, 400)
            )

        return jax.vjp(run, state, rows, weights)

    return vjp, cotangent


@pytest.mark.thorough
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype, within", [("float32", 2e-6), ("bfloat16", 2e-2)])
@pytest.mark.parametrize("beside", [False, True])
def test_loops_give_what_products_of_all_slots_do(
    monkeypatch, family, dtype, within, beside
):
    monkeypatch.setattr("meshtrain.model.experts.lie_side_by_side", lambda *_: beside)
    vjp, cotangent = layer_of(family, dtype)
    for got, want in zip(
        *(jax.tree.leaves((out, of(cotangent))) for out, of in (vjp(False), vjp(True))),
        strict=True,
    ):
        assert got.dtype == want.dtype
        got, want = (np.asarray(x, np.float64) for x in (got, want))
        assert np.linalg.norm(got - want) <= within * np.linalg.norm(want)


@pytest.mark.thorough
def test_nothing_as_long_as_the_room_for_rows_is_kept_of_loops():
    """But where each slot's row came from: rows are kept as they came, and of 400 that may come 40 have."""
    vjp, _ = layer_of("llama", "float32")
    looped, slotted = (
        {x.shape for x in residuals(vjp(which)[1]) if x.ndim > 1 and len(x) > 80}
        for which in (False, True)
    )
    assert not looped and len(slotted) > 1
