"""Attention: a kernel of the accelerator where there is one for the case, elsewhere blocks that never touch the masked
half.

Causal, or both ways where the family has it so. `model.kernels` tells which. All of them keep one copy of their output,
as the rows that the output projection keeps too, and the log of each query's sum; under remat both go by the name
`attention`, so that whoever keeps them runs no forward again.
"""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from meshtrain.compat import vary, varying
from meshtrain.config import ModelConfig
from meshtrain.families import FAMILIES
from meshtrain.model.collectives import Collectives
from meshtrain.model.dropout import NO_DROPOUT, Dropout, drop
from meshtrain.model.kernels import (
    MASKED,
    WIDTHS_APART,
    Kernel,
    attention_kernel,
    block_size,
)


class Heads(NamedTuple):
    """Queries [B, T, H, K], and the keys [B, T, G, K] and values [B, T, G, V] that they attend to.

    Values are as wide as keys, but for latent attention's (`model.latent`).
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array


class Outputs(NamedTuple):
    """The outputs of attention for each query, the logs of its softmax denominators and, where asked for, its largest
    scores, float32.
    """

    out: jax.Array  # [B, T, H, V]
    log_sum: jax.Array  # [B, H, T]
    top: jax.Array | None = None  # [B, H, T]


class Residuals(NamedTuple):
    """Residuals for the backward, in the shapes of blocks.

    A kernel keeps q, k, v in the shapes of its arguments, and log_sum as [B, H, T].
    """

    q: jax.Array  # [B, G, R, T, K] queries (scaled) for R heads a group
    k: jax.Array  # [B, G, T, K]
    v: jax.Array
    out: jax.Array  # [B*T, H*V]
    log_sum: jax.Array  # [B, G, R, T] log of each query's softmax denominator, float32


class Scoring(NamedTuple):
    """The rules by which scores become weights, known while the program is made."""

    rate: float  # of the dropout
    window: int  # positions that a query sees, its own and those before it; 0: all
    scale: float  # of the scores
    cap: float  # that the scores then stay within; 0: none
    causal: bool  # no query sees a later key; else all see all, and there is no window
    tops: bool = False  # each query's largest score is wanted too


class MaskArrays(NamedTuple):
    """Arrays without a gradient, which hide or drop scores."""

    segments: jax.Array | None
    words: jax.Array | None  # of the dropout, see `dropout.keep_mask`
    local: jax.Array | None  # whether the window counts; None: it does
    # Of keys that are not those of the queries, but lie before all of them (`causal` is False then): see
    # `parallel.context`.
    key_segments: jax.Array | None = None
    # positions of the first query and of the first key; None: both 0
    first: tuple[jax.Array, jax.Array] | None = None

    @property
    def of_keys(self) -> jax.Array | None:
        """The segments of the keys."""
        if self.key_segments is None:
            return self.segments
        return self.key_segments


# what the forward of a kernel keeps for its backward
Saved = tuple[Residuals, MaskArrays, jax.Array | None]


class AttentionKernel(Protocol):
    """A module of an accelerator's kernel: its two passes, called one by one."""

    # (scoring, heads, masks) -> the output [B, T, H, K] and float32 log of sums [B, H, T]; with `tops` largest scores
    forward: Callable[..., tuple[jax.Array, ...]]
    # (scoring, heads, masks, outputs, cotangent) -> the cotangents of q, k and v
    backward: Callable[..., tuple[jax.Array, ...]]


def attention_arguments(config: ModelConfig) -> dict[str, Any]:
    """Returns the arguments of `attend` that follow from a resolved config's model."""
    causal = FAMILIES[config.family].causal
    return {
        "window": config.window,
        "scale": config.query_scalar**-0.5,
        "cap": config.score_cap,
        "causal": causal,
    }


