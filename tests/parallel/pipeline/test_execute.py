"""The executor computes the gradients of one device (tests/helpers/reference.py), whatever the schedule, the stages and
the microbatches.

Its two ways are both tried on CPU: idle slots skipped (lax.cond), and computed but masked as on accelerators. Every
continuous run takes a handful of cells by hand, `pytest -m slow` a pairwise covering of all that is legal.
"""

import dataclasses
import math
from collections.abc import Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from covering import covering, thorough_but
from jax.extend.core import jaxprs_in_params
from jax.sharding import PartitionSpec
from ragged_tables import ragged_table
from short_runs import canonical_numbers, place, token_batches

from meshtrain import xla
from meshtrain.config import Config, load, replaced
from meshtrain.mesh import make_mesh
from meshtrain.parallel.layout import Layout
from meshtrain.parallel.parallelize import LocalStep
from meshtrain.parallel.pipeline.clock import Carry, Execution
from meshtrain.parallel.pipeline.stage import Stage
from meshtrain.parallel.placement import Placed
from meshtrain.schedule.generators import SCHEDULES, legal_chunks, make_table
from meshtrain.schedule.simulation import Durations, simulate
from meshtrain.schedule.validate import validate
from meshtrain.step import Program

Tree = Any
TOLERANCE = 3e-6
LENGTH, VOCABULARY = 8, 37  # an odd vocabulary: its shares are padded


# --- cells


@dataclasses.dataclass(frozen=True)
class Cell:
    """One way to run a step. `microbatches` in stages: 0 stands for 1 microbatch; `layers` is even, uneven or split."""

    schedule: str
    mesh: tuple[int, int, int]
    chunks: int = 1
    microbatches: int = 8
    masked: bool = False
    layers: str = "even"
    vocab: str = "spread"
    remat: str = "none"
    zero: int = 1
    sequence_parallel: bool = False
    family: str = "llama"

    def __str__(self) -> str:
        mode = "masked" if self.masked else "skipped"
        words = [
            self.schedule,
            "x".join(map(str, self.mesh)),
            f"{self.chunks}chunks",
            f"{self.microbatches}m",
            mode,
        ]
        words += [self.layers, self.vocab, f"remat_{self.remat}", f"zero{self.zero}"]
        return "-".join([*words, "sp" if self.sequence_parallel else "tp", self.family])


def configuration(cell: Cell, folder: Path, **model: Any) -> Config:
    data, tensor, stages = cell.mesh
    virtual = stages * cell.chunks
    split = (
        [(0, 3, 1)[k % 3] for k in range(virtual)] if cell.layers == "split" else None
    )
    layers = sum(split) if split else virtual + (cell.layers == "uneven")
    schedule = cell.schedule
    if schedule == "csv":
        schedule = str(folder / "own.csv")
        Path(schedule).write_text(
            ragged_table(stages, cell.microbatches, cell.chunks).to_csv()
        )
    sizes = {
        "layers": layers,
        "d_model": 16,
        "heads": 4,
        "kv_heads": 2,
        "d_ff": 24,
        "vocab_size": VOCABULARY,
    }
    return load(
        {
            "model": {"family": cell.family, **sizes, **model},
            "mesh": {"data": data, "tensor": tensor, "pipeline": stages},
            "parallel": {
                "schedule": schedule,
                "virtual_stages": cell.chunks,
                "microbatches": cell.microbatches,
                "layer_split": split,
                "vocab": cell.vocab,
                "remat": cell.remat,
                "zero_stage": cell.zero,
                "sequence_parallel": cell.sequence_parallel,
            },
            "train": {
                "global_batch_size": data * cell.microbatches,
                "sequence_length": LENGTH,
            },
        }
    )


def program_of(config: Config, masked: bool) -> Program:
    program = Program(config, make_mesh(config))
    if masked:  # as `Forward` and `Executor` find it where devices are not CPUs
        assert program.layout.table is not None
        program.local = LocalStep(program.layout, "accelerator", program.hooks)
    return program


