"""The cost of a layer's experts: rows and slots, bytes of activations, messages over the axis `expert`, seconds.

    dispatch      forward                                backward
    all_gather    rows gathered, outputs scattered       their cotangents, the other way; rows again if recomputed
    all_to_all    rows sent to their experts, and back   likewise
      nodes       rows gathered over nodes, outputs scattered, and all_to_all within each; the same the other way

In our program only a pair's other half hides some: they stand between a layer's products. Others send a row to a node
once (`FrameworkProfile`).
"""

import dataclasses
import math
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

from meshtrain.cluster.algorithms import ALL_GATHER, ALL_TO_ALL, REDUCE_SCATTER
from meshtrain.cluster.cluster import Cluster
from meshtrain.cluster.topology import Legs
from meshtrain.config import Config
from meshtrain.config.follow import expert_room, round_up
from meshtrain.config.mesh import EXPERT, TENSOR
from meshtrain.config.model import MoeConfig
from meshtrain.config.reduce import scatters_at_use
from meshtrain.families import FAMILIES
from meshtrain.model.weights import EXPERT_BLOCK, lie_side_by_side
from meshtrain.parallel.placement import expert_axes, expert_nodes, expert_ranks, stages
from meshtrain.plan import shapes
from meshtrain.plan.by_stack import averaged
from meshtrain.plan.compute import FrameworkProfile, Layer, Seconds, product
from meshtrain.plan.gradient_traffic import FLOAT32, Moment, Transfer, layer_waits
from meshtrain.plan.shapes import compute_size

CHOICE = 2 * FLOAT32  # bytes of a chosen expert and its weight
# Of a pair's messages, with room for 1.25 of an even load: as in the compiled program (`experiments.plan.timed`).
EXPOSED = 0.7
# Seconds before kernels that send a row once to a node send anything: all tell each other how many rows they will.
# (deepseek-ai/DeepEP, branch hybrid-ep, docs/README_Hybrid-EP.md, H100s: a dispatch takes 0.5 to 0.9 ms more than its
# kernel, a combine 0.3; issue 397: DeepEP's notify takes 0.10 to 0.16.)
NOTIFY = 1.5e-4


@dataclasses.dataclass(frozen=True)
class ExpertRows:
    """Rows of one microbatch in one layer on one device."""

    here: int  # that this device's tokens send: one for each expert of each
    # Of the arrays that travel: of all_gather one for each token, of all ranks
    sent: int
    room: int  # for which there is room, of all ranks
    slots: int  # with the zeros that fill blocks up


def rows(config: Config) -> ExpertRows:
    """Returns the rows of a config with experts."""
    moe = config.model.moe
    experts = config.parallel.experts
    ranks = expert_ranks(config)
    nodes = expert_nodes(config)
    tokens = _tokens(config)
    local = moe.experts // ranks
    room = expert_room(experts, ranks // nodes, local, tokens, moe.top_k, nodes)
    sent = room if experts.dispatch == "all_to_all" else ranks * tokens
    return ExpertRows(
        tokens * moe.top_k,
        sent,
        room,
        round_up(room + local * (EXPERT_BLOCK - 1), EXPERT_BLOCK),
    )


def width(config: Config) -> int:
    """Returns the columns of an expert on one device."""
    return math.ceil(
        config.model.expert_width
        / (1 if TENSOR in expert_axes(config) else config.mesh.tensor)
    )


def _tokens(config: Config) -> int:
    """Returns the tokens that a device's router is given: where experts lie over tensor too, its part of each
    sequence.
    """
    return shapes.tokens(config) // (
        config.mesh.tensor if TENSOR in expert_axes(config) else 1
    )


def add_experts(
    config: Config, layer: Layer, cluster: Cluster, profile: FrameworkProfile
) -> Layer:
    """Returns the layer with the time of its router and its experts: `profile.imbalance` says how many more rows than
    the mean the fullest device has.
    """
    moe = config.model.moe
    device = cluster.accelerator
    dtype = config.precision.compute
    tokens = _tokens(config)
    d = config.model.d_model
    f = width(config)
    size = shapes.itemsize(dtype)
    local = moe.experts // expert_ranks(config)
    r = rows(config)
    used = min(r.room, r.here * profile.imbalance) + local * EXPERT_BLOCK / 2
    each = used / local
    # our kernels skip blocks that are not in use, but XLA's passes over memory around them do not
    touched = r.slots if profile.compiled and device.platform == "gpu" else used

    def passes(elements: float) -> Seconds:
        return Seconds(memory=size * elements / device.memory_rate)

    router = Seconds(matmul=product(device, "float32", tokens, d, moe.experts))
    # rows are read and written into slots, before all_to_all into what is sent too, and each slot of a token read once
    # more
    copies = 1
    if config.mesh.expert > 1 and config.parallel.experts.dispatch == "all_to_all":
        copies = 0 if profile.token_per_node else 2
    biases = [
        FAMILIES[config.model.family].biased_experts * nbytes / 2
        for nbytes in profile.bias_bytes
    ]
    return dataclasses.replace(
        layer,
        dispatched=passes(2 * copies * touched * d),
        mlp_in=layer.mlp_in
        + router
        + Seconds(matmul=local * 2 * product(device, dtype, each, d, f))
        + passes(biases[0] * 2 * touched * f),
        mlp_hidden=layer.mlp_hidden + passes(4 * touched * f),
        mlp_out=layer.mlp_out
        + Seconds(matmul=local * product(device, dtype, each, f, d))
        + passes(
            (max(0, 2 * copies - 1) * touched + tokens) * d + biases[1] * touched * d
        ),
    )


