"""Islands that take steps by themselves: what their programs send, and what they compute."""

import jax
import numpy as np
import pytest
from island_runs import (
    batches,
    largest_difference,
    numbers,
    program,
    run,
    same_bits,
    spoiled,
)

from meshtrain.hlo import collectives
from meshtrain.mesh import ISLAND
from meshtrain.parallel.sync import when
from meshtrain.parallel.sync.outer import OWN_SHARE
from meshtrain.parallel.sync.states import COUNTED, visible
from meshtrain.plan import gradient_traffic
from meshtrain.precision import NumbersCheck
from meshtrain.step import Program

PLAIN_SGD = {
    "name": "sgd",
    "beta1": 0.0,
    "grad_clip": 0.0,
    "weight_decay": 0.0,
    "warmup_steps": 0,
    "schedule": "constant",
    "learning_rate": 0.1,
}

FLAT = {"data": 4, "islands": 2}  # no stages, which compile slowly


def across(built: Program, jitted, *more):
    found = collectives(
        jitted.lower(built.state_shapes, *more).compile(), built.mesh, built.taken
    )
    assert found, "the program has no collective at all: nothing is shown"
    return [c for c in found if ISLAND in c.axes]


@pytest.fixture(scope="module")
def streaming() -> Program:
    return program(
        sync={"every": 4, "start": 2, "fragments": 2, "delay": 1, "outer_momentum": 0.5}
    )


@pytest.fixture(scope="module")
def whole() -> Program:
    return program(
        FLAT,
        sync={
            "every": 3,
            "start": 2,
            "outer_learning_rate": 0.7,
            "outer_momentum": 0.9,
        },
    )


@pytest.mark.thorough
def test_no_collective_of_an_inner_step_crosses_islands_and_a_synchronous_one_does(
    whole,
):
    assert across(whole, whole.steps.local_step, whole.batch_shapes()) == []
    assert across(whole, whole.steps.synchronous, whole.batch_shapes())


def shard_elements(built: Program) -> int:
    """float32 masters on one device, counted on the arrays."""
    return sum(
        int(np.prod(x.sharding.shard_shape(x.shape)))
        for x in jax.tree.leaves(built.layout.masters)
    )


def test_islands_are_brought_together_by_one_all_reduce_of_a_shard(whole):
    (found,) = across(whole, whole.steps.synchronize[0])
    assert (found.kind, found.axes, found.dtype) == ("all-reduce", (ISLAND,), "f32")
    assert found.bytes == 4 * (shard_elements(whole) + when.BESIDE)
    assert whole.steps.outer.sent_bytes(0) == found.sent


