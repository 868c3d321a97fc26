"""The gated delta rule, in chunks: attention whose past is one matrix a head, of the same size whatever was read.

    S_t = Γ_t S_{t-1} + k_t β_t (v_t - k_tᵀ Γ_t S_{t-1})ᵀ        o_t = S_tᵀ q_t        S [K, V], Γ_t = exp(log_decay_t)

    kind          log_decay         β            published in
    gated_delta   one a head        a sigmoid    Yang et al. 2024, "Gated Delta Networks"
    kda           one a key width   a sigmoid    Kimi Team 2025, "Kimi Linear"
    mamba2        one a head        none: S_t = Γ_t S_{t-1} + k_t v_tᵀ   (Dao & Gu 2024)

In a chunk of C tokens all states follow from the one at its start, by products of matrices (section 3.3 of the first):

    G = cumsum(log_decay)        A_ij = β_i k_iᵀ e^(G_i - G_j) k_j for j < i        T = (I + A)^-1
    u = T β v        w = -T β e^G k        new = u + w S        o = q e^G S + (q e^(G_i - G_j) k, j ≤ i) new
    S' = e^(G_C) S + (e^(G_C - G) k)ᵀ new

Exponents are never positive: e^(G_i) and e^(-G_j) apart would overflow. Documents end by masks: a decay of -inf would
have gradients of NaN. The backward is the same recurrence of cotangents, from the last chunk
to the first; nothing is kept for it but the arguments and the state that a row's part begins with.

On GPUs one kernel computes what a chunk adds and asks for (`model.rule_kernel`) in the forward; the backward does it by
halves, as every other platform.

Context ranks hold parts of a row ("pieces"). A piece maps the state before it to M S + U. So ranks exchange M and U,
[K, K] and [K, V] a head however long the row is; `Collectives.states_before` composes them in row order.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from meshtrain.compat import vary, varying
from meshtrain.model.collectives import Collectives
from meshtrain.model.kernels import has_rule_kernel


class RuleInputs(NamedTuple):
    """The arguments of the rule, of R rows or pieces of rows; H is a multiple of G, whose heads are shared as in
    grouped-query attention.
    """

    q: Array  # [R, T, G, K]
    k: Array  # [R, T, G, K]
    v: Array  # [R, T, H, V]
    log_decay: Array  # [R, T, H], or [R, T, H, K]; at most 0
    beta: Array | None = None  # [R, T, H]
    more: Array | None = None  # [R, T, H, V]: what o is added to


class Documents(NamedTuple):
    """Packed documents by their ids, which follow one another in a row."""

    segments: Array  # int [R, T]
    earlier: Array  # int [R, at least 1]: of the tokens before the piece


class _Terms(NamedTuple):
    """Everything about n chunks but their states, which the rule is linear in."""

    scores: Array  # [n, R, H, C, C] of queries and the keys before them
    queries: Array  # [n, R, H, C, K], decayed from the chunk's start
    keys: Array  # [n, R, H, C, K], decayed to its end
    w: Array | None  # [n, R, H, C, K]
    u: Array  # [n, R, H, C, V]
    keep: Array  # [n, R, H, K or 1, 1]: the decay of the whole chunk
    more: Array | None  # [n, R, H, C, V]


class _States(NamedTuple):
    """The states of n chunks, in the order of the recurrence."""

    starts: Array  # [n, R, H, K, V], as each chunk begins
    new: Array  # [n, R, H, C, V], as each chunk adds to them
    end: Array  # [R, H, K, V]


# --- the rule


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def delta_rule(
    prepare: Callable[[Any, Documents | None], RuleInputs],
    chunk: int,
    collectives: Collectives,
    arrays: Any,
    documents: Documents | None,
) -> Array:
    """Returns o, float32 [R, T, H, V], of `prepare(arrays, documents)`, which is computed again for the backward."""
    return _forward(prepare, chunk, collectives, arrays, documents)[0]


def _forward(
    prepare: Callable[[Any, Documents | None], RuleInputs],
    chunk: int,
    collectives: Collectives,
    arrays: Any,
    documents: Documents | None,
) -> tuple[Array, Any]:
    inputs = prepare(arrays, documents)
    terms = chunk_terms(collectives.platform, chunk, documents, inputs)
    states, start = _between_ranks(_recurrence(terms), collectives)
    kept = None if collectives.context == 1 else checkpoint_name(start, "attention")
    return _outputs(terms, states, inputs.v.shape[1]), (arrays, documents, kept)


def _backward(
    prepare: Callable[[Any, Documents | None], RuleInputs],
    chunk: int,
    collectives: Collectives,
    residuals: Any,
    cotangent: Array,
) -> tuple[Any, None]:
    arrays, documents, start = residuals
    of = lambda arrays: _terms(chunk, documents, prepare(arrays, documents))
    terms, vjp = jax.vjp(of, arrays)
    recurrence = _recurrence(terms)
    states = _propagate(recurrence, _no_state(recurrence) if start is None else start)
    d_out = _chunked(cotangent, chunk)
    from_later = _Recurrence(
        terms.keep,
        terms.w,
        terms.keys,
        _product("ji,jv->iv", terms.scores, d_out),
        _product("ck,cv->kv", terms.queries, d_out),
    )
    later, _ = _between_ranks(from_later, collectives, reverse=True)
    products = states.starts * later.starts
    over = tuple(
        axis for axis, n in enumerate(terms.keep.shape) if n != products.shape[axis]
    )
    (d_arrays,) = vjp(
        _Terms(
            _product("iv,jv->ij", d_out, states.new),
            _product("cv,kv->ck", d_out, states.starts),
            _product("cv,kv->ck", states.new, later.starts),
            None
            if terms.w is None
            else _product("cv,kv->ck", later.new, states.starts),
            later.new,
            jnp.sum(products, axis=over, keepdims=True),
            None if terms.more is None else d_out,
        )
    )
    return d_arrays, None


delta_rule.defvjp(_forward, _backward)


def read_state(inputs: RuleInputs, chunk: int, state: Array) -> tuple[Array, Array]:
    """Returns o [R, T, H, V] of rows that go on from a state [R, H, K, V], and the state behind them."""
    terms = _terms(chunk, None, inputs)
    states = _propagate(_recurrence(terms), state)
    return _outputs(terms, states, inputs.v.shape[1]), states.end


def step(inputs: RuleInputs, state: Array) -> tuple[Array, Array]:
    """Returns o [R, H, V] of one token a row, from inputs without T, and the state behind it."""
    repeats = inputs.v.shape[1] // inputs.k.shape[1]
    q, k = (jnp.repeat(x, repeats, axis=1) for x in inputs[:2])
    decay = jnp.exp(inputs.log_decay)
    state = state * decay.reshape(*decay.shape[:2], -1, 1)
    new = inputs.v
    if inputs.beta is not None:
        new = inputs.beta[..., None] * (new - _product("k,kv->v", k, state))
    state = state + k[..., None] * new[:, :, None]
    out = _product("k,kv->v", q, state)
    return (out if inputs.more is None else out + inputs.more), state


# --- a chunk


def _product(subscripts: str, *operands: Array) -> Array:
    """Returns an einsum of the last dimensions."""
    left, right = subscripts.split("->")
    left = ",".join(f"...{part}" for part in left.split(","))
    return jnp.einsum(f"{left}->...{right}", *operands)


def _chunked(x: Array, chunk: int) -> Array:
    """Returns [n, R, H, C, ...] of [R, T, H, ...], with zeros behind the last token: they change no state."""
    rows, length = x.shape[:2]
    x = jnp.pad(x, ((0, 0), (0, -length % chunk)) + ((0, 0),) * (x.ndim - 2))
    return jnp.moveaxis(x.reshape(rows, -1, chunk, *x.shape[2:]), (1, 3), (0, 2))


def _outputs(terms: _Terms, states: _States, length: int) -> Array:
    out = _product("ck,kv->cv", terms.queries, states.starts)
    out = out + _product("ij,jv->iv", terms.scores, states.new)
    if terms.more is not None:
        out = out + terms.more
    rows = jnp.moveaxis(out, (0, 2), (1, 3))
    return rows.reshape(rows.shape[0], -1, *rows.shape[3:])[:, :length]


def chunk_terms(
    platform: str, chunk: int, documents: Documents | None, inputs: RuleInputs
) -> _Terms:
    """Returns `_terms`, by the kernel that a platform has for them."""
    widths = inputs.k.shape[-1], inputs.v.shape[-1]
    if not has_rule_kernel(platform, chunk, widths, inputs.log_decay.ndim > 3):
        return _terms(chunk, documents, inputs)
    from meshtrain.model.rule_kernel import compute_terms

    ids = (None, None) if documents is None else _ids(chunk, documents)
    scores, queries, keys, keep, *solved = compute_terms(chunk, tuple(inputs[:5]), ids)
    w, u = solved or (None, _chunked(inputs.v, chunk))
    more = None if inputs.more is None else _chunked(inputs.more, chunk)
    return _Terms(scores, queries, keys, w, u, keep, more)


def _terms(chunk: int, documents: Documents | None, inputs: RuleInputs) -> _Terms:
    chunked: Any = jax.tree.map(partial(_chunked, chunk=chunk), inputs)
    q, k, v, decay, beta, more = chunked
    of_heads = lambda x: jnp.repeat(x, v.shape[2] // k.shape[2], axis=2)
    masks = _masks(chunk, documents)
    pairs = _pairs(k, decay, masks.seen, of_heads)
    decay = decay.reshape(*v.shape[:4], -1)
    total = jnp.cumsum(decay, axis=3)
    advance = jnp.exp(total) * masks.advance
    keys = of_heads(k) * (jnp.exp(_later_sums(decay)) * masks.to_end)
    keep = jnp.swapaxes(jnp.exp(total[:, :, :, -1:]), 3, 4) * masks.keeps
    w = None
    if beta is not None:
        beta = beta[..., None]
        given = [v * beta, of_heads(k) * (-beta * advance)]
        system = jnp.tril(pairs(k) * beta, -1)
        v, w = jnp.split(
            _solve(system, jnp.concatenate(given, -1)), [v.shape[-1]], axis=-1
        )
    return _Terms(pairs(q), of_heads(q) * advance, keys, w, v, keep, more)


def _pairs(
    k: Array, decay: Array, seen: Array | int, of_heads: Callable[[Array], Array]
) -> Callable[[Array], Array]:
    """Returns the function of rows x [.., G, C, K] that gives their products with keys, decayed, [.., H, C, C]."""
    if decay.ndim == k.ndim:
        return lambda x: _decayed_pairs(of_heads(x), of_heads(k), decay) * seen
    decay = decay[..., None]
    one = jnp.ones_like(decay)
    weights = _decayed_pairs(one, one, decay) * seen
    return lambda x: of_heads(_product("ik,jk->ij", x, k)) * weights


class _Masks(NamedTuple):
    """Booleans, or 1 where there are no documents, of the tokens in a chunk."""

    seen: Array | int = 1  # [.., C, C]: two are of one document
    advance: Array | int = 1  # [.., C, 1]: its document has begun before the chunk
    to_end: Array | int = 1  # [.., C, 1]: it goes on to the chunk's end
    keeps: Array | int = 1  # [.., 1, 1]: it does both


def _masks(chunk: int, documents: Documents | None) -> _Masks:
    if documents is None:
        return _Masks()
    ids, before = _ids(chunk, documents)
    ids = _chunked(ids[:, :, None], chunk)[..., None]  # [n, R, 1, C, 1]
    before = before.T[:, :, None, None, None]
    end = ids[:, :, :, -1:]
    return _Masks(
        ids == jnp.swapaxes(ids, 3, 4), ids == before, ids == end, end == before
    )


def _ids(chunk: int, documents: Documents) -> tuple[Array, Array]:
    """Returns the ids of whole chunks' tokens [R, T], and of the token before each chunk [R, n]."""
    ids = documents.segments
    ids = jnp.pad(ids, ((0, 0), (0, -ids.shape[1] % chunk)), mode="edge")
    last = ids[:, chunk - 1 :: chunk]
    return ids, jnp.concatenate([documents.earlier[:, -1:], last[:, :-1]], axis=1)


