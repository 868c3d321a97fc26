"""State that depends on the mesh, restored onto another one: the error-feedback residuals, and the state of replica
groups.

Each rank's residual is the part of its gradients that compression has not sent yet. It is sent in the end, by whichever
rank:

    saved, 4 ranks     r0  r1  r2  r3     as they lie: on the same mesh they come back bit for bit
                         └── sum ──┘      layers to their new places, as those of the weight
    on 2 ranks           s/2   s/2

Weight by weight, so that beside the state there is never more than one. PowerSGD's Q belongs to the matrices that a
mesh makes of
the gradients: on another one it is drawn anew.

Replica groups that step locally (parallel.sync; the config calls them islands) have weights and moments each:

    checkpoint        this run          each group begins with
    3 groups          the same 3        what it had, bit for bit
    3 groups          2 groups          weights and moments: the mean of the three; counts: the largest; loss scales:
                                        the smallest; a group with numbers that are not finite is left out
    3 groups          none              likewise; the outer model is what it was
    none              2 groups          the weights and moments that there are; nothing has moved yet

The outer momentum belongs to no group, and stays.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshtrain.checkpoint import arrays, steps
from meshtrain.checkpoint.global_arrays import (
    COUNTED,
    GROUP_PARAMS,
    ISLANDS,
    REDUCE,
    GlobalArray,
    GlobalArrays,
    Leaves,
    group_array,
)
from meshtrain.checkpoint.manifest import Start, earlier_config
from meshtrain.checkpoint.rearrangement import rearrangement
from meshtrain.config.reduce import SyncConfig
from meshtrain.errors import ConfigError
from meshtrain.parallel.layout import Layout
from meshtrain.parallel.parallelize import make_layout
from meshtrain.parallel.placement import Placed
from meshtrain.parallel.reduce.sizes import over_islands, q_spread
from meshtrain.parallel.sync import states
from meshtrain.step import Program

Arrays = dict[str, jax.Array]
RESIDUAL = f"{REDUCE}residual."
Q = f"{REDUCE}q."

# --- error-feedback residuals


def restore_residuals(
    converter: GlobalArrays, start: Start
) -> tuple[Arrays, list[str]]:
    """Returns the arrays of `State.reduce` by name, and a sentence on each thing that changed."""
    entries = [e for e in converter.entries if e.name.startswith(REDUCE)]
    leaves = start.manifest.leaves
    before = make_layout(earlier_config(start.manifest.config), converter.layout.mesh)
    same = [e for e in entries if _is_unchanged(converter.layout, before, e, leaves)]
    resharded = [
        e for e in entries if e not in same and _is_residual(e) and e.name in leaves
    ]
    initial = [e for e in entries if e not in same and e not in resharded]
    restored = arrays.read(
        start.directory / steps.ARRAYS, {e.name: e.live for e in same}
    )
    for entry in resharded:
        restored[entry.name] = _reshard_residual(converter, before, start, entry)
    sentences = []
    left_out = "what compression had left out of gradients is"
    if resharded:
        sentences.append(f"{left_out} shared out evenly among the ranks of this mesh.")
    if any(
        name.startswith(RESIDUAL) for name in leaves.keys() - {e.name for e in entries}
    ):
        sentences.append(f"{left_out} dropped where nothing is fed back from here on.")
    if any(_is_residual(e) for e in initial):
        sentences.append("error feedback starts with nothing left out.")
    if not all(_is_residual(e) for e in initial):
        sentences.append(
            "PowerSGD's Q starts anew: the checkpoint has none of the matrices that this run sends."
        )
    return restored | _initial_residuals(converter.program, initial), sentences


def _is_residual(entry: GlobalArray) -> bool:
    return entry.name.startswith(RESIDUAL)


def _is_unchanged(
    layout: Layout, before: Layout, entry: GlobalArray, leaves: Leaves
) -> bool:
    """Returns whether the array in the checkpoint is the one that this run would have."""
    if entry.name not in leaves or tuple(leaves[entry.name]["shape"]) != entry.shape:
        return False
    now = _weight(layout, entry)
    then = _weight(before, entry)
    if now.stacked:
        live, old = (of.stack(now).layer_at.tolist() for of in (layout, before))
        if live != old:
            return False
    if _is_residual(entry):
        return True
    meshes = layout.config.mesh.shape == before.config.mesh.shape
    return meshes and q_spread(layout.config, now) == q_spread(before.config, then)


def _weight(layout: Layout, entry: GlobalArray) -> Placed:
    name = entry.name.removeprefix(RESIDUAL).removeprefix(Q)
    return next(weight for weight in layout.flat if weight.name == name)


def _initial_residuals(program: Program, entries: Sequence[GlobalArray]) -> Arrays:
    initial = {e.name: _full(e, 0) for e in entries if _is_residual(e)}
    if len(initial) < len(entries):
        feedback = program.local.zero.feedback
        assert feedback is not None and program.state_shapes.reduce is not None
        shardings = jax.tree.map(lambda x: x.sharding, program.state_shapes.reduce.q)
        q = jax.jit(feedback.init_q, out_shardings=shardings)(program.feedback_key)
        names = {e.name for e in entries}
        flat, _ = jax.tree_util.tree_flatten_with_path(q)
        initial |= {
            name: x
            for path, x in flat
            if (name := Q + ".".join(p.key for p in path)) in names
        }
    return initial


def _full(entry: GlobalArray, fill: float) -> jax.Array:
    full = partial(jnp.full, entry.live.shape, fill, entry.live.dtype)
    return jax.jit(full, out_shardings=entry.live.sharding)()


def _reshard_residual(
    converter: GlobalArrays, before: Layout, start: Start, entry: GlobalArray
) -> jax.Array:
    """Returns a residual [ranks, *gradient] of another mesh: its sum over the ranks, in equal parts for those of this
    one.
    """
    layout = converter.layout
    mesh = converter.mesh
    now = _weight(layout, entry)
    then = _weight(before, entry)
    record = start.manifest.leaves[entry.name]
    shape = tuple(record["shape"])
    stay = [
        d
        for d in range(1, len(shape))
        if shape[d] == then.shape[d - 1] and not (then.stacked and d == 1)
    ]
    stored = jax.ShapeDtypeStruct(
        shape, jnp.float32, sharding=NamedSharding(mesh, _spread(shape, stay, mesh))
    )
    x = arrays.read(start.directory / steps.place(record), {entry.name: stored})[
        entry.name
    ]
    # how the compressed part of a gradient lies, without the ranks that have one each
    weight = (
        now
        if over_islands(layout.config)
        else replace(now, padded=now.whole, zero_dim=None)
    )
    way = rearrangement(layout, weight, mesh)
    sharding = NamedSharding(mesh, way.spec)
    total = jax.jit(
        lambda x: before.canonical_leaf(then, jnp.sum(x, axis=0)),
        out_shardings=sharding,
    )(x)
    x.delete()

    def part(total: jax.Array) -> jax.Array:
        return way.make_live(total)[None] / entry.shape[0]

    mapped = jax.shard_map(
        part,
        mesh=mesh,
        in_specs=way.spec,
        out_specs=entry.live.sharding.spec,
        check_vma=False,
    )
    return jax.block_until_ready(jax.jit(mapped)(total))


def _spread(shape: Sequence[int], dims: Sequence[int], mesh: Mesh) -> PartitionSpec:
    """Returns the axes of a mesh over those dimensions of an array that they divide, the longest first."""
    local, over = list(shape), [[] for _ in shape]  # type: ignore[var-annotated]
    for axis, degree in mesh.shape.items():
        fits = [d for d in dims if local[d] % degree == 0]
        if fits:
            longest = max(fits, key=local.__getitem__)
            local[longest] //= degree
            over[longest].append(axis)
    return PartitionSpec(*(tuple(axes) or None for axes in over))


# --- replica groups


def check_sync_start(
    old: Mapping[str, Any], step: int, sync: SyncConfig, where: str
) -> None:
    """Raises ConfigError if groups whose weights differ would take synchronous steps, which hold them to be equal.

    `old` is the manifest's config.
    """
    before = old.get("parallel", {}).get("sync", {})
    if (
        before.get("every")
        and before.get("start", 0) < step < sync.start
        and sync.every
    ):
        raise ConfigError(
            f"{where} is of step {step}, and its islands step by themselves since step {before.get('start', 0)}, but "
            "parallel.sync.start is "
            f"{sync.start}; give at most {step}."
        )


def regrouping_notes(entries: Sequence[GlobalArray], leaves: Leaves) -> list[str]:
    """Returns a sentence where this run has other groups than the checkpoint."""
    pairs = {
        (leaves[e.name].get("islands", 0), e.islands)
        for e in entries
        if e.name in leaves
    }
    for was, now in pairs:
        if not was and now:
            weights = "the weights and moments of the checkpoint"
            return [
                f"the {now} islands begin with {weights}, whose data ranks were all brought together at every step."
            ]
        if was != now:
            then = (
                f"each of the {now} islands begins with"
                if now
                else "the run goes on with"
            )
            weights = (
                "weights and moments, and the outer momentum is kept"
                if now
                else "moments, and the outer model"
            )
            return [
                f"the checkpoint has {was} islands of their own: {then} the mean of their {weights}."
            ]
    return []


def mean_groups(
    converter: GlobalArrays,
    directory: Path,
    leaves: Leaves,
    entries: Sequence[GlobalArray],
    say: Callable[[str], None],
) -> Arrays:
    """Returns live arrays, of each group where there are groups, from the means over the groups of a checkpoint.

    `say` reports which of
    them are left out: those with weights, or moments, that are not finite (as by `IslandSteps.mend`).
    """
    means: Arrays = {}
    finite: dict[str, np.ndarray] = {}  # by the kind of array, which groups are
    for entry in entries:
        means[entry.name], of_entry = _mean(
            converter, directory, leaves[entry.name], entry, None
        )
        finite[_kind(entry)] = finite.get(_kind(entry), of_entry) & of_entry
    for entry in entries:
        if not finite[_kind(entry)].all():
            means[entry.name], _ = _mean(
                converter, directory, leaves[entry.name], entry, finite[_kind(entry)]
            )
    for kind, of_kind in finite.items():
        for island in np.flatnonzero(~of_kind):
            say(
                f"the {kind} of island {island} in the checkpoint are not finite, and are left out."
            )
    return means


def _kind(entry: GlobalArray) -> str:
    if entry.name.startswith(GROUP_PARAMS):
        return "weights"
    return "moments" if entry.name.startswith("optimizer") else "counts"


def _mean(
    converter: GlobalArrays,
    directory: Path,
    record: Mapping[str, Any],
    entry: GlobalArray,
    finite: np.ndarray | None,
) -> tuple[jax.Array, np.ndarray]:
    """Returns the mean over the `finite` groups, by default all; and which of them are finite."""
    one = replace(entry, islands=0)
    if entry.islands:
        one = replace(one, shape=entry.shape[1:], live=group_array(entry.live))
    target = stored = converter.stored(one)
    groups = record.get("islands", 0)
    if groups:
        sharding = NamedSharding(
            converter.mesh, PartitionSpec(None, *stored.sharding.spec)
        )
        target = jax.ShapeDtypeStruct(
            (groups, *one.shape), one.live.dtype, sharding=sharding
        )
    array = arrays.read(directory / steps.place(record), {entry.name: target})[
        entry.name
    ]
    all_finite = np.ones(max(groups, 1), bool)
    if groups:
        shardings = stored.sharding, NamedSharding(converter.mesh, PartitionSpec())
        mean_and_finite = jax.jit(
            partial(_mean_and_finite, entry.name), out_shardings=shardings
        )
        array, each = mean_and_finite(array, all_finite if finite is None else finite)
        all_finite = np.asarray(each)
    live = (
        array
        if converter.is_global(one)
        else converter.rearranged("live", [one], [array])[0]
    )
    return _spread_mean(live, entry), all_finite


def _mean_and_finite(
    name: str, x: jax.Array, finite: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return jnp.min(x, 0) if name == "scale.value" else states.mean_of(
        finite, x
    ), states.finite(x)


def _spread_mean(x: jax.Array, entry: GlobalArray) -> jax.Array:
    """Returns an array of one group, or of none, in the shape and sharding of the entry."""
    if not entry.islands:
        return jax.device_put(x, entry.live.sharding)
    device = entry.live.sharding.with_memory_kind("device")
    each = jax.jit(
        lambda x: jnp.broadcast_to(x, (entry.islands, *x.shape)), out_shardings=device
    )(x)
    return jax.block_until_ready(jax.device_put(each, entry.live.sharding))


def initial_groups(
    entries: Sequence[GlobalArray], live: Mapping[str, jax.Array]
) -> Arrays:
    """Returns the state of groups that the checkpoint has none of: its weights, and nothing moved."""
    initial = {}
    for entry in entries:
        if not entry.name.startswith(ISLANDS) or entry.name in live:
            continue
        if entry.name.startswith(GROUP_PARAMS):
            initial[entry.name] = _spread_mean(
                live["params." + entry.name.removeprefix(GROUP_PARAMS)], entry
            )
        else:
            # groups of which it is not known how much they learned from have the same weight
            initial[entry.name] = _full(entry, float(entry.name == COUNTED))
    return initial
