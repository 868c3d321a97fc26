"""From a run directory to logits: the right numbers on any mesh, nothing written, nothing waited for, and no step that
is going away.
"""

import dataclasses
import os
import shutil
import warnings
from pathlib import Path

import jax
import numpy as np
import pytest
import reference
from checkpoint_runs import batch, config, take
from covering import slow_but
from golden import GOLDEN
from refusals import pattern_of
from short_runs import canonical_numbers, place

import meshtrain as mt
from meshtrain import reader
from meshtrain.checkpoint import arrays, steps
from meshtrain.checkpoint.manifest import StepManifest
from meshtrain.config import ConfigError

pytestmark = pytest.mark.usefixtures("shared_programs")

INTERLEAVED = {
    "microbatches": 2,
    "schedule": "interleaved",
    "virtual_stages": 2,
    "zero_stage": 2,
}
TOKENS = np.random.default_rng(7).integers(0, 257, (3, 12))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run on 2 x 2 x 2, interleaved, that holds its directory's lock: its program, its state after 3 steps, its
    checkpointer.
    """
    settings = config(
        tmp_path_factory.mktemp("run"),
        mesh={"data": 2, "tensor": 2, "pipeline": 2},
        parallel=INTERLEAVED,
    )
    program = mt.Program(settings)
    checkpointer = mt.Checkpointer(settings, program)
    state = program.init()._replace(
        params=place(program.layout, canonical_numbers(program.layout))
    )
    for step in (1, 2, 3):
        state, loss = take(program, state, step)
        checkpointer.save(step, state, loss, eval_loss={1: 1.5, 2: 1.0}.get(step))
        checkpointer.wait()
    yield program, state, checkpointer
    checkpointer.close()


@pytest.fixture(scope="module")
def directory(run) -> Path:
    return Path(run[0].config.run.directory)


@pytest.fixture
def copied(directory, tmp_path) -> Path:
    """The run's directory, for a test that damages it."""
    return shutil.copytree(directory, tmp_path / "copy")


def snapshot(directory: Path) -> dict[str, tuple]:
    """Every file and directory with all that a write would change."""
    found = {str(path): path.stat() for path in (directory, *directory.rglob("*"))}
    return {
        name: (s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns)
        for name, s in found.items()
    }


def reference_logits(program: mt.Program, state: mt.State) -> np.ndarray:
    weights = jax.tree.map(
        np.asarray, program.layout.canonical(jax.tree.map(np.asarray, state.params))
    )
    each = jax.vmap(
        lambda w, t: reference.logits(reference.Model("llama"), w, t), (None, 0)
    )
    return np.asarray(jax.jit(each)(weights, TOKENS))


def mesh_of(shape: str) -> jax.sharding.Mesh:
    sizes = [f"mesh.{part}" for part in shape.split()]
    return mt.make_mesh(mt.load(None, [*sizes, "train.uneven_batch=pad"]))


# Heads of a tensor rank that context does not divide, so that rows are in zigzag order.
SHAPES = [
    None,
    "data=3",
    "data=2 tensor=2",
    "tensor=2 pipeline=2",
    "data=2 context=2 tensor=2",
]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "shape",
    slow_but(SHAPES, [None, "tensor=2 pipeline=2", "data=2 context=2 tensor=2"]),
)
def test_logits_are_the_references_on_any_mesh(run, directory, shape):
    model = mt.read_model(directory, mesh=None if shape is None else mesh_of(shape))
    out = model(TOKENS)
    assert (out.shape, out.dtype, model.step) == ((3, 12, 257), np.float32, 3)
    np.testing.assert_allclose(out, reference_logits(*run[:2]), atol=1e-5)
    assert model.config.mesh.pipeline == (2 if shape and "pipeline" in shape else 1)


@pytest.mark.thorough
def test_logits_and_loss_are_those_of_the_training_program(run, directory):
    program, state, _ = run
    model = mt.read_model(directory)
    even = TOKENS[:2]
    np.testing.assert_allclose(
        model(even), program.logits(state.params, even), atol=1e-5
    )
    held_out = batch(program, 9)
    right = float(program.eval_step(state.params, held_out))
    np.testing.assert_allclose(model.loss(held_out), right, rtol=1e-5)


@pytest.mark.thorough
def test_rows_that_the_mesh_does_not_divide_weigh_nothing(directory):
    two = mt.read_model(
        directory,
        mesh=mt.make_mesh(
            mt.load(None, ["mesh.data=2", "mesh.context=2", "mesh.tensor=2"])
        ),
    )
    one = mt.read_model(directory)
    odd = {"tokens": TOKENS, "labels": np.roll(TOKENS, -1, axis=1)}
    np.testing.assert_allclose(two.loss(odd), one.loss(odd), rtol=1e-6)


