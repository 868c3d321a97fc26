"""What may differ from the run that saved a step, and how it is restored."""

import dataclasses
import functools
import json
import shutil

import jax
import numpy as np
import pytest
from checkpoint_runs import (
    ODD,
    build_for,
    config,
    numbered,
    opened,
    program,
    restored,
    saved,
)
from refusals import tells

from meshtrain.checkpoint import digests, steps
from meshtrain.checkpoint.global_arrays import GlobalArrays
from meshtrain.checkpoint.manifest import StepManifest
from meshtrain.checkpoint.restoring import (
    check_keys,
    compare,
    compare_data,
    compare_versions,
)
from meshtrain.config import Config, ConfigError
from meshtrain.config.key import keys
from meshtrain.run.versions import versions


def reported(new, weights_only=False, **old):
    """What `compare` says of a change from the sections `old` to `new`."""
    before = json.loads(json.dumps(dataclasses.asdict(config(**old))))
    return compare(before, new, "checkpoint x", weights_only)


@pytest.mark.parametrize(
    "section, key, old, new",
    [
        ("model", "layers", 5, 6),
        ("model", "d_model", 24, 48),
        ("model", "vocab_size", 257, 300),
        ("model", "rope_theta", 10000.0, 500000.0),
        ("run", "seed", 0, 1),
        ("data", "tokenizer", "byte", "a.json"),
        ("data", "source", "synthetic", "stdlib"),
        ("train", "global_batch_size", 8, 16),
        ("train", "sequence_length", 16, 32),
        ("optimizer", "name", "adamw", "lion"),
    ],
)
def test_what_must_not_change_is_refused_with_both_values(section, key, old, new):
    with pytest.raises(ConfigError) as refused:
        reported(config(**{section: {key: new}}), **{section: {key: old}})
    sentence = str(refused.value)
    assert f"{section}.{key} is {new} but was {old}" in sentence
    assert sentence.startswith("checkpoint x does not fit this config: ")
    assert "\n" not in sentence and sentence.endswith(".")


def test_all_that_must_not_change_is_in_one_sentence():
    with pytest.raises(ConfigError) as refused:
        reported(config(run={"seed": 1}, model={"layers": 6}))
    assert "run.seed is 1 but was 0" in str(
        refused.value
    ) and "model.layers is 6 but was 5" in str(refused.value)


def changed(key: str, before: int, now: int) -> str:
    """Returns the sentence that reports a key which may change."""
    return f"{key} was {before} and is {now} from here on."


def test_what_may_change_is_reported():
    new = config(layout="data 8, ZeRO-3", checkpoint={"every": 5}, train={"steps": 99})
    assert reported(new) == [
        changed("mesh.data", 1, 8),
        changed("parallel.zero_stage", 1, 3),
        changed("train.steps", 20, 99),
        changed("checkpoint.every", 2, 5),
    ]


def test_a_key_of_an_inner_section_goes_by_its_line_too():
    old = {"parallel": {"reduce": {"compression": "int8"}}}
    assert reported(
        config(parallel={"reduce": {"compression": "int8", "block": 64}}), **old
    ) == [changed("parallel.reduce.block", 256, 64)]
    with pytest.raises(ConfigError, match=r"parallel\.sync\.every is 5 but was 0"):
        mesh = {"data": 4, "islands": 2}
        reported(config(mesh=mesh, parallel={"sync": {"every": 5}}), mesh=mesh)
    before = dataclasses.asdict(config())
    del before["parallel"]["reduce"], before["parallel"]["sync"]
    assert compare(before, config(), "x", weights_only=False) == [], (
        "a checkpoint older than the section"
    )


def test_a_key_that_the_old_config_did_not_know_is_not_compared():
    before = dataclasses.asdict(config())
    del before["run"]["seed"], before["eval"]
    assert (
        compare(
            before,
            config(run={"seed": 1}, eval={"batches": 3}),
            "x",
            weights_only=False,
        )
        == []
    )


@pytest.mark.parametrize(
    "layout", ["one device", "data 8, ZeRO-3", "data 2, tensor 2, ZeRO-2"]
)
def test_a_checkpoint_that_holds_null_for_what_follows_fits_the_same_config(layout):
    new = config(layout=layout, model={"kv_heads": None, "d_ff": None})
    before = dataclasses.asdict(new)
    for path, key in keys(Config).items():
        if key.null:
            *sections, name = path.split(".")
            functools.reduce(dict.__getitem__, sections, before)[name] = None
    assert compare(before, new, "x", weights_only=False) == []
    before["parallel"]["zero_stage"] = 0
    assert compare(before, new, "x", weights_only=False) == [
        f"parallel.zero_stage was 0 and is {new.parallel.zero_stage} from here on."
    ]


