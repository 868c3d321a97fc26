"""A real train step traced: every event is an instruction of it, as many collectives ran as it has, and the wall has
its kinds.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from traced_steps import traced

from meshtrain.compat import lines_as_they_are
from meshtrain.config import load
from meshtrain.hlo import collectives
from meshtrain.report.diagnosis.tracing import trace_beside
from meshtrain.report.trace import Attribution, attribute, read_trace
from meshtrain.step import Program

SMALL = {
    "layers": 4,
    "d_model": 32,
    "heads": 4,
    "kv_heads": 2,
    "d_ff": 64,
    "vocab_size": 128,
}


def traced_step(
    directory: Path, mesh: tuple[int, int, int], **parallel: Any
) -> tuple[Program, jax.stages.Compiled, Attribution]:
    config = load(
        {
            "model": {**SMALL, "family": "llama"},
            "mesh": dict(zip(("data", "tensor", "pipeline"), mesh, strict=True)),
            "parallel": {"microbatches": 4, **parallel},
            "train": {"global_batch_size": 8 * mesh[0], "sequence_length": 32},
        }
    )
    program = Program(config)
    # The names that an earlier compilation gave would be those of the source as it was then.
    with lines_as_they_are():
        step = program.lower().compile()
    state = program.init()
    rows = np.zeros((8 * mesh[0], 32), np.int32)
    batch = program.place({"tokens": rows, "labels": rows})

    def once() -> Any:
        nonlocal state
        state, metrics = step(state, batch)
        return metrics

    return (
        program,
        step,
        attribute(
            read_trace(
                traced(directory, program.mesh, step, once, program.layout.table)
            )
        ),
    )


# With chunks the shares of conditionals that `hlo.collectives` counts by do not hold for the loss head, which one chunk
# in several has.
CASES = [
    ((2, 1, 1), {"zero_stage": 3}),
    ((2, 2, 2), {"zero_stage": 1, "sequence_parallel": True, "schedule": "1f1b"}),
    ((1, 2, 2), {"schedule": "zb_h1", "remat": "full"}),
    ((1, 1, 4), {"schedule": "gpipe"}),
]


@pytest.mark.parametrize(
    ("mesh", "parallel"),
    [
        pytest.param(
            *case, marks=pytest.mark.thorough if at in (1, 2) else pytest.mark.slow
        )
        for at, case in enumerate(CASES)
    ],
)
def test_what_a_trace_tells_of_a_step_is_what_its_program_says(
    mesh, parallel, tmp_path
):
    program, step, told = traced_step(tmp_path, mesh, **parallel)
    assert told.unjoined == 0
    assert sum(told.seconds.values()) == pytest.approx(told.wall_seconds)
    assert told.seconds.get("unknown", 0.0) < 0.005 * told.wall_seconds
    expected: Counter[tuple[str, str]] = Counter()
    for one in collectives(step, program.mesh, program.taken):
        expected[one.kind, one.axis] += one.times
    assert told.collectives == pytest.approx(expected)
    present = {"forward", "backward", "head", "embedding", "optimizer", "schedule"}
    present |= {
        axis
        for axis, size in zip(("data", "tensor", "pipeline"), mesh, strict=True)
        if size > 1
    }
    present |= {"recomputation"} if parallel.get("remat") == "full" else set()
    assert present <= set(told.seconds)


@pytest.mark.thorough
def test_98_of_100_parts_of_the_quickstarts_wall_are_attributed():
    told = trace_beside(load("configs/quickstart.yaml"))
    assert told.attributed >= 0.98 and told.unjoined == 0
    assert told.steps == 3 and told.devices == 8 and told.untraced_seconds is not None
