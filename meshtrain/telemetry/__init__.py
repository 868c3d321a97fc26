"""A run is watched: the loop leaves rows and goes on, a thread hands them to whoever listens.

    step 75/150  loss 2.1181  4,582 tokens/s  27 s left

    loop ─────► rows of steps ───┐                ┌─► alerts: log, file, webhook, command
                                 ├─► hub (thread) ┼─► a page of metrics for Prometheus
    resources ► samples ─────────┘                └─► TensorBoard, Weights & Biases, MLflow

Training writes rows and files; everything else reads them: `meshtrain.run.rows` for programs, in full precision.
Watching never changes a loss, and a failure of it never ends a run.

- `catalogue`: every metric once. `measured`: those of a step. `resources`: what a process and its machine use.
  `samples`: where all
  processes leave it. `hub`: between the loop and the listeners. `trackers`: where rows may go besides.
- `endpoint`: the page of metrics, as `exposition` writes it. `dashboard`: one for Grafana.
- `thresholds`: every alert once, also for Prometheus. `signals`, `alerts`, `sinks`: what they look at, when they fire,
  who hears of it.
- `trace`: a few steps as JAX's profiler sees them. `progress`: a bar on a terminal, and such lines as above elsewhere.
"""
