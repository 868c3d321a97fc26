"""The exchange of islands by itself, on weights that several ranks have whole."""

import jax
import numpy as np
import pytest
from covering import slow_but
from island_runs import copies_differ, largest_difference, numbers, program

from meshtrain.hlo import collectives
from meshtrain.mesh import ISLAND
from meshtrain.plan import gradient_traffic

ONE_HEAD = {"kv_heads": 1, "d_model": 24, "d_ff": 34, "layers": 2}
GPT2 = {"family": "gpt2", "layers": 2}
WHOLE_ON_SEVERAL = [
    ("int8", {"data": 3, "islands": 3, "tensor": 2}, ONE_HEAD, "blocks.attention.k"),
    ("int4", {"data": 2, "islands": 2, "tensor": 2}, ONE_HEAD, "blocks.attention.k"),
    ("float8", {"data": 2, "islands": 2, "pipeline": 2}, GPT2, "embedding.positions"),
    ("int8", {"data": 3, "islands": 3, "tensor": 2}, GPT2, "embedding.positions"),
]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "case",
    slow_but(WHOLE_ON_SEVERAL, [WHOLE_ON_SEVERAL[0], WHOLE_ON_SEVERAL[2]]),
    ids=str,
)
def test_copies_of_a_weight_stay_equal_whatever_shares_the_message(case):
    """What lies beside it differs from rank to rank, and must share no scale with it."""
    compression, mesh, model, name = case
    reduce = {
        "compression": compression,
        "over": "islands",
        "block": 64,
        "feedback": False,
    }
    built = program(
        mesh,
        model=model,
        parallel={"microbatches": 1, "reduce": reduce, "sync": {"every": 1}},
        train={"global_batch_size": 6},
    )
    assert any(w.name == name and w.replicated for w in built.layout.flat)
    random, state = np.random.default_rng(0), built.init()

    def apart(x):
        return jax.device_put(
            np.asarray(x) + 1e-2 * random.standard_normal(x.shape, np.float32),
            x.sharding,
        )

    counted = jax.device_put(
        np.arange(1, mesh["islands"] + 1, dtype=np.float32)[:, None],
        state.islands.counted.sharding,
    )
    own = jax.tree.map(apart, state.islands.params)
    before = [x.copy() for x in numbers(state.params)]
    exchange = built.steps.synchronize[0].lower(built.state_shapes).compile()
    state, _ = exchange(
        state._replace(islands=state.islands._replace(params=own, counted=counted))
    )
    assert largest_difference(before, state.params) > 1e-3
    assert copies_differ(state) == []
    sent = sum(
        c.sent
        for c in collectives(exchange, built.mesh, built.taken)
        if c.axes == (ISLAND,)
    )
    assert sent == pytest.approx(built.steps.outer.sent_bytes(0), rel=1e-6)
    assert sum(
        flow.sent for flow in gradient_traffic.sync_transfers(built.config)
    ) == pytest.approx(sent, rel=1e-6)