def attend(
    q_BTHK: jax.Array,
    k_BTGK: jax.Array,
    v_BTGK: jax.Array,
    segments_BT: jax.Array | None,
    collectives: Collectives,
    dropout: Dropout = NO_DROPOUT,
    *,
    window: int = 0,
    scale: float | None = None,
    cap: float = 0.0,
    causal: bool = True,
    local: jax.Array | None = None,
    sinks: jax.Array | None = None,
    counted: jax.Array | None = None,
) -> Any:
    """Softmax(scale q kᵀ) v per head, causal or both ways, within segments.

    Heads H are a multiple of groups G (grouped-query attention).

    With a `window` a query sees no more than so many positions: its own and those before it (Beltagy et al. 2020), in
    all layers or where `local`, a boolean on the device, is true. `scale` is 1 / √K unless given; with a `cap` scores
    stay `within` it. `sinks` [H] are scores of no key, one more in each head's softmax (Xiao et al. 2024; OpenAI 2025).
    Returns `[B*T, H*V]` in q's dtype, the rows of the output projection; the softmax is in float32. With `counted`, a
    boolean for each token [B, T], also the largest score of each head [H] at the queries where it is true.
    """
    _, length, heads, width = q_BTHK.shape
    given = Heads(q_BTHK, k_BTGK, v_BTGK)
    if collectives.context > 1 and collectives.by_heads:
        attend_heads = partial(
            attend, window=window, scale=scale, cap=cap, causal=causal, local=local
        )
        of_tokens = segments_BT, counted
        return collectives.attend_by_heads(
            attend_heads, given, of_tokens, dropout, sinks
        )
    drops = dropout.rate > 0
    words = None
    if drops:
        words = dropout.words(collectives.first_head(heads), heads)
    if window >= length * collectives.context:
        window = 0
    if window and not causal:
        raise ValueError(
            "a window reaches back from a query, which attention both ways has no use for"
        )
    if scale is None:
        scale = width**-0.5
    scoring = Scoring(dropout.rate, window, scale, cap, causal, counted is not None)
    masks = MaskArrays(segments_BT, words, local if window else None)
    kernel = attention_kernel(
        collectives.platform,
        q_BTHK.dtype.name,
        max(width, v_BTGK.shape[-1]),
        length,
        packed=segments_BT is not None,
        dropout=drops,
        capped=cap > 0,
        in_pieces=collectives.context > 1,
        window=window > 0,
        tops=scoring.tops,
    )
    if sinks is not None:
        sinks = vary(sinks, varying(q_BTHK))
    if kernel == "blocks" and collectives.context == 1:
        rows, top_BHT = blockwise(scoring, given, masks, sinks)
    else:
        varied = vary(masks._replace(local=None), varying(q_BTHK))
        shared = varied._replace(local=masks.local)
        run: Callable[..., tuple[jax.Array, jax.Array | None]] = run_kernel
        if collectives.context > 1:
            run = collectives.attend_in_zigzag
        rows, top_BHT = run(kernel, scoring, given, shared, sinks)
    if counted is None or top_BHT is None:
        return rows
    largest = jnp.where(counted[:, None], top_BHT, MASKED).max((0, 2))
    return rows, checkpoint_name(largest, "attention")


def add_sinks(outputs: Outputs, sinks_H: jax.Array | None) -> Outputs:
    """Returns the outputs with one more score, whose value is zero, in each head's softmax.

    No kernel knows of it: what they make of the backward follows from the output and the log of all that the queries
    see.
    """
    if sinks_H is None:
        return outputs
    out_BTHK, log_sum_BHT, top_BHT = outputs
    total = jnp.logaddexp(log_sum_BHT, sinks_H.astype(jnp.float32)[:, None])
    share = jnp.exp(log_sum_BHT - total).transpose(0, 2, 1)[..., None]
    return Outputs((out_BTHK * share).astype(out_BTHK.dtype), total, top_BHT)


def sink_gradients(
    sinks_H: jax.Array | None, outputs: Outputs, cotangent_BTHK: jax.Array
) -> jax.Array | None:
    """Returns the cotangent of sinks from the result of `add_sinks` and its output's cotangent."""
    if sinks_H is None:
        return None
    p_BHT = jnp.exp(sinks_H.astype(jnp.float32)[:, None] - outputs.log_sum)
    products = (outputs.out * cotangent_BTHK).astype(jnp.float32)
    rows_BTH = jnp.sum(products, axis=-1)
    gradient_H = -jnp.einsum("bht,bth->h", p_BHT, rows_BTH, precision="highest")
    return vary(gradient_H.astype(sinks_H.dtype), varying(sinks_H))


