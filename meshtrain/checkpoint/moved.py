"""What islands have moved to, in a state that other islands go on from.

    checkpoint        this run          each island begins with
    3 islands         the same 3        what it had, bit for bit
    3 islands         2 islands         the mean of the three: weights and moments; of counts the largest, of loss scales the least
    3 islands         none of its own   likewise; the outer model is what it was
    none of its own   2 islands         the weights and moments that there are; nothing has moved yet

The outer momentum belongs to no island, and is kept.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from meshtrain.checkpoint import arrays, steps
from meshtrain.config.reduce import SyncConfig
from meshtrain.errors import ConfigError

if TYPE_CHECKING:
    from meshtrain.checkpoint.canonical import Canonical, Entry
    from meshtrain.step import Program

OWN, OUTER = "islands.params.", "islands."


def of_each_island(program: "Program") -> tuple[str, ...]:
    """How the names begin of what has an axis of islands in front."""
    return (OWN, "optimizer", "scale") if program.islands is not None else ()


def of_one(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Of one island, what there is of each."""
    assert isinstance(x.sharding, NamedSharding)
    sharding = NamedSharding(x.sharding.mesh, PartitionSpec(*x.sharding.spec[1:]), memory_kind=x.sharding.memory_kind)
    return jax.ShapeDtypeStruct(x.shape[1:], x.dtype, sharding=sharding)


def refuse_start(old: Mapping[str, Any], step: int, sync: SyncConfig, where: str) -> None:
    """ConfigError if islands that have moved apart would take synchronous steps, which hold them to be equal. `old` is the manifest's config."""
    before = old.get("parallel", {}).get("sync", {})
    if before.get("every") and before.get("start", 0) < step < sync.start and sync.every:
        raise ConfigError(
            f"{where} is of step {step}, and its islands step by themselves since step {before.get('start', 0)}, but parallel.sync.start is "
            f"{sync.start}; give at most {step}."
        )


def difference(entries: Sequence["Entry"], leaves: Mapping[str, Mapping[str, Any]]) -> str | None:
    """What a run should know of islands that are others than the checkpoint's, in a sentence."""
    pairs = {(leaves[e.name].get("islands", 0), e.islands) for e in entries if e.name in leaves}
    changed = [(was, now) for was, now in pairs if was != now]
    if not changed:
        return None
    was, now = changed[0]
    if not was:
        return f"the {now} islands begin with the weights and moments of the checkpoint, whose data ranks were all brought together at every step."
    then = f"each of the {now} islands begins with" if now else "the run goes on with"
    weights = "weights and moments, and the outer momentum is kept" if now else "moments, and the outer model"
    return f"the checkpoint has {was} islands of their own: {then} the mean of their {weights}."


def from_mean(canonical: "Canonical", directory: Path, record: Mapping[str, Any], entry: "Entry") -> jax.Array:
    """A live array, of each island if it is to be, from the mean of what the islands of a checkpoint had."""
    one = dataclasses.replace(entry, islands=0)
    if entry.islands:
        one = dataclasses.replace(one, shape=entry.shape[1:], live=of_one(entry.live))
    as_stored = canonical.stored(one)
    was, target = record.get("islands", 0), as_stored
    if was:
        spec = PartitionSpec(None, *as_stored.sharding.spec)
        target = jax.ShapeDtypeStruct((was, *one.shape), one.live.dtype, sharding=NamedSharding(canonical.mesh, spec))
    found = arrays.read(directory / steps.place(record), {entry.name: target})[entry.name]
    if was:
        found = jax.jit(_together(entry.name), out_shardings=as_stored.sharding)(found)
    return placed(canonical.as_live(one, found), entry)


def _together(name: str) -> Any:
    def together(x: jax.Array) -> jax.Array:
        if name == "scale.value":
            return jnp.min(x, 0)
        return jnp.mean(x, 0) if jnp.issubdtype(x.dtype, jnp.floating) else jnp.max(x, 0)

    return together


def placed(x: jax.Array, entry: "Entry") -> jax.Array:
    """An array of one island, or of all together, as the entry has it."""
    if not entry.islands:
        return jax.device_put(x, entry.live.sharding)
    device = entry.live.sharding.with_memory_kind("device")
    each = jax.jit(lambda x: jnp.broadcast_to(x, (entry.islands, *x.shape)), out_shardings=device)(x)
    return jax.block_until_ready(jax.device_put(each, entry.live.sharding))


def begun(entries: Sequence["Entry"], found: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """What islands keep where the checkpoint has none of it: the weights that it has, and nothing moved."""
    made = {}
    for entry in entries:
        if not entry.name.startswith(OUTER) or entry.name in found:
            continue
        if entry.name.startswith(OWN):
            made[entry.name] = placed(found["params." + entry.name.removeprefix(OWN)], entry)
        else:
            shape, dtype = entry.live.shape, entry.live.dtype
            zeros = jax.jit(lambda s=shape, d=dtype: jnp.zeros(s, d), out_shardings=entry.live.sharding)
            made[entry.name] = zeros()
    return made
