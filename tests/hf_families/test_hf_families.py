"""A mix of options that no class of transformers computes is refused by name, before anything is written."""

from dataclasses import replace

import pytest

from meshtrain.config import load
from meshtrain.errors import ConfigError
from meshtrain.families import FAMILIES, LLAMA
from meshtrain.hf_families import HF_FAMILIES, config_json, model_section


def model(**keys):
    return load({"model": {"layers": 2, "d_model": 32, "heads": 4, **keys}}).model


@pytest.mark.parametrize(
    "keys, says",
    [
        (
            {"family": "llama", "qkv_bias": True},
            "qkv_bias true; train it as model.family qwen2 to export it",
        ),
        (
            {"family": "llama", "window": 8},
            "window 8; train it as model.family mistral",
        ),
        (
            {"family": "mistral", "qk_norm": True},
            "qk_norm true; train it as model.family qwen3",
        ),
        ({"family": "qwen3", "qkv_bias": True}, r"cannot hold model\.qkv_bias true\.$"),
        ({"family": "gpt2", "window": 8}, r"window 8\.$"),
        ({"family": "gpt2", "kv_heads": 2}, "kv_heads 2 beside model.heads 4"),
        ({"family": "gpt2", "head_dim": 16}, "head_dim 16 with 4 heads"),
        ({"family": "gpt2", "qkv_bias": False}, "qkv_bias false"),
        ({"family": "gemma2", "rope_theta_local": 1e4}, "rope_theta_local 10000"),
        ({"family": "gemma3", "score_cap": 5.0}, r"score_cap 5\.$"),
        ({"family": "gemma3", "window": 0}, "window 0"),
        ({"family": "gemma3", "norm_plus_one": False}, "norm_plus_one false"),
        ({"family": "llama", "post_norms": True}, "post_norms true"),
        ({"family": "qwen3", "query_scalar": 3}, "query_scalar 3"),
        ({"family": "mistral", "window": 8, "global_every": 2}, "global_every 2"),
        (
            {"family": "llama", "moe": {"experts": 4}},
            r"moe\.experts 4; train it as model\.family mixtral",
        ),
        (
            {"family": "mixtral", "moe": {"experts": 0}},
            r"moe\.experts 0; train it as model\.family llama",
        ),
        (
            {"family": "mixtral", "moe": {"normalize": False}},
            r"moe\.normalize False\.$",
        ),
        (
            {"family": "qwen3_moe", "moe": {"router": "sigmoid"}},
            r"moe\.router sigmoid\.$",
        ),
        (
            {"family": "qwen3_moe", "moe": {"shared_experts": 1}},
            r"moe\.shared_experts 1\.$",
        ),
        ({"family": "olmoe", "moe": {"route_scale": 2.5}}, r"moe\.route_scale 2\.5\.$"),
        ({"family": "olmoe", "head_dim": 16}, "head_dim 16 with 4 heads"),
        ({"family": "gpt_oss", "activation": "silu"}, r"activation silu\.$"),
        (
            {"family": "gpt_oss", "moe": {"router": "softmax"}},
            r"moe\.router softmax\.$",
        ),
        ({"family": "gpt_oss", "window": 0}, r"window 0\.$"),
    ],
)
def test_what_a_class_cannot_hold_is_refused_with_the_way_out(keys, says):
    with pytest.raises(ConfigError, match=says):
        config_json(vars(model(**keys)), 64, "float32")


@pytest.mark.parametrize(
    "family", [name for name in HF_FAMILIES if not FAMILIES[name].images]
)
@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"activation": "relu", "tied_head": True},
        {"activation": "gelu_exact", "tied_head": False},
    ],
)
def test_what_it_can_hold_is_read_again_as_it_was(family, keys):
    # gpt-oss's class has one function, and no field for it
    keys = {
        key: value
        for key, value in keys.items()
        if key != "activation" or not HF_FAMILIES[family].activation
    }
    width = {"moe": {"d_ff": 24}} if FAMILIES[family].experts else {}
    if HF_FAMILIES[family].dense_first:
        width["moe"]["balance"] = "bias"
    if HF_FAMILIES[family].latent:
        width["moe"] |= {"balance": "bias", "groups": [8, 4], "shared_experts": 1}
        width["mla"] = {"q_rank": 8, "kv_rank": 12, "nope": 6, "rope": 4, "value": 5}
        width |= {"rope_scaling": "yarn", "rope_factor": 4.0, "rope_original": 32}
    if HF_FAMILIES[family].dense_first:
        width["moe"] |= {"balance": "bias", "shared_experts": 1}
        width |= {"dense_layers": 1, "dense_d_ff": 40}
    given = model(family=family, **keys, **width)
    found = load(
        {"model": model_section(config_json(vars(given), 256, "float32"), "x")}
    ).model
    if HF_FAMILIES[family].latent:
        # Moonlight's files say that they are DeepSeek's; 1 is what cos and sin grow by
        assert found.query_scalar == pytest.approx(given.query_scalar, rel=1e-6)
        assert found.rope_amplitude == pytest.approx(1.0, rel=1e-6)
        same = {
            "query_scalar": given.query_scalar,
            "rope_amplitude": 0.0,
            "family": family,
        }
        found = replace(found, **same)
    assert found == given


def test_gemmas_function_has_the_name_that_other_readers_take():
    found = config_json(vars(model(family="gemma2")), 64, "float32")
    assert found["hidden_act"] == found["hidden_activation"] == "gelu_pytorch_tanh"


def test_a_family_from_outside_is_none_of_theirs():
    FAMILIES.register(replace(LLAMA, name="mine"))
    try:
        with pytest.raises(
            ConfigError, match=r"model\.family mine is not a family of transformers"
        ):
            config_json(vars(model(family="mine")), 64, "float32")
    finally:
        FAMILIES.forget("mine")


@pytest.mark.parametrize(("scaling", "original"), [("linear", False), ("yarn", True)])
def test_positions_that_are_only_stretched_need_no_length_of_before(scaling, original):
    given = model(
        rope_scaling=scaling,
        rope_factor=4.0,
        **({"rope_original": 32} if original else {}),
    )
    written = config_json(vars(given), 64, "float32")
    assert ("rope_original" in model_section(written, "config.json")) == original