@pytest.mark.thorough
def test_a_run_whose_batches_no_mesh_here_divides_is_read_all_the_same(directory):
    manifest = StepManifest.read(steps.directories(directory / "checkpoints")[0])
    data = {
        **manifest.config["data"],
        "source": "stdlib",
        "batching": "budget",
        "rows_multiple": 2,
    }
    manifest = dataclasses.replace(manifest, config={**manifest.config, "data": data})
    config = reader._config(
        directory / "checkpoints" / "1", manifest, mesh_of("data=3").shape, None
    )
    assert (config.mesh.data, config.train.global_batch_size) == (
        3,
        manifest.config["train"]["global_batch_size"],
    )


@pytest.mark.thorough
def test_weights_are_canonical_named_and_the_checkpoints_own(run, directory):
    program, state, _ = run
    weights = mt.read_model(directory).weights
    right = program.layout.canonical(jax.tree.map(np.asarray, state.params))
    assert weights["blocks.attention.q"].shape == (5, 24, 6, 4)
    np.testing.assert_array_equal(
        weights["blocks.attention.q"], right["blocks"]["attention"]["q"]
    )
    np.testing.assert_array_equal(
        weights["embedding.tokens"], right["embedding"]["tokens"]
    )


@pytest.mark.thorough
def test_reading_takes_no_lock_writes_nothing_and_holds_weights_alone(run, directory):
    before, others = snapshot(directory), {id(x) for x in jax.live_arrays()}
    model = mt.read_model(directory)
    held = sum(x.nbytes for x in jax.live_arrays() if id(x) not in others)
    model(TOKENS)
    assert snapshot(directory) == before
    parameters = 4 * run[0].layout.parameters
    assert parameters <= held < 1.01 * parameters, "no optimizer state was read"


def test_optimizer_state_is_not_even_read(copied):
    newest = copied / "checkpoints" / "3"
    asked: set[str] = set()

    def watched(directory, targets, read=arrays.read):
        asked.update(targets)
        return read(directory, targets)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrays, "read", watched)
        mt.read_model(newest)
    assert asked and all(name.startswith("params.") for name in asked)


@pytest.mark.thorough
@pytest.mark.parametrize("place", ["", "checkpoints", "checkpoints/2"])
def test_a_run_its_checkpoints_or_one_step_may_be_named(directory, place):
    assert mt.read_model(directory / place).step == (2 if place.endswith("2") else 3)


def test_a_step_may_be_chosen_and_one_that_is_not_there_is_answered_with_those_that_are(
    directory,
):
    assert mt.read_model(str(directory), step=1).step == 1
    with pytest.raises(ConfigError, match=r"no step 7 in .* has 1, 2, 3\.$"):
        mt.read_model(directory, step=7)
    with pytest.raises(ConfigError, match="there is no checkpoint in"):
        mt.read_model(directory / "checkpoints" / "nowhere")


# --- damage, and steps that go away


def flip(step: Path) -> None:
    file = max(
        (p for p in (step / "arrays").rglob("*") if p.is_file()),
        key=lambda p: p.stat().st_size,
    )
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_a_damaged_newest_step_is_passed_over_with_a_warning_and_left_as_it_is(copied):
    flip(copied / "checkpoints" / "3")
    before = snapshot(copied)
    with pytest.warns(UserWarning, match=r"checkpoints/3 is damaged: .* passed over\."):
        assert mt.read_model(copied).step == 2
    assert snapshot(copied) == before
    with pytest.raises(
        ConfigError, match=r"checkpoints/3 is damaged: .* is damaged between"
    ):
        mt.read_model(copied, step=3)


def test_the_best_step_is_read_and_where_it_is_damaged_the_next_best(copied):
    assert mt.read_model(copied, step="best").step == 2
    flip(copied / "checkpoints" / "2")
    with pytest.warns(UserWarning, match=r"checkpoints/2 is damaged"):
        assert mt.read_model(copied, step="best").step == 1
    flip(copied / "checkpoints" / "1")
    with pytest.raises(ConfigError, match=r"every checkpoint .* eval loss is damaged"):
        mt.read_model(copied, step="best")


def test_any_number_of_damaged_steps_is_passed_over(copied, monkeypatch):
    monkeypatch.setattr(reader, "TRIES", 1)
    for step in ("2", "3"):
        flip(copied / "checkpoints" / step)
    with pytest.warns(UserWarning) as warned:
        assert mt.read_model(copied).step == 1
    assert len(warned) == 2


def test_a_run_that_removes_steps_faster_than_they_are_read_is_left(
    copied, monkeypatch
):
    monkeypatch.setattr(reader, "TRIES", 2)
    original = arrays.read
    monkeypatch.setattr(
        arrays, "read", lambda d, t: (original(d, t), steps.remove(Path(d).parent))[0]
    )
    with pytest.raises(
        ConfigError,
        match=r"2 checkpoints in .* removed while .* read",
    ):
        mt.read_model(copied)


