"""What compressed gradients have left out so far, from a checkpoint onto another mesh: what is owed stays owed, whoever sends it.

    saved, 4 ranks     r0  r1  r2  r3     as they lie: on the same mesh they come back bit for bit
                         └── sum ──┘      layers to their new places, as those of the weight
    on 2 ranks           s/2   s/2

Weight by weight, so that beside the state there is never more than one. PowerSGD's Q belongs to the matrices that a mesh makes of
the gradients: on another one it is drawn anew.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshtrain.checkpoint import arrays, steps
from meshtrain.checkpoint.canonical import Canonical, Entry
from meshtrain.checkpoint.compatible import earlier_config
from meshtrain.checkpoint.finding import Start
from meshtrain.checkpoint.rearrange import rearrangement
from meshtrain.config import Config
from meshtrain.parallel.layout import Layout, shard_spec
from meshtrain.parallel.placement import Placed
from meshtrain.parallel.reduce import kept
from meshtrain.step import Program

REDUCE, RESIDUAL, Q = "reduce.", "reduce.residual.", "reduce.q."


def restored(canonical: Canonical, start: Start) -> tuple[dict[str, jax.Array], list[str]]:
    """The arrays of `State.reduce` by name, and what a person should know of them, a sentence each."""
    entries, leaves = [e for e in canonical.entries if e.name.startswith(REDUCE)], start.manifest.leaves
    there = {name for name in leaves if name.startswith(REDUCE)}
    if not (entries or there):
        return {}, []
    before = Layout(earlier_config(start.manifest.config), canonical.layout.mesh)
    same = [e for e in entries if _as_it_was(canonical.layout, before, e, leaves)]
    moved = [e for e in entries if e not in same and _is_residual(e) and e.name in there]
    drawn = [e for e in entries if e not in same and e not in moved]
    found = arrays.read(start.directory / steps.ARRAYS, {e.name: e.live for e in same})
    for entry in moved:
        found[entry.name] = _moved(canonical, before, start, entry)
    dropped = there - {e.name for e in entries}
    return found | _drawn(canonical.program, drawn), _sentences(moved, drawn, dropped)


def _sentences(moved: Sequence[Entry], drawn: Sequence[Entry], dropped: set[str]) -> list[str]:
    said = []
    if moved:
        said.append("what compression had left out of gradients is shared out evenly among the ranks of this mesh.")
    if any(name.startswith(RESIDUAL) for name in dropped):
        said.append("what compression had left out of gradients is dropped where nothing is fed back from here on.")
    if any(_is_residual(e) for e in drawn):
        said.append("error feedback starts with nothing left out.")
    if not all(_is_residual(e) for e in drawn):
        said.append("PowerSGD's Q starts anew: the checkpoint has none of the matrices that this run sends.")
    return said


def _is_residual(entry: Entry) -> bool:
    return entry.name.startswith(RESIDUAL)


def _as_it_was(layout: Layout, before: Layout, entry: Entry, leaves: Mapping[str, Any]) -> bool:
    """The array in the checkpoint is the one that this run would have."""
    if entry.name not in leaves or tuple(leaves[entry.name]["shape"]) != entry.shape:
        return False
    now, then = _weight(layout, entry), _weight(before, entry)
    if now.stacked and layout.layer_at.tolist() != before.layer_at.tolist():
        return False
    if _is_residual(entry):
        return True
    meshes = layout.config.mesh.shape == before.config.mesh.shape
    return meshes and kept.q(layout.config, now) == kept.q(before.config, then)


def _weight(layout: Layout, entry: Entry) -> Placed:
    """Of both runs, since their models have the same weights."""
    name = entry.name.removeprefix(RESIDUAL).removeprefix(Q)
    return next(weight for weight in layout.flat if weight.name == name)


def _drawn(program: Program, entries: Sequence[Entry]) -> dict[str, jax.Array]:
    """As before the first step of a run."""
    found = {e.name: _zeros(e) for e in entries if _is_residual(e)}
    if len(found) < len(entries):
        assert program.state_shapes.reduce is not None
        shardings = jax.tree.map(lambda x: x.sharding, program.state_shapes.reduce.q)
        q = jax.jit(program.local.zero.feedback.init_q, out_shardings=shardings)(program.feedback_key)
        wanted = {e.name for e in entries}
        flat, _ = jax.tree_util.tree_flatten_with_path(q)
        found |= {name: x for path, x in flat if (name := Q + ".".join(p.key for p in path)) in wanted}
    return found


def _zeros(entry: Entry) -> jax.Array:
    return jax.jit(lambda: jnp.zeros(entry.shape, entry.live.dtype), out_shardings=entry.live.sharding)()


def _moved(canonical: Canonical, before: Layout, start: Start, entry: Entry) -> jax.Array:
    """A residual [ranks, *gradient] of another mesh: its sum over the ranks, shared out among those of this one."""
    layout, mesh = canonical.layout, canonical.mesh
    now, then = _weight(layout, entry), _weight(before, entry)
    record = start.manifest.leaves[entry.name]
    shape = tuple(record["shape"])
    stay = [d for d in range(1, len(shape)) if shape[d] == then.shape[d - 1] and not (then.stacked and d == 1)]
    stored = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, _spread(shape, stay, mesh)))
    x = arrays.read(start.directory / steps.place(record), {entry.name: stored})[entry.name]
    ranks, one = entry.shape[0], _summed_over_ranks(layout.config, now)
    way = rearrangement(layout, one, mesh)
    in_order = one.padded == one.shape and (not one.stacked or layout.in_order)
    spec = shard_spec(one) if in_order else way.spec
    total = jax.jit(lambda x: before.canonical_leaf(then, jnp.sum(x, axis=0)), out_shardings=NamedSharding(mesh, spec))(
        x
    )
    x.delete()

    def share(total: jax.Array) -> jax.Array:
        return (total if in_order else way.to_live(total))[None] / ranks

    mapped = jax.shard_map(share, mesh=mesh, in_specs=spec, out_specs=entry.live.sharding.spec, check_vma=False)
    return jax.block_until_ready(jax.jit(mapped)(total))


def _summed_over_ranks(config: Config, weight: Placed) -> Placed:
    """How what is compressed of a gradient lies, without the ranks that have one each."""
    return weight if kept.across_islands(config) else replace(weight, padded=weight.whole, zero_dim=None)


def _spread(shape: Sequence[int], dims: Sequence[int], mesh: Mesh) -> PartitionSpec:
    """The axes of a mesh over those dimensions of an array that they divide, the longest first."""
    local, over = list(shape), [[] for _ in shape]  # type: ignore[var-annotated]
    for axis, ways in mesh.shape.items():
        fits = [d for d in dims if local[d] % ways == 0]
        if fits:
            longest = max(fits, key=local.__getitem__)
            local[longest] //= ways
            over[longest].append(axis)
    return PartitionSpec(*(tuple(axes) or None for axes in over))
