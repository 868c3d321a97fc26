"""From a verified step to a state on the program's shardings: what may differ from the run that saved it, and how it is
restored.

A key may differ by what its line in the config says (`config.key.Resume`); also compared are the data, functions of
one's own, versions.
"""

import dataclasses
import platform
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from meshtrain.checkpoint.global_arrays import (
    ISLANDS,
    REDUCE,
    GlobalArray,
    GlobalArrays,
)
from meshtrain.checkpoint.manifest import Start, StepManifest, earlier_config
from meshtrain.checkpoint.resharding import (
    check_sync_start,
    initial_groups,
    mean_groups,
    regrouping_notes,
    restore_residuals,
)
from meshtrain.config import Config
from meshtrain.config.follow import differences, followed, value_of
from meshtrain.config.key import Resume, keys, known
from meshtrain.config.model import LoraConfig
from meshtrain.errors import ConfigError, nearest
from meshtrain.model.weights import lora_difference
from meshtrain.run.versions import versions
from meshtrain.sources import SOURCES
from meshtrain.step import State

Tree = Any
FLOATS = ("float32", "bfloat16", "float16")
# Keys that count for the weights alone; those that a checkpoint can never have otherwise; those that the data's digest
# follows from.
WEIGHTS = (Resume.SHAPE, Resume.SIZE, Resume.TOKENS)
SHAPES = (Resume.SHAPE, Resume.SIZE)
CONTENT = (Resume.CONTENT, Resume.TOKENS)
REFUSED = (*SHAPES, *CONTENT, Resume.ADAPTERS, Resume.REFUSED)

OTHER_ADAPTERS = (
    "give another run.directory (of a run without adapters checkpoint.resume: PATH with checkpoint.weights_only: true "
    "takes "
    "the weights)"
)
# --- what may differ


def check_keys(config: Config) -> None:
    """Raises ConfigError if checkpoint.allow names an unknown key or one that may change anyway, or if there is no run
    to take weights from.
    """
    resume = config.checkpoint.resume
    if config.checkpoint.weights_only and resume in ("auto", "never"):
        raise ConfigError(
            f"checkpoint.weights_only takes the weights of another run, but checkpoint.resume is {resume}; "
            "give that run's path there, or leave weights_only out."
        )
    rules = {
        name: key.resume
        for name, key in keys(type(config)).items()
        if key.resume in (*REFUSED, Resume.FUNCTION)
    }
    for name in config.checkpoint.allow:
        if name not in rules:
            # What a model computes may never differ: those keys are none of the legal ones.
            legal = [
                key
                for key, rule in rules.items()
                if rule not in (Resume.SHAPE, Resume.ADAPTERS)
            ]
            ending = nearest(name, rules) or f"; legal are {', '.join(legal)}."
            raise ConfigError(f"checkpoint.allow has {name!r}{ending}")
        if rules[name] is Resume.ADAPTERS:
            but = "but a checkpoint's adapters cannot change"
            raise ConfigError(f"checkpoint.allow has {name}, {but}; {OTHER_ADAPTERS}.")
        if rules[name] in SHAPES and not (
            config.checkpoint.weights_only and rules[name] is Resume.SIZE
        ):
            only = (
                ", only"
                if config.checkpoint.weights_only
                else "; with checkpoint.weights_only"
            )
            sizes = " and ".join(
                name for name, rule in rules.items() if rule is Resume.SIZE
            )
            raise ConfigError(
                f"checkpoint.allow has {name}, but a checkpoint's model cannot change{only} {sizes} can."
            )


def compare(
    old: Mapping[str, Any], config: Config, where: str, weights_only: bool
) -> list[str]:
    """Returns a sentence on each key that changed and may; ConfigError with all that may not.

    `where` names the checkpoint.
    """
    rules = keys(type(config))
    before = earlier_config(old, type(config))
    refusable = WEIGHTS if weights_only else REFUSED
    refused = dict[str, str]()
    notes = []
    for name, was, now in differences(old, dataclasses.asdict(config)):
        key = rules[name]
        if key.null and was is None:
            was = value_of(before, name)
            was = list(was) if isinstance(was, tuple) else was
        follows = (
            key.null
            and key.resume not in SHAPES
            and followed(before, name)
            and followed(config, name)
        )
        if (
            was == now
            or follows
            or key.resume in (Resume.FREE, Resume.FUNCTION)
            or not key.counts(config)
        ):
            continue
        allowed = name in config.checkpoint.allow and (
            weights_only or key.resume not in SHAPES
        )
        if key.resume in refusable and not allowed:
            refused[name] = f"{name} is {now} but was {was}"
        elif not weights_only:
            notes.append(f"{name} was {was} and is {now} from here on.")
    if refused:
        way_out = _way_out(
            {rules[name].resume for name in refused}, ", ".join(refused), weights_only
        )
        raise ConfigError(
            f"{where} does not fit this config: {', '.join(refused.values())}; {way_out}."
        )
    return notes


