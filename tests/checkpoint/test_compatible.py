import dataclasses
import functools
import json

import pytest
from checkpoint_runs import config, program

from meshtrain.checkpoint.canonical import Canonical
from meshtrain.checkpoint.compatible import check_keys, compare, compare_data
from meshtrain.checkpoint.manifest import Manifest
from meshtrain.config import Config, ConfigError
from meshtrain.config.key import keys


def reported(new, weights_only=False, **old):
    """What `compare` says of a change from the sections `old` to `new`."""
    before = json.loads(json.dumps(dataclasses.asdict(config(**old))))
    return compare(before, new, "checkpoint x", weights_only)


def test_the_same_config_changes_nothing():
    assert reported(config()) == []


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
    assert "run.seed is 1 but was 0" in str(refused.value) and "model.layers is 6 but was 5" in str(refused.value)


def test_what_may_change_is_reported():
    new = config(layout="data 8, ZeRO-3", checkpoint={"every": 5}, train={"steps": 99})
    assert reported(new) == [
        "mesh.data was 1 and is 8 from here on.",
        "parallel.zero_stage was 1 and is 3 from here on.",
        "train.steps was 20 and is 99 from here on.",
        "checkpoint.every was 2 and is 5 from here on.",
    ]


def test_the_directory_and_how_to_resume_are_not_worth_a_word():
    assert reported(config("elsewhere", checkpoint={"resume": "never"})) == []


def test_llama_has_no_position_table_that_a_longer_sequence_would_change():
    new = config(train={"sequence_length": 32}, checkpoint={"allow": ["train.sequence_length"]})
    assert reported(new) == ["train.sequence_length was 16 and is 32 from here on."]


def test_a_key_of_an_inner_section_goes_by_its_line_too():
    old = {"parallel": {"reduce": {"compression": "int8"}}}
    assert reported(config(parallel={"reduce": {"compression": "int8", "block": 64}}), **old) == [
        "parallel.reduce.block was 256 and is 64 from here on."
    ]
    with pytest.raises(ConfigError, match=r"parallel\.sync\.every is 5 but was 0"):
        mesh = {"data": 4, "islands": 2}
        reported(config(mesh=mesh, parallel={"sync": {"every": 5}}), mesh=mesh)
    before = dataclasses.asdict(config())
    del before["parallel"]["reduce"], before["parallel"]["sync"]
    assert compare(before, config(), "x", weights_only=False) == [], "a checkpoint older than the section"


def test_islands_are_reported_and_never_refused():
    assert reported(config(mesh={"data": 4, "islands": 2}), mesh={"data": 4}) == [
        "mesh.islands was 1 and is 2 from here on."
    ]
    assert reported(config(mesh={"data": 4}), mesh={"data": 4, "islands": 4}) == [
        "mesh.islands was 4 and is 1 from here on."
    ]


def test_a_refused_key_that_is_allowed_by_name_is_reported_instead():
    new = config(run={"seed": 1}, checkpoint={"allow": ["run.seed"]})
    assert reported(new) == ["run.seed was 0 and is 1 from here on."]


def test_a_key_that_the_old_config_did_not_know_is_not_compared():
    before = dataclasses.asdict(config())
    del before["run"]["seed"], before["eval"]
    assert compare(before, config(run={"seed": 1}, eval={"batches": 3}), "x", weights_only=False) == []


@pytest.mark.parametrize("layout", ["one device", "data 8, ZeRO-3", "data 2, tensor 2, ZeRO-2"])
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
    """Neither the rows of a batch nor what ZeRO-2 holds: they were not given, before or now."""
    new = config(
        layout="data 2, tensor 2, ZeRO-2",
        train={"global_batch_size": 16},
        checkpoint={"allow": ["train.global_batch_size"]},
    )
    said = reported(new)
    assert "train.global_batch_size was 8 and is 16 from here on." in said
    assert not any("rows_multiple" in sentence or "zero_hold" in sentence for sentence in said)


def test_what_was_given_and_followed_before_is_a_change():
    with pytest.raises(ConfigError, match=r"data\.rows_multiple is 4 but was 8"):
        reported(config(data={"rows_multiple": 4}))
    before = dataclasses.asdict(config())
    before["data"]["rows_multiple"] = None
    with pytest.raises(ConfigError, match=r"data\.rows_multiple is 4 but was 8"):
        compare(before, config(data={"rows_multiple": 4}), "x", weights_only=False)


