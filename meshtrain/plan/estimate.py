"""The plan of a config on a cluster: memory, traffic and time put together, and what to change when it does not fit."""

import math
from dataclasses import dataclass, replace

from meshtrain.cluster.accelerators import evidence, lender
from meshtrain.cluster.cluster import Cluster, named, usual_cluster
from meshtrain.config import Config, ConfigError
from meshtrain.config.follow import as_run_on, runs_table, skips_idle_work
from meshtrain.inputs import a_config
from meshtrain.model.weights import parameters
from meshtrain.parallel.placement import stages
from meshtrain.plan import (
    compute,
    float8,
    memory,
    orthogonal,
    pipeline,
    rollouts,
    shapes,
    traffic,
)
from meshtrain.plan.compute import DEFAULT_PROFILE, FrameworkProfile
from meshtrain.plan.gradient_traffic import Transfer
from meshtrain.plan.memory import MemoryItem
from meshtrain.plan.seconds import (
    MicrobatchCosts,
    StepTime,
    chunk_seconds,
    data_seconds,
    evaluation_gathers,
    hidden_seconds,
    microbatch_costs,
)
from meshtrain.registry import Shown
from meshtrain.schedule.buffers import Depths
from meshtrain.schedule.simulation import Timeline

PART_NAMES = {
    "matmul": "matrix products",
    "attention": "attention",
    "memory": "norms, activations, sums",
    "recompute": "computed again",
    "head": "output head and loss",
    "tensor": "tensor collectives",
    "context": "context collectives",
    "expert": "expert collectives",
    "pipeline": "pipeline collectives",
    "data": "data collectives",
    "host": "copies to the host",
    "bubble": "pipeline bubble",
    "optimizer": "optimizer",
    "checkpoint": "checkpoints",
    "evaluation": "evaluation",
    "reference": "reference forward (dpo)",
    "stragglers": "waits for the slowest host",
    "synchronise": "weights laid out for decoding",
    "draw": "answers drawn (grpo)",
}
# Of a host's work in a step, over its mean: the median of nine published series of the same work a GPU on 16 to 2,304
# (`experiments/plan/dgxc.py`), which lose 0 to 5% beyond what grows with collectives.
SCATTER = 0.007


