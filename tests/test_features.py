"""Features meet features: a few runs in which every two features that may meet do meet, in every way that they act.

`test_equivalence.py` crosses layouts with each other; here they are crossed with what else a config turns on, since the
worst hole so far stood where three features met that were each tested alone (compression, DiLoCo, and a weight that is
whole on several ranks). Each run must show that its features took place, keep all copies of every array of its state
the same bits, go on from a checkpoint with the same bits, and have the losses of the same features on the smallest mesh
that has its islands.
"""

import os
import random
import subprocess
import sys
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from covering import covering, pairs
from image_batches import image_batch
from island_runs import copies_differ
from short_runs import packed_batch

from meshtrain.checkpoint import Checkpointer
from meshtrain.checkpoint.global_arrays import GlobalArrays
from meshtrain.config import Config, ConfigError, check, load
from meshtrain.config.follow import padded_batch_size
from meshtrain.mesh import make_mesh
from meshtrain.step import Program, State

# Every second step islands meet: the checkpoint stands between two exchanges
STEPS, SAVED = 5, 3
ROWS, UNEVEN, LENGTH = 24, 22, 12
DRAWS = 1500


class Features(NamedTuple):
    """A level of each feature, by name; None where it would do nothing."""

    mesh: str
    model: str
    zero: int | None
    schedule: str | None
    remat: str
    sequence_parallel: bool | None
    compute: str
    gradients: str | None
    over: str | None
    sync: str | None
    optimizer: str
    trained: str
    batch: str
    dropout: float
    offload: bool
    strategy: str | None = None  # of context


ISLANDS = {"data": 2, "islands": 2}
MESHES: dict[str, dict[str, int]] = {
    "d2t2p2": {"data": 2, "tensor": 2, "pipeline": 2},
    "i2": {"data": 4, "islands": 2},
    "i2p2": {**ISLANDS, "pipeline": 2},
    "i3t2": {"data": 3, "islands": 3, "tensor": 2},
    "d2c2t2": {"data": 2, "context": 2, "tensor": 2},
    "i2c2": {**ISLANDS, "context": 2},
}
ALL_AT_ONCE = {
    "i2c2t2": {**ISLANDS, "context": 2, "tensor": 2}
}  # of the cells that are named below alone
SMALL = {"layers": 5, "d_model": 24, "heads": 4, "d_ff": 34, "vocab_size": 61}
MODELS: dict[str, dict[str, Any]] = {
    # K and v are whole on all tensor ranks
    "kv1": {**SMALL, "family": "llama", "kv_heads": 1},
    # As positions are on all tensor and pipeline ranks
    "gpt2": {**SMALL, "family": "gpt2"},
    "gemma3": {
        **SMALL,
        "family": "gemma3",
        "kv_heads": 2,
        "window": 5,
        "global_every": 2,
        "rope_theta_local": 100.0,
    },
    "vit": {
        **SMALL,
        "family": "vit",
        "image_size": 6,
        "patch_size": 2,
        "channels": 1,
        "vocab_size": 7,
    },
}
SYNCS: dict[str, dict[str, int]] = {
    "diloco": {"every": 2},
    "streaming": {"every": 2, "fragments": 2, "delay": 1, "start": 1},
}
TRAINED: dict[str, dict[str, Any]] = {
    "all": {},
    "lora": {"lora": {"rank": 2, "targets": ["q", "v", "down"]}},
    "some": {"train": {"trainable": ["*norm*", "*attention.v"]}},
}
BATCHES: dict[str, dict[str, Any]] = {
    "even": {},
    "uneven": {"train": {"uneven_batch": "pad", "global_batch_size": UNEVEN}},
    "packed": {},
    "pairs": {"data": {"format": "pairs"}, "train": {"objective": "dpo"}},
}
COMPRESSED = ("float8", "int8", "int4", "topk", "powersgd")
LEVELS: dict[str, list[Any]] = {
    "mesh": list(MESHES),
    "model": list(MODELS),
    "zero": [0, 1, 2, 3],
    "schedule": ["1f1b", "zb_paired", "interleaved"],
    "remat": ["none", "selective", "full"],
    "sequence_parallel": [False, True],
    "compute": ["float32", "bfloat16", "float16"],
    "gradients": [None, "ring", *COMPRESSED],
    "over": ["data", "islands"],
    "sync": [None, *SYNCS],
    "optimizer": ["adamw", "sgd", "adafactor", "muon"],
    "trained": list(TRAINED),
    "batch": list(BATCHES),
    "dropout": [0.0, 0.1],
    "offload": [False, True],
    "strategy": ["all_gather", "ring", "ulysses"],
}