@pytest.mark.thorough
def test_with_a_delay_the_all_reduce_stands_in_the_next_step_and_taking_in_sends_nothing(
    streaming,
):
    total = 0
    for fragment, step in enumerate(streaming.steps.sending):
        (found,) = across(streaming, step, streaming.batch_shapes())
        assert (
            found.kind == "all-reduce"
            and found.sent == streaming.steps.outer.sent_bytes(fragment)
        )
        total += found.bytes
        text = (
            streaming.steps.apply_outer_update[fragment]
            .lower(streaming.state_shapes)
            .compile()
            .as_text()
        )
        assert (
            "all-reduce" not in text
            and "collective-permute" not in text
            and "all-gather" not in text
        )
    # layers 0, 1, 2 on one stage and 3, 4 on the other: the even ones are at most 2 on a stage, the odd ones 1
    assert total == 4 * (
        shard_elements(streaming)
        + when.BESIDE * streaming.config.parallel.sync.fragments
    )


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("islands", "compression"),
    [pytest.param(2, "int8", marks=pytest.mark.slow), (4, "int4")],
)
def test_what_islands_moved_is_sent_as_compression_over_islands_has_it(
    islands, compression
):
    """In one exchange more, of which the metrics' and the planner's bytes are those of the compiled program; the mean
    is off by rounding.
    """
    mesh, reduce = (
        {"data": 4, "islands": islands},
        {"compression": compression, "over": "islands", "block": 64},
    )
    large = {"d_model": 64, "d_ff": 96, "heads": 4, "kv_heads": 4}
    ours, plain = (
        program(
            mesh,
            model=large,
            parallel={"microbatches": 1, "sync": {"every": 2}, **more},
        )
        for more in ({"reduce": reduce}, {})
    )
    found = across(ours, ours.steps.synchronize[0])
    kinds = [c.kind for c in found]
    assert kinds.count("all-reduce") == 1 and set(kinds) - {"all-reduce"} == {
        "all-gather"
    } | ({"all-to-all"} if islands > 2 else set())
    assert {c.dtype for c in found if c.kind != "all-reduce"} == {"u8"}
    # a group of all-to-all is a tuple of messages, one of them to itself
    assert sum(c.sent for c in found) == pytest.approx(
        ours.steps.outer.sent_bytes(0), rel=0.01
    )
    assert sum(
        f.sent * 2 for f in gradient_traffic.sync_transfers(ours.config)
    ) == pytest.approx(ours.steps.outer.sent_bytes(0), rel=0.01)
    assert (
        plain.steps.outer.sent_bytes(0) / ours.steps.outer.sent_bytes(0)
        > {"int8": 3.3, "int4": 5.0}[compression]
    )
    state, _ = run(plain, plain.init(), 1)
    given, before = (
        jax.device_put(copied(state), ours.state_shardings),
        [x.copy() for x in numbers(state.params)],
    )
    (a, (row,)), (b, (expected,)) = run(ours, given, 1), run(plain, state, 1)
    assert row["sync_drift"] == pytest.approx(float(expected["sync_drift"]), rel=0.05)
    assert (
        0
        < largest_difference(a.params, b.params)
        < 0.2 * largest_difference(b.params, before)
    )


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("mesh", "sections"),
    [
        pytest.param(
            {"data": 2, "tensor": 2, "islands": 2},
            {"parallel": {"zero_stage": 0}},
            marks=pytest.mark.slow,
        ),
        (
            {"data": 4, "tensor": 2, "islands": 2},
            {
                "parallel": {"zero_stage": 2, "sequence_parallel": True},
                "optimizer": {"name": "muon"},
            },
        ),
        (
            {"data": 4, "pipeline": 2, "islands": 2},
            {
                "parallel": {"zero_stage": 3, "microbatches": 2},
                "optimizer": {"name": "adafactor"},
            },
        ),
        (
            {"data": 4, "islands": 2},
            {
                "precision": {"compute": "float16"},
                "model": {"dropout": 0.1},
                "lora": {"rank": 2, "targets": ["q", "v"]},
            },
        ),
    ],
)
def test_nothing_crosses_islands_whatever_the_layout_and_the_optimizer(mesh, sections):
    sync = {"every": 2}
    sections = {**sections, "parallel": {**sections.get("parallel", {}), "sync": sync}}
    built = program(mesh, **sections)
    assert across(built, built.steps.local_step, built.batch_shapes()) == []
    (found,) = across(built, built.steps.synchronize[0])
    assert found.sent == built.steps.outer.sent_bytes(0)
    _, rows = run(built, built.init(), 2)
    assert rows[1]["sync_islands"] == mesh["islands"] and rows[1]["sync_drift"] > 0


@pytest.mark.thorough
def test_islands_brought_together_after_every_step_of_sgd_are_plain_data_parallelism():
    sync = {"every": 1, "outer_learning_rate": 1.0, "outer_momentum": 0.0}
    ours, plain = (
        program(FLAT, sync=sync, optimizer=PLAIN_SGD),
        program(FLAT, optimizer=PLAIN_SGD),
    )
    before = ours.init()
    first = numbers(before.params)
    (a, rows), (b, expected) = run(ours, before, 3), run(plain, plain.init(), 3)
    assert (
        max(
            float(np.abs(x - y).max())
            for x, y in zip(first, numbers(a.params), strict=True)
        )
        > 1e-2
    )
    assert largest_difference(a.params, b.params) < 1e-6
    assert [row["loss"].mean() for row in rows] == pytest.approx(
        [float(row["loss"]) for row in expected], abs=1e-6
    )


