"""The model spread over the mesh: what each device holds of every array, and what devices send one another for the
rest.

Forward and backward run inside one fully manual `jax.shard_map` over data, tensor and pipeline: every collective of a
step is written out in this package, or is the transpose of one that is, and can be counted. The optimizer runs outside
it (`meshtrain.step`).

A step on one device, each line inside the one above it:

    zero              gather_params: shards of the fp32 master weights to the weights that a step works on
      pipeline        the clocks of a schedule's table; without stages accumulate, microbatch after microbatch
        forward       embedding, a run of layers, loss, of whatever shard of the weights lies here
          remat       which activations a layer saves, and what its backward recomputes
            tensor    the collectives within a layer
    zero              reduce_grads: the gradients to shards, for the optimizer

- `meshtrain.parallel.placement`: where each weight lies, in plain numbers; the planner and the program both ask it.
- `meshtrain.parallel.layout`: the arrays that follow from it, and the way between canonical and live.
- `meshtrain.parallel.tensor`: tensor and sequence parallelism (Shoeybi et al. 2019, section 3; Korthikanti et al. 2022,
  section 4).
- `meshtrain.parallel.zero`: ZeRO 0 to 3 (Rajbhandari et al. 2020, sections 5 and 7).
- `meshtrain.parallel.accumulate`, `meshtrain.parallel.pipeline`: one stage, and several.
- `meshtrain.parallel.remat`, `meshtrain.parallel.offload`: memory for time.
- `meshtrain.parallel.logits`: what a model says, for looking at it.

Measured (`experiments/bench_layouts.py`): every factorisation of 8 fake devices, which share two cores, takes 0.53 to
0.71 of the time of plain single-device JAX for a step. The ratio is of total work, not of parallel speed.
"""
