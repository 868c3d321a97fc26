"""Files of DeepSeek-V3's class with layers that predict further tokens: there and back, and left out where not asked for."""

import jax
import numpy as np
import pytest

pytest.importorskip("safetensors")

from meshtrain.adopt.exporting import export, live_source
from meshtrain.config import load
from meshtrain.hf import loading
from meshtrain.hf.hf_directory import TensorFiles
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
    "moe": {"experts": 4, "top_k": 2, "d_ff": 8, "shared_experts": 1, "balance": "bias"},
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
    assert (written["model_type"], written["num_nextn_predict_layers"]) == ("deepseek_v3", 1)
    without = load({"model": model_section(written, CONFIG), "train": {"sequence_length": 16}})
    assert without.model.mtp == 0
    loading.check(without.model, files)
