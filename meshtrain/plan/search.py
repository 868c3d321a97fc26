"""Every legal layout for a number of devices, those that fit ranked by the time of a step.

Layouts that differ in schedule and ZeRO alone are a table, of whose bytes the formulas of `memory` make one array, and
most fit nowhere. If a layout fits and a lower bound of its seconds is among the fastest, its seconds are computed.
"""

import functools
import itertools
import math
import time as clock
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from meshtrain.cluster.cluster import Cluster
from meshtrain.config import Config, ConfigError
from meshtrain.config.float8 import float8_problems
from meshtrain.config.follow import followed, microbatch_rows, put, runs_table
from meshtrain.config.mesh import AXES
from meshtrain.config.reduce import keeps_feedback
from meshtrain.config.stacks import layers_of_stacks
from meshtrain.parallel.placement import Stages
from meshtrain.parallel.placement import stages as stages_of
from meshtrain.plan import choices, memory, pipeline, rollouts, shapes
from meshtrain.plan.by_stack import stack_configs
from meshtrain.plan.compute import Seconds
from meshtrain.plan.estimate import PART_NAMES, Plan, estimate, outside_seconds
from meshtrain.plan.layer_costs import LayerCost, layer_cost, stage_layers
from meshtrain.plan.memory import spared
from meshtrain.plan.seconds import (
    EdgeCost,
    MessageCost,
    MicrobatchCosts,
    hidden_seconds,
    microbatch_costs,
)
from meshtrain.schedule.facts import ScheduleFacts
from meshtrain.schedule.generators import PAIRED

FREE_EDGE = EdgeCost(Seconds(), 0.0, 0.0, 0.0)
FREE_MESSAGE = MessageCost(0.0, 0.0)


class ZeroKeys(NamedTuple):
    """The ZeRO stage of a layout, and where its state lies."""

    stage: int
    hold: bool
    offload: bool = False


Zeros = list[ZeroKeys]
KnownStates = dict[tuple, list[tuple[float, float]]]


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
        return _set_zero(self.base, self.zero)

    @property
    def kind(self) -> tuple[Any, ...]:
        """Returns the traits of which a search lists one layout: the rest differ in details that hardly cost time."""
        parallel = self.base.parallel
        return (
            self.base.mesh,
            parallel.schedule,
            parallel.virtual_stages,
            parallel.remat,
            self.base.precision,
        )


@dataclass(frozen=True)
class SearchResult:
    """The best layouts, simulated, fastest first, and how many there were."""

    plans: list[Plan]
    legal: int
    fitting: int
    smallest: Candidate  # the layout that holds least, fitting or not
    seconds: float  # that the search took
    # The fastest layout without expert parallelism where the best one has it, with it where that has none.
    other_experts: Plan | None = None


def search(
    config: Config, cluster: Cluster, devices: int, best: int = 10, float8: bool = False
) -> SearchResult:
    """The `best` layouts of a config's model and batch on `devices` devices of a cluster.

    Only mesh and parallel keys are changed; with `float8` also what the products of layers are in. Raises ConfigError
    where no layout is legal.
    """
    began = clock.perf_counter()
    legal = 0
    fitting = 0
    smallest: Candidate | None = None
    groups: list[_Group] = []
    matmuls = {config.precision.matmul, *["float8"] * float8}
    bases = [put(config, precision={"matmul": matmul}) for matmul in sorted(matmuls)]
    for group in itertools.chain.from_iterable(
        _groups(base, cluster, devices) for base in bases
    ):
        legal += int(np.isfinite(group.nbytes).sum())
        fitting += int(group.fits.sum())
        if smallest is None or group.nbytes.min() < smallest.nbytes:
            smallest = next(group.candidates(group.nbytes == group.nbytes.min()))
        if group.fits.any():
            groups.append(group)
    if smallest is None:
        raise ConfigError(
            f"no layout of {devices} devices is legal for train.global_batch_size {config.train.global_batch_size}, "
            "model.heads "
            f"{config.model.heads} and model.layers {config.model.layers}: mesh.data must {_batch_rule(config)}, "
            "mesh.tensor divide the "
            "second, and mesh.pipeline be at most the third."
        )
    plans = _simulated(groups, cluster, best)
    other = None
    if plans and config.model.moe.experts:
        shares = _shares_experts(plans[0].config)
        others = [group for group in groups if _shares_experts(group.config) != shares]
        other = next(iter(_simulated(others, cluster, 1)), None)
    return SearchResult(
        plans, legal, fitting, smallest, clock.perf_counter() - began, other
    )


