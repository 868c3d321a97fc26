"""What a layout holds, sends and takes on a described cluster, before a device is paid for.

from meshtrain import config, plan
planned = plan.plan(config.load("configs/quickstart.yaml"), plan.named("h100", devices=8))
planned.bytes, planned.seconds, planned.mfu

A call of the module is a call of its function `plan`, and `python -m meshtrain.plan` its command.
"""

from meshtrain.modules import callable_as
from meshtrain.plan.cluster.accelerators import ACCELERATORS, Accelerator, Efficiency
from meshtrain.plan.cluster.cluster import Cluster, load_cluster, named
from meshtrain.plan.compute import OURS, Practice
from meshtrain.plan.estimate import Plan, plan

__all__ = [
    "ACCELERATORS", "OURS", "Accelerator", "Cluster", "Efficiency", "Plan", "Practice", "load_cluster", "named", "plan",
]  # fmt: skip

callable_as(__name__, plan)
