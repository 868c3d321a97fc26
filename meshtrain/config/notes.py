"""Notes on what is legal but costs something, or has no use; and what `parallel.schedule: auto` stands for."""

from collections.abc import Iterator

from meshtrain.config import reduce
from meshtrain.config.auto import (
    AUTO,
    pairs_may_hide,
    planned_schedule,
    planned_strategy,
)
from meshtrain.config.follow import followed, padded_batch_size, value_of
from meshtrain.config.key import keys
from meshtrain.config.schema import Config, ParallelConfig
from meshtrain.errors import short
from meshtrain.schedule.generators import SCHEDULES, legal_chunks, make_table

WORTH_SAYING = (
    # Times what a table takes without lockstep; no schedule of our own takes so much more
    1.25
)


def notes(config: Config) -> list[str]:
    """Returns a sentence on each thing that is legal but costs something; `parallel.placement.notes` has the padding of
    the weights.
    """
    sentences = [*_notes(config), *reduce.notes(config)]
    unused = [
        path
        for path in _unused(config)
        if not any(path in sentence for sentence in sentences)
    ]
    return sentences + [
        f"{path} has no use here: nothing depends on it, as the other keys are."
        for path in unused
    ]


def _unused(config: Config) -> Iterator[str]:
    """Yields the keys that have a value of their own though nothing depends on them; a schedule may be named for meshes
    of any pipeline.
    """
    for path, key in keys(type(config)).items():
        if (
            path != "parallel.schedule"
            and not key.counts(config)
            and value_of(config, path) != key.default
            and not followed(config, path)
        ):
            yield path


def _notes(config: Config) -> Iterator[str]:
    mesh = config.mesh
    parallel = config.parallel
    batch = config.train.global_batch_size
    rows = padded_batch_size(config)
    if rows > batch:
        over = f"mesh.data {mesh.data} x parallel.microbatches {parallel.microbatches}"
        padded = f"padded to {rows} rows, {rows / batch - 1:.1%} more work"
        yield f"train.global_batch_size {batch} does not divide over {over}: {padded}."
    if mesh.pipeline > 1:
        yield from _pipeline_notes(config)
    if (
        config.lora.rank
        and config.model.weights is None
        and config.checkpoint.resume in ("auto", "never")
    ):
        yield (
            "lora.rank trains adapters of a model drawn at random: for one that is trained give model.weights, or "
            "checkpoint.resume with its path."
        )
    yield from _policy_notes(config)
    if config.optimizer.warmup_steps > config.train.steps:
        more = f"optimizer.warmup_steps {config.optimizer.warmup_steps} is more than train.steps {config.train.steps}"
        yield f"{more}: the run ends before the learning rate is at its peak."
    if mesh.pipeline == 1:
        yield from _stage_notes(parallel)
    if mesh.islands > 1 and parallel.zero_stage and mesh.shards == 1:
        each = f"each of the {mesh.islands} islands is one data rank, and has all of the state"
        yield f"parallel.zero_stage {parallel.zero_stage} shards nothing: {each}."
    uncompressed = (parallel.reduce.algorithm, parallel.reduce.compression) == (
        "psum",
        "none",
    )
    if (
        mesh.islands > 1
        and not parallel.zero_stage
        and uncompressed
        and not parallel.sync.every
    ):
        why = "every data rank has all of the state, and gradients are summed over all of data at once"
        yield f"mesh.islands {mesh.islands} has no use with parallel.zero_stage 0: {why}."


def _policy_notes(config: Config) -> Iterator[str]:
    objective = config.train.objective
    if objective not in ("dpo", "grpo"):
        return
    other = "its reference" if objective == "dpo" else "what draws its answers"
    why = f"the policy drops nothing, as {other} does not"
    for section, rate in (
        ("model", config.model.dropout),
        ("lora", config.lora.dropout),
    ):
        if rate:
            yield f"{section}.dropout {rate:g} has no use with train.objective {objective}: {why}."


def _stage_notes(parallel: ParallelConfig) -> Iterator[str]:
    """Yields the keys that have no use with one stage."""
    unused = {
        "virtual_stages": (
            parallel.virtual_stages != (legal_chunks(parallel.schedule) or 1),
            "the microbatches are plain gradient accumulation",
        ),
        "schedule": (
            parallel.schedule.endswith(".csv"),
            "a table is for several stages",
        ),
        "layer_split": (
            parallel.layer_split is not None,
            "all layers are on one stage",
        ),
    }
    for name, (given, why) in unused.items():
        if given:
            yield f"parallel.{name} has no use with mesh.pipeline 1: {why}."


def _pipeline_notes(config: Config) -> Iterator[str]:
    parallel = config.parallel
    stages = config.mesh.pipeline
    schedule = parallel.schedule
    microbatches = parallel.microbatches
    chunks = parallel.virtual_stages
    entry = SCHEDULES.get(schedule)
    is_made_for_it = entry and entry.formulas
    if is_made_for_it and microbatches >= stages:
        return
    from meshtrain.schedule.simulation import simulate

    def idle(microbatches: int) -> str:
        table = make_table(schedule, stages, microbatches, chunks)
        return f"{simulate(table).bubble_fraction:.0%}"

    if microbatches < stages:
        better = "more would shorten that"
        # The table of a file is for one number of microbatches.
        if schedule in SCHEDULES:
            better = f"{4 * stages} would bring that to {idle(4 * stages)}"
        few = (
            f"parallel.microbatches {microbatches} is fewer than mesh.pipeline {stages}"
        )
        yield f"{few}: every stage idles {idle(microbatches)} of the step; {better}."
    # What one program for all stages costs a table of one's own; the named schedules are made for it.
    if is_made_for_it:
        return
    table = make_table(schedule, stages, microbatches, chunks)
    lockstep, alone = (
        simulate(table, execution=execution).makespan
        for execution in ("lockstep", "asynchronous")
    )
    if lockstep >= WORTH_SAYING * alone:
        yield (
            f"parallel.schedule {short(schedule)} takes {lockstep / alone:.2f} times as long here as if every stage "
            "ran on its own "
            f"({lockstep / table.chunks:.4g} against {alone / table.chunks:.4g} forwards of a stage): a clock costs "
            "what any stage does in it, "
            "so let all do the same in a clock."
        )


def chosen(config: Config) -> list[str]:
    """Returns a sentence on what parallel.schedule: auto stands for in a resolved config with stages or messages that
    pairs could hide, and one on parallel.context_strategy where tokens are split over context; none where it was named.
    """
    sentences = []
    stages = config.mesh.pipeline
    pairs = pairs_may_hide(config)
    if (stages > 1 or pairs) and followed(config, "parallel.schedule"):
        schedule = config.parallel.schedule
        chunks = config.parallel.virtual_stages if stages > 1 else 1
        name, why = planned_schedule(config) if pairs else (schedule, "")
        if name != schedule:
            why = f"CPU devices hide no messages, for which it would be {name} on accelerators"
        choice = f"schedule: {AUTO} -> {'no pairs' if schedule == AUTO else schedule}"
        sentences.append(
            choice
            + (f", {chunks} virtual stages" if chunks > 1 else "")
            + (f": {why}" if why else "")
        )
    if config.mesh.context > 1 and followed(config, "parallel.context_strategy"):
        sentences.append(
            "context: {} -> {}: {}".format(AUTO, *planned_strategy(config))
        )
    return sentences
