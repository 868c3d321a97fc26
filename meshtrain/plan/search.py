"""Every legal layout for a number of devices, those that fit ranked by the time of a step.

The loops are nested so that what a choice does not change is computed once: compute by (tensor, microbatch, recomputation),
the bubble by schedule, the state's bytes and the traffic over data by ZeRO stage.
"""

import itertools
import math
import time as clock
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from meshtrain.cluster.cluster import Cluster
from meshtrain.config import Config, ConfigError
from meshtrain.config.check import float8_problems
from meshtrain.config.follow import followed, microbatch_rows, put, runs_table
from meshtrain.config.mesh import AXES
from meshtrain.config.reduce import gathers_at_use, keeps_feedback, scatters_at_use
from meshtrain.config.schema import sends_less
from meshtrain.parallel.placement import stages as stages_of
from meshtrain.plan import choices, memory, pipeline, shapes
from meshtrain.plan.estimate import PART_NAMES, Plan, estimate, outside_seconds
from meshtrain.plan.seconds import MicrobatchCosts, hidden_seconds, microbatch_costs
from meshtrain.schedule.generators import PAIRED


class ZeroKeys(NamedTuple):
    """The ZeRO stage of a layout, and where its state lies."""

    stage: int
    hold: bool
    offload: bool = False


class Candidate(NamedTuple):
    """A layout with its predicted seconds and bytes, by formula; `zero` are its keys of ZeRO.

    Where it does not fit the bytes may be only those that show it, and the seconds infinite.
    """

    seconds: float
    nbytes: float
    base: Config
    zero: ZeroKeys

    @property
    def config(self) -> Config:
        return _with_zero(self.base, self.zero)


@dataclass(frozen=True)
class SearchResult:
    """The best layouts, simulated, fastest first, and how many there were."""

    plans: list[Plan]
    legal: int
    fitting: int
    smallest: Candidate  # the layout that holds least, fitting or not
    seconds: float  # that the search took


def search(config: Config, cluster: Cluster, devices: int, best: int = 10, float8: bool = False) -> SearchResult:
    """The `best` layouts of a config's model and batch on `devices` devices of a cluster.

    Only mesh and parallel keys are changed; with `float8` also what the products of layers are in. Raises ConfigError where no layout is legal.
    """
    began = clock.perf_counter()
    legal, fitting = 0, []
    smallest: Candidate | None = None
    usable = memory.spared(cluster)
    matmuls = {config.precision.matmul, *["float8"] * float8}
    bases = [put(config, precision={"matmul": matmul}) for matmul in sorted(matmuls)]
    for candidate in itertools.chain.from_iterable(candidates(base, cluster, devices) for base in bases):
        legal += 1
        if smallest is None or candidate.nbytes < smallest.nbytes:
            smallest = candidate
        if candidate.nbytes <= usable:
            fitting.append(candidate)
    if smallest is None:
        raise ConfigError(
            f"no layout of {devices} devices is legal for train.global_batch_size {config.train.global_batch_size}, model.heads "
            f"{config.model.heads} and model.layers {config.model.layers}: mesh.data must {_of_the_batch(config)}, mesh.tensor divide the "
            "second, and mesh.pipeline be at most the third."
        )
    fitting.sort(key=lambda c: c[:2])
    plans = [estimate(c.config, cluster) for c in _distinct(fitting, 2 * best)]
    plans = sorted((p for p in plans if p.bytes <= usable), key=lambda p: (p.seconds, p.bytes))[:best]
    return SearchResult(plans, legal, len(fitting), smallest, clock.perf_counter() - began)


def _distinct(ranked: list[Candidate], count: int) -> list[Candidate]:
    """The first of each mesh, schedule and recomputation: the rest differ in details that hardly cost time."""
    seen, chosen = set(), []
    for candidate in ranked:
        parallel = candidate.base.parallel
        key = (
            candidate.base.mesh,
            parallel.schedule,
            parallel.virtual_stages,
            parallel.remat,
            candidate.base.precision,
        )
        if key not in seen:
            seen.add(key)
            chosen.append(candidate)
        if len(chosen) == count:
            break
    return chosen


def _of_the_batch(config: Config) -> str:
    return (
        "be at most the first"
        if config.train.uneven_batch == "pad"
        else "divide the first, or train.uneven_batch be pad"
    )