def compare_data(
    manifest: StepManifest, config: Config, digests: Mapping[str, str], where: str
) -> list[str]:
    """Returns a sentence on each source that holds other tokens under the same keys; ConfigError if the run trains on
    it.

    `digests` is as the manifest's `data`. A digest that one of them lacks (random tokens, an older checkpoint) is not
    compared.
    """
    old = manifest.data
    notes = []
    rules = keys(type(config))
    changed = {
        name for name, *_ in differences(manifest.config, dataclasses.asdict(config))
    }
    if any(rules[name].resume in CONTENT for name in changed):
        return []
    if (
        "digest" in digests
        and old.get("digest", digests["digest"]) != digests["digest"]
    ):
        sentence = _other_content(manifest, config, digests["digest"])
        if "data.source" not in config.checkpoint.allow:
            way_out = _way_out({Resume.CONTENT}, "data.source", weights_only=False)
            raise ConfigError(f"{where} does not fit the data: {sentence}; {way_out}.")
        notes.append(f"{sentence}, from here on.")
    name = "validation_digest"
    path = config.data.validation_source
    other = name in digests and old.get(name, digests[name]) != digests[name]
    if other and "data.validation_source" not in changed:
        notes.append(
            f"data.validation_source {path} holds other tokens than it did, from here on."
        )
    return notes


def _other_content(manifest: StepManifest, config: Config, digest: str) -> str:
    names = config.data.mixture or (config.data.source,)
    parts = zip(
        names, manifest.data["digest"].split("+"), digest.split("+"), strict=True
    )
    changed = {
        name: f"{now}, was {before}" for name, before, now in parts if now != before
    }
    of_mixture = "mixture: " if config.data.mixture else ""
    sentence = of_mixture + " and ".join(
        f"{n} holds other tokens than it did ({what})" for n, what in changed.items()
    )
    then = manifest.versions.get("python")
    now = platform.python_version()
    if then != now and any(
        name in SOURCES and SOURCES[name].of_python for name in changed
    ):
        sentence += f": it is that of Python {now}, was that of {then}"
    if config.data.tokenizer != "byte" and "begin" not in manifest.config.get(
        "data", {}
    ):
        sentence += (
            "; the version that wrote the checkpoint read no file beside the tokenizer: data.begin=none, and the "
            "token that then ended "
            "documents as data.end, prepare them as it did"
        )
    return f"data.source {sentence}"


