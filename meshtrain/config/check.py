"""Cross-checks between keys, made before a device is touched: each section's own stand beside its keys."""

import math
import os
from pathlib import Path

from meshtrain.config import images, reduce, telemetry
from meshtrain.config.follow import padded_batch_size, row_shards
from meshtrain.config.mesh import check as mesh_check
from meshtrain.config.model import PROJECTIONS
from meshtrain.config.model import check as model_check
from meshtrain.config.schema import ACTIVATIONS, AUTO, Config
from meshtrain.errors import ConfigError, listed_divisors, nearest, short
from meshtrain.families import FAMILIES
from meshtrain.schedule.generators import SCHEDULES, legal_chunks, make_table
from meshtrain.schedule.table import MAX_ENTRIES
from meshtrain.sources import MIXTURE, SOURCES, has_documents
from meshtrain.text import nearest_file

MOST_TOKENS = 2**31 - 1  # of a step: they are counted as int32
PADDED = "train.uneven_batch: pad"  # the way out of a batch that a mesh does not divide


def check(config: Config) -> None:
    """Raises ConfigError with the first combination of keys of a resolved config that cannot run, and the numbers that could."""
    model, mesh, parallel, train = config.model, config.mesh, config.parallel, config.train
    family = FAMILIES[model.family]
    images.check(config)
    model_check(model)
    if family.positions == "learned" and model.max_positions < train.sequence_length:
        raise ConfigError(
            f"train.sequence_length {train.sequence_length} is longer than model.max_positions {model.max_positions}; {family.name} has learned positions, so give at least as many."
        )
    if model.heads % mesh.tensor:
        raise ConfigError(
            f"mesh.tensor {mesh.tensor} does not divide model.heads {model.heads}; legal are {listed_divisors(model.heads)}."
        )
    if parallel.sequence_parallel and train.sequence_length % mesh.tensor:
        raise ConfigError(
            f"mesh.tensor {mesh.tensor} does not divide train.sequence_length {train.sequence_length}, as parallel.sequence_parallel needs; "
            f"legal for mesh.tensor are {listed_divisors(math.gcd(train.sequence_length, model.heads))}{_without_class(config)}."
        )
    mesh_check(mesh)
    reduce.check(config)
    _check_batch(config)
    _check_pipeline(config)
    if config.data.format != images.IMAGES:
        _check_data(config)
    _check_remat(config)
    _check_tuning(config)
    if config.eval.patience and not config.eval.every:
        raise ConfigError(
            f"eval.patience is {config.eval.patience} evaluations, but eval.every is 0, so there are none; give eval.every."
        )
    _check_survive(config)
    telemetry.check(config.telemetry, _steps(config))


def _without_class(config: Config) -> str:
    """Returns the way out of an image's odd number of positions, where it is one."""
    patches, tensor = config.train.sequence_length - 1, config.mesh.tensor
    if not FAMILIES[config.model.family].images or config.model.pool != "class" or patches % tensor:
        return ""
    return f", or with model.pool: mean, which has no class token beside the {patches} patches, {tensor} too"


def _steps(config: Config) -> float:
    """Returns the last step, as far as it is known: that of `train.epochs` is when the data is open."""
    return math.inf if config.train.epochs else config.train.steps


def _check_tuning(config: Config) -> None:
    lora, train, data = config.lora, config.train, config.data
    have = [name for name in PROJECTIONS if name != "gate" or FAMILIES[config.model.family].gated]
    for target in lora.targets:
        if target not in have:
            raise ConfigError(
                f"lora.targets has {short(repr(target))}; projections of {config.model.family} are {', '.join(have)}"
                + (nearest(target.removesuffix("_proj"), have) or ".")
            )
    if not lora.rank and (lora.targets or lora.dropout or lora.rslora):
        raise ConfigError("the section lora asks for something, but lora.rank is 0, which is no adapter; give a rank.")
    if train.objective == "dpo" and not lora.rank:
        raise ConfigError("train.objective dpo takes the model without its adapters as reference; give lora.rank.")
    if data.format == "text" and data.template is not None:
        raise ConfigError(
            f"data.template is {short(data.template)}, but data.format is text, which has none; set data.format to chat or pairs."
        )
    if train.objective == "dpo" and train.trainable:
        raise ConfigError(
            "train.objective dpo takes the model without its adapters as reference, which train.trainable would have move; leave it out."
        )
    for name in ("label_smoothing", "z_loss"):
        if train.objective == "dpo" and (value := getattr(train, name)):
            raise ConfigError(
                f"train.{name} is {value}, but train.objective dpo takes plain log-probabilities; leave it out."
            )
    if (train.objective == "dpo") != (data.format == "pairs"):
        raise ConfigError(
            f"train.objective is {train.objective}, but data.format is {data.format}; dpo learns from pairs, and pairs are for dpo."
        )


