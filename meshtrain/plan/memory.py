"""What a device holds while a step runs, item by item.

State between steps is sharded as in ZeRO (Rajbhandari et al. 2020, section 5). Sizes are of the longest stage; `activations`
has those of a layer.
"""

import math
import operator
from dataclasses import dataclass

from meshtrain.config import Config
from meshtrain.config.model import patches_of
from meshtrain.families import FAMILIES
from meshtrain.parallel.placement import gathers_at_use, scatters_at_use, stages, zero_ways
from meshtrain.parallel.reduce.kept import nbytes as kept_by_compression
from meshtrain.plan import activations, bringing, shapes
from meshtrain.plan.shapes import Held
from meshtrain.schedule.buffers import Depths
from meshtrain.schedule.facts import Facts


@dataclass(frozen=True)
class Item:
    """Bytes that a device holds for one purpose; `kind` is the group that the report sums them by."""

    name: str
    kind: str  # parameters, gradients, optimizer_state or activations
    nbytes: float
    between_steps: bool = False
    frozen: bool = False


# What compression of gradients keeps from step to step, see `parallel.reduce.kept`.
KEPT = {"residual": "residual of compressed gradients", "q": "PowerSGD's Q"}
KINDS = ("parameters", "gradients", "optimizer_state", "activations")


def zero_state(
    elements: float, stage: int, data: int, weight: float = 2, gradient: float = 2, state: float = 12
) -> float:
    """Bytes of model state per device in mixed-precision training (ZeRO, figure 1): `state` counts masters and two moments."""
    ways = [data if stage >= level else 1 for level in (3, 2, 1)]
    return elements * (weight / ways[0] + gradient / ways[1] + state / ways[2])


def items(config: Config, facts: Facts, platform: str = "gpu") -> list[Item]:
    """Everything that a device holds at the fullest moment of a step, with the schedule's `facts` (see `ticks.facts`)."""
    return fullest(config, facts, platform)[1]


def fullest(config: Config, facts: Facts, platform: str = "gpu") -> tuple[str, list[Item]]:
    """The moment of a step at which a device holds most, and what it holds then."""
    always = [*state(config), *_images(config), *kept(config, facts, platform)]
    moments = {
        name: [i for i in [*always, *found] if i.nbytes] for name, found in passing(config, facts, platform).items()
    }
    return max(moments.items(), key=lambda moment: total(moment[1]))


def by_kind(found: list[Item]) -> dict[str, float]:
    return {kind: sum(i.nbytes for i in found if i.kind == kind) for kind in KINDS}


def total(found: list[Item]) -> float:
    return sum(item.nbytes for item in found)


def saved(found: list[Item]) -> float:
    """Bytes of a checkpoint, but for what is frozen, which later ones only link to (see `checkpoint.frozen`)."""
    return sum(item.nbytes for item in found if item.between_steps and not item.frozen)


def state(config: Config) -> list[Item]:
    """Masters, optimizer state, weights and gradient sums: what does not depend on the activations."""
    return [*between_steps(config), *_weights(config), *_sums(config)]


def between_steps(config: Config) -> list[Item]:
    """Masters, optimizer state, and what compression of gradients keeps."""
    state = 0 if config.parallel.offload_optimizer else 4 * shapes.optimizer_state(config, stages(config).on_device)
    trained = _elements(config, trained=True)
    frozen = _elements(config) - trained
    return [
        Item("float32 masters", "parameters", 4 * trained.shard, True),
        Item(f"{config.optimizer.name} state", "optimizer_state", state, True),
        Item("frozen weights", "parameters", _itemsize(config) * frozen.shard, True, frozen=True),
        *[
            Item(KEPT[name], "gradients", nbytes, True)
            for name, nbytes in kept_by_compression(config).items()
            if nbytes
        ],
        *(Item(name, "parameters", 4 * trained.shard, True) for name in bringing.copies(config)),
    ]


def _elements(config: Config, trained: bool = False) -> Held:
    """All weights on one device, or those that are trained."""
    stage = stages(config)
    held = shapes.trained(config) if trained else shapes.held(config)
    return held.block * stage.on_device + held.outer