def _shares_experts(config: Config) -> bool:
    return config.mesh.expert > 1


def _simulated(groups: list["_Group"], cluster: Cluster, best: int) -> list[Plan]:
    """The `best` layouts of groups that fit, simulated, fastest first."""
    plans = [estimate(c.config, cluster) for c in _fastest(groups, 2 * best)]
    fitting = (p for p in plans if p.bytes <= spared(cluster))
    return sorted(fitting, key=lambda p: (p.seconds, p.bytes))[:best]


def _fastest(groups: list["_Group"], count: int) -> list[Candidate]:
    """The fastest layouts of groups, one of each `kind`."""
    ranked: list[tuple[float, float, int, Candidate]] = []
    fastest: dict[tuple, float] = {}
    for least, index in sorted((group.least, i) for i, group in enumerate(groups)):
        # no slower one is among them
        if len(fastest) >= count and least > sorted(fastest.values())[count - 1]:
            break
        for candidate in groups[index].candidates(groups[index].fits):
            ranked.append((*candidate[:2], index, candidate))
            fastest[candidate.kind] = min(
                fastest.get(candidate.kind, math.inf), candidate.seconds
            )
    chosen: dict[tuple, Candidate] = {}
    for *_, candidate in sorted(ranked, key=lambda r: r[:3]):
        chosen.setdefault(candidate.kind, candidate)
    return list(chosen.values())[:count]


def _batch_rule(config: Config) -> str:
    if config.train.uneven_batch == "pad":
        return "be at most the first"
    return "divide the first, or train.uneven_batch be pad"


def candidates(
    config: Config, cluster: Cluster, devices: int, near: bool = False
) -> Iterator[Candidate]:
    """Yields every legal layout with its bytes and seconds by formula.

    `near` keeps the layouts with the config's own schedule, vocabulary and split of the sequence, as far as the mesh
    allows. Their microbatches have its rows, a half, a quarter, ... of them.
    """
    for group in _groups(config, cluster, devices, near):
        yield from group.candidates(np.isfinite(group.nbytes))


def _groups(
    config: Config, cluster: Cluster, devices: int, near: bool = False
) -> Iterator["_Group"]:
    """All of `candidates`, by what they have in common."""
    most = microbatch_rows(config)
    base = put(
        config,
        parallel={
            "layer_split": None,
            "zero_hold": False,
            "remat": "none",
            "remat_keep": (),
            "remat_offload": (),
        },
    )
    recomputed: dict[tuple, choices.Ways] = {}
    tables: dict[tuple, _Tables] = {}
    follows = followed(config, "parallel.experts.dispatch")
    for sizes in choices.meshes(base, devices):
        data, tensor, stages = (sizes[axis] for axis in AXES)
        # The config's islands, as far as so many data ranks can be cut into them.
        islands = math.gcd(data, config.mesh.islands)
        mesh = put(base, mesh={**sizes, "islands": islands})
        if follows:
            mesh = put(mesh, parallel={"experts": choices.experts(mesh, cluster)})
        if any(float8_problems(mesh)):
            continue
        splits = (
            (False, True)
            if tensor > 1 and shapes.length(mesh) % tensor == 0
            else (False,)
        )
        vocabularies = ("spread", "edge") if stages > 1 else ("spread",)
        layers = base.model.layers
        counts = choices.cuts(base, data)
        named_schedules = tuple(choices.every_schedule(layers, mesh.mesh))
        if near:
            splits = (base.parallel.sequence_parallel and splits[-1],)
            vocabularies = (base.parallel.vocab,)
            counts = choices.nearby_cuts(base, data, most)
            named_schedules = (choices.fit_schedule(base, stages),)
        states: KnownStates = {}
        for vocab, m in itertools.product(vocabularies, counts):
            cut = put(mesh, parallel={"vocab": vocab, "microbatches": m})
            if (rows := (stages, m, named_schedules)) not in tables:
                tables[rows] = _tables(cut, named_schedules)
            zeros = _zeros(cut, cluster)
            state = None
            outside: dict[tuple, float] = {}
            for split in splits:
                split_config = put(cut, parallel={"sequence_parallel": split})
                key = (
                    sizes["context"],
                    tensor,
                    split,
                    stages == 1,
                    microbatch_rows(split_config),
                )
                if key not in recomputed:
                    recomputed[key] = choices.ways(split_config, cluster)
                for keys in recomputed[key]:
                    chosen = put(split_config, parallel=keys)
                    if state is None:
                        state = _state(chosen, tables[rows], zeros, states)
                    nbytes = _bytes(chosen, cluster, tables[rows], zeros, state)
                    yield _Group(
                        chosen,
                        cluster,
                        tables[rows],
                        zeros,
                        nbytes,
                        nbytes <= spared(cluster),
                        outside,
                    )


