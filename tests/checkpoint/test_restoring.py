"""A new run from another's weights, and checkpoints that do not fit."""

import json
import shutil

import jax
import numpy as np
import pytest
from checkpoint_runs import ODD, build_for, config, numbered, program, saved

from meshtrain.checkpoint import Checkpointer, digests, steps
from meshtrain.checkpoint.canonical import Canonical
from meshtrain.config import ConfigError

INTERLEAVED = "data 2, pipeline 2, interleaved, ZeRO-1"


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """A run directory with step 1: numbered(program(), 1)."""
    return saved(tmp_path_factory.mktemp("run"), steps=1)


def start(settings):
    said = []
    checkpointer = Checkpointer(settings, build_for(settings), say=said.append)
    try:
        state, step = checkpointer.restore_or_init()
    finally:
        checkpointer.close()
    return state, step, said, {n: np.asarray(x) for n, x in Canonical(checkpointer.program).arrays(state).items()}


def source():
    canonical = Canonical(program())
    return dict(
        zip((e.name for e in canonical.entries), map(np.asarray, jax.tree.leaves(numbered(program(), 1))), strict=True)
    )


@pytest.mark.parametrize("layout", ["one device", INTERLEAVED])
def test_weights_alone_start_a_new_run_with_a_fresh_optimizer(one, tmp_path, layout):
    settings = config(tmp_path, layout, checkpoint={"resume": str(one), "weights_only": True}, run={"seed": 5})
    _, step, said, found = start(settings)
    assert step == 0 and found["step"] == 0
    assert said == [f"started from the weights of step 1 in {one}/checkpoints/1."]
    for name, x in source().items():
        if name.startswith("params."):
            assert np.array_equal(found[name], x), name
        else:
            assert not found[name].any(), name


def test_a_run_that_began_with_weights_goes_on_with_all_of_its_own(one, tmp_path):
    keys = {"resume": str(one), "weights_only": True}
    settings = config(tmp_path, checkpoint=keys)
    checkpointer = Checkpointer(settings, program())
    checkpointer.restore_or_init()
    checkpointer.save(4, numbered(program(), 4), 1.0)
    checkpointer.close()
    _, step, _, found = start(settings)
    assert step == 4 and found["optimizer.mu.head.weight"].any()


def test_another_number_of_layers_or_rows_is_refused_unless_asked_for_by_name(one, tmp_path):
    keys = {"resume": str(one), "weights_only": True}
    for size, name in (({"layers": 7}, "model.layers"), ({"vocab_size": 300}, "model.vocab_size")):
        with pytest.raises(
            ConfigError, match=rf"{name} is \d+ but was \d+; checkpoint.allow: \[{name}\] takes what fits"
        ):
            start(config(tmp_path, model=size, checkpoint=keys))
    for size in ({"layers": 7}, {"vocab_size": 300}):
        with pytest.raises(ConfigError, match=r"in another run\.directory, checkpoint\.resume: PATH with"):
            start(config(tmp_path, model=size, checkpoint={"resume": str(one)}))


@pytest.mark.parametrize(
    "layout, size",
    [(INTERLEAVED, {"layers": 7, "vocab_size": 300}), ("one device", {"layers": 4, "vocab_size": 200})],
    ids=["more", "fewer"],
)
def test_asked_for_what_fits_is_taken_and_the_rest_is_as_initialised(one, tmp_path, layout, size):
    keys = {"resume": str(one), "weights_only": True, "allow": ["model.layers", "model.vocab_size"]}
    settings = config(tmp_path, layout, model=size, checkpoint=keys)
    _, step, said, found = start(settings)
    fresh = build_for(settings)
    initial = {n: np.asarray(x) for n, x in Canonical(fresh).arrays(fresh.init()).items()}
    assert step == 0 and any("params.embedding.tokens is" in sentence for sentence in said)
    for name, old in source().items():
        if name.startswith("params."):
            common = tuple(slice(min(n, m)) for n, m in zip(old.shape, found[name].shape, strict=True))
            expected = initial[name].copy()
            expected[common] = old[common]
            assert np.array_equal(found[name], expected), name
    layers = found["params.blocks.mlp.gate"].shape[0], found["params.embedding.tokens"].shape[0]
    assert layers == (size["layers"], size["vocab_size"])


def test_a_change_of_another_axis_is_refused_even_if_layers_may_change(one, tmp_path):
    keys = {"resume": str(one), "weights_only": True, "allow": ["model.layers"]}
    with pytest.raises(ConfigError, match=r"model\.d_ff is 60 but was 50"):
        start(config(tmp_path, model={"layers": 7, "d_ff": 60}, checkpoint=keys))


def test_a_leaf_with_another_number_of_axes_is_named_even_if_its_axes_may_change(one, tmp_path):
    directory = shutil.copytree(one / "checkpoints" / "1", tmp_path / "1")
    manifest = json.loads((directory / steps.MANIFEST).read_text())
    manifest["leaves"]["params.head.weight"]["shape"] = [24]
    (directory / steps.MANIFEST).write_text(json.dumps(manifest))
    digests.write(directory)
    steps.commit(directory)
    keys = {"resume": str(directory), "weights_only": True, "allow": ["model.vocab_size"]}
    with pytest.raises(ConfigError, match=r"params.head.weight is float32\[24, 257\], but it is float32\[24\] in it"):
        start(config(tmp_path / "new", checkpoint=keys))


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"dtype": "bfloat16"}, r"params.head.weight is float32\[24, 257\], but it is bfloat16\[24, 257\] in it"),
        ({"shape": [24, 256]}, r"params.head.weight is float32\[24, 257\], but it is float32\[24, 256\] in it"),
        (None, r"params.head.weight is float32\[24, 257\], but there is none in it"),
    ],
)
def test_a_leaf_that_does_not_fit_is_named_before_orbax_would_cast_it(one, tmp_path, change, sentence):
    directory = saved(tmp_path, steps=1) / "checkpoints" / "1"
    manifest = json.loads((directory / steps.MANIFEST).read_text())
    if change is None:
        del manifest["leaves"]["params.head.weight"]
    else:
        manifest["leaves"]["params.head.weight"] |= change
    (directory / steps.MANIFEST).write_text(json.dumps(manifest))
    digests.write(directory)
    steps.commit(directory)
    with pytest.raises(ConfigError, match=sentence):
        start(config(tmp_path))


def test_the_state_before_and_the_one_restored_are_never_both_there(one, tmp_path, monkeypatch):
    """A run that restores never initialises."""
    settings = config(one)
    built = build_for(settings)
    monkeypatch.setattr(built, "init", lambda: pytest.fail("initialised although there is a checkpoint"))
    checkpointer = Checkpointer(settings, built)
    assert checkpointer.restore_or_init()[1] == 1
    checkpointer.close()


def test_the_manifest_says_what_a_run_needs_to_know(one):
    manifest = json.loads((one / "checkpoints" / "1" / steps.MANIFEST).read_text())
    assert (manifest["step"], manifest["loss"], manifest["eval_loss"]) == (1, 1.0, None)
    assert manifest["data"] == {"batches": 1} and manifest["rng"] == {"seed": 0, "step": 1}
    assert manifest["config"]["model"]["layers"] == ODD["layers"]
    assert {"python", "jax", "jaxlib", "optax", "orbax-checkpoint"} <= manifest["versions"].keys()
    assert manifest["leaves"]["params.embedding.tokens"] == {"shape": [257, 24], "dtype": "float32"}
