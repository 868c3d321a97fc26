"""How gradients travel over data: the sections `parallel.reduce` and `parallel.sync`."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from meshtrain.allreduce import ALGORITHMS
from meshtrain.compression import COMPRESSIONS
from meshtrain.config.key import Resume, key
from meshtrain.config.rl import has_reference
from meshtrain.schedule.generators import has_table

# Of top-k's ratio: a number with its place takes twice the bytes of a float32.
MOST_RATIO = 0.5


def _feedback(config: Any) -> bool:
    return (
        COMPRESSIONS[config.parallel.reduce.compression].fed_back
        and not config.parallel.sync.every
    )


def _compresses(config: Any) -> bool:
    return config.parallel.reduce.compression != "none"


# A key keeps together what it says.
# fmt: off
@dataclass(frozen=True)
class ReduceConfig:
    algorithm: str = key(
        "psum", "how gradients are summed over data: psum (what XLA and NCCL choose), or one of our own programs of "
                "messages, to learn from",
        one_of=ALGORITHMS
    )
    compression: str = key(
        "none", "what gradients are sent as: bfloat16; float8, int8 and int4 in blocks with a scale each; topk, the "
                "largest alone; powersgd, "
        "two thin matrices (Vogels et al. 2019)", one_of=COMPRESSIONS
    )
    over: Literal["data", "islands"] = key("data", "what compression is for: sums over data, or those across islands "
                                                   "alone", counts=_compresses)
    block: int = key(256, "float8, int8, int4: numbers that share a scale", least=16, most=65536, counts=_compresses)
    ratio: float = key(
        0.01, "topk: share of a gradient's numbers that is sent",
        above=0.0, most=1.0, counts=_compresses
    )
    rank: int = key(4, "powersgd: columns of its two matrices", least=1, most=4096, counts=_compresses)
    feedback: bool = key(
        None, "keep what compression left out, and add it to the next step's gradient; null: true for int4, topk and "
              "powersgd",
        follows=_feedback, counts=_compresses
    )


@dataclass(frozen=True)
class SyncConfig:
    every: int = key(
        0, "steps that islands take by themselves before they are brought together (local SGD, DiLoCo: Douillard et "
           "al. 2023); 0: every "
        "step sums gradients over all islands", least=0, resume=Resume.REFUSED
    )
    outer_learning_rate: float = key(0.7, "of the outer step, SGD with Nesterov momentum along the mean of what the "
                                          "islands moved", above=0.0)
    outer_momentum: float = key(0.9, "of the outer step; 0: none", least=0.0, most=0.99999)
    start: int = key(
        0, "steps with gradients summed over all islands before the first one alone",
        least=0, resume=Resume.REFUSED
    )
    fragments: int = key(
        1, "parts of the model that are brought together one after the other, each every `every` steps (Streaming "
           "DiLoCo: Douillard et al. "
        "2025)", least=1, resume=Resume.REFUSED
    )
    delay: int = key(0, "steps that islands go on while what they sent is under way", least=0, resume=Resume.REFUSED)
# fmt: on


# When the arrays of a step travel over data: the program, the planner and the checks all ask here.


def gathers_at_use(config: Any) -> bool:
    """Returns whether weights are gathered where they are used, forward and backward: ZeRO-3 without holding (see
    `parallel.zero`).
    """
    return (
        config.parallel.zero_stage == 3
        and config.mesh.shards > 1
        and not config.parallel.zero_hold
    )


def scatters_at_use(config: Any) -> bool:
    """Returns whether gradients are scattered where they are made, in the backward: ZeRO-2 and 3 without holding."""
    return (
        config.parallel.zero_stage >= 2
        and config.mesh.shards > 1
        and not config.parallel.zero_hold
    )


def overlaps_reduce_scatter(config: Any) -> bool:
    """Returns whether gradients that are held over the step are scattered over data as soon as they are complete, while
    the device goes on.

    A compression with a memory needs one reduction of all of a weight's gradient. With several islands the second sum
    has to wait for the first, and XLA then hides neither.
    """
    scatters = (
        config.parallel.zero_stage > 0
        and config.mesh.shards > 1
        and config.mesh.islands == 1
    )
    return (
        scatters
        and not scatters_at_use(config)
        and not keeps_feedback(config)
        and not sums_in_place(config)
    )


def sends_by_table(config: Any) -> bool:
    """Returns whether the schedule's table says when a chunk's weights are gathered over data and its gradient is
    reduced (see `schedule.table`): both are held over the step, and a stage has several chunks. dpo's reference needs
    all weights before. Adapters alone have little to send, and their base, which is never gathered, would be copied
    beside.
    """
    chunked = config.mesh.pipeline > 1 and config.parallel.virtual_stages > 1
    gathers = not config.lora.rank or config.parallel.zero_stage == 3
    return (
        chunked
        and gathers
        and overlaps_reduce_scatter(config)
        and not has_reference(config)
    )


def sums_in_place(config: Any) -> bool:
    """Returns whether whole gradients of several microbatches on one stage are summed in bfloat16, to save memory: on
    accelerators a layer's are added where the sums lie, and reduced once activations and weights have gone. Reduced
    early they would lie there twice.
    """
    parallel = config.parallel
    by_table = has_table(parallel.schedule, config.mesh.pipeline, parallel.microbatches)
    several = parallel.microbatches > 1 and not by_table
    return (
        several
        and config.precision.gradient_sums != "float32"
        and not scatters_at_use(config)
    )


def keeps_feedback(config: Any) -> bool:
    """Returns whether compression keeps something from step to step: what it left out, or PowerSGD's Q."""
    reduce = config.parallel.reduce
    return reduce.compression != "none" and (
        reduce.feedback or COMPRESSIONS[reduce.compression].low_rank
    )


