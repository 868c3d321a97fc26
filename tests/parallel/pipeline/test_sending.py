"""Gradients of a table with G and R are those of the same one without, and take the same bytes over data, in more
pieces.

As on accelerators, where collectives travel beside compute; on CPU, where they would be waited for, the cells are left
out.
"""

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import thorough_but
from short_runs import loss_and_gradients

from meshtrain.config import Config, load
from meshtrain.config.reduce import sends_by_table
from meshtrain.hlo import collectives
from meshtrain.mesh import make_mesh
from meshtrain.parallel.parallelize import LocalStep
from meshtrain.schedule.generators import make_table
from meshtrain.schedule.table import G, R
from meshtrain.step import Program

pytestmark = pytest.mark.thorough

SIZES = {
    "layers": 9,
    "d_model": 24,
    "heads": 6,
    "kv_heads": 2,
    "d_ff": 50,
    "vocab_size": 257,
}
MESH = {"data": 2, "tensor": 2, "pipeline": 2}
CELLS: dict[str, dict[str, Any]] = {
    "tensor": {},
    "sequence parallel": {"parallel": {"sequence_parallel": True}},
    "zero bubble, 3 chunks": {"parallel": {"schedule": "zb_interleaved", "virtual_stages": 3, "remat": "selective"}},
    "pairs": {"parallel": {"schedule": "paired"}},
    "zero bubble pairs": {"parallel": {"schedule": "zb_paired"}},
    "a V": {"parallel": {"schedule": "v_1f1b"}},
    "breadth first, ZeRO-3 held": {"parallel": {"schedule": "looped_bfs", "zero_stage": 3, "zero_hold": True}},
    "dropout, tied, edge": {"model": {"family": "gpt2", "dropout": 0.2}, "parallel": {"vocab": "edge"}},
    "adapters": {"lora": {"rank": 3}, "parallel": {"zero_stage": 3, "zero_hold": True}},
    "sums in bfloat16": {"precision": {"gradient_sums": "bfloat16"}},
    "compressed": {"parallel": {"reduce": {"compression": "int8"}}},
    "context": {"mesh": {"data": 1, "tensor": 2, "pipeline": 2, "context": 2}, "parallel": {"context_strategy": "all_gather"}},
    "experts": {"model": {"d_ff": None, "moe": {"experts": 4, "top_k": 2, "d_ff": 20}}},
    "dense layers first": {"model": {"d_ff": None, "dense_layers": 2, "dense_d_ff": 30, "moe": {"experts": 4, "top_k": 2, "d_ff": 20}},
                           "parallel": {"layer_split": [2, 2, 2, 3]}},
    "own table": {},
}  # fmt: skip

FEW = (
    "tensor",
    "zero bubble, 3 chunks",
    "pairs",
    "breadth first, ZeRO-3 held",
    "compressed",
    "experts",
    "dense layers first",
    "own table",
)

# Those that are rounded in other places: unrolled clocks round sums less often, and a chunk's blocks share other scales
# than a stage's.
ROUNDED = {"sums in bfloat16": 2**-7, "compressed": 0.02}


def config_of(cell: str, folder: Path) -> Config:
    given = CELLS[cell]
    parallel = {
        "schedule": "interleaved",
        "virtual_stages": 2,
        "microbatches": 4,
        "zero_stage": 1,
    }
    if cell == "own table":
        table = make_table("interleaved", 2, 4, 2)
        # both at moments that the package would not choose, one of them beside forwards and backwards
        sends = table.sends.copy()
        sends[G, 1], sends[R, 1] = 1, int(table.when()[1].reshape(2, -1)[1].max()) + 2
        parallel["schedule"] = str(folder / "own.csv")
        Path(parallel["schedule"]).write_text(
            dataclasses.replace(table, sends=sends).to_csv()
        )
    return load(
        {
            **given,
            "model": SIZES | given.get("model", {}),
            "mesh": given.get("mesh", MESH),
            "parallel": parallel | given.get("parallel", {}),
            "train": {"global_batch_size": 8, "sequence_length": 16},
        }
    )


def program_of(config: Config, sends: bool) -> Program:
    """As `Forward` and `Executor` find it where devices are not CPUs; without G and R if not `sends`."""
    program = Program(config, make_mesh(config))
    if not sends:
        program.layout.table = dataclasses.replace(program.layout.table, sends=None)
    program.local = LocalStep(program.layout, "accelerator", program.hooks)
    assert program.local.executor.sends == sends
    return program


@pytest.mark.parametrize("cell", thorough_but(CELLS, lambda _: False, FEW))
def test_gradients_sent_beside_the_clocks_are_those_sent_before_and_after_them(
    cell, tmp_path
):
    config = config_of(cell, tmp_path)
    (loss, right), (same, seen) = (
        loss_and_gradients(program_of(config, sends)) for sends in (False, True)
    )
    assert float(same) == pytest.approx(float(loss), rel=1e-6)
    if cell in ROUNDED:
        off = jax.tree.map(
            lambda a, b: float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b)), seen, right
        )
        assert max(jax.tree.leaves(off)) < ROUNDED[cell]
        return
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), seen, right
    )


def test_the_same_bytes_go_over_data_in_a_piece_for_each_chunk(tmp_path):
    config, found = config_of("tensor", tmp_path), []
    for sends in (False, True):
        sent = Counter()
        for one in collectives(
            program_of(config, sends).lower().compile(), make_mesh(config)
        ):
            if one.axis == "data" and one.kind in ("all-gather", "reduce-scatter"):
                sent[one.kind] += one.sent * round(one.times)
        found.append(sent)
    assert found[0] == found[1] and all(found[0].values())


def test_on_cpu_nothing_is_sent_beside_the_clocks(tmp_path):
    config = config_of("tensor", tmp_path)
    program = Program(config, make_mesh(config))
    assert program.layout.table.has_sends and not program.local.executor.sends


@pytest.mark.parametrize(
    "parallel, more",
    [
        ({"zero_stage": 0}, {}),
        ({"zero_stage": 2}, {}),
        ({"virtual_stages": 1, "schedule": "1f1b"}, {}),
        ({"reduce": {"compression": "int4"}}, {}),
        ({}, {"mesh": {"data": 1, "tensor": 2, "pipeline": 2}}),
        ({"microbatches": 2}, {"mesh": {"data": 4, "pipeline": 2, "islands": 2}}),
        ({}, {"lora": {"rank": 2}}),
        (
            {},
            {
                "train": {"objective": "dpo"},
                "lora": {"rank": 2},
                "data": {"format": "pairs"},
            },
        ),
    ],
)
def test_where_nothing_is_held_or_could_travel_the_table_has_neither(parallel, more):
    given = {
        "model": SIZES,
        "mesh": MESH,
        "parallel": {"schedule": "interleaved", "virtual_stages": 2, "microbatches": 4},
    }
    given |= {key: value for key, value in more.items() if key != "train"}
    given["parallel"] = given["parallel"] | parallel
    train = {"global_batch_size": 8, "sequence_length": 16} | more.get("train", {})
    assert not sends_by_table(load(given | {"train": train}))
