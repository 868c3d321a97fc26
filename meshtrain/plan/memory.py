"""The memory of a device while a step runs, item by item.

State between steps is sharded as in ZeRO (Rajbhandari et al. 2020, section 5). Sizes are of the longest stage;
`activations` has those of a layer.
"""

import math
import operator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from meshtrain.cluster.cluster import Cluster
from meshtrain.config import Config
from meshtrain.config.follow import runs_table
from meshtrain.config.model import patches_of
from meshtrain.config.reduce import (
    gathers_at_use,
    scatters_at_use,
    sends_by_table,
    sums_in_place,
)
from meshtrain.config.rl import has_reference
from meshtrain.families import FAMILIES
from meshtrain.parallel.float8 import float8_share
from meshtrain.parallel.placement import stages, zero_ways
from meshtrain.parallel.reduce.sizes import feedback_bytes
from meshtrain.plan import (
    activations,
    experts,
    float8,
    gradient_traffic,
    orthogonal,
    prediction,
    rollouts,
    shapes,
)
from meshtrain.plan.activations import FLOAT32
from meshtrain.plan.by_stack import averaged, last_config, stack_configs
from meshtrain.plan.shapes import Elements, compute_size
from meshtrain.schedule.buffers import Depths
from meshtrain.schedule.facts import ScheduleFacts

# Kept free of what a program may have: of 79 compiled programs of every kind 95% hold less than this above the formula
# (`python -m experiments.plan --compile`).
MARGIN = 0.04


@dataclass(frozen=True)
class MemoryItem:
    """Bytes that a device holds for one purpose; `kind` is the group that the report sums them by."""

    name: str
    kind: str  # parameters, gradients, optimizer_state or activations
    nbytes: float
    between_steps: bool = False
    frozen: bool = False


Items = list[MemoryItem]
Moments = dict[str, Items]
LayerBytes = tuple[float, float]  # as `layer_bytes` has them

# What compression of gradients keeps from step to step, see `parallel.reduce.sizes`.
KEPT = {"residual": "residual of compressed gradients", "q": "PowerSGD's Q"}
KINDS = ("parameters", "gradients", "optimizer_state", "activations")


def items(config: Config, facts: ScheduleFacts, platform: str = "gpu") -> Items:
    """Returns the items on a device at the fullest moment of a step, with the schedule's `facts` (`pipeline.facts`)."""
    return fullest(config, facts, platform)[1]


def held(config: Config, facts: ScheduleFacts, platform: str = "gpu") -> Items:
    """Returns the items at the fullest moment of a step, or while answers or samples are drawn, if more is held
    then.
    """
    return max(items(config, facts, platform), drawing(config), key=total)


def drawing(config: Config) -> Items:
    """Returns the items while answers or samples are drawn, beside which there are no gradients and no activations;
    none where none are drawn.
    """
    drawn = [MemoryItem(name, *of) for name, of in rollouts.held(config).items()]
    return [*between_steps(config), *drawn] if drawn else []


def fullest(
    config: Config, facts: ScheduleFacts, platform: str = "gpu"
) -> tuple[str, Items]:
    """The moment of a step at which a device holds most, and what it holds then."""
    through = [*_through(config, platform), *kept(config, facts, platform)]
    always = [*between_steps(config), *_images(config), *through]
    moments = passing(config, facts, platform)
    if iterated := orthogonal.held_bytes(config, platform):
        # Weights, sums and activations are gone by then, and of gradients on CPUs half where they lie as shards.
        shards = (4 - 2 * scatters_at_use(config)) * (platform == "cpu")
        gradients = shards * _elements(config, trained=True).shard
        held = max(0.0, gradients + iterated - total(through))
        moments["update"] = [
            MemoryItem("matrices as they are iterated", "optimizer_state", held)
        ]
    name = max(moments, key=lambda name: total([*always, *moments[name]]))
    return name, [item for item in [*always, *moments[name]] if item.nbytes]


def spared(cluster: Cluster) -> float:
    """The bytes of a device that a search uses, and pairs that nobody named."""
    return cluster.accelerator.usable_bytes * (1 - MARGIN)