def problems(config: Any) -> Iterator[str]:
    """Yields a sentence on gradients that cannot travel so."""
    yield from _algorithm_problems(config)
    yield from _compression_problems(config)
    yield from _sync_problems(config)


def _algorithm_problems(config: Any) -> Iterator[str]:
    mesh = config.mesh
    zero = config.parallel.zero_stage
    reduce = config.parallel.reduce
    named = f"parallel.reduce.algorithm is {reduce.algorithm}"
    algorithm = ALGORITHMS[reduce.algorithm]
    if reduce.algorithm == "psum" or mesh.data == 1:
        return
    if reduce.compression != "none":
        other = f"parallel.reduce.compression {reduce.compression}, which has an exchange of its own"
        yield f"{named}, and {other}; leave one of them out."
    if algorithm.by_levels and mesh.islands == 1:
        yield f"{named}, which sums in islands first, but mesh.islands is 1; give mesh.islands, or algorithm ring."
    if not zero or mesh.shards == 1:
        return
    # On CPU a stage that is idle skips its work, and a message is one of all devices: those that skip it would be
    # waited for.
    if zero >= 2 and mesh.pipeline > 1 and not config.parallel.zero_hold:
        but = (
            f"but with parallel.zero_stage {zero} and mesh.pipeline {mesh.pipeline} each stage scatters gradients "
            "by itself"
        )
        yield f"{named}, whose messages all stages send together, {but}; set parallel.zero_hold to true."
    if why := algorithm.no_scatter(mesh.shards):
        but = f"but parallel.zero_stage is {zero} and {mesh.shards} data ranks shard its state"
        yield f"{named}, {why}, {but}; give zero_stage 0, or algorithm {algorithm.instead}."