class _Layers(NamedTuple):
    """The layers of a schedule's virtual stages, as in `placement.Stages`."""

    longest: Any
    on_device: Any


class _Tables(NamedTuple):
    """The schedules that so many stages and microbatches may go by; `alike`: those for which memory has one formula, as
    places in the lists, with their layers and facts as arrays.
    """

    keys: choices.Ways  # of the section parallel
    stages: list[Stages]
    facts: list[ScheduleFacts]
    alike: list[tuple[list[int], _Layers, ScheduleFacts]]


def _tables(
    config: Config, named_schedules: Iterable[choices.NamedSchedule]
) -> _Tables:
    tables = _Tables([], [], [], [])
    alike: dict[tuple[bool, bool], list[int]] = {}
    for schedule, chunks in named_schedules:
        split = choices.ends_empty(config.model.layers, chunks * config.mesh.pipeline)
        keys = {"schedule": schedule, "virtual_stages": chunks, "layer_split": split}
        by_table = runs_table(scheduled := put(config, parallel=keys))
        # pairs of a single microbatch on a single stage are none
        if by_table or schedule != PAIRED:
            alike.setdefault((by_table, chunks > 1), []).append(len(tables.keys))
            tables.keys.append(keys)
            tables.stages.append(stages_of(scheduled))
            tables.facts.append(pipeline.facts(scheduled))
    for at in alike.values():
        layers = _stacked(
            [_Layers(tables.stages[i].longest, tables.stages[i].on_device) for i in at]
        )
        tables.alike.append((at, layers, _stacked([tables.facts[i] for i in at])))
    return tables


def _stacked(rows: Sequence[Any]) -> Any:
    """Named tuples as one, of arrays."""
    columns = zip(*rows, strict=True)
    return type(rows[0])(
        *(_stacked(c) if isinstance(c[0], tuple) else np.array(c) for c in columns)
    )


@dataclass(frozen=True, eq=False)
class _Group:
    """Layouts that differ in schedule (rows) and ZeRO (columns) alone, with their bytes."""

    config: Config
    cluster: Cluster
    tables: _Tables
    zeros: Zeros
    nbytes: np.ndarray  # [rows, columns], infinite where nothing is looked at
    fits: np.ndarray
    outside: dict[tuple, float]  # seconds outside the microbatches, which groups share

    @functools.cached_property
    def least(self) -> float:
        """Seconds that each layout that fits takes at least: of its table where head and messages between stages take
        none, since `pipeline.quick` grows with either; and no more hides over data than is sent (`hidden_seconds`).
        Answers are drawn beside nothing.
        """
        seconds = []
        layers = dict[Any, LayerCost]()
        longest = dict[Any, float]()
        for i in np.flatnonzero(self.fits.any(axis=1)):
            scheduled = put(self.config, parallel=self.tables.keys[i])
            stage = self.tables.stages[i]
            if (
                key := stage.slots if _varies_with_depth(self.config) else ()
            ) not in layers:
                layers[key] = layer_cost(scheduled, self.cluster)
            if (counts := (stage.slots, stage.counts)) not in longest:
                longest[counts] = max(stage_layers(scheduled, self.cluster))
            costs = MicrobatchCosts(
                layers[key], FREE_EDGE, FREE_MESSAGE, longest[counts], stage.chunks
            )
            seconds.append(pipeline.quick(scheduled, self.tables.facts[i], costs))
        return min(seconds) + rollouts.seconds(self.config, self.cluster)[1]

    def candidates(self, chosen: np.ndarray) -> Iterator[Candidate]:
        """Yields the layouts of [rows, columns], with their seconds."""
        costs: dict[
            Any, MicrobatchCosts
        ] = {}  # their chunks count only where there is one stage, of one chunk
        for i in np.flatnonzero(chosen.any(axis=1)):
            scheduled = put(self.config, parallel=self.tables.keys[i])
            stage = self.tables.stages[i]
            if stage.slots not in costs and self.fits[i].any():
                costs[stage.slots] = microbatch_costs(scheduled, self.cluster)
            for j in np.flatnonzero(chosen[i]):
                zero = self.zeros[j]
                seconds = math.inf
                if self.fits[i, j]:
                    config = _set_zero(scheduled, zero)
                    cost = costs[stage.slots]
                    key = stage.slots, stage.chunks, stage.held, zero
                    if key not in self.outside:
                        self.outside[key] = sum(outside_seconds(config, self.cluster))
                    seconds = (
                        pipeline.quick(scheduled, self.tables.facts[i], cost)
                        + self.outside[key]
                    )
                    seconds -= hidden_seconds(config, self.cluster, cost)
                yield Candidate(seconds, float(self.nbytes[i, j]), scheduled, zero)


