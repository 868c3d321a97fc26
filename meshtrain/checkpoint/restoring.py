"""From a verified step to a state on the program's shardings: all of it, or a new run's state with its weights."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from meshtrain.checkpoint import moved, owed
from meshtrain.checkpoint.canonical import Canonical, Entry
from meshtrain.checkpoint.finding import Start
from meshtrain.checkpoint.manifest import Manifest
from meshtrain.config import Config
from meshtrain.config.key import known
from meshtrain.config.model import LoraConfig
from meshtrain.errors import ConfigError
from meshtrain.model.weights import lora_difference
from meshtrain.step import State

Tree = Any
FLOATS = ("float32", "bfloat16", "float16")


def restore(canonical: Canonical, start: Start, say: Callable[[str], None]) -> State:
    """The whole state; ConfigError if the checkpoint has other leaves. `say` takes what became of what compression kept."""
    # precision.compute may change, and the loss scale with it; so may compression, and islands may begin to step by themselves
    entries = [e for e in canonical.entries if not e.name.startswith(("scale.", owed.REDUCE, moved.OUTER))]
    _check(start.directory, start.manifest, entries)
    found, sentences = owed.restored(canonical, start)
    for sentence in sentences:
        say(sentence)
    return canonical.state(start.directory, start.manifest.leaves, found)


def read_weights(canonical: Canonical, directory: Path, manifest: Manifest) -> Tree:
    """The live parameters of a verified step and nothing else of it; ConfigError if they do not fit the program's model."""
    parameters = [e for e in canonical.entries if e.name.startswith("params.")]
    _check(directory, manifest, parameters, weights_only=True)
    found = canonical.read(directory, manifest.leaves, parameters)
    return jax.tree.unflatten(jax.tree.structure(canonical.program.layout.masters), [found[e.name] for e in parameters])


def start_from_weights(canonical: Canonical, start: Start, say: Callable[[str], None]) -> State:
    """The state before the first step, with the checkpoint's weights; resized where checkpoint.allow names the axis."""
    parameters = [e for e in canonical.entries if e.name.startswith("params.")]
    _check_adapters(canonical, start)
    resized = [e for e in parameters if _resized(canonical, start, e)]
    drawn = [e for e in parameters if e.parameter.adapter and e.name not in start.manifest.leaves]
    whole = [e for e in parameters if e not in resized and e not in drawn]
    _check(start.directory, start.manifest, whole, weights_only=True)
    state, leaves = canonical.program.init(), start.manifest.leaves
    live = dict(zip((e.name for e in parameters), jax.tree.leaves(state.params), strict=True))
    for entry in whole:
        live[entry.name].delete()
    live |= canonical.read(start.directory, leaves, whole)
    for entry in resized:
        live[entry.name] = canonical.into(start.directory, leaves, entry, live[entry.name])
        say(
            f"{entry.name} is {list(entry.shape)}; the checkpoint has {leaves[entry.name]['shape']} of it, the rest is as initialised."
        )
    say(f"started from the weights of step {start.manifest.step} in {start.directory}.")
    return canonical.program.from_weights(state, jax.tree.unflatten(jax.tree.structure(state.params), live.values()))


def _resized(canonical: Canonical, start: Start, entry: Entry) -> bool:
    """The checkpoint has the leaf in another shape, along axes that checkpoint.allow names and no other."""
    record = start.manifest.leaves.get(entry.name)
    if entry.leaf is None or record is None or len(record["shape"]) != len(entry.shape):
        return False
    allow = canonical.program.config.checkpoint.allow
    free = {axis for key, axis in (("model.layers", "layers"), ("model.vocab_size", "vocab")) if key in allow}
    changed = {a for a, n, m in zip(entry.leaf.axes, entry.shape, record["shape"], strict=True) if n != m}
    return bool(changed) and changed <= free


def _check_adapters(canonical: Canonical, start: Start) -> None:
    """ConfigError if the checkpoint has adapters, and this run none or others."""
    section = known(start.manifest.config, Config).get("lora", {})
    if not section.get("rank"):
        return
    config, theirs = canonical.program.config, LoraConfig(**section | {"targets": tuple(section["targets"])})
    if name := lora_difference(config.model, theirs, config.lora):
        raise ConfigError(
            f"checkpoint {start.directory} has adapters with lora.{name} {section[name]}, and this config has {getattr(config.lora, name)}; "
            "give it the same section lora, or start from their merge (python -m meshtrain.adopt merge)."
        )


def _check(directory: Path, manifest: Manifest, entries: Sequence[Entry], weights_only: bool = False) -> None:
    """ConfigError if a leaf is missing or has another shape or dtype, which Orbax would hide or cast silently.

    Weights alone, and what is frozen, may be cast: they were a float32 master in one run and what computes in another.
    """
    for entry in entries:
        record = manifest.leaves.get(entry.name)
        may_cast = weights_only or (entry.leaf is not None and not entry.leaf.trained)
        dtype = record["dtype"] if record and may_cast and record["dtype"] in FLOATS else entry.live.dtype
        wanted = f"{dtype}{list(entry.shape[bool(entry.islands) :])}"
        found = (
            f"it is {record['dtype']}{record['shape'][bool(record.get('islands')) :]}" if record else "there is none"
        )
        if found != f"it is {wanted}":
            raise ConfigError(
                f"checkpoint {directory} does not fit this config: {entry.name} is {wanted}, but {found} in it."
            )