def configuration(cell: Features, **sections: dict[str, Any]) -> Config:
    """The checked config of a cell, with `sections` in place of its own; ConfigError where its features may not
    meet.
    """
    parallel = {
        "zero_stage": cell.zero,
        "schedule": cell.schedule,
        "remat": cell.remat,
        "sequence_parallel": cell.sequence_parallel,
        "virtual_stages": 2 if cell.schedule == "interleaved" else None,
        "context_strategy": cell.strategy,
    }
    reduce: dict[str, Any] = {"algorithm": "ring"} if cell.gradients == "ring" else {}
    if cell.over:
        reduce = {
            "compression": cell.gradients,
            "over": cell.over,
            "block": 16,
            "ratio": 0.1,
            "rank": 1,
        }
    values: dict[str, dict[str, Any]] = {
        "model": {**MODELS[cell.model], "dropout": cell.dropout},
        "data": {"source": "synthetic" if cell.model == "vit" else "stdlib"},
        "mesh": (MESHES | ALL_AT_ONCE)[cell.mesh],
        "parallel": {
            **{name: value for name, value in parallel.items() if value is not None},
            "reduce": reduce, "sync": SYNCS[cell.sync] if cell.sync else {}, "microbatches": 2, "offload_optimizer": cell.offload,
        },
        "precision": {"compute": cell.compute} | ({"loss_scale": 1024.0} if cell.compute == "float16" else {}),
        "train": {"global_batch_size": ROWS, "steps": STEPS} | ({} if cell.model == "vit" else {"sequence_length": LENGTH}),
        "optimizer": {"name": cell.optimizer, "learning_rate": 0.003, "warmup_steps": 2},
        "checkpoint": {"keep": STEPS},
    }  # fmt: skip
    for more in (TRAINED[cell.trained], BATCHES[cell.batch]):
        for section, keys in more.items():
            values[section] = {**values.get(section, {}), **keys}
    config = load(values | sections)
    check(config)
    return config


def acting(cell: Features) -> Features:
    """The cell with None in place of each level that would do nothing there."""
    sizes = {
        "islands": 1,
        "tensor": 1,
        "pipeline": 1,
        "context": 1,
        **MESHES[cell.mesh],
    }
    shards = sizes["data"] // sizes["islands"] * sizes["context"]
    sync = cell.sync if sizes["islands"] > 1 else None
    over = cell.over if sizes["islands"] > 1 else "data"
    if sync and shards == 1:
        over = "islands"  # nothing else is sent
    return cell._replace(
        zero=cell.zero if shards > 1 else None,
        schedule=cell.schedule if sizes["pipeline"] > 1 else None,
        sequence_parallel=cell.sequence_parallel if sizes["tensor"] > 1 else None,
        sync=sync,
        over=over if cell.gradients in COMPRESSED else None,
        strategy=cell.strategy if sizes["context"] > 1 else None,
        batch="even" if cell.model == "vit" and cell.batch == "packed" else cell.batch,
    )


@cache
def legal() -> list[Features]:
    """Cells drawn at random, those that the config takes."""
    draw, cells = random.Random(0), {}
    for _ in range(DRAWS):
        cell = acting(Features(*(draw.choice(levels) for levels in LEVELS.values())))
        try:
            configuration(cell)
        except ConfigError:
            continue
        cells[cell] = None
    return list(cells)


# --- runs


