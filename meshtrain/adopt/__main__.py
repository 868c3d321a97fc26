"""python -m meshtrain.adopt inspect | import | export | merge | config: weights, adapters and configs from and to others."""

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import yaml

from meshtrain.adopt.aside import refuse_taken
from meshtrain.adopt.beside import tokenizer_files
from meshtrain.adopt.configs import convert
from meshtrain.adopt.exporting import Opened, merged, opened
from meshtrain.adopt.files import Files
from meshtrain.adopt.importing import import_weights
from meshtrain.adopt.mapping import Source, layers, rows
from meshtrain.adopt.theirs import config_of
from meshtrain.adopt.writing import DTYPES, export, export_adapter
from meshtrain.cli import DONE, Parser, command, step, whole_number
from meshtrain.config.model import positions_of
from meshtrain.config.theirs import section_of
from meshtrain.errors import ConfigError, say, short
from meshtrain.model.weights import adapters, parameters, weights


@command
def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m meshtrain.adopt", description="Weights from and to Hugging Face directories.")
    commands = parser.add_subparsers(dest="command", required=True)
    told = "the section model that a directory asks for, and whether its weights are all there"
    inspecting = commands.add_parser("inspect", help=told, description=told)
    inspecting.add_argument("directory", type=Path, metavar="HF_DIR", help="config.json and safetensors")
    told = "a Hugging Face directory as a checkpoint, which checkpoint.resume and every command take"
    importing = commands.add_parser("import", help=told, description=told)
    importing.add_argument("directory", type=Path, metavar="HF_DIR", help="config.json and safetensors")
    importing.add_argument(
        "out", type=Path, metavar="OUT", help="the run directory that is made; it must not be there yet"
    )
    importing.add_argument(
        "--adapter", type=Path, metavar="PEFT_DIR", help="LoRA's adapters of PEFT, kept beside the weights"
    )
    importing.add_config(required=False)
    told = "weights as a directory that transformers loads"
    exporting = commands.add_parser("export", help=told, description=told)
    exporting.add_argument(
        "run", type=Path, metavar="RUN", help="a run directory, one step, or a Hugging Face directory"
    )
    exporting.add_argument("directory", type=Path, metavar="HF_DIR", help="what is written; it must not be there yet")
    exporting.add_argument("--adapter", action="store_true", help="LoRA's adapters alone, as PEFT has them")
    told = "weights with their LoRA adapters added, as a directory that transformers loads"
    merging = commands.add_parser("merge", help=told, description=told)
    merging.add_argument("run", type=Path, metavar="RUN", help="a run directory, one step, or a Hugging Face directory")
    merging.add_argument("directory", type=Path, metavar="HF_DIR", help="what is written; it must not be there yet")
    merging.add_argument("--adapter", type=Path, metavar="PEFT_DIR", help="adapters of PEFT, for weights without")
    for parsed in (exporting, merging):
        parsed.add_argument(
            "--step", type=step, default="newest", help="of a run: a number, best (by eval loss) or newest"
        )
        parsed.add_argument(
            "--dtype", choices=list(DTYPES), help="of the weights (that of the source; of a run, what it computes in)"
        )
        parsed.add_argument(
            "--tokenizer",
            type=Path,
            metavar="DIR",
            help="where the tokenizer's files are, if not where the weights came from",
        )
    told = "a config of LLaMA-Factory (YAML) or DeepSpeed (JSON), or both, as one of ours"
    converting = commands.add_parser("config", help=told, description=told)
    converting.add_argument("files", type=Path, nargs="+", metavar="FILE", help="what they are read from")
    converting.add_argument(
        "--devices", type=whole_number, metavar="N", help="devices it is for, which theirs do not say (1)"
    )
    converting.add_argument(
        "--steps", type=whole_number, metavar="N", help="steps of the run, where a warm-up is given as a share of them"
    )
    options = parser.parse_args(arguments)
    run: Callable[[argparse.Namespace], int] = {
        "inspect": inspect,
        "import": imported,
        "export": exported,
        "merge": merge,
        "config": converted,
    }[options.command]
    return run(options)


def inspect(options: argparse.Namespace) -> int:
    directory = options.directory
    section, config, files = section_of(directory), config_of(directory), Files(directory)
    dtypes: dict[str, int] = {}
    named = rows(config.model)
    for weight in weights(config.model):
        row = named[weight.name]
        for layer in layers(weight):
            dtype = files.dtype(row.name(layer))
            dtypes[dtype] = dtypes.get(dtype, 0) + math.prod(n for _, n in weight.dims)
    told = ", ".join(f"{count:,} in {dtype}" for dtype, count in sorted(dtypes.items()))
    print(f"# {short(directory)}: {parameters(config.model):,} parameters ({told}), {len(files.names)} tensors")
    print(yaml.safe_dump({"model": section}, sort_keys=False), end="")
    return DONE


def imported(options: argparse.Namespace) -> int:
    config = config_of(options.directory, options.config, options.set)
    program = import_weights(config, options.directory, options.out, options.adapter)
    print(
        f"{short(options.out)}: {program.layout.parameters:,} parameters, for checkpoint.resume: {short(options.out)}"
    )
    return DONE


def exported(options: argparse.Namespace) -> int:
    refuse_taken(options.directory)
    found = opened(options.run, options.step)
    if options.adapter:
        return _adapter(options, found)
    if found.config.lora.rank:
        raise ConfigError(
            f"{short(options.run)} has LoRA's adapters beside its weights; merge writes both as one model, export --adapter the adapters alone."
        )
    return _written(options, found, found.source)


def merge(options: argparse.Namespace) -> int:
    refuse_taken(options.directory)
    found = opened(options.run, options.step, options.adapter)
    if not found.config.lora.rank:
        raise ConfigError(
            f"{short(options.run)} has no adapters to merge; export writes it as it is, --adapter PEFT_DIR gives it some."
        )
    return _written(options, found, merged(found))


def _adapter(options: argparse.Namespace, found: Opened) -> int:
    config = found.config
    if not config.lora.rank:
        raise ConfigError(f"{short(options.run)} has no adapters.")
    dtype = options.dtype or "float32"
    export_adapter(
        config, found.source, options.directory, dtype, config.model.weights or found.theirs.get("_name_or_path")
    )
    size = sum(weight.size for weight in adapters(config.model, config.lora))
    print(
        f"{short(options.directory)}: adapters of rank {config.lora.rank}, {size:,} parameters in {dtype}{_of_step(found)}"
    )
    return DONE


def _written(options: argparse.Namespace, found: Opened, source: Source) -> int:
    dtype, tokenizer = options.dtype or found.dtype, found.tokenizer
    if options.tokenizer is not None:
        tokenizer = tokenizer_files(options.tokenizer)
        if not tokenizer:
            raise ConfigError(
                f"--tokenizer {short(options.tokenizer)} is no directory with a tokenizer.json, tokenizer.model or vocab.json."
            )
    export(found.config, source, options.directory, dtype, tokenizer, found.theirs)
    print(f"{short(options.directory)}: {parameters(found.config.model):,} parameters in {dtype}{_of_step(found)}")
    if not tokenizer and not positions_of(found.config.model):
        say(
            f"no tokenizer was found beside the weights, so {short(options.directory)} has none; --tokenizer DIR takes one."
        )
    return DONE


def _of_step(found: Opened) -> str:
    return "" if found.step is None else f", of step {found.step}"


def converted(options: argparse.Namespace) -> int:
    text, said = convert(options.files, options.devices, options.steps)
    print(text, end="")
    for sentence in said:
        say(sentence)
    return DONE


if __name__ == "__main__":
    sys.exit(main())
