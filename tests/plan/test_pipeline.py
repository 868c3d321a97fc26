"""A schedule is data: what is planned follows from the table, whatever its name."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import covering
from ragged_tables import random_table

from meshtrain.config import load
from meshtrain.hlo import collectives
from meshtrain.mesh import PIPELINE, make_mesh
from meshtrain.parallel.parallelize import LocalStep
from meshtrain.plan import named, pipeline, plan
from meshtrain.schedule.generators import SCHEDULES, legal_chunks, make_table
from meshtrain.schedule.phases import ops_per_clock, phases
from meshtrain.schedule.table import B, F, Table
from meshtrain.schedule.validate import validate
from meshtrain.step import Program

MODEL = {
    "layers": 32,
    "d_model": 4096,
    "heads": 32,
    "kv_heads": 8,
    "d_ff": 14336,
    "vocab_size": 128256,
}


# Stages and microbatches.
SIZES = [(2, 1), (2, 8), (3, 7), (4, 4), (4, 16), (8, 8), (8, 5)]
CASES = list(itertools.product(SCHEDULES, SIZES, ("none", "dots", "full")))


@pytest.mark.thorough
@pytest.mark.parametrize("case", covering(CASES), ids=str)
def test_a_schedule_and_its_own_csv_are_planned_alike(case, tmp_path):
    schedule, (stages, microbatches), remat = case
    chunks = legal_chunks(schedule) or 2
    file = tmp_path / "table.csv"
    file.write_text(make_table(schedule, stages, microbatches, chunks).to_csv())

    def planned(name: str) -> tuple:
        config = load(
            {
                "model": MODEL,
                "mesh": {"data": 2, "tensor": 2, "pipeline": stages},
                "parallel": {
                    "schedule": name,
                    "microbatches": microbatches,
                    "virtual_stages": chunks,
                    "remat": remat,
                },
                "precision": {"compute": "bfloat16"},
                "train": {
                    "global_batch_size": 2 * microbatches,
                    "sequence_length": 4096,
                },
            }
        )
        found = plan(config, named("h100", 4 * stages))
        return (
            found.memory,
            found.transfers,
            found.depths,
            found.seconds,
            found.clocks,
            found.bubble_fraction,
        )

    assert planned(schedule) == planned(str(file))


def counted(table: Table) -> tuple[int, ...]:
    """(down, up, embedding, unembedding) as the executor has them, op by op.

    In a clock that is compiled alone XLA leaves out what nobody keeps; in all others everything that the phase does is
    done.
    """
    found = phases(table)
    work = ops_per_clock(found)
    alone = {phase.first for phase in found if phase.repeats * phase.period == 1}
    busy = {
        slot: sorted({op.clock for op in table.ops() if op.slot == slot})
        for slot in (F, B)
    }
    ways: dict[tuple[int, int], set[int]] = {}
    enters, leaves = set(), set()
    for op in table.ops():
        k = table.virtual(op.stage, op.chunk)
        after = next((clock for clock in busy[B] if clock > op.clock), None)
        before = max((clock for clock in busy[F] if clock < op.clock), default=None)
        neighbour = k + 1 if op.slot == F else k - 1
        if op.slot == F and k == 0:
            enters.add(before)
        elif op.slot == B and k == 0:
            leaves.add(after)
        if op.slot in (F, B) and 0 <= neighbour < table.virtual_stages:
            hop = int(table.stage_of(neighbour)) - op.stage
            if hop:
                way = hop if table.placement == "v" else 0  # around the ring
                ways.setdefault((op.slot, way), set()).add(
                    op.clock if op.slot == F else after
                )

    def ticks_of(kind: int, kept: set) -> int:
        return sum(
            clock not in alone or clock in kept
            for clock in np.flatnonzero(work[:, kind]).tolist()
        )

    sent = {
        slot: sum(
            ticks_of(slot * 2, kept) for (of, _), kept in ways.items() if of == slot
        )
        for slot in (F, B)
    }
    return sent[F], sent[B], 1 + ticks_of(4, enters), 1 + ticks_of(5, leaves)


SOME, MANY = range(100), range(100, 500)


@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param(SOME, id="some"),
        pytest.param(MANY, id="many", marks=pytest.mark.thorough),
    ],
)
def test_a_random_table_is_planned_as_its_ops_are_executed(seeds):
    for seed in seeds:
        table = random_table(seed)
        validate(table)
        planned = pipeline._iterations(table)
        assert (
            planned.down,
            planned.up,
            planned.embedding,
            planned.unembedding,
        ) == counted(table), seed


@pytest.mark.slow
@pytest.mark.parametrize("seed", [890])
def test_a_random_table_sends_what_its_compiled_program_does(seed, tmp_path):
    table, file = random_table(seed), tmp_path / "table.csv"
    file.write_text(table.to_csv())
    sizes = {
        "layers": table.virtual_stages,
        "d_model": 16,
        "heads": 4,
        "kv_heads": 2,
        "d_ff": 24,
        "vocab_size": 40,
    }
    parallel = {
        "schedule": str(file),
        "virtual_stages": table.chunks,
        "microbatches": table.microbatches,
    }
    train = {"global_batch_size": table.microbatches, "sequence_length": 8}
    config = load(
        {
            "model": sizes,
            "mesh": {"pipeline": table.stages},
            "parallel": parallel,
            "train": train,
        }
    )
    program = Program(config, make_mesh(config))
    assert program.layout.table is not None
    # as they find it where devices are not CPUs
    program.local = LocalStep(program.layout, "accelerator", program.hooks)
    scalars = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((), jnp.float32)
    lowered = jax.jit(program.gradients).lower(
        program.layout.masters, program.batch_shapes(), *scalars
    )
    found = [
        c for c in collectives(lowered.compile(), program.mesh) if c.axis == PIPELINE
    ]
    planned, message = pipeline.iterations(config), 4 * 8 * 16
    assert planned.passes("down") + planned.passes("up") == sum(
        c.trips for c in found if c.kind == "collective-permute"
    )
    # XLA sums small things along with them
    summed = sum(
        c.trips * (c.bytes // message) for c in found if c.kind == "all-reduce"
    )
    assert (
        planned.passes("embedding") + planned.passes("unembedding") + 2 * planned.head
        == summed
    )
