"""PEFT's adapters: its own files read with its own logits, written again bit for bit; what is no plain LoRA of the
model is refused.
"""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import refusals
from refusals import tells

pytest.importorskip("safetensors")

from golden import GOLDEN
from safetensors.numpy import load_file, save_file

import meshtrain as mt
from meshtrain.adopt.__main__ import main
from meshtrain.config import load
from meshtrain.errors import ConfigError
from meshtrain.hf import peft
from meshtrain.hf.hf_directory import config_of
from meshtrain.hf.peft import Adapters, peft_modules
from meshtrain.mesh import make_mesh
from meshtrain.model.weights import adapters

pytestmark = pytest.mark.thorough
TOKENS = np.random.default_rng(0).integers(0, 45, (2, 48))
FILE = f"{peft.STEM}.safetensors"


def logits(name):
    return np.load(GOLDEN / name / "logits.npy")


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name, sizes", [("qwen3", {"tensor": 2, "pipeline": 2}), ("gpt2", {"data": 2})]
)
def test_a_base_with_an_adapter_has_pefts_logits_on_a_mesh(name, sizes):
    model = mt.read_model(
        GOLDEN / name,
        mesh=make_mesh(load({"mesh": sizes})),
        adapter=GOLDEN / f"{name}_lora",
    )
    np.testing.assert_allclose(model(TOKENS), logits(f"{name}_lora"), atol=1e-4)


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """The bases with their adapters as checkpoints, by name."""
    root = tmp_path_factory.mktemp("imported")
    for name in ("qwen3", "gpt2"):
        words = [
            "import",
            str(GOLDEN / name),
            str(root / name),
            "--adapter",
            str(GOLDEN / f"{name}_lora"),
        ]
        assert main([*words, "--set", "mesh.pipeline=3"]) == 0
    return root


@pytest.mark.thorough
def test_an_adapter_goes_out_bit_for_bit_as_it_came(imported, tmp_path):
    assert (
        main(["export", str(imported / "qwen3"), str(tmp_path / "out"), "--adapter"])
        == 0
    )
    came, went = (
        load_file(at / FILE) for at in (GOLDEN / "qwen3_lora", tmp_path / "out")
    )
    assert came.keys() == went.keys()
    for name, array in came.items():
        assert array.dtype == went[name].dtype
        np.testing.assert_array_equal(array, went[name])
    both = GOLDEN / "qwen3_lora", tmp_path / "out"
    came, went = (json.loads((at / peft.ADAPTER_CONFIG).read_text()) for at in both)
    differ = {key for key in went if went[key] != came[key]} - {
        "base_model_name_or_path"
    }
    assert differ <= {"target_modules"} and set(went["target_modules"]) == set(
        came["target_modules"]
    )
    assert went["base_model_name_or_path"] == str(GOLDEN / "qwen3")


def test_shares_of_a_fused_projection_are_read_again_as_they_were(imported, tmp_path):
    assert (
        main(["export", str(imported / "gpt2"), str(tmp_path / "out"), "--adapter"])
        == 0
    )
    config = config_of(GOLDEN / "gpt2")
    once, again = (
        Adapters(at, config.model) for at in (GOLDEN / "gpt2_lora", tmp_path / "out")
    )
    assert once.lora == again.lora and once.lora.targets == (
        "q",
        "k",
        "v",
        "out",
        "down",
    )
    for weight in adapters(config.model, once.lora):
        for layer in range(3):
            np.testing.assert_array_equal(
                once.read(weight, layer), again.read(weight, layer)
            )
    # for PEFT it is one adapter of rank 3 r, of the same scale
    given = json.loads((tmp_path / "out" / peft.ADAPTER_CONFIG).read_text())
    assert given["rank_pattern"] == {"attn.c_attn": 12} and given["alpha_pattern"] == {
        "attn.c_attn": 18
    }
    written = load_file(tmp_path / "out" / FILE)
    assert written[
        "base_model.model.transformer.h.0.attn.c_attn.lora_B.weight"
    ].shape == (48, 12)


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("targets", [("q", "v"), ("k",), ("v", "up")])
def test_some_shares_of_a_fused_projection_are_written_and_read(
    tmp_path, targets, rslora
):
    from meshtrain.adopt.exporting import export_adapter
    from meshtrain.config.follow import replaced

    lora = {"rank": 2, "alpha": 3.0, "targets": targets, "rslora": rslora}
    config = replaced(config_of(GOLDEN / "gpt2"), lora=lora)
    numbers, draw = {}, np.random.default_rng(0)
    for weight in adapters(config.model, config.lora):
        numbers[weight.name] = draw.normal(size=weight.shape).astype(np.float32)
    export_adapter(
        config,
        lambda weight, layer: numbers[weight.name][layer],
        tmp_path / "out",
        "float32",
        None,
    )
    found = Adapters(tmp_path / "out", config.model)
    assert found.lora == config.lora
    for weight in adapters(config.model, config.lora):
        np.testing.assert_array_equal(found.read(weight, 1), numbers[weight.name][1])


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name", [pytest.param("qwen3", marks=pytest.mark.slow), "gpt2"]
)
def test_merged_is_unmerged(imported, tmp_path, name):
    assert main(["merge", str(imported / name), str(tmp_path / "of a run")]) == 0
    words = [
        str(GOLDEN / name),
        str(tmp_path / "of files"),
        "--adapter",
        str(GOLDEN / f"{name}_lora"),
    ]
    assert main(["merge", *words]) == 0
    for merged in ("of a run", "of files"):
        np.testing.assert_allclose(
            mt.read_model(tmp_path / merged)(TOKENS), logits(f"{name}_lora"), atol=1e-4
        )
    np.testing.assert_array_equal(
        mt.read_model(imported / name).weights["embedding.tokens"],
        mt.read_model(tmp_path / "of a run").weights["embedding.tokens"],
    )