def _check_survive(config: Config) -> None:
    survive, devices = config.survive, config.mesh.devices
    if not survive.least <= survive.wanted <= survive.most:
        raise ConfigError(
            f"survive.least {survive.least}, survive.wanted {survive.wanted} and survive.most {survive.most} must be in this order, "
            "each at most the next."
        )
    if devices % survive.wanted:
        raise ConfigError(
            f"survive.wanted {survive.wanted} does not divide the {devices} devices of the mesh; legal are {listed_divisors(devices)}."
        )
    if not survive.inject:
        return
    from meshtrain.config.inject import requests

    for request in requests(survive.inject):
        if request.step > _steps(config):
            raise ConfigError(
                f"survive.inject has {short(request.name)}, but train.steps is {config.train.steps}: that step is never reached."
            )


def _check_remat(config: Config) -> None:
    parallel = config.parallel
    for name in ("remat_keep", "remat_offload"):
        activations = getattr(parallel, name)
        if activations and parallel.remat != "names":
            raise ConfigError(
                f"parallel.{name} is given, but parallel.remat is {parallel.remat}; it counts only with parallel.remat: names."
            )
        for activation in activations:
            if activation not in ACTIVATIONS:
                ending = nearest(activation, ACTIVATIONS) or "."
                raise ConfigError(
                    f"parallel.{name} has {short(repr(activation))}; legal are {', '.join(ACTIVATIONS)}{ending}"
                )
    if both := [activation for activation in parallel.remat_keep if activation in parallel.remat_offload]:
        raise ConfigError(
            f"parallel.remat_keep and parallel.remat_offload both have {both[0]}; name it in one of them."
        )
    if parallel.remat_offload and config.mesh.pipeline > 1:
        raise ConfigError(
            f"parallel.remat_offload is given, but mesh.pipeline is {config.mesh.pipeline}; stages keep what is in flight on the device, "
            "so leave it out, or keep less with parallel.remat_keep."
        )


def _check_batch(config: Config) -> None:
    batch, data, microbatches = config.train.global_batch_size, config.mesh.data, config.parallel.microbatches
    rows = padded_batch_size(config)
    if (tokens := rows * config.train.sequence_length) > MOST_TOKENS:
        padded = f" (padded to {rows:,})" if rows > batch else ""
        raise ConfigError(
            f"train.global_batch_size {batch}{padded} x train.sequence_length {config.train.sequence_length} is {tokens:,} tokens a step; "
            f"legal are at most {MOST_TOKENS:,}."
        )
    if config.train.uneven_batch == "pad":
        return
    if batch % data:
        raise ConfigError(
            f"mesh.data {data} does not divide train.global_batch_size {batch}, which {PADDED} does without; legal are {listed_divisors(batch)}."
        )
    if batch // data % microbatches:
        raise ConfigError(
            f"parallel.microbatches {microbatches} does not divide the {batch // data} sequences of a data rank "
            f"(train.global_batch_size {batch} / mesh.data {data}), which {PADDED} does without; legal are {listed_divisors(batch // data)}."
        )