def within(cap: float, x: jax.Array) -> jax.Array:
    """Keeps x within -cap .. cap, smoothly (soft-capping: Bello et al. 2016; Gemma Team 2024, section 2)."""
    return cap * jnp.tanh(x / cap)


# With what it gives kept for the backward, and nothing else. Pallas lowers none for Triton, so kernels take `within`
# itself.
capped = jax.custom_vjp(within, nondiff_argnums=(0,))
capped.defvjp(
    lambda cap, x: (within(cap, x),) * 2,
    lambda cap, y, g: (g * cap_slope(cap, y),),
)


def cap_slope(cap: float, y: jax.Array) -> jax.Array:
    """Returns the slope of `within` where it gives y; 0 where y is masked."""
    return 1 - (jnp.maximum(y, -cap) / cap) ** 2


def run_windowed(
    scoring: Scoring, local: jax.Array | None, run: Callable[..., Any], *args: Any
) -> Any:
    """Returns `run(scoring, *args)`, without the window where `local` is false on the device."""
    if local is None:
        return run(scoring, *args)
    run_local = partial(run, scoring)
    run_global = partial(run, scoring._replace(window=0))
    return jax.lax.cond(local, run_local, run_global, *args)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def run_kernel(
    kernel: Kernel,
    scoring: Scoring,
    heads: Heads,
    masks: MaskArrays,
    sinks: jax.Array | None,
) -> tuple[jax.Array, jax.Array | None]:
    """Attention by one of an accelerator's kernels: its rows, and the largest scores [B, H, T] where asked for."""
    return _kernel_forward(kernel, scoring, heads, masks, sinks)[0]


def _kernel_forward(
    kernel: Kernel,
    scoring: Scoring,
    heads: Heads,
    masks: MaskArrays,
    sinks: jax.Array | None,
) -> tuple[Any, Saved]:
    outputs = run_windowed(scoring, masks.local, partial(forward, kernel), heads, masks)
    out, log_sum, top = add_sinks(outputs, sinks)
    rows = out.reshape(out.shape[0] * out.shape[1], -1)
    rows, log_sum = (checkpoint_name(a, "attention") for a in (rows, log_sum))
    return (rows, top), (Residuals(*heads, rows, log_sum), masks, sinks)


def _kernel_backward(
    kernel: Kernel,
    scoring: Scoring,
    residuals: Saved,
    cotangents: tuple[jax.Array, Any],
) -> tuple[Heads, None, jax.Array | None]:
    (q, k, v, rows, log_sum), masks, sinks = residuals
    shape = output_shape(q, v)
    given = Outputs(rows.reshape(shape), log_sum), cotangents[0].reshape(shape)
    run = partial(backward, kernel)
    d_heads = run_windowed(scoring, masks.local, run, Heads(q, k, v), masks, *given)
    return Heads(*d_heads), None, sink_gradients(sinks, *given)


run_kernel.defvjp(_kernel_forward, _kernel_backward)


def output_shape(q: jax.Array, v: jax.Array) -> tuple[int, ...]:
    """Returns the shape of the output, [B, T, H, V]."""
    return (*q.shape[:-1], v.shape[-1])


def forward(
    kernel: Kernel, scoring: Scoring, heads: Heads, masks: MaskArrays
) -> Outputs:
    """Returns the outputs of any kernel."""
    if kernel == "blocks":
        grouped = _group_heads(scoring, heads)
        return _join_groups(heads, *_forward_blocks(scoring, *grouped, masks))
    width = heads.v.shape[-1]
    wide = Heads(*_widen(kernel, *heads))
    out, *of_queries = _imported(kernel).forward(scoring, wide, masks)
    return Outputs(_cut(out, width), *of_queries)


