"""When it pays to know of slow links: the planner's step of three trainings on 512 H100s in 4 islands, with ever less
between them.

    python -m experiments.communicate.crossing

The cluster is `islands.yaml` beside this file; what a GPU can send out of its island goes from 400 Gbit/s down to
0.125, which is 1 Gbit/s a machine. Prints the seconds of a step by method and bandwidth, and two crossing points of
each: below which bandwidth it is ahead of the same mesh without islands, and down to which it keeps nine tenths of the
best speed there is.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from experiments import bench
from experiments.bench import Table
from meshtrain.cluster.algorithms import best
from meshtrain.cluster.cluster import Cluster, load_cluster
from meshtrain.config import Config, ConfigError, load
from meshtrain.config.mesh import ISLAND
from meshtrain.parallel.placement import stages
from meshtrain.plan.estimate import Plan, plan

HERE = Path(__file__).parent
CONFIGS = HERE.parents[1] / "configs"
MOST, LEAST = 400.0, 0.125  # Gbit/s of a GPU out of its island
TOLD = (400.0, 40.0, 4.0, 1.0, 0.125)
KEPT = 0.9  # of the best speed
STEPS = 12  # between which crossings are looked for

ONE_STAGE = tuple(
    [
        "mesh.data=512",
        "mesh.tensor=1",
        "mesh.pipeline=1",
        "parallel.schedule=gpipe",
        "parallel.virtual_stages=1",
        "parallel.microbatches=1",
        "parallel.sequence_parallel=false",
        "parallel.remat=selective",
        "train.global_batch_size=512",
    ]
)
MODELS = {
    "8B, ZeRO-1, data 512": ("llama3_8b", ONE_STAGE),
    "8B, ZeRO-3, data 512": ("llama3_8b", (*ONE_STAGE, "parallel.zero_stage=3")),
    "70B, data 16 x tensor 4 x pipeline 8": ("llama3_70b", ()),
}

Seconds = Callable[[Plan], float]


def whole(planned: Plan) -> float:
    return planned.seconds


def across(planned: Plan) -> float:
    """Seconds of a step for what travels across islands."""
    mesh = planned.config.mesh
    flows = [flow for flow in planned.transfers if flow.axis == ISLAND]
    return sum(
        f.count * best(f.kind, planned.cluster.axis(f.axis, mesh), f.nbytes).seconds
        for f in flows
    )


def overlapped(planned: Plan) -> float:
    """With all across islands hidden that can be: behind the last microbatch's backward, since no gradient is complete
    before it.
    """
    backward = stages(planned.config).chunks * planned.costs.chunk_backward
    return planned.seconds - min(across(planned), backward)


@dataclass(frozen=True)
class Method:
    name: str
    settings: tuple[str, ...]
    seconds: Seconds = whole


def sent_as(compression: str) -> tuple[str, ...]:
    return (
        "mesh.islands=4",
        f"parallel.reduce.compression={compression}",
        "parallel.reduce.over=islands",
    )


def alone(steps: int) -> tuple[str, ...]:
    """DiLoCo: islands are brought together once in so many steps, over which the planner spreads what that takes."""
    return ("mesh.islands=4", f"parallel.sync.every={steps}")


FLAT = "no islands"
ISLANDS = ("mesh.islands=4",)
METHODS = (
    Method(FLAT, ()),
    Method("islands", ISLANDS),
    Method("islands, overlapped", ISLANDS, overlapped),
    Method("bfloat16 across", sent_as("bfloat16")),
    Method("float8 across", sent_as("float8")),
    Method("int8 across", sent_as("int8")),
    Method("int8 across, overlapped", sent_as("int8"), overlapped),
    Method("int4 across", sent_as("int4")),
    Method("PowerSGD of rank 4 across", sent_as("powersgd")),
    Method("top 1% across", sent_as("topk")),
    Method("DiLoCo, every 10 steps", alone(10)),
    Method("DiLoCo, every 100 steps", alone(100)),
)


def at(gigabits: float) -> Cluster:
    """The cluster with so many Gbit/s of a GPU out of its island."""
    cluster = load_cluster(HERE / "islands.yaml")
    spine = replace(cluster.links.spine, bandwidth=gigabits / 8)
    return replace(cluster, links=replace(cluster.links, spine=spine))


def config_of(model: str, method: Method) -> Config | None:
    """None where the method is refused."""
    name, settings = MODELS[model]
    try:
        return load(CONFIGS / f"{name}.yaml", [*settings, *method.settings])
    except ConfigError:
        return None


@dataclass(frozen=True)
class Curve:
    """A method's seconds of a step, by bandwidth."""

    method: Method
    config: Config

    def __call__(self, gigabits: float) -> float:
        return self.method.seconds(plan(self.config, at(gigabits)))


def curves(model: str) -> list[Curve]:
    found = [(method, config_of(model, method)) for method in METHODS]
    return [Curve(method, config) for method, config in found if config is not None]


def edge(holds: Callable[[float], bool], start: float, end: float) -> float | None:
    """The bandwidth on the way from `start` to `end` at which something ends to hold, `end` if it holds all the way;
    None if it does not even hold at the start. Between two lines that cross more than once it is the first crossing.
    """
    if not holds(start):
        return None
    points = [start * (end / start) ** (k / STEPS) for k in range(STEPS + 1)]
    for inside, outside in pairwise(points):
        if not holds(outside):
            while abs(math.log(outside / inside)) > 0.01:
                middle = math.sqrt(inside * outside)
                inside, outside = (
                    (middle, outside) if holds(middle) else (inside, middle)
                )
            return inside
    return end


def report(model: str) -> None:
    found = curves(model)
    flat = next(curve for curve in found if curve.method.name == FLAT)
    full = min(curve(MOST) for curve in found)
    bandwidths = [f"{gigabits:g}".rjust(6) for gigabits in TOLD]
    title = f"{model}: seconds of a step; Gbit/s of a GPU across islands"
    table = Table(
        "method                   ",
        *bandwidths,
        "ahead below",
        "90% down to",
        title=title,
    )
    for curve in found:
        spent = [f"{curve(gigabits):.2f}" for gigabits in TOLD]
        beats = (
            ""
            if curve is flat
            else said(edge(lambda g, c=curve: c(g) < flat(g), LEAST, MOST), MOST)
        )
        kept = said(edge(lambda g, c=curve: c(g) <= full / KEPT, MOST, LEAST), LEAST)
        table.row(curve.method.name, *spent, beats, kept)


def said(gigabits: float | None, end: float) -> str:
    return (
        "never"
        if gigabits is None
        else "always"
        if gigabits == end
        else f"{gigabits:.3g}"
    )


def main() -> None:
    bench.parser(__doc__).parse_args()
    for model in MODELS:
        report(model)


if __name__ == "__main__":
    main()
