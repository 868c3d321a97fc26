"""What a layout holds, sends and takes on a described cluster, before a device is paid for.

from meshtrain import config, planner
plan = planner.plan(config.load("configs/quickstart.yaml"), planner.named("h100", devices=8))
plan.bytes, plan.seconds, plan.mfu
"""

from meshtrain.planner.accelerators import ACCELERATORS, Accelerator, Efficiency
from meshtrain.planner.cluster import Cluster, load_cluster, named
from meshtrain.planner.estimate import Plan, plan
from meshtrain.planner.work import OURS, Practice

__all__ = [
    "ACCELERATORS", "OURS", "Accelerator", "Cluster", "Efficiency", "Plan", "Practice", "load_cluster", "named", "plan",
]  # fmt: skip