@dataclass(frozen=True, eq=False, repr=False)
class Plan(Shown):
    """A config's memory, traffic and time on a cluster.

    Sizes in bytes, times in seconds, of one device and one step.
    """

    config: Config
    cluster: Cluster
    parameters: int
    memory: list[MemoryItem]
    transfers: list[Transfer]
    costs: MicrobatchCosts
    time: StepTime
    depths: Depths
    clocks: int
    peak_in_flight: int
    bubble_fraction: float
    timeline: Timeline | None  # none without stages

    @property
    def devices(self) -> int:
        return self.config.mesh.devices

    @property
    def bytes(self) -> float:
        """Bytes that the fullest device holds."""
        return memory.total(self.memory)

    @property
    def fits(self) -> bool:
        return self.bytes <= self.cluster.accelerator.usable_bytes

    @property
    def seconds(self) -> float:
        return self.time.total

    @property
    def tokens_per_second(self) -> float:
        train = self.config.train
        return train.global_batch_size * train.sequence_length / self.seconds

    @property
    def flops_per_device(self) -> float:
        """FLOP/s of the model that each device reaches, recomputation not counted."""
        return shapes.model_flops(self.config) / self.seconds / self.devices

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation (PaLM, appendix B)."""
        return self.flops_per_device / self.cluster.accelerator.flops(
            self.config.precision.compute
        )

    @property
    def mfu_by_half(self) -> float:
        """Model FLOPs utilisation where only the scores that a causal mask leaves are counted."""
        return (
            self.mfu
            * shapes.half_model_flops(self.config)
            / shapes.model_flops(self.config)
        )

    @property
    def tokens_per_second_per_device(self) -> float:
        return self.tokens_per_second / self.devices

    @property
    def cost_per_billion_tokens(self) -> float:
        return self._price(1e9 / self.tokens_per_second)

    @property
    def cost(self) -> float:
        """Price of all steps of the config."""
        return self._price(self.seconds * self.config.train.steps)

    def _price(self, seconds: float) -> float:
        hours = seconds / 3600
        return hours * self.devices * self.cluster.price_per_device_hour

    def as_json(self) -> dict:
        """The fields that `plan --json` prints; see INTERFACE.md."""
        held = memory.sum_by_kind(self.memory)
        device = self.cluster.accelerator
        whole = lambda sizes: {name: int(nbytes) for name, nbytes in sizes}
        return {
            "parameters": self.parameters,
            "active_parameters": shapes.active_parameters(self.config.model),
            "devices": self.devices,
            "cluster": self.cluster.name,
            "accelerator": device.name,
            "efficiencies_borrowed_from": lender(device),
            "share_of_peak": {
                "products": device.efficiency.matmul,
                "evidence": evidence(device),
            },
            "per_device_bytes": whole([*held.items(), ("total", self.bytes)]),
            "memory_items": {item.name: int(item.nbytes) for item in self.memory},
            "usable_bytes": int(device.usable_bytes),
            "fits": self.fits,
            "traffic_bytes_per_step": whole(traffic.by_axis(self.transfers).items()),
            "pipeline": {
                "bubble_fraction": self.bubble_fraction,
                "peak_in_flight": self.peak_in_flight,
                "ticks": self.clocks,
            },
            "step_seconds": self.seconds,
            "step_seconds_by_part": dict(self.time.parts()),
            "bound_by": self.time.bound,
            "tokens_per_second": self.tokens_per_second,
            "flops_per_second_per_device": self.flops_per_device,
            "tokens_per_second_per_device": self.tokens_per_second_per_device,
            "mfu": self.mfu,
            "mfu_by_half": self.mfu_by_half,
            "cost": self.cost,
            "cost_per_billion_tokens": self.cost_per_billion_tokens,
        } | ({"rollout": self.rollout_json()} if rollouts.draws(self.config) else {})

    @property
    def drawn_per_second(self) -> float:
        """Tokens that all devices draw in a second of drawing, each answer taken to have `rl.answers`."""
        config = self.config
        tokens = config.train.global_batch_size * config.rl.answers / config.rl.epochs
        return tokens / self.time.draw

    def rollout_json(self) -> dict[str, float]:
        """The object `rollout` of `plan --json`: seconds a step, and bytes of a device."""
        config = self.config
        time = self.time
        return {
            "synchronise_seconds": time.synchronise,
            "draw_seconds": time.draw,
            "train_seconds": time.train,
            "drawn_tokens_per_second": self.drawn_per_second,
            "received_bytes": int(
                sum(t.sent for t in rollouts.synchronisation(config))
            ),
            "weights_bytes": int(rollouts.weights_bytes(config)),
            "cache_bytes": int(rollouts.cache_bytes(config)),
            "total_bytes": int(memory.total(memory.drawing(config))),
        }


def plan(
    config: Config,
    cluster: Cluster | str | None = None,
    profile: FrameworkProfile = DEFAULT_PROFILE,
) -> Plan:
    """Plans what each device of a config holds, sends and waits for (bytes and seconds of one step), on a cluster or
    one named as --cluster.

    Default: the cpu of this machine with run.fake_devices, else h100. Touches no device. ConfigError for a cluster that
    is not there or too small.
    """
    a_config(config, "mt.plan")
    if not isinstance(cluster, Cluster):
        cluster = named(cluster or usual_cluster(config), config.mesh.devices)
    config = as_run_on(cluster.accelerator.platform, config)
    return estimate(config, large_enough(cluster, config), profile)


def large_enough(cluster: Cluster, config: Config) -> Cluster:
    """The cluster; ConfigError if it has fewer devices than the mesh."""
    mesh = config.mesh
    if cluster.devices < mesh.devices:
        raise ConfigError(
            f"the mesh {mesh} needs {mesh.devices} devices, but cluster "
            f"{cluster.name} has {cluster.devices} ({cluster.nodes} nodes of {cluster.devices_per_node})."
        )
    return cluster


def estimate(
    config: Config, cluster: Cluster, profile: FrameworkProfile = DEFAULT_PROFILE
) -> Plan:
    """The plan of a checked config. The pipeline's time is simulated from its table."""
    costs = microbatch_costs(config, cluster, profile)
    facts = pipeline.facts(config)
    platform = cluster.accelerator.platform
    m = config.parallel.microbatches
    skips = skips_idle_work(config, platform)
    items = memory.held(config, facts, platform)
    timeline = None
    seconds = m * costs.stage
    clocks = m
    peak = 1
    bubble = 0.0
    hidden = hidden_seconds(config, cluster, costs) if profile.compiled else 0.0
    if runs_table(config):
        *sent, head = (
            chunk_seconds(config, cluster) if profile.compiled else (0.0, 0.0, 0.0)
        )
        timeline = pipeline.timeline(config, costs, profile, sent=sent)
        seconds = timeline.makespan
        clocks = timeline.table.clocks
        peak = int(timeline.peak_in_flight.max())
        bubble = timeline.bubble_fraction
        if any(sent):
            # the rest of what is sent has no cell, and is waited for
            waits = seconds
            seconds = pipeline.timeline(config, costs, profile).makespan
            counts = (timeline.table.sends >= 0).sum(axis=1).tolist()
            hidden = (
                sent[0] * counts[0] + sent[1] * counts[1] + head - (waits - seconds)
            )
    time = _step_time(config, cluster, costs, seconds, profile)
    time = replace(time, data=time.data - hidden)
    time = replace(
        time, stragglers=straggling(cluster, config.mesh.devices) * time.work
    )
    time = replace(time, evaluation=evaluation_seconds(config, cluster, costs))
    time = replace(
        time,
        checkpoint=checkpoint_seconds(config, cluster, memory.saved(items), time.total),
    )
    iterations = (
        pipeline.iterations(config, skips),
        pipeline.reference_iterations(config, skips),
    )
    return Plan(
        config=config,
        cluster=cluster,
        parameters=parameters(config.model),
        memory=items,
        transfers=traffic.transfers(config, *iterations),
        costs=costs,
        time=time,
        depths=facts.depths,
        clocks=clocks,
        peak_in_flight=peak,
        bubble_fraction=bubble,
        timeline=timeline,
    )


