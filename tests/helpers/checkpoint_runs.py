"""Small states and runs, shared by the tests of the checkpoints."""

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from shared_programs import shared_program

from meshtrain.checkpoint import Checkpointer
from meshtrain.config import Config, load
from meshtrain.mesh import make_mesh
from meshtrain.step import Program, State

ODD = {
    "layers": 5,
    "d_model": 24,
    "heads": 6,
    "kv_heads": 2,
    "d_ff": 50,
    "vocab_size": 257,
}  # nothing divides
LAYOUTS: dict[str, tuple[tuple[int, int, int], dict[str, Any]]] = {
    "one device": ((1, 1, 1), {}),
    "data 2, tensor 2, pipeline 2, ZeRO-1": ((2, 2, 2), {"microbatches": 2}),
    "data 8, ZeRO-3": ((8, 1, 1), {"zero_stage": 3}),
    "data 2, tensor 2, ZeRO-2": ((2, 2, 1), {"zero_stage": 2, "microbatches": 2}),
    "pipeline 4, gpipe": ((1, 1, 4), {"microbatches": 2, "schedule": "gpipe"}),
    "data 2, pipeline 2, interleaved, ZeRO-1": (
        (2, 1, 2),
        {"microbatches": 2, "schedule": "interleaved", "virtual_stages": 2},
    ),
    "tensor 2, pipeline 2, V": (
        (1, 2, 2),
        {"microbatches": 2, "schedule": "v_1f1b", "zero_stage": 0},
    ),
}


def config(
    directory: Path | str = "unused",
    layout: str = "one device",
    **sections: dict[str, Any],
) -> Config:
    mesh, parallel = LAYOUTS[layout]
    values: dict[str, dict[str, Any]] = {
        "run": {"directory": str(directory)},
        "model": ODD,
        "mesh": dict(zip(("data", "tensor", "pipeline"), mesh, strict=True)),
        "parallel": parallel,
        "train": {"global_batch_size": 8, "sequence_length": 16, "steps": 20},
        "optimizer": {"warmup_steps": 2},
        "data": {"source": "synthetic"},
        "checkpoint": {"every": 2},
    }
    for name, keys in sections.items():
        values[name] = {**values.get(name, {}), **keys}
    return load(values)


@cache
def program(layout: str = "one device") -> Program:
    """One program a layout: a run's directory is nothing that it knows."""
    settings = config(layout=layout)
    return Program(settings, make_mesh(settings))


def build_for(settings: Config) -> Program:
    """Traced and compiled once for all runs of the same model on the same mesh."""
    return shared_program(settings)


def numbered(built: Program, seed: int = 0) -> State:
    """A state of a one-device program with a different number in every place, and step 3."""
    random = np.random.default_rng(seed)

    def fill(x: jax.ShapeDtypeStruct) -> jax.Array:
        if np.issubdtype(x.dtype, np.floating):
            return jax.device_put(
                random.standard_normal(x.shape).astype(x.dtype), x.sharding
            )
        return jax.device_put(np.full(x.shape, 3, x.dtype), x.sharding)

    return jax.tree.map(fill, built.state_shapes)


def batch(built: Program, step: int) -> dict[str, jax.Array]:
    """The global batch of a step."""
    train = built.config.train
    shape = (train.global_batch_size, train.sequence_length + 1)
    text = np.random.default_rng(step).integers(
        0, built.config.model.vocab_size, shape, np.int32
    )
    return built.place({"tokens": text[:, :-1], "labels": text[:, 1:]})


def take(built: Program, state: State, step: int) -> tuple[State, float]:
    """One train step; the old state is donated."""
    state, metrics = built.train_step(state, batch(built, step))
    return state, float(metrics["loss"])


@contextmanager
def opened(
    settings: Config, built: Program | None = None, **more: Any
) -> Iterator[tuple[Checkpointer, list[str]]]:
    """The checkpointer of a run, closed at the end, and what it says."""
    said: list[str] = []
    with closing(
        Checkpointer(settings, built or build_for(settings), say=said.append, **more)
    ) as checkpointer:
        yield checkpointer, said


def restored(
    settings: Config, built: Program | None = None, **more: Any
) -> tuple[State, int, list[str]]:
    """(the state that a run starts from, its step, what was said)."""
    with opened(settings, built, **more) as (checkpointer, said):
        return *checkpointer.restore_or_init(), said


def saved(
    directory: Path,
    steps: int = 3,
    evals: Mapping[int, float] = MappingProxyType({}),
    **checkpoint: Any,
) -> Path:
    """A run directory with checkpoints of `steps` numbered states of one device; step k from seed k, with the eval loss
    that `evals` has for it.
    """
    with opened(
        config(directory, checkpoint={"keep": steps, **checkpoint}), program()
    ) as (
        checkpointer,
        _,
    ):
        for step in range(1, steps + 1):
            checkpointer.save(
                step,
                numbered(program(), step),
                loss=1 / step,
                eval_loss=evals.get(step),
            )
        checkpointer.wait()
    return directory


def same(a: State, b: State) -> bool:
    """Bit for bit."""
    return all(
        np.array_equal(np.asarray(x).view(np.uint8), np.asarray(y).view(np.uint8))
        for x, y in zip(
            map(np.atleast_1d, jax.tree.leaves(a)),
            map(np.atleast_1d, jax.tree.leaves(b)),
            strict=True,
        )
    )