def backward(
    kernel: Kernel,
    scoring: Scoring,
    heads: Heads,
    masks: MaskArrays,
    outputs: Outputs,
    cotangent: jax.Array,
) -> tuple[jax.Array, ...]:
    """Returns the cotangents of `forward`'s queries, keys and values.

    `outputs` may be those of more keys than these: of all that the queries see.
    """
    if kernel == "blocks":
        out, log_sum, _ = outputs
        grouped = _group_heads(scoring, heads)
        rows = out.reshape(out.shape[0] * out.shape[1], -1)
        sums = log_sum.reshape(grouped[0].shape[:-1])
        residuals = Residuals(*grouped, rows, sums)
        return _backward_blocks(
            scoring, residuals, masks, cotangent.reshape(rows.shape)
        )
    *given, out, d_out = _widen(kernel, *heads, outputs.out, cotangent)
    outputs = Outputs(out, outputs.log_sum)
    cotangents = _imported(kernel).backward(
        scoring, Heads(*given), masks, outputs, d_out
    )
    pairs = zip(cotangents, heads, strict=True)
    return tuple(_cut(cotangent, array.shape[-1]) for cotangent, array in pairs)


def _widen(kernel: Kernel, *arrays: jax.Array) -> list[jax.Array]:
    """Returns arrays [.., K] and [.., V] as a kernel takes them: with zeros up to the wider of the two, where it knows
    of one width.
    """
    wide = max(x.shape[-1] for x in arrays)
    if kernel in WIDTHS_APART:
        return list(arrays)
    return [_padded(x, wide - x.shape[-1]) for x in arrays]


def _padded(x: jax.Array, more: int) -> jax.Array:
    if more:
        before = [(0, 0)] * (x.ndim - 1)
        return jnp.pad(x, [*before, (0, more)])
    return x


def _cut(x: jax.Array, width: int) -> jax.Array:
    if x.shape[-1] == width:
        return x
    return x[..., :width]


