"""The plan of a config on a cluster: memory, traffic and time put together, and what to change when it does not fit."""

from dataclasses import dataclass, replace

from meshtrain.config import Config, ConfigError
from meshtrain.given import a_config
from meshtrain.model.weights import parameters
from meshtrain.parallel.placement import stages
from meshtrain.plan import compute, memory, shapes, ticks, traffic
from meshtrain.plan.cluster.accelerators import lender
from meshtrain.plan.cluster.cluster import Cluster, named
from meshtrain.plan.compute import OURS, Practice
from meshtrain.plan.flow import Flow
from meshtrain.plan.memory import Item
from meshtrain.plan.seconds import Pieces, StepTime, checkpoint_seconds, data_seconds, hidden_seconds, pieces_of
from meshtrain.schedule.buffers import Depths
from meshtrain.schedule.simulate import Timeline
from meshtrain.shown import Shown

PART_NAMES = {
    "matmul": "matrix products", "attention": "attention", "memory": "norms, activations, sums", "recompute": "computed again",
    "head": "output head and loss", "tensor": "tensor collectives", "pipeline": "pipeline collectives", "data": "data collectives",
    "host": "copies to the host", "bubble": "pipeline bubble", "optimizer": "optimizer", "checkpoint": "checkpoints",
    "reference": "reference forward (dpo)",
}  # fmt: skip


@dataclass(frozen=True, eq=False, repr=False)
class Plan(Shown):
    """What a config holds, sends and takes on a cluster. Sizes in bytes, times in seconds, of one device and one step."""

    config: Config
    cluster: Cluster
    parameters: int
    memory: list[Item]
    flows: list[Flow]
    pieces: Pieces
    time: StepTime
    depths: Depths
    ticks: int
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
        return self.flops_per_device / self.cluster.accelerator.flops(self.config.precision.compute)

    @property
    def cost(self) -> float:
        """Price of all steps of the config."""
        hours = self.seconds * self.config.train.steps / 3600
        return hours * self.devices * self.cluster.price_per_device_hour

    def as_json(self) -> dict:
        """The fields that `plan --json` prints; see INTERFACE.md."""
        held = memory.by_kind(self.memory)
        return {
            "parameters": self.parameters,
            "devices": self.devices,
            "cluster": self.cluster.name,
            "accelerator": self.cluster.accelerator.name,
            "efficiencies_borrowed_from": lender(self.cluster.accelerator),
            "per_device_bytes": {**{k: int(v) for k, v in held.items()}, "total": int(self.bytes)},
            "memory_items": {item.name: int(item.nbytes) for item in self.memory},
            "usable_bytes": int(self.cluster.accelerator.usable_bytes),
            "fits": self.fits,
            "traffic_bytes_per_step": {k: int(v) for k, v in traffic.by_axis(self.flows).items()},
            "pipeline": {
                "bubble_fraction": self.bubble_fraction,
                "peak_in_flight": self.peak_in_flight,
                "ticks": self.ticks,
            },
            "step_seconds": self.seconds,
            "step_seconds_by_part": dict(self.time.parts()),
            "bound_by": self.time.bound,
            "tokens_per_second": self.tokens_per_second,
            "flops_per_second_per_device": self.flops_per_device,
            "mfu": self.mfu,
            "cost": self.cost,
        }


def plan(config: Config, cluster: Cluster | str | None = None, practice: Practice = OURS) -> Plan:
    """What each device of a config holds, sends and waits for (bytes and seconds of one step), on a cluster or one named as --cluster.

    Default: the cpu of this machine with run.fake_devices, else h100. Touches no device. ConfigError for a cluster that is not
    there or too small.
    """
    a_config(config, "mt.plan")
    if not isinstance(cluster, Cluster):
        cluster = named(cluster or usual_cluster(config), config.mesh.devices)
    return estimate(config, large_enough(cluster, config), practice)


def usual_cluster(config: Config) -> str:
    """What a run is planned for when no cluster is named."""
    return config.mesh.cluster or ("cpu" if config.run.fake_devices else "h100")


