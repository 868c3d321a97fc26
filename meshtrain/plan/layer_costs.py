"""The cost of one layer: a sum of named parts of compute, and what its collectives and copies delay it.

    layer, adapters, copies, weights, recompute, float8 ──► forward, backward
    tensor, context, expert ──────────────────────────────► sends

`LayerCost` holds both sums.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

from meshtrain.cluster.accelerators import Accelerator
from meshtrain.cluster.algorithms import best
from meshtrain.cluster.cluster import Cluster
from meshtrain.config import Config
from meshtrain.config.reduce import gathers_at_use
from meshtrain.config.rl import has_reference
from meshtrain.config.stacks import stack_of_layers
from meshtrain.families import FAMILIES
from meshtrain.parallel.placement import stages
from meshtrain.plan import activations, compute, float8, shapes
from meshtrain.plan.by_stack import averaged, stack_configs
from meshtrain.plan.compute import (
    DEFAULT_PROFILE,
    FrameworkProfile,
    Layer,
    LayerShape,
    Seconds,
)
from meshtrain.plan.context import context_seconds
from meshtrain.plan.experts import EXPOSED, add_experts, expert_seconds, own_passes
from meshtrain.plan.traffic import layer_transfers, practised_count


@dataclass(frozen=True)
class LayerCost:
    """Seconds of one microbatch in one layer on one device.

    `*_sends` are its collectives over tensor, context and expert as they delay the device. `*_copies` are what it waits
    for the host: for activations, which leave while the layer goes on, but XLA has them back before its backward
    begins; and for counts of rows and launches, in other frameworks.
    """

    forward: Seconds
    backward: Seconds  # recomputation counted
    recompute: Seconds  # the recomputation alone
    weight_grad: float  # the weights' gradients alone, which are products
    forward_sends: float
    backward_sends: float
    context_sends: float  # of both, what is over context
    expert_sends: float  # likewise over expert
    forward_copies: float
    backward_copies: float
    # What the input gradient writes for a weight gradient of its own, in tables that split the two
    residuals: float
    reference: float  # dpo's forward without adapters, with its collectives
    # What of `*_sends` the other's work hides where a forward and a backward are a pair.
    forward_hidden: float
    backward_hidden: float

    @property
    def sends(self) -> float:
        """Both."""
        return self.forward_sends + self.backward_sends


class LayerPart(NamedTuple):
    """One contribution to the compute time of a layer."""

    name: str
    forward: Seconds = Seconds()
    backward: Seconds = Seconds()


@averaged
def layer_cost(
    config: Config, cluster: Cluster, profile: FrameworkProfile = DEFAULT_PROFILE
) -> LayerCost:
    """Returns the costs of a microbatch in one layer, of several kinds in the mean over a stage's slots."""
    device = cluster.accelerator
    profile = _take_kernel(config, device, profile)
    layer = _time_layer(config, cluster, profile)
    parts = _layer_parts(config, cluster, layer, profile)
    forward = sum((part.forward for part in parts), Seconds())
    backward = sum((part.backward for part in parts), Seconds())
    named = {part.name: part for part in parts}
    recompute = named["recompute"].backward
    rounding = named["float8"]
    weight_grad = (
        layer.forward.matmul * compute.trained_share(config)
        + named["adapters"].forward.matmul
        + max(0.0, rounding.backward.matmul - rounding.forward.matmul)
    )
    tensor = _tensor_sends(config, cluster, profile, weight_grad)
    context = 0.0, 0.0
    if config.mesh.context > 1:
        attention_backward = named["layer"].backward.attention + recompute.attention
        context = context_seconds(
            config, cluster, layer.forward.attention, attention_backward
        )
    expert = expert_seconds(config, cluster, profile)
    forward_sends = tensor[0] + context[0] + expert[0]
    backward_sends = tensor[1] + context[1] + expert[1]
    offload = activations.offloaded(config) / (cluster.host_bandwidth * 1e9)
    residuals = 2 * activations.weight_grad_residuals(config) / device.memory_rate
    pairs = profile.compiled and device.platform != "cpu"
    host = profile if config.model.moe.experts else DEFAULT_PROFILE
    return LayerCost(
        forward=forward,
        backward=backward,
        recompute=recompute,
        weight_grad=weight_grad,
        forward_sends=forward_sends,
        backward_sends=backward_sends,
        context_sends=sum(context),
        expert_sends=sum(expert),
        forward_copies=max(
            offload - layer.forward.total,
            host.expert_wait,
            host.expert_launch - forward.total - forward_sends,
        ),
        backward_copies=max(
            offload,
            host.expert_launch - backward.total - backward_sends,
        ),
        residuals=residuals * _is_ours_on_gpus(device, profile),
        reference=layer.forward.total + forward_sends if has_reference(config) else 0.0,
        # The products of weights' gradients hide messages of their own; of experts' messages some of each stays in the
        # open.
        forward_hidden=min(
            forward_sends - EXPOSED * expert[0], backward.total - weight_grad
        )
        * pairs,
        backward_hidden=min(backward_sends - EXPOSED * expert[1], forward.total)
        * pairs,
    )


def _take_kernel(
    config: Config, device: Accelerator, profile: FrameworkProfile
) -> FrameworkProfile:
    """Returns the profile with the kernel of attention that our program takes."""
    if (
        not _is_ours_on_gpus(device, profile)
        or activations.kernel(config, "gpu") != "fused"
    ):
        return profile
    return replace(profile, kernel=compute.FUSED)


