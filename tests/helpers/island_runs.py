"""Tiny programs whose islands step by themselves, and steps of them."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from meshtrain.config import Config, load
from meshtrain.mesh import make_mesh
from meshtrain.step import Program, State

VOCABULARY, ROWS, LENGTH = 61, 8, 8  # 61: neither tensor nor data divides it


def settings(
    mesh: dict[str, int] | None = None,
    sync: dict[str, Any] | None = None,
    **sections: dict[str, Any],
) -> Config:
    """5 layers on 2 stages of 2 islands with 2 data ranks each: stage 1 has a layer of padding."""
    values: dict[str, dict[str, Any]] = {
        "model": {
            "layers": 5,
            "d_model": 16,
            "heads": 2,
            "kv_heads": 2,
            "d_ff": 22,
            "vocab_size": VOCABULARY,
        },
        "mesh": mesh or {"data": 4, "pipeline": 2, "islands": 2},
        "parallel": {"microbatches": 2, "sync": sync or {}},
        "train": {"global_batch_size": ROWS, "sequence_length": LENGTH, "steps": 40},
        "optimizer": {"warmup_steps": 2, "learning_rate": 0.01},
        "data": {"source": "synthetic"},
    }
    for name, keys in sections.items():
        values[name] = {**values.get(name, {}), **keys}
    return load(values)


def program(*args: Any, **sections: Any) -> Program:
    config = settings(*args, **sections)
    return Program(config, make_mesh(config))


def batches(count: int, first: int = 0) -> Iterator[dict[str, np.ndarray]]:
    """The batches of steps first + 1 .. first + count."""
    for k in range(first, first + count):
        tokens = np.random.default_rng(k).integers(
            0, VOCABULARY, (ROWS, LENGTH + 1), np.int32
        )
        yield {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}


def run(built: Program, state: State, count: int) -> tuple[State, list[dict[str, Any]]]:
    """`count` steps, with what is due between them, and their metrics as numbers."""
    rows = []
    for batch in batches(count, int(state.step)):
        state, metrics = built.train_step(state, built.place(batch))
        rows.append(jax.tree.map(np.asarray, metrics))
    return state, rows


def numbers(tree: Any) -> list[np.ndarray]:
    return [np.asarray(x) for x in jax.tree.leaves(tree)]


def same_bits(a: Any, b: Any) -> bool:
    ours, theirs = numbers(a), numbers(b)
    return len(ours) == len(theirs) and all(
        x.tobytes() == y.tobytes() for x, y in zip(ours, theirs, strict=True)
    )


def largest_difference(a: Any, b: Any) -> float:
    return max(
        float(np.abs(x - y).max())
        for x, y in zip(numbers(a), numbers(b), strict=True)
        if x.size
    )


def copies_differ(tree) -> list[str]:
    """The leaves of which devices that must have the same part have other bits."""
    found = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        parts: dict[str, set[bytes]] = {}
        for shard in leaf.addressable_shards:
            parts.setdefault(str(shard.index), set()).add(
                np.asarray(shard.data).tobytes()
            )
        if any(len(of_part) > 1 for of_part in parts.values()):
            found.append(jax.tree_util.keystr(path))
    return found


def spoiled(tree, island: int):
    """Returns a tree of [islands, ...] arrays with a NaN in the largest leaf of one island."""
    leaves, structure = jax.tree.flatten(tree)
    at = max(range(len(leaves)), key=lambda i: leaves[i].size)
    values = np.array(leaves[at])
    values[(island, *[0] * (values.ndim - 1))] = np.nan
    leaves[at] = jax.device_put(values, leaves[at].sharding)
    return jax.tree.unflatten(structure, leaves)