def _weights(config: Config) -> list[Item]:
    held, size = _elements(config, trained=True), shapes.itemsize(config.precision.compute)
    if gathers_at_use(config):
        return [Item("weights in compute dtype, sharded", "parameters", size * held.shard if size < 4 else 0)]
    found = []
    if config.parallel.zero_stage == 3 and config.mesh.shards > 1:
        frozen = _elements(config) - held
        found.append(Item("frozen weights, gathered", "parameters", size * frozen.whole))
    if size < 4 or zero_ways(config) > 1:
        found.append(Item("weights in compute dtype", "parameters", size * held.whole))
    if scatters_at_use(config) and size < 4:
        found.append(Item("weights in compute dtype, sharded", "parameters", size * held.shard))
    return found


def _sums(config: Config) -> list[Item]:
    """Gradient sums over the microbatches, in float32; with one microbatch and one stage there is nothing to sum."""
    if config.parallel.microbatches == 1 and config.mesh.pipeline == 1:
        return []
    held = _elements(config, trained=True)
    if scatters_at_use(config):
        return [Item("float32 gradient sums, sharded", "gradients", 4 * held.shard)]
    return [Item("float32 gradient sums", "gradients", 4 * held.whole)]


def _images(config: Config) -> list[Item]:
    """Those of a batch; tokens are not worth a line."""
    if not FAMILIES[config.model.family].images:
        return []
    rows = shapes.sequences(config) * config.parallel.microbatches
    return [Item("images of the batch", "activations", 4 * rows * math.prod(patches_of(config.model)))]


def kept(config: Config, facts: Facts, platform: str = "gpu") -> list[Item]:
    """What the microbatches in flight keep for their backward, and what waits between stages."""
    stage, parallel = stages(config), config.parallel
    stream = shapes.stream(config) * shapes.itemsize(config.precision.compute)
    layer = activations.kept(config, parallel.remat)
    # All that dpo's reference leaves: its forward comes first, and holds less than a step does, of which it is a part.
    losses = 4 * shapes.tokens(config) * parallel.microbatches if config.train.objective == "dpo" else 0
    reference = Item("losses under the reference", "activations", losses)
    if config.mesh.pipeline == 1:
        return [Item("activations kept for the backward", "activations", stage.on_device * layer), reference]
    cpu = platform == "cpu"
    # On CPU idle slots are skipped, and all is carried through all ticks. Elsewhere what only forwards take is gone in backwards after them.
    depths = facts.depths if cpu else Depths(*map(operator.add, facts.depths, facts.spare))
    f_inbox = depths.f_inbox if cpu or facts.together > 1 else 0
    waiting = depths.cot * stage.longest * activations.left(config)
    return [
        Item("activations kept for the backward", "activations", depths.stash * stage.longest * layer),
        Item("what weight gradients wait for", "activations", waiting),
        Item("activations waiting between stages", "activations", (f_inbox + depths.b_inbox) * stream),
        # what the last F and B made and the embedding that the next F takes
        Item("activations on their way", "activations", 3 * stream),
        reference,
    ]


def passing(config: Config, facts: Facts, platform: str = "gpu") -> dict[str, list[Item]]:
    """What is held only for a moment, by moment.

    What lives at once in them was read off XLA's live ranges; `experiments/bench_planner.py --compile` shows how well it holds.
    """
    return _of_stages(config, facts, platform) if config.mesh.pipeline > 1 else _of_one_stage(config, platform)


