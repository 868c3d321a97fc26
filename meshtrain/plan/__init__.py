"""The planner: bytes, traffic and time of a layout on a described cluster, before a device is paid for.

    from meshtrain import config, plan
    planned = plan.plan(config.load("configs/quickstart.yaml"), plan.named("h100", devices=8))
    planned.bytes, planned.seconds, planned.mfu

A call of the module is a call of its function `plan`. `python -m meshtrain.plan --config FILE` is its command.

    config ─┬─ shapes, activations ─► memory     bytes a device
            ├─ traffic ──────┐
            ├─ compute ──────┼─► seconds ──► estimate: the plan ──► report, page; search, scaling, advice
            └─ pipeline ─────┘      ▲
    cluster: accelerators, links, what a collective costs over them

It stands on the facts that the program runs on (`meshtrain.model.weights`, `meshtrain.parallel.placement`,
`meshtrain.schedule`), adds them up by formula, and imports no JAX but for `--compile` and `--measure`.

- `meshtrain.plan.memory`: bytes. `meshtrain.plan.traffic`, `meshtrain.plan.gradient_traffic`: what is sent.
  `meshtrain.plan.compute`, `meshtrain.plan.seconds`,
  `meshtrain.plan.programs`: time. `meshtrain.plan.pipeline`: what the planner asks of the schedule's table.
- `meshtrain.cluster`: describing machines. `experiments/plan`: the published runs that the efficiencies are fitted on.
- `meshtrain.plan.search`: every legal layout, ranked, of `meshtrain.plan.choices`. `meshtrain.plan.advice`: a better
  schedule; what helps one that does not fit.
- `meshtrain.plan.jobs`: several runs on one cluster. `--measure` prints what `meshtrain.probe` measures of this
  machine.
- `meshtrain.plan.failures`: how often to save, and what failures cost. `meshtrain.plan.scaling`: more devices.
- `meshtrain.plan.compiled`: XLA's own figures for described devices.

Measured (`python -m experiments.plan`): memory against XLA's analysis of 77 compiled configs: median error 1.0%, none
more than 4.4% too little. Step time of 572 published runs, by a fit without their source: median 4.8%, ninetieth
percentile 13%. Seconds by formula against those of the
compiled program: 22 of 26 configs within 5%.
"""

from meshtrain.cluster.accelerators import ACCELERATORS, Accelerator, Efficiency
from meshtrain.cluster.cluster import Cluster, load_cluster, named
from meshtrain.modules import callable_as
from meshtrain.plan.compute import DEFAULT_PROFILE, FrameworkProfile
from meshtrain.plan.estimate import Plan, plan

__all__ = [
    "ACCELERATORS",
    "DEFAULT_PROFILE",
    "Accelerator",
    "Cluster",
    "Efficiency",
    "FrameworkProfile",
    "Plan",
    "load_cluster",
    "named",
    "plan",
]

callable_as(__name__, plan)