def large_enough(cluster: Cluster, config: Config) -> Cluster:
    """The cluster; ConfigError if it has fewer devices than the mesh."""
    mesh = config.mesh
    if cluster.devices < mesh.devices:
        raise ConfigError(
            f"the mesh {mesh} needs {mesh.devices} devices, but cluster "
            f"{cluster.name} has {cluster.devices} ({cluster.nodes} nodes of {cluster.devices_per_node})."
        )
    return cluster


def estimate(config: Config, cluster: Cluster, practice: Practice = OURS) -> Plan:
    """The plan of a checked config. The pipeline's time is simulated from its table."""
    pieces = pieces_of(config, cluster, practice)
    facts = ticks.facts(config)
    platform = cluster.accelerator.platform
    skips = platform == "cpu"
    held = memory.items(config, facts, platform)
    line = None
    if config.mesh.pipeline > 1:
        line = ticks.timeline(config, pieces, practice)
        microbatches, turns = line.makespan, line.table.ticks
        peak, bubble = int(line.peak_in_flight.max()), line.bubble_fraction
    else:
        m = config.parallel.microbatches
        microbatches, turns, peak, bubble = m * stage_seconds(config, pieces), m, 1, 0.0
    spent = assemble(config, cluster, pieces, microbatches, practice)
    spent = replace(spent, checkpoint=checkpoint_seconds(config, cluster, memory.saved(held), spent.total))
    return Plan(
        config=config,
        cluster=cluster,
        parameters=parameters(config.model),
        memory=held,
        flows=traffic.flows(config, ticks.trips(config, skips), ticks.reference_trips(config, skips)),
        pieces=pieces,
        time=spent,
        depths=facts.depths,
        ticks=turns,
        peak_in_flight=peak,
        bubble_fraction=bubble,
        timeline=line,
    )


def stage_seconds(config: Config, pieces: Pieces) -> float:
    """One microbatch through all chunks of the longest stage, forward, head and backward."""
    return stages(config).chunks * (pieces.chunk_forward + pieces.chunk_backward) + pieces.head_total


def outside_seconds(config: Config, cluster: Cluster, practice: Practice = OURS) -> float:
    """Seconds of a step outside the microbatches: communication over data as if nothing hid it, the optimizer, and its state's way from
    the host and back."""
    return sum(_outside(config, cluster, practice))


def _outside(config: Config, cluster: Cluster, practice: Practice) -> tuple[float, float, float]:
    stage, device = stages(config), cluster.accelerator
    held = shapes.trained(config)
    data = data_seconds(config, cluster, practice)
    data *= device.efficiency.exposed if practice.overlap_data else 1.0
    copied = 2 * 4 * shapes.optimizer_state(config, stage.on_device) if config.parallel.offload_optimizer else 0
    host = copied / (cluster.host_bandwidth * 1e9)
    return data, compute.optimizer(config, device, (held.block * stage.on_device + held.outer).shard, practice), host


def assemble(
    config: Config, cluster: Cluster, pieces: Pieces, microbatches: float, practice: Practice = OURS
) -> StepTime:
    """The parts of a step of which all microbatches take `microbatches` seconds on the longest stage."""
    stage, m = stages(config), config.parallel.microbatches
    layers = m * stage.on_device
    useful = pieces.forward + pieces.backward + pieces.again * -1.0
    data, optimizer, host = _outside(config, cluster, practice)
    data -= hidden_seconds(config, cluster, pieces) if practice.compiled else 0.0
    return StepTime(
        matmul=layers * useful.matmul,
        attention=layers * useful.attention,
        memory=layers * useful.memory,
        recompute=layers * pieces.again.total,
        head=m * pieces.head.total,
        tensor=layers * (pieces.forward_sends + pieces.backward_sends) + m * pieces.head_sends,
        pipeline=m * (pieces.vocab_sends + 2 * stage.chunks * pieces.waits),
        data=data,
        host=layers * (pieces.forward_copies + pieces.backward_copies) + host,
        bubble=microbatches - m * stage_seconds(config, pieces),
        optimizer=optimizer,
        checkpoint=0.0,
        reference=ticks.reference(config, ticks.facts(config), pieces),
    )
