"""Runs of one test process share what is compiled: a program is built once for all configs that differ in nothing it
knows.

run A (model, mesh, train ..., run.directory a) ─┐
                                                 ├─► one Program: traced, lowered and compiled once
run B (model, mesh, train ..., run.directory b) ─┘   each run has a view of it with its own config
"""

import copy
import dataclasses
from functools import lru_cache
from typing import Any

import jax

from meshtrain.config import Config
from meshtrain.mesh import make_mesh
from meshtrain.step import Program

# What runs are told about where they write, read, save and report
UNKNOWN_TO_PROGRAMS = (
    "run",
    "data",
    "checkpoint",
    "eval",
    "log",
    "survive",
    "telemetry",
)


class _Key:
    """A config, compared by what a program knows of it."""

    def __init__(self, config: Config, *others: Any) -> None:
        self.config, self.others = config, others
        known = [
            f.name
            for f in dataclasses.fields(config)
            if f.name not in UNKNOWN_TO_PROGRAMS
        ]
        self.known = (
            config.run.seed,
            *(repr(getattr(config, name)) for name in known),
            *others,
        )

    def __hash__(self) -> int:
        return hash(self.known)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self.known == other.known


@lru_cache(maxsize=64)
def _built(key: _Key) -> Program:
    mesh, masters = key.others
    program = Program(key.config, mesh, masters=masters)
    # made here, so that all views have the same, and traced once
    program.init = jax.jit(program.init, out_shardings=program.state_shardings)  # type: ignore[method-assign]
    for lazy in (
        "_gradients",
        "train_step",
        "eval_step",
        "eval_metrics",
        "logits",
        "is_finite",
    ):
        getattr(program, lazy)
    return program


def shared_program(
    config: Config, mesh: Any = None, *, masters: bool = True, **hooks: Any
) -> Program:
    """In place of `Program`."""
    if any(hook is not None for hook in hooks.values()):
        return Program(config, mesh, masters=masters, **hooks)
    view = copy.copy(
        _built(_Key(config, make_mesh(config) if mesh is None else mesh, masters))
    )
    view.config = config
    return view