def candidates(config: Config, cluster: Cluster, devices: int, near: bool = False) -> Iterator[Candidate]:
    """Every legal layout with its bytes and seconds by formula. `near`: of those the ones with the config's own schedule, vocabulary
    and split of the sequence, as far as the mesh allows, and with microbatches of its rows, a half, a quarter, ... of them.
    """
    most = microbatch_rows(config)
    base = put(
        config,
        parallel={"layer_split": None, "zero_hold": False, "remat": "none", "remat_keep": (), "remat_offload": ()},
    )
    recomputed: dict[tuple, list[dict[str, Any]]] = {}
    follows = followed(config, "parallel.experts.dispatch")
    for sizes in choices.meshes(base, devices):
        data, tensor, stages = (sizes[axis] for axis in AXES)
        # The config's islands, as far as so many data ranks can be cut into them.
        islands = math.gcd(data, config.mesh.islands)
        mesh = put(base, mesh={**sizes, "islands": islands})
        if follows:
            mesh = put(mesh, parallel={"experts": {"dispatch": sends_less(mesh)}})
        if any(float8_problems(mesh)):
            continue
        splits = (False, True) if tensor > 1 and shapes.length(mesh) % tensor == 0 else (False,)
        vocabularies = ("spread", "edge") if stages > 1 else ("spread",)
        layers = base.model.layers
        counts, named_schedules = (
            choices.cuts(base, data),
            [*choices.schedules(layers, mesh.mesh), *choices.with_empty_ends(layers, mesh.mesh)],
        )
        if near:
            splits, vocabularies = (base.parallel.sequence_parallel and splits[-1],), (base.parallel.vocab,)
            counts, named_schedules = choices.near_cuts(base, data, most), [choices.near_schedule(base, stages)]
        for vocab, m in itertools.product(vocabularies, counts):
            cut = put(mesh, parallel={"vocab": vocab, "microbatches": m})
            outside: dict[int, list[_Decided]] = {}
            for split in splits:
                split_config = put(cut, parallel={"sequence_parallel": split})
                key = sizes["context"], tensor, split, stages == 1, microbatch_rows(split_config)
                if key not in recomputed:
                    recomputed[key] = choices.ways(split_config, cluster)
                for keys in recomputed[key]:
                    yield from _scheduled(put(split_config, parallel=keys), cluster, named_schedules, outside)


class _Decided(NamedTuple):
    """Seconds and bytes that the keys of ZeRO decide."""

    zero: ZeroKeys
    seconds: float  # outside the microbatches
    nbytes: float  # of state
    # Weights gathered, gradients scattered at use, anything over data: what decides the bytes that are held for a moment.
    passing: tuple[bool, ...]


def _scheduled(
    config: Config, cluster: Cluster, named_schedules: list[tuple[str, int]], outside: dict[int, list[_Decided]]
) -> Iterator[Candidate]:
    """The given schedules and all ZeRO stages of a layout. What follows from the layers of a stage alone is computed once for each number
    of them: the costs here, what ZeRO decides in `outside`. Time is computed where one of the ZeRO stages fits, since most don't.
    """
    usable = memory.spared(cluster)
    costs: dict[int, MicrobatchCosts] = {}  # their chunks count only where there is one stage, of one chunk
    layer_keeps: dict[int, tuple[float, float]] = {}
    passing: dict[tuple[int, int, tuple[bool, ...]], float] = {}
    for schedule, chunks in named_schedules:
        split = choices.ends_empty(config.model.layers, chunks * config.mesh.pipeline)
        scheduled = put(config, parallel={"schedule": schedule, "virtual_stages": chunks, "layer_split": split})
        by_table = runs_table(scheduled)
        # a table that a single stage has no use for; activations on the host, which no table has
        if (schedule == PAIRED and not by_table) or (by_table and config.parallel.remat_offload):
            continue
        stage = stages_of(scheduled)
        if stage.on_device not in outside:
            outside[stage.on_device] = list(_zeros(scheduled, cluster))
        facts = pipeline.facts(scheduled)
        if stage.longest not in layer_keeps:
            layer_keeps[stage.longest] = memory.of_layer(scheduled)
        platform = cluster.accelerator.platform
        kept = memory.total(memory.kept(scheduled, facts, platform, layer_keeps[stage.longest]))
        seconds, fits = math.inf, False
        for zero in outside[stage.on_device]:
            # the optimizer's state waits on the host only where it has to: the same stage without comes just before
            if zero.zero.offload and fits:
                continue
            nbytes = kept + zero.nbytes
            if nbytes <= usable:
                key = stage.on_device, stage.longest, (facts.paired, *zero.passing)
                if key not in passing:
                    moments = memory.passing(_with_zero(scheduled, zero.zero), facts, platform)
                    passing[key] = max(map(memory.total, moments.values()))
                nbytes += passing[key]
            if nbytes <= usable and seconds == math.inf:
                if stage.longest not in costs:
                    costs[stage.longest] = microbatch_costs(scheduled, cluster)
                seconds = pipeline.quick(scheduled, facts, costs[stage.longest])
            fits = nbytes <= usable
            hidden = hidden_seconds(_with_zero(scheduled, zero.zero), cluster, costs[stage.longest]) if fits else 0.0
            yield Candidate(seconds + zero.seconds - hidden, nbytes, scheduled, zero.zero)