def _of_one_stage(config: Config, platform: str) -> dict[str, list[Item]]:
    """Moments of a step without pipeline stages.

    XLA makes the gradient of the output head, which nothing waits for, at the very end: until then its factors, hidden states and
    the logits' cotangent, are held through the backward. In a loop over microbatches it does so only where collectives stand between.
    """
    size, tensor, several = _itemsize(config), config.mesh.tensor, config.parallel.microbatches > 1
    gathers, scatters = gathers_at_use(config), scatters_at_use(config)
    held, trained = shapes.held(config), shapes.trained(config)
    block, vocabulary = held.block, held.vocabulary
    waits = bool(trained.vocabulary.whole) and (gathers or not several)
    logits = Item("logits", "activations", _logits(config, 4))
    head = [
        Item("cotangent of the logits", "activations", _logits(config, size)),
        Item("hidden states at the head", "activations", _hidden(config)),
    ]
    gradients = [Item("new gradients of the layers", "gradients", _new_gradients(config))]
    # The embedding's, in float32 and set to zero early, and the output head's, where it does not wait.
    embedding = 4 * trained.tokens.whole if gathers != several else 0
    late = 0 if waits else size * trained.vocabulary.largest
    made = [Item("new gradients of the vocabulary", "gradients", embedding + late)]
    remat = config.parallel.remat
    # They are set to zero before the head.
    early = remat == "full" or (several and (tensor > 1 or remat not in ("dots", "names")))
    early = early or activations.kernel(config, platform) == "fused"
    gathered = Item("gathered output head", "parameters", size * vocabulary.largest if gathers else 0)
    largest = Item("gradient of the output head", "gradients", (size + 4 * scatters) * trained.vocabulary.largest)
    layer = [
        Item("gathered weights of a layer", "parameters", size * block.largest if gathers else 0),
        Item("work of one layer", "activations", activations.work(config, platform)),
        Item("gradients of a layer, to be scattered", "gradients", 4 * trained.block.whole if scatters else 0),
    ]
    return {
        "loss": [logits, *head, gathered, *(gradients if early else [])],
        "loss head": [*head, gathered, *(made if several and not waits else [largest]), *(gradients if early else [])],
        "backward": [*gradients, *made, *layer, *(head if waits else [])],
    }


def _of_stages(config: Config, facts: Facts, platform: str) -> dict[str, list[Item]]:
    """Moments of a tick: a chunk goes forward, another backward, and the loss head between them.

    Layers write what they keep, and add their gradients, where these lie (see `pipeline.stage`): of a chunk nothing is there twice.
    """
    size, gathers, scatters = _itemsize(config), gathers_at_use(config), scatters_at_use(config)
    block, trained = shapes.held(config).block, shapes.trained(config).block
    always = [
        Item("gathered weights of a layer", "parameters", size * block.largest if gathers else 0),
        Item("gradients of a layer, to be scattered", "gradients", 4 * trained.whole if scatters else 0),
    ]
    # Their cotangent waits for the gradient of the head, which XLA makes at the end, see _of_one_stage.
    logits = Item("logits", "activations", _logits(config, 4))
    head = [
        Item("cotangent of the logits", "activations", _logits(config, size)),
        Item("hidden states at the head", "activations", size * _read(config)),
    ]
    work = Item("work of one layer", "activations", activations.work(config, platform))
    # All buffers of the ticks are there already when the last weight has been gathered, and lies there a second time, in another order.
    ways = zero_ways(config)
    gathered = block if config.parallel.zero_stage == 3 else trained
    weight = size * gathered.largest * stages(config).on_device if ways > 1 and not gathers else 0
    gathering = Item("a weight as it is gathered, its shard", "parameters", weight * (1 + 2 / ways))
    return {"gathering": [gathering], "loss": [*always, logits, *head], "backward": [*always, *head, work]}


def _itemsize(config: Config) -> int:
    return shapes.itemsize(config.precision.compute)


def _logits(config: Config, size: int) -> float:
    return size * shapes.labels(config.model, shapes.tokens(config)) * shapes.vocabulary_rows(config)


def _read(config: Config) -> int:
    """Elements of the stream that the head reads."""
    return shapes.read(config.model, shapes.tokens(config)) * config.model.d_model


def _hidden(config: Config) -> float:
    """The last layer's output, normalised, and its cotangent."""
    return 3 * _itemsize(config) * _read(config)


def _new_gradients(config: Config) -> float:
    """One microbatch's gradients of a chunk's layers, stacked."""
    stage = stages(config)
    block = shapes.trained(config).block
    return _itemsize(config) * (block.shard if scatters_at_use(config) else block.whole) * stage.longest