def sum_by_kind(items: Items) -> dict[str, float]:
    return {kind: sum(i.nbytes for i in items if i.kind == kind) for kind in KINDS}


def total(items: Items) -> float:
    return sum(item.nbytes for item in items)


def saved(items: Items) -> float:
    """Bytes of a checkpoint, but for what is frozen, which later ones only link to (see `checkpoint.frozen`)."""
    return sum(item.nbytes for item in items if item.between_steps and not item.frozen)


def state(config: Config, platform: str = "gpu") -> Items:
    """Masters, optimizer state, weights and gradient sums: what does not depend on the activations."""
    return [*between_steps(config), *_through(config, platform)]


def _through(config: Config, platform: str) -> Items:
    """Returns the items that forward and backward hold all the while."""
    copies = _copies(config, platform)
    weights = [replace(item, nbytes=copies * item.nbytes) for item in _weights(config)]
    frozen = sum(item.nbytes for item in between_steps(config) if item.frozen)
    again = (copies - 1) * frozen
    return [
        *weights,
        MemoryItem("frozen weights in float32", "parameters", again),
        *_sums(config),
    ]


def _copies(config: Config, platform: str) -> int:
    """Returns how many times the bytes of 16-bit weights and activations a platform holds.

    CPUs multiply in float32, to which XLA turns all layers' before a loop reads them; clocks carry 16 bits beside.
    """
    if platform != "cpu" or compute_size(config) == FLOAT32:
        return 1
    return 3 if runs_table(config) else 2


def between_steps(config: Config) -> Items:
    """Masters, optimizer state, and what compression of gradients keeps."""
    state = (
        0
        if config.parallel.offload_optimizer
        else 4 * shapes.optimizer_state(config, stages(config).on_device)
    )
    trained = _elements(config, trained=True)
    frozen = _elements(config) - trained
    return [
        MemoryItem("float32 masters", "parameters", 4 * trained.shard, True),
        MemoryItem(f"{config.optimizer.name} state", "optimizer_state", state, True),
        MemoryItem(
            "frozen weights",
            "parameters",
            compute_size(config) * frozen.shard - _saved(config)[1],
            True,
            frozen=True,
        ),
        *(
            MemoryItem(KEPT[name], "gradients", n, True)
            for name, n in feedback_bytes(config).items()
            if n
        ),
        *(
            MemoryItem(name, "parameters", 4 * trained.shard, True)
            for name in gradient_traffic.sync_copies(config)
        ),
    ]


def _elements(config: Config, trained: bool = False) -> Elements:
    """All weights on one device, or those that are trained."""
    stage = stages(config)
    resident = shapes.trained(config) if trained else shapes.resident(config)
    return resident.block * stage.on_device + resident.outer


def _saved(config: Config) -> tuple[float, float]:
    """Bytes of all layers' frozen weights that float8 saves: gathered, and as they are held."""
    full, shard = float8.saved(config)
    return full * stages(config).on_device, shard * stages(config).on_device


def _weights(config: Config) -> Items:
    resident = _elements(config, trained=True)
    size = compute_size(config)
    rounded, replaced = (n * stages(config).on_device for n in float8.held_once(config))
    halved = size * (size < FLOAT32)
    if gathers_at_use(config):
        weights = {
            "weights in compute dtype, sharded": halved * (resident.shard - replaced),
            "weights in float8, sharded": rounded,
        }
        return _list_items("parameters", weights)
    gathers = config.parallel.zero_stage == 3 and config.mesh.shards > 1
    frozen = _elements(config).full - resident.full
    own = size if zero_ways(config) > 1 else halved
    weights = {
        "weights in float8": rounded,
        "frozen weights, gathered": gathers * (size * frozen - _saved(config)[0]),
        "weights in compute dtype": own * (resident.full - replaced),
        "weights in compute dtype, sharded": scatters_at_use(config)
        * halved
        * resident.shard,
    }
    return _list_items("parameters", weights)