def estimate_by_formula(config: Config, cluster: Cluster) -> tuple[float, float]:
    """(seconds of a step, bytes of a device) by formulas alone, in lockstep with stages as long as the longest: a
    hundredth of an `estimate`.
    """
    facts = pipeline.facts(config)
    costs = microbatch_costs(config, cluster)
    seconds = pipeline.quick(config, facts, costs) - hidden_seconds(
        config, cluster, costs
    )
    nbytes = memory.total(memory.held(config, facts, cluster.accelerator.platform))
    return seconds + sum(outside_seconds(config, cluster)), nbytes


def outside_seconds(
    config: Config, cluster: Cluster, profile: FrameworkProfile = DEFAULT_PROFILE
) -> tuple[float, float, float, float, float]:
    """Seconds of a step outside the microbatches: communication over data as if nothing hid it, the optimizer, its
    state's way from the host and back, and a rollout's synchronising and drawing.
    """
    layers = stages(config).on_device
    device = cluster.accelerator
    trained = shapes.trained(config)
    data = data_seconds(config, cluster, profile)
    data *= device.efficiency.exposed if profile.overlap_data else 1.0
    optimizer = compute.optimizer(
        config, device, (trained.block * layers + trained.outer).shard, profile
    )
    if profile.rounds_weights_once:
        optimizer += layers * float8.once_bytes(config) / device.memory_rate
    data += orthogonal.transfer_seconds(config, cluster)
    optimizer += orthogonal.product_seconds(config, device)
    copied = (
        2 * 4 * shapes.optimizer_state(config, layers)
        if config.parallel.offload_optimizer
        else 0
    )
    host = copied / (cluster.host_bandwidth * 1e9)
    return data, optimizer, host, *rollouts.seconds(config, cluster)


