"""Context parallelism: the tokens of a row over the axis `context`, and attention across them.

Zigzag: a row is cut into 2N chunks, and rank r holds chunk r (early) and chunk 2N-1-r (late). So all ranks do the same
work (Llama Team 2024, section 3.3.2). For N = 4 the queries of rank 1 read the chunks with ■, and of their own chunk
the lower half ◣:

    chunk             0   1   2   3   4   5   6   7
    on rank           0   1   2   3   3   2   1   0
    early query (1)   ■   ◣
    late query (6)    ■   ■   ■   ■   ■   ■   ◣

They take N steps; in step n the keys of rank s = r - n (mod N) are here. Step 0 has the rank's own keys:

    step    queries x keys                            masked
    0       early x early, late x late                causal
            late x early                              no
    1 ..    late x early                              no
            early x early if s < r, else late x late  no

The operands of the last line are selected by rank: a GPU's host would have to wait for a predicate. Outputs are merged
by the logs of their softmax denominators. A backward step takes the output and the log of the denominator over the
whole row, so its cotangents are simply added up (Dao et al. 2022; Liu et al. 2023).

    strategy     keys and values                                                     forward, bytes a device sends
    ring         go round, each message beside a step of compute                     2 B T G K b (N-1)/N
    all_gather   are gathered before the first step, and again for the backward      the same
    ulysses      tokens are swapped for heads before and after (Jacobs et al. 2023)   2 B T/N (H + G) K b (N-1)/N

(T tokens of a whole row, G groups of keys and values, H heads of K numbers, b bytes a number.) With ulysses a device's
tokens follow one another.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from meshtrain.compat import vary, varying
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
    output_shape,
    run_windowed,
    sink_gradients,
)
from meshtrain.model.collectives import Collectives
from meshtrain.model.dropout import Dropout
from meshtrain.model.kernels import MASKED, Kernel
from meshtrain.parallel.row_pieces import shifted, states_before
from meshtrain.parallel.tensor import MeshCollectives

# dimensions of [B, T, H, K]
SEQUENCE = 1
HEADS = 2


def column_order(length: int, ranks: int, by_heads: bool) -> np.ndarray:
    """Returns the positions of a row's tokens in the order in which the ranks hold them: int [length].

    Two ranks, 8 tokens in zigzag order: 0 1 6 7, then 2 3 4 5.
    """
    if by_heads:
        return np.arange(length)
    chunks = np.arange(length).reshape(2 * ranks, -1)
    early = np.arange(ranks)
    late = 2 * ranks - 1 - early
    return chunks[np.stack([early, late], axis=1)].reshape(-1)


def positions(length: int, ranks: int, by_heads: bool) -> Array:
    """Returns the positions of the `length` tokens of a row that this rank holds, inside shard_map."""
    rank = lax.axis_index(CONTEXT)
    if by_heads:
        return rank * length + jnp.arange(length)
    chunk = length // 2
    firsts = _first_positions(rank, ranks, chunk)
    return jnp.concatenate([first + jnp.arange(chunk) for first in firsts])


def _first_positions(rank: Array, ranks: int, chunk: int) -> tuple[Array, Array]:
    """Returns the first positions of a rank's early chunk and of its late one."""
    return rank * chunk, (2 * ranks - 1 - rank) * chunk