def _list_items(kind: str, nbytes: dict[str, Any]) -> Items:
    """Returns items of a kind, from their bytes by name."""
    return [MemoryItem(name, kind, n) for name, n in nbytes.items()]


def _sums(config: Config) -> Items:
    """Gradient sums over the microbatches; with one microbatch and one stage there is nothing to sum."""
    if config.parallel.microbatches == 1 and config.mesh.pipeline == 1:
        return []
    resident = _elements(config, trained=True)
    name = f"{config.precision.gradient_sums} gradient sums"
    size = shapes.itemsize(config.precision.gradient_sums)
    if scatters_at_use(config):
        return [MemoryItem(f"{name}, sharded", "gradients", size * resident.shard)]
    return [MemoryItem(name, "gradients", size * resident.full)]


def _images(config: Config) -> Items:
    """Images of a batch; tokens are not worth a line."""
    if not FAMILIES[config.model.family].images:
        return []
    rows = shapes.microbatch_rows(config) * config.parallel.microbatches
    nbytes = 4 * rows * math.prod(patches_of(config.model))
    return _list_items("activations", {"images of the batch": nbytes})


def layer_bytes(config: Config) -> LayerBytes:
    """Returns the bytes that one layer keeps of a microbatch for its backward, and for its weights' gradients alone."""
    return activations.kept(
        config, config.parallel.remat
    ), activations.weight_grad_residuals(config)


def kept(
    config: Config,
    facts: ScheduleFacts,
    platform: str = "gpu",
    layer_keeps: LayerBytes | None = None,
    stage: Any = None,
) -> Items:
    """Activations that the microbatches in flight keep for their backward, and those that wait between stages;
    `layer_keeps`: `layer_bytes`, where it is known already; `stage`: see `passing`.
    """
    stage = stage or stages(config)
    stream = shapes.stream(config) * compute_size(config)
    layer, residuals = _adapt_layer(
        config, platform, *layer_keeps or layer_bytes(config)
    )
    # of dpo's reference, whose forward comes first and holds less than a step does, all that is left
    tokens = shapes.tokens(config) * config.parallel.microbatches
    losses = {"losses under the reference": 4 * tokens * has_reference(config)}
    cpu = platform == "cpu"
    if not runs_table(config):
        # The memory of CPUs is the host's too, and their program of adapters has the layers' inputs twice, unless it
        # computes them again.
        twice = cpu and config.lora.rank > 0 and config.parallel.remat == "none"
        nbytes = {
            "activations kept for the backward": layer,
            "activations in the host's memory": cpu * activations.offloaded(config),
            "inputs of the layers, again": twice * stream,
        }
        of_layers = {name: stage.on_device * n for name, n in nbytes.items()}
        return _list_items("activations", of_layers | losses)
    # On CPU idle slots are skipped, and all is carried through all clocks. Elsewhere what only forwards take is gone in
    # backwards after them.
    spare = facts.spare
    if not _alike(config):
        spare = spare._replace(stash=np.maximum(spare.stash, 0))
    depths = facts.depths if cpu else Depths(*map(operator.add, facts.depths, spare))
    f_inbox = depths.f_inbox * (cpu or facts.together > 1)
    nbytes = {
        "activations kept for the backward": depths.stash * stage.longest * layer,
        "what weight gradients wait for": depths.cot * stage.longest * residuals,
        "activations waiting between stages": (f_inbox + depths.b_inbox) * stream,
        # what the last F and B made and the embedding that the next F takes
        "activations on their way": 3 * stream,
    }
    return _list_items("activations", nbytes | losses)


def _alike(config: Config) -> bool:
    """Returns whether the layers of a chunk are one segment (`parallel.layout`)."""
    precision = config.precision
    skips = precision.matmul != "compute" and any(precision.float8_skip)
    return len(stack_configs(config)) == 1 and not skips


def _adapt_layer(
    config: Config, platform: str, layer: float, residuals: float
) -> LayerBytes:
    """Returns what `layer_bytes` does, as a platform holds it."""
    copies = _copies(config, platform)
    spared = experts.loops(config, platform) * experts.spared(config)
    layer = copies * (layer - spared)
    residuals *= copies
    if platform == "cpu" and runs_table(config):
        return _add_conditional(config, layer, residuals)
    return layer, residuals