def _with_zero(config: Config, zero: ZeroKeys) -> Config:
    return put(config, parallel={"zero_stage": zero.stage, "zero_hold": zero.hold, "offload_optimizer": zero.offload})


def _zeros(config: Config, cluster: Cluster) -> Iterator[_Decided]:
    """ZeRO stages, the third also held where there are several microbatches (the second is the first then); each with the optimizer's
    state on the device and, where there are GPUs, on the host.
    """
    several = config.parallel.microbatches > 1 or config.mesh.pipeline > 1
    holds = (False, True) if several else (False,)
    reduce = config.parallel.reduce
    split = config.mesh.data * config.mesh.context > 1
    scattered = config.mesh.data > 1 and reduce.compression != "none" and reduce.over == "data"
    legal: list[tuple[int, bool]] = [] if scattered else [(0, False)]
    if split:
        legal += [(1, False), (2, False), *((3, hold) for hold in holds)]
    if keeps_feedback(config) and reduce.over == "data":
        legal = [(stage, hold) for stage, hold in legal if stage < 2 or hold]
    hosts = (False, True) if cluster.accelerator.platform == "gpu" else (False,)
    for (stage, hold), host in itertools.product(legal, hosts):
        chosen = _with_zero(config, zero := ZeroKeys(stage, hold, host))
        nbytes = sum(item.nbytes for item in memory.state(chosen))
        passing = gathers_at_use(chosen), scatters_at_use(chosen), stage > 0
        yield _Decided(zero, sum(outside_seconds(chosen, cluster)), nbytes, passing)


def reason(plan: Plan, fastest: Plan) -> str:
    """Why a layout stands where it stands, in a few words."""
    total = plan.seconds
    if plan is fastest:
        largest = sorted(plan.time.parts(), key=lambda p: -p[1])[:3]
        return "fastest: " + ", ".join(f"{PART_NAMES[name]} {seconds / total:.0%}" for name, seconds in largest)
    slower = {name: seconds - dict(fastest.time.parts())[name] for name, seconds in plan.time.parts()}
    most = max(slower, key=lambda name: slower[name])
    less = min(slower, key=lambda name: slower[name])
    text = f"+{total / fastest.seconds - 1:.1%}: {PART_NAMES[most]} +{slower[most] / fastest.seconds:.1%}"
    if slower[less] < -0.001 * total:
        text += f", {PART_NAMES[less]} {slower[less] / fastest.seconds:.1%}"
    return text


def made_of(plan: Plan) -> str:
    """All that a step's time goes to, down to a tenth of a per cent, and what its products reach of the peak while they run."""
    spent = sorted(plan.time.parts(), key=lambda part: -part[1])
    shares = [(PART_NAMES[name], seconds / plan.seconds) for name, seconds in spent]
    busy = dict(shares)[PART_NAMES["matmul"]] + dict(shares)[PART_NAMES["attention"]] + dict(shares)[PART_NAMES["head"]]
    return ", ".join(f"{name} {share:.1%}" for name, share in shares if share >= 0.0005) + (
        f"; the model's products reach {plan.mfu / busy:.0%} of the peak while they run."
    )