class ContextCollectives(MeshCollectives):
    """Collectives where the tokens of a row may lie over `context`."""

    def __init__(self, config: Config, platform: str) -> None:
        super().__init__(config, platform)
        strategy = config.parallel.context_strategy
        self.by_heads = strategy == "ulysses"
        self.rings = strategy == "ring"

    def first_position(self, length: int) -> Array | int:
        """Returns what must be added to 0, 1 .. length - 1 to give the tokens' positions; on several ranks that is an
        array [length], since a rank's two chunks begin at different ones.
        """
        first = super().first_position(length)
        if self.context == 1:
            return first
        # Sequence parallelism cuts what is on a context rank once more.
        shards = self.ranks if self.sequence_parallel else 1
        positions = self.positions(length * shards)
        return lax.dynamic_slice_in_dim(positions, first, length) - jnp.arange(length)

    def positions(self, length: int) -> Array:
        if self.context == 1:
            return super().positions(length)
        return positions(length, self.context, self.by_heads)

    def column_order(self, length: int) -> np.ndarray:
        return column_order(length, self.context, self.by_heads)

    def gather_row(self, latents: Any) -> Any:
        if self.context == 1 or self.rings or self.by_heads:
            return latents
        return _gathered(latents)

    def attend_in_zigzag(
        self,
        kernel: Any,
        scoring: Any,
        heads: Heads,
        masks: Any,
        sinks: Any = None,
    ) -> tuple[Array, Array | None]:
        return zigzag_attention(kernel, scoring, self.rings, heads, masks, sinks)

    def attend_by_heads(
        self,
        attend: Any,
        heads: Heads,
        of_tokens: Any,
        dropout: Any,
        sinks: Any = None,
    ) -> Any:
        return attend_by_heads(attend, heads, of_tokens, self, dropout, sinks)

    def tails_before(self, tails: Any) -> Any:
        if self.context == 1:
            return super().tails_before(tails)
        return shifted(tails, self.column_order(2 * self.context), 1)

    def states_before(self, maps: Array, reverse: bool) -> Array:
        order = self.column_order(2 * self.context)
        return states_before(maps, len(order) - 1 - order if reverse else order)


# --- zigzag


class _Chunk(NamedTuple):
    """A chunk of a row: arrays [B, T/2N, ...], the documents' ids, the position of the first token."""

    arrays: tuple[Array, ...]
    segments: Array | None
    first: Array


class _Seen(NamedTuple):
    """The attention of a chunk's queries to the keys seen so far."""

    out: Array  # float32 [B, T/2N, H, K]
    log_sum: Array  # [B, H, T/2N], log of the softmax denominators
    top: Array | None = None  # the same, the largest scores


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def zigzag_attention(
    kernel: Kernel,
    scoring: Scoring,
    rings: bool,
    heads: Heads,
    masks: MaskArrays,
    sinks: Array | None,
) -> tuple[Array, Array | None]:
    """Returns the causal attention of this rank's queries [B, T/N, H, K] to the keys and values [B, T/N, G, K] of all
    ranks: `[B*T/N, H*K]`. The largest scores [B, H, T/N] come with it where asked for.

    `rings`: keys and values go round; else they are gathered.
    """
    return _forward(kernel, scoring, rings, heads, masks, sinks)[0]