def parameters_of(layout: Layout) -> Tree:
    """Numbers that do not amplify rounding with depth: a residual stream of about unit size, to which each layer adds
    little.
    """
    scales = {
        "embedding.tokens": 4.0,
        "attention.out": layout.config.model.layers**-0.5,
    }
    scales["mlp.down"] = scales["attention.out"]

    def scaled(leaf: Placed, x: np.ndarray) -> np.ndarray:
        return x * np.float32(
            next((s for name, s in scales.items() if leaf.name.endswith(name)), 1.0)
        )

    return layout.map(scaled, canonical_numbers(layout))


@cache
def expected(config: Config) -> tuple[Tree, float, Tree]:
    """Canonical parameters, and the reference's loss and gradient on the whole batch."""
    parameters = parameters_of(Layout(config, make_mesh(config)))
    model = reference.Model(config.model.family)
    tokens, labels = token_batches(config, 1)[0]
    loss, gradient = jax.jit(
        jax.value_and_grad(
            lambda p: reference.loss(model, p, tokens=tokens, labels=labels)
        )
    )(parameters)
    return parameters, float(loss), jax.tree.map(np.asarray, gradient)


def one_device(config: Config) -> Config:
    """What of a config the reference depends on."""
    plain = load({})
    return dataclasses.replace(plain, model=config.model, train=config.train)


def assert_gradients(config: Config, masked: bool) -> None:
    parameters, right_loss, right = expected(one_device(config))
    program = program_of(config, masked)
    tokens, labels = token_batches(config, 1)[0]
    batch = jax.device_put({"tokens": tokens, "labels": labels}, program.batch_sharding)
    live = place(program.layout, parameters)
    loss, gradient = jax.jit(program.gradients)(
        live, batch, jnp.int32(0), jnp.float32(1)
    )
    np.testing.assert_allclose(float(loss), right_loss, rtol=TOLERANCE)
    seen = jax.tree.map(
        np.asarray, program.layout.canonical(jax.tree.map(np.asarray, gradient))
    )
    norm = np.sqrt(sum(np.sum(g**2) for g in jax.tree.leaves(right)))

    def compare(leaf: Placed, seen: np.ndarray, right: np.ndarray) -> None:
        own = (
            norm if leaf.name.endswith("k_bias") else np.linalg.norm(right)
        )  # a key's bias has no gradient in theory
        error = np.linalg.norm(seen - right) / own
        assert error <= TOLERANCE, f"{leaf.name}: gradient off by {error:.1e}"

    program.layout.map(compare, seen, right)


# --- every continuous run

CHOSEN = [
    Cell("gpipe", (1, 1, 2), 1, 3, remat="dots", layers="uneven"),
    Cell("gpipe", (1, 2, 4), 1, 2, masked=True, sequence_parallel=True),
    Cell("1f1b", (2, 1, 4), 1, 16, layers="split", zero=3),
    Cell("1f1b", (1, 1, 8), 1, 5, masked=True, remat="full"),
    Cell(
        "1f1b",
        (2, 2, 2),
        1,
        1,
        masked=True,
        layers="uneven",
        vocab="edge",
        zero=2,
        family="gpt2",
    ),
    Cell(
        "interleaved", (2, 2, 2), 3, 5, layers="uneven", zero=2, sequence_parallel=True
    ),
    Cell("interleaved", (1, 1, 4), 2, 8, masked=True, layers="split", vocab="edge"),
    Cell("looped_bfs", (2, 1, 2), 4, 2, masked=True, zero=3, remat="full"),
    Cell("looped_bfs", (1, 1, 4), 2, 6, vocab="edge", family="gpt2"),
    Cell("zb_h1", (1, 2, 4), 1, 9, vocab="edge", remat="full", layers="uneven"),
    Cell("zb_h1", (2, 1, 2), 1, 4, masked=True, zero=3, remat="dots"),
    Cell(
        "zb_h1", (1, 2, 2), 1, 4, masked=True, remat="selective", sequence_parallel=True
    ),
    Cell("zb_interleaved", (2, 1, 2), 2, 4, zero=2, family="gpt2"),
    Cell("zb_interleaved", (1, 1, 8), 2, 8, masked=True),
    Cell("v_1f1b", (2, 1, 4), 2, 4, masked=True, layers="uneven", zero=0),
    Cell("v_1f1b", (1, 2, 2), 2, 7, remat="dots", sequence_parallel=True),
    Cell("paired", (1, 2, 2), 1, 4, masked=True, sequence_parallel=True),
    Cell("paired", (2, 1, 4), 2, 8, layers="uneven", zero=3, remat="selective"),
    Cell(
        "paired",
        (2, 2, 1),
        1,
        3,
        masked=True,
        zero=3,
        remat="dots",
        sequence_parallel=True,
    ),
    Cell("paired", (1, 2, 1), 1, 4, remat="full", family="gpt2"),
    Cell("zb_paired", (1, 2, 2), 2, 4, masked=True, remat="full"),
    Cell("zb_paired", (2, 1, 2), 1, 5, layers="split", vocab="edge", zero=2),
    Cell("csv", (1, 1, 4), 3, 5, masked=True, layers="split"),
    Cell("csv", (2, 2, 2), 2, 3, vocab="edge", family="gpt2"),
]


