"""A schedule's table inside the compiled step.

Every device runs one program: a scan over clocks, in which it looks up its own row of the table
(`parallel.pipeline.clock.ClockRow`). A schedule is thus no code, and one that is read from a CSV file runs as the named
ones do. Forwards and backwards of different microbatches alternate, so there is no `jax.grad` around the pipeline: the
forward of a stage stashes its residuals in one clock, and the backward takes them up in another.

    table ──buffers──► places ──phases──► loops over clocks ──► CompiledTable        meshtrain.schedule, without JAX
                                               │
      F  stage.forward ── residuals ─► buffers │ ─► B  stage.backward                 execute, this package
                                               │       or I, W                        split_backward

A layer's residuals go from its forward to its place in the stash, and from there to its backward, without a copy
between; so do weights, which are sliced layer by layer, and gradients, which are added to their sums.

- `meshtrain.parallel.pipeline.execute`: the executor, a table over a model.
- `meshtrain.parallel.pipeline.clock`: one clock: its ops, and what travels under what.
- `meshtrain.parallel.pipeline.stage`: what one stage computes of a microbatch, and its buffers as arrays.
- `meshtrain.parallel.pipeline.split_backward`: a backward as its two halves (Qi et al. 2023, section 2).
- `meshtrain.parallel.pipeline.paired`: a forward and a backward in one loop, where the table pairs them.
- `meshtrain.parallel.pipeline.order`: the order of a pair's messages and products.

Held by `tests/parallel/pipeline/test_execute.py`: 64 microbatches need at most 3% more temporary memory than 8, under
all schedules that do not hold every microbatch by their nature; 256 make no larger program. Each stage holds as many
entries as the simulator says. Measured (`experiments/bench_pipeline.py vocabulary`): with the vocabulary of Llama-3 8B
spread over 4 stages, a GPU has 12% to 14% less work in matrix products.
"""