def _compression_problems(config: Any) -> Iterator[str]:
    reduce = config.parallel.reduce
    zero = config.parallel.zero_stage
    named = f"parallel.reduce.compression {reduce.compression}"
    if (
        reduce.compression != "none"
        and reduce.over == "data"
        and config.mesh.data > 1
        and not zero
    ):
        islands = (
            ", or parallel.reduce.over to islands" if config.mesh.islands > 1 else ""
        )
        scattered = "for gradients that ZeRO scatters, but parallel.zero_stage is 0"
        yield f"{named} over data is {scattered}; set it to 1, 2 or 3{islands}."
    # What keeps something of a gradient needs the whole of it, once a step; across islands its shard is enough.
    if keeps_feedback(config) and reduce.over == "data" and scatters_at_use(config):
        what = "with parallel.reduce.feedback" if reduce.feedback else "with its Q"
        but = f"but parallel.zero_stage {zero} scatters them wherever they are made"
        yield (
            f"{named} {what} compresses a step's gradients once, {but}; set parallel.zero_hold to true, or "
            "zero_stage to 1."
        )
    if reduce.compression == "topk" and reduce.ratio > MOST_RATIO:
        but = "but topk sends 8 bytes for a number and its place, which float32 needs 4 for"
        give = f"give at most {MOST_RATIO}, or leave parallel.reduce.compression out"
        yield f"parallel.reduce.ratio is {reduce.ratio}, {but}; {give}."


def _sync_problems(config: Any) -> Iterator[str]:
    sync = config.parallel.sync
    reduce = config.parallel.reduce
    islands = config.mesh.islands
    layers = config.model.layers
    if not sync.every:
        for name, unused in (("start", 0), ("fragments", 1), ("delay", 0)):
            if (value := getattr(sync, name)) != unused:
                but = "but parallel.sync.every is 0, so that islands never step by themselves"
                yield f"parallel.sync.{name} is {value}, {but}; give every."
        return
    if islands == 1:
        but = "but mesh.islands is 1: there is nothing to bring together"
        yield f"parallel.sync.every is {sync.every}, {but}; give at least 2 islands."
    if sync.delay >= sync.every:
        late = f"parallel.sync.delay {sync.delay} is not less than parallel.sync.every {sync.every}"
        yield f"{late}: what is sent must arrive before it is sent again; legal are at most {sync.every - 1}."
    if sync.fragments > (most := min(sync.every, layers)):
        more = (
            f"more than parallel.sync.every {sync.every} steps or model.layers {layers}"
        )
        own = "each has a step and a layer of its own"
        yield f"parallel.sync.fragments {sync.fragments} is {more}: {own}; legal are at most {most}."
    if reduce.compression != "none" and (
        reduce.feedback or not COMPRESSIONS[reduce.compression].in_blocks
    ):
        yield (
            f"parallel.reduce.compression {reduce.compression} keeps from step to step what it left out, but with "
            "parallel.sync.every islands send what they moved, not gradients; give bfloat16, float8, int8 or int4 with "
            "parallel.reduce.feedback: false."
        )


def notes(config: Any) -> Iterator[str]:
    """Yields a sentence on what is legal but costs something, or has no use."""
    reduce = config.parallel.reduce
    mesh = config.mesh
    sync = config.parallel.sync
    no_use = f"parallel.reduce.compression {reduce.compression} has no use"
    if reduce.compression != "none" and mesh.data == 1:
        yield f"{no_use} with mesh.data 1: no gradients are sent."
    elif (
        reduce.compression != "none" and reduce.over == "islands" and mesh.islands == 1
    ):
        yield f"{no_use} over islands with mesh.islands 1: none is far from another."
    if not sync.every:
        return
    steps = config.train.steps
    left = (config.train.steps - sync.start) % sync.every
    if steps <= sync.start:
        yield (
            f"parallel.sync.start {sync.start} is not less than train.steps {steps}: islands never step by "
            "themselves."
        )
    elif lost := left or sync.delay:
        yield (
            f"the last {lost} steps of islands by themselves never reach the shared model: train.steps - "
            "parallel.sync.start is "
            f"{steps - sync.start}, parallel.sync.every {sync.every}, parallel.sync.delay {sync.delay}."
        )
