"""Cross-checks between keys, made before a device is touched: each section's own stand beside its keys.

Every rule yields the sentence on a combination of keys that cannot run, and the numbers that could.
"""

import itertools
import math
import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from meshtrain.config import images, mesh, model, reduce, rl, telemetry
from meshtrain.config.auto import AUTO, node_problems
from meshtrain.config.float8 import float8_problems
from meshtrain.config.follow import padded_batch_size, row_shards, runs_table, value_of
from meshtrain.config.key import keys
from meshtrain.config.places import BOTH
from meshtrain.config.schema import ACTIVATIONS, Config
from meshtrain.config.stacks import LINEAR
from meshtrain.errors import ConfigError, listed_divisors, nearest, short
from meshtrain.families import FAMILIES
from meshtrain.files import is_address, nearest_file
from meshtrain.registry import NotImported, Unimported
from meshtrain.schedule.generators import SCHEDULES, legal_chunks, make_table
from meshtrain.schedule.table import MAX_ENTRIES
from meshtrain.sources import MIXTURE, SOURCES, has_documents

Problems = Iterator[str]  # a sentence on each

# The keys that take addresses of object stores.
AT_STORES = (
    "data.source",
    "data.validation_source",
    "model.weights",
    "checkpoint.resume",
)
MOST_TOKENS = 2**31 - 1  # of a step: they are counted as int32
PROMPT = 32  # tokens of a text that a sample is given
MOST_SAMPLED = 128  # tokens of a sample
PADDED = "train.uneven_batch: pad"  # the way out of a batch that a mesh does not divide


def check(config: Config) -> None:
    """Raises ConfigError with the first combination of keys of a resolved config that cannot run."""
    problems = itertools.chain(
        images.problems(config),
        model.problems(config.model),
        _model_problems(config),
        mesh.problems(config.mesh),
        reduce.problems(config),
        _batch_problems(config),
        _pipeline_problems(config),
        _data_problems(config),
        _address_problems(config),
        _remat_problems(config),
        float8_problems(config),
        _tuning_problems(config),
        _qk_clip_problems(config),
        _transfer_problems(config),
        _sample_problems(config),
        rl.problems(config),
        _survive_problems(config),
        telemetry.problems(config.telemetry, _steps(config)),
    )
    if sentence := next(problems, None):
        raise ConfigError(sentence)
    if not any(isinstance(text, Unimported) for text in hook_texts(config).values()):
        hooks(config)
        callbacks(config)


def callbacks(config: Config) -> list[Any]:
    """Returns the functions that run.callbacks names; ConfigError for a name of nothing."""
    return [importing().named("run.callbacks", text) for text in config.run.callbacks]


def hooks(config: Config) -> dict[str, Any]:
    """Returns the functions that a config names, by what they replace; ConfigError for a name of nothing."""
    keys = hook_texts(config)
    if not any(keys.values()):
        return {}
    named = importing().named
    return {
        key.partition(".")[2]: named(key, text)
        for key, text in keys.items()
        if text is not None
    }


def importing() -> ModuleType:
    """Returns `config.imports`, which only configs and installations that name modules need."""
    from meshtrain.config import imports

    return imports


def hook_texts(config: Config) -> dict[str, str | None]:
    """Returns the keys that name functions, with what they name."""
    model = config.model
    train = config.train
    return {
        "model.block": model.block,
        "model.attention": model.attention,
        "train.loss": train.loss,
    }


def _steps(config: Config) -> float:
    """Returns the last step, as far as it is known: that of `train.epochs` is when the data is open."""
    if config.train.epochs:
        return math.inf
    return config.train.steps