@pytest.mark.thorough
def test_a_run_with_the_same_section_goes_on_with_the_adapters(imported, tmp_path):
    section = load(imported / "qwen3" / "config.yaml")
    given = {
        "run": {"directory": str(tmp_path)},
        "model": {
            k: v for k, v in dataclasses.asdict(section.model).items() if v is not None
        },
        "lora": {**vars(section.lora), "targets": list(reversed(section.lora.targets))},
        "mesh": {"tensor": 2},
        "data": {"source": "synthetic", "tokenizer": "byte"},
        "checkpoint": {"resume": str(imported / "qwen3")},
        "train": {"global_batch_size": 2, "sequence_length": 16},
    }
    config = load(given)
    program = mt.Program(config)
    checkpointer = mt.Checkpointer(config, program, say=[].append)
    state, _ = checkpointer.restore_or_init()
    checkpointer.close()
    np.testing.assert_allclose(
        program.logits(state.params, TOKENS), logits("qwen3_lora"), atol=1e-4
    )
    changed = load(given, ["lora.alpha=7", f"run.directory={tmp_path / 'b'}"])
    other = mt.Checkpointer(changed, mt.Program(changed), say=[].append)
    with pytest.raises(ConfigError, match=r"adapters with lora\.alpha 6\.0"):
        other.restore_or_init()
    other.close()


@pytest.fixture
def copy(tmp_path):
    return Path(shutil.copytree(GOLDEN / "qwen3_lora", tmp_path / "adapter"))


def refused(directory, base="qwen3"):
    with pytest.raises(ConfigError) as error:
        Adapters(directory, config_of(GOLDEN / base).model)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    "change, says",
    [
        ({"peft_type": "IA3"}, "peft_type 'IA3'"),
        ({"use_dora": True}, "use_dora true"),
        ({"bias": "lora_only"}, 'bias "lora_only"'),
        ({"lora_bias": True}, "lora_bias true is not"),
        ({"modules_to_save": ["lm_head"]}, 'modules_to_save ["lm_head"] is not'),
        ({"layers_to_transform": [0]}, "layers_to_transform [0] is not"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"something_new": {"x": 1}}, 'something_new {"x": 1}'),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa'"),
        ({"r": 8}, "rank 8 ... [8, 16]"),
        ({"r": 0}, "r is 0 ... whole number above 0"),
        ({"r": True}, "r is True"),
        ({"lora_alpha": "6"}, "lora_alpha is '6'"),
        ({"lora_alpha": None}, "lora_alpha is None"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern makes ranks of 4 and 8"),
        ({"alpha_pattern": {"q_proj": 8}}, "alpha_pattern makes alphas of 6 and 8"),
        ({"rank_pattern": {"(a+)+$": 8}}, "only names of modules are read"),
        (
            {"target_modules": ["q_proj", "o_proj", "v_proj", "down_proj"]},
            "asks for model.layers.0.self_attn.o_proj",
        ),
        ({"target_modules": "all-linear"}, "asks for model.layers.0.self_attn.k_proj"),
    ],
)
def test_what_is_no_plain_lora_is_refused_by_name(copy, change, says):
    given = json.loads((copy / peft.ADAPTER_CONFIG).read_text())
    (copy / peft.ADAPTER_CONFIG).write_text(json.dumps(given | change))
    assert tells(refused(copy), says)


