"""What may change between two runs that share a checkpoint: a key by what its line says, the data, functions of one's own."""

import dataclasses
import platform
from collections.abc import Collection, Mapping
from typing import Any

from meshtrain.checkpoint.manifest import Manifest
from meshtrain.config import Config, resolve
from meshtrain.config.follow import differences, followed, put, value_of
from meshtrain.config.key import Resume, keys, known
from meshtrain.errors import ConfigError, nearest
from meshtrain.sources import SOURCES

# What counts for the weights alone; what of it the checkpoint can never have otherwise; what the digest of the data follows from.
WEIGHTS = (Resume.SHAPE, Resume.SIZE, Resume.TOKENS)
SHAPES = (Resume.SHAPE, Resume.SIZE)
CONTENT = (Resume.CONTENT, Resume.TOKENS)
REFUSED = (*SHAPES, *CONTENT, Resume.REFUSED)


def check_keys(config: Config) -> None:
    """ConfigError if checkpoint.allow names what is no key, or is allowed anyway; or if there is no run to take weights from."""
    resume = config.checkpoint.resume
    if config.checkpoint.weights_only and resume in ("auto", "never"):
        raise ConfigError(
            f"checkpoint.weights_only takes the weights of another run, but checkpoint.resume is {resume}; "
            "give that run's path there, or leave weights_only out."
        )
    rules = {name: key.resume for name, key in keys(type(config)).items() if key.resume in REFUSED}
    for name in config.checkpoint.allow:
        if name not in rules:
            # What a model computes may never differ: those keys are none of the legal ones.
            legal = [key for key, rule in rules.items() if rule not in SHAPES or rule is Resume.SIZE]
            ending = nearest(name, rules) or f"; legal are {', '.join(legal)}."
            raise ConfigError(f"checkpoint.allow has {name!r}{ending}")
        if rules[name] in SHAPES and not (config.checkpoint.weights_only and rules[name] is Resume.SIZE):
            only = ", only" if config.checkpoint.weights_only else "; with checkpoint.weights_only"
            sizes = " and ".join(name for name, rule in rules.items() if rule is Resume.SIZE)
            raise ConfigError(f"checkpoint.allow has {name}, but a checkpoint's model cannot change{only} {sizes} can.")


def compare(old: Mapping[str, Any], config: Config, where: str, weights_only: bool) -> list[str]:
    """What changed and may, a sentence each; ConfigError with all that may not. `where` names the checkpoint."""
    rules, before = keys(type(config)), earlier_config(old, type(config))
    refusable = WEIGHTS if weights_only else REFUSED
    refused, reported = dict[str, str](), []
    for name, was, now in differences(old, dataclasses.asdict(config)):
        key = rules[name]
        if key.null and was is None:
            was = value_of(before, name)
        follows = key.null and key.resume not in SHAPES and followed(before, name) and followed(config, name)
        if was == now or follows or key.resume is Resume.FREE or not key.counts(config):
            continue
        allowed = name in config.checkpoint.allow and (weights_only or key.resume not in SHAPES)
        if key.resume in refusable and not allowed:
            refused[name] = f"{name} is {now} but was {was}"
        elif not weights_only:
            reported.append(f"{name} was {was} and is {now} from here on.")
    if refused:
        way_out = _way_out({rules[name].resume for name in refused}, ", ".join(refused), weights_only)
        raise ConfigError(f"{where} does not fit this config: {', '.join(refused.values())}; {way_out}.")
    return reported


def earlier_config(old: Mapping[str, Any], kind: type[Config] = Config) -> Config:
    """The config that a checkpoint keeps, in this version's keys; older ones hold null where a value followed from the others."""
    return resolve(put(kind(), **_tuples(known(old, kind))))


def _tuples(value: Any) -> Any:
    """What JSON has as lists, which a config has as tuples."""
    if isinstance(value, Mapping):
        return {name: _tuples(x) for name, x in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def compare_data(manifest: Manifest, config: Config, read: Mapping[str, str], where: str) -> list[str]:
    """What is read under the same keys but is not what it was, a sentence each; ConfigError if that is what the run trains on.

    `read` is as the manifest's `data`. A digest that one of them lacks (random tokens, an older checkpoint) is not compared.
    """
    old, reported, rules = manifest.data, [], keys(type(config))
    changed = {name for name, *_ in differences(manifest.config, dataclasses.asdict(config))}
    if any(rules[name].resume in CONTENT for name in changed):
        return []
    if "digest" in read and old.get("digest", read["digest"]) != read["digest"]:
        sentence = _other_content(manifest, config, read["digest"])
        if "data.source" not in config.checkpoint.allow:
            way_out = _way_out({Resume.CONTENT}, "data.source", weights_only=False)
            raise ConfigError(f"{where} does not fit the data: {sentence}; {way_out}.")
        reported.append(f"{sentence}, from here on.")
    held_out, path = "validation_digest", config.data.validation_source
    other = held_out in read and old.get(held_out, read[held_out]) != read[held_out]
    if other and "data.validation_source" not in changed:
        reported.append(f"data.validation_source {path} holds other tokens than it did, from here on.")
    return reported


def _other_content(manifest: Manifest, config: Config, digest: str) -> str:
    """Which source holds something else than it did."""
    names = config.data.mixture or (config.data.source,)
    # One part a source, in their order.
    parts = zip(names, manifest.data["digest"].split("+"), digest.split("+"), strict=True)
    changed = {name: f"{now}, was {before}" for name, before, now in parts if now != before}
    of_mixture = "mixture: " if config.data.mixture else ""
    sentence = of_mixture + " and ".join(f"{n} holds other tokens than it did ({what})" for n, what in changed.items())
    then, here = manifest.versions.get("python"), platform.python_version()
    if then != here and any(name in SOURCES and SOURCES[name].of_python for name in changed):
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


def _way_out(rules: Collection[Resume], names: str, weights_only: bool) -> str:
    """What to do where keys of these rules have changed."""
    allow = f"checkpoint.allow: [{names}]"
    if all(rule is Resume.SIZE for rule in rules):
        if weights_only:
            return f"{allow} takes what fits and initialises the rest"
        return f"in another run.directory, checkpoint.resume: PATH with checkpoint.weights_only: true and {allow} starts from its weights"
    if any(rule in SHAPES for rule in rules):
        return "set it back, or give another run.directory"
    return f"set it back, give another run.directory, or go on all the same with {allow}"