def _model_problems(config: Config) -> Problems:
    model = config.model
    tensor = config.mesh.tensor
    length = config.train.sequence_length
    family = FAMILIES[model.family]
    if family.positions == "learned" and model.max_positions < length:
        longer = f"train.sequence_length {length} is longer than model.max_positions {model.max_positions}"
        yield f"{longer}; {family.name} has learned positions, so give at least as many."
    if model.heads % tensor:
        legal = listed_divisors(model.heads)
        yield f"mesh.tensor {tensor} does not divide model.heads {model.heads}; legal are {legal}."
    if LINEAR in model.pattern and model.linear.key_heads % tensor:
        legal = listed_divisors(math.gcd(model.heads, model.linear.key_heads))
        heads = f"model.linear.key_heads {model.linear.key_heads}"
        yield f"mesh.tensor {tensor} does not divide {heads}; legal are {legal}."
    yield from context_problems(config)
    yield from _expert_problems(config)
    yield from _prediction_problems(config)
    if config.parallel.sequence_parallel and length % tensor:
        legal = listed_divisors(math.gcd(length, model.heads))
        patches = length - 1
        if family.images and model.pool == "class" and not patches % tensor:
            legal += f", or with model.pool: mean, which has no class token beside the {patches} patches, {tensor} too"
        uneven = (
            f"mesh.tensor {tensor} does not divide train.sequence_length {length}, as parallel.sequence_parallel "
            "needs"
        )
        yield f"{uneven}; legal for mesh.tensor are {legal}."


def _expert_problems(config: Config) -> Problems:
    experts = config.model.moe.experts
    expert = config.mesh.expert
    if not experts:
        if expert > 1:
            yield f"mesh.expert is {expert}, but the model has no experts; give model.moe.experts, or leave it out."
        if config.parallel.experts.capacity is not None:
            yield (
                "parallel.experts.capacity is given, but the model has no experts; give model.moe.experts, or leave "
                "it out."
            )
        return
    if experts % expert:
        yield f"mesh.expert {expert} does not divide model.moe.experts {experts}; legal are {listed_divisors(experts)}."
    yield from node_problems(config)
    if expert > 1 and (compression := config.parallel.reduce.compression) != "none":
        yield (
            f"parallel.reduce.compression is {compression}, but with mesh.expert {expert} gradients of experts are "
            "summed over other ranks "
            "than those of the other weights, and a residual of each would be kept; leave one of them out."
        )


def _prediction_problems(config: Config) -> Problems:
    model = config.model
    if not model.mtp:
        return
    others = {
        f"train.objective {config.train.objective}": config.train.objective
        != "next_token",
        f"lora.rank {config.lora.rank}": config.lora.rank > 0,
        f"model.dropout {model.dropout}": model.dropout > 0,
        f"parallel.sync.every {config.parallel.sync.every}": config.parallel.sync.every
        > 0,
    }
    for other in (name for name, given in others.items() if given):
        yield f"model.mtp is {model.mtp}, which has no form with {other}; leave one of them out."
    if 2 * model.d_model % config.mesh.tensor:
        twice = (
            f"twice model.d_model {model.d_model}, which model.mtp {model.mtp} needs"
        )
        yield f"mesh.tensor {config.mesh.tensor} does not divide {twice}; legal are {listed_divisors(model.d_model)}."


def context_problems(config: Config) -> Problems:
    """Yields a sentence on each thing that a row cannot be split over context for."""
    context = config.mesh.context
    strategy = config.parallel.context_strategy
    model = config.model
    if context == 1:
        return
    if FAMILIES[model.family].images:
        yield (
            f"mesh.context is {context}, but model.family {model.family} reads images, whose patches are few; leave "
            "it out."
        )
    if strategy == "ring" and model.window:
        waste = f"whose messages all go round though model.window {model.window} hides most of them"
        yield f"parallel.context_strategy is ring, {waste}; legal are all_gather and ulysses."
    heads = model.heads // config.mesh.tensor
    if strategy == "ulysses" and heads % context:
        yield (
            f"mesh.context {context} does not divide the {heads} heads of a tensor rank, as parallel.context_strategy "
            "ulysses needs; "
            f"legal are {listed_divisors(heads)}, or the strategies all_gather and ring."
        )
    yield from _length_problems(config, config.train.sequence_length)


