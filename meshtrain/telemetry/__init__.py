"""A run is watched: the loop leaves rows and goes on, a thread hands them to whoever listens.

    step 75/150  loss 2.1181  4,582 tokens/s  27 s left

    loop ─────► rows of steps ───┐                ┌─► alerts: log, file, webhook, command
                                 ├─► hub (thread) ┼─► a page of metrics for Prometheus
    resources ► samples ─────────┘                └─► TensorBoard, Weights & Biases, MLflow

Training writes rows and files; everything else reads them: `meshtrain.run.rows` for programs, in full precision. What watches changes no
loss, and whatever happens to it ends no run.

- `meshtrain.telemetry.catalogue`: every metric once. `meshtrain.telemetry.measured`: those of a step.
- `meshtrain.telemetry.resources`: what a process and its machine use; `meshtrain.telemetry.samples`: where all
  processes leave it.
- `meshtrain.telemetry.hub`: between the loop and the listeners. `meshtrain.telemetry.trackers`: where rows may go besides.
- `meshtrain.telemetry.endpoint`: the page of metrics, as `meshtrain.telemetry.exposition` writes it.
- `meshtrain.telemetry.thresholds`, `meshtrain.telemetry.signals`, `meshtrain.telemetry.alerts`, `meshtrain.telemetry.sinks`: when something is
  wrong, and who hears of it. `meshtrain.telemetry.dashboard`, `meshtrain.telemetry.prometheus_rules`: the same for Grafana and Prometheus.
- `meshtrain.telemetry.trace`: a few steps as JAX's profiler sees them.
- `meshtrain.telemetry.progress`: a bar on a terminal, and such lines as above elsewhere.
"""
