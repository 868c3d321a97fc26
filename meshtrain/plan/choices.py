"""The choices of a search: meshes, microbatches, schedules, and what is computed again."""

import contextlib
import itertools
import math
from collections.abc import Iterator
from typing import Any

from meshtrain.cluster.cluster import Cluster, named, usual_cluster
from meshtrain.config import Config, MeshConfig, auto
from meshtrain.config.auto import AUTO, PLAIN, unpaired_schedule
from meshtrain.config.check import check, context_problems
from meshtrain.config.follow import put, resolve
from meshtrain.config.mesh import EXPERT
from meshtrain.config.schema import ACTIVATIONS, SELECTIVE
from meshtrain.errors import ConfigError, divisors
from meshtrain.parallel.placement import stages as stages_of
from meshtrain.plan import activations
from meshtrain.plan.estimate import estimate_by_formula
from meshtrain.plan.layer_costs import layer_cost
from meshtrain.plan.memory import spared
from meshtrain.schedule.generators import MOST_CHUNKS, PAIRED, SCHEDULES, chosen_chunks
from meshtrain.units import duration, size

# What remat is looked at saves at least so much of all activations, against the one that saves less.
STEP = 0.12
# A rank of context has so many tokens of a row at least: with fewer its messages are longer than its attention
# (Megatron-LM's rule too). Rows that would be cut in two of just so many are left whole.
LEAST = 4096
# Times its step, at most, that another schedule takes: the planner itself is off by 3%, in the median.
WORTH_SAYING = 0.97
Keys = dict[str, Any]  # of a section of the config
Ways = list[Keys]
NamedSchedule = tuple[str, int]  # and its virtual stages
STRATEGIES = ("ring", "all_gather", "ulysses")