def _length_problems(config: Config, length: int) -> Problems:
    context = config.mesh.context
    zigzag = config.parallel.context_strategy != "ulysses"
    linear = LINEAR in config.model.pattern
    parts = 2 * context if zigzag or linear else context
    if length % parts:
        way = "with ulysses"
        if zigzag or linear:
            way = "which gives each rank two chunks of a row"
        yield f"mesh.context {context}, {way}, needs rows of a multiple of {parts} tokens, but a row has {length}."
    reach = config.model.linear.conv - 1
    if linear and context > 1 and length // parts < reach:
        yield (
            f"mesh.context {context} leaves chunks of {length // parts} tokens of a row of {length}, but "
            f"model.linear.conv {reach + 1} reaches back over {reach}; give longer rows, or fewer ranks."
        )
    if config.parallel.sequence_parallel and length // context % config.mesh.tensor:
        left = f"the {length // context} tokens that mesh.context {context} leaves of a row"
        yield f"mesh.tensor {config.mesh.tensor} does not divide {left}, as parallel.sequence_parallel needs."


def check_length(config: Config, length: int) -> None:
    """Raises ConfigError for a row that cannot be split over context."""
    for sentence in _length_problems(config, length):
        raise ConfigError(sentence)


def _batch_problems(config: Config) -> Problems:
    batch = config.train.global_batch_size
    data = config.mesh.data
    microbatches = config.parallel.microbatches
    rows = padded_batch_size(config)
    own = batch // data
    if (tokens := rows * config.train.sequence_length) > MOST_TOKENS:
        padded = f" (padded to {rows:,})" if rows > batch else ""
        size = f"train.global_batch_size {batch}{padded} x train.sequence_length {config.train.sequence_length}"
        yield f"{size} is {tokens:,} tokens a step; legal are at most {MOST_TOKENS:,}."
    if config.train.uneven_batch == "pad":
        return
    if batch % data:
        uneven = f"mesh.data {data} does not divide train.global_batch_size {batch}"
        yield f"{uneven}; legal are {listed_divisors(batch)}, or set {PADDED}."
    if own % microbatches:
        sequences = "1 sequence" if own == 1 else f"{own} sequences"
        of_rank = f"each data rank gets {sequences} (train.global_batch_size {batch} / mesh.data {data})"
        uneven = (
            f"{of_rank}, which parallel.microbatches {microbatches} does not divide"
        )
        yield f"{uneven}; legal are {listed_divisors(own)}, or set {PADDED}."


def _schedule_problems(schedule: str) -> Problems:
    """Yields what is wrong with the schedule's name or its table's path."""
    is_table = schedule.endswith(".csv")
    if is_table and not os.path.isfile(os.path.expanduser(schedule)):
        path = Path(os.path.expanduser(schedule))
        if path.is_absolute():
            where = ""
        else:
            where = f", {BOTH} {short(os.getcwd())}"
        yield (
            f"parallel.schedule names the table {short(schedule)}, but there is no such file{where}"
            f"{nearest_file(path, ('.csv',)) or '.'}"
        )
    if not is_table and schedule not in SCHEDULES and schedule != AUTO:
        if isinstance(schedule, Unimported):
            raise NotImported(schedule)
        legal = ", ".join([AUTO, *SCHEDULES])
        ending = nearest(schedule, [AUTO, *SCHEDULES]) or "."
        yield (
            f"parallel.schedule is {short(repr(schedule))}; it must be one of {legal}, or the path of a .csv "
            f"table{ending}"
        )


def _pipeline_problems(config: Config) -> Problems:
    stages = config.mesh.pipeline
    parallel = config.parallel
    schedule = parallel.schedule
    chunks = parallel.virtual_stages
    microbatches = parallel.microbatches
    is_table = schedule.endswith(".csv")
    yield from _schedule_problems(schedule)
    # Without stages no table is run: neither chunks nor a split of the layers have a use (see `notes`).
    if stages == 1:
        # Whoever names a table of several stages wants it run: a mesh that leaves it unused is a mistake.
        if is_table:
            make_table(schedule, stages, microbatches, chunks)
        return
    if (fixed := legal_chunks(schedule)) not in (None, chunks):
        free = ", ".join(name for name in SCHEDULES if legal_chunks(name) is None)
        but = f"parallel.virtual_stages is {chunks}, but {schedule} always has {fixed}"
        yield f"{but}; leave it out, or set parallel.schedule to one that has any number: {free}."
    yield from _size_problems(config)
    # A table from outside may be none that can run.
    if is_table or (schedule in SCHEDULES and not SCHEDULES[schedule].formulas):
        make_table(schedule, stages, microbatches, chunks)


