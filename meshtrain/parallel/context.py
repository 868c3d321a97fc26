"""Context parallelism: the tokens of a row over the axis `context`, and attention across them.

Zigzag: a row is cut into 2N chunks, and rank r holds chunk r (early) and chunk 2N-1-r (late). So all ranks do the same
work (Llama Team 2024, section 3.3.2). For N = 4 the queries of rank 1 read:

    chunks    0   1   2   3   4   5   6   7
    rank      0   1   2   3   3   2   1   0
    early         ◣                             ◣ causal: of itself
              ■                                 ■ all: in each step after it, from rank s
    late      ■   ■   ■   ■   ■   ■   ◣           late x early always; early x early if s < r, else late x late

So each step is two products of half by half, none of them masked, whose operands are picked by rank: no predicate, for
which a GPU's host would have to wait. Their outputs are merged by the logs of their sums. A block's backward takes the
output and the log of sums of the whole row, so its cotangents are simply added up (Dao et al. 2022; Liu et al. 2023).

    strategy     keys and values                                                     forward, bytes a device sends
    ring         go round, a step of compute behind each message                     2 B T G K b (N-1)/N
    all_gather   are gathered before the first step, and again for the backward      the same
    ulysses      tokens are swapped for heads before and after (Jacobs et al. 2023)   2 B T/N (H + G) K b (N-1)/N

With ulysses a device's tokens follow one another.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from meshtrain.config import Config
from meshtrain.mesh import CONTEXT
from meshtrain.model.attention import (
    Heads,
    MaskArrays,
    Outputs,
    Scoring,
    add_sinks,
    backward,
    forward,
    run_windowed,
    sink_gradients,
)
from meshtrain.model.collectives import Collectives
from meshtrain.model.dropout import Dropout
from meshtrain.model.kernels import MASKED, Kernel
from meshtrain.parallel.tensor import MeshCollectives

# dimensions of [B, T, H, K]
SEQUENCE = 1
HEADS = 2


def column_order(length: int, ranks: int, by_heads: bool) -> np.ndarray:
    """Returns the position of each place of a row, rank after rank: int [length]."""
    if by_heads:
        return np.arange(length)
    chunks = np.arange(length).reshape(2 * ranks, -1)
    return np.concatenate(
        [chunks[[rank, 2 * ranks - 1 - rank]].reshape(-1) for rank in range(ranks)]
    )


def positions(length: int, ranks: int, by_heads: bool) -> jax.Array:
    """Returns the positions of the `length` tokens of a row that this rank holds, inside shard_map."""
    rank = lax.axis_index(CONTEXT)
    if by_heads:
        return rank * length + jnp.arange(length)
    early, late = _firsts(rank, ranks, length // 2)
    return jnp.concatenate([first + jnp.arange(length // 2) for first in (early, late)])


def _firsts(rank: jax.Array, ranks: int, chunk: int) -> tuple[jax.Array, jax.Array]:
    """The first positions of the early and of the late chunk of a rank."""
    return rank * chunk, (2 * ranks - 1 - rank) * chunk


class ContextCollectives(MeshCollectives):
    """Collectives where the tokens of a row may lie over `context`."""

    def __init__(self, config: Config, platform: str) -> None:
        super().__init__(config, platform)
        strategy = config.parallel.context_strategy
        self.by_heads = strategy == "ulysses"
        self.rings = strategy == "ring"

    def first_position(self, length: int) -> jax.Array | int:
        first = super().first_position(length)
        if self.context == 1:
            return first
        positions = self.positions(length * self.ranks if self.sequence_parallel else length)
        return lax.dynamic_slice_in_dim(positions, first, length) - jnp.arange(length)

    def positions(self, length: int) -> jax.Array:
        if self.context == 1:
            return super().positions(length)
        return positions(length, self.context, self.by_heads)

    def attend_in_zigzag(
        self, kernel: Any, scoring: Any, heads: Heads, masks: Any, sinks: Any = None
    ) -> jax.Array:
        return zigzag_attention(kernel, scoring, self.rings, heads, masks, sinks)

    def attend_by_heads(
        self, attend: Any, heads: Heads, segments: Any, dropout: Any, sinks: Any = None
    ) -> jax.Array:
        return attend_by_heads(attend, heads, segments, self, dropout, sinks)


# --- zigzag


class _Chunk(NamedTuple):
    """A chunk of a row: arrays [B, T / 2N, ...], the ids of its documents, the position of its first token."""

    arrays: tuple[jax.Array, ...]
    segments: jax.Array | None
    first: jax.Array


class _Seen(NamedTuple):
    """The result of queries for the keys so far: the output, float32 [B, T / 2N, H, K], and the log of sums [B, H, T /
    2N].
    """

    out: jax.Array
    log_sum: jax.Array


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def zigzag_attention(
    kernel: Kernel,
    scoring: Scoring,
    rings: bool,
    heads: Heads,
    masks: MaskArrays,
    sinks: jax.Array | None,
) -> jax.Array:
    """Returns the causal attention of this rank's queries [B, T/N, H, K] to the keys and values [B, T/N, G, K] of all
    ranks: `[B*T/N, H*K]`.

    `rings`: keys and values go round; else they are gathered.
    """
    return _forward(kernel, scoring, rings, heads, masks, sinks)[0]


def _forward(
    kernel: Kernel,
    scoring: Scoring,
    rings: bool,
    heads: Heads,
    masks: MaskArrays,
    sinks: jax.Array | None,
) -> tuple[jax.Array, Any]:
    ranks, rank = lax.axis_size(CONTEXT), lax.axis_index(CONTEXT)
    q, k, v = heads

    def run(scoring: Scoring, queries: _Chunk, keys: _Chunk) -> _Seen:
        heads = Heads(*queries.arrays, *keys.arrays)
        out, log_sum = forward(kernel, scoring, heads, _masks(masks.words, queries, keys))
        return _Seen(out.astype(jnp.float32), log_sum)

    def attend(scoring: Scoring, sent: Any) -> tuple[jax.Array, jax.Array]:
        past, (early_q, late_q) = (
            scoring._replace(causal=False),
            _chunks(rank, ranks, masks.segments, q),
        )

        def step(number: jax.Array | int, seen: Any, here: Any) -> Any:
            source = (rank - number) % ranks
            early_kv, late_kv = _chunks(source, ranks, here[2], *here[:2])
            if seen is None:
                late = _merged(run(scoring, late_q, late_kv), run(past, late_q, early_kv))
                return run(scoring, early_q, early_kv), late
            (early, late) = seen
            is_earlier = source < rank
            late = _merged(late, run(past, late_q, early_kv))
            more = run(
                past, _pick(is_earlier, early_q, late_q), _pick(is_earlier, early_kv, late_kv)
            )
            nothing = more._replace(log_sum=jnp.full_like(more.log_sum, MASKED))
            return (
                _merged(early, _pick(is_earlier, more, nothing)),
                _merged(late, _pick(is_earlier, nothing, more)),
            )

        early, late = _go_round(step, sent) if rings else _go_through(step, sent)
        out = jnp.concatenate([early.out, late.out], axis=SEQUENCE).astype(q.dtype)
        return out, jnp.concatenate([early.log_sum, late.log_sum], axis=2)

    sent = (k, v, masks.segments)
    out, log_sum = run_windowed(scoring, masks.local, attend, sent if rings else _gathered(sent))
    out, log_sum = add_sinks(Outputs(out, log_sum), sinks)
    rows = out.reshape(q.shape[0] * q.shape[1], -1)
    rows, log_sum = (checkpoint_name(a, "attention") for a in (rows, log_sum))
    return rows, (heads, masks, sinks, rows, log_sum)


def _backward(
    kernel: Kernel, scoring: Scoring, rings: bool, residuals: Any, cotangent: jax.Array
) -> tuple[Heads, None, jax.Array | None]:
    (q, k, v), masks, sinks, rows, log_sum = residuals
    ranks, rank = lax.axis_size(CONTEXT), lax.axis_index(CONTEXT)
    of_rows = q, rows.reshape(q.shape), cotangent.reshape(q.shape), log_sum.transpose(0, 2, 1)

    def run(scoring: Scoring, queries: _Chunk, keys: _Chunk) -> tuple[jax.Array, ...]:
        """Cotangents of the queries, keys and values, float32."""
        (q, out, d_out, sums), (k, v) = queries.arrays, keys.arrays
        given = Heads(q, k, v), _masks(masks.words, queries, keys)
        d_qkv = backward(kernel, scoring, *given, Outputs(out, sums.transpose(0, 2, 1)), d_out)
        return tuple(x.astype(jnp.float32) for x in d_qkv)

    def cotangents(scoring: Scoring, sent: Any) -> tuple[jax.Array, Any]:
        past, (early_q, late_q) = (
            scoring._replace(causal=False),
            _chunks(rank, ranks, masks.segments, *of_rows),
        )

        def chunk_by_itself(d_q: Any, own: Any) -> tuple[Any, Any]:
            early_kv, late_kv = _chunks(rank, ranks, own[2], *own[:2])
            early, *of_early = run(scoring, early_q, early_kv)
            late, *of_late = run(scoring, late_q, late_kv)
            return _added(d_q, (early, late)), _joined(of_early, of_late)

        def step(number: jax.Array | int, d_q: Any, here: Any) -> tuple[Any, Any]:
            source = (rank - number) % ranks
            early_kv, late_kv = _chunks(source, ranks, here[2], *here[:2])
            late, *of_early = run(past, late_q, early_kv)
            if d_q is None:
                return (jnp.zeros_like(late), late), _joined(
                    of_early, jax.tree.map(jnp.zeros_like, of_early)
                )
            is_earlier = source < rank
            again, *more = run(
                past, _pick(is_earlier, early_q, late_q), _pick(is_earlier, early_kv, late_kv)
            )
            nothing = jnp.zeros_like(again)
            none = jax.tree.map(jnp.zeros_like, more)
            d_q = _added(
                d_q, (_pick(is_earlier, again, nothing), late + _pick(is_earlier, nothing, again))
            )
            return d_q, _joined(
                _added(of_early, _pick(is_earlier, more, none)), _pick(is_earlier, none, more)
            )

        go = _go_round_back if rings else _go_through_back
        d_q, d_kv = go(step, chunk_by_itself, sent)
        return jnp.concatenate(d_q, axis=SEQUENCE).astype(q.dtype), d_kv

    sent = (k, v, masks.segments)
    d_q, d_kv = run_windowed(scoring, masks.local, cotangents, sent if rings else _gathered(sent))
    if not rings:
        d_kv = jax.tree.map(lambda x: lax.psum_scatter(x, CONTEXT), d_kv)
    d_k, d_v = (x.astype(k.dtype) for x in d_kv)
    outputs = Outputs(rows.reshape(q.shape), log_sum)
    d_sinks = sink_gradients(sinks, outputs, cotangent.reshape(q.shape))
    return Heads(d_q, d_k, d_v), None, d_sinks


zigzag_attention.defvjp(_forward, _backward)


def _chunks(
    rank: jax.Array, ranks: int, segments: jax.Array | None, *arrays: jax.Array
) -> tuple[_Chunk, _Chunk]:
    """The early and the late chunk of what a rank holds."""
    half = arrays[0].shape[SEQUENCE] // 2
    cuts = [jnp.split(x, 2, axis=SEQUENCE) for x in arrays]
    ids = [None, None] if segments is None else jnp.split(segments, 2, axis=SEQUENCE)
    early, late = (
        _Chunk(tuple(cut[at] for cut in cuts), ids[at], first)
        for at, first in enumerate(_firsts(rank, ranks, half))
    )
    return early, late


def _masks(words: jax.Array | None, queries: _Chunk, keys: _Chunk) -> MaskArrays:
    return MaskArrays(queries.segments, words, None, keys.segments, (queries.first, keys.first))


def _pick(condition: jax.Array, one: Any, other: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), one, other)


def _merged(before: _Seen, more: _Seen) -> _Seen:
    log_sum = jnp.logaddexp(before.log_sum, more.log_sum)

    def part(seen: _Seen) -> jax.Array:
        return seen.out * jnp.exp(seen.log_sum - log_sum).transpose(0, 2, 1)[..., None]

    return _Seen(part(before) + part(more), log_sum)


def _added(one: Any, other: Any) -> Any:
    return jax.tree.map(jnp.add, tuple(one), tuple(other))


def _joined(early: Any, late: Any) -> Any:
    return tuple(jnp.concatenate(both, axis=SEQUENCE) for both in zip(early, late, strict=True))


# --- how keys and values come by. A step's number says how many ranks before this one they are from. Of its own keys a
# rank has two steps in the backward: the first, and behind all others the one in which queries and keys are of the same
# chunk. So the first message has a step to travel behind, and the last.

Step = Callable[[Any, Any, Any], Any]


def _gathered(sent: Any) -> Any:
    """Gathers the arrays of every rank, [N, B, T/N, ...]."""
    return jax.tree.map(lambda x: lax.all_gather(x, CONTEXT), sent)


def _pick_rank(number: Any, gathered: Any) -> Any:
    source = (lax.axis_index(CONTEXT) - number) % lax.axis_size(CONTEXT)
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, source, keepdims=False), gathered)


def _next(sent: Any) -> Any:
    ranks = lax.axis_size(CONTEXT)
    return jax.tree.map(
        lambda x: lax.ppermute(x, CONTEXT, [(i, (i + 1) % ranks) for i in range(ranks)]), sent
    )


def _go_through(step: Step, gathered: Any) -> Any:
    """Returns what the last `step(number, before, here)` does, of all that is gathered."""

    def turn(number: Any, seen: Any) -> Any:
        return step(number, seen, _pick_rank(number, gathered))

    return lax.fori_loop(1, lax.axis_size(CONTEXT), turn, turn(0, None))


def _go_round(step: Step, sent: Any) -> Any:
    """Passes the arrays on while a step computes.

    The barriers have XLA start a message before a step and wait for it behind; the loop has it hold two messages, where
    it would hold those of all steps.
    """
    ranks = lax.axis_size(CONTEXT)

    def turn(number: Any, seen: Any, here: Any) -> Any:
        return lax.optimization_barrier((step(number, seen, here), _next(here)))

    seen, here = lax.fori_loop(
        1, ranks - 1, lambda number, carry: turn(number, *carry), turn(0, None, sent)
    )
    return step(ranks - 1, seen, here)


def _go_through_back(step: Step, chunk_by_itself: Callable[[Any, Any], Any], gathered: Any) -> Any:
    """Returns the cotangents of queries, and those of keys and values of each rank [N, B, T/N, ...] as far as this rank
    has any.

    `step` and `chunk_by_itself` return both, the second of one rank.
    """
    ranks, rank = lax.axis_size(CONTEXT), lax.axis_index(CONTEXT)
    d_q, own = step(0, None, _pick_rank(0, gathered))
    d_q, more = chunk_by_itself(d_q, _pick_rank(0, gathered))
    d_kv = jax.tree.map(
        lambda x, y: jnp.zeros(x.shape, jnp.float32).at[rank].set(y),
        gathered[:2],
        _added(own, more),
    )

    def turn(number: Any, done: Any) -> Any:
        d_q, more = step(number, done[0], _pick_rank(number, gathered))
        return d_q, jax.tree.map(lambda x, y: x.at[(rank - number) % ranks].set(y), done[1], more)

    return lax.fori_loop(1, ranks, turn, (d_q, d_kv))


def _go_round_back(step: Step, chunk_by_itself: Callable[[Any, Any], Any], sent: Any) -> Any:
    """Returns the cotangents of queries, and those of this rank's keys and values, to which each rank that these went
    by has added.
    """
    ranks = lax.axis_size(CONTEXT)

    def turn(number: Any, d_q: Any, d_kv: Any, here: Any, is_last: bool = False) -> Any:
        passed_on = None if d_kv is None else _next(d_kv), None if is_last else _next(here)
        (d_q, more), (arrived, here) = lax.optimization_barrier(
            (step(number, d_q, here), passed_on)
        )
        return d_q, more if arrived is None else _added(arrived, more), here

    d_q, own, here = turn(0, None, None, sent)
    d_kv = None
    if ranks > 2:
        d_q, d_kv, here = turn(1, d_q, None, here)
        d_q, d_kv, here = lax.fori_loop(
            2, ranks - 1, lambda number, carry: turn(number, *carry), (d_q, d_kv, here)
        )
    d_q, d_kv, _ = turn(ranks - 1, d_q, d_kv, here, is_last=True)
    d_kv, sent = lax.optimization_barrier(
        (d_kv, sent)
    )  # so that `sent` is taken up again behind the others
    (d_q, last), home = lax.optimization_barrier((chunk_by_itself(d_q, sent), _next(d_kv)))
    return d_q, _added(_added(own, last), home)


# --- by heads


class _OfHeads(Collectives):
    """The collectives of attention while each rank has all tokens of some heads."""

    def __init__(self, collectives: Collectives, heads: int) -> None:
        self._outer = collectives
        self._heads = heads
        self.platform = collectives.platform

    def first_head(self, heads: int) -> jax.Array:
        return self._outer.first_head(self._heads) + lax.axis_index(CONTEXT) * heads


def attend_by_heads(
    attend: Callable[..., jax.Array],
    heads: Heads,
    segments: jax.Array | None,
    collectives: Collectives,
    dropout: Dropout,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Returns `attend` of all tokens and 1/N of the heads, which must divide by N, swapped for tokens before and back
    after it. Where N does not divide the groups, keys and values are repeated for as many as it does.
    """
    ranks = lax.axis_size(CONTEXT)
    q, k, v = heads
    repeats = ranks // math.gcd(ranks, k.shape[HEADS])
    outer = _OfHeads(collectives, q.shape[HEADS])
    k, v = (jnp.repeat(x, repeats, axis=HEADS) if repeats > 1 else x for x in (k, v))
    q, k, v = (lax.all_to_all(x, CONTEXT, HEADS, SEQUENCE, tiled=True) for x in (q, k, v))
    if segments is not None:
        segments = lax.all_gather(segments, CONTEXT, axis=SEQUENCE, tiled=True)
    if sinks is not None:
        sinks = lax.dynamic_slice_in_dim(
            sinks, lax.axis_index(CONTEXT) * q.shape[HEADS], q.shape[HEADS]
        )
    rows = attend(q, k, v, segments, outer, dropout, sinks=sinks)
    out = lax.all_to_all(rows.reshape(q.shape), CONTEXT, SEQUENCE, HEADS, tiled=True)
    return out.reshape(out.shape[0] * out.shape[1], -1)
