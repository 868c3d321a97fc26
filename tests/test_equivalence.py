"""A mesh is only a placement: every layout gives the losses and gradients of one device (tests/helpers/reference.py).

The product has 10 meshes x 1, 2 or 4 islands x 4 ZeRO stages x sequence parallelism x remat x 2 schedules x 2 families
x 2 sizes = 3840 layouts. 1728 of them the config must refuse (6 heads over tensor 4 or 8, 5 layers over pipeline 8,
islands that do not divide data); the other 2112 must all pass, and are 920 programs, since a key does nothing where its
axis has one rank. Each of these may further compute in float16, pack documents, drop out and keep its optimizer state
on the host: 14720 programs. `pytest` takes eight on three meshes, in which every two axes and every two levels of the
keys meet, and one with islands; `pytest -m thorough` what is missing of all
programs: every two keys that act, each with every axis that is cut or not, and every mesh and number of islands once;
`pytest -m slow` all layouts.
"""

import random
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from covering import covering, pairs, slow_but, thorough_but
from short_runs import (
    canonical_numbers,
    first_moment,
    packed_batch,
    token_batches,
    train,
)

from meshtrain.config import Config, ConfigError, check, load, replaced
from meshtrain.mesh import AXES, make_mesh
from meshtrain.model.dropout import EMBEDDING_SITE, Dropout
from meshtrain.parallel import offload
from meshtrain.parallel.layout import Layout
from meshtrain.schedule.generators import has_table
from meshtrain.step import Program, State

STEPS = 6
CLIP = 0.5  # below the first gradients' norm, so that clipping is at work
# Of the first loss, the others, and the first gradient. What float16 rounds away in a step grows in those after it.
TOLERANCES = {"float32": (2e-5, 2e-5, 1e-5), "float16": (1e-4, 2e-2, 2e-2)}