def _check_data(config: Config) -> None:
    data, mesh, batch = config.data, config.mesh, config.train.global_batch_size
    if (data.source == MIXTURE) != bool(data.mixture):
        problem = (
            "names sources; set data.source to mixture, or leave it out."
            if data.mixture
            else "names no sources; list them."
        )
        raise ConfigError(f"data.source is {short(data.source)}, but data.mixture {problem}")
    if len(data.weights) != len(data.mixture):
        raise ConfigError(
            f"data.weights has {len(data.weights)} numbers for the {len(data.mixture)} sources of data.mixture; give one each."
        )
    if unmixable := [name for name in data.mixture if name == MIXTURE or not has_documents(name)]:
        words = ", ".join(filter(has_documents, SOURCES))
        raise ConfigError(f"data.mixture names {min(unmixable)}; it takes {words}, text and prepared shards.")
    if not has_documents(data.source) and data.validation_source is not None:
        raise ConfigError(
            f"data.validation_source is given, but with data.source {data.source} the held-out tokens are drawn too; leave it out."
        )
    if not has_documents(data.source) and data.format != "text":
        raise ConfigError(
            f"data.source is {data.source}, which holds no conversations, but data.format is {data.format}; name files of them."
        )
    if not has_documents(data.source) and data.batching != "window":
        raise ConfigError(
            f"data.batching is {data.batching}, but {data.source} tokens form no documents; set it to window."
        )
    by_length = data.batching in ("grouped", "budget")
    if by_length and config.parallel.sequence_parallel and data.length_multiple % mesh.tensor:
        raise ConfigError(
            f"mesh.tensor {mesh.tensor} does not divide data.length_multiple {data.length_multiple}, as parallel.sequence_parallel needs "
            f"with data.batching {data.batching}; give a multiple of {mesh.tensor}."
        )
    uneven = config.train.uneven_batch == "refuse" and data.rows_multiple % row_shards(config)
    if data.batching == "budget" and (uneven or data.rows_multiple > batch):
        raise ConfigError(
            f"data.rows_multiple is {data.rows_multiple}; it must be a multiple of mesh.data x parallel.microbatches ({row_shards(config)}), "
            f"which {PADDED} does without, and at most train.global_batch_size {batch}."
        )


def _check_pipeline(config: Config) -> None:
    layers, stages, parallel = config.model.layers, config.mesh.pipeline, config.parallel
    schedule, chunks = parallel.schedule, parallel.virtual_stages
    if schedule.endswith(".csv"):
        if not os.path.isfile(os.path.expanduser(schedule)):
            raise ConfigError(f"parallel.schedule names the table {short(schedule)}, but {_no_table(schedule)}")
    elif schedule not in SCHEDULES and schedule != AUTO:
        raise ConfigError(
            f"parallel.schedule is {short(repr(schedule))}; it must be one of {', '.join([AUTO, *SCHEDULES])}, or the path of a .csv table"
            + (nearest(schedule, [AUTO, *SCHEDULES]) or ".")
        )
    # Without stages no table is run: neither chunks nor a split of the layers have a use (see `notes`).
    if stages == 1:
        # Whoever names a table of several stages wants it run: a mesh that leaves it unused is a mistake.
        if schedule.endswith(".csv"):
            make_table(schedule, stages, parallel.microbatches, chunks)
        return
    if (fixed := legal_chunks(schedule)) not in (None, chunks):
        free = ", ".join(name for name in SCHEDULES if legal_chunks(name) is None)
        raise ConfigError(
            f"parallel.virtual_stages is {chunks}, but {schedule} always has {fixed}; leave it out, "
            f"or set parallel.schedule to one that has any number: {free}."
        )
    what = f"mesh.pipeline {stages}" + (f" x parallel.virtual_stages {chunks}" if chunks > 1 else "")
    if stages * chunks > layers and parallel.layer_split is None:
        raise ConfigError(
            f"{what} makes {stages * chunks} stages, more than model.layers {layers}; legal are at most {layers} in all, "
            "unless parallel.layer_split says which have none."
        )
    if stages * (chunks * parallel.microbatches + stages) > MAX_ENTRIES:
        most = (MAX_ENTRIES // stages - stages) // chunks
        raise ConfigError(
            f"parallel.microbatches {parallel.microbatches} with {what} is more than a schedule can have; "
            + (
                f"legal are at most {most} microbatches."
                if most > 0
                else f"legal are at most {math.isqrt(MAX_ENTRIES // 2)} stages."
            )
        )
    split = parallel.layer_split
    if split is not None and (len(split) != stages * chunks or sum(split) != layers):
        raise ConfigError(
            f"parallel.layer_split {short(list(split))} has {len(split)} entries that sum to {sum(split)}; it must have {stages * chunks} "
            f"(mesh.pipeline x parallel.virtual_stages) that sum to model.layers {layers}."
        )


def _no_table(schedule: str) -> str:
    """Returns the end of the sentence on a table that is not there: where it was looked for, and the nearest name there."""
    path = Path(os.path.expanduser(schedule))
    start = "" if path.is_absolute() else f"from the working directory {short(os.getcwd())} "
    return f"{start}there is no such file{nearest_file(path, ('.csv',)) or '.'}"
