"""How gradients are summed over data: within an island, across islands, by which program of messages, and as what they are sent.

    gradients of a data rank ──scatter──► its shard, summed in its island ──across──► summed over all of data
                              data                                          island, where there are several

- `meshtrain.parallel.reduce.reduction`: the two sums, as `meshtrain.parallel.zero` asks for them.
- `meshtrain.parallel.reduce.exchange`: sums of what codecs make of gradients; `shards`: how those are cut.
- `meshtrain.parallel.reduce.blocks`: the codecs bfloat16, float8, int8 and int4; `sizes`: their bytes, without JAX.
- `meshtrain.parallel.reduce.topk`, `powersgd`: the largest numbers alone; two thin matrices in the place of a gradient.
- `meshtrain.parallel.reduce.feedback`: what compression left out goes into the next step; `kept`: its shapes, without JAX.
- `meshtrain.parallel.reduce.algorithms`: all-reduce as programs of messages, which stand for XLA's own where a config asks for one.
"""
