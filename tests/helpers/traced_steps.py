"""A few steps of any compiled program, traced as a run traces its own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from meshtrain.config import load
from meshtrain.schedule.table import Table
from meshtrain.telemetry.trace import Tracer

STEPS = 2


def traced(
    directory: Path,
    mesh: Mesh,
    program: jax.stages.Compiled,
    step: Callable[[], Any],
    table: Table | None = None,
) -> Path:
    """Where the trace of STEPS calls of `step` is, which give what is to be waited for; the first call is not
    traced.
    """
    config = load({"telemetry": {"trace_at": [2], "trace_steps": STEPS}})
    tracer = Tracer(config, directory, mesh, table)
    for k in range(1, STEPS + 2):
        tracer.before_batch(k)
        tracer.after_step(k, program, step())
    tracer.close()
    return directory / "traces" / "2"