def batch(config: Config, kind: str, step: int) -> dict[str, np.ndarray]:
    """The global batch of a step, int32 [B, T] and what else its kind has; rows that fill an uneven one up weigh
    nothing.
    """
    if config.model.family == "vit":
        example = image_batch(config, step)
    else:
        text = np.random.default_rng(step).integers(
            0, config.model.vocab_size, (ROWS, LENGTH + 1), np.int32
        )
        example = {"tokens": text[:, :-1], "labels": text[:, 1:]}
    if kind == "packed":
        return packed_batch(**example)
    # Of 5 and 6 tokens, whose answers are the last 3 of them, then padding
    if kind == "pairs":
        at = np.broadcast_to(np.arange(LENGTH), (ROWS, LENGTH))
        segments = np.select([at < 5, at < 11], [1, 2], 0).astype(np.int32)
        weights = np.select(
            [(at > 1) & (at < 5), (at > 7) & (at < 11)], [1.0, -1.0], 0.0
        ).astype(np.float32)
        positions = np.where(
            segments == 2, at - 5, np.where(segments == 1, at, 0)
        ).astype(np.int32)
        return example | {
            "segments": segments,
            "pairs": (segments > 0).astype(np.int32),
            "positions": positions,
            "weights": weights,
        }
    if kind == "uneven":
        rows, filling = (
            config.train.global_batch_size,
            padded_batch_size(config) - config.train.global_batch_size,
        )
        example = {name: x[:rows] for name, x in example.items()}
        example["weights"] = np.ones(example["labels"].shape, np.float32)
        return {
            name: np.pad(x, [(0, filling)] + [(0, 0)] * (x.ndim - 1))
            for name, x in example.items()
        }
    return example


def take(
    program: Program, cell: Features, state: State, steps: range
) -> tuple[State, list[dict[str, float]]]:
    rows = []
    for step in steps:
        state, metrics = program.train_step(
            state, program.place(batch(program.config, cell.batch, step))
        )
        rows.append({name: float(np.mean(value)) for name, value in metrics.items()})
    return state, rows


def values(program: Program, state: State) -> dict[str, np.ndarray]:
    """Of each array what it holds for the model, without padding."""
    return {
        name: np.asarray(x) for name, x in GlobalArrays(program).arrays(state).items()
    }


def assert_happened(cell: Features, rows: list[dict[str, float]]) -> None:
    """What the cell turns on was at work: the scale of float16, bytes saved, exchanges of islands."""
    assert all(np.isfinite(row["loss"]) for row in rows)
    assert all(("loss_scale" in row) == (cell.compute == "float16") for row in rows)
    if (
        cell.over and not cell.sync and cell.zero not in (2, 3)
    ):  # there a gradient is compressed where it is made
        assert all(row["reduce_error"] > 0 for row in rows)
    if cell.sync:
        met = [row["sync_drift"] for row in rows if "sync_drift" in row]
        assert len(met) >= 2 and all(drift > 0 for drift in met)


@cache
def losses_on_islands(cell: Features) -> list[float]:
    """Of the same features where each island is one device, which holds all of the state."""
    islands = (MESHES | ALL_AT_ONCE)[cell.mesh].get("islands", 1)
    small = cell._replace(
        zero=None,
        schedule=None,
        remat="none",
        sequence_parallel=None,
        offload=False,
        strategy=None,
    )
    program = Program(
        config := configuration(small, mesh={"data": islands, "islands": islands}),
        make_mesh(config),
    )
    return [row["loss"] for row in take(program, cell, program.init(), range(STEPS))[1]]


def assert_features_hold(cell: Features, directory: Path) -> None:
    config = configuration(cell, run={"directory": str(directory)})
    program = Program(config, make_mesh(config))
    with closing(Checkpointer(config, program)) as checkpointer:
        state, rows = take(
            program, cell, checkpointer.restore_or_init()[0], range(SAVED)
        )
        checkpointer.save(SAVED, state, loss=rows[-1]["loss"])
        checkpointer.wait()
    state, more = take(program, cell, state, range(SAVED, STEPS))
    assert_happened(cell, rows + more)
    assert copies_differ(state) == []
    straight = values(program, state)
    with closing(Checkpointer(config, program)) as checkpointer:
        resumed, again = take(
            program, cell, checkpointer.restore_or_init()[0], range(SAVED, STEPS)
        )
    assert again == more
    after = values(program, resumed)
    assert [
        name for name in straight if straight[name].tobytes() != after[name].tobytes()
    ] == []
    if not cell.over:
        tolerance = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 5e-3}[cell.compute]
        np.testing.assert_allclose(
            [row["loss"] for row in rows + more],
            losses_on_islands(cell),
            rtol=tolerance,
        )


HOLE = Features(
    "i3t2",
    "kv1",
    None,
    None,
    "none",
    True,
    "float32",
    "int8",
    "islands",
    "diloco",
    "adamw",
    "all",
    "even",
    0.0,
    False,
)