def _decayed_pairs(x: Array, k: Array, decay: Array) -> Array:
    """Returns Σ x_i k_j e^(decay of the tokens behind j, up to i) over the widths, [.., C, C], zeros for j > i.

    Pairs of the first half and the second meet by way of the middle, in a product of matrices; pairs within a half
    likewise. So exponents are sums of decays alone: a difference of long sums would round what is small away.
    """
    if x.shape[-2] == 1:
        return jnp.sum(x * k, axis=-1, keepdims=True)
    halves = [a.reshape(*a.shape[:-2], 2, -1, a.shape[-1]) for a in (x, k, decay)]
    within = _decayed_pairs(*halves)
    first, second = ([a[..., at, :, :] for a in (*halves, within)] for at in (0, 1))
    later = second[0] * jnp.exp(jnp.cumsum(second[2], axis=-2))
    earlier = first[1] * jnp.exp(_later_sums(first[2]))
    return _triangle(first[3], _product("ik,jk->ij", later, earlier), second[3])


def _later_sums(decay: Array) -> Array:
    """Returns the sum of the decays behind each token of [.., C, K]."""
    behind = jnp.concatenate(
        [decay[..., 1:, :], jnp.zeros_like(decay[..., :1, :])], axis=-2
    )
    return lax.cumsum(behind, axis=behind.ndim - 2, reverse=True)