def _forward(
    kernel: Kernel,
    scoring: Scoring,
    rings: bool,
    heads: Heads,
    masks: MaskArrays,
    sinks: Array | None,
) -> tuple[Any, Any]:
    ranks = lax.axis_size(CONTEXT)
    rank = lax.axis_index(CONTEXT)
    q, k, v = heads

    def run(scoring: Scoring, queries: _Chunk, keys: _Chunk) -> _Seen:
        heads = Heads(*queries.arrays, *keys.arrays)
        seen = forward(kernel, scoring, heads, _masks(masks.words, queries, keys))
        return _Seen(seen.out.astype(jnp.float32), *seen[1:])

    def attend(scoring: Scoring, sent: Any) -> Outputs:
        past = scoring._replace(causal=False)
        early_q, late_q = _chunks(rank, ranks, masks.segments, q)

        def step(number: Array | int, seen: Any, here: Any) -> Any:
            k, v, segments = here
            source = (rank - number) % ranks
            early_kv, late_kv = _chunks(source, ranks, segments, k, v)
            # This rank's own keys come first: each chunk sees itself causally, and the late one all of the early one.
            if seen is None:
                early = run(scoring, early_q, early_kv)
                late = run(scoring, late_q, late_kv)
                return early, _merged(late, run(past, late_q, early_kv))
            early, late = seen
            # Every early chunk lies before every late one. Of the other two pairs one lies in the past: which one,
            # the ranks tell, so that all ranks compute as much.
            late = _merged(late, run(past, late_q, early_kv))
            is_earlier = source < rank
            queries = _pick(is_earlier, early_q, late_q)
            keys = _pick(is_earlier, early_kv, late_kv)
            more = run(past, queries, keys)
            # The chunk that it is not of sees nothing more.
            hidden = jax.tree.map(lambda x: jnp.full_like(x, MASKED), more[1:])
            nothing = _Seen(more.out, *hidden)
            early = _merged(early, _pick(is_earlier, more, nothing))
            late = _merged(late, _pick(is_earlier, nothing, more))
            return early, late

        early, late = _run_ring(step, sent) if rings else _run_gathered(step, sent)
        out = jnp.concatenate([early.out, late.out], axis=SEQUENCE)
        join = lambda *x: jnp.concatenate(x, axis=2)
        return Outputs(out.astype(q.dtype), *jax.tree.map(join, early[1:], late[1:]))

    sent = (k, v, masks.segments) if rings else _gathered_heads(k, v, masks.segments)
    attended = run_windowed(scoring, masks.local, attend, sent)
    out, log_sum, top = add_sinks(attended, sinks)
    rows = out.reshape(q.shape[0] * q.shape[1], -1)
    rows, log_sum = (checkpoint_name(a, "attention") for a in (rows, log_sum))
    return (rows, top), (heads, masks, sinks, rows, log_sum)


def _backward(
    kernel: Kernel,
    scoring: Scoring,
    rings: bool,
    residuals: Any,
    given: tuple[Array, Any],
) -> tuple[Heads, None, Array | None]:
    cotangent, _ = given
    (q, k, v), masks, sinks, rows, log_sum = residuals
    ranks = lax.axis_size(CONTEXT)
    rank = lax.axis_index(CONTEXT)
    shape = output_shape(q, v)
    out = rows.reshape(shape)
    d_out = cotangent.reshape(shape)
    queries = q, out, d_out, log_sum.transpose(0, 2, 1)

    def run(scoring: Scoring, queries: _Chunk, keys: _Chunk) -> tuple[Array, ...]:
        """Returns the cotangents of the queries, keys and values, float32."""
        q, out, d_out, log_sum = queries.arrays
        outputs = Outputs(out, log_sum.transpose(0, 2, 1))
        heads = Heads(q, *keys.arrays)
        chunk_masks = _masks(masks.words, queries, keys)
        d_heads = backward(kernel, scoring, heads, chunk_masks, outputs, d_out)
        return tuple(x.astype(jnp.float32) for x in d_heads)

    def cotangents(scoring: Scoring, sent: Any) -> tuple[Array, Any]:
        past = scoring._replace(causal=False)
        early_q, late_q = _chunks(rank, ranks, masks.segments, *queries)

        # This rank's chunks with themselves, which are causal; `step` has all other pairs, as in the forward.
        def causal_step(d_q: Any, own: Any) -> tuple[Any, Any]:
            k, v, segments = own
            early_kv, late_kv = _chunks(rank, ranks, segments, k, v)
            d_early_q, *d_early_kv = run(scoring, early_q, early_kv)
            d_late_q, *d_late_kv = run(scoring, late_q, late_kv)
            return _added(d_q, (d_early_q, d_late_q)), _joined(d_early_kv, d_late_kv)

        def step(number: Array | int, d_q: Any, here: Any) -> tuple[Any, Any]:
            k, v, segments = here
            source = (rank - number) % ranks
            early_kv, late_kv = _chunks(source, ranks, segments, k, v)
            d_late_q, *d_early_kv = run(past, late_q, early_kv)
            # the first step, which has this rank's keys: `causal_step` computes the other pairs
            if d_q is None:
                d_late_kv = jax.tree.map(jnp.zeros_like, d_early_kv)
                d_q = (jnp.zeros_like(d_late_q), d_late_q)
                return d_q, _joined(d_early_kv, d_late_kv)
            is_earlier = source < rank
            picked_q = _pick(is_earlier, early_q, late_q)
            picked_kv = _pick(is_earlier, early_kv, late_kv)
            more_q, *more_kv = run(past, picked_q, picked_kv)
            no_q = jnp.zeros_like(more_q)
            no_kv = jax.tree.map(jnp.zeros_like, more_kv)
            d_early_q = _pick(is_earlier, more_q, no_q)
            d_late_q = d_late_q + _pick(is_earlier, no_q, more_q)
            d_early_kv = _added(d_early_kv, _pick(is_earlier, more_kv, no_kv))
            d_late_kv = _pick(is_earlier, no_kv, more_kv)
            return _added(d_q, (d_early_q, d_late_q)), _joined(d_early_kv, d_late_kv)

        go = _run_ring_backward if rings else _run_gathered_backward
        d_q, d_kv = go(step, causal_step, sent)
        return jnp.concatenate(d_q, axis=SEQUENCE).astype(q.dtype), d_kv

    sent = (k, v, masks.segments) if rings else _gathered_heads(k, v, masks.segments)
    d_q, d_kv = run_windowed(scoring, masks.local, cotangents, sent)
    if not rings and k.ndim == 4:
        d_kv = jax.tree.map(lambda x: lax.psum_scatter(x, CONTEXT), d_kv)
    d_k, d_v = (x.astype(k.dtype) for x in d_kv)
    d_sinks = sink_gradients(sinks, Outputs(out, log_sum), d_out)
    return Heads(d_q, d_k, d_v), None, d_sinks


