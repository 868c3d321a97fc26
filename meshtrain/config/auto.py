"""Resolves `auto`: the value that a key takes which nobody has set, one function a key.

    parallel.virtual_stages      the most chunks of equal size, for a schedule that nobody named
    parallel.schedule            interleaved, 1f1b, or a paired schedule where messages can be hidden
    parallel.context_strategy    the strategy with the shortest planned time per layer
    parallel.experts.dispatch    whichever sends less

Each function begins with its rule.
"""

from collections.abc import Iterator
from typing import Any

from meshtrain.config.key import Followed
from meshtrain.config.stacks import even_parts
from meshtrain.errors import listed_divisors
from meshtrain.registry import late
from meshtrain.schedule.generators import PAIRED, chosen_chunks, has_table, legal_chunks

AUTO = "auto"
# What parallel.schedule: auto stands for without pairs: with several chunks a stage, and with one.
CHUNKED = "interleaved"
PLAIN = "1f1b"

# The planner's choices, each with its reason: (config) -> (value, why).
planned_strategy = late("meshtrain.plan.choices:context_strategy")
planned_schedule = late("meshtrain.plan.choices:schedule")


def default_chunks(config: Any) -> int:
    """Returns the chunks of a stage by default: as many as parallel.layer_split is for, else the best number,
    whose chunks are alike."""
    parallel = config.parallel
    stages = config.mesh.pipeline
    if parallel.layer_split is not None and stages > 1:
        return max(1, len(parallel.layer_split) // stages)
    return chosen_chunks(even_parts(config.model), stages, parallel.microbatches)


def virtual_stages(config: Any) -> int:
    """A schedule that somebody named has its own number of chunks; any other takes the default.

    A resolved config names its schedule too. It counts as nobody's if it is what follows from the default.
    """
    parallel = config.parallel
    chunks = default_chunks(config)
    if parallel.schedule == AUTO or isinstance(parallel.schedule, Followed):
        return chunks
    if parallel.virtual_stages == chunks > 1 and parallel.schedule == schedule(config):
        return chunks
    return legal_chunks(parallel.schedule) or 1


def schedule(config: Any) -> str:
    """The planner chooses where pairs may hide messages; elsewhere the number of chunks decides.

    One chunk where the default is more comes from a schedule that somebody named: then nothing follows.
    """
    if (
        config.mesh.pipeline > 1
        and config.parallel.virtual_stages == 1 < default_chunks(config)
    ):
        return AUTO
    if pairs_may_hide(config):
        return Followed(planned_schedule(config)[0])
    return Followed(unpaired_schedule(config))


def unpaired_schedule(config: Any) -> str:
    """Several chunks a stage run interleaved, one runs 1f1b; one stage runs no schedule, so that auto stays."""
    if config.mesh.pipeline == 1:
        return AUTO
    return CHUNKED if config.parallel.virtual_stages > 1 else PLAIN


def pairs_may_hide(config: Any) -> bool:
    """Pairs may hide messages where there are any, except on fake devices, which hide none."""
    mesh = config.mesh
    on_fakes = config.run.fake_devices > 0 and mesh.cluster is None
    return (
        mesh.splits_layers
        and has_table(PAIRED, mesh.pipeline, config.parallel.microbatches)
        and not on_fakes
    )


def context_strategy(config: Any) -> str:
    """The planner chooses where tokens are split over context; elsewhere auto stays."""
    if config.mesh.context > 1:
        return planned_strategy(config)[0]
    return AUTO


def dispatch(config: Any) -> str:
    """Rows go to their experts by whichever collective sends less; where experts are not split, auto stays."""
    mesh = config.mesh
    if mesh.expert == 1:
        return AUTO
    experts = config.parallel.experts
    sent = experts.room * config.model.moe.top_k
    gathers = experts.ranks_per_node is None and expert_ranks(config) - 1 <= sent
    return "all_gather" if gathers else "all_to_all"


def expert_ranks(config: Any) -> int:
    """Returns the ranks that share a layer's experts where rows are sent to them."""
    tensor: int = config.mesh.tensor if sends_parts(config) else 1
    return tensor * int(config.mesh.expert)


def sends_parts(config: Any) -> bool:
    """All-to-all sends each tensor rank's own part of a sequence where that is split, to experts over tensor too."""
    mesh = config.mesh
    splits_sequence = config.parallel.sequence_parallel and mesh.tensor > 1
    return (
        splits_sequence and config.model.moe.experts % (mesh.expert * mesh.tensor) == 0
    )


def node_problems(config: Any) -> Iterator[str]:
    """Yields a sentence on ranks of a node that experts cannot lie on, or that rows are not sent to."""
    keys = config.parallel.experts
    if keys.ranks_per_node is None or config.mesh.expert == 1:
        return
    given = f"parallel.experts.ranks_per_node is {keys.ranks_per_node}"
    if keys.dispatch == "all_gather":
        yield f"{given}, but parallel.experts.dispatch is all_gather; legal is all_to_all."
    if (ranks := expert_ranks(config)) % keys.ranks_per_node:
        legal = listed_divisors(ranks)
        yield f"{given}, which does not divide the {ranks} ranks that share experts; legal are {legal}."