def _imported(kernel: str) -> AttentionKernel:
    """Imports a kernel where it is used: Pallas for GPUs takes a fifth of JAX's own time to import."""
    module: Any = import_module(f"meshtrain.model.{kernel}")
    return module


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def blockwise(
    scoring: Scoring,
    heads: Heads,
    masks: MaskArrays,
    sinks: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Blocks of queries against only the keys that they may see:

        block 0  ■           with n blocks (n+1)/2n of the scores of the full square are computed
        block 1  ■ ■
        block 2  ■ ■ ■      with a window of so many positions the first ones are left out; both ways all are there

    Backward as in flash attention (Dao et al. 2022, appendix B.4): probabilities are not kept, under any remat policy,
    but made again from the scores and the log of their sum; the softmax needs only the row sums of out x its cotangent.
    """
    return _forward(scoring, heads, masks, sinks)[0]


def _forward(
    scoring: Scoring,
    heads: Heads,
    masks: MaskArrays,
    sinks: jax.Array | None,
) -> tuple[Any, Saved]:
    q, k, v = _group_heads(scoring, heads)
    out, log_sum, top = run_windowed(
        scoring, masks.local, _forward_blocks, q, k, v, masks
    )
    if sinks is not None:
        total = add_sinks(_join_groups(heads, out, log_sum, None), sinks)
        out = total.out.reshape(out.shape)
        log_sum = total.log_sum.reshape(log_sum.shape)
    out, log_sum = (checkpoint_name(a, "attention") for a in (out, log_sum))
    top_by_head = None
    if top is not None:
        batch, _, _, length = top.shape
        top_by_head = top.reshape(batch, -1, length)
    residuals = Residuals(q, k, v, out, log_sum)
    return (out, top_by_head), (residuals, masks, sinks)


def _join_groups(
    heads: Heads, out: jax.Array, *of_queries: jax.Array | None
) -> Outputs:
    """Returns outputs from those of `_forward_blocks`."""
    batch, length, queries, _ = heads.q.shape
    by_head = jax.tree.map(lambda x: x.reshape(batch, queries, length), of_queries)
    return Outputs(out.reshape(output_shape(heads.q, heads.v)), *by_head)


def _group_heads(
    scoring: Scoring, heads: Heads
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns q (scaled), k and v in the shapes of `Residuals`."""
    q, k, v = heads
    batch, length, queries, width = q.shape
    groups = k.shape[2]
    scaled = q * scoring.scale
    grouped = scaled.reshape(batch, length, groups, queries // groups, width)
    q = grouped.transpose(0, 2, 3, 1, 4)
    k = k.transpose(0, 2, 1, 3)
    v = v.transpose(0, 2, 1, 3)
    return q, k, v


def _forward_blocks(
    scoring: Scoring,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    masks: MaskArrays,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Returns the output `[B*T, H*K]`, log of sums of the shapes of `Residuals`, and such largest scores where asked
    for.
    """
    batch, _, _, length, _ = q.shape
    outs = []
    sums = []
    tops = []
    for start, stop in _blocks(length):
        seen = _seen(start, stop, length, scoring)
        q_block = q[..., start:stop, :]
        scores = _scores(start, seen, scoring, q_block, k[:, :, seen], masks)
        top = jnp.max(scores, axis=-1, keepdims=True)
        p = jnp.exp(scores - top)
        total = jnp.sum(p, axis=-1, keepdims=True)
        dropped = _drop(start, seen, scoring, p, masks).astype(v.dtype)
        weighted = jnp.einsum(
            "bgrqs,bgsk->bgrqk",
            dropped,
            v[:, :, seen],
            preferred_element_type=jnp.float32,
        )
        out = weighted / total
        log_sum = top + jnp.log(total)
        outs.append(out.astype(v.dtype))
        sums.append(log_sum[..., 0])
        if scoring.tops:
            tops.append(top[..., 0])
    by_query = jnp.concatenate(outs, axis=3)
    by_query = by_query.transpose(0, 3, 1, 2, 4)
    rows = by_query.reshape(batch * length, -1)
    log_sums = jnp.concatenate(sums, axis=3)
    top_scores = None
    if tops:
        top_scores = jnp.concatenate(tops, axis=3)
    return rows, log_sums, top_scores


def _backward(
    scoring: Scoring,
    residuals: Saved,
    cotangents: tuple[jax.Array, Any],
) -> tuple[Heads, None, jax.Array | None]:
    cotangent, _ = cotangents
    parts, masks, sinks = residuals
    d_heads = run_windowed(
        scoring, masks.local, _backward_blocks, parts, masks, cotangent
    )
    batch, groups, repeats, length, _ = parts.q.shape
    shape = (batch, length, groups * repeats, -1)
    out = parts.out.reshape(shape)
    d_out = cotangent.reshape(shape)
    outputs = Outputs(out, parts.log_sum.reshape(batch, -1, length))
    return Heads(*d_heads), None, sink_gradients(sinks, outputs, d_out)


def _backward_blocks(
    scoring: Scoring, residuals: Residuals, masks: MaskArrays, cotangent: jax.Array
) -> tuple[jax.Array, ...]:
    """Returns the cotangents of q, k and v, in the shapes of the arguments."""
    q, k, v, out, log_sum = residuals
    batch, groups, _, length, width = q.shape
    values = v.shape[-1]
    products = (out * cotangent).astype(jnp.float32)
    rows_BTH = jnp.sum(products.reshape(batch, length, -1, values), axis=-1)
    rows = rows_BTH.transpose(0, 2, 1).reshape(log_sum.shape)
    by_group = cotangent.reshape(batch, length, groups, -1, values)
    d_out = by_group.transpose(0, 2, 3, 1, 4)
    dq: list[jax.Array] = []
    dk = dv = jnp.zeros(())
    for start, stop in reversed(_blocks(length)):
        seen = _seen(start, stop, length, scoring)
        q_block = q[..., start:stop, :]
        d_block = d_out[..., start:stop, :]
        scores = _scores(start, seen, scoring, q_block, k[:, :, seen], masks)
        p = jnp.exp(scores - log_sum[..., start:stop, None])
        dp = jnp.einsum(
            "bgrqk,bgsk->bgrqs",
            d_block,
            v[:, :, seen],
            preferred_element_type=jnp.float32,
        )
        dropped_dp = _drop(start, seen, scoring, dp, masks)
        ds = p * (dropped_dp - rows[..., start:stop, None])
        if scoring.cap:
            ds = ds * cap_slope(scoring.cap, scores)
        ds = ds.astype(q.dtype)
        dropped = _drop(start, seen, scoring, p, masks).astype(v.dtype)
        dq.append(jnp.einsum("bgrqs,bgsk->bgrqk", ds, k[:, :, seen]))
        more_k = jnp.einsum("bgrqs,bgrqk->bgsk", ds, q_block)
        more_v = jnp.einsum("bgrqs,bgrqk->bgsk", dropped, d_block)
        # The others add to what the last block leaves, which sees all keys where no window is.
        if stop == length:
            dk = _pad_unseen(more_k, seen)
            dv = _pad_unseen(more_v, seen)
        else:
            dk = dk.at[:, :, seen].add(more_k)
            dv = dv.at[:, :, seen].add(more_v)
    by_query = jnp.concatenate(dq[::-1], axis=3)
    by_query = by_query.transpose(0, 3, 1, 2, 4)
    d_q = by_query.reshape(batch, length, -1, width) * scoring.scale
    d_k = dk.transpose(0, 2, 1, 3)
    d_v = dv.transpose(0, 2, 1, 3)
    return d_q, d_k, d_v


blockwise.defvjp(_forward, _backward)


def _pad_unseen(gradient: jax.Array, seen: slice) -> jax.Array:
    """Returns a block's gradient [B, G, S, K] with zeros for the keys before those that it has `seen`."""
    if not seen.start:
        return gradient
    return jnp.pad(gradient, ((0, 0), (0, 0), (seen.start, 0), (0, 0)))


def _blocks(length: int) -> list[tuple[int, int]]:
    size = block_size(length)
    return [(start, min(start + size, length)) for start in range(0, length, size)]


def _seen(start: int, stop: int, length: int, scoring: Scoring) -> slice:
    """Returns the keys that any of the queries from `start` to `stop` sees."""
    if not scoring.causal:
        return slice(0, length)
    if not scoring.window:
        return slice(0, stop)
    return slice(max(0, start - scoring.window + 1), stop)


def _scores(
    start: int,
    seen: slice,
    scoring: Scoring,
    q: jax.Array,
    k: jax.Array,
    masks: MaskArrays,
) -> jax.Array:
    """Queries from `start` on, [B, G, R, Q, K], against the keys `seen` by any of them: float32 [B, G, R, Q, S]."""
    scores = jnp.einsum("bgrqk,bgsk->bgrqs", q, k, preferred_element_type=jnp.float32)
    if scoring.cap:
        scores = within(scoring.cap, scores)
    stop = start + q.shape[3]
    queries = jnp.arange(start, stop)
    keys = jnp.arange(seen.start, seen.stop)
    visible: jax.Array | None = None
    if scoring.causal:
        distance = queries[:, None] - keys
        visible = distance >= 0
        if scoring.window:
            visible = visible & (distance < scoring.window)
    elif scoring.window:
        first_query, first_key = _first(masks)
        distance = (first_query + queries)[:, None] - (first_key + keys)
        visible = distance < scoring.window
    if masks.segments is not None:
        assert masks.of_keys is not None
        query_segments = masks.segments[:, start:stop, None]
        key_segments = masks.of_keys[:, None, seen]
        same = (query_segments == key_segments)[:, None, None]
        if visible is None:
            visible = same
        else:
            visible = visible & same
    if visible is None:
        return scores
    return jnp.where(visible, scores, MASKED)


def _drop(
    start: int,
    seen: slice,
    scoring: Scoring,
    p: jax.Array,
    masks: MaskArrays,
) -> jax.Array:
    """Dropout on [B, G, R, Q, S] of queries from `start` on and keys `seen`; linear, so it serves probabilities and
    their cotangents alike.
    """
    if masks.words is None:
        return p
    by_head = p.reshape(p.shape[0], -1, *p.shape[3:])
    query, key = _first(masks)
    dropped = drop(scoring.rate, masks.words, by_head, query + start, key + seen.start)
    return dropped.reshape(p.shape)


def _first(masks: MaskArrays) -> tuple[jax.Array | int, jax.Array | int]:
    return masks.first or (0, 0)