def test_weights_alone_may_go_to_another_run_but_not_to_another_model():
    new = config(
        run={"seed": 1}, data={"source": "stdlib"}, optimizer={"name": "lion"}, train={"global_batch_size": 16}
    )
    assert reported(new, weights_only=True) == []
    with pytest.raises(
        ConfigError, match=r"model.layers is 6 but was 5; checkpoint.allow: \[model.layers\] takes what fits"
    ):
        reported(config(model={"layers": 6}), weights_only=True)
    with pytest.raises(ConfigError, match=r"data\.tokenizer is a\.json but was byte"):
        reported(config(data={"tokenizer": "a.json"}), weights_only=True)


def test_a_model_of_another_size_is_shown_the_way_through_its_weights():
    with pytest.raises(ConfigError, match=r"checkpoint.weights_only: true and checkpoint.allow: \[model.layers\]"):
        reported(config(model={"layers": 6}))


@pytest.mark.parametrize(
    "keys, sentence",
    [
        (
            {"weights_only": True},
            "takes the weights of another run, but checkpoint.resume is auto; give that run's path",
        ),
        (
            {"allow": ["data.sorce"]},
            "checkpoint.allow has 'data.sorce'; did you mean data.source",
        ),
        ({"allow": ["model.layers"]}, "with checkpoint.weights_only model.layers and model.vocab_size can"),
        (
            {"allow": ["model.d_model"], "weights_only": True, "resume": "runs/a"},
            "only model.layers and model.vocab_size can",
        ),
    ],
)
def test_what_cannot_be_asked_for_is_refused(keys, sentence):
    with pytest.raises(ConfigError, match=sentence):
        check_keys(config(checkpoint=keys))


# --- data that changed under the same keys


def of_data(new, digest, was, python="3.11.0", **old):
    """What `compare_data` says where a checkpoint of the sections `old` read `was`, and `new` reads `digest`."""
    manifest = Manifest.of(2, 1.0, None, config(**old), Canonical(program()), was)
    manifest.versions["python"] = python
    return compare_data(manifest, new, digest, "checkpoint x")


TEXT = {"data": {"source": "/text"}}


def test_data_that_changed_are_refused_with_the_ways_out():
    with pytest.raises(ConfigError) as refused:
        of_data(config(**TEXT), {"digest": "aa"}, {"digest": "bb"}, **TEXT)
    assert str(refused.value) == (
        "checkpoint x does not fit the data: data.source /text holds other tokens than it did (aa, was bb); set it back, "
        "give another run.directory, or go on all the same with checkpoint.allow: [data.source]."
    )


def test_the_source_of_a_mixture_that_changed_is_named():
    mixed = {"data": {"source": "mixture", "mixture": ["/a", "/b", "/c"], "weights": [1, 2, 3]}}
    with pytest.raises(
        ConfigError, match=r"data\.source mixture: /b holds other tokens than it did \(22, was 20\); set it"
    ):
        of_data(config(**mixed), {"digest": "11+22+33"}, {"digest": "11+20+33"}, **mixed)


def test_of_the_standard_library_both_pythons_are_named():
    stdlib = {"data": {"source": "stdlib"}}
    with pytest.raises(ConfigError, match=r"it is that of Python 3\.\S+, was that of 2\.7\.18; "):
        of_data(config(**stdlib), {"digest": "aa"}, {"digest": "bb"}, python="2.7.18", **stdlib)


def test_data_that_changed_and_are_allowed_to_are_reported():
    new = config(**TEXT, checkpoint={"allow": ["data.source"]})
    said = of_data(new, {"digest": "aa"}, {"digest": "bb"}, **TEXT)
    assert said == ["data.source /text holds other tokens than it did (aa, was bb), from here on."]


def test_held_out_data_that_changed_are_reported():
    held = {"data": {"source": "/text", "validation_source": "/held"}}
    was = {"digest": "aa", "validation_digest": "bb"}
    assert of_data(config(**held), was, was, **held) == []
    said = of_data(config(**held), was | {"validation_digest": "cc"}, was, **held)
    assert said == ["data.validation_source /held holds other tokens than it did, from here on."]


@pytest.mark.parametrize(
    "digest, was", [({"digest": "aa"}, {}), ({}, {"digest": "aa"}), ({"digest": "a"}, {"digest": "a"})]
)
def test_data_that_are_the_same_or_that_one_side_does_not_know_are_passed_over(digest, was):
    assert of_data(config(**TEXT), digest, was, **TEXT) == []


def test_another_source_is_a_change_of_its_key_alone():
    new = config(data={"source": "/elsewhere"}, checkpoint={"allow": ["data.source"]})
    assert of_data(new, {"digest": "aa"}, {"digest": "bb"}, **TEXT) == []