def test_what_follows_from_a_key_that_changed_is_no_change_of_its_own():
    """The rows of a batch were not given, before or now."""
    allow = {"allow": ["train.global_batch_size"]}
    said = reported(
        config(
            layout="data 2, tensor 2, ZeRO-2",
            train={"global_batch_size": 16},
            checkpoint=allow,
        )
    )
    assert changed("train.global_batch_size", 8, 16) in said
    assert not any("rows_multiple" in sentence for sentence in said)


def test_what_was_given_and_followed_before_is_a_change():
    with pytest.raises(ConfigError, match=r"data\.rows_multiple is 4 but was 8"):
        reported(config(data={"rows_multiple": 4}))
    before = dataclasses.asdict(config())
    before["data"]["rows_multiple"] = None
    with pytest.raises(ConfigError, match=r"data\.rows_multiple is 4 but was 8"):
        compare(before, config(data={"rows_multiple": 4}), "x", weights_only=False)


def test_weights_alone_may_go_to_another_run_but_not_to_another_model():
    another = {
        "run": {"seed": 1},
        "data": {"source": "stdlib"},
        "optimizer": {"name": "lion"},
    }
    assert (
        reported(config(**another, train={"global_batch_size": 16}), weights_only=True)
        == []
    )
    fits = r"model.layers is 6 .* 5; .*: \[model.layers\]"
    with pytest.raises(ConfigError, match=fits):
        reported(config(model={"layers": 6}), weights_only=True)
    with pytest.raises(ConfigError, match=r"data\.tokenizer is a\.json .* byte"):
        reported(config(data={"tokenizer": "a.json"}), weights_only=True)


@pytest.mark.parametrize(
    "keys, sentence",
    [
        (
            {"weights_only": True},
            "checkpoint.resume is auto; give .* path",
        ),
        ({"allow": ["data.sorce"]}, "checkpoint.allow .* 'data.sorce'; .* data.source"),
        (
            {"allow": ["model.layers"]},
            "checkpoint.weights_only model.layers and model.vocab_size",
        ),
        (
            {"allow": ["model.d_model"], "weights_only": True, "resume": "a"},
            "only model.layers and model.vocab",
        ),
    ],
)
def test_what_cannot_be_asked_for_is_refused(keys, sentence):
    with pytest.raises(ConfigError, match=sentence):
        check_keys(config(checkpoint=keys))


# --- data that changed under the same keys


def of_data(new, digest, was, python="3.11.0", **old):
    """What `compare_data` says where a checkpoint of the sections `old` read `was`, and `new` reads `digest`."""
    manifest = StepManifest.make(
        2, 1.0, None, config(**old), GlobalArrays(program()).records, {}, was
    )
    manifest.versions["python"] = python
    return compare_data(manifest, new, digest, "checkpoint x")


TEXT = {"data": {"source": "/text"}}


@pytest.mark.parametrize(
    "data, digest, was, says",
    [
        (
            {"source": "/text"},
            "aa",
            "bb",
            r"^checkpoint x does not fit the data: data.source /text holds other tokens than it did \(aa, was bb\); "
            r"set it back, "
            r"give another run.directory, or continue anyway with checkpoint.allow: \[data.source\]\.$",
        ),
        (
            {"source": "mixture", "mixture": ["/a", "/b", "/c"], "weights": [1, 2, 3]},
            "11+22+33",
            "11+20+33",
            r"data\.source mixture: /b .* \(22, was 20\); set it",
        ),
        ({"source": "stdlib"}, "aa", "bb", r"Python 3\.\S+, was .*2\.7\.18; "),
    ],
)
def test_data_that_changed_are_refused_with_the_ways_out(data, digest, was, says):
    with pytest.raises(ConfigError, match=says):
        of_data(
            config(data=data),
            {"digest": digest},
            {"digest": was},
            python="2.7.18",
            data=data,
        )


def test_data_that_changed_and_are_allowed_to_or_are_held_out_are_reported():
    new = config(**TEXT, checkpoint={"allow": ["data.source"]})
    said = of_data(new, {"digest": "aa"}, {"digest": "bb"}, **TEXT)
    (sentence,) = said
    assert tells(sentence, "data.source /text", "(aa, was bb)", "from here on.")
    held = {"data": {"source": "/text", "validation_source": "/held"}}
    was = {"digest": "aa", "validation_digest": "bb"}
    assert of_data(config(**held), was, was, **held) == []
    said = of_data(config(**held), was | {"validation_digest": "cc"}, was, **held)
    (sentence,) = said
    assert tells(
        sentence, "data.validation_source /held", "other tokens", "from here on."
    )