def test_nothing_is_read_when_all_is_damaged(copied):
    for step in ("1", "2", "3"):
        flip(copied / "checkpoints" / step)
    with pytest.raises(ConfigError, match=r"every checkpoint in .* is damaged"):
        mt.read_model(copied)


@pytest.mark.parametrize(
    "when", ["before it is verified", "before it is read", "after it was read"]
)
def test_a_step_that_the_run_removes_while_it_is_read_gives_way_to_the_next(
    copied, monkeypatch, when
):
    module, name = (
        (reader, "problems") if when == "before it is verified" else (arrays, "read")
    )
    original, root = getattr(module, name), copied / "checkpoints"

    def removing(directory, *more):
        step = Path(directory) if name == "problems" else Path(directory).parent
        found = original(directory, *more) if when == "after it was read" else None
        if step.name == "2" and step.exists():
            # The run goes on: a newer step is there
            os.rename(root / "3-hidden", root / "3")
            steps.remove(step)
        return found if found is not None else original(directory, *more)

    monkeypatch.setattr(module, name, removing)
    os.rename(root / "3", root / "3-hidden")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert mt.read_model(copied).step == 3


def test_a_step_that_was_asked_for_and_is_removed_meanwhile_is_reported(
    copied, monkeypatch
):
    original = arrays.read
    monkeypatch.setattr(
        arrays, "read", lambda d, t: (original(d, t), steps.remove(Path(d).parent))[0]
    )
    with pytest.raises(ConfigError, match=r"run has removed, .*step 2 in .* 1, 3\.$"):
        mt.read_model(copied, step=2)


# --- what a model is asked


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        ([1, 2, 3], "tokens are int64[3]; ... whole numbers [B, T]."),
        ([[0.5, 1.0]], "tokens are float64[1, 2]; ... whole numbers [B, T]."),
        ([[0, 257]], "tokens have the id 257; ... 0 to 256."),
        ([[-1, 0]], "tokens have the id -1; ... 0 to 256."),
        ([[2**40]], "tokens have the id 1099511627776; ... 0 to 256."),
        ([["a"]], "whole numbers [B, T]."),
        ([[None]], "whole numbers [B, T]."),
        (None, "whole numbers [B, T]."),
        ([[1, 2], [3]], "tokens"),
    ],
)
def test_what_are_no_ids_is_refused_rather_than_computed_with(directory, tokens, says):
    model = mt.read_model(directory, step=1)
    with pytest.raises(ConfigError, match=pattern_of(says)):
        model(tokens)


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        (
            {"tokens": TOKENS},
            "tokens, labels ... positions, segments ... has tokens.",
        ),
        (
            {"tokens": TOKENS, "labels": TOKENS, "weight": TOKENS},
            "this one has tokens, labels, weight.",
        ),
        (
            {"tokens": TOKENS, "labels": TOKENS[:, 1:]},
            "labels has shape [3, 11], but tokens [3, 12].",
        ),
    ],
)
def test_what_is_no_batch_is_refused(directory, batch, says):
    with pytest.raises(ConfigError, match=pattern_of(says)):
        mt.read_model(directory, step=1).loss(batch)


@pytest.mark.thorough
def test_positions_that_were_never_learned_are_refused(tmp_path):
    settings = config(tmp_path, model={"family": "gpt2"})
    program = mt.Program(settings)
    checkpointer = mt.Checkpointer(settings, program)
    checkpointer.save(1, program.init(), 1.0)
    checkpointer.close()
    model = mt.read_model(tmp_path)
    assert model(np.zeros((1, 16), int)).shape == (1, 16, 257)
    with pytest.raises(ConfigError, match=r"17 positions .* learned 16"):
        model(np.zeros((1, 17), int))


@pytest.mark.parametrize("path", [None, 3, b"run", "x" * 5000, "a\0b", __file__])
def test_what_is_no_path_is_refused_in_one_printable_sentence(path):
    with pytest.raises(
        ConfigError, match=r"not a path that|no checkpoint in"
    ) as refused:
        mt.read_model(path)
    assert str(refused.value).isprintable()


def test_a_mesh_that_does_not_fit_the_model_is_refused(directory):
    with pytest.raises(ConfigError, match=r"mesh\.tensor 4 .*divide model\.heads 6"):
        mt.read_model(directory, mesh=mt.make_mesh(mt.load(None, ["mesh.tensor=4"])))
    with pytest.raises(ConfigError, match=r"mesh\.tensor 5 .*divide model\.heads"):
        mt.read_model(
            GOLDEN / "llama3",
            mesh=mt.make_mesh(
                mt.load({"mesh": {"tensor": 5}, "model": {"heads": 5, "d_model": 40}})
            ),
        )
    with pytest.raises(ConfigError, match=r"make one with mt\.make_mesh"):
        mt.read_model(directory, mesh=jax.make_mesh((1,), ("x",)))