MESHES = [(d, t, 8 // d // t) for d in (1, 2, 4, 8) for t in (1, 2, 4, 8) if d * t <= 8]


class Cell(NamedTuple):
    """A layout, and what is run in it."""

    mesh: tuple[int, int, int]
    zero: int | None
    sequence_parallel: bool | None
    remat: str
    schedule: str | None
    family: str
    size: str
    islands: int = 1
    compute: str = "float32"
    packed: bool = False
    dropout: float = 0.0
    offload: bool = False


FACTORS: dict[str, list[Any]] = {
    "mesh": MESHES,
    "zero": [0, 1, 2, 3],
    "sequence_parallel": [False, True],
    "remat": ["none", "full"],
    "schedule": ["1f1b", "paired"],
    "family": ["llama", "gpt2"],
    "size": ["round", "odd"],
    "islands": [1, 2, 4],
}
RUNS: dict[str, list[Any]] = {
    "compute": ["float32", "float16"],
    "packed": [False, True],
    "dropout": [0.0, 0.2],
    "offload": [False, True],
}
CELLS = [Cell(*levels) for levels in product(*FACTORS.values())]

SIZES: dict[str, dict[str, Any]] = {
    "round": {
        "model": {
            "layers": 8,
            "d_model": 32,
            "heads": 8,
            "kv_heads": 4,
            "d_ff": 64,
            "vocab_size": 256,
        },
        "train": {"sequence_length": 32},
    },
    "odd": {
        "model": {
            "layers": 5,
            "d_model": 24,
            "heads": 6,
            "kv_heads": 2,
            "d_ff": 50,
            "vocab_size": 257,
        },
        "train": {
            "sequence_length": 40,
            "label_smoothing": 0.1,
            "z_loss": 1e-3,
            "loss_chunk": 23,
        },
    },
}
# Tied where the family's is not, and the other way round
SIZES["other head"] = SIZES["odd"]
SIZES["options"] = {
    "model": {
        **SIZES["odd"]["model"],
        "qkv_bias": True,
        "qk_norm": True,
        "window": 9,
        "activation": "gelu_exact",
    },
    "train": {"sequence_length": 40},
}
# of what tells the Gemmas apart, all at once: three layers see the window, two all; caps low enough to bend scores and
# logits
SIZES["gemma"] = {
    "model": {
        **SIZES["odd"]["model"],
        "window": 9,
        "global_every": 2,
        "rope_theta_local": 100.0,
        "query_scalar": 30,
        "score_cap": 2.0,
        "logit_cap": 3.0,
        "qk_norm": True,
    },
    "train": SIZES["odd"]["train"],
}
SCALE = 1024.0  # of the loss in float16
MICROBATCHES = {8: 1, 4: 2, 2: 4, 1: 4}  # by data ranks: 8 sequences a step


@cache
def one_device(family: str, size: str, dropout: float = 0.0) -> Config:
    """The run on one device, that all cells of a family, a size and a dropout are placements of."""
    model, training = SIZES[size]["model"], SIZES[size]["train"]
    if size == "other head":
        model = {**model, "tied_head": family == "llama"}
    return load(
        {
            "model": {**model, "family": family, "dropout": dropout},
            "train": {"global_batch_size": 8, "steps": STEPS, **training},
            "optimizer": {"learning_rate": 0.01, "warmup_steps": 2, "grad_clip": CLIP},
        }
    )


def configuration(cell: Cell, **others: Any) -> Config:
    """The checked config of a cell; `others` are more keys of the section parallel."""
    keys = {
        "zero_stage": cell.zero,
        "sequence_parallel": cell.sequence_parallel,
        "remat": cell.remat,
        "schedule": cell.schedule,
        "microbatches": MICROBATCHES[cell.mesh[0]],
        "offload_optimizer": cell.offload,
    }
    chosen = {name: value for name, value in keys.items() if value is not None}
    sizes = dict(zip(AXES, cell.mesh, strict=True)) | {"islands": cell.islands}
    precision = {"compute": cell.compute} | (
        {"loss_scale": SCALE} if cell.compute == "float16" else {}
    )
    config = one_device(cell.family, cell.size, cell.dropout)
    config = replaced(config, mesh=sizes, parallel=chosen | others, precision=precision)
    check(config)
    return config


def fits(cell: Cell) -> bool:
    """Whether the sizes can be divided so at all."""
    (data, tensor, pipeline), model = cell.mesh, SIZES[cell.size]["model"]
    return (
        model["heads"] % tensor == 0
        and model["layers"] >= pipeline
        and data % cell.islands == 0
    )


def acting(cell: Cell) -> Cell:
    """The cell with None in place of each key whose axis has one rank."""
    data, tensor, pipeline = cell.mesh
    return cell._replace(
        zero=cell.zero if data > cell.islands else None,
        sequence_parallel=cell.sequence_parallel if tensor > 1 else None,
        schedule=cell.schedule
        if has_table(cell.schedule or "", pipeline, MICROBATCHES[data])
        else None,
    )


def runs(cells: list[Cell]) -> list[Cell]:
    """Each cell with every level of RUNS."""
    return [
        cell._replace(**dict(zip(RUNS, levels, strict=True)))
        for cell in cells
        for levels in product(*RUNS.values())
    ]


LEGAL = [cell for cell in CELLS if fits(cell)]
PROGRAMS = list(dict.fromkeys(map(acting, LEGAL)))
RUN_PROGRAMS = runs(PROGRAMS)
# ZeRO x sequence parallelism, with an orthogonal array of remat, family and size; each schedule with both levels of
# these
FEW = [
    acting(Cell(*levels))
    for levels in (
        ((2, 4, 1), 0, False, "none", "paired", "llama", "round"),
        ((4, 2, 1), 0, True, "full", "paired", "gpt2", "odd"),
        ((2, 2, 2), 1, False, "none", "1f1b", "gpt2", "odd"),
        ((2, 4, 1), 1, True, "full", "paired", "llama", "round"),
        ((2, 2, 2), 2, False, "full", "paired", "llama", "odd"),
        ((2, 2, 2), 2, True, "none", "paired", "gpt2", "round"),
        ((2, 2, 2), 3, False, "full", "1f1b", "gpt2", "round"),
        ((4, 2, 1), 3, True, "none", "paired", "llama", "odd"),
    )
]


def met(cell: Cell) -> set[Any]:
    """What meets in a cell: of axes whether they are cut, of keys what acts; and where."""
    cut = [min(size, 2) for size in (*cell.mesh, cell.islands)]
    acts = {
        pair
        for pair in pairs((*cut, *cell._replace(islands=1)[1:]))
        if None not in pair
    }
    return acts | {("mesh", cell.mesh), ("islands", cell.islands)}


# Plain ones first: in float16 numbers may be further off.
COVERING = FEW + covering(PROGRAMS, beside=FEW, of=met)
COVERING += covering(RUN_PROGRAMS, beside=COVERING, of=met)
ON_ISLANDS = next(cell for cell in COVERING if cell.islands > 1)
NOW_CELL = FEW[6]  # all axes, ZeRO-3, 1F1B and remat at once


def levels(cell: Cell) -> set[Any]:
    """Each level of a cell."""
    return set(cell._asdict().items())


# What CI runs: every level. All pairs are slow; on which mesh what a run can have meets, tests/test_features.py asks as
# well.
FEW_RUNS = covering(
    [cell for cell in COVERING if cell not in FEW], beside=[*FEW, ON_ISLANDS], of=levels
)


def name(cell: Cell) -> str:
    parts = [
        "x".join(map(str, cell.mesh)),
        *([f"islands{cell.islands}"] if cell.islands > 1 else []),
    ]
    parts += [] if cell.zero is None else [f"zero{cell.zero}"]
    parts += {None: [], True: ["sp"], False: ["tp"]}[cell.sequence_parallel]
    parts += [
        part for part in (cell.remat, cell.schedule, cell.family, cell.size) if part
    ]
    parts += [cell.compute] if cell.compute != "float32" else []
    return "-".join(
        parts + [key for key in ("packed", "dropout", "offload") if getattr(cell, key)]
    )


# --- the reference's run


@cache
def expected(
    family: str, size: str, packed: bool = False, dropout: float = 0.0
) -> tuple[Any, list[float], Any]:
    """Canonical parameters, and the reference's losses and first gradient."""
    config = one_device(family, size, dropout)
    parameters = canonical_numbers(Layout(config, make_mesh(config)))
    losses = {
        key: value
        for key, value in SIZES[size]["train"].items()
        if key not in ("sequence_length", "loss_chunk")
    }
    m = config.model
    model = reference.Model(
        family,
        **losses,
        window=m.window,
        activation=m.activation,
        plus_one=m.norm_plus_one,
        scaled_embedding=m.scaled_embedding,
        query_scalar=m.query_scalar,
        score_cap=m.score_cap,
        logit_cap=m.logit_cap,
        global_every=m.global_every,
        rope_theta_local=m.rope_theta_local,
    )
    recipe = reference.Recipe(0.01, 2, STEPS, clip=CLIP)
    batches = [
        batch(config, step, *texts, packed)
        for step, texts in enumerate(token_batches(config, STEPS))
    ]
    return parameters, *reference.train(model, recipe, parameters, batches)


def batch(
    config: Config, step: int, tokens: np.ndarray, labels: np.ndarray, packed: bool
) -> dict[str, Any]:
    """All that a run can have, so that the runs of a family and a size are one program: one document and no dropout
    leave ones.
    """
    whole = {
        "positions": np.broadcast_to(
            np.arange(tokens.shape[1], dtype=np.int32), tokens.shape
        ),
        "segments": np.zeros_like(tokens),
        "weights": np.ones(tokens.shape, np.float32),
    }
    documents = (
        packed_batch(tokens, labels)
        if packed
        else {"tokens": tokens, "labels": labels} | whole
    )
    return documents | {"drops": drops(config, step)}


def drops(config: Config, step: int) -> dict[str, jax.Array]:
    """What dropout multiplies with in a step's whole batch: ones that went through it, at the places that `reference`
    knows.
    """
    m, t = config.model, config.train
    rows, length = t.global_batch_size, t.sequence_length
    stream, scores = (
        jnp.ones((rows, length, m.d_model)),
        jnp.ones((rows, m.heads, length, length)),
    )
    key = jax.random.fold_in(jax.random.key(config.run.seed + 1), step)
    dropout = Dropout(m.dropout, key, jnp.arange(rows))

    def of_layer(layer: jax.Array) -> dict[str, jax.Array]:
        here = dropout.at(layer)
        attention, mlp = (here.at(site).stream(stream, 0) for site in (1, 2))
        return {
            "scores": here.at(0).attention(scores, 0),
            "attention": attention,
            "mlp": mlp,
        }

    layers = jax.vmap(of_layer, out_axes=1)(jnp.arange(m.layers))
    return layers | {"embedding": dropout.at(EMBEDDING_SITE).stream(stream, 0)}


def assert_equal(config: Config, cell: Cell) -> None:
    parameters, losses, gradient = expected(
        cell.family, cell.size, cell.packed, cell.dropout
    )
    metrics, program, (after_one, _) = train(config, STEPS, parameters, cell.packed)
    assert_run(cell, metrics, program.state_shapes)
    first, others, tolerance = TOLERANCES[cell.compute]
    np.testing.assert_allclose(metrics[0]["loss"], losses[0], rtol=first, atol=0)
    np.testing.assert_allclose(
        [m["loss"] for m in metrics], losses, rtol=others, atol=0
    )
    clipping = min(
        1.0, CLIP / metrics[0]["grad_norm"]
    )  # Adam's first moment is now (1 - β1) x the clipped gradient
    seen = jax.tree.map(
        lambda m: m / (0.1 * clipping),
        program.layout.canonical(first_moment(after_one)),
    )
    norm = np.sqrt(sum(np.sum(g**2) for g in jax.tree.leaves(gradient)))
    np.testing.assert_allclose(metrics[0]["grad_norm"], norm, rtol=tolerance)
    program.layout.map(
        lambda leaf, g, right: assert_leaf(
            leaf.name, np.asarray(g), right, norm, tolerance
        ),
        seen,
        gradient,
    )


def assert_run(cell: Cell, metrics: list[dict[str, float]], state: State) -> None:
    """What numbers near the reference's would not tell: that the loss was scaled, and where the optimizer state
    lies.
    """
    if cell.compute == "float16":
        assert {m["loss_scale"] for m in metrics} == {SCALE} and {
            m["skipped"] for m in metrics
        } == {0}
    kinds = {x.sharding.memory_kind for x in jax.tree.leaves(state.optimizer) if x.ndim}
    assert kinds == {offload.HOST if cell.offload else "device"}


def assert_leaf(
    name: str, seen: np.ndarray, right: np.ndarray, norm: float, tolerance: float
) -> None:
    """Within the tolerance of the leaf's own norm; a key's bias has no gradient in theory (softmax), so only noise is
    allowed there.
    """
    own = norm if name.endswith("k_bias") else np.linalg.norm(right)
    error = np.linalg.norm(seen - right) / own
    assert error <= tolerance, f"{name}: gradient off by {error:.1e}"


# --- the matrix


PLAIN = [
    cell
    for cell in CELLS
    if (cell.zero, cell.sequence_parallel, cell.remat, cell.schedule, cell.family)
    == (1, False, "none", "1f1b", "llama")
]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "cells",
    [
        pytest.param(lambda: PLAIN, id="plain"),
        pytest.param(lambda: covering(CELLS), id="many"),
        pytest.param(lambda: CELLS, id="all", marks=pytest.mark.slow),
    ],
)
def test_config_refuses_just_the_cells_whose_sizes_cannot_be_divided(cells):
    for cell in cells():
        if fits(cell):
            configuration(cell)
        else:
            with pytest.raises(ConfigError, match=r"mesh\.(tensor|pipeline|islands)"):
                configuration(cell)
    assert (len(CELLS), len(LEGAL), len(PROGRAMS), len(RUN_PROGRAMS)) == (
        3840,
        2112,
        920,
        14720,
    )


@pytest.mark.thorough
def test_covering_has_all_that_meets_in_a_legal_program():
    assert set().union(*map(met, COVERING)) == set().union(*map(met, RUN_PROGRAMS))
    assert len(COVERING) < 30
    keys = [(c.zero, c.sequence_parallel, c.remat, c.family, c.size) for c in FEW]
    assert len(set().union(*map(pairs, keys))) == 4 * 8 + 6 * 4


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("mesh", "islands", "one", "other"),
    [
        (
            (1, 2, 1),
            1,
            {"zero_stage": 0, "schedule": "gpipe"},
            {"zero_stage": 3, "schedule": "1f1b"},
        ),
        (
            (2, 1, 1),
            2,
            {"zero_stage": 0, "sequence_parallel": False},
            {"zero_stage": 3, "sequence_parallel": True},
        ),
    ],
)
def test_key_changes_nothing_where_its_axis_has_one_rank(mesh, islands, one, other):
    cell = Cell(mesh, 1, False, "none", "1f1b", "llama", "odd", islands)
    configs = [configuration(cell, **keys) for keys in (one, other)]
    first, second = (
        Program(config, make_mesh(config)).lower().as_text() for config in configs
    )
    assert first == second