def _add_conditional(config: Config, layer: float, residuals: float) -> LayerBytes:
    """Returns what `layer_bytes` does where CPUs skip the padding of uneven stages by a conditional.

    Weights and input leave the branch that is taken, and its input gradient comes with the weights'.
    """
    if len(set(stages(config).counts)) == 1 or len(stack_configs(config)) > 1:
        return layer, residuals
    size = compute_size(config)
    elements = shapes.resident(config).block.full + shapes.stream(config)
    layer += size * elements * (config.parallel.remat == "none")
    return layer, size * shapes.trained(config).block.full


def passing(
    config: Config, facts: ScheduleFacts, platform: str = "gpu", stage: Any = None
) -> Moments:
    """Lists what is held only for a moment, by moment.

    The items alive at once were read off XLA's live ranges; `python -m experiments.plan --compile` shows how well they
    hold. For many schedules at once, as searches ask, `facts` and `stage` (the layers of `placement.Stages`) are
    arrays, and so are the bytes.
    """
    if not runs_table(config):
        return _unpipelined_moments(config, platform)
    return _pipelined_moments(config, facts, platform, stage or stages(config))


def _unpipelined_moments(config: Config, platform: str) -> Moments:
    """Moments of a step without pipeline stages.

    XLA makes the gradient of the output head, which nothing waits for, at the very end: until then its factors, hidden
    states and the logits' cotangent, are held through the backward. In a loop over microbatches it does so only where
    collectives stand between, and not on CPUs.
    """
    size = compute_size(config)
    several = config.parallel.microbatches > 1
    gathers = gathers_at_use(config)
    trained = shapes.trained(config)
    vocabulary = shapes.resident(config).vocabulary
    chunked = shapes.loss_chunks(config) > 1
    # In a loop over periods XLA makes it before them, in the dtype that is scattered.
    period = len(stack_configs(config)) > 1 and len(config.model.pattern)
    between = gathers and platform != "cpu"
    may_wait = (between or not several) and not (chunked or period)
    waits = bool(trained.vocabulary.full) and may_wait
    logits, *head = _head_items(config, platform, _hidden(config))
    in_place = platform != "cpu" and sums_in_place(config)
    # Those of layers in float8 lie there twice while they are put beside those of skipped ones.
    share = float8_share(config) % 1 if platform == "cpu" else 0.0
    nbytes = 0.0 if in_place else (1 + share) * _new_gradients(config)
    gradients = _list_items("gradients", {"new gradients of the layers": nbytes})
    # The embedding's, in float32 and set to zero early, and the output head's, where it does not wait; of chunks CPUs
    # add it to the sums at once.
    embedding = 4 * trained.tokens.full if gathers != several else 0
    added = chunked and platform == "cpu"
    head_size = 4 if period and scatters_at_use(config) else size
    late = 0 if waits or added else head_size * trained.vocabulary.largest
    new = _list_items(
        "gradients", {"new gradients of the vocabulary": embedding + late}
    )
    zeros = MemoryItem(
        "gradient of the embedding, zeros", "gradients", period and embedding
    )
    early = gradients if _sets_early(config, platform) else []
    # CPUs gather embedding and head before the loop over microbatches, and hold them through it.
    through = gathers and several and platform == "cpu"
    elements = vocabulary.full if through else vocabulary.largest
    gathered = MemoryItem(
        "gathered output head", "parameters", size * elements * gathers
    )
    largest = MemoryItem(
        "gradient of the output head",
        "gradients",
        (size + 4 * scatters_at_use(config)) * trained.vocabulary.largest,
    )
    weights, scattered = _layer_items(config, period)
    work = _work(config, platform)
    always = [gathered, _summed(config), *early]
    return {
        "loss": [logits, *head, zeros, *always],
        "further predictions": [
            *always,
            *_predictions(config, platform, [logits, *head]),
        ],
        "loss head": [
            *head,
            gathered,
            *(new if several and not waits else [largest]),
            *early,
        ],
        "backward": [
            *gradients,
            *new,
            *[gathered] * through,
            weights,
            work,
            scattered,
            *(head if waits else []),
        ],
    }