def compare_versions(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Returns a sentence where a checkpoint was written by other versions: its values are read all the same, but the
    bits to come may differ.
    """
    changed = [
        f"{name} {then[name]} (here {here})"
        for name, here in now.items()
        if then.get(name, here) != here
    ]
    return [f"the checkpoint was written with {', '.join(changed)}."] if changed else []


def compare_hooks(
    old: Mapping[str, str],
    now: Mapping[str, str],
    where: str,
    weights_only: bool,
    allow: Collection[str] | None = None,
) -> list[str]:
    """Returns a sentence on each function that replaces another part of the model or the loss than before; ConfigError
    if one is missing.

    `allow`: keys whose function may be missing, as checkpoint.allow has them; None: nothing is trained, so that none
    may.
    """
    counts = [kind for kind in {**old, **now} if not (weights_only and kind == "loss")]
    by_kind = {
        path.partition(".")[2]: path
        for path, key in keys(Config).items()
        if key.resume is Resume.FUNCTION
    }
    if missing := [
        kind
        for kind in counts
        if kind not in now and by_kind[kind] not in (allow or ())
    ]:
        names = ", ".join(f"{kind}={old[kind]}" for kind in missing)
        named = ", ".join(by_kind[kind] for kind in missing)
        built_in = f", or go on with what is built in by checkpoint.allow: [{named}]"
        raise ConfigError(
            f"{where} was trained with functions of its own, {names}; give them again ({named} in a config, else "
            "mt.Program, mt.train "
            f"and mt.read_model){'' if allow is None else built_in}."
        )
    changed = [kind for kind in counts if old.get(kind) != now.get(kind)]
    return [
        f"the {kind} was {old.get(kind, 'built in')} and is {now.get(kind, 'built in')} from here on."
        for kind in changed
    ]


def _way_out(rules: Collection[Resume], names: str, weights_only: bool) -> str:
    allow = f"checkpoint.allow: [{names}]"
    if all(rule is Resume.SIZE for rule in rules):
        if weights_only:
            return f"{allow} takes what fits and initialises the rest"
        resume = "checkpoint.resume: PATH with checkpoint.weights_only: true"
        return f"to start from its weights, give another run.directory, {resume} and {allow}"
    if Resume.ADAPTERS in rules:
        return f"set it back, or {OTHER_ADAPTERS}"
    if any(rule in SHAPES for rule in rules):
        return "set it back, or give another run.directory"
    return f"set it back, give another run.directory, or continue anyway with {allow}"


# --- how it is restored


def find_changes(
    config: Config,
    converter: GlobalArrays,
    start: Start,
    weights_only: bool,
    digests: Mapping[str, str],
) -> list[str]:
    """Returns a sentence on each thing that changed since and may; ConfigError with what may not.

    `digests`: those of the data that this run reads.
    """
    program = converter.program
    manifest = start.manifest
    where = f"checkpoint {start.directory}"
    # weights that no run of ours has trained: its data and their tokenizer are nobody's
    left_out = ("data",) if manifest.weights_alone else ()
    old = {
        section: keys
        for section, keys in manifest.config.items()
        if section not in left_out
    }
    notes = compare(old, config, where, weights_only)
    notes += compare_hooks(
        manifest.hooks,
        program.hooks.names,
        where,
        weights_only,
        config.checkpoint.allow,
    )
    if not weights_only:
        notes += compare_versions(manifest.versions, versions())
        notes += compare_data(manifest, config, digests, where)
        records = manifest.leaves.values()
        if config.parallel.sync.every or any(r.get("islands") for r in records):
            check_sync_start(
                manifest.config, manifest.step, config.parallel.sync, where
            )
            notes += regrouping_notes(converter.entries, manifest.leaves)
    return notes


def restore(converter: GlobalArrays, start: Start, say: Callable[[str], None]) -> State:
    """Returns the full state; ConfigError if the checkpoint has other leaves.

    `say` reports what was resharded, and broken replica groups.
    """
    # precision.compute may change, and the loss scale with it; so may compression, and replica groups may begin to step
    # locally
    entries = [
        e
        for e in converter.entries
        if not e.name.startswith(("scale.", REDUCE, ISLANDS))
    ]
    _check(start.directory, start.manifest, entries)
    residuals: dict[str, jax.Array] = {}
    if any(
        name.startswith(REDUCE)
        for name in (*start.manifest.leaves, *(e.name for e in converter.entries))
    ):
        residuals, sentences = restore_residuals(converter, start)
        for sentence in sentences:
            say(sentence)
    restored = residuals | _restore_groups(converter, start, say)
    return converter.state(start.directory, start.manifest.leaves, restored)


def _restore_groups(
    converter: GlobalArrays, start: Start, say: Callable[[str], None]
) -> dict[str, jax.Array]:
    """Returns the state beside residuals, if this run or the checkpoint has replica groups; else nothing."""
    leaves = start.manifest.leaves
    present = [
        e
        for e in converter.entries
        if e.name in leaves and not e.name.startswith(REDUCE)
    ]
    regrouped = [e for e in present if leaves[e.name].get("islands", 0) != e.islands]
    if not regrouped and not converter.program.config.parallel.sync.every:
        return {}
    live = converter.read(
        start.directory, leaves, [e for e in present if e not in regrouped]
    )
    live |= mean_groups(converter, start.directory, leaves, regrouped, say)
    return live | initial_groups(converter.entries, live)


def read_weights(
    converter: GlobalArrays, directory: Path, manifest: StepManifest
) -> Tree:
    """Returns the live parameters of a verified step and nothing else of it; ConfigError if they do not fit the
    program's model.
    """
    parameters = [e for e in converter.entries if e.name.startswith("params.")]
    _check(directory, manifest, parameters, weights_only=True)
    live = converter.read(directory, manifest.leaves, parameters)
    return jax.tree.unflatten(
        jax.tree.structure(converter.shapes.params), [live[e.name] for e in parameters]
    )


def start_from_weights(
    converter: GlobalArrays, start: Start, say: Callable[[str], None]
) -> State:
    """Returns the state before the first step, with the checkpoint's weights; resized where checkpoint.allow names the
    axis.
    """
    parameters = [e for e in converter.entries if e.name.startswith("params.")]
    _check_adapters(converter, start)
    resized = [e for e in parameters if _is_resized(converter, start, e)]
    new_adapters = [
        e
        for e in parameters
        if e.parameter.adapter and e.name not in start.manifest.leaves
    ]
    same = [e for e in parameters if e not in resized and e not in new_adapters]
    _check(start.directory, start.manifest, same, weights_only=True)
    state = converter.program.init()
    leaves = start.manifest.leaves
    arrays: Any = jax.tree.structure(converter.shapes.params)
    live = dict(
        zip(
            (e.name for e in parameters),
            arrays.flatten_up_to(state.params),
            strict=True,
        )
    )
    for entry in same:
        jax.tree.map(lambda x: x.delete(), live[entry.name])
    live |= converter.read(start.directory, leaves, same)
    for entry in resized:
        live[entry.name] = converter.resized(
            start.directory, leaves, entry, live[entry.name]
        )
        stored = leaves[entry.name]["shape"]
        say(
            f"{entry.name} is {list(entry.shape)}; the checkpoint has {stored} of it, the rest is as initialised."
        )
    say(f"started from the weights of step {start.manifest.step} in {start.directory}.")
    return converter.program.from_weights(
        state, jax.tree.unflatten(arrays, live.values())
    )


def _is_resized(converter: GlobalArrays, start: Start, entry: GlobalArray) -> bool:
    """Returns whether the checkpoint has the leaf in another shape, along axes that checkpoint.allow names and no
    other.
    """
    record = start.manifest.leaves.get(entry.name)
    if entry.leaf is None or record is None or len(record["shape"]) != len(entry.shape):
        return False
    allow = converter.program.config.checkpoint.allow
    free = {
        axis
        for key, axis in (("model.layers", "layers"), ("model.vocab_size", "vocab"))
        if key in allow
    }
    changed = {
        a
        for a, n, m in zip(entry.leaf.axes, entry.shape, record["shape"], strict=True)
        if n != m
    }
    return bool(changed) and changed <= free


def _check_adapters(converter: GlobalArrays, start: Start) -> None:
    section = known(start.manifest.config, Config).get("lora", {})
    if not section.get("rank"):
        return
    config = converter.program.config
    before = LoraConfig(**section | {"targets": tuple(section["targets"])})
    if name := lora_difference(config.model, before, config.lora):
        raise ConfigError(
            f"checkpoint {start.directory} has adapters with lora.{name} {section[name]}, and this config has "
            f"{getattr(config.lora, name)}; give it the same section lora, or start from their merge (meshtrain adopt "
            "merge)."
        )


def _check(
    directory: Path,
    manifest: StepManifest,
    entries: Sequence[GlobalArray],
    weights_only: bool = False,
) -> None:
    """Raises ConfigError if a leaf is missing or has another shape or dtype, which Orbax would hide or cast silently.

    Weights alone, and frozen ones, may be cast: they were an fp32 master in one run and in the computing dtype in
    another.
    """
    for entry in entries:
        record = manifest.leaves.get(entry.name)
        may_cast = weights_only or entry.frozen
        dtype = (
            record["dtype"]
            if record and may_cast and record["dtype"] in FLOATS
            else entry.live.dtype
        )
        wanted = f"{dtype}{list(entry.shape[bool(entry.islands) :])}"
        stored = (
            f"{record['dtype']}{record['shape'][bool(record.get('islands')) :]}"
            if record
            else None
        )
        if stored != wanted:
            reason = f"it is {stored}" if record else "there is none"
            raise ConfigError(
                f"checkpoint {directory} does not fit this config: {entry.name} is {wanted}, but {reason} in it."
            )
