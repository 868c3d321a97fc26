"""The sums of gradients over data: scattered within an island, then all-reduced across islands (HSDP, Zhao et al. 2023, section 3.2.2).

    island 0            island 1                    sent by a device, of S bytes of gradients on N data ranks in R islands
    data 0   data 1     data 0   data 1
    ├─scatter─┤         ├─scatter─┤                 S (N/R - 1) / (N/R)
    │         └─────────┼─all-reduce┘               2 (R - 1) / R of a shard, S / (N/R)
    └────all-reduce─────┘

`parallel.reduce.compression` has matrices sent as what a codec makes of them; norms and biases are sent as they are.
`parallel.reduce.algorithm` has the sums made by a program of messages in the place of psum and psum_scatter.
"""

import jax
import jax.numpy as jnp

from meshtrain.config import Config
from meshtrain.mesh import DATA, ISLAND
from meshtrain.parallel.placement import Placed
from meshtrain.parallel.reduce import exchange
from meshtrain.parallel.reduce.algorithms.chosen import all_reduce, reduce_scatter
from meshtrain.parallel.reduce.blocks import Codec, block_codec
from meshtrain.parallel.reduce.exchange import Sent
from meshtrain.parallel.reduce.shards import padded, zero_dimension
from meshtrain.parallel.reduce.sizes import BITS, crosses_compressed, scatters_compressed
from meshtrain.parallel.reduce.topk import TopK


class Reduction:
    """Of one config; every method is called inside shard_map, and sums in the dtype of `precision.reduce`, in float32 what is compressed."""

    def __init__(self, config: Config, across: bool = True) -> None:
        """`across`: over all islands, else over the data ranks of each."""
        self.config = config
        self.dtype = jnp.dtype(config.precision.reduce)
        self.algorithm = config.parallel.reduce.algorithm
        self.islands = across and config.mesh.islands > 1
        self.axes = config.mesh.data_axes if self.islands else (DATA,)
        reduce = config.parallel.reduce
        self.codec: Codec | None = block_codec(reduce) if reduce.compression in BITS else None
        if reduce.compression == "topk":
            self.codec = TopK(reduce.ratio)

    def scattered(self, weight: Placed, g: jax.Array) -> Sent:
        """A gradient's shard, summed over the data ranks of an island. Takes stacked leaves and single layers of them.

        What ZeRO does not shard is whole, and summed over all islands at once where compression need not come between.
        """
        if weight.zero_dim is None:
            return Sent(
                all_reduce(self.algorithm, g.astype(self.dtype), (DATA,) if self._crosses(weight) else self.axes), g
            )
        if self.codec is not None and scatters_compressed(self.config, weight):
            return exchange.scatter(weight, g, self.codec)
        dim, whole = zero_dimension(weight, g), padded(weight, g).astype(self.dtype)
        return Sent(reduce_scatter(self.algorithm, whole, DATA, dim), g)

    def across(self, weight: Placed, shard: jax.Array) -> Sent:
        """A shard that is summed in its island, summed over all islands."""
        if self.codec is not None and self._crosses(weight):
            return exchange.all_reduce(shard, self.codec)
        if not self.islands or weight.zero_dim is None:
            return Sent(shard, shard)
        return Sent(all_reduce(self.algorithm, shard.astype(self.dtype), (ISLAND,)), shard)

    def _crosses(self, weight: Placed) -> bool:
        return self.islands and crosses_compressed(self.config, weight)