def own_passes(config: Config, cluster: Cluster) -> tuple[Seconds, Seconds]:
    """Returns what our program on GPUs takes, forward and backward, beside one and two times the passes of
    `add_experts`, as seen in it (`experiments.plan.timed`).

    Rows to slots and back move as much backward as forward, which is less than twice. The weights of gate and up are
    put side by side, or two gradients of the rows are added up.
    """
    f = width(config)
    slots = rows(config).slots
    local = config.model.moe.experts // expert_ranks(config)
    numbers = shapes.compute_size(config) * config.model.d_model
    second = numbers / cluster.accelerator.memory_rate
    sent = config.mesh.expert > 1 and config.parallel.experts.dispatch == "all_to_all"
    less = (7 if sent else 3) * slots
    forward = backward = 4 * local * f
    if config.precision.matmul == "float8" or not lie_side_by_side(slots, local, f):
        forward, backward = 0, 3 * slots
    return Seconds(memory=second * forward), Seconds(memory=second * (backward - less))


def kept(
    config: Config,
    remat: str,
    names: tuple[str, ...],
    taken: float,
    looped: bool = False,
) -> float:
    """Returns the bytes that one layer's experts keep of one microbatch for the backward: rows in slots, what the
    products into the experts give, the hidden activations before and after their weights, and the router's logits;
    `taken` of an element that a product takes. Where products are `looped` less is kept, rows as they came.
    """
    d = config.model.d_model
    f = width(config)
    slots = rows(config).slots
    size = compute_size(config)
    by_name = {
        "dispatched": slots * d,
        "mlp_in": 2 * slots * f,
        "mlp_hidden": slots * f,
    }
    if looped:
        by_name = {"dispatched": _tokens(config) * d}
        slots = 0
    if remat == "full":
        return 0.0
    if remat in ("names", "selective"):
        return float(size * sum(by_name.get(name, 0) for name in names))
    router = FLOAT32 * _tokens(config) * (d + 3 * config.model.moe.experts)
    # rounded rows, and the hidden activations that the last product takes
    return float(size * slots * 3 * f + taken * slots * (d + f) + router)


def loops(config: Config, platform: str) -> bool:
    """Returns whether products are loops (`model.expert_loops`)."""
    return platform != "gpu" and config.precision.matmul != "float8"


@averaged
def spared(config: Config) -> float:
    """Returns the bytes of `kept` that one layer does not keep where products are loops."""
    if not config.model.moe.experts:
        return 0.0
    parallel = config.parallel
    size = compute_size(config)
    every = config, parallel.remat, parallel.names_kept, size
    return kept(*every) - kept(*every, looped=True)


def transient_bytes(config: Config, platform: str) -> float:
    """Returns the bytes that one layer's backward has at hand in its experts: cotangents in slots, and rows as they
    travel; and what is computed again.
    """
    d = config.model.d_model
    f = width(config)
    r = rows(config)
    if loops(config, platform):
        # weights and their gradients, which loops read and sum; what is scattered is counted there
        arrays = 3 if scatters_at_use(config) else 6
        weights = arrays * config.model.moe.experts // expert_ranks(config) * d * f
        return float(FLOAT32 * (r.slots * (d + 3 * f) + weights))
    size = compute_size(config)
    again = config.parallel.remat != "none"
    nodes = expert_nodes(config)
    gathered = 2 * nodes * _tokens(config) * d * (nodes > 1)
    travelling = 2 * r.sent * d + gathered if config.mesh.expert > 1 else 0
    return float(size * (r.slots * (2 * d + 4 * f + again * (d + 4 * f)) + travelling))


class _Hop(NamedTuple):
    """A way of rows to their experts, or to their nodes, and back: the bytes of whole arrays, and their choices."""

    out: str
    back: str
    where: str
    nbytes: float
    choices: float
    size: int
    legs: Legs


def expert_transfers(config: Config) -> list[Moment]:
    """Collectives over the axis `expert` of a chunk's layers, in one pass."""
    spread = config.mesh.expert > 1 and config.model.moe.experts
    if spread:
        return [entry for hop in _hops(config) for entry in _transfers(config, hop)]
    return []