@pytest.mark.parametrize(
    "digest, was",
    [
        ({"digest": "aa"}, {}),
        ({}, {"digest": "aa"}),
        ({"digest": "a"}, {"digest": "a"}),
    ],
)
def test_data_that_are_the_same_or_that_one_side_does_not_know_are_passed_over(
    digest, was
):
    assert of_data(config(**TEXT), digest, was, **TEXT) == []


def test_another_source_is_a_change_of_its_key_alone():
    new = config(data={"source": "/elsewhere"}, checkpoint={"allow": ["data.source"]})
    assert of_data(new, {"digest": "aa"}, {"digest": "bb"}, **TEXT) == []


@pytest.mark.parametrize("lora", [{"rank": 4}, {"targets": ["q"]}])
def test_adapters_that_a_checkpoint_has_not_are_refused_with_a_way_that_is_legal(lora):
    """Allowed by name they would be refused later, for arrays that are not there."""
    name, old = f"lora.{next(iter(lora))}", {"rank": 2} if "targets" in lora else {}
    new = config(lora=old | lora, checkpoint={"allow": [name]})
    with pytest.raises(
        ConfigError,
        match=rf"checkpoint\.allow has {name}, .* give another run\.directory",
    ):
        check_keys(new)
    ways_out = rf"does not fit this config: {name} is .*; set it back, or"
    with pytest.raises(ConfigError, match=ways_out) as refused:
        reported(config(lora=old | lora), lora=old)
    assert "checkpoint.allow" not in str(refused.value)


def test_other_versions_than_a_checkpoint_was_written_with_are_told():
    here = versions()
    assert compare_versions(here, here) == compare_versions({}, here) == []
    then = here | {"jax": "99.0.0", "orbax-checkpoint": "99"}
    (sentence,) = compare_versions(then, here)
    jax, orbax = (f"(here {here[name]})" for name in ("jax", "orbax-checkpoint"))
    assert tells(sentence, "written with jax 99.0.0", jax, "orbax-checkpoint 99", orbax)


INTERLEAVED = "data 2, pipeline 2, interleaved, ZeRO-1"


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """A run directory with step 1: numbered(program(), 1)."""
    return saved(tmp_path_factory.mktemp("run"), steps=1)


def start(settings):
    state, step, said = restored(settings)
    return (
        state,
        step,
        said,
        {
            n: np.asarray(x)
            for n, x in GlobalArrays(build_for(settings)).arrays(state).items()
        },
    )


def source():
    names = (entry.name for entry in GlobalArrays(program()).entries)
    return dict(
        zip(
            names, map(np.asarray, jax.tree.leaves(numbered(program(), 1))), strict=True
        )
    )


@pytest.mark.thorough
@pytest.mark.parametrize("layout", ["one device", INTERLEAVED])
def test_weights_alone_start_a_new_run_with_a_fresh_optimizer(one, tmp_path, layout):
    settings = config(
        tmp_path,
        layout,
        checkpoint={"resume": str(one), "weights_only": True},
        run={"seed": 5},
    )
    _, step, said, found = start(settings)
    assert step == 0 and found["step"] == 0
    (sentence,) = said
    assert tells(sentence, "weights of step 1", f"{one}/checkpoints/1.")
    for name, x in source().items():
        if name.startswith("params."):
            assert np.array_equal(found[name], x), name
        else:
            assert not found[name].any(), name


@pytest.mark.thorough
def test_a_run_that_began_with_weights_goes_on_with_all_of_its_own(one, tmp_path):
    keys = {"resume": str(one), "weights_only": True}
    settings = config(tmp_path, checkpoint=keys)
    with opened(settings, program()) as (checkpointer, _):
        checkpointer.restore_or_init()
        checkpointer.save(4, numbered(program(), 4), 1.0)
    _, step, _, found = start(settings)
    assert step == 4 and found["optimizer.mu.head.weight"].any()