zigzag_attention.defvjp(_forward, _backward)


def _chunks(
    rank: Array, ranks: int, segments: Array | None, *arrays: Array
) -> tuple[_Chunk, _Chunk]:
    """Returns the early and the late chunk of a rank's arrays [B, T/N, ...]."""
    half = arrays[0].shape[SEQUENCE] // 2
    cuts = [jnp.split(x, 2, axis=SEQUENCE) for x in arrays]
    ids = [None, None] if segments is None else jnp.split(segments, 2, axis=SEQUENCE)
    early, late = (
        _Chunk(tuple(cut[at] for cut in cuts), ids[at], first)
        for at, first in enumerate(_first_positions(rank, ranks, half))
    )
    return early, late


def _masks(words: Array | None, queries: _Chunk, keys: _Chunk) -> MaskArrays:
    first = (queries.first, keys.first)
    return MaskArrays(queries.segments, words, None, keys.segments, first)


def _pick(condition: Array, one: Any, other: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), one, other)


def _merged(before: _Seen, more: _Seen) -> _Seen:
    """Returns the attention to the keys of both."""
    log_sum = jnp.logaddexp(before.log_sum, more.log_sum)

    def part(seen: _Seen) -> Array:
        share = jnp.exp(seen.log_sum - log_sum)
        return seen.out * share.transpose(0, 2, 1)[..., None]

    top = jax.tree.map(jnp.maximum, before.top, more.top)
    return _Seen(part(before) + part(more), log_sum, top)


def _added(one: Any, other: Any) -> Any:
    return jax.tree.map(jnp.add, tuple(one), tuple(other))


def _joined(early: Any, late: Any) -> Any:
    """Returns arrays of a rank from those of its two chunks."""
    pairs = zip(early, late, strict=True)
    return tuple(jnp.concatenate(pair, axis=SEQUENCE) for pair in pairs)


# --- the order of the steps, in which step n has the keys and values of the n-th rank before this one
#
#    forward     step 0   step 1   ...   step N-1
#    backward    step 0   step 1   ...   step N-1   causal step
#
# The causal step of a backward has queries and keys of the same chunk. It comes last, so that in a ring the last
# message has a step to travel beside, as the first one has step 0.

