"""Weights of transformers on every mesh: their logits, box by box."""

import json
import shutil
from itertools import product
from pathlib import Path

import jax
import numpy as np
import pytest

pytest.importorskip("safetensors")

from covering import thorough_but
from golden import FAMILIES, GOLDEN, MESHES, adopted
from safetensors.numpy import save_file

import meshtrain as mt
from meshtrain.adopt import loading
from meshtrain.adopt.files import INDEX, Files
from meshtrain.adopt.theirs import config_of
from meshtrain.config import load
from meshtrain.config.follow import replaced
from meshtrain.config.theirs import CONFIG, model_section, read_json
from meshtrain.errors import ConfigError
from meshtrain.mesh import make_mesh

NOW = [*((family, "one") for family in FAMILIES), ("gemma3", "2x2x2")]


@pytest.mark.parametrize("case", thorough_but(list(product(FAMILIES, MESHES)), NOW.__contains__), ids=str)
def test_logits_are_those_of_transformers(case):
    family, mesh = case
    program, files = adopted(GOLDEN / family, mesh)
    loading.check(program.config.model, files)
    params = loading.load(program.layout, files)
    tokens = np.random.default_rng(0).integers(0, 45, (2, 48)).astype(np.int32)
    rows = np.resize(tokens, (max(2, program.config.mesh.data), 48))
    logits = program.logits(params, jax.device_put(rows, program.batch_sharding))[:2]
    np.testing.assert_allclose(logits, np.load(GOLDEN / family / "logits.npy"), atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_likeliest_text_is_that_of_transformers(family):
    program, files = adopted(GOLDEN / family)
    params = loading.load(program.layout, files)
    tokens = np.zeros((2, 48), np.int32)
    tokens[:, :16] = np.random.default_rng(0).integers(0, 45, (2, 48))[:, :16]
    for at in range(16, 28):
        tokens[:, at] = np.argmax(program.logits(params, tokens)[:, at - 1], axis=-1)
    np.testing.assert_array_equal(tokens[:, 16:28], np.load(GOLDEN / family / "generated.npy"))


@pytest.fixture
def copy(tmp_path):
    return Path(shutil.copytree(GOLDEN / "llama3", tmp_path / "model"))


def changed(path: Path, change) -> None:
    found = json.loads(path.read_text())
    change(found)
    path.write_text(json.dumps(found))


def refused(directory: Path) -> str:
    with pytest.raises(ConfigError) as error:
        loading.check(config_of(directory).model, Files(directory))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_an_index_that_leaves_its_directory_is_refused(copy):
    changed(copy / INDEX, lambda index: index["weight_map"].update({"model.norm.weight": "../model.safetensors"}))
    assert "is no file of its directory" in refused(copy)


def test_an_index_that_names_a_missing_file_is_refused(copy):
    changed(copy / INDEX, lambda index: index["weight_map"].update({"model.norm.weight": "other.safetensors"}))
    assert "other.safetensors, which is not there" in refused(copy)


def test_an_index_that_names_a_file_without_the_tensor_is_refused(copy):
    changed(copy / INDEX, lambda index: index["weight_map"].update({"more": next(iter(index["weight_map"].values()))}))
    assert "has more in" in refused(copy) and "not in there" in refused(copy)


def test_a_truncated_file_is_refused(copy):
    file = sorted(copy.glob("*.safetensors"))[0]
    file.write_bytes(file.read_bytes()[:-10])
    assert f"{file.name} is no whole safetensors file" in refused(copy)


def test_a_pickle_is_not_opened(copy, tmp_path):
    for file in copy.glob("*.safetensors*"):
        file.unlink()
    (copy / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch %s'\ntR." % str(tmp_path / "ran").encode())
    assert "pytorch_model.bin is a pickle" in refused(copy)
    assert not (tmp_path / "ran").exists()


def test_a_tensor_too_many_or_of_another_shape_is_refused(copy):
    changed(copy / CONFIG, lambda config: config.update(num_hidden_layers=2))
    assert "for which this model has no place" in refused(copy)
    changed(copy / CONFIG, lambda config: config.update(num_hidden_layers=3, intermediate_size=25))
    assert "[24, 16]; this model's is [25, 16]" in refused(copy)


@pytest.mark.parametrize(
    "change, says",
    [
        ({"model_type": "lama"}, "'lama' is no family of ours"),
        ({"hidden_act": "xielu"}, "'xielu' is not computed here"),
        ({"attention_bias": True}, "attention_bias True is not computed here"),
        (
            {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}},
            "rope_type 'longrope' is not computed here",
        ),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"hidden_size": "big"}, "hidden_size is 'big'; it must be a whole number"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; it must be at most 65536"),
        ({"num_key_value_heads": [1]}, "num_key_value_heads is [1]; it must be a whole number"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps is 'x'; it must be a number"),
        ({"rms_norm_eps": 0}, "norm_eps is 0.0; it must be above 0"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps is inf"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1; it must be true or false"),
        ({"hidden_act": []}, "hidden_act is []; it must be a text"),
        ({"layer_types": [1]}, "layer_types is [1]; it must be a list of texts"),
        ({"rope_parameters": "x"}, "rope_parameters is 'x'; it must be a mapping"),
        ({"rope_parameters": {"full_attention": 1}}, "full_attention is 1; it must be a mapping"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "factor is not there"),
        ({"rope_parameters": {"rope_theta": "x"}}, "rope_theta is 'x'; it must be a number"),
        ({"model_type": "gemma3"}, "'gemma3' has a vision tower, which is not computed here"),
        (
            {"model_type": "gemma3_text", "layer_types": ["full_attention", "full_attention", "sliding_attention"]},
            r"layer_types ['full_attention', 'full_attention', 'sliding_attention'] is not computed here",
        ),
        (
            {"model_type": "gemma3_text", "attn_logit_softcapping": 50.0},
            "attn_logit_softcapping 50.0 is not computed here",
        ),
        (
            {"model_type": "gemma2", "use_bidirectional_attention": True},
            "use_bidirectional_attention True is not computed here",
        ),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(copy, change, says):
    changed(copy / CONFIG, lambda config: config.update(change))
    assert says in refused(copy)


def test_both_schemas_of_rope_are_read_alike(copy):
    new = model_section(read_json(copy / CONFIG), CONFIG)

    def older(config):
        rope = config.pop("rope_parameters")
        config["rope_theta"] = rope.pop("rope_theta")
        config["rope_scaling"] = rope

    changed(copy / CONFIG, older)
    assert model_section(read_json(copy / CONFIG), CONFIG) == new
    assert new["rope_scaling"] == "llama3" and new["rope_theta"] == 500000.0


def test_both_schemas_of_the_two_ropes_of_gemma_3_are_read_alike():
    now = read_json(GOLDEN / "gemma3" / CONFIG)
    before = {key: value for key, value in now.items() if key not in ("rope_parameters", "layer_types")}
    before |= {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    found = model_section(before, CONFIG)
    assert found == model_section(now, CONFIG)
    assert (found["rope_theta"], found["rope_theta_local"], found["global_every"]) == (1e6, 1e4, 2)


def test_read_model_takes_their_directory_too():
    model = mt.read_model(GOLDEN / "qwen3", mesh=make_mesh(load({"mesh": {"tensor": 2}})))
    tokens = np.random.default_rng(0).integers(0, 45, (2, 48))
    np.testing.assert_allclose(model(tokens), np.load(GOLDEN / "qwen3" / "logits.npy"), atol=1e-4)
    assert model.weights["blocks.attention.q_norm.scale"].shape == (3, 8)


def test_what_is_read_in_pieces_is_the_same(monkeypatch):
    config = replaced(config_of(GOLDEN / "qwen3"), mesh={"tensor": 2}, model={"layers": 1})
    layout, files = mt.Program(config).layout, Files(GOLDEN / "qwen3")
    whole = loading.load(layout, files)
    monkeypatch.setattr(loading, "PIECE", 400)
    pieces = loading.load(layout, files)
    assert all(
        (np.asarray(a) == np.asarray(b)).all() for a, b in zip(*map(jax.tree.leaves, (whole, pieces)), strict=True)
    )


def rewritten(directory, name, change):
    """A tensor of the directory as `change` has it, in a file of its own."""
    array = change(Files(directory).whole(name) if name in Files(directory).names else None)
    save_file({name: array}, directory / "changed.safetensors")
    changed(directory / INDEX, lambda index: index["weight_map"].update({name: "changed.safetensors"}))


def test_whole_numbers_are_no_weights(copy):
    rewritten(copy, "model.norm.weight", lambda array: array.astype(np.int64))
    assert "model.norm.weight in" in refused(copy) and "is I64; it must be one of F64, F32, F16, BF16" in refused(copy)


def test_a_head_that_is_not_the_embedding_it_is_tied_to_is_refused(tmp_path):
    copy = Path(shutil.copytree(GOLDEN / "qwen2", tmp_path / "model"))
    embedding = Files(copy).whole("model.embed_tokens.weight")
    rewritten(copy, "lm_head.weight", lambda _: embedding)
    loading.check(config_of(copy).model, Files(copy))
    embedding[-1, -1] += 1
    rewritten(copy, "lm_head.weight", lambda _: embedding)
    assert "that is not model.embed_tokens.weight, but its config.json ties the two" in refused(copy)