def _varies_with_depth(config: Config) -> bool:
    """Returns whether a layer's costs depend on how many layers a chunk has: the choice of those in float8 does, and
    the mean of several kinds.
    """
    return (
        config.precision.matmul == "float8" or len(layers_of_stacks(config.model)) > 1
    )


def _bytes(
    config: Config,
    cluster: Cluster,
    tables: _Tables,
    zeros: Zeros,
    state: np.ndarray,
) -> np.ndarray:
    """Bytes of [rows, columns]; `state` as `_state` gives it."""
    usable = spared(cluster)
    platform = cluster.accelerator.platform
    nbytes = state[0].copy()
    for at, layers, facts in tables.alike:
        first = put(config, parallel=tables.keys[at[0]])
        # activations on the host, which no table has
        if config.parallel.remat_offload and runs_table(first):
            nbytes[at] = math.inf
            continue
        layer_keeps = _layer_keeps(first, tables, at)
        kept: Any = memory.total(
            memory.kept(first, facts, platform, layer_keeps, layers)
        )
        totals = nbytes[at] + kept[:, None]
        fits = totals <= usable
        passing = dict[tuple[int, bool], Any]()
        for j in np.flatnonzero(fits.any(axis=0)):
            if (key := zeros[j][:2]) not in passing:
                moments = memory.passing(
                    _set_zero(first, zeros[j]), facts, platform, layers
                ).values()
                passing[key] = functools.reduce(np.maximum, map(memory.total, moments))
            totals[:, j] += np.where(fits[:, j], passing[key], 0.0)
        nbytes[at] = totals
    np.maximum(nbytes, state[1], out=nbytes)
    # The optimizer's state need not wait on the host where the same stage without, which comes just before, fits.
    for column, zero in enumerate(zeros):
        if zero.offload:
            nbytes[nbytes[:, column - 1] <= usable, column] = math.inf
    return nbytes


def _layer_keeps(config: Config, tables: _Tables, at: list[int]) -> Any:
    """Returns `memory.layer_bytes` of a config by the schedules at some places, as arrays."""
    slots = [tables.stages[i].slots for i in at]
    if config.precision.matmul == "float8":
        rows = {
            of: put(config, parallel=tables.keys[i])
            for of, i in zip(slots, at, strict=True)
        }
        keeps = {of: memory.layer_bytes(row) for of, row in rows.items()}
        return tuple(np.array([keeps[of] for of in slots]).T)
    # else a layer of a kind keeps the same in all of them, which differ in the mean over slots alone
    each = [(stack, memory.layer_bytes(one)) for stack, one in stack_configs(config)]
    return tuple(
        np.sum(
            [
                np.outer(n, [of.count(stack) / len(of) for of in slots])
                for stack, n in each
            ],
            0,
        )
    )


