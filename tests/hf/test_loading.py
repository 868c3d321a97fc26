"""Weights of transformers on every mesh: their logits, box by box."""

import json
import re
import shutil
from itertools import cycle
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from refusals import tells

pytest.importorskip("safetensors")

from covering import thorough_but
from golden import FAMILIES, GOLDEN, MESHES, adopted
from safetensors.numpy import save_file

import meshtrain as mt
from meshtrain.config import load
from meshtrain.config.follow import replaced
from meshtrain.errors import ConfigError
from meshtrain.hf import loading
from meshtrain.hf.hf_directory import INDEX, TensorFiles, config_of
from meshtrain.hf_families import CONFIG, model_section, read_json
from meshtrain.mesh import make_mesh

NOW = [(family, "one") for family in FAMILIES]
QUICK = {(family, "one") for family in ("gpt2", "gemma3", "qwen3", "olmoe")}
# Where each weight lies on which mesh is asked bit by bit in tests/adopt/test_exporting.py.
LATER = [
    *((family, "2x2x2") for family in ("gemma3", "mixtral", "olmoe", "gpt_oss")),
    *zip(FAMILIES, cycle(mesh for mesh in MESHES if mesh != "one"), strict=False),
]


@pytest.mark.parametrize(
    "case",
    thorough_but(dict.fromkeys(NOW + LATER), QUICK.__contains__, [*NOW, *LATER[:4]]),
    ids=str,
)
def test_logits_are_those_of_transformers(case):
    family, mesh = case
    program, files = adopted(GOLDEN / family, mesh)
    loading.check(program.config.model, files)
    params = loading.load(program.layout, files)
    tokens = np.random.default_rng(0).integers(0, 45, (2, 48)).astype(np.int32)
    rows = np.resize(tokens, (max(2, program.config.mesh.data), 48))
    logits = program.logits(params, jax.device_put(rows, program.batch_sharding))[:2]
    np.testing.assert_allclose(
        logits, np.load(GOLDEN / family / "logits.npy"), atol=1e-4
    )


@pytest.mark.thorough
@pytest.mark.parametrize("family", FAMILIES)
def test_the_likeliest_text_is_that_of_transformers(family):
    program, files = adopted(GOLDEN / family)
    params = loading.load(program.layout, files)
    tokens = np.zeros((2, 48), np.int32)
    tokens[:, :16] = np.random.default_rng(0).integers(0, 45, (2, 48))[:, :16]
    for at in range(16, 28):
        tokens[:, at] = np.argmax(program.logits(params, tokens)[:, at - 1], axis=-1)
    np.testing.assert_array_equal(
        tokens[:, 16:28], np.load(GOLDEN / family / "generated.npy")
    )


@pytest.fixture
def copy(tmp_path):
    return Path(shutil.copytree(GOLDEN / "llama3", tmp_path / "model"))


def changed(path: Path, change) -> None:
    found = json.loads(path.read_text())
    change(found)
    path.write_text(json.dumps(found))


def refused(directory: Path) -> str:
    with pytest.raises(ConfigError) as error:
        loading.check(config_of(directory).model, TensorFiles(directory))
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("name", "file", "says"),
    [
        ("model.norm.weight", "../model.safetensors", "is not a file of its directory"),
        (
            "model.norm.weight",
            "other.safetensors",
            "other.safetensors, which is not there",
        ),
        ("model.norm.weight", "x" * 5000, "x" * 60 + ", which is not there"),
        (
            "more",
            "model-00001-of-00004.safetensors",
            "model-00001-of-00004.safetensors, but it is not in there",
        ),
    ],
)
def test_an_index_that_names_what_is_not_in_its_directory_is_refused(
    copy, name, file, says
):
    changed(copy / INDEX, lambda index: index["weight_map"].update({name: file}))
    assert tells(refused(copy), says)