# (number, result so far, arrays that are here) -> result
Step = Callable[[Any, Any, Any], Any]


def _gathered(sent: Any) -> Any:
    """Returns the arrays of every rank, [N, B, T/N, ...]."""
    return jax.tree.map(lambda x: lax.all_gather(x, CONTEXT), sent)


def _gathered_heads(k: Array, v: Array, segments: Array | None) -> Any:
    """Returns those of keys and values, which latent attention has made of gathered latents, and documents' ids."""
    if k.ndim > 4:
        return k, v, _gathered(segments)
    return _gathered((k, v, segments))


def _arrays_here(number: Any, gathered: Any) -> Any:
    """Returns the arrays that are here in a step."""
    source = (lax.axis_index(CONTEXT) - number) % lax.axis_size(CONTEXT)
    take = lambda x: lax.dynamic_index_in_dim(x, source, keepdims=False)
    return jax.tree.map(take, gathered)


def _pass_on(sent: Any) -> Any:
    """Sends arrays to the next rank; returns those of the rank before."""
    ranks = lax.axis_size(CONTEXT)
    ring = [(i, (i + 1) % ranks) for i in range(ranks)]
    return jax.tree.map(lambda x: lax.ppermute(x, CONTEXT, ring), sent)


def _run_gathered(step: Step, gathered: Any) -> Any:
    """Returns the result of the last step, from arrays of all ranks."""

    def turn(number: Any, seen: Any) -> Any:
        return step(number, seen, _arrays_here(number, gathered))

    return lax.fori_loop(1, lax.axis_size(CONTEXT), turn, turn(0, None))


def _run_ring(step: Step, sent: Any) -> Any:
    """Returns the result of the last step; arrays are passed on while a step computes.

    The barriers have XLA start a message before a step and wait for it behind the step. The loop has it hold two
    messages, not those of all steps.
    """
    ranks = lax.axis_size(CONTEXT)

    def turn(number: Any, seen: Any, here: Any) -> Any:
        return lax.optimization_barrier((step(number, seen, here), _pass_on(here)))

    first = turn(0, None, sent)
    next_turn = lambda number, carry: turn(number, *carry)
    seen, here = lax.fori_loop(1, ranks - 1, next_turn, first)
    return step(ranks - 1, seen, here)


def _run_gathered_backward(
    step: Step, causal_step: Callable[[Any, Any], Any], gathered: Any
) -> Any:
    """Returns the cotangents of queries, and this rank's part in those of the keys and values of each rank,
    [N, B, T/N, ...].

    `step` and `causal_step` return both for the keys and values of one rank.
    """
    ranks = lax.axis_size(CONTEXT)
    rank = lax.axis_index(CONTEXT)
    own = _arrays_here(0, gathered)
    d_q, d_own = step(0, None, own)
    d_q, more = causal_step(d_q, own)
    d_kv = jax.tree.map(
        lambda x, d: jnp.zeros(x.shape, jnp.float32).at[rank].set(d),
        gathered[:2],
        _added(d_own, more),
    )

    def turn(number: Any, carry: Any) -> Any:
        d_q, d_kv = carry
        source = (rank - number) % ranks
        d_q, more = step(number, d_q, _arrays_here(number, gathered))
        return d_q, jax.tree.map(lambda x, d: x.at[source].set(d), d_kv, more)

    return lax.fori_loop(1, ranks, turn, (d_q, d_kv))