def stage_layers(
    config: Config, cluster: Cluster, profile: FrameworkProfile = DEFAULT_PROFILE
) -> tuple[float, ...]:
    """Returns how many layers of the mean cost each virtual stage computes: where they are of one kind, its own."""
    assigned = stages(config)
    several = stack_configs(config)
    if len(several) == 1:
        return assigned.counts

    def seconds(config: Config) -> float:
        cost = layer_cost(config, cluster, profile)
        return cost.forward.total + cost.backward.total + cost.sends

    of_kinds = {stack: seconds(one) for stack, one in several}
    mean = sum(map(of_kinds.__getitem__, assigned.slots)) / assigned.longest
    work = []
    kinds = iter(stack_of_layers(config.model))
    for count in assigned.counts:
        work.append(sum(of_kinds[next(kinds)] for _ in range(count)) / mean)
    return tuple(work)


def _time_layer(config: Config, cluster: Cluster, profile: FrameworkProfile) -> Layer:
    """Returns one layer's forward, with its experts if it has any."""
    shape = LayerShape(
        config.model,
        config.precision.compute,
        shapes.microbatch_rows(config),
        config.train.sequence_length,
        config.mesh.tensor,
        config.parallel.sequence_parallel,
        config.mesh.context,
        _kernel_length(config),
        activations.gathered_ranks(config),
    )
    layer = compute.layer(shape, cluster.accelerator, profile)
    if config.model.moe.experts:
        return add_experts(config, layer, cluster, profile)
    return layer


def _kernel_length(config: Config) -> int:
    """Returns the tokens over which attention's kernel loops.

    A kernel that is called for half by half of a device's tokens loops as in a causal sequence of all of them.
    """
    if activations.splits_kernel_calls(config):
        return shapes.length(config)
    return config.train.sequence_length


def _layer_parts(
    config: Config, cluster: Cluster, layer: Layer, profile: FrameworkProfile
) -> list[LayerPart]:
    """Returns the contributions to one layer's compute time, recomputation among them."""
    device = cluster.accelerator
    adapters = compute.adapters(config, device)
    rounding = float8.differences(config, device, profile)
    ours = []
    if _is_ours_on_gpus(device, profile):
        ours.append(LayerPart("copies", *_copies(config, device)))
        if config.model.moe.experts:
            ours.append(LayerPart("experts", *own_passes(config, cluster)))
    backward = compute.layer_backward(
        layer.forward,
        device,
        compute.looped(_kernel_length(config), FAMILIES[config.model.family].causal),
        profile,
        compute.trained_share(config),
    )
    # Matmuls that are computed again are rounded again.
    remat = config.parallel.remat != "none"
    recompute = compute.recomputed(config, layer, profile) + adapters * remat
    again = recompute.matmul / layer.forward.matmul
    recompute += Seconds(
        again * rounding.forward.matmul, 0.0, remat * rounding.forward.memory
    )
    return [
        LayerPart("layer", layer.forward, backward),
        LayerPart("adapters", adapters, adapters * 2),
        *ours,
        LayerPart("weights", backward=compute.weight_passes(config, device, profile)),
        LayerPart("recompute", backward=recompute),
        LayerPart("float8", rounding.forward, rounding.backward),
    ]


def _is_ours_on_gpus(device: Accelerator, profile: FrameworkProfile) -> bool:
    """Returns whether a step runs our compiled program on GPUs."""
    return profile.compiled and device.platform == "gpu"


def _tensor_sends(
    config: Config, cluster: Cluster, profile: FrameworkProfile, weight_grad: float
) -> tuple[float, float]:
    """(forward, backward) seconds that one layer's collectives over tensor delay the device.

    On accelerators our program computes gradients of weights, which nothing waits for, beside some of the backward's.
    """
    group = cluster.axis("tensor", config.mesh)
    device = cluster.accelerator
    exposed = device.efficiency.exposed_tensor if profile.overlap_tensor else 1.0
    hides = profile.compiled and device.platform != "cpu"
    seconds = {"forward": 0.0, "backward": 0.0, "hideable": 0.0}
    for moment, t in layer_transfers(config):
        count = t.count / stages(config).longest
        if not profile.compiled:
            count = practised_count(t.what, count, profile)
        spent = count * best(t.kind, group, t.nbytes).seconds * exposed
        seconds["hideable" if t.hides and hides else moment] += spent
    return seconds["forward"], seconds["backward"] + max(
        0.0, seconds["hideable"] - weight_grad
    )


def _copies(config: Config, device: Accelerator) -> tuple[Seconds, Seconds]:
    """Copies that our compiled program makes in one layer and microbatch, forward and backward, as seen in it
    (`experiments.plan.timed`).

    Each copy is a read and a write: of the layer's weights out of the stacked ones, forward and backward; of what it
    keeps into the stash; and of several sequences that were gathered over tensor, or are to be scattered, into the
    order of the other side.
    """
    size = shapes.compute_size(config)
    sliced = 0.0
    if not gathers_at_use(config):
        _, rounded = float8.held_once(config)
        sliced = 2 * (size * shapes.resident(config).block.full - (size - 1) * rounded)
    moved = {
        "forward": sliced + 2 * activations.kept(config, config.parallel.remat),
        "backward": sliced,
    }
    if (
        config.parallel.sequence_parallel
        and config.mesh.tensor > 1
        and shapes.microbatch_rows(config) > 1
    ):
        for moment, transfer in layer_transfers(config):
            moved[moment] += (
                2 * transfer.nbytes * transfer.count / stages(config).longest
            )
    return Seconds(memory=moved["forward"] / device.memory_rate), Seconds(
        memory=moved["backward"] / device.memory_rate
    )