def _state(
    config: Config,
    tables: _Tables,
    zeros: Zeros,
    known: KnownStates,
) -> np.ndarray:
    """Bytes of state, and while answers are drawn, of [rows, columns], which follow from the layers on a device;
    `known` has those of a mesh.
    """
    rows = []
    for keys, stage in zip(tables.keys, tables.stages, strict=True):
        held = stage.held or stage.on_device
        key = config.parallel.vocab, config.parallel.microbatches > 1, held
        if key not in known:
            scheduled = put(config, parallel=keys)
            layouts = [_set_zero(scheduled, zero) for zero in zeros]
            known[key] = [
                (memory.total(memory.state(x)), memory.total(memory.drawing(x)))
                for x in layouts
            ]
        rows.append(known[key])
    return np.array(rows).transpose(2, 0, 1)


def _set_zero(config: Config, zero: ZeroKeys) -> Config:
    return put(
        config,
        parallel={
            "zero_stage": zero.stage,
            "zero_hold": zero.hold,
            "offload_optimizer": zero.offload,
        },
    )


def _zeros(config: Config, cluster: Cluster) -> Zeros:
    """ZeRO stages, the third also held where there are several microbatches (the second is the first then); each with
    the optimizer's state on the device and, where there are GPUs, on the host.
    """
    several = config.parallel.microbatches > 1 or config.mesh.pipeline > 1
    holds = (False, True) if several else (False,)
    reduce = config.parallel.reduce
    split = config.mesh.data * config.mesh.context > 1
    scattered = (
        config.mesh.data > 1 and reduce.compression != "none" and reduce.over == "data"
    )
    legal: list[tuple[int, bool]] = [] if scattered else [(0, False)]
    if split:
        legal += [(1, False), (2, False), *((3, hold) for hold in holds)]
    if keeps_feedback(config) and reduce.over == "data":
        legal = [(stage, hold) for stage, hold in legal if stage < 2 or hold]
    hosts = (False, True) if cluster.accelerator.platform == "gpu" else (False,)
    return [
        ZeroKeys(stage, hold, host)
        for (stage, hold), host in itertools.product(legal, hosts)
    ]


def reason(plan: Plan, fastest: Plan) -> str:
    """Why a layout stands where it stands, in a few words."""
    total = plan.seconds
    if plan is fastest:
        largest = sorted(plan.time.parts(), key=lambda p: -p[1])[:3]
        return "fastest: " + ", ".join(
            f"{PART_NAMES[name]} {seconds / total:.0%}" for name, seconds in largest
        )
    slower = {
        name: seconds - dict(fastest.time.parts())[name]
        for name, seconds in plan.time.parts()
    }
    most = max(slower, key=lambda name: slower[name])
    less = min(slower, key=lambda name: slower[name])
    text = f"+{total / fastest.seconds - 1:.1%}: {PART_NAMES[most]} +{slower[most] / fastest.seconds:.1%}"
    if slower[less] < -0.001 * total:
        text += f", {PART_NAMES[less]} {slower[less] / fastest.seconds:.1%}"
    return text


def expert_reason(result: SearchResult) -> str:
    """Says whether the fastest layout has expert parallelism, and why; nothing for a model without experts."""
    fastest = result.plans[0]
    if not fastest.config.model.moe.experts:
        return ""
    ranks = fastest.config.mesh.expert
    taken, others = f"expert parallelism over {ranks} ranks pays", "without it"
    if ranks == 1:
        taken, others = "expert parallelism does not pay", "with it"
    other = result.other_experts
    if other is None:
        return f"{taken}: no layout {others} fits."
    return f"{taken}: {others} the fastest layout ({other.config.mesh}) takes {reason(other, fastest)}."


def made_of(plan: Plan) -> str:
    """All that a step's time goes to, down to a tenth of a per cent, and what its products reach of the peak while they
    run.
    """
    spent = sorted(plan.time.parts(), key=lambda part: -part[1])
    shares = [(PART_NAMES[name], seconds / plan.seconds) for name, seconds in spent]
    busy = (
        dict(shares)[PART_NAMES["matmul"]]
        + dict(shares)[PART_NAMES["attention"]]
        + dict(shares)[PART_NAMES["head"]]
    )
    return ", ".join(
        f"{name} {share:.1%}" for name, share in shares if share >= 0.0005
    ) + (
        f"; the model's products reach {plan.mfu / busy:.0%} of the peak while they run."
    )