HOLES = {
    "tensor": HOLE,
    "context-and-tensor": HOLE._replace(
        mesh="i2c2t2", zero=1, strategy="ring", batch="uneven", dropout=0.1
    ),
    "adapters": HOLE._replace(
        mesh="i2c2t2",
        zero=3,
        strategy="ring",
        trained="lora",
        batch="pairs",
        gradients=None,
        over=None,
        offload=True,
        compute="float16",
    ),
}


@pytest.mark.thorough
@pytest.mark.parametrize("hole", HOLES)
def test_compressed_diloco_keeps_copies_of_a_weight_that_tensor_ranks_hold_whole(
    hole, tmp_path
):
    assert_features_hold(HOLES[hole], tmp_path)


# What a run keeps from one step to the next, or sends. Each of these meets all there is; the others meet each other in
# test_equivalence.py.
OF_STATE = {
    "mesh",
    "context",
    "zero",
    "compute",
    "gradients",
    "over",
    "sync",
    "optimizer",
    "trained",
}


def met(cell: Features) -> set[Any]:
    """What meets in a cell, pair by pair; every level of those that act alike is there once."""
    alike = {"ring": "ring", "topk": "sparse", "powersgd": "sparse", None: None}
    acts = cell._replace(
        mesh="islands" if cell.mesh.startswith("i") else "one",
        zero=cell.zero and cell.zero // 2,
        remat="none" if cell.remat == "none" else "again",
        gradients=alike.get(cell.gradients, "quantized"),
        optimizer="adamw" if cell.optimizer == "sgd" else cell.optimizer,
    )
    cut = ("t2" in cell.mesh, "p2" in cell.mesh, "c2" in cell.mesh)
    names = (*Features._fields, "tensor", "pipeline", "context")
    meet = {
        pair
        for pair in pairs((*acts, *cut))
        if None not in pair and OF_STATE & {names[pair[0]], names[pair[2]]}
    }
    return meet | set(enumerate(cell))


# A pairwise covering of `legal()`, what meets most first; of `covering(legal(), of=met)`, which takes a while to find.
ROWS_OF_CELLS = """
i2c2   kv1    2 -           selective -     float16  float8   islands streaming adafactor lora pairs  0.1 False all_gather
d2t2p2 vit    1 interleaved none      True  bfloat16 float8   data    -         sgd       some even   0.0 True  -
d2t2p2 gpt2   1 1f1b        selective False float16  powersgd data    -         muon      all  packed 0.0 False -
i2c2   gpt2   2 -           none      -     float32  int4     islands diloco    sgd       all  packed 0.1 True  ulysses
i2c2   kv1    0 -           full      -     bfloat16 ring     -       diloco    adamw     some uneven 0.0 False ring
d2t2p2 gemma3 1 zb_paired   none      False float32  int8     data    -         adafactor lora uneven 0.0 False -
d2c2t2 gpt2   3 -           none      False float16  ring     -       -         muon      some even   0.1 True  all_gather
i2p2   gemma3 - interleaved selective -     float32  ring     -       streaming muon      all  even   0.0 True  -
i2     vit    2 -           none      -     bfloat16 powersgd islands -         muon      lora even   0.1 False -
d2c2t2 gemma3 1 -           selective True  float32  topk     data    -         adamw     some packed 0.1 True  ulysses
i3t2   kv1    - -           none      True  float16  float8   islands diloco    adafactor lora uneven 0.0 True  -
i2     kv1    3 -           none      -     bfloat16 int8     data    streaming muon      all  uneven 0.0 True  -
i2p2   gpt2   - 1f1b        selective -     bfloat16 ring     -       diloco    sgd       lora packed 0.1 False -
i2p2   gemma3 - zb_paired   full      -     float16  int4     islands streaming adamw     some even   0.0 False -
d2c2t2 kv1    2 -           selective False bfloat16 float8   data    -         sgd       lora pairs  0.1 False ring
i2p2   vit    - interleaved selective -     float32  float8   islands diloco    adafactor all  even   0.1 False -
i2c2   gpt2   0 -           selective -     float16  int4     islands streaming muon      lora pairs  0.0 False ring
d2t2p2 gemma3 2 zb_paired   selective True  bfloat16 -        -       -         muon      some even   0.0 True  -
d2c2t2 gpt2   1 -           selective True  float16  topk     data    -         adafactor all  uneven 0.1 False all_gather
i2p2   kv1    - interleaved none      -     float32  powersgd islands -         adamw     lora pairs  0.0 True  -
i2c2   gemma3 1 -           selective -     bfloat16 int4     data    streaming adafactor lora packed 0.1 False ulysses
i3t2   vit    - -           none      False float16  float8   islands streaming adamw     some even   0.0 True  -
i2p2   gemma3 - 1f1b        none      -     float32  float8   islands streaming sgd       some uneven 0.1 True  -
i2p2   gemma3 - zb_paired   none      -     float16  ring     -       diloco    adafactor all  even   0.0 True  -
i2c2   kv1    2 -           selective -     float32  int8     data    diloco    adafactor some even   0.0 False ring
d2c2t2 kv1    2 -           none      True  float16  ring     -       -         sgd       some packed 0.0 True  ulysses
i3t2   gpt2   - -           selective False bfloat16 -        -       diloco    muon      lora pairs  0.1 True  -
d2t2p2 vit    3 interleaved full      False float16  -        -       -         muon      some uneven 0.0 False -
i2c2   kv1    3 -           none      -     float32  -        -       -         sgd       lora uneven 0.1 False all_gather
i2c2   kv1    1 -           full      -     float32  powersgd islands -         adamw     all  even   0.0 False ring
d2c2t2 kv1    1 -           none      True  bfloat16 ring     -       -         muon      lora pairs  0.0 True  all_gather
d2t2p2 kv1    2 1f1b        none      False float32  float8   data    -         adafactor all  packed 0.0 False -
i2p2   gpt2   - zb_paired   none      -     float16  topk     data    -         adamw     all  uneven 0.0 True  -
i2     vit    3 -           full      -     bfloat16 ring     -       streaming muon      lora uneven 0.1 False -
i3t2   vit    - -           selective True  bfloat16 int4     islands streaming adafactor all  even   0.0 False -
i2c2   kv1    3 -           selective -     float32  int8     data    streaming muon      some packed 0.0 False ulysses
i2c2   gpt2   2 -           none      -     float16  float8   data    diloco    adamw     some even   0.1 True  all_gather
"""