def _size_problems(config: Config) -> Problems:
    """Yields a sentence on each number of stages, microbatches or layers that no schedule can have."""
    layers = config.model.layers
    stages = config.mesh.pipeline
    chunks = config.parallel.virtual_stages
    microbatches = config.parallel.microbatches
    split = config.parallel.layer_split
    parts = stages * chunks
    what = f"mesh.pipeline {stages}" + (
        f" x parallel.virtual_stages {chunks}" if chunks > 1 else ""
    )
    if parts > layers and split is None:
        legal = f"legal are at most {layers} in all, unless parallel.layer_split says which have none"
        yield f"{what} makes {parts} stages, more than model.layers {layers}; {legal}."
    if stages * (chunks * microbatches + stages) > MAX_ENTRIES:
        most = (MAX_ENTRIES // stages - stages) // chunks
        if most > 0:
            legal = f"{most} microbatches"
        else:
            legal = f"{math.isqrt(MAX_ENTRIES // 2)} stages"
        too_many = f"parallel.microbatches {microbatches} with {what} is more than a schedule can have"
        yield f"{too_many}; legal are at most {legal}."
    if split is not None and (len(split) != parts or sum(split) != layers):
        yield (
            f"parallel.layer_split {short(list(split))} has {len(split)} entries that sum to {sum(split)}; it must "
            "have "
            f"{parts} (mesh.pipeline x parallel.virtual_stages) that sum to model.layers {layers}."
        )


def _address_problems(config: Config) -> Problems:
    """Yields which addresses of object stores stand where none is read."""
    if is_address(config.run.directory):
        yield (
            f"run.directory is {short(config.run.directory)}, but a run's lock, metrics and supervisor's records need "
            "a file system that all nodes share; give a directory there, and the address as checkpoint.directory."
        )
    address = config.checkpoint.directory
    if address is not None and not address.startswith(("s3://", "gs://")):
        yield (
            f"checkpoint.directory is {short(address)}; it must be s3://BUCKET/PREFIX or gs://BUCKET/PREFIX, or null: "
            "in the run directory."
        )
    if config.data.format == images.IMAGES and is_address(config.data.source):
        yield f"data.source is {short(config.data.source)}, but images are read from files; give a directory."
    for path, key in keys(type(config)).items():
        value = value_of(config, path)
        if (
            key.path
            and path not in AT_STORES
            and isinstance(value, str)
            and is_address(value)
        ):
            yield f"{path} is {short(value)}, but is read from files; copy it, and give its path."


def _data_problems(config: Config) -> Problems:
    data = config.data
    if data.format == images.IMAGES:
        return
    if (data.source == MIXTURE) != bool(data.mixture):
        but = "names no sources; list them"
        if data.mixture:
            but = "names sources; set data.source to mixture, or leave it out"
        yield f"data.source is {short(data.source)}, but data.mixture {but}."
    if len(data.weights) != len(data.mixture):
        numbers = len(data.weights)
        sources = len(data.mixture)
        yield f"data.weights has {numbers} numbers for the {sources} sources of data.mixture; give one each."
    if unmixable := [
        name for name in data.mixture if name == MIXTURE or not has_documents(name)
    ]:
        words = ", ".join(filter(has_documents, SOURCES))
        yield f"data.mixture names {min(unmixable)}; it takes {words}, text and prepared shards."
    if not has_documents(data.source):
        if data.validation_source is not None:
            with_source = (
                f"with data.source {data.source} the held-out tokens are drawn too"
            )
            yield f"data.validation_source is given, but {with_source}; leave it out."
        if data.format != "text":
            but = f"which holds no conversations, but data.format is {data.format}"
            yield f"data.source is {data.source}, {but}; name files of them."
        if data.batching != "window":
            but = f"but {data.source} tokens form no documents"
            yield f"data.batching is {data.batching}, {but}; set it to window."
    yield from _batching_problems(config)


def _batching_problems(config: Config) -> Problems:
    """Yields what is wrong with rows of several lengths."""
    data = config.data
    tensor = config.mesh.tensor
    batch = config.train.global_batch_size
    by_length = data.batching in ("grouped", "budget")
    if by_length and config.mesh.context > 1:
        of = f"data.batching {data.batching} makes rows of any multiple of data.length_multiple"
        yield from (
            f"{of}: {sentence}"
            for sentence in _length_problems(config, data.length_multiple)
        )
    if (
        by_length
        and config.parallel.sequence_parallel
        and data.length_multiple % tensor
    ):
        odd = f"mesh.tensor {tensor} does not divide data.length_multiple {data.length_multiple}"
        needs = (
            f"as parallel.sequence_parallel needs with data.batching {data.batching}"
        )
        yield f"{odd}, {needs}; give a multiple of {tensor}."
    refuses = config.train.uneven_batch == "refuse"
    uneven = refuses and data.rows_multiple % row_shards(config)
    if data.batching == "budget" and (uneven or data.rows_multiple > batch):
        yield (
            f"data.rows_multiple is {data.rows_multiple}; it must be a multiple of mesh.data x parallel.microbatches "
            f"({row_shards(config)}), which {PADDED} does without, and at most train.global_batch_size {batch}."
        )


def _remat_problems(config: Config) -> Problems:
    parallel = config.parallel
    for name in ("remat_keep", "remat_offload"):
        activations = getattr(parallel, name)
        if activations and parallel.remat != "names":
            but = f"but parallel.remat is {parallel.remat}; it counts only with parallel.remat: names"
            yield f"parallel.{name} is given, {but}."
        for activation in activations:
            if activation not in ACTIVATIONS:
                ending = nearest(activation, ACTIVATIONS) or "."
                yield f"parallel.{name} has {short(repr(activation))}; legal are {', '.join(ACTIVATIONS)}{ending}"
    if both := [
        activation
        for activation in parallel.remat_keep
        if activation in parallel.remat_offload
    ]:
        yield f"parallel.remat_keep and parallel.remat_offload both have {both[0]}; name it in one of them."
    if parallel.remat_offload and runs_table(config):
        stages = config.mesh.pipeline
        but = f"but parallel.schedule is {parallel.schedule}"
        if stages > 1:
            but = f"but mesh.pipeline is {stages}"
        kept = "stages keep what is in flight on the device, so leave it out, or keep less with parallel.remat_keep"
        yield f"parallel.remat_offload is given, {but}; {kept}."


def _tuning_problems(config: Config) -> Problems:
    lora = config.lora
    train = config.train
    data = config.data
    is_dpo = train.objective == "dpo"
    have = model.projections(config.model)
    for target in lora.targets:
        if target not in have:
            ending = nearest(target.removesuffix("_proj"), have) or "."
            projections = f"projections of {config.model.family} are {', '.join(have)}"
            yield f"lora.targets has {short(repr(target))}; {projections}{ending}"
    if not lora.rank and (lora.targets or lora.dropout or lora.rslora):
        yield "the section lora asks for something, but lora.rank is 0, which means no adapter; give a rank."
    is_policy = train.objective in ("dpo", "grpo")
    if is_dpo and not lora.rank:
        yield "train.objective dpo takes the model without its adapters as reference; give lora.rank."
    # Prompts of rl.prompts may be messages, whatever the data is.
    has_no_messages = data.format == "text" and train.objective != "grpo"
    if has_no_messages and data.template is not None:
        template = f"data.template is {short(data.template)}"
        yield f"{template}, but data.format is text, which has none; set data.format to chat or pairs."
    if is_dpo and train.trainable:
        yield (
            "train.objective dpo takes the model without its adapters as reference, which train.trainable would "
            "have move; leave it out."
        )
    for name in ("label_smoothing", "z_loss"):
        if is_policy and (value := getattr(train, name)):
            plain = f"train.objective {train.objective} takes plain log-probabilities"
            yield f"train.{name} is {value}, but {plain}; leave it out."
    if is_dpo != (data.format == "pairs"):
        objective = (
            f"train.objective is {train.objective}, but data.format is {data.format}"
        )
        yield f"{objective}; dpo learns from pairs, and pairs are for dpo."
    if config.eval.patience and not config.eval.every:
        patience = f"eval.patience is {config.eval.patience} evaluations"
        yield f"{patience}, but eval.every is 0, so there are none; give eval.every."


def _qk_clip_problems(config: Config) -> Problems:
    clip = config.optimizer.qk_clip
    model = config.model
    if not clip:
        return
    reasons = {
        f"model.family {model.family} reads images": FAMILIES[model.family].images,
        "model.qk_norm is true, so that these weights do not change the size of logits": model.qk_norm,
        f"model.score_cap {model.score_cap} bounds logits already": model.score_cap,
        f"model.mtp {model.mtp} has a layer of its own": model.mtp,
        f"model.pattern {list(model.pattern)} has layers of several kinds": model.pattern,
        f"lora.rank {config.lora.rank} freezes them": config.lora.rank,
        "train.trainable may freeze them": config.train.trainable,
        f"with parallel.sync.every {config.parallel.sync.every} each island has its own": config.parallel.sync.every,
    }
    for reason in (reason for reason, holds in reasons.items() if holds):
        yield (
            f"optimizer.qk_clip is {clip:g}, which shrinks the weights of queries and keys, but {reason}; leave one of "
            "the two out."
        )


def _transfer_problems(config: Config) -> Problems:
    transfer = config.optimizer.transfer
    model = config.model
    if not transfer:
        return
    linear_or_latent = bool(model.mla.kv_rank or "linear" in model.pattern)
    reasons = {
        f"optimizer.name is {config.optimizer.name}, and its rules are of adamw and lion": (
            config.optimizer.name not in ("adamw", "lion")
        ),
        f"model.weights {model.weights} has begun already": model.weights,
        f"lora.rank {config.lora.rank} trains adapters": config.lora.rank,
        "train.trainable freezes weights": config.train.trainable,
        f"model.mtp {model.mtp} has a layer of its own": model.mtp,
        f"transfer.head_dim {transfer.head_dim} is for usual attention": (
            transfer.head_dim and linear_or_latent
        ),
    }
    for reason in (reason for reason, holds in reasons.items() if holds):
        yield f"optimizer.transfer is given, but {reason}; leave one of the two out."


def _sample_problems(config: Config) -> Problems:
    samples = config.eval.samples
    if not samples:
        return
    reasons = {
        "eval.every is 0, so that there are no evaluations": not config.eval.every,
        f"train.objective is {config.train.objective}": config.train.objective
        != "next_token",
        f"model.family {config.model.family} cannot go on with a text": not FAMILIES[
            config.model.family
        ].causal,
        "data.source is synthetic, which is no text": config.data.source == "synthetic",
        f"mesh.islands is {config.mesh.islands}": config.mesh.islands > 1,
        f"model.attention {config.model.attention} knows of no cache": config.model.attention,
    }
    for reason in (reason for reason, holds in reasons.items() if holds):
        yield f"eval.samples is {samples}, but {reason}; set it to 0."


def _survive_problems(config: Config) -> Problems:
    survive = config.survive
    devices = config.mesh.devices
    least = survive.least
    wanted = survive.wanted
    most = survive.most
    if not least <= wanted <= most:
        keys = f"survive.least {least}, survive.wanted {wanted} and survive.most {most}"
        yield f"{keys} must be in this order, each at most the next."
    if devices % wanted:
        legal = listed_divisors(devices)
        yield f"survive.wanted {wanted} does not divide the {devices} devices of the mesh; legal are {legal}."
    if survive.inject:
        from meshtrain.config.inject import requests

        for request in requests(survive.inject):
            if request.step > _steps(config):
                but = f"train.steps is {config.train.steps}: that step is never reached"
                yield f"survive.inject has {short(request.name)}, but {but}."