def test_a_truncated_file_is_refused(copy):
    file = sorted(copy.glob("*.safetensors"))[0]
    file.write_bytes(file.read_bytes()[:-10])
    assert f"{file.name} is not a complete safetensors file" in refused(copy)


def test_a_pickle_is_not_opened(copy, tmp_path):
    for file in copy.glob("*.safetensors*"):
        file.unlink()
    (copy / "pytorch_model.bin").write_bytes(
        b"cos\nsystem\n(S'touch %s'\ntR." % str(tmp_path / "ran").encode()
    )
    assert "pytorch_model.bin is a pickle" in refused(copy)
    assert not (tmp_path / "ran").exists()


def test_a_tensor_too_many_or_of_another_shape_is_refused(copy):
    changed(copy / CONFIG, lambda config: config.update(num_hidden_layers=2))
    assert "for which this model has no place" in refused(copy)
    changed(
        copy / CONFIG,
        lambda config: config.update(num_hidden_layers=3, intermediate_size=25),
    )
    assert "[24, 16]; this model's is [25, 16]" in refused(copy)


SLIDING, FULL = "sliding_attention", "full_attention"
KINDS = (
    "there are llama, mistral, qwen2, qwen3, mixtral, qwen3_moe, olmoe, deepseek_v3, glm4_moe, gpt_oss, qwen3_next, "
    "qwen3_5_text, qwen3_5_moe_text, gpt2, gemma2, gemma3_text, vit, kimi_k2"
)


@pytest.mark.parametrize(
    "change, says",
    [
        # whoever changed it as a hint tells would have another model
        *(
            ({"model_type": kind}, f"'{kind}' is not a known family; {KINDS}.")
            for kind in ("lama", "smollm3", "gptoss", "qwen2_moe")
        ),
        ({"attention_dropout": 0.1}, "attention_dropout 0.1"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0}},
            "'yarn' in rope_scaling ... 'llama3' in rope_parameters",
        ),
        ({"hidden_act": "xielu"}, "'xielu'"),
        ({"attention_bias": True}, "attention_bias True"),
        (
            {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}},
            "rope_type 'longrope'",
        ),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"hidden_size": "big"}, "hidden_size is 'big' ... whole number"),
        (
            {"num_hidden_layers": 10**9},
            "num_hidden_layers is 1000000000 ... at most 65536",
        ),
        ({"num_key_value_heads": [1]}, "num_key_value_heads is [1] ... whole number"),
        ({"num_key_value_heads": 3}, "model.kv_heads 3"),
        ({"head_dim": -4}, "head_dim is -4"),
        ({"head_dim": "4"}, "head_dim is '4'"),
        ({"mlp_bias": True}, "mlp_bias True"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps is -1.0"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps is 'x' ... number"),
        ({"rms_norm_eps": 0}, "norm_eps is 0.0 ... above 0"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps is inf"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1 ... true or false"),
        ({"hidden_act": []}, "hidden_act is [] ... text"),
        ({"layer_types": [1]}, "layer_types is [1] ... list of texts"),
        ({"rope_parameters": "x"}, "rope_parameters is 'x' ... mapping"),
        ({"rope_parameters": {"full_attention": 1}}, "full_attention is 1 ... mapping"),
        (
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}},
            "factor is not there",
        ),
        ({"rope_parameters": {"rope_theta": "x"}}, "rope_theta is 'x' ... number"),
        (
            {"model_type": "mixtral"},
            "num_local_experts is None ... whole number above 0",
        ),
        (
            {"model_type": "qwen3_moe", "decoder_sparse_step": 2},
            "decoder_sparse_step 2",
        ),
        (
            {"model_type": "qwen3_moe", "mlp_only_layers": [0]},
            "mlp_only_layers [0]",
        ),
        ({"model_type": "olmoe", "clip_qkv": 8.0}, "clip_qkv 8.0"),
        (
            {"model_type": "olmoe", "norm_topk_prob": 1},
            "norm_topk_prob is 1 ... true or false",
        ),
        ({"model_type": "gpt_oss"}, "attention_bias False"),
        (
            {"model_type": "gpt_oss", "attention_bias": True, "swiglu_limit": 5.0},
            "swiglu_limit 5.0",
        ),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config"),
        ({"model_type": "gemma3"}, "'gemma3' has a vision tower, which"),
        (
            {"model_type": "gemma3_text", "layer_types": [FULL, FULL, SLIDING]},
            f"layer_types {[FULL, FULL, SLIDING]}",
        ),
        (
            {"model_type": "gemma3_text", "attn_logit_softcapping": 50.0},
            "attn_logit_softcapping 50.0",
        ),
        (
            {"model_type": "gemma2", "use_bidirectional_attention": True},
            "use_bidirectional_attention True",
        ),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(copy, change, says):
    changed(copy / CONFIG, lambda config: config.update(change))
    assert tells(refused(copy), says)


SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size")


@pytest.mark.parametrize("key", [*SIZES, "vocab_size", "model_type"])
def test_a_size_that_is_left_out_or_is_none_is_refused_by_name(copy, key):
    right = (copy / CONFIG).read_text()
    changed(copy / CONFIG, lambda config: config.pop(key))
    assert key in refused(copy)
    for odd in (0, -1, "16", 16.5, True, [16]):
        (copy / CONFIG).write_text(right)
        changed(copy / CONFIG, lambda config, odd=odd: config.update({key: odd}))
        assert key in refused(copy) or "model." in refused(copy)


def four_bits(code: int) -> float:
    """E2M1 of the Microscaling Formats: a sign, two bits of exponent, one of mantissa."""
    exponent, mantissa = code >> 1 & 3, code & 1
    return (-1) ** (code >> 3) * (
        (1 + mantissa / 2) * 2.0 ** (exponent - 1) if exponent else mantissa / 2
    )


def test_mxfp4_is_read_as_the_numbers_it_stands_for(tmp_path):
    draw = np.random.default_rng(0)
    blocks, scales = (
        draw.integers(0, 256, (2, 6, 3, 16), np.uint8),
        draw.integers(90, 160, (2, 6, 3), np.uint8),
    )
    plain = np.ones((2, 3), np.float32)
    tensors = {
        "w_blocks": blocks,
        "w_scales": scales,
        "w_bias": plain,
        "other_blocks": plain,
    }
    save_file(tensors, tmp_path / "model.safetensors")
    right = np.zeros((2, 96, 6))
    for e, row, block, byte in np.ndindex(blocks.shape):
        for half in range(2):
            number = four_bits(int(blocks[e, row, block, byte]) >> 4 * half & 15)
            right[e, 32 * block + 2 * byte + half, row] = number * 2.0 ** (
                int(scales[e, row, block]) - 127
            )
    files = TensorFiles(tmp_path)
    assert sorted(files.names) == ["other_blocks", "w", "w_bias"]
    assert files.shape("w") == right.shape and files.dtype("w") == "BF16"
    for box in (np.s_[0:2, 0:96, 0:6], np.s_[1:2, 31:65, 2:3], np.s_[0:1, 64:96, 0:6]):
        np.testing.assert_array_equal(files.read("w", box), right[box])
    np.testing.assert_array_equal(right.astype(ml_dtypes.bfloat16), right)


def test_of_gpt_oss_mxfp4_is_no_quantization_that_is_refused():
    given = read_json(GOLDEN / "gpt_oss" / CONFIG)
    packed = given | {"quantization_config": {"quant_method": "mxfp4"}}
    assert model_section(packed, CONFIG) == model_section(given, CONFIG)
    with pytest.raises(ConfigError, match="quantization_config"):
        model_section(given | {"quantization_config": {"quant_method": "fp8"}}, CONFIG)


SMALL = {
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 32,
    "intermediate_size": 8,
    "vocab_size": 9,
}


