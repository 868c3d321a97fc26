"""Linear attention of a row that lies over context ranks is that of the whole row, with all gradients."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from meshtrain.config import load
from meshtrain.mesh import CONTEXT
from meshtrain.model.collectives import Collectives
from meshtrain.model.delta_rule import Documents, RuleInputs, delta_rule
from meshtrain.parallel import row_pieces
from meshtrain.parallel.context import column_order
from meshtrain.parallel.row_pieces import shifted, states_before
from meshtrain.step import Program

ROWS, HEADS, KEY, VALUE, CHUNK = 2, 2, 8, 4, 8


class OnContext(Collectives):
    def __init__(self, ranks: int, by_heads: bool) -> None:
        self.context = ranks
        self.order = column_order(2 * ranks, ranks, by_heads)

    def tails_before(self, tails):
        return shifted(tails, self.order, 1)

    def states_before(self, maps, reverse):
        return states_before(
            maps, len(self.order) - 1 - self.order if reverse else self.order
        )


def drawn(length: int) -> RuleInputs:
    draw = np.random.default_rng(0)
    q, k = draw.standard_normal((2, ROWS, length, 1, KEY)).astype(np.float32)
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = draw.standard_normal((ROWS, length, HEADS, VALUE), np.float32)
    log_decay = -np.exp(draw.standard_normal((ROWS, length, HEADS)) - 3).astype(
        np.float32
    )
    return RuleInputs(
        q, k, v, log_decay, draw.random((ROWS, length, HEADS)).astype(np.float32)
    )


def rule(collectives, inputs, segments, weights):
    """Returns the outputs and gradients of rows [B, T / N, ...]."""
    pieces = lambda x: x.reshape(ROWS * collectives.pieces, -1, *x.shape[2:])
    documents = None
    if segments is not None:
        ids = pieces(segments)
        documents = Documents(ids, collectives.tails_before(ids[:, -1:]))

    def of(inputs):
        cut = jax.tree.map(pieces, inputs)
        out = delta_rule(lambda x, documents: x, CHUNK, collectives, cut, documents)
        return out.reshape(ROWS, -1, HEADS, VALUE)

    out, vjp = jax.vjp(of, inputs)
    return out, vjp(weights)[0]


@pytest.mark.parametrize(
    ("ranks", "by_heads", "most_gathered", "packed", "length"),
    [
        (2, False, 8, True, 32),
        (4, False, 8, True, 88),
        (4, False, 2, True, 64),
        (8, False, 8, False, 64),
        (8, False, 4, True, 80),
        (4, True, 8, True, 64),
        (4, True, 2, False, 64),
    ],
)
def test_outputs_and_gradients_are_those_of_the_whole_row(
    monkeypatch, ranks, by_heads, most_gathered, packed, length
):
    monkeypatch.setattr(row_pieces, "MOST_GATHERED", most_gathered)
    draw = np.random.default_rng(1)
    inputs = drawn(length)
    weights = draw.standard_normal(inputs.v.shape).astype(np.float32)
    segments = None
    if packed:
        segments = 1 + np.cumsum(draw.random((ROWS, length)) < 0.1, axis=1).astype(
            np.int32
        )
        segments[1] = 1  # one document over all pieces
        segments[0, length // 2 :] += 1  # one that begins where a piece does
    want = jax.jit(partial(rule, Collectives()))(inputs, segments, weights)
    order = column_order(length, ranks, by_heads)
    mesh = Mesh(np.array(jax.devices()[:ranks]), (CONTEXT,))
    split = PartitionSpec(None, CONTEXT)
    run = jax.shard_map(
        partial(rule, OnContext(ranks, by_heads)),
        mesh=mesh,
        in_specs=split,
        out_specs=split,
    )
    cut = jax.tree.map(lambda x: x[:, order], (inputs, segments, weights))
    got = jax.tree.map(
        lambda x: np.asarray(x)[:, np.argsort(order)], jax.jit(run)(*cut)
    )
    for seen, right in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.abs(seen - right).max() < 1e-6 * np.abs(right).max()


@pytest.mark.thorough
def test_a_step_holds_as_much_less_as_there_are_ranks():
    model = {"layers": 2, "d_model": 16, "heads": 2, "d_ff": 16, "vocab_size": 16}
    linear = {
        "key_heads": 1,
        "value_heads": 2,
        "key_dim": KEY,
        "value_dim": VALUE,
        "chunk": CHUNK,
    }
    given = {
        "model": model | {"pattern": ["linear"], "linear": linear},
        "train": {"global_batch_size": 1, "sequence_length": 4096},
    }
    held = []
    for ranks in (1, 4):
        compiled = Program(load(given | {"mesh": {"context": ranks}})).lower().compile()
        held.append(compiled.memory_analysis().temp_size_in_bytes)
    assert held[1] == pytest.approx(held[0] / 4, rel=0.1)


@pytest.mark.parametrize("by_heads", [False, True])
@pytest.mark.parametrize("distance", [1, 3])
def test_shifted_is_the_piece_before(by_heads, distance):
    order = column_order(8, 4, by_heads)
    mesh = Mesh(np.array(jax.devices()[:4]), (CONTEXT,))
    split = PartitionSpec(CONTEXT)
    move = jax.shard_map(
        lambda x: shifted(x, order, distance),
        mesh=mesh,
        in_specs=split,
        out_specs=split,
    )
    got = jax.jit(move)(jnp.asarray(order + 1.0))
    assert got.tolist() == np.maximum(order + 1.0 - distance, 0).tolist()