def _hops(config: Config) -> list[_Hop]:
    """Returns the ways that a row takes, one after the other."""
    r = rows(config)
    ranks = expert_ranks(config)
    nodes = expert_nodes(config)
    top_k = config.model.moe.top_k
    number = config.model.d_model * compute_size(config)
    within, between = _node_legs(config, ranks // nodes)
    if config.parallel.experts.dispatch == "all_gather":
        nbytes = r.sent * number
        return [
            _Hop(ALL_GATHER, REDUCE_SCATTER, "", nbytes, r.sent * top_k, ranks, within)
        ]
    where = " within nodes" if nodes > 1 else ""
    last = _Hop(
        ALL_TO_ALL, ALL_TO_ALL, where, r.sent * number, r.sent, ranks // nodes, within
    )
    if nodes == 1:
        return [last]
    gathered = nodes * _tokens(config)
    names = ALL_GATHER, REDUCE_SCATTER, " between nodes"
    return [_Hop(*names, gathered * number, gathered * top_k, nodes, between), last]


def _node_legs(config: Config, ranks: int) -> tuple[Legs, Legs]:
    """Returns the legs of the group that a node's `ranks` are, and of those of one number in all nodes."""
    within = []
    between = []
    for axis in reversed(expert_axes(config)):
        size = config.mesh.ways(axis)
        stride = config.mesh.stride(axis)
        inside = math.gcd(size, ranks)
        ranks //= inside
        within.append((inside, stride))
        between.append((size // inside, stride * inside))
    return tuple(within), tuple(between)


def _transfers(config: Config, hop: _Hop) -> Iterator[Moment]:
    layers = stages(config).longest
    data = hop.nbytes
    choices = hop.choices

    def transfer(moment: str, kind: str, what: str, nbytes: float) -> Moment:
        what += hop.where
        return moment, Transfer(
            EXPERT, kind, what, nbytes, layers, hop.size, legs=hop.legs
        )

    yield transfer("forward", hop.out, "rows to their experts", data)
    yield transfer("forward", hop.out, "choices and weights to them", choices * CHOICE)
    yield transfer("forward", hop.back, "experts' outputs back", data)
    if config.parallel.remat != "none":
        if "dispatched" not in config.parallel.names_kept:
            yield transfer("backward", hop.out, "rows to their experts again", data)
        yield transfer(
            "backward", hop.out, "choices and weights again", choices * CHOICE
        )
    yield transfer("backward", hop.out, "cotangents of outputs to the experts", data)
    yield transfer("backward", hop.back, "cotangents of rows back", data)
    yield transfer(
        "backward", hop.back, "cotangents of weights back", choices * FLOAT32
    )


def expert_seconds(
    config: Config, cluster: Cluster, profile: FrameworkProfile
) -> tuple[float, float]:
    """Returns the seconds, forward and backward, that one layer waits for its messages over `expert`."""
    seconds = partial(_once_a_node, config, cluster) if profile.token_per_node else None
    exposed = (
        cluster.accelerator.efficiency.exposed_tensor if profile.overlap_expert else 1.0
    )
    forward, backward = layer_waits(config, cluster, expert_transfers(config), seconds)
    return exposed * forward, exposed * backward


def _once_a_node(config: Config, cluster: Cluster, transfer: Transfer) -> float:
    """Returns the seconds of what all_to_all sends of each token to each of its experts, sent level by level to each
    block with one of them once; those of other blocks go on from there, beside what still arrives.
    """
    group = transfer.group(cluster, config.mesh)
    moe = config.model.moe
    seconds = 0.0
    inside = 1
    of_tokens = transfer.nbytes * _tokens(config) / rows(config).sent
    for hop in group.hops:
        blocks = group.size / inside / hop.fan * (hop.fan - 1)
        nbytes = of_tokens * blocks * reached(moe, moe.experts * inside // group.size)
        level = hop.latency + nbytes / hop.bytes_per_second
        seconds = max(seconds, level)
        inside *= hop.fan
    return transfer.count * (NOTIFY + seconds)


def reached(moe: MoeConfig, experts: int) -> float:
    """Returns the chance that a token has one of so many neighbouring experts among those it chooses, all being as
    likely as others.
    """
    groups, taken = moe.groups or (1, 1)
    size = moe.experts // groups
    pool = taken * size
    whole = max(1, experts // size)
    ways = math.comb(groups, taken) * math.comb(pool, moe.top_k)
    missed = sum(
        math.comb(whole, n)
        * math.comb(groups - whole, taken - n)
        * math.comb(pool - n * min(experts, size), moe.top_k)
        for n in range(min(whole, taken) + 1)
    )
    return 1 - missed / ways