def _step_time(
    config: Config,
    cluster: Cluster,
    costs: MicrobatchCosts,
    microbatches: float,
    profile: FrameworkProfile,
) -> StepTime:
    """The parts of a step of which all microbatches take `microbatches` seconds on the longest stage, with nothing over
    data hidden and no checkpoints.
    """
    m = config.parallel.microbatches
    layer = costs.layer
    edge = costs.edge
    layers = m * costs.layers * costs.chunks
    useful = layer.forward + layer.backward + layer.recompute * -1.0
    data, optimizer, host, *rollout = outside_seconds(config, cluster, profile)
    sends = layer.forward_sends + layer.backward_sends
    # Of what is sent within layers, the share that is waited for where pairs hide the rest.
    waited = 1.0 - pipeline.hidden(config, layer) / sends if sends else 1.0
    return StepTime(
        matmul=layers * useful.matmul,
        attention=layers * useful.attention,
        memory=layers * useful.memory,
        recompute=layers * layer.recompute.total,
        head=m * edge.head.total,
        tensor=layers * waited * (sends - layer.context_sends - layer.expert_sends)
        + m * edge.head_sends,
        context=layers * waited * layer.context_sends,
        expert=layers * waited * layer.expert_sends,
        pipeline=m * (edge.vocab_sends + 2 * costs.chunks * costs.message.waits),
        data=data,
        host=layers * (layer.forward_copies + layer.backward_copies) + host,
        bubble=microbatches - m * costs.stage + layers * (1.0 - waited) * sends,
        optimizer=optimizer,
        checkpoint=0.0,
        evaluation=0.0,
        reference=pipeline.reference(config, pipeline.facts(config), costs),
        synchronise=rollout[0],
        draw=rollout[1],
    )


def evaluation_seconds(
    config: Config, cluster: Cluster, costs: MicrobatchCosts
) -> float:
    """Seconds a step of the evaluations between steps: forwards of their batches."""
    if not config.eval.every:
        return 0.0
    chunk = costs.chunk_forward - costs.layers * costs.layer.forward_copies
    facts = pipeline.facts(config)
    batch = pipeline.forwards(config, facts, costs, chunk, costs.edge.forward)
    batch += evaluation_gathers(config, cluster, costs.layer.forward.total)
    return config.eval.batches * batch / config.eval.every


# --- the time that a step loses to its hosts: waits for the slowest of them, and checkpoints


def straggling(cluster: Cluster, devices: int) -> float:
    """The share of its work that a host waits for the slowest: of n whose times scatter as a normal distribution with
    deviation `SCATTER` the largest lies sqrt(2 ln n) deviations above the mean (Cramér 1946, section 28.6).
    """
    return SCATTER * math.sqrt(
        2 * math.log(math.ceil(devices / cluster.devices_per_node))
    )


def save_seconds(cluster: Cluster, devices: int, nbytes: float) -> tuple[float, float]:
    """Returns the seconds of a checkpoint of `nbytes` a device: the stop of training, and the write beside it.

    Training stops for all hosts to agree and for the copy to the host. The slower of a node's way to the store and the
    store itself limits the write.
    """
    hosts = math.ceil(devices / cluster.devices_per_node)
    node = nbytes * cluster.devices_per_node / (cluster.storage_bandwidth * 1e9)
    store = nbytes * devices / (cluster.storage_bandwidth_total * 1e9)
    stop = cluster.save_seconds + cluster.save_seconds_per_host * hosts
    return stop + nbytes / (cluster.host_bandwidth * 1e9), max(node, store)


def checkpoint_seconds(
    config: Config, cluster: Cluster, nbytes: float, step: float
) -> float:
    """Seconds a step for which checkpoints stop training: the copy to the host, and what of the write before is not
    done when the next one is due (`step` seconds a step).
    """
    every = config.checkpoint.every
    if not every:
        return 0.0
    copy, write = save_seconds(cluster, config.mesh.devices, nbytes)
    return (copy + max(0.0, write - every * step)) / every