@jax.custom_vjp
def _solve(system: Array, given: Array) -> Array:
    """Returns X of (I + system) X = given, system [.., C, C] strictly lower, given [.., C, N]."""
    return _solve_forward(system, given)[0]


def _solve_forward(system: Array, given: Array) -> tuple[Array, tuple[Array, Array]]:
    inverse = _inverse(system)
    x = _product("ij,jn->in", inverse, given)
    return x, (inverse, x)


def _solve_backward(
    residuals: tuple[Array, Array], cotangent: Array
) -> tuple[Array, Array]:
    inverse, x = residuals
    d_given = _product("ji,jn->in", inverse, cotangent)
    return -jnp.tril(_product("in,jn->ij", d_given, x), -1), d_given


_solve.defvjp(_solve_forward, _solve_backward)


def _inverse(system: Array) -> Array:
    """Returns (I + system)^-1 of strictly lower triangles, by halves:

        (L 0)^-1   (  L^-1         0  )
        (B R)    = (-R^-1 B L^-1  R^-1)

    `solve_triangular` goes row by row on accelerators.
    """
    half = system.shape[-1] // 2
    if not half:
        return jnp.ones_like(system)
    diagonal = jnp.stack(
        [system[..., :half, :half], system[..., half:, half:]], axis=-3
    )
    inverses = _inverse(diagonal)
    first, second = (inverses[..., at, :, :] for at in (0, 1))
    below = _product(
        "ij,jk->ik", second, _product("ij,jk->ik", system[..., half:, :half], first)
    )
    return _triangle(first, -below, second)


