"""Linear attention over context ranks: what a piece of a row needs of the pieces before it.

A row of 2N pieces lies over N ranks as `context.column_order` has it; in zigzag order, for N = 4:

    piece          0   1   2   3   4   5   6   7
    on rank        0   1   2   3   3   2   1   0
    tails          ─►  ─►  ─►  ─►  ─►  ─►  ─►           the last tokens, for the convolution of the next piece
    states         S_0 = 0, S_1 = M_0 S_0 + U_0, ...    each piece's map (M, U) of the state before it

So nothing is brought into another order, and attention of other layers keeps its balance. The maps of all pieces are
gathered and composed by every rank where there are few, 2 B H K (K + V) numbers a rank; where there are many, pieces
compose by doubling distances, in log2(2N) exchanges (Hillis & Steele 1986).
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from meshtrain.mesh import CONTEXT
from meshtrain.parallel.placement import MOST_GATHERED

HALVES = 2  # pieces of a row on a rank


def shifted(x: Any, order: np.ndarray, distance: int) -> Any:
    """Returns, for each piece here, what the piece `distance` before it has of arrays [B * 2, ...]; zeros where there
    is none.

    `order` [2N] has the piece of each place, two places a rank.
    """
    return jax.tree.map(lambda leaf: _shifted(leaf, order, distance), x)


def _shifted(x: Array, order: np.ndarray, distance: int) -> Array:
    place_of = np.argsort(order)
    rank = lax.axis_index(CONTEXT)
    halves = x.reshape(-1, HALVES, *x.shape[1:])
    arriving = []
    for half in range(HALVES):
        sources = {
            receiver: divmod(int(place_of[piece - distance]), HALVES)
            for receiver, piece in enumerate(order[half::HALVES])
            if piece >= distance
        }
        total = jnp.zeros_like(halves[:, half])
        for source_half in range(HALVES):
            pairs = [(s, r) for r, (s, of) in sources.items() if of == source_half]
            moves = [(s, r) for s, r in pairs if s != r]
            here = [r for s, r in pairs if s == r]
            if moves:
                total = total + lax.ppermute(halves[:, source_half], CONTEXT, moves)
            if here:
                own = jnp.isin(rank, jnp.array(here))
                total = total + jnp.where(own, halves[:, source_half], 0)
        arriving.append(total)
    return jnp.stack(arriving, axis=1).reshape(x.shape)


def states_before(maps: Array, order: np.ndarray) -> Array:
    """Returns the state before each piece here, [B * 2, H, K, V], from the maps (U, M) of all pieces,
    [B * 2, H, K, V + K].
    """
    if len(order) > HALVES * MOST_GATHERED:
        return _compose_doubling(maps, order)
    by_place = lax.all_gather(maps.reshape(-1, HALVES, *maps.shape[1:]), CONTEXT)
    by_place = jnp.moveaxis(by_place, 2, 1).reshape(len(order), -1, *maps.shape[1:])

    def step(state: Array, maps: Array) -> tuple[Array, Array]:
        return _composed(maps, state), state

    nothing = jnp.zeros_like(_parts(by_place[0])[0])
    _, states = lax.scan(step, nothing, by_place[np.argsort(order)])
    places = lax.axis_index(CONTEXT) * HALVES + jnp.arange(HALVES)
    own = states[jnp.asarray(order)[places]]
    return jnp.moveaxis(own, 0, 1).reshape(-1, *own.shape[2:])


def _compose_doubling(maps: Array, order: np.ndarray) -> Array:
    """Composes each piece's map with that of all before it."""
    distance = 1
    while distance < len(order):
        # zeros that arrive are the state before the row
        maps = _composed(maps, shifted(maps, order, distance))
        distance *= 2
    return shifted(_parts(maps)[0], order, 1)


def _parts(maps: Array) -> tuple[Array, Array]:
    """Returns U and M."""
    width = maps.shape[-1] - maps.shape[-2]
    return maps[..., :width], maps[..., width:]


def _composed(maps: Array, x: Array) -> Array:
    """Returns the maps of a state, or of maps (U, M) from earlier on."""
    added, mapped = _parts(maps)
    moved = jnp.einsum("...kl,...lv->...kv", mapped, x)
    return moved + jnp.pad(added, ((0, 0),) * 3 + ((0, x.shape[-1] - added.shape[-1]),))
