"""python -m meshtrain.adopt inspect | import | export | merge | config: weights, adapters and configs from and to others."""

import argparse
import math
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import yaml

from meshtrain.adopt import extra_files
from meshtrain.adopt.configs import convert
from meshtrain.adopt.exporting import DTYPES, ExportSource, export, export_adapter, merged, open_weights
from meshtrain.adopt.importing import import_weights
from meshtrain.cli import DONE, Parser, command, step, whole_number
from meshtrain.config.model import positions_of
from meshtrain.errors import ConfigError, say, short
from meshtrain.hf import loading
from meshtrain.hf.hf_directory import TensorFiles, config_of
from meshtrain.hf.mapping import Source, layers, mappings
from meshtrain.hf_families import section_of
from meshtrain.model.weights import adapters, parameters

# What each command does.
HELP = {
    "inspect": "the section model that a directory asks for; 2 where its weights or its tokenizer are not whole",
    "import": "a Hugging Face directory as a checkpoint, which checkpoint.resume and every command take",
    "export": "weights as a directory that transformers loads",
    "merge": "weights with their LoRA adapters added, as a directory that transformers loads",
    "config": "a config of LLaMA-Factory (YAML) or DeepSpeed (JSON), or both, as one of ours",
}


@command
def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m meshtrain.adopt", description="Weights from and to Hugging Face directories.")
    commands = parser.add_subparsers(dest="command", required=True)
    parsers = {name: commands.add_parser(name, help=text, description=text) for name, text in HELP.items()}
    for name in ("inspect", "import"):
        parsers[name].add_argument("directory", type=Path, metavar="HF_DIR", help="config.json and safetensors")
    out = "the run directory that is made; it must not be there yet"
    adapter = "LoRA's adapters of PEFT, kept beside the weights"
    parsers["import"].add_argument("out", type=Path, metavar="OUT", help=out)
    parsers["import"].add_argument("--adapter", type=Path, metavar="PEFT_DIR", help=adapter)
    parsers["import"].add_config(required=False)
    run = "a run directory, one step, or a Hugging Face directory"
    for name in ("export", "merge"):
        parsers[name].add_argument("run", type=Path, metavar="RUN", help=run)
        parsers[name].add_argument(
            "directory", type=Path, metavar="HF_DIR", help="what is written; it must not be there yet"
        )
    parsers["export"].add_argument("--adapter", action="store_true", help="LoRA's adapters alone, as PEFT has them")
    adapter = "adapters of PEFT, for weights without"
    parsers["merge"].add_argument("--adapter", type=Path, metavar="PEFT_DIR", help=adapter)
    dtype = "of the weights (as they came, each; of a run that has trained, what it computes in)"
    tokenizer = "where the tokenizer's files are, if not where the weights came from"
    for name in ("export", "merge"):
        newest = "of a run: a number, best (by eval loss) or newest"
        parsers[name].add_argument("--step", type=step, default="newest", help=newest)
        parsers[name].add_argument("--dtype", choices=list(DTYPES), help=dtype)
        parsers[name].add_argument("--tokenizer", type=Path, metavar="DIR", help=tokenizer)
    parsers["config"].add_argument("files", type=Path, nargs="+", metavar="FILE", help="what they are read from")
    devices = "devices it is for, which theirs do not say (1)"
    steps = "steps of the run, where a warm-up is given as a share of them"
    parsers["config"].add_argument("--devices", type=whole_number, metavar="N", help=devices)
    parsers["config"].add_argument("--steps", type=whole_number, metavar="N", help=steps)
    options = parser.parse_args(arguments)
    functions: dict[str, Callable[[argparse.Namespace], int]] = {
        "inspect": run_inspect, "import": run_import, "export": run_export, "merge": run_export, "config": run_config,
    }  # fmt: skip
    return functions[options.command](options)


def run_inspect(options: argparse.Namespace) -> int:
    directory = options.directory
    section, config, files = section_of(directory), config_of(directory), TensorFiles(directory)
    loading.check(config.model, files)
    extra_files.check(directory)
    loading.check_finite(files)
    counts = Counter[str]()
    for mapping in mappings(config.model).values():
        for layer in layers(mapping.weight):
            counts[files.dtype(mapping.tensor(layer))] += math.prod(n for _, n in mapping.weight.dims)
    dtypes = ", ".join(f"{count:,} in {dtype}" for dtype, count in sorted(counts.items()))
    print(f"# {short(directory)}: {parameters(config.model):,} parameters ({dtypes}), {len(files.names)} tensors")
    print(yaml.safe_dump({"model": section}, sort_keys=False), end="")
    return DONE


def run_import(options: argparse.Namespace) -> int:
    config = config_of(options.directory, options.config, options.set)
    program = import_weights(config, options.directory, options.out, options.adapter)
    out = short(options.out)
    print(f"{out}: {program.layout.parameters:,} parameters, for checkpoint.resume: {out}")
    return DONE


def run_export(options: argparse.Namespace) -> int:
    """Exports, or merges."""
    extra_files.refuse_existing(options.directory)
    merge, run = options.command == "merge", short(options.run)
    weights = open_weights(options.run, options.step, options.adapter if merge else None)
    config, of_step = weights.config, "" if weights.step is None else f", of step {weights.step}"
    if merge and not config.lora.rank:
        raise ConfigError(
            f"{run} has no adapters to merge; export writes it as it is, --adapter PEFT_DIR gives it some."
        )
    if merge:
        return _export(options, weights, merged(weights), of_step)
    if not options.adapter and config.lora.rank:
        raise ConfigError(
            f"{run} has LoRA's adapters beside its weights; merge writes both as one model, export --adapter the adapters alone."
        )
    if not options.adapter:
        return _export(options, weights, weights.source, of_step)
    if not config.lora.rank:
        raise ConfigError(f"{run} has no adapters.")
    dtype, base = options.dtype or "float32", config.model.weights or weights.hf_config.get("_name_or_path")
    export_adapter(config, weights.source, options.directory, dtype, base)
    size = sum(weight.size for weight in adapters(config.model, config.lora))
    print(f"{short(options.directory)}: adapters of rank {config.lora.rank}, {size:,} parameters in {dtype}{of_step}")
    return DONE


def _export(options: argparse.Namespace, weights: ExportSource, source: Source, of_step: str) -> int:
    # merged weights are other ones
    untouched = weights.dtypes if options.dtype is None and source is weights.source else {}
    directory = short(options.directory)
    dtype, tokenizer = options.dtype or weights.dtype, weights.tokenizer
    if options.tokenizer is not None:
        tokenizer = extra_files.tokenizer_files(options.tokenizer)
        if not tokenizer:
            vocabularies = "tokenizer.json, tokenizer.model or vocab.json"
            raise ConfigError(f"--tokenizer {short(options.tokenizer)} is no directory with a {vocabularies}.")
    export(weights.config, source, options.directory, dtype, tokenizer, weights.hf_config, untouched)
    model, dtypes = weights.config.model, " and ".join(sorted(set(untouched.values()))) or dtype
    print(f"{directory}: {parameters(model):,} parameters in {dtypes}{of_step}")
    if not tokenizer and not positions_of(model):
        say(f"no tokenizer was found beside the weights, so {directory} has none; --tokenizer DIR takes one.")
    return DONE


def run_config(options: argparse.Namespace) -> int:
    text, notes = convert(options.files, options.devices, options.steps)
    print(text, end="")
    for sentence in notes:
        say(sentence)
    return DONE


if __name__ == "__main__":
    sys.exit(main())
