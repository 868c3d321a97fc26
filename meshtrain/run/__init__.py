"""The parts of a run that do not belong to a checkpoint: its directory and lock, its processes, requests to stop, its
rows of metrics.

    runs/quickstart/
      config.yaml      the whole resolved config                       record
      metrics.jsonl    one JSON object a logged step                   rows
      checkpoints/     see meshtrain.checkpoint.steps
      earlier-1/       what a run that was started anew had left       directory
      .lock            held while a run goes on                        lock

A run may end at any moment, in any way: by a signal, a full disk, a lost machine. Rows that it has written by then
stay. After it has gone on, each step stands once in its metrics. A second run in the same directory is refused.

- `meshtrain.run.early`, `meshtrain.run.signals`: requests to stop, while a command still imports and afterwards.
- `meshtrain.run.processes`: one process looks at the disk, all hear what it found; what ends a run while it goes on.
- `meshtrain.run.hooks`: what happens around the steps of a run.
"""