def cell_of(row: str) -> Features:
    """Returns the cell of a row: the fields of Features in their order, `-` for None."""
    levels = {str(level): level for levels in LEVELS.values() for level in levels}
    levels["-"] = None
    return Features(*(levels[word] for word in row.split()))


CELLS = [cell_of(row) for row in ROWS_OF_CELLS.splitlines() if row]
OFTEN = 9  # of them CI runs


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(
            cell, marks=pytest.mark.thorough if at < OFTEN else pytest.mark.slow
        )
        for at, cell in enumerate(CELLS)
    ],
)
def test_features_meet(cell, tmp_path):
    assert_features_hold(cell, tmp_path)


@pytest.mark.thorough
def test_all_that_may_meet_meets_and_most_of_it_where_ci_looks():
    everything, seen = (
        set[Any]().union(*map(met, legal())),
        [met(cell) for cell in CELLS],
    )
    assert set[Any]().union(*seen) == everything, (
        f"draw them anew: {covering(legal(), of=met)}"
    )
    assert len(set[Any]().union(*seen[:OFTEN])) > 0.75 * len(everything)


LOWERED = """
import hashlib, sys
from meshtrain.mesh import fake_cpu_devices

fake_cpu_devices(8)
from test_features import Features, batch, configuration
from meshtrain.step import Program

for levels in eval(sys.argv[1]):
    program = Program(configuration(cell := Features(*levels)))
    text = program.lower(batch(program.config, cell.batch, 0)).as_text()
    print(cell, hashlib.sha256(text.encode()).hexdigest())
"""


def lowered(seed: str, cells: list[Features]) -> str:
    """A digest a line of each program that a process with this seed of its hashes (so of the order of its sets)
    traces.
    """
    paths = os.pathsep.join(
        [str(Path(__file__).parent), str(Path(__file__).parent / "helpers")]
    )
    environment = os.environ | {
        "PYTHONHASHSEED": seed,
        "PYTHONPATH": f"{paths}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }
    words = [sys.executable, "-c", LOWERED, repr([tuple(cell) for cell in cells])]
    return subprocess.run(
        words,
        env=environment,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=600,
    ).stdout


@pytest.mark.thorough
def test_processes_whose_sets_have_other_orders_trace_the_same_programs():
    cells = [HOLE, *CELLS[::16]]
    programs = lowered("0", cells)
    assert len(set(programs.splitlines())) == len(cells) > 2
    assert lowered("3", cells) == programs