@pytest.mark.thorough
def test_islands_weigh_by_the_rows_that_they_learn_from():
    """Islands with 4 and 1, 4 and 0, 2 and 4 rows, the others padding, are plain data parallelism as well."""
    sync = {"every": 1, "outer_learning_rate": 1.0, "outer_momentum": 0.0}
    ours, plain = (
        program(FLAT, sync=sync, optimizer=PLAIN_SGD),
        program(FLAT, optimizer=PLAIN_SGD),
    )
    a, b = ours.init(), plain.init()
    for batch, real in zip(
        batches(3), (range(5), range(4), (0, 1, 4, 5, 6, 7)), strict=True
    ):
        weights = np.isin(np.arange(8), real)[:, None] * np.ones((1, 8), np.float32)
        a, row = ours.train_step(a, ours.place({**batch, "weights": weights}))
        b, expected = plain.train_step(b, plain.place({**batch, "weights": weights}))
        assert visible(row)["loss"] == pytest.approx(float(expected["loss"]), abs=1e-6)
        assert int(row["sync_islands"]) == 2 and COUNTED not in visible(row)
        assert largest_difference(a.params, b.params) < 1e-6


@pytest.mark.thorough
def test_synchronous_steps_are_those_of_plain_training_and_leave_all_islands_equal(
    whole,
):
    plain = program(FLAT)
    begun = numbers(plain.init().params)
    (a, rows), (b, expected) = run(whole, whole.init(), 2), run(plain, plain.init(), 2)
    # by the norm: where a gradient is nearly zero, AdamW makes a whole step of its last bits, which differ between
    # processors
    assert distance(numbers(a.params), numbers(b.params)) < 1e-4 * distance(
        begun, numbers(b.params)
    )
    norms = [[float(row["grad_norm"]) for row in found] for found in (rows, expected)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    for leaf, shared in zip(numbers(a.islands.params), numbers(a.params), strict=True):
        assert np.array_equal(leaf[0], leaf[1]) and np.array_equal(leaf[0], shared)
    a, _ = run(whole, a, 1)
    assert all(
        not np.array_equal(x[0], x[1]) for x in numbers(a.islands.params) if x.any()
    )


def distance(a: list[np.ndarray], b: list[np.ndarray]) -> float:
    return float(np.sqrt(sum(np.sum((x - y) ** 2) for x, y in zip(a, b, strict=True))))


def copied(state):
    """A state that a step may use up."""
    return jax.tree.map(lambda x: x.copy(), state)


def canonical(built: Program, tree) -> list[np.ndarray]:
    """Weights with their layers in order, each island's for itself."""
    leaves = zip(built.layout.flat, numbers(tree), strict=True)

    def of(weight, x):
        return np.asarray(built.layout.canonical_leaf(weight, x))

    return [
        of(w, x) if x.ndim == len(w.axes) else np.stack([of(w, part) for part in x])
        for w, x in leaves
    ]


def in_fragment(built: Program, fragment: int) -> list[np.ndarray]:
    """For each weight, which of its layers (or whether it) is in a fragment, to be broadcast against it."""
    found = []
    for weight in built.layout.flat:
        if weight.stacked:
            of_layer = [
                layer % built.config.parallel.sync.fragments == fragment
                for layer in range(weight.shape[0])
            ]
            found.append(np.array(of_layer).reshape(-1, *[1] * (len(weight.shape) - 1)))
        else:
            first = weight.name.startswith("embedding")
            found.append(
                np.array(
                    fragment
                    == (0 if first else built.config.parallel.sync.fragments - 1)
                )
            )
    return found


@pytest.mark.thorough
def test_the_outer_step_is_nesterov_on_the_mean_of_what_islands_moved_each_fragment_with_its_delay(
    streaming,
):
    """Against NumPy: sgd(momentum, nesterov) as PyTorch has it, on the weights as they were when they were sent."""
    sync = streaming.config.parallel.sync
    state = streaming.init()
    momentum = [np.zeros(w.shape, np.float32) for w in streaming.layout.flat]
    sent: dict[int, list[np.ndarray]] = {}
    arrivals = 0
    for taken, batch in enumerate(batches(11), 1):
        # the step alone, and what is due after it by NumPy
        alone, metrics = streaming.steps.step_after(taken - 1)(
            copied(state), streaming.place(batch)
        )
        shared, own = (
            canonical(streaming, alone.params),
            canonical(streaming, alone.islands.params),
        )
        state, _ = streaming.steps.finish(alone, metrics, taken)
        if (fragment := when.arrives(sync, taken)) is not None:
            arrivals += 1
            mine = in_fragment(streaming, fragment)
            for i, (mean, inside) in enumerate(
                zip(sent.pop(fragment), mine, strict=True)
            ):
                momentum[i] = np.where(inside, 0.5 * momentum[i] + mean, momentum[i])
                moved = shared[i] - 0.7 * (mean + 0.5 * momentum[i])
                shared[i] = np.where(inside, moved, shared[i])
                own[i] = np.where(
                    inside, OWN_SHARE * own[i] + (1 - OWN_SHARE) * shared[i], own[i]
                )
        if (fragment := when.due(sync, taken)) is not None:
            sent[fragment] = [a - b.mean(0) for a, b in zip(shared, own, strict=True)]
        for got, wanted in (
            (canonical(streaming, state.params), shared),
            (canonical(streaming, state.islands.params), own),
            (canonical(streaming, state.islands.momentum), momentum),
        ):
            assert (
                max(
                    float(np.abs(x - y).max()) for x, y in zip(got, wanted, strict=True)
                )
                < 2e-6
            ), taken
    assert arrivals == 4


def broken(state, island: int):
    """A state one of whose islands has a weight and a moment that are not finite."""
    islands = state.islands._replace(params=spoiled(state.islands.params, island))
    return state._replace(islands=islands, optimizer=spoiled(state.optimizer, island))


@pytest.mark.thorough
def test_a_broken_island_is_left_out_of_the_mean_and_starts_again_from_the_shared_model(
    whole,
):
    state, _ = run(whole, whole.init(), 3)
    state, rows = run(whole, broken(state, 1), 1)
    assert np.isnan(rows[0]["loss"][1]) and np.isfinite(rows[0]["loss"][0])
    (batch,) = batches(1, 4)
    alone, metrics = whole.steps.step_after(4)(state, whole.place(batch))
    shared, own, momentum = (
        numbers(x) for x in (alone.params, alone.islands.params, alone.islands.momentum)
    )
    other = [x[0] for x in numbers(alone.optimizer)]
    state, metrics = whole.steps.finish(alone, metrics, 5)
    assert int(metrics["sync_islands"]) == 1
    for got, before, mine, m in zip(
        numbers(state.params), shared, own, momentum, strict=True
    ):
        moved = before - mine[0]
        assert np.allclose(
            got, before - 0.7 * (moved + 0.9 * (0.9 * m + moved)), atol=1e-6
        )
    for leaf, outer in zip(
        numbers(state.islands.params), numbers(state.params), strict=True
    ):
        assert np.array_equal(leaf[0], outer) and np.array_equal(leaf[1], outer)
    for leaf, kept in zip(numbers(state.optimizer), other, strict=True):
        assert np.array_equal(leaf[0], kept) and np.isfinite(leaf).all()
    _, rows = run(whole, state, 3)
    assert (
        np.isfinite([row["loss"] for row in rows]).all()
        and int(rows[2]["sync_islands"]) == 2
    )


@pytest.mark.thorough
def test_a_broken_island_is_mended_although_it_stepped_on_while_it_was_sent(streaming):
    state, _ = run(streaming, streaming.init(), 3)
    state, rows = run(streaming, broken(state, 0), 2)
    # by fragment, the first of which was sent; of what the island learned before it broke nothing is left
    assert np.asarray(state.islands.counted).tolist() == [[0.0, 0.0], [32.0, 96.0]]
    state, more = run(streaming, state, 2)
    assert [
        int(row["sync_islands"]) for row in rows + more if "sync_islands" in row
    ] == [1, 2]
    assert all(np.isfinite(x).all() for x in numbers(state))


@pytest.mark.thorough
def test_without_a_single_sound_island_nothing_moves_and_the_run_is_told(whole):
    state, _ = run(whole, whole.init(), 3)
    before = numbers(state.params)
    state, rows = run(whole, broken(broken(state, 0), 1), 2)
    assert int(rows[1]["sync_islands"]) == 0
    assert all(
        np.array_equal(x, y) for x, y in zip(before, numbers(state.params), strict=True)
    )
    watch = NumbersCheck(whole.config, 0)
    with pytest.raises(
        FloatingPointError, match="no island has weights that are finite after step 5"
    ):
        watch.after_metrics(
            {"step": 5, "loss": 1.0, "grad_norm": 1.0, "sync_islands": 0.0}, due=True
        )


@pytest.mark.thorough
def test_a_state_with_a_broken_island_is_sound_as_long_as_another_one_is(whole):
    state, _ = run(whole, whole.init(), 3)
    assert whole.is_finite(state)
    one = broken(copied(state), 0)
    assert whole.is_finite(one) and not whole.is_finite(broken(one, 1))
    assert not whole.is_finite(
        state._replace(params=jax.tree.map(lambda x: x * np.nan, state.params))
    )


@pytest.mark.thorough
def test_in_float16_an_overflow_in_one_island_touches_no_bit_of_the_others():
    built = program(
        FLAT,
        sync={"every": 5},
        precision={
            "compute": "float16",
            "loss_scale": 1024.0,
            "loss_scale_hysteresis": 1,
        },
    )
    state, _ = run(built, built.init(), 2)
    value = jax.device_put(
        np.array([1024.0, 2.0**33], np.float32), state.scale.value.sharding
    )
    overflowing = copied(state)._replace(scale=state.scale._replace(value=value))
    before = [x[1] for x in numbers((state.islands.params, state.optimizer))]
    good, _ = run(built, copied(state), 1)
    bad, (row,) = run(built, overflowing, 1)
    for x, y in zip(
        numbers((good.islands.params, good.optimizer)),
        numbers((bad.islands.params, bad.optimizer)),
        strict=True,
    ):
        assert np.array_equal(x[0], y[0])
    assert all(
        np.array_equal(x[1], y)
        for x, y in zip(
            numbers((bad.islands.params, bad.optimizer)), before, strict=True
        )
    )
    assert row["loss_scale"].tolist() == [1024.0, 2.0**32] and row[
        "skipped"
    ].tolist() == [0, 1]
    # of 4 rows of 8 tokens a step, of the skipped one nothing
    assert np.asarray(good.islands.counted).tolist() == [[96.0], [96.0]]
    assert np.asarray(bad.islands.counted).tolist() == [[96.0], [64.0]]


@pytest.mark.thorough
def test_what_is_frozen_is_not_copied_for_each_island():
    built = program(FLAT, sync={"every": 2}, lora={"rank": 2, "targets": ["q", "v"]})
    trained = [w for w in built.layout.flat if w.trained]
    assert 0 < len(trained) < len(built.layout.flat)
    assert len(jax.tree.leaves(built.state_shapes.islands.params)) == len(trained)
    state = built.init()
    frozen = [
        np.asarray(x)
        for w, x in zip(built.layout.flat, jax.tree.leaves(state.params), strict=True)
        if not w.trained
    ]
    state, rows = run(built, state, 2)
    after = [
        np.asarray(x)
        for w, x in zip(built.layout.flat, jax.tree.leaves(state.params), strict=True)
        if not w.trained
    ]
    assert same_bits(frozen, after) and rows[1]["sync_drift"] > 0


@pytest.mark.thorough
def test_dropout_takes_the_keys_of_plain_training():
    """Rows have the random numbers of their place in the whole batch: the first step of islands has plain training's
    losses.
    """
    ours, plain = (
        program(FLAT, sync={"every": 4}, model={"dropout": 0.3}),
        program(FLAT, model={"dropout": 0.3}),
    )
    (_, (a,)), (_, (b,)) = run(ours, ours.init(), 1), run(plain, plain.init(), 1)
    assert a["loss"].mean() == pytest.approx(b["loss"], abs=1e-6)
    assert abs(a["loss"][0] - a["loss"][1]) > 1e-4
