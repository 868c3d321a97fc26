"""From a verified step to a state on the program's shardings: all of it, or a new run's state with its weights."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from meshtrain.checkpoint import steps
from meshtrain.checkpoint.canonical import Canonical, Entry
from meshtrain.checkpoint.finding import Start
from meshtrain.checkpoint.manifest import Manifest
from meshtrain.errors import ConfigError
from meshtrain.step import State

Tree = Any


def restore(canonical: Canonical, start: Start) -> State:
    """The whole state; ConfigError if the checkpoint has other leaves."""
    # precision.compute may change, and the loss scale with it
    entries = [e for e in canonical.entries if not e.name.startswith("scale.")]
    _check(start.directory, start.manifest, entries)
    return canonical.state(start.directory / steps.ARRAYS, start.manifest.leaves)


def read_weights(canonical: Canonical, directory: Path, manifest: Manifest) -> Tree:
    """The live parameters of a verified step and nothing else of it; ConfigError if they do not fit the program's model."""
    parameters = [e for e in canonical.entries if e.name.startswith("params.")]
    _check(directory, manifest, parameters)
    found = canonical.read(directory / steps.ARRAYS, parameters)
    return jax.tree.unflatten(jax.tree.structure(canonical.program.layout.masters), [found[e.name] for e in parameters])


def start_from_weights(canonical: Canonical, start: Start, say: Callable[[str], None]) -> State:
    """The state before the first step, with the checkpoint's weights; resized where checkpoint.allow names the axis."""
    parameters = [e for e in canonical.entries if e.name.startswith("params.")]
    resized = [e for e in parameters if _resized(canonical, start, e)]
    whole = [e for e in parameters if e not in resized]
    _check(start.directory, start.manifest, whole)
    state, directory = canonical.program.init(), start.directory / steps.ARRAYS
    live = dict(zip((e.name for e in canonical.entries), jax.tree.leaves(state), strict=True))
    for entry in whole:
        live[entry.name].delete()
    live |= canonical.read(directory, whole)
    for entry in resized:
        shape = tuple(start.manifest.leaves[entry.name]["shape"])
        live[entry.name] = canonical.into(directory, entry, shape, live[entry.name])
        say(f"{entry.name} is {list(entry.shape)}; the checkpoint has {list(shape)} of it, the rest is as initialised.")
    say(f"started from the weights of step {start.manifest.step} in {start.directory}.")
    return jax.tree.unflatten(jax.tree.structure(state), list(live.values()))


def _resized(canonical: Canonical, start: Start, entry: Entry) -> bool:
    """The checkpoint has the leaf in another shape, along axes that checkpoint.allow names and no other."""
    record = start.manifest.leaves.get(entry.name)
    if entry.leaf is None or record is None or len(record["shape"]) != len(entry.shape):
        return False
    allow = canonical.program.config.checkpoint.allow
    free = {axis for key, axis in (("model.layers", "layers"), ("model.vocab_size", "vocab")) if key in allow}
    changed = {a for a, n, m in zip(entry.leaf.axes, entry.shape, record["shape"], strict=True) if n != m}
    return bool(changed) and changed <= free


def _check(directory: Path, manifest: Manifest, entries: Sequence[Entry]) -> None:
    """ConfigError if a leaf is missing or has another shape or dtype, which Orbax would hide or cast silently."""
    for entry in entries:
        wanted = f"{entry.live.dtype}{list(entry.shape)}"
        record = manifest.leaves.get(entry.name)
        found = f"it is {record['dtype']}{record['shape']}" if record else "there is none"
        if found != f"it is {wanted}":
            raise ConfigError(
                f"checkpoint {directory} does not fit this config: {entry.name} is {wanted}, but {found} in it."
            )