def _work(config: Config, platform: str) -> MemoryItem:
    nbytes = activations.work(config, platform)
    return MemoryItem("work of one layer", "activations", nbytes)


def _sets_early(config: Config, platform: str) -> bool:
    """Returns whether the layers' new gradients are set to zero before the head."""
    remat = config.parallel.remat
    several = config.parallel.microbatches > 1
    if remat == "full" or activations.kernel(config, platform) == "fused":
        return True
    return several and (config.mesh.tensor > 1 or remat not in ("dots", "names"))


def _layer_items(config: Config, period: int = 0) -> Items:
    """Returns the items for a layer's weights as they are gathered, and for its gradients before they are scattered;
    those of a period's layers all wait until it ends.
    """
    kinds = [one for _, one in stack_configs(config)]
    weights = (
        gathers_at_use(config)
        * compute_size(config)
        * shapes.resident(config).block.largest
    )
    largest = max(shapes.trained(one).block.full for one in kinds)
    full = period * _chunk_trained(config).block.full or largest
    gradients = scatters_at_use(config) * 4 * full
    return [
        MemoryItem("gathered weights of a layer", "parameters", weights),
        MemoryItem("gradients of a layer, to be scattered", "gradients", gradients),
    ]


def _head_items(config: Config, platform: str, hidden: float) -> Items:
    """Returns the items for the logits, their cotangent, and so many bytes of hidden states; CPUs write the logits less
    their largest beside them.
    """
    cpu = platform == "cpu"
    nbytes = {
        "logits": _logits(config, 8 if cpu else 4),
        "cotangent of the logits": _logits(config, 4 if cpu else compute_size(config)),
        "hidden states at the head": hidden,
    }
    return _list_items("activations", nbytes)


def _pipelined_moments(
    config: Config, facts: ScheduleFacts, platform: str, stage: Any
) -> Moments:
    """Moments of a clock: a chunk goes forward, another backward, and the loss head between them.

    Layers write what they keep, and add their gradients, where these lie (see `pipeline.stage`): of a chunk nothing is
    there twice.
    """
    size = compute_size(config)
    chunked = shapes.loss_chunks(config) > 1
    always = _layer_items(config)
    # Their cotangent waits for the gradient of the head, which XLA makes at the end, see _unpipelined_moments; a
    # conditional of CPUs makes it at once.
    waits = not chunked and platform != "cpu"
    read = _hidden(config) if chunked else size * _read(config)
    logits, *head = _head_items(config, platform, read)
    work = _work(config, platform)
    # All buffers of the clocks are there already when the last weight has been gathered, and lies there a second time,
    # in another order.
    degree = zero_ways(config)
    gathers = degree > 1 and not gathers_at_use(config)
    weight = size * _largest_gathered(config, stage) if gathers else 0
    gathering = MemoryItem(
        "a weight as it is gathered, its shard", "parameters", weight * (1 + 2 / degree)
    )
    # While a pair's backward is in the MLP: the stream as a product of the forward takes it, and gives it.
    stream = 2 * size * shapes.tokens(config) * config.model.d_model * facts.paired
    pair = MemoryItem("work of one layer's forward beside it", "activations", stream)
    of_head = [logits, *head]
    further = _predictions(config, platform, of_head)
    backward = [*always, *(head if waits else []), work, pair]
    moments = {
        "gathering": [gathering],
        "loss": [*always, *of_head, _summed(config)],
        "further predictions": [*always, *further, _summed(config)],
        "backward": backward,
    }
    if platform == "cpu" or not sends_by_table(config):
        return moments
    weights, *sent = _sent_items(config, stage)
    return moments | {"gathering": [weights, work], "reducing": [*sent, work, pair]}


def _largest_gathered(config: Config, stage: Any) -> Any:
    """Returns the elements of the weight of a stack that is the largest, all its layers on a device together."""
    several = stack_configs(config)
    if len(several) == 1:
        return _gathered(config).largest * stage.on_device
    places = stages(config).places
    return max(_gathered(one).largest * places(stack) for stack, one in several)