@pytest.mark.parametrize(
    "kind, keys, window",
    [
        *(
            (kind, {"use_sliding_window": True, "sliding_window": 16} | keys, window)
            for kind in ("qwen2", "qwen3")
            for keys, window in (
                # a layer slides from max_window_layers on, which is 28 where it is left out
                ({}, 0),
                ({"max_window_layers": 4}, 0),
                ({"max_window_layers": 5}, 0),
                ({"max_window_layers": 0}, 16),
                ({"layer_types": [FULL] * 4}, 0),
                ({"layer_types": [SLIDING] * 4}, 16),
                ({"use_sliding_window": False}, 0),
                ({"max_window_layers": 1}, None),
                ({"layer_types": [FULL, SLIDING] * 2}, None),
            )
        ),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 0}, 4096),
        ("mistral", {}, 4096),
        ("mistral", {"sliding_window": None}, 0),
        ("mistral", {"layer_types": [FULL] * 4}, None),
        ("llama", {"sliding_window": 16}, 0),
    ],
)
def test_the_window_is_that_of_transformers_or_refused_where_layers_differ(
    kind, keys, window
):
    given = SMALL | {"model_type": kind} | keys
    if window is None:
        with pytest.raises(
            ConfigError,
            match=r"of some layers alone \(\w+.*\)",
        ):
            model_section(given, CONFIG)
    else:
        assert model_section(given, CONFIG)["window"] == window


@pytest.mark.parametrize(
    "kind, section",
    [
        # as transformers 5.23 has them
        (
            "llama",
            {
                "kv_heads": 32,
                "head_dim": None,
                "rope_theta": 1e4,
                "norm_eps": 1e-6,
                "tied_head": False,
                "activation": "silu",
            },
        ),
        (
            "mistral",
            {"kv_heads": 8, "head_dim": None, "rope_theta": 1e4, "tied_head": False},
        ),
        (
            "qwen2",
            {"kv_heads": 32, "head_dim": None, "rope_theta": 1e4, "tied_head": False},
        ),
        (
            "qwen3",
            {"kv_heads": 32, "head_dim": 128, "rope_theta": 1e4, "tied_head": False},
        ),
        (
            "gemma2",
            {
                "head_dim": 256,
                "rope_theta": 1e4,
                "tied_head": True,
                "window": 4096,
                "score_cap": 50.0,
                "logit_cap": 30.0,
            },
        ),
        (
            "gemma3_text",
            {
                "head_dim": 256,
                "rope_theta": 1e6,
                "rope_theta_local": 1e4,
                "global_every": 6,
                "score_cap": 0.0,
                "query_scalar": 256,
            },
        ),
        (
            "gpt2",
            {
                "dropout": 0.1,
                "d_ff": 128,
                "norm_eps": 1e-5,
                "tied_head": True,
                "activation": "gelu",
            },
        ),
        (
            "vit",
            {
                "dropout": 0.0,
                "norm_eps": 1e-12,
                "image_size": 224,
                "patch_size": 16,
                "vocab_size": 2,
                "activation": "gelu_exact",
            },
        ),
    ],
)
def test_what_a_file_leaves_out_is_as_its_class_has_it(kind, section):
    given = (
        {"n_layer": 4, "n_embd": 32, "n_head": 4, "n_positions": 8}
        if kind == "gpt2"
        else {}
    )
    given |= {"num_key_value_heads": 4} if kind.startswith("gemma") else {}
    found = model_section(SMALL | given | {"model_type": kind}, CONFIG)
    assert {key: found.get(key) for key in section} == section