def _triangle(first: Array, below: Array, second: Array) -> Array:
    """Returns (first 0; below second)."""
    upper = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
    return jnp.concatenate([upper, jnp.concatenate([below, second], axis=-1)], axis=-2)


# --- from chunk to chunk


class _Recurrence(NamedTuple):
    """n steps X' = keep X + leftᵀ (given + right X) + more, of states X [R, H, K, V]."""

    keep: Array  # [n, R, H, K or 1, 1]
    left: Array | None  # [n, R, H, C, K]
    right: Array | None  # [n, R, H, C, K]
    given: Array  # [n, R, H, C, V]
    more: Array | None = None  # [n, R, H, K, V]


def _recurrence(terms: _Terms) -> _Recurrence:
    return _Recurrence(terms.keep, terms.keys, terms.w, terms.u)


def _propagate(recurrence: _Recurrence, start: Array, reverse: bool = False) -> _States:
    """Returns the states of all chunks, from that before them (`reverse`: behind them).

    Buffers for them begin as numbers of the arguments. Zeros, as `lax.scan` takes them, depend on nothing: XLA would
    set those of several layers early, and hold them.
    """
    numbers = recurrence.given[..., :1, :1]
    empty = lambda x: jnp.broadcast_to(numbers, (*numbers.shape[:3], *x.shape[-2:]))

    def one(carry: Any, here: Any) -> tuple[Any, None]:
        x, starts, added = carry
        at, keep, left, right, new, more = here
        if right is not None:
            new = new + _product("ck,kv->cv", right, x)
        y = keep * x
        if left is not None:
            y = y + _product("ck,cv->kv", left, new)
        starts = lax.dynamic_update_index_in_dim(starts, x, at, 0)
        added = lax.dynamic_update_index_in_dim(added, new, at, 0)
        return (y if more is None else y + more, starts, added), None

    over = jnp.arange(len(numbers)), *recurrence
    begin: Any = start, vary(empty(start), varying(start)), empty(recurrence.given)
    (end, starts, new), _ = lax.scan(one, begin, over, reverse=reverse)
    return _States(starts, new, end)


def _no_state(recurrence: _Recurrence) -> Array:
    """Returns zeros, [R, H, K, V]."""
    _, rows, heads, _, width = recurrence.given.shape
    keys: Any = recurrence.right if recurrence.left is None else recurrence.left
    axes = varying(recurrence.given) | varying(recurrence.keep)
    return vary(jnp.zeros((rows, heads, keys.shape[-1], width), jnp.float32), axes)


def _between_ranks(
    recurrence: _Recurrence, collectives: Collectives, reverse: bool = False
) -> tuple[_States, Array]:
    """Returns the states of all chunks, and those before this rank's pieces (`reverse`: behind them).

    On context ranks each piece is first gone through from zeros, beside an identity that becomes M.
    """
    width = recurrence.given.shape[-1]
    start = _no_state(recurrence)
    depth = start.shape[2]
    if collectives.context == 1:
        return _propagate(recurrence, start, reverse), start
    wider = ((0, 0),) * 4 + ((0, depth),)
    padded = {
        name: jnp.pad(x, wider)
        for name, x in (("given", recurrence.given), ("more", recurrence.more))
        if x is not None
    }
    eye = jnp.eye(depth, width + depth, width)
    both = jnp.pad(start, wider[1:]) + eye
    local = _propagate(recurrence._replace(**padded), both, reverse)
    start = collectives.states_before(local.end, reverse)

    def advance(x: Array) -> Array:
        zero, mapped = jnp.split(x, [width], axis=-1)
        return zero + _product("ck,kv->cv", mapped, start)

    return jax.tree.map(advance, local), start
