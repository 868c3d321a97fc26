"""A schedule is data: what is planned follows from the table, whatever its name."""

import itertools

import pytest
from covering import covering, thorough_but

from meshtrain.config import load
from meshtrain.plan import named, plan
from meshtrain.schedule.generators import SCHEDULES, legal_chunks, make_table

MODEL = {"layers": 32, "d_model": 4096, "heads": 32, "kv_heads": 8, "d_ff": 14336, "vocab_size": 128256}


# Stages and microbatches.
SIZES = [(2, 1), (2, 8), (3, 7), (4, 4), (4, 16), (8, 8), (8, 5)]
CASES = list(itertools.product(SCHEDULES, SIZES, ("none", "dots", "full")))


@pytest.mark.parametrize("case", thorough_but(CASES, covering(CASES).__contains__), ids=str)
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
                "parallel": {"schedule": name, "microbatches": microbatches, "virtual_stages": chunks, "remat": remat},
                "precision": {"compute": "bfloat16"},
                "train": {"global_batch_size": 2 * microbatches, "sequence_length": 4096},
            }
        )
        found = plan(config, named("h100", 4 * stages))
        return found.memory, found.flows, found.depths, found.seconds, found.ticks, found.bubble_fraction

    assert planned(schedule) == planned(str(file))