def test_another_number_of_layers_or_rows_is_refused_unless_asked_for_by_name(
    one, tmp_path
):
    keys = {"resume": str(one), "weights_only": True}
    for size, name in (
        ({"layers": 7}, "model.layers"),
        ({"vocab_size": 300}, "model.vocab_size"),
    ):
        fits = (
            rf"{name} is \d+ but was \d+; checkpoint.allow: \[{name}\] takes what fits"
        )
        with pytest.raises(ConfigError, match=fits):
            start(config(tmp_path, model=size, checkpoint=keys))
    for size in ({"layers": 7}, {"vocab_size": 300}):
        with pytest.raises(
            ConfigError, match=r"give another run\.directory, checkpoint\.resume: PATH"
        ):
            start(config(tmp_path, model=size, checkpoint={"resume": str(one)}))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "layout, size",
    [
        pytest.param(INTERLEAVED, {"layers": 7, "vocab_size": 300}, id="more"),
        pytest.param("one device", {"layers": 4, "vocab_size": 200}, id="fewer"),
    ],
)
def test_asked_for_what_fits_is_taken_and_the_rest_is_as_initialised(
    one, tmp_path, layout, size
):
    keys = {
        "resume": str(one),
        "weights_only": True,
        "allow": ["model.layers", "model.vocab_size"],
    }
    settings = config(tmp_path, layout, model=size, checkpoint=keys)
    _, step, said, found = start(settings)
    fresh = build_for(settings)
    initial = {
        n: np.asarray(x) for n, x in GlobalArrays(fresh).arrays(fresh.init()).items()
    }
    assert step == 0 and any(
        "params.embedding.tokens is" in sentence for sentence in said
    )
    for name, old in source().items():
        if name.startswith("params."):
            common = tuple(
                slice(min(n, m))
                for n, m in zip(old.shape, found[name].shape, strict=True)
            )
            expected = initial[name].copy()
            expected[common] = old[common]
            assert np.array_equal(found[name], expected), name
    layers = (
        found["params.blocks.mlp.gate"].shape[0],
        found["params.embedding.tokens"].shape[0],
    )
    assert layers == (size["layers"], size["vocab_size"])


def test_a_change_of_another_axis_is_refused_even_if_layers_may_change(one, tmp_path):
    keys = {"resume": str(one), "weights_only": True, "allow": ["model.layers"]}
    with pytest.raises(ConfigError, match=r"model\.d_ff is 60 but was 50"):
        start(config(tmp_path, model={"layers": 7, "d_ff": 60}, checkpoint=keys))


def test_a_leaf_with_another_number_of_axes_is_named_even_if_its_axes_may_change(
    one, tmp_path
):
    directory = shutil.copytree(one / "checkpoints" / "1", tmp_path / "1")
    manifest = json.loads((directory / steps.MANIFEST).read_text())
    manifest["leaves"]["params.head.weight"]["shape"] = [24]
    (directory / steps.MANIFEST).write_text(json.dumps(manifest))
    digests.write(directory)
    steps.commit(directory)
    keys = {
        "resume": str(directory),
        "weights_only": True,
        "allow": ["model.vocab_size"],
    }
    with pytest.raises(
        ConfigError,
        match=r"params.head.weight is float32\[24, 257\], .* float32\[24\]",
    ):
        start(config(tmp_path / "new", checkpoint=keys))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "change, sentence",
    [
        (
            {"dtype": "bfloat16"},
            r"params.head.weight is float32\[24, 257\], .* bfloat16\[24, 257\]",
        ),
        (
            {"shape": [24, 256]},
            r"params.head.weight is float32\[24, 257\], .* float32\[24, 256\]",
        ),
        (None, r"params.head.weight is float32\[24, 257\], .* none"),
    ],
)
def test_a_leaf_that_does_not_fit_is_named_before_orbax_would_cast_it(
    one, tmp_path, change, sentence
):
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


def test_the_state_before_and_the_one_restored_are_never_both_there(
    one, tmp_path, monkeypatch
):
    """A run that restores never initialises."""
    settings = config(one)
    built = build_for(settings)
    monkeypatch.setattr(
        built, "init", lambda: pytest.fail("initialised although there is a checkpoint")
    )
    assert restored(settings, built)[1] == 1


def test_the_manifest_says_what_a_run_needs_to_know(one):
    manifest = json.loads((one / "checkpoints" / "1" / steps.MANIFEST).read_text())
    assert (manifest["step"], manifest["loss"], manifest["eval_loss"]) == (1, 1.0, None)
    assert manifest["data"] == {"batches": 1} and manifest["rng"] == {
        "seed": 0,
        "step": 1,
    }
    assert manifest["config"]["model"]["layers"] == ODD["layers"]
    assert {"python", "jax", "jaxlib", "optax", "orbax-checkpoint"} <= manifest[
        "versions"
    ].keys()
    assert manifest["leaves"]["params.embedding.tokens"] == {
        "shape": [257, 24],
        "dtype": "float32",
    }