# On the fewest devices: chunks with stages out of order.
NOW = min(
    (c for c in CHOSEN if c.schedule == "v_1f1b"), key=lambda c: math.prod(c.mesh)
)


# The other schedules.
FEW = [
    next(c for c in CHOSEN if c.schedule == s)
    for s in (
        "gpipe",
        "interleaved",
        "looped_bfs",
        "zb_h1",
        "zb_interleaved",
        "paired",
        "csv",
    )
]


@pytest.mark.parametrize("cell", thorough_but(CHOSEN, NOW.__eq__, FEW), ids=str)
def test_gradients_are_those_of_one_device(cell, tmp_path):
    assert_gradients(configuration(cell, tmp_path), cell.masked)


def test_the_chosen_cells_have_every_schedule_in_both_modes():
    assert {(c.schedule, c.masked) for c in CHOSEN} == set(
        product((*SCHEDULES, "csv"), (False, True))
    )


OWN_PAIRS = """\
# stages=2 microbatches=4
stage 0,stage 1
F0,
F1,F0
F2,F1
F3,B0
B0,F2+B1
B1,F3+B2
B2,B3
B3,
"""


@pytest.mark.thorough
@pytest.mark.parametrize("masked", [False, True])
def test_a_clock_of_pairs_may_have_the_halves_on_different_stages(masked, tmp_path):
    (tmp_path / "pairs.csv").write_text(OWN_PAIRS)
    config = configuration(Cell("1f1b", (1, 2, 2), 1, 4, layers="uneven"), tmp_path)
    assert_gradients(
        replaced(config, parallel={"schedule": str(tmp_path / "pairs.csv")}), masked
    )


FEATURES: dict[str, dict[str, Any]] = {
    "experts": {
        "model": {"family": "mixtral", "d_ff": 0, "moe": {"experts": 4, "d_ff": 24}},
        "mesh": {"data": 2, "expert": 2},
    },
    "dropout": {"model": {"dropout": 0.2}},
    "adapters": {"lora": {"rank": 2}},
    "float16": {"precision": {"compute": "float16"}},
    "context": {"mesh": {"context": 2}},
}


