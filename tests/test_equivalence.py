"""A mesh is only a placement: every layout gives the losses and gradients of one device (tests/helpers/reference.py).

The product has 10 meshes x 4 ZeRO stages x sequence parallelism x remat x 2 schedules x 2 families x 2 sizes = 1280 cells. 256 of
them the config must refuse (6 heads over tensor 4 or 8, 5 layers over pipeline 8); the other 1024 must all pass, and are 448
programs, since a key does nothing where its axis has one rank. `pytest` takes a pairwise covering of the programs, `pytest -m slow`
all cells.
"""

from functools import cache
from itertools import product
from typing import Any

import jax
import numpy as np
import pytest
import reference
from covering import Cell, covering, pairs, thorough_but
from short_runs import canonical_numbers, first_moment, token_batches, train

from meshtrain.config import Config, ConfigError, check, load, replaced
from meshtrain.mesh import AXES, make_mesh
from meshtrain.parallel.layout import Layout
from meshtrain.step import Program

STEPS = 10
CLIP = 0.5  # below the first gradients' norm, so that clipping is at work
LOSS_TOLERANCE, GRADIENT_TOLERANCE = 2e-5, 1e-5

MESHES = [(d, t, 8 // d // t) for d in (1, 2, 4, 8) for t in (1, 2, 4, 8) if d * t <= 8]
FACTORS: dict[str, list[Any]] = {
    "mesh": MESHES,
    "zero": [0, 1, 2, 3],
    "sequence_parallel": [False, True],
    "remat": ["none", "full"],
    "schedule": ["gpipe", "1f1b"],
    "family": ["llama", "gpt2"],
    "size": ["round", "odd"],
}
CELLS = list(product(*FACTORS.values()))

SIZES: dict[str, dict[str, Any]] = {
    "round": {
        "model": {"layers": 8, "d_model": 32, "heads": 8, "kv_heads": 4, "d_ff": 64, "vocab_size": 256},
        "train": {"sequence_length": 32},
    },
    "odd": {
        "model": {"layers": 5, "d_model": 24, "heads": 6, "kv_heads": 2, "d_ff": 50, "vocab_size": 257},
        "train": {"sequence_length": 40, "label_smoothing": 0.1, "z_loss": 1e-3},
    },
}
SIZES["other head"] = SIZES["odd"]  # tied where the family's is not, and the other way round
MICROBATCHES = {8: 1, 4: 2, 2: 4, 1: 4}  # by data ranks: 8 sequences a step


@cache
def one_device(family: str, size: str) -> Config:
    """The run on one device, that all cells of a family and size are placements of."""
    model, training = SIZES[size]["model"], SIZES[size]["train"]
    if size == "other head":
        model = {**model, "tied_head": family == "llama"}
    return load(
        {
            "model": {**model, "family": family},
            "train": {"global_batch_size": 8, "steps": STEPS, **training},
            "optimizer": {"learning_rate": 0.01, "warmup_steps": 2, "grad_clip": CLIP},
        }
    )


def configuration(cell: Cell, **others: Any) -> Config:
    """The checked config of a cell; `others` are more keys of the section parallel."""
    mesh, zero, sequence_parallel, remat, schedule, family, size = cell
    config = one_device(family, size)
    keys = {
        "zero_stage": zero,
        "sequence_parallel": sequence_parallel,
        "remat": remat,
        "schedule": schedule,
        "microbatches": MICROBATCHES[mesh[0]],
    }
    chosen = {name: value for name, value in keys.items() if value is not None}
    sizes = dict(zip(AXES, mesh, strict=True))
    config = replaced(config, mesh=sizes, parallel=chosen | others)
    check(config)
    return config


def fits(cell: Cell) -> bool:
    """Whether the sizes can be divided so at all."""
    (_, tensor, pipeline), size = cell[0], cell[-1]
    model = SIZES[size]["model"]
    return model["heads"] % tensor == 0 and model["layers"] >= pipeline


def acting(cell: Cell) -> Cell:
    """The cell with None in place of each key whose axis has one rank."""
    mesh, zero, sequence_parallel, remat, schedule, family, size = cell
    data, tensor, pipeline = mesh
    kept = (
        zero if data > 1 else None,
        sequence_parallel if tensor > 1 else None,
        remat,
        schedule if pipeline > 1 else None,
    )
    return (mesh, *kept, family, size)


LEGAL = [cell for cell in CELLS if fits(cell)]
PROGRAMS = list(dict.fromkeys(map(acting, LEGAL)))
COVERING = covering(PROGRAMS)


def name(cell: Cell) -> str:
    mesh, zero, sequence_parallel, *others = cell
    split = {None: [], True: ["sp"], False: ["tp"]}[sequence_parallel]
    parts = [*([] if zero is None else [f"zero{zero}"]), *split, *(o for o in others if o is not None)]
    return "-".join(["x".join(map(str, mesh)), *parts])


@cache
def expected(family: str, size: str) -> tuple[Any, list[float], Any]:
    """Canonical parameters, and the reference's losses and first gradient."""
    config = one_device(family, size)
    parameters = canonical_numbers(Layout(config, make_mesh(config)))
    model = reference.Model(family, **{k: v for k, v in SIZES[size]["train"].items() if k != "sequence_length"})
    recipe = reference.Recipe(0.01, 2, STEPS, clip=CLIP)
    return parameters, *reference.train(model, recipe, parameters, token_batches(config, STEPS))


def assert_equal(config: Config, family: str, size: str) -> None:
    parameters, losses, gradient = expected(family, size)
    metrics, program, (after_one, _) = train(config, STEPS, parameters)
    np.testing.assert_allclose([m["loss"] for m in metrics], losses, rtol=LOSS_TOLERANCE, atol=0)
    clipping = min(1.0, CLIP / metrics[0]["grad_norm"])  # Adam's first moment is now (1 - β1) x the clipped gradient
    seen = jax.tree.map(lambda m: m / (0.1 * clipping), program.layout.canonical(first_moment(after_one)))
    norm = np.sqrt(sum(np.sum(g**2) for g in jax.tree.leaves(gradient)))
    np.testing.assert_allclose(metrics[0]["grad_norm"], norm, rtol=GRADIENT_TOLERANCE)
    program.layout.map(lambda leaf, g, right: assert_leaf(leaf.name, np.asarray(g), right, norm), seen, gradient)


def assert_leaf(name: str, seen: np.ndarray, right: np.ndarray, norm: float) -> None:
    """Within the tolerance of the leaf's own norm; a key's bias has no gradient in theory (softmax), so only noise is allowed there."""
    own = norm if name.endswith("k_bias") else np.linalg.norm(right)
    error = np.linalg.norm(seen - right) / own
    assert error <= GRADIENT_TOLERANCE, f"{name}: gradient off by {error:.1e}"


# --- the matrix


def test_config_refuses_just_the_cells_whose_sizes_cannot_be_divided():
    for cell in CELLS:
        if fits(cell):
            configuration(cell)
        else:
            with pytest.raises(ConfigError, match=r"mesh\.(tensor|pipeline)"):
                configuration(cell)
    assert (len(CELLS), len(LEGAL), len(PROGRAMS)) == (1280, 1024, 448)


def test_covering_has_every_pair_of_levels_that_is_legal():
    assert set().union(*map(pairs, COVERING)) == set().union(*map(pairs, PROGRAMS))
    assert len(COVERING) < 40


@pytest.mark.parametrize(
    ("mesh", "one", "other"),
    [
        ((1, 2, 2), {"zero_stage": 0}, {"zero_stage": 3}),
        ((4, 1, 1), {"sequence_parallel": False}, {"sequence_parallel": True}),
        ((2, 2, 1), {"schedule": "gpipe"}, {"schedule": "1f1b"}),
    ],
)
def test_key_changes_nothing_where_its_axis_has_one_rank(mesh, one, other):
    cell = (mesh, 1, False, "none", "1f1b", "llama", "odd")
    configs = [configuration(cell, **keys) for keys in (one, other)]
    first, second = (Program(config, make_mesh(config)).lower().as_text() for config in configs)
    assert first == second


@pytest.mark.parametrize("cell", COVERING, ids=name)
def test_layout_computes_the_reference_run(cell):
    assert_equal(configuration(cell), *cell[-2:])


@pytest.mark.slow
@pytest.mark.parametrize("cell", LEGAL, ids=name)
def test_layout_computes_the_reference_run_in_the_whole_product(cell):
    assert_equal(configuration(cell), *cell[-2:])


# --- keys beside the matrix


OTHERS: dict[str, tuple[tuple[int, int, int], str, str, dict[str, Any]]] = {
    "zero2-scattering-at-use": ((2, 2, 2), "llama", "odd", {"zero_stage": 2, "zero_hold": False}),
    "zero2-accumulating-at-use": ((4, 2, 1), "gpt2", "odd", {"zero_stage": 2, "zero_hold": False}),
    "zero3-held": ((2, 1, 4), "gpt2", "odd", {"zero_stage": 3, "zero_hold": True}),
    "zero3-one-microbatch": ((8, 1, 1), "gpt2", "odd", {"zero_stage": 3, "sequence_parallel": True}),
    "more-microbatches": ((1, 4, 2), "llama", "round", {"microbatches": 8}),
    "fewer-microbatches-than-stages": ((2, 1, 4), "llama", "odd", {"microbatches": 2}),
    "one-device-accumulating": ((1, 1, 1), "llama", "odd", {"microbatches": 8}),
    "vocabulary-on-edges": ((1, 2, 4), "llama", "odd", {"vocab": "edge", "sequence_parallel": True}),
    "vocabulary-on-edges-tied": ((2, 1, 4), "gpt2", "odd", {"vocab": "edge", "zero_stage": 3}),
    "tied-llama": ((2, 2, 2), "llama", "other head", {"zero_stage": 3, "sequence_parallel": True}),
    "untied-gpt2": ((1, 2, 4), "gpt2", "other head", {"schedule": "gpipe"}),
    "uneven-stages": ((2, 1, 4), "llama", "odd", {"layer_split": (0, 3, 1, 1)}),
    "remat-dots": ((2, 2, 2), "gpt2", "odd", {"remat": "dots", "zero_stage": 3}),
    "remat-names": ((4, 2, 1), "llama", "odd", {"remat": "names", "remat_keep": ("qkv", "mlp_out"), "zero_stage": 3}),
}


NOW = ("zero2-scattering-at-use", "zero3-held", "vocabulary-on-edges", "tied-llama", "uneven-stages", "remat-names")


@pytest.mark.parametrize("case", thorough_but(OTHERS, NOW.__contains__))
def test_other_keys_compute_the_reference_run_too(case):
    mesh, family, size, parallel = OTHERS[case]
    cell = (mesh, 1, False, "none", "1f1b", family, size)
    assert_equal(configuration(cell, **parallel), family, size)