def _gathered(config: Config) -> Any:
    """Returns the sizes of a layer's weights that are gathered: of all, or of those that are trained."""
    return (shapes.resident if config.parallel.zero_stage == 3 else shapes.trained)(
        config
    ).block


# in the mean over a chunk's slots
_chunk_gathered = averaged(_gathered)
_chunk_trained = averaged(shapes.trained)


def _sent_items(config: Config, stage: Any) -> Items:
    """Returns the items for what travels beside the clocks, and so is there twice."""
    trained = shapes.trained(config)
    weights = compute_size(config) * _chunk_gathered(config).full * stage.longest
    of_chunk = _chunk_trained(config).block.full * stage.longest
    full = of_chunk + trained.head.full
    sent = shapes.itemsize(config.precision.reduce) * full
    shards = 4 * trained.block.shard * stage.on_device
    gradients = {
        "gradients of a chunk and the head, as they are sent": sent,
        "gradients that have been reduced": shards,
    }
    return [
        MemoryItem("weights of a chunk, as they arrive", "parameters", weights),
        *_list_items("gradients", gradients),
    ]


def _predictions(config: Config, platform: str, head: Items) -> Items:
    """Returns the items for further predictions in their backward: what they keep, and the work of a layer.

    Nothing of the `head` is left where the backward waits until the layer is computed again, unless all heads wait for
    sums over tensor that XLA has joined. Elsewhere all depths are worked on together.
    """
    if not config.model.mtp:
        return []
    last = last_config(config)
    together = config.parallel.remat == "none"
    work = (config.model.mtp if together else 1) * activations.work(last, platform)
    trained = shapes.trained(config)
    size = compute_size(config)
    # of each depth a gradient of the embedding in float32, and of the head
    tables = config.model.mtp * (
        4 * trained.tokens.full + size * trained.vocabulary.largest
    )
    gathered = gathers_at_use(config) * size * shapes.resident(config).predictions.full
    # in float32 where they are scattered
    new = (4 if scatters_at_use(config) else size) * trained.predictions.full
    kept = prediction.kept_bytes(last)
    return [
        *(
            head
            if together or (config.mesh.tensor > 1 and shapes.loss_chunks(config) == 1)
            else []
        ),
        *_list_items(
            "activations",
            {
                "activations of further predictions": kept,
                "work of a further prediction": work,
            },
        ),
        MemoryItem("gathered weights of further predictions", "parameters", gathered),
        MemoryItem("new gradients of further predictions", "gradients", tables + new),
    ]


def _logits(config: Config, size: int) -> float:
    chunk = shapes.loss_chunk(config)
    # chunks are of one head after the other; else XLA joins the sums of all heads, which then are there together
    heads = 1
    if config.model.mtp and shapes.loss_chunks(config) == 1:
        heads += config.model.mtp
    return heads * size * chunk * shapes.vocabulary_rows(config)


def _summed(config: Config) -> MemoryItem:
    """Returns the item for the sum of the output head's gradients, if the loss is computed by chunks."""
    several = shapes.loss_chunks(config) > 1
    nbytes = 4 * shapes.trained(config).vocabulary.largest if several else 0
    return MemoryItem("float32 gradient of the output head", "gradients", nbytes)


def _read(config: Config) -> int:
    """Elements of the stream that the head reads."""
    return shapes.read(config.model, shapes.tokens(config)) * config.model.d_model


def _hidden(config: Config) -> float:
    """The last layer's output, normalised, and its cotangent; by chunks the output as it is, and its cotangent."""
    if shapes.loss_chunks(config) > 1:
        return 2 * compute_size(config) * shapes.stream(config)
    return 3 * compute_size(config) * _read(config)


def _new_gradients(config: Config) -> float:
    """One microbatch's gradients of a chunk's layers, stacked."""
    block = _chunk_trained(config).block
    return (
        compute_size(config)
        * (block.shard if scatters_at_use(config) else block.full)
        * stages(config).longest
    )