@pytest.mark.thorough
@pytest.mark.parametrize("feature", FEATURES)
def test_on_one_stage_pairs_give_the_gradients_of_microbatches_one_after_the_other(
    feature,
):
    model = {
        "layers": 2,
        "d_model": 16,
        "heads": 4,
        "kv_heads": 2,
        "d_ff": 24,
        "vocab_size": VOCABULARY,
    }
    more, found = FEATURES[feature], []
    mesh = {"tensor": 2} | more.get("mesh", {})
    for schedule in ("auto", "paired"):
        given = more | {
            "model": {
                key: value
                for key, value in (model | more.get("model", {})).items()
                if value
            },
            "mesh": mesh,
            "parallel": {"schedule": schedule, "microbatches": 3},
            "train": {
                "global_batch_size": 3 * mesh.get("data", 1),
                "sequence_length": LENGTH,
            },
        }
        config = load(given)
        program = Program(config, make_mesh(config))
        program.local = LocalStep(program.layout, "accelerator", program.hooks)
        assert (program.layout.table is not None) == (schedule == "paired")
        tokens, labels = token_batches(config, 1)[0]
        batch = jax.device_put(
            {"tokens": tokens, "labels": labels}, program.batch_sharding
        )
        live = place(program.layout, canonical_numbers(program.layout))
        loss, gradient = jax.jit(program.gradients)(
            live, batch, jnp.int32(0), jnp.float32(1)
        )[:2]
        found.append(
            (float(loss), [np.asarray(leaf) for leaf in jax.tree.leaves(gradient)])
        )
    (loss, gradients), (paired_loss, paired) = found
    tolerance = 2e-3 if feature == "float16" else 1e-5
    assert (
        paired_loss == pytest.approx(loss, rel=tolerance)
        and len(paired) == len(gradients) > 5
    )
    for seen, right in zip(paired, gradients, strict=True):
        assert np.abs(seen - right).max() <= tolerance * np.abs(right).max()
    assert max(np.abs(leaf).max() for leaf in gradients) > 1e-3


def innermost_loops(jaxpr: Any) -> list[set[str]]:
    """For each loop that holds no other: the slots that it computes."""
    loops = []
    for eqn in jaxpr.eqns:
        for inner in jaxprs_in_params(eqn.params):
            within = innermost_loops(inner)
            if eqn.primitive.name == "scan" and not within:
                stacks = " ".join(
                    str(inner_eqn.source_info.name_stack) for inner_eqn in inner.eqns
                )
                within = [
                    {slot for slot in (xla.FORWARD, xla.BACKWARD) if slot in stacks}
                ]
            loops += within
    return loops


@pytest.mark.thorough
@pytest.mark.parametrize(
    "schedule, stages",
    [("paired", 1), ("paired", 2), ("zb_paired", 2), ("interleaved", 2)],
)
def test_a_pair_is_one_loop_over_layers(schedule, stages, tmp_path):
    program = program_of(
        configuration(Cell(schedule, (1, 2, stages), 1, 4, layers="uneven"), tmp_path),
        True,
    )
    scalars = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((), jnp.float32)
    jaxpr = jax.make_jaxpr(program.gradients)(
        program.layout.masters, program.batch_shapes(), *scalars
    )
    assert ({xla.FORWARD, xla.BACKWARD} in innermost_loops(jaxpr.jaxpr)) == (
        schedule != "interleaved"
    )


def test_a_ragged_table_is_legal():
    for stages, microbatches, chunks in ((2, 3, 2), (4, 5, 3), (8, 1, 4)):
        validate(ragged_table(stages, microbatches, chunks))


@pytest.mark.parametrize("schedule", ["v_1f1b", "csv", "interleaved"])
def test_layers_lie_where_the_table_places_them(schedule, tmp_path):
    config = configuration(Cell(schedule, (1, 1, 2), 2, 2), tmp_path)
    layout = Layout(config, make_mesh(config))
    placed = [[0, 3], [1, 2]] if schedule != "interleaved" else [[0, 2], [1, 3]]
    assert layout.layer_at[:, :, 0].tolist() == placed


@pytest.mark.thorough
@pytest.mark.parametrize("masked", [False, True])
def test_evaluation_runs_the_forward_slots_and_gives_the_reference_loss(
    masked, tmp_path
):
    config = configuration(
        Cell("zb_interleaved", (1, 2, 4), 2, 6, layers="uneven"), tmp_path
    )
    parameters, loss, _ = expected(one_device(config))
    program = program_of(config, masked)
    tokens, labels = token_batches(config, 1)[0]
    batch = jax.device_put({"tokens": tokens, "labels": labels}, program.batch_sharding)
    np.testing.assert_allclose(
        float(program.eval_step(place(program.layout, parameters), batch)),
        loss,
        rtol=TOLERANCE,
    )


# --- memory and size of the program


def last_carry(program: Program, masters: Tree, batches: Tree) -> Carry:
    """What the buffers of a device hold after the last clock."""
    executor, weights = (
        program.local.executor,
        program.local.zero.gather_params(masters),
    )
    assert executor is not None
    stage = Stage(executor.forward, executor.table.chunks, weights, batches, None)
    execution = Execution(executor.compiled, stage, jnp.float32(1))
    return execution.run(executor.compiled.phases, execution.start())


