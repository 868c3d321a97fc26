"""Brings weights, adapters and configs in and out: what `python -m meshtrain.adopt` does once its words are read."""

import argparse
from collections import Counter

import yaml

from meshtrain import hub
from meshtrain.adopt import extra_files
from meshtrain.adopt.card import write_card
from meshtrain.adopt.configs import convert
from meshtrain.adopt.exporting import (
    ExportSource,
    export,
    export_adapter,
    merged,
    open_weights,
)
from meshtrain.adopt.importing import import_weights
from meshtrain.cli import DONE
from meshtrain.config.model import positions_of
from meshtrain.errors import ConfigError, say, short
from meshtrain.hf import loading
from meshtrain.hf.hf_directory import TensorFiles, config_of
from meshtrain.hf.mapping import Source, layers, mappings
from meshtrain.hf.peft import ADAPTER_CONFIG
from meshtrain.hf_families import CONFIG, section_of
from meshtrain.model.weights import adapters, parameters


def run_inspect(options: argparse.Namespace) -> int:
    directory = hub.directory(options.directory)
    section = section_of(directory)
    config = config_of(directory)
    files = TensorFiles(directory)
    loading.check(config.model, files)
    extra_files.check(directory)
    loading.check_finite(files)
    counts = Counter[str]()
    for mapping in mappings(config.model, files).values():
        for layer in layers(mapping.weight):
            for name in mapping.tensors(layer):
                counts[files.dtype(name)] += mapping.numbers
    dtypes = ", ".join(
        f"{count:,} in {dtype}" for dtype, count in sorted(counts.items())
    )
    print(
        f"# {short(directory)}: {parameters(config.model):,} parameters ({dtypes}), {len(files.names)} tensors"
    )
    print(yaml.safe_dump({"model": section}, sort_keys=False), end="")
    return DONE


def run_import(options: argparse.Namespace) -> int:
    directory = hub.directory(options.directory)
    config = config_of(directory, options.config, options.set)
    adapter = options.adapter and hub.directory(options.adapter)
    program = import_weights(config, directory, options.out, adapter)
    out = short(options.out)
    print(
        f"{out}: {program.layout.parameters:,} parameters, for checkpoint.resume: {out}"
    )
    return DONE


def run_export(options: argparse.Namespace) -> int:
    """Exports, or merges."""
    extra_files.refuse_existing(options.directory)
    merge = options.command == "merge"
    run = short(options.run)
    weights = open_weights(
        options.run, options.step, options.adapter if merge else None
    )
    config = weights.config
    of_step = "" if weights.step is None else f", of step {weights.step}"
    if merge and not config.lora.rank:
        raise ConfigError(
            f"{run} has no adapters to merge; export writes it as it is, --adapter PEFT_DIR gives it some."
        )
    if merge:
        return _export(options, weights, merged(weights), of_step)
    if not options.adapter and config.lora.rank:
        raise ConfigError(
            f"{run} has LoRA's adapters beside its weights; merge writes both as one model, export --adapter the "
            "adapters alone."
        )
    if not options.adapter:
        return _export(options, weights, weights.source, of_step)
    if not config.lora.rank:
        raise ConfigError(f"{run} has no adapters.")
    dtype = options.dtype or "float32"
    if dtype == "float8":
        raise ConfigError(
            "--dtype float8 is for whole models; adapters are written in float32."
        )
    base = config.model.weights or weights.hf_config.get("_name_or_path")
    export_adapter(config, weights.source, options.directory, dtype, base)
    write_card(options.directory, weights, dtype, adapter=True)
    size = sum(weight.size for weight in adapters(config.model, config.lora))
    print(
        f"{short(options.directory)}: adapters of rank {config.lora.rank}, {size:,} parameters in {dtype}{of_step}"
    )
    return DONE


def _export(
    options: argparse.Namespace, weights: ExportSource, source: Source, of_step: str
) -> int:
    # merged weights are other ones
    untouched = (
        weights.dtypes if options.dtype is None and source is weights.source else {}
    )
    directory = short(options.directory)
    dtype = options.dtype or weights.dtype
    tokenizer = weights.tokenizer
    if options.tokenizer is not None:
        tokenizer = extra_files.tokenizer_files(options.tokenizer)
        if not tokenizer:
            vocabularies = "tokenizer.json, tokenizer.model or vocab.json"
            raise ConfigError(
                f"--tokenizer {short(options.tokenizer)} is not a directory with a {vocabularies}."
            )
    export(
        weights.config,
        source,
        options.directory,
        dtype,
        tokenizer,
        weights.hf_config,
        untouched,
    )
    model = weights.config.model
    dtypes = " and ".join(sorted(set(untouched.values()))) or dtype
    write_card(options.directory, weights, dtypes)
    print(f"{directory}: {parameters(model):,} parameters in {dtypes}{of_step}")
    if not tokenizer and not positions_of(model):
        say(
            f"no tokenizer was found beside the weights, so {directory} has none; --tokenizer DIR takes one."
        )
    return DONE


def run_push(options: argparse.Namespace) -> int:
    directory = options.directory
    names = (CONFIG, ADAPTER_CONFIG)
    if not any((directory / name).is_file() for name in names):
        raise ConfigError(
            f"{short(directory)} is nothing to push: it has neither {' nor '.join(names)}; adopt export writes a "
            "directory that has."
        )
    print(hub.push(directory, options.name, options.private))
    return DONE


def run_config(options: argparse.Namespace) -> int:
    text, notes = convert(options.files, options.devices, options.steps)
    print(text, end="")
    for sentence in notes:
        say(sentence)
    return DONE
