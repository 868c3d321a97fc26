"""Inside islands first, then across (Cho et al. 2019, BlueConnect): what leaves an island is summed in it before.

    islands of 4        0 1 2 3          4 5 6 7
    reduce-scatter      └─ring─┘         └─ring─┘        fast links: S (m-1)/m, m devices in an island
    all-reduce          0 ──── ring ──── 4               slow links: 2 S/m (i-1)/i, i islands; all m pairs at once, each its own share
                        1 ────────────── 5
    all-gather          └─ring─┘         └─ring─┘        fast links: S (m-1)/m

    steps   2 (m-1) + 2 (i-1)
    sent    2 S (n-1)/n by every device, of which an m-th part of what a flat ring sends crosses between islands

Not "one representative per island", which would send all of S over one device's link and leave the others idle. With ZeRO it is the
order of HSDP (Zhao et al. 2023), which keeps the shards and gathers weights in place of gradients.
"""

import jax
from jax import lax

from meshtrain.parallel.reduce.algorithms import ring
from meshtrain.parallel.reduce.algorithms.chunks import cut, joined


def all_reduce(x: jax.Array, across: str, inside: str) -> jax.Array:
    """The sum over the devices of the axes `across` and `inside`, of any shape."""
    share = ring.reduce_scatter(cut(x, lax.axis_size(inside)), inside)
    return joined(ring.all_gather(ring.all_reduce(share, across), inside), x)