def used_places(program: Program) -> np.ndarray:
    """Places of each stage's stash that were written in one step, [stages]: those of the stage inputs that are not zero
    any more.
    """
    config, specs = program.config, program.layout.shards

    def local(masters: Tree, batch: Tree) -> jax.Array:
        batches, _ = program.local.microbatches(batch)
        # One segment, of one place
        [[(inputs, _)]] = last_carry(program, masters, batches).stash
        return jnp.any(inputs != 0, axis=tuple(range(1, inputs.ndim)))[None]

    out = PartitionSpec(("data", "pipeline"))
    mapped = jax.shard_map(
        local, mesh=program.mesh, in_specs=(specs, PartitionSpec("data")), out_specs=out
    )
    tokens, labels = token_batches(config, 1)[0]
    batch = jax.device_put({"tokens": tokens, "labels": labels}, program.batch_sharding)
    live = place(program.layout, parameters_of(program.layout))
    return np.asarray(jax.jit(mapped)(live, batch)).sum(axis=1)


@pytest.mark.thorough
@pytest.mark.parametrize("schedule", ["1f1b", "zb_interleaved"])
def test_entries_held_are_those_that_the_simulator_counts(schedule, tmp_path):
    chunks = legal_chunks(schedule) or 2
    program = program_of(
        configuration(Cell(schedule, (1, 1, 4), chunks, 8), tmp_path), masked=False
    )
    table = make_table(schedule, 4, 8, chunks)
    assert (
        used_places(program).tolist()
        == simulate(table, Durations()).peak_in_flight.tolist()
    )


def in_both_modes(schedules: Sequence[str], now: set[tuple[str, bool]]) -> list[Any]:
    """(schedule, masked), slow but for those in `now`."""
    slow = pytest.mark.slow
    return [
        pytest.param(*c, marks=() if c in now else slow)
        for c in product(schedules, (False, True))
    ]


def lowered(program: Program) -> jax.stages.Lowered:
    """The gradients' program on abstract arrays."""
    scalars = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((), jnp.float32)
    return jax.jit(program.gradients).lower(
        program.layout.masters, program.batch_shapes(), *scalars
    )


def temp_bytes(program: Program) -> int:
    memory = lowered(program).compile().memory_analysis()
    assert memory is not None
    return memory.temp_size_in_bytes


FLAT = [s for s in SCHEDULES if s not in ("gpipe", "looped_bfs")]


@pytest.mark.thorough
@pytest.mark.parametrize("schedule, masked", in_both_modes(FLAT, now={("1f1b", False)}))
def test_memory_does_not_grow_with_the_microbatches(schedule, masked, tmp_path):
    cell = Cell(schedule, (1, 1, 2), legal_chunks(schedule) or 2, masked=masked)
    few, many = (
        temp_bytes(
            program_of(
                configuration(
                    dataclasses.replace(cell, microbatches=m), tmp_path, d_model=128
                ),
                masked,
            )
        )
        for m in (8, 64)
    )
    assert few <= many <= 1.03 * few


@pytest.mark.thorough
def test_gpipe_holds_every_microbatch(tmp_path):
    cell = Cell("gpipe", (1, 1, 2))
    few, many = (
        temp_bytes(
            program_of(
                configuration(dataclasses.replace(cell, microbatches=m), tmp_path),
                False,
            )
        )
        for m in (8, 64)
    )
    assert many > 3 * few


@pytest.mark.thorough
def test_full_remat_keeps_the_layers_inputs_and_nothing_else(tmp_path):
    kept = {}
    for remat in ("none", "full"):
        program = program_of(
            configuration(
                Cell("1f1b", (1, 1, 4), layers="uneven", remat=remat), tmp_path
            ),
            False,
        )
        kept[remat] = stash_shapes(program)
    depth, layers = make_table("1f1b", 4, 8).stages * 2 - 1, 2
    assert kept["full"] == [(depth, layers, 1, LENGTH, 16)]
    assert len(kept["none"]) > 5


