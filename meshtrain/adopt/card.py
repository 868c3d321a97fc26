"""The model card of an exported directory, README.md: what the model is, how it was trained, how it is used.

Paths of this machine are not in it: of a source of data the last part of its name alone.
"""

from collections.abc import Iterator
from pathlib import Path

import yaml

from meshtrain import hub
from meshtrain.adopt.exporting import ExportSource
from meshtrain.config import Config
from meshtrain.families import FAMILIES
from meshtrain.model.weights import adapters, parameters
from meshtrain.run.versions import versions

CARD = "README.md"


def write_card(
    directory: Path, weights: ExportSource, dtype: str, adapter: bool = False
) -> None:
    """Writes the card of weights that were exported in `dtype`; `adapter`: those of LoRA alone."""
    (directory / CARD).write_text(
        card(directory.absolute().name, weights, dtype, adapter)
    )


def card(name: str, weights: ExportSource, dtype: str, adapter: bool = False) -> str:
    """Returns the text of a card, Markdown behind the fields that the hub reads."""
    config = weights.config
    images = FAMILIES[config.model.family].images
    base = _base(weights)
    fields = {
        "library_name": "peft" if adapter else "transformers",
        "pipeline_tag": "image-classification" if images else "text-generation",
        "tags": [
            "meshtrain",
            config.model.family,
            *(["lora"] if config.lora.rank else []),
        ],
        **({"base_model": base} if base else {}),
    }
    size = (
        sum(weight.size for weight in adapters(config.model, config.lora))
        if adapter
        else parameters(config.model)
    )
    what = (
        f"LoRA adapters of rank {config.lora.rank}"
        if adapter
        else f"A {config.model.family}"
    )
    parts = [
        f"---\n{yaml.safe_dump(fields, sort_keys=False)}---",
        f"# {name}",
        f"{what} with {size:,} parameters in {dtype}, written by meshtrain {versions()['meshtrain']}.",
        _table(_model_rows(config)),
    ]
    if trained := list(_training_rows(weights)):
        parts += ["## Training", _table(trained)]
    if not images:
        parts += ["## Use", f"```bash\nmeshtrain generate {name} --prompt TEXT\n```"]
    parts += [
        "## Limits",
        "What it was trained for, and what it must not be used for: not written.",
    ]
    return "\n\n".join(parts) + "\n"


def _base(weights: ExportSource) -> str | None:
    """Returns the repository that the weights began with, if that is known by its name and not by a path."""
    named = str(weights.config.model.weights or weights.hf_config.get("_name_or_path"))
    return named if hub.NAME.fullmatch(named) else None


def _table(rows: list[tuple[str, str]]) -> str:
    return "\n".join(
        ["| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows)]
    )


def _model_rows(config: Config) -> list[tuple[str, str]]:
    model = config.model
    rows = [
        ("layers", f"{model.layers}"),
        ("width", f"{model.d_model}"),
        ("heads", f"{model.heads}, of keys and values {model.kv_heads}"),
        ("vocabulary", f"{model.vocab_size:,}"),
    ]
    if model.moe.experts:
        rows.append(
            ("experts", f"{model.moe.experts}, {model.moe.top_k} for each token")
        )
    return rows


def _training_rows(weights: ExportSource) -> Iterator[tuple[str, str]]:
    """Yields how a run trained the weights; nothing of weights that came as they are."""
    config = weights.config
    if not weights.step:
        return
    train = config.train
    optimizer = config.optimizer
    yield "objective", train.objective
    yield (
        "data",
        ", ".join(_last(name) for name in config.data.mixture or [config.data.source]),
    )
    yield (
        "steps",
        f"{weights.step:,} of {train.global_batch_size} x {train.sequence_length} tokens",
    )
    yield (
        "optimizer",
        f"{optimizer.name}, learning rate {optimizer.learning_rate:g}, {optimizer.schedule}",
    )
    yield "computed in", config.precision.compute
    yield "mesh", str(config.mesh)
    yield from (
        (name, f"{value:.4f}")
        for name, value in weights.losses.items()
        if value is not None
    )


def _last(source: str) -> str:
    return source.rstrip("/").rpartition("/")[2]