@pytest.mark.parametrize(
    "cell",
    thorough_but(COVERING, NOW_CELL.__eq__, [*FEW, *FEW_RUNS, ON_ISLANDS]),
    ids=name,
)
def test_layout_computes_the_reference_run(cell):
    assert_equal(configuration(cell), cell)


def drawn(cells: list[Cell]) -> list[Cell]:
    """Each cell run in some other way than plain."""
    draw = random.Random(0)
    return [draw.choice(runs([cell])[1:]) for cell in cells]


PARTS = 96  # an item each: collecting thousands takes longer than most tests


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_layout_computes_the_reference_run_in_the_whole_product(part):
    wrong = {}
    for cell in (LEGAL + drawn(LEGAL))[part::PARTS]:
        try:
            assert_equal(configuration(cell), cell)
        except AssertionError as error:
            wrong[name(cell)] = str(error)
    assert not wrong


# --- keys beside the matrix


OTHERS: dict[str, tuple[tuple[int, int, int], str, str, dict[str, Any]]] = {
    "zero2-held": ((2, 2, 2), "llama", "odd", {"zero_stage": 2, "zero_hold": True}),
    "more-microbatches": ((1, 4, 2), "llama", "round", {"microbatches": 8}),
    "one-device-accumulating": ((1, 1, 1), "llama", "odd", {"microbatches": 8}),
    "vocabulary-on-edges": (
        (1, 2, 4),
        "llama",
        "odd",
        {"vocab": "edge", "sequence_parallel": True},
    ),
    "vocabulary-on-edges-tied": (
        (2, 1, 4),
        "gpt2",
        "odd",
        {"vocab": "edge", "zero_stage": 3, "layer_split": (0, 3, 1, 1)},
    ),
    "tied-llama": (
        (2, 2, 2),
        "llama",
        "other head",
        {"zero_stage": 3, "zero_hold": True, "sequence_parallel": True},
    ),
    # Fewer than stages
    "untied-gpt2": ((2, 1, 4), "gpt2", "other head", {"microbatches": 2}),
    "options": (
        (2, 2, 2),
        "llama",
        "options",
        {"zero_stage": 3, "sequence_parallel": True, "remat": "selective"},
    ),
    "options-gpt2": ((2, 2, 2), "gpt2", "options", {"remat": "dots", "zero_stage": 3}),
    "gemma": (
        (2, 2, 2),
        "gemma3",
        "gemma",
        {"zero_stage": 3, "schedule": "zb_h1", "layer_split": (3, 2)},
    ),
    "gemma-sequence-parallel": (
        (1, 2, 4),
        "gemma2",
        "gemma",
        {
            "sequence_parallel": True,
            "layer_split": (2, 1, 1, 1),
            "remat": "full",
            "vocab": "edge",
        },
    ),
    "gemma-selective": (
        (2, 2, 2),
        "gemma2",
        "gemma",
        {"remat": "selective", "schedule": "interleaved", "virtual_stages": 2},
    ),
    "gemma-accumulating": (
        (4, 2, 1),
        "gemma2",
        "gemma",
        {"remat": "dots", "zero_stage": 2},
    ),
    "remat-names": (
        (4, 2, 1),
        "llama",
        "odd",
        {"remat": "names", "remat_keep": ("qkv", "mlp_out"), "zero_stage": 3},
    ),
}