def test_a_pattern_is_never_run(copy):
    given = json.loads((copy / peft.ADAPTER_CONFIG).read_text())
    # against the name of a module this takes for ever
    (copy / peft.ADAPTER_CONFIG).write_text(
        json.dumps(given | {"target_modules": r"(([a-z.0-9_]+)+)+\d$"})
    )
    assert Adapters(copy, config_of(GOLDEN / "qwen3").model).lora.targets == (
        "q",
        "v",
        "down",
    )


def changed(directory, change):
    held = load_file(directory / FILE)
    change(held)
    save_file(held, directory / FILE)


def test_the_adapter_of_another_model_is_refused(copy):
    assert "is [4, 24]" not in refused(
        copy, "gpt2"
    ) and "adapter of another model" in refused(copy, "gpt2")
    assert "rank 4 it is [16, 4]" in refused(copy, "mistral")


def test_a_tensor_missing_too_many_or_no_number_is_refused(copy):
    name = "base_model.model.model.layers.2.mlp.down_proj.lora_A.weight"
    changed(copy, lambda held: held.update({name: held[name].astype(np.int32)}))
    assert tells(refused(copy), "is I32 ... one of")
    changed(
        copy,
        lambda held: held.update(
            {name.replace("lora_A.weight", "lora_magnitude_vector"): held[name]}
        ),
    )
    assert (
        "down_proj.lora_magnitude_vector, for which this qwen3 of 3 layers"
        in refused(copy)
    )
    changed(copy, lambda held: held.pop(name))
    assert f"has no {name}" in refused(copy)


def test_a_directory_without_adapters_is_refused(copy):
    (copy / peft.ADAPTER_CONFIG).write_text("[]")
    assert peft.ADAPTER_CONFIG in refused(copy)
    (copy / peft.ADAPTER_CONFIG).unlink()
    assert peft.ADAPTER_CONFIG in refused(copy)
    shutil.rmtree(copy)
    assert str(copy) in refused(copy)


def test_a_pickle_or_a_part_of_a_file_is_not_opened(copy):
    (copy / FILE).write_bytes((copy / FILE).read_bytes()[:-5])
    assert "is not a complete safetensors file" in refused(copy)
    (copy / FILE).rename(copy / "adapter_model.bin")
    assert "adapter_model.bin is a pickle" in refused(copy)


@pytest.mark.parametrize(
    "words, says",
    [
        (
            ["export", "{out}", "{new}"],
            "merge ... export --adapter",
        ),
        (["merge", str(GOLDEN / "qwen3"), "{new}"], "has no adapters to merge"),
        (["export", str(GOLDEN / "qwen3"), "{new}", "--adapter"], "has no adapters"),
        (
            ["merge", "{out}", "{new}", "--adapter", str(GOLDEN / "qwen3_lora")],
            "has adapters of its own",
        ),
        (
            [
                "import",
                str(GOLDEN / "qwen3"),
                "{new}",
                "--adapter",
                str(GOLDEN / "gpt2_lora"),
            ],
            "of another model",
        ),
    ],
)
def test_a_mistaken_command_gets_one_sentence_and_writes_nothing(
    imported, tmp_path, capsys, words, says
):
    given = [
        word.format(out=imported / "qwen3", new=tmp_path / "new") for word in words
    ]
    assert tells(refusals.refused(main, capsys, *given), says) and not list(
        tmp_path.iterdir()
    )


def test_a_section_that_adapters_contradict_is_refused(tmp_path, capsys):
    words = [
        "import",
        str(GOLDEN / "qwen3"),
        str(tmp_path / "out"),
        "--adapter",
        str(GOLDEN / "qwen3_lora"),
    ]
    assert "lora.rank is 8, but the adapters in" in refusals.refused(
        main, capsys, *words, "--set", "lora.rank=8"
    )


def test_adapters_of_layers_of_several_kinds_are_refused():
    model = {"family": "mixtral", "layers": 3, "dense_layers": 1, "moe": {"experts": 4}}
    with pytest.raises(
        ConfigError, match=r"PEFT .*several kinds .*model\.dense_layers"
    ):
        peft_modules(load({"model": model}).model)
