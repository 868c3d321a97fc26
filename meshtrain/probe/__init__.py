"""Measures what the links and devices at hand really give, and which of them is slow.

    mesh ──► links: barrier, collectives over each axis, pairs ──┐
      │                                                          ├──► figures ──► judge: beside a described cluster,
      └────► devices: matrix products, passes over memory ───────┘       │               beside each other
                                                                         └──► describe: a file for `plan --cluster`

- `meshtrain.probe.figures`: what is measured, sizes and bandwidths as nccl-tests counts them, the line through times.
- `meshtrain.probe.clock`: programs timed in turns, on all processes.
- `meshtrain.probe.links`, `meshtrain.probe.devices`: the programs.
- `meshtrain.probe.judge`: scores; slow devices and slow pairs by name.
- `meshtrain.probe.report`, `meshtrain.probe.page`: for people, as lines and as a page.
- `meshtrain.probe.describe`: for the planner.

`python -m meshtrain.probe --help` says what the command takes. Only `clock`, `links`, `devices` and `measure` load JAX.
"""