# context, strategy, mesh, keys, and what else is run. Rows of 40 tokens: chunks of 10, 5 and, of 32, 2.
ON_CONTEXT: dict[
    str, tuple[int, str, tuple[int, int, int], str, str, dict[str, Any], dict[str, Any]]
] = {
    "ring": (
        4,
        "ring",
        (2, 1, 1),
        "llama",
        "odd",
        {"zero_stage": 3},
        {"packed": True, "dropout": 0.2},
    ),
    "gather-windows": (
        2,
        "all_gather",
        (1, 2, 2),
        "gemma3",
        "gemma",
        {"sequence_parallel": True, "zero_stage": 1},
        {},
    ),
    "heads": (
        2,
        "ulysses",
        (2, 1, 2),
        "llama",
        "odd",
        {"zero_stage": 2},
        {"packed": True, "dropout": 0.2},
    ),
    "ring-of-8": (
        8,
        "ring",
        (1, 1, 1),
        "llama",
        "round",
        {"remat": "names", "remat_offload": ("attention",)},
        {"offload": True},
    ),
    "ring-stages": (
        2,
        "ring",
        (1, 2, 2),
        "gpt2",
        "odd",
        {"sequence_parallel": True, "zero_stage": 3},
        {"dropout": 0.2},
    ),
    "ring-interleaved": (
        2,
        "ring",
        (1, 1, 4),
        "gpt2",
        "round",
        {"schedule": "interleaved", "virtual_stages": 2, "remat": "selective"},
        {},
    ),
    "ring-float16": (
        2,
        "ring",
        (2, 2, 1),
        "llama",
        "odd",
        {"zero_stage": 1, "remat": "selective"},
        {"compute": "float16", "packed": True},
    ),
    "gather-split-backward": (
        4,
        "all_gather",
        (1, 1, 2),
        "llama",
        "odd",
        {"schedule": "zb_h1", "zero_stage": 2},
        {"packed": True},
    ),
    "gather-accumulating": (
        8,
        "all_gather",
        (1, 1, 1),
        "gpt2",
        "round",
        {"microbatches": 4, "zero_stage": 0},
        {"dropout": 0.2},
    ),
    "heads-that-share-keys": (
        4,
        "ulysses",
        (2, 1, 1),
        "llama",
        "round",
        {"remat": "names", "remat_keep": ("qkv", "attention")},
        {},
    ),
    "heads-windows": (
        2,
        "ulysses",
        (2, 1, 2),
        "gemma2",
        "gemma",
        {"zero_stage": 3, "remat": "full"},
        {"dropout": 0.2},
    ),
    "ring-whole-keys": (
        2,
        "ring",
        (1, 4, 1),
        "llama",
        "round",
        {"zero_stage": 0, "sequence_parallel": True},
        {"packed": True},
    ),
}


OFTEN_ON_CONTEXT = (
    "ring",
    "gather-windows",
    "heads",
    "ring-stages",
    "ring-interleaved",
    "heads-windows",
)


@pytest.mark.thorough
@pytest.mark.parametrize("case", slow_but(ON_CONTEXT, OFTEN_ON_CONTEXT))
def test_rows_split_over_context_compute_the_reference_run_too(case):
    context, strategy, mesh, family, size, parallel, run = ON_CONTEXT[case]
    cell = Cell(mesh, 1, False, "none", "1f1b", family, size)._replace(**run)
    config = replaced(
        configuration(cell, context_strategy=strategy, **parallel),
        mesh={"context": context},
    )
    check(config)
    assert_equal(config, cell)


FEW_OTHERS = (
    "vocabulary-on-edges",
    "zero2-held",
    "one-device-accumulating",
    "options",
    "gemma",
    "remat-names",
)


@pytest.mark.thorough
@pytest.mark.parametrize("case", slow_but(OTHERS, FEW_OTHERS))
def test_other_keys_compute_the_reference_run_too(case):
    mesh, family, size, parallel = OTHERS[case]
    cell = Cell(mesh, 1, False, "none", "1f1b", family, size)
    assert_equal(configuration(cell, **parallel), cell)