def stash_shapes(program: Program) -> list[tuple[int, ...]]:
    """Shapes of the buffers in which a stage holds what its backwards need."""
    shapes: list[tuple[int, ...]] = []

    def local(masters: Tree, batch: Tree) -> jax.Array:
        batches, _ = program.local.microbatches(batch)
        carry = last_carry(program, masters, batches)
        shapes.extend(stash.shape for stash in jax.tree.leaves(carry.stash))
        return carry.loss[None]

    specs = (program.layout.shards, PartitionSpec("data"))
    out = PartitionSpec(("data", "pipeline"))
    mapped = jax.shard_map(local, mesh=program.mesh, in_specs=specs, out_specs=out)
    jax.eval_shape(mapped, program.layout.masters, program.batch_shapes())
    return shapes


@pytest.mark.thorough
@pytest.mark.parametrize(
    "schedule, masked", in_both_modes(SCHEDULES, now={("1f1b", True)})
)
def test_the_program_is_no_larger_for_more_microbatches(schedule, masked, tmp_path):
    cell = Cell(schedule, (1, 1, 4), legal_chunks(schedule) or 2, masked=masked)
    operations = [
        lowered(
            program_of(
                configuration(dataclasses.replace(cell, microbatches=m), tmp_path),
                masked,
            )
        )
        .as_text()
        .count(" = stablehlo.")
        for m in (16, 256)
    ]
    assert operations[1] <= 1.02 * operations[0]


# --- all that is legal, pairwise

CHUNKS = {
    schedule: [fixed] if (fixed := legal_chunks(schedule)) else [1, 2, 3, 4]
    for schedule in SCHEDULES
}
FACTORS: list[list[Any]] = [
    [
        (schedule, chunks)
        for schedule, many in {**CHUNKS, "csv": [1, 2, 3, 4]}.items()
        for chunks in many
    ],
    [(1, 1, 2), (2, 2, 2), (4, 1, 2), (1, 1, 4), (2, 1, 4), (1, 2, 4), (1, 1, 8)],
    [
        "one",
        "fewer than the stages",
        "as many",
        "one more than twice",
        "four times as many",
    ],
    [False, True],  # masked
    ["even", "uneven", "split"],
    ["spread", "edge"],
    ["none", "full", "dots"],
    [0, 1, 2, 3],
    [False, True],  # sequence parallelism
    ["llama", "gpt2"],
]


def cell_of(levels: tuple[Any, ...]) -> Cell | None:
    """None for what changes nothing (ZeRO on one data rank, sequence parallelism on one tensor rank), so as not to try
    it twice.
    """
    (
        (schedule, chunks),
        mesh,
        many,
        masked,
        layers,
        vocab,
        remat,
        zero,
        sequence_parallel,
        family,
    ) = levels
    if (zero and mesh[0] == 1) or (sequence_parallel and mesh[1] == 1):
        return None
    p = mesh[2]
    microbatches = dict(
        zip(FACTORS[2], (1, max(1, p - 1), p, 2 * p + 1, 4 * p), strict=True)
    )[many]
    return Cell(
        schedule,
        mesh,
        chunks,
        microbatches,
        masked,
        layers,
        vocab,
        remat,
        zero,
        sequence_parallel,
        family,
    )


def everything() -> list[Cell]:
    """A covering of the pairs of levels that meet in some thousands of cells drawn from the product."""
    draws = np.random.default_rng(0).integers(
        0, [len(factor) for factor in FACTORS], (6000, len(FACTORS))
    )
    levels = [
        tuple(factor[i] for factor, i in zip(FACTORS, draw, strict=True))
        for draw in draws.tolist()
    ]
    chosen = covering([drawn for drawn in dict.fromkeys(levels) if cell_of(drawn)])
    return [cell for drawn in chosen if (cell := cell_of(drawn))]


@pytest.mark.slow
@pytest.mark.parametrize("cell", everything(), ids=str)
def test_gradients_are_those_of_one_device_in_a_covering_of_all_cells(cell, tmp_path):
    assert_gradients(configuration(cell, tmp_path), cell.masked)
