"""Files of DeepSeek-V3's class with layers that predict further tokens: there and back, and left out where not asked for."""

import jax
import numpy as np
import pytest

pytest.importorskip("safetensors")

from golden import GOLDEN, adopted

from meshtrain.adopt.exporting import export, live_source
from meshtrain.config import load
from meshtrain.errors import ConfigError
from meshtrain.hf import fp8, loading
from meshtrain.hf.hf_directory import INDEX, TensorFiles
from meshtrain.hf_families import CONFIG, model_section, read_json
from meshtrain.mesh import make_mesh
from meshtrain.step import Program

MODEL = {
    "family": "moonlight",
    "layers": 2,
    "dense_layers": 1,
    "d_model": 16,
    "heads": 2,
    "dense_d_ff": 24,
    "vocab_size": 40,
    "mla": {"kv_rank": 12, "nope": 6, "rope": 4, "value": 5},
    "moe": {
        "experts": 4,
        "top_k": 2,
        "d_ff": 8,
        "shared_experts": 1,
        "balance": "bias",
    },
    "mtp": 1,
}


def test_predictions_go_to_files_and_back_and_may_be_left_there(tmp_path):
    config = load({"model": MODEL, "train": {"sequence_length": 16}})
    program = Program(config, make_mesh(config))
    params = program.init().params
    export(config, live_source(program.layout, params), tmp_path / "out", "float32")
    files = TensorFiles(tmp_path / "out")
    assert files.shape("model.layers.2.eh_proj.weight") == (16, 32)
    assert files.shape("model.layers.2.mlp.experts.3.down_proj.weight") == (16, 8)
    assert files.shape("model.layers.0.mlp.gate_proj.weight") == (24, 16)
    assert files.shape("model.layers.1.mlp.shared_experts.gate_proj.weight") == (8, 16)
    assert files.shape("model.layers.1.self_attn.kv_b_proj.weight") == (2 * 11, 12)
    loading.check(config.model, files)
    again = loading.load(program.layout, files)
    jax.tree.map(np.testing.assert_array_equal, again, params)
    written = read_json(tmp_path / "out" / CONFIG)
    assert (written["model_type"], written["num_nextn_predict_layers"]) == (
        "deepseek_v3",
        1,
    )
    without = load(
        {"model": model_section(written, CONFIG), "train": {"sequence_length": 16}}
    )
    assert without.model.mtp == 0
    loading.check(without.model, files)


def test_files_in_float8_have_a_scale_for_each_block_and_are_read_again(tmp_path):
    """Two blocks each way, the second ones cut; what rounds to 8 bits is off by a 16th of itself at most."""
    wide = MODEL | {"d_model": 160, "mla": MODEL["mla"] | {"kv_rank": 140}}
    config = load({"model": wide, "train": {"sequence_length": 16}})
    program = Program(config, make_mesh(config))
    params = program.init().params
    export(
        config,
        live_source(program.layout, params),
        tmp_path / "out",
        "float8",
        part=10**5,
    )
    fields = read_json(tmp_path / "out" / CONFIG)
    assert fields["quantization_config"]["weight_block_size"] == [128, 128]
    assert fields["dtype"] == "bfloat16"
    files = TensorFiles(tmp_path / "out")
    scaled = [
        name.removeprefix("model.layers.").removesuffix(fp8.SCALES)
        for name in read_json(tmp_path / "out" / INDEX)["weight_map"]
        if name.endswith(fp8.SCALES)
    ]
    assert {"0.mlp.up_proj.weight", "1.mlp.experts.3.down_proj.weight"} < set(scaled)
    assert not {"1.mlp.gate.weight", "2.eh_proj.weight"} & set(scaled)
    scales = files.tensor(f"model.layers.1.self_attn.kv_b_proj.weight{fp8.SCALES}")
    assert scales.shape == (1, 2) and scales.dtype == np.float32
    again = load(
        {
            "model": model_section(fields, CONFIG) | {"mtp": 1},
            "train": {"sequence_length": 16},
        }
    )
    loading.check(again.model, files)
    read = loading.load(Program(again, make_mesh(again)).layout, files)
    # a number far below its block's largest has fewer bits
    for mine, wanted in zip(
        jax.tree.leaves(read), jax.tree.leaves(params), strict=True
    ):
        np.testing.assert_allclose(mine, wanted, rtol=1 / 16, atol=1e-5)


def test_other_classes_have_no_files_in_float8(tmp_path):
    config = load(
        {
            "model": {
                "layers": 1,
                "d_model": 16,
                "heads": 2,
                "d_ff": 24,
                "vocab_size": 40,
            }
        }
    )
    with pytest.raises(ConfigError, match=r"model\.family llama"):
        export(config, None, tmp_path / "out", "float8")


def apart(directory, expected, tokens):
    """Returns the largest difference of logits, in shares of the largest logit."""
    program, files = adopted(directory)
    params = loading.load(program.layout, files)
    found = program.logits(params, jax.device_put(tokens, program.batch_sharding))
    return np.abs(found - expected).max() / np.abs(expected).max()


TOKENS = np.random.default_rng(0).integers(0, 45, (2, 48)).astype(np.int32)


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_logits_are_those_of_transformers(family):
    assert (
        apart(GOLDEN / family, np.load(GOLDEN / family / "logits.npy"), TOKENS) < 2e-5
    )


@pytest.mark.thorough
def test_plain_queries_and_one_group_as_moonlight_has_them_give_transformers_logits(
    tmp_path,
):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = read_json(GOLDEN / "deepseek_v3" / CONFIG)
    sizes |= {
        "q_lora_rank": None,
        "n_group": 1,
        "topk_group": 1,
        "rope_parameters": None,
    }
    model = transformers.DeepseekV3ForCausalLM(
        transformers.DeepseekV3Config(**sizes)
    ).eval()
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = model(torch.from_numpy(TOKENS).long()).logits.numpy()
    assert apart(tmp_path, expected, TOKENS) < 2e-5