def meshes(config: Config, devices: int) -> Iterator[dict[str, int]]:
    """Every mesh, by its sizes, that the model, the batch, its rows and the number of devices allow."""
    batch = config.train.global_batch_size
    pads = config.train.uneven_batch == "pad"
    for context, tensor in itertools.product(
        contexts(config, devices), divisors(devices)
    ):
        if config.model.heads % tensor or devices % (context * tensor):
            continue
        for stages in divisors(devices // context // tensor):
            data = devices // context // tensor // stages
            # A batch that so many data ranks do not divide is filled up for them; ranks without any row are not looked
            # at.
            if stages <= config.model.layers and (
                batch % data == 0 or (pads and data <= batch)
            ):
                for expert in expert_ranks(config, data, context):
                    yield {
                        "data": data,
                        "tensor": tensor,
                        "pipeline": stages,
                        "context": context,
                        "expert": expert,
                    }


def expert_ranks(config: Config, data: int, context: int = 1) -> list[int]:
    """Ranks of data, or of data and all of context, that may share the experts between them."""
    experts = config.model.moe.experts
    of_island = divisors(data // math.gcd(data, config.mesh.islands))
    ranks = sorted({*of_island, *(context * n for n in of_island)})
    return [n for n in ranks if experts % n == 0] if experts else [1]


def experts(config: Config, cluster: Cluster) -> Keys:
    """Chooses how rows go to their experts: by whichever way sends less, and once to each node where a row has
    experts on several.
    """
    group = cluster.axis(EXPERT, config.mesh)
    nodes = group.size // group.hops[0].fan if len(group.hops) > 1 else 1
    keys = config.parallel.experts
    pays = 1 < nodes <= keys.room * config.model.moe.top_k and group.size % nodes == 0
    inside = auto.expert_ranks(config) // nodes if pays else None
    chosen = put(config, parallel={"experts": {"ranks_per_node": inside}})
    return {"dispatch": auto.dispatch(chosen), "ranks_per_node": inside}


def contexts(config: Config, devices: int) -> list[int]:
    """Ranks that a row may be split over: the config's own, and of long rows powers of two."""
    length = config.train.sequence_length
    own = config.mesh.context
    powers = (
        [1 << k for k in range((length // LEAST).bit_length())]
        if length > 2 * LEAST
        else [1]
    )
    return [
        n
        for n in sorted({*powers, own})
        if devices % n == 0 and length % (2 * n if n > 1 else 1) == 0
    ]


def context_strategy(config: Config) -> tuple[str, str]:
    """Returns what parallel.context_strategy: auto stands for, and why.

    It is the legal strategy whose layer takes least where the config runs.
    """
    legal, cluster = {}, named(usual_cluster(config), config.mesh.devices)
    # An attention hook takes what it is given for the whole row.
    for name in ("ulysses",) if config.model.attention else STRATEGIES:
        with contextlib.suppress(ConfigError):
            check(chosen := resolve(put(config, parallel={"context_strategy": name})))
            legal[name] = _layer_seconds(chosen, cluster)
    if not legal:
        # And what is wrong is said of it
        return "all_gather", "it takes what others do too"
    best, *others = sorted(legal, key=lambda name: legal[name])
    why = f"a layer takes {duration(legal[best])} by the plan for {cluster.name}"
    why += "".join(f", {duration(legal[name])} with {name}" for name in others)
    refused = " and ".join(name for name in STRATEGIES if name not in legal)
    return best, f"{why}; {refused} cannot be here" if refused else why


def schedule(config: Config) -> tuple[str, str]:
    """Returns what parallel.schedule: auto stands for if there are messages to hide, and why.

    It is paired, if it fits and a step takes clearly less by the plan where the config runs; zb_paired, if that takes
    clearly less again.
    """
    plain = unpaired_schedule(config)
    best = PLAIN if plain == AUTO else plain  # a name, which on one stage has no use
    try:
        check(base := resolve(put(config, parallel={"schedule": best})))
        cluster = named(usual_cluster(config), config.mesh.devices)
    except ConfigError:
        return plain, "nothing can be planned"  # and what is wrong is said of it
    plans = {best: estimate_by_formula(base, cluster)}
    pairs = {entry.name for entry in SCHEDULES.values() if entry.paired}
    for name, chunks in schedules(config.model.layers, config.mesh):
        if name in pairs and chunks == stages_of(base).chunks:
            with contextlib.suppress(ConfigError):
                check(chosen := put(base, parallel={"schedule": name}))
                plans[name] = estimate_by_formula(chosen, cluster)
                pays = (
                    plans[name][1] <= spared(cluster)
                    and plans[name][0] < WORTH_SAYING * plans[best][0]
                )
                # what zero bubble alone would save is no reason
                best = name if pays and (name == PAIRED or best in pairs) else best
    unpaired = "without pairs" if plain == AUTO else f"with {plain}"
    words = list(_compare(plans, best, unpaired))
    why = f"by the plan for {cluster.name}"
    why += (
        f", a step takes {', '.join(words)}"
        if words
        else ", which has nothing to compare it with"
    )
    return best if best in pairs else plain, why


def _compare(
    plans: dict[str, tuple[float, float]], best: str, unpaired: str
) -> Iterator[str]:
    """Yields how the best of some schedules compares with each other one; `unpaired` names the one without pairs."""
    seconds, nbytes = plans[best]
    for name, (other, holds) in plans.items():
        if name != best:
            # A share, since the seconds of a plan are those of its whole timeline.
            less = 1 - seconds / other
            more = (
                f", which holds {size(holds)} in place of {size(nbytes)}"
                if holds > nbytes
                else ""
            )
            without = f"with {name}" if SCHEDULES[name].paired else unpaired
            yield f"{abs(less):.1%} {'less' if less >= 0 else 'more'} than {without}{more}"


def _layer_seconds(config: Config, cluster: Cluster) -> float:
    layer = layer_cost(config, cluster)
    return layer.forward.total + layer.backward.total + layer.context_sends


def ways(config: Config, cluster: Cluster) -> Ways:
    """`remats` of a config, each with the strategy of context, of those that are legal, whose layer takes least; none
    where none is.
    """
    if config.mesh.context == 1:
        return [{"context_strategy": AUTO} | keys for keys in remats(config, cluster)]
    every = [put(config, parallel={"context_strategy": name}) for name in STRATEGIES]
    legal = [chosen for chosen in every if not any(context_problems(chosen))]
    found = []
    for keys in remats(legal[0], cluster) if legal else []:
        best = min(
            (put(chosen, parallel=keys) for chosen in legal),
            key=lambda chosen: _layer_seconds(chosen, cluster),
        )
        found.append({"context_strategy": best.parallel.context_strategy} | keys)
    return found


def cuts(config: Config, data: int) -> tuple[int, ...]:
    """Every number of microbatches for a data rank's rows: those that divide them or, where they are filled up, the
    fewest for each size.
    """
    if config.train.uneven_batch == "refuse":
        return divisors(config.train.global_batch_size // data)
    rows = math.ceil(config.train.global_batch_size / data)
    return tuple(sorted({math.ceil(rows / size) for size in range(1, rows + 1)}))


def schedules(layers: int, mesh: MeshConfig) -> list[NamedSchedule]:
    """Every (schedule, virtual stages) for the stages of a mesh; on one, which runs no schedule, a name where auto
    might be pairs.
    """
    if mesh.pipeline == 1:
        return [
            (PLAIN if mesh.splits_layers else AUTO, 1),
            *((name, v) for name, v in _chunks(mesh) if name == PAIRED and v == 1),
        ]
    return [(name, v) for name, v in _chunks(mesh) if v * mesh.pipeline <= layers]


def every_schedule(layers: int, mesh: MeshConfig) -> list[NamedSchedule]:
    """`schedules`, and those of one or two virtual stages more than there are layers: see `ends_empty`."""
    stages = mesh.pipeline
    return schedules(layers, mesh) + [
        (name, v)
        for name, v in _chunks(mesh)
        if stages > 1 and v > 1 and layers < v * stages <= layers + 2
    ]


def _chunks(mesh: MeshConfig) -> Iterator[NamedSchedule]:
    """Pairs where layers send messages that they could hide; with one chunk other schedules of any number have names of
    their own.
    """
    for schedule in SCHEDULES.values():
        if mesh.splits_layers or not schedule.paired:
            several = range(1 if schedule.paired else 2, MOST_CHUNKS + 1)
            yield from (
                (schedule.name, v)
                for v in ([schedule.chunks] if schedule.chunks else several)
            )


def ends_empty(layers: int, virtual: int) -> tuple[int, ...] | None:
    """A `layer_split` of one layer each for one or two virtual stages too many: the last has the loss head alone, then
    the first the embedding (Llama 3 has 126 layers for that: Grattafiori et al. 2024, section 3.3.2). None where there
    are layers enough.
    """
    if virtual <= layers:
        return None
    first = (0,) if virtual == layers + 2 else (1,)
    return (*first, *(1,) * (virtual - 2), 0)


def fit_schedule(config: Config, stages: int) -> NamedSchedule:
    """The config's own (schedule, virtual stages) for another number of stages, as far as there are layers; else
    1F1B.
    """
    default = (PLAIN, 1)
    layers = config.model.layers
    entry = SCHEDULES.get(config.parallel.schedule)
    if stages == 1 or entry is None:
        return default
    chunks = entry.chunks or chosen_chunks(
        layers, stages, config.parallel.microbatches, config.parallel.virtual_stages
    )
    return (entry.name, chunks) if chunks * stages <= layers else default


def nearby_cuts(config: Config, data: int, most: int) -> tuple[int, ...]:
    """The `cuts` that give a microbatch `most` rows or a half, a quarter, ... of them."""
    rows = math.ceil(config.train.global_batch_size / data)
    legal = cuts(config, data)
    halves = {math.ceil(rows / (most >> k)) for k in range(most.bit_length())}
    return tuple(m for m in legal if m in halves)


def remats(config: Config, cluster: Cluster) -> Ways:
    """The ways to recompute or offload that a search looks at, as keys of the section parallel: those that no other one
    beats in both bytes and seconds, from the one that keeps most on; each saves a good part more than the one before.
    """
    options = _remat_options(config)
    costs = []
    for i, keys in enumerate(options):
        chosen = put(config, parallel=keys)
        layer = layer_cost(chosen, cluster)
        seconds = (
            layer.backward.total
            + layer.backward_sends
            + layer.forward_copies
            + layer.backward_copies
        )
        costs.append((activations.kept(chosen, chosen.parallel.remat), seconds, i))
    step = STEP * max(costs)[0]
    worthwhile: Ways = []
    fewest = math.inf
    fastest = math.inf
    # from what holds most on: worth looking at if nothing that holds as little is faster
    for nbytes, seconds, i in sorted(costs, key=lambda c: (-c[0], c[1], c[2])):
        if any(other <= nbytes and time < seconds for other, time, _ in costs):
            continue
        if nbytes <= fewest - step or seconds < fastest:
            worthwhile.append(options[i])
            fewest = nbytes
            fastest = seconds
    full = {"remat": "full"}
    return worthwhile if full in worthwhile else [*worthwhile, full]


def _remat_options(config: Config) -> Ways:
    """Returns all ways to recompute or offload that a layer of the config has, as keys of the section parallel."""
    # what the MLP gives is only read again by a norm behind it; only experts have rows sent to them
    names, selective = (
        tuple(
            n
            for n in given
            if (n != "mlp_out" or config.model.post_norms)
            and (n != "dispatched" or config.model.moe.experts)
        )
        for given in (ACTIVATIONS, SELECTIVE)
    )
    options: Ways = [
        {"remat": remat} for remat in ("none", "selective", "dots", "full")
    ]
    for count in range(1, len(names) + 1):
        options += [
            {"remat": "names", "remat_keep": kept}
            for kept in itertools.combinations(names, count)
        ]
    if config.mesh.pipeline == 1:
        options += [
            {
                "remat": "names",
                "remat_keep": selective[:i],
                "remat_offload": selective[i:],
            }
            for i in range(len(selective))
        ]
    return options
