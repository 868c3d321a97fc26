"""What may change in the config between two runs that share a checkpoint: refused, or allowed and told."""

import dataclasses
import difflib
import json
import platform
from collections.abc import Iterator, Mapping
from typing import Any

from meshtrain.checkpoint.manifest import Manifest
from meshtrain.config import Config, ConfigError

MODEL = (
    "family", "layers", "d_model", "heads", "kv_heads", "head_dim", "d_ff", "vocab_size", "tied_head", "rope_theta",
    "max_positions", "norm_eps",
)  # fmt: skip
# What the digest of the data follows from.
CONTENT = ("source", "mixture", "tokenizer", "validation", "text_field", "bad_documents")
DATA = (*CONTENT, "weights", "batching", "last", "lengths", "length_multiple", "rows_multiple")
SHAPES = tuple(f"model.{name}" for name in MODEL)  # what the weights are, and what the model computes with them
REFUSED = (
    *SHAPES,
    "run.seed",
    *(f"data.{name}" for name in DATA),
    "train.global_batch_size",
    "train.sequence_length",
    "optimizer.name",
)
WARM = (*SHAPES, "data.tokenizer")  # what counts when only the weights are taken
RESIZABLE = ("model.layers", "model.vocab_size")  # a warm start may change these, if asked to
FREE = (
    "run.directory",
    "checkpoint.resume",
    "checkpoint.weights_only",
    "checkpoint.allow",
)  # of the command, not of the run


def check_keys(config: Config) -> None:
    """ConfigError if checkpoint.allow names what is no key, or is allowed anyway; or if there is no run to take weights from."""
    resume = config.checkpoint.resume
    if config.checkpoint.weights_only and resume in ("auto", "never"):
        raise ConfigError(
            f"checkpoint.weights_only takes the weights of another run, but checkpoint.resume is {resume}; "
            "give that run's path there, or leave weights_only out."
        )
    for name in config.checkpoint.allow:
        if name not in REFUSED:
            near = difflib.get_close_matches(name, REFUSED, n=1)
            raise ConfigError(
                f"checkpoint.allow has {name!r}; legal are {', '.join(REFUSED)}"
                + (f"; did you mean {near[0]}?" if near else ".")
            )
        if name in SHAPES and not (config.checkpoint.weights_only and name in RESIZABLE):
            raise ConfigError(
                f"checkpoint.allow has {name}, but a checkpoint's model cannot change"
                + (
                    ", only model.layers and model.vocab_size can."
                    if config.checkpoint.weights_only
                    else "; with checkpoint.weights_only model.layers and model.vocab_size can."
                )
            )


def compare(old: Mapping[str, Any], config: Config, where: str, weights_only: bool) -> list[str]:
    """What changed and may, a sentence each; ConfigError with all that may not. `where` names the checkpoint."""
    refusable = WARM if weights_only else REFUSED
    allowed = [name for name in config.checkpoint.allow if weights_only or name not in SHAPES]
    refused, told = {}, []
    for name, before, now in differences(old, dataclasses.asdict(config)):
        if name in FREE or (name == "model.max_positions" and config.model.family == "llama"):
            continue
        if name in refusable and name not in allowed:
            refused[name] = f"{name} is {now} but was {before}"
        elif not weights_only:
            told.append(f"{name} was {before} and is {now} from here on.")
    if refused:
        raise ConfigError(
            f"{where} does not fit this config: {', '.join(refused.values())}; {_way_out(list(refused), weights_only)}."
        )
    return told


def compare_data(manifest: Manifest, config: Config, read: Mapping[str, str], where: str) -> list[str]:
    """What is read under the same keys but is not what it was, a sentence each; ConfigError if that is what the run trains on.

    `read` is as the manifest's `data`. A digest that one of them lacks (random tokens, an older checkpoint) is not compared.
    """
    old, told = manifest.data, []
    keys = {name for name, *_ in differences(manifest.config, dataclasses.asdict(config))}
    if keys & {f"data.{name}" for name in CONTENT}:
        return []
    if "digest" in read and old.get("digest", read["digest"]) != read["digest"]:
        sentence = _other_content(manifest, config, read["digest"])
        if "data.source" not in config.checkpoint.allow:
            way_out = _way_out(["data.source"], weights_only=False)
            raise ConfigError(f"{where} does not fit the data: {sentence}; {way_out}.")
        told.append(f"{sentence}, from here on.")
    held_out, path = "validation_digest", config.data.validation_source
    changed = held_out in read and old.get(held_out, read[held_out]) != read[held_out]
    if changed and "data.validation_source" not in keys:
        told.append(f"data.validation_source {path} holds other tokens than it did, from here on.")
    return told


def _other_content(manifest: Manifest, config: Config, digest: str) -> str:
    """Which source holds something else than it did."""
    names = config.data.mixture if config.data.source == "mixture" else (config.data.source,)
    # One part a source, in their order.
    parts = zip(names, manifest.data["digest"].split("+"), digest.split("+"), strict=True)
    changed = {name: f"{now}, was {before}" for name, before, now in parts if now != before}
    of_mixture = "mixture: " if config.data.source == "mixture" else ""
    sentence = of_mixture + " and ".join(f"{n} holds other tokens than it did ({what})" for n, what in changed.items())
    then, here = manifest.versions.get("python"), platform.python_version()
    if "stdlib" in changed and then != here:
        sentence += f": it is that of Python {here}, was that of {then}"
    return f"data.source {sentence}"


def compare_hooks(old: Mapping[str, str], now: Mapping[str, str], where: str, weights_only: bool) -> list[str]:
    """What of the model or the loss is replaced by another function than before, a sentence each; ConfigError if it is no more."""
    counts = [kind for kind in {**old, **now} if not (weights_only and kind == "loss")]
    if lost := [kind for kind in counts if kind not in now]:
        given = ", ".join(f"{kind}={old[kind]}" for kind in lost)
        raise ConfigError(
            f"{where} was trained with functions of its own, {given}; give them again from Python: "
            "mt.Program, mt.train and mt.read_model take them."
        )
    changed = [kind for kind in counts if old.get(kind) != now[kind]]
    return [f"the {kind} was {old.get(kind, 'built in')} and is {now[kind]} from here on." for kind in changed]


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """(key path, old, new) of the keys that both configs have and that differ."""
    for section, keys in new.items():
        for key, now in keys.items():
            if section in old and key in old[section]:
                before, now = (
                    json.loads(json.dumps(v)) for v in (old[section][key], now)
                )  # tuples and lists are the same
                if before != now:
                    yield f"{section}.{key}", before, now


def _way_out(names: list[str], weights_only: bool) -> str:
    allow = f"checkpoint.allow: [{', '.join(names)}]"
    if all(name in RESIZABLE for name in names):
        if weights_only:
            return f"{allow} takes what fits and initialises the rest"
        return f"in another run.directory, checkpoint.resume: PATH with checkpoint.weights_only: true and {allow} starts from its weights"
    if any(name in SHAPES for name in names):
        return "set it back, or give another run.directory"
    return f"set it back, give another run.directory, or go on all the same with {allow}"