def _run_ring_backward(
    step: Step, causal_step: Callable[[Any, Any], Any], sent: Any
) -> Any:
    """Returns the cotangents of queries, and those of this rank's keys and values.

    From step 1 on the cotangents of keys travel with the keys, a step behind them, and each rank adds its part. For
    N = 3 those of rank 0's keys:

        rank      0          1          2          0
        in step   0          1          2          causal
        keys      ──────►    ──────►
        d_kv                 ──────────►──────────► home, + those of step 0 and of the causal step, which stayed here
    """
    ranks = lax.axis_size(CONTEXT)

    def turn(number: Any, d_q: Any, d_kv: Any, here: Any, is_last: bool = False) -> Any:
        arriving = None if d_kv is None else _pass_on(d_kv)
        following = None if is_last else _pass_on(here)
        (d_q, d_here), (arriving, following) = lax.optimization_barrier(
            (step(number, d_q, here), (arriving, following))
        )
        d_kv = d_here if arriving is None else _added(arriving, d_here)
        return d_q, d_kv, following

    d_q, d_own, here = turn(0, None, None, sent)
    d_kv = None
    if ranks > 2:
        carry = turn(1, d_q, None, here)
        next_turn = lambda number, carry: turn(number, *carry)
        d_q, d_kv, here = lax.fori_loop(2, ranks - 1, next_turn, carry)
    d_q, d_kv, _ = turn(ranks - 1, d_q, d_kv, here, is_last=True)
    # The barrier keeps the causal step behind the others.
    d_kv, sent = lax.optimization_barrier((d_kv, sent))
    last = causal_step(d_q, sent), _pass_on(d_kv)
    (d_q, more), home = lax.optimization_barrier(last)
    return d_q, _added(_added(d_own, more), home)


# --- by heads


class _OfHeads(Collectives):
    """The collectives of attention while each context rank has all tokens of some of its tensor rank's heads."""

    def __init__(self, collectives: Collectives, heads: int) -> None:
        self._outer = collectives
        self._heads = heads  # of the tensor rank
        self.platform = collectives.platform

    def first_head(self, heads: int) -> Array:
        return self._outer.first_head(self._heads) + lax.axis_index(CONTEXT) * heads


def attend_by_heads(
    attend: Callable[..., Array],
    heads: Heads,
    of_tokens: tuple[Array | None, Array | None],
    collectives: Collectives,
    dropout: Dropout,
    sinks: Array | None = None,
) -> Any:
    """Returns the result of `attend`, called with all T tokens of H/N heads, for the T/N tokens of H heads that are
    here; N divides H. `of_tokens`: their segments, and which are counted.

    If N does not divide the G groups of keys and values, each group is repeated: on 4 ranks, 2 groups 2 times each.
    """
    ranks = lax.axis_size(CONTEXT)
    q, k, v = heads
    repeats = ranks // math.gcd(ranks, k.shape[HEADS])
    outer = _OfHeads(collectives, q.shape[HEADS])
    if repeats > 1:
        k, v = (jnp.repeat(x, repeats, axis=HEADS) for x in (k, v))
    swap = lambda x: lax.all_to_all(x, CONTEXT, HEADS, SEQUENCE, tiled=True)
    q, k, v = swap(q), swap(k), swap(v)
    gather = lambda x: lax.all_gather(x, CONTEXT, axis=SEQUENCE, tiled=True)
    segments, counted = jax.tree.map(gather, of_tokens)
    own = q.shape[HEADS]
    if sinks is not None:
        sinks = lax.dynamic_slice_in_dim(sinks, lax.axis_index(CONTEXT) * own, own)
    attended = attend(q, k, v, segments, outer, dropout, sinks=sinks, counted=counted)
    rows, *largest = (attended,) if counted is None else attended
    out = rows.reshape(output_shape(q, v))
    out = lax.all_to_all(out, CONTEXT, SEQUENCE, HEADS, tiled=True)
    rows = out.reshape(out.shape[0] * out.shape[1], -1)
    return (rows, _among_others(*largest)) if largest else rows


def _among_others(largest: Array) -> Array:
    """Returns the largest scores of a rank's heads among those of the tensor rank, MASKED where they are others'."""
    own = len(largest)
    others = vary(jnp.full(own * lax.axis_size(CONTEXT), MASKED), varying(largest))
    first = lax.axis_index(CONTEXT) * own
    return lax.dynamic_update_slice_in_dim(others, largest, first, 0)