def test_dropout_is_theirs_and_a_config_may_say_otherwise(tmp_path):
    copy = Path(shutil.copytree(GOLDEN / "gpt2", tmp_path / "model"))
    assert config_of(copy).model.dropout == 0.1
    assert (
        load(
            {
                "model": {"weights": str(copy), "dropout": 0.0},
                "train": {"sequence_length": 16},
            }
        ).model.dropout
        == 0
    )
    changed(copy / CONFIG, lambda config: config.update(attn_pdrop=0.0))
    assert (
        "resid_pdrop 0.1, embd_pdrop 0.1, attn_pdrop 0.0: here all are dropped with one probability"
        in refused(copy)
    )


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
    before = {
        key: value
        for key, value in now.items()
        if key not in ("rope_parameters", "layer_types")
    }
    before |= {
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    found = model_section(before, CONFIG)
    assert found == model_section(now, CONFIG)
    assert (found["rope_theta"], found["rope_theta_local"], found["global_every"]) == (
        1e6,
        1e4,
        2,
    )


@pytest.mark.thorough
def test_read_model_takes_their_directory_too():
    model = mt.read_model(
        GOLDEN / "qwen3", mesh=make_mesh(load({"mesh": {"tensor": 2}}))
    )
    tokens = np.random.default_rng(0).integers(0, 45, (2, 48))
    np.testing.assert_allclose(
        model(tokens), np.load(GOLDEN / "qwen3" / "logits.npy"), atol=1e-4
    )
    assert model.weights["blocks.attention.q_norm.scale"].shape == (3, 8)


@pytest.mark.thorough
def test_what_is_read_in_pieces_is_the_same(monkeypatch):
    config = replaced(
        config_of(GOLDEN / "qwen3"), mesh={"tensor": 2}, model={"layers": 1}
    )
    layout, files = mt.Program(config).layout, TensorFiles(GOLDEN / "qwen3")
    whole = loading.load(layout, files)
    monkeypatch.setattr(loading, "PIECE", 400)
    pieces = loading.load(layout, files)
    for one, other in zip(*map(jax.tree.leaves, (whole, pieces)), strict=True):
        np.testing.assert_array_equal(one, other)


def rewritten(directory, name, change):
    """A tensor of the directory as `change` has it, in a file of its own."""
    array = change(
        TensorFiles(directory).tensor(name)
        if name in TensorFiles(directory).names
        else None
    )
    save_file({name: array}, directory / "changed.safetensors")
    changed(
        directory / INDEX,
        lambda index: index["weight_map"].update({name: "changed.safetensors"}),
    )


def test_whole_numbers_are_no_weights(copy):
    rewritten(copy, "model.norm.weight", lambda array: array.astype(np.int64))
    assert re.search(
        r"model\.norm\.weight in .*is I64.*F64, F32, F16, BF16", refused(copy)
    )


def test_a_head_that_is_not_the_embedding_it_is_tied_to_is_refused(tmp_path):
    copy = Path(shutil.copytree(GOLDEN / "qwen2", tmp_path / "model"))
    embedding = TensorFiles(copy).tensor("model.embed_tokens.weight")
    rewritten(copy, "lm_head.weight", lambda _: embedding)
    loading.check(config_of(copy).model, TensorFiles(copy))
    embedding[-1, -1] += 1
    rewritten(copy, "lm_head.weight", lambda _: embedding)
    assert "model.embed_tokens.weight, but its config.json ties" in refused(copy)


@pytest.mark.parametrize("number", [np.nan, np.inf])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_weights_that_are_no_numbers_are_refused(
    copy, number, dtype, monkeypatch, caplog
):
    caplog.set_level("INFO")
    loading.check_finite(TensorFiles(copy))
    assert caplog.text == ""
    monkeypatch.setattr(loading, "LOG_EVERY", -1.0)
    loading.check_finite(TensorFiles(copy))
    shares = [
        int(share)
        for share in re.findall(
            r"(\d+)% of the weights in .* are looked through", caplog.text
        )
    ]
    assert shares == sorted(shares) and shares[0] < 100 == shares[-1]

    def broken(array):
        array[-1, -1] = number
        return array.astype(dtype)

    rewritten(copy, "model.layers.1.mlp.up_proj.weight", broken)
    with pytest.raises(
        ConfigError, match=r"^model\.layers\.1\.mlp\.up_proj\.weight in .*NaN"
    ):
        loading.check_finite(TensorFiles(copy))
