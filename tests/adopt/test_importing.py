"""A directory of Hugging Face's as a checkpoint that every command takes."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("safetensors")

from golden import GOLDEN
from safetensors.numpy import save_file

import meshtrain as mt
from meshtrain.adopt.__main__ import main
from meshtrain.checkpoint.__main__ import main as checkpoint
from meshtrain.config import load
from meshtrain.hf.hf_directory import TensorFiles
from meshtrain.hf.loading import layer_source
from meshtrain.hf_families import CONFIG
from meshtrain.model.weights import weights

pytestmark = pytest.mark.usefixtures("shared_programs")

TOKENIZER = '{"model": {"vocab": {"a": 0, "b": 44}}}'


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """qwen3 as a checkpoint, its tokenizer beside it; what it was made of is gone."""
    root = tmp_path_factory.mktemp("imported")
    shutil.copytree(GOLDEN / "qwen3", root / "hf")
    (root / "hf" / "tokenizer.json").write_text(TOKENIZER)
    (root / "hf" / "tokenizer_config.json").write_text("{}")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        assert (
            main(
                [
                    "import",
                    "hf",
                    "out",
                    "--set",
                    "mesh.pipeline=2",
                    "--set",
                    "mesh.tensor=2",
                ]
            )
            == 0
        )
    shutil.rmtree(root / "hf")
    assert [path.name for path in root.iterdir()] == ["out"]
    return root / "out"


@pytest.mark.thorough
def test_it_is_an_intact_checkpoint_of_step_0_with_their_logits(out, capsys):
    assert checkpoint(["verify", str(out)]) == 0 and checkpoint(["ls", str(out)]) == 0
    assert capsys.readouterr().out.count("\n") == 3
    model, tokens = (
        mt.read_model(out),
        np.random.default_rng(0).integers(0, 45, (2, 48)),
    )
    np.testing.assert_allclose(
        model(tokens), np.load(GOLDEN / "qwen3" / "logits.npy"), atol=1e-4
    )
    assert model.step == 0


@pytest.mark.thorough
@pytest.mark.parametrize("weights_only", [True, False])
def test_a_run_begins_with_it_at_step_0_and_with_a_fresh_state(
    out, tmp_path, weights_only
):
    section = {
        k: v
        for k, v in dataclasses.asdict(load(out / "config.yaml").model).items()
        if v is not None
    }
    config = load(
        {
            "run": {"directory": str(tmp_path)},
            "model": section,
            "mesh": {"data": 2, "pipeline": 2},
            "data": {"source": "synthetic", "tokenizer": "byte"},
            "train": {"global_batch_size": 4, "sequence_length": 16},
            "checkpoint": {"resume": str(out), "weights_only": weights_only},
        }
    )
    program = mt.Program(config)
    checkpointer = mt.Checkpointer(config, program, say=[].append)
    state, step = checkpointer.restore_or_init()
    checkpointer.close()
    read = layer_source(config.model, TensorFiles(GOLDEN / "qwen3"))
    found = dict(
        zip(
            (p.name for p in program.layout.flat),
            jax.tree.leaves(state.params),
            strict=True,
        )
    )
    for weight in weights(config.model):
        live = np.asarray(found[weight.name])
        if weight.stacked:
            live = live[program.layout.stacks["blocks"].places]
            theirs = np.stack([read(weight, layer) for layer in range(weight.layers)])
        else:
            theirs = read(weight, None)
        np.testing.assert_array_equal(
            live[tuple(slice(n) for n in weight.shape)], theirs
        )
    assert step == int(state.step) == 0
    assert not any(
        np.asarray(moment).any() for moment in jax.tree.leaves(state.optimizer)
    )


@pytest.mark.thorough
def test_what_it_came_with_goes_out_again(out, tmp_path):
    assert main(["export", str(out), str(tmp_path / "hf")]) == 0
    given, theirs = (
        json.loads((at / CONFIG).read_text())
        for at in (tmp_path / "hf", GOLDEN / "qwen3")
    )
    for key in (
        "bos_token_id",
        "eos_token_id",
        "max_position_embeddings",
        "rope_parameters",
        "tie_word_embeddings",
    ):
        assert given[key] == theirs[key], key
    assert (tmp_path / "hf" / "tokenizer.json").read_text() == TOKENIZER
    assert (tmp_path / "hf" / "tokenizer_config.json").exists()
    assert not (tmp_path / "hf" / "hf_config.json").exists()


def tensors(directory):
    """Their dtypes and bytes, by name."""
    files = TensorFiles(Path(directory))
    return {
        name: (files.dtype(name), files.tensor(name).tobytes()) for name in files.names
    }


@pytest.mark.thorough
def test_files_of_any_dtype_come_back_with_the_same_bytes(tmp_path, monkeypatch):
    """Of bfloat16, and of several; nothing else is made of them until they are trained."""
    read = TensorFiles(GOLDEN / "gpt2")
    kinds = {".bias": np.float32, "ln_f": np.float16}
    shutil.copytree(
        GOLDEN / "gpt2",
        tmp_path / "hf",
        ignore=shutil.ignore_patterns("*.safetensors*"),
    )
    cast = {
        name: read.tensor(name).astype(
            next((of for part, of in kinds.items() if part in name), ml_dtypes.bfloat16)
        )
        for name in read.names
    }
    save_file(cast, tmp_path / "hf" / "model.safetensors")
    monkeypatch.chdir(tmp_path)
    for words in (
        ["export", "hf", "direct"],
        ["import", "hf", "imported"],
        ["export", "imported", "again"],
    ):
        assert main(words) == 0
    assert tensors("hf") == tensors("direct") == tensors("again")
    assert {dtype for dtype, _ in tensors("again").values()} == {"BF16", "F16", "F32"}
