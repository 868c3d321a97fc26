"""The sums of gradients over data: within an island and across islands, the programs of messages, and the form in which
gradients are sent.

    gradients of a data rank ──scatter──► its shard, summed in its island ──across──► summed over all of data
                              data                                          island, where there are several

- `meshtrain.parallel.reduce.reduction`: the two sums, as `meshtrain.parallel.zero` asks for them.
- `meshtrain.parallel.reduce.codecs`: bfloat16, float8, int8, int4 and top-k as bytes; `exchange`: sums of what they
  make of gradients.
- `meshtrain.parallel.reduce.powersgd`: two thin matrices in the place of a gradient.
- `meshtrain.parallel.reduce.feedback`: what compression left out goes into the next step.
- `meshtrain.parallel.reduce.sizes`: which weights are compressed, what is kept of them, and how long messages are,
  without JAX.
- `meshtrain.parallel.reduce.algorithms`, `double_tree`: all-reduce as programs of messages, in the place of XLA's own.

Their names, costs and rules stand in `meshtrain.allreduce` and `meshtrain.compression`: adding one is an entry there.
"""
