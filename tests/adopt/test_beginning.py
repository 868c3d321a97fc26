"""A run that begins with weights of Hugging Face: model.weights."""

import json
import shutil

import numpy as np
import pytest

pytest.importorskip("safetensors")

from golden import GOLDEN

import meshtrain as mt
from meshtrain.adopt.exporting import export, live_source
from meshtrain.config import ConfigError, load, to_yaml


def config(weights, directory="runs/x", **sections):
    return {
        "run": {"directory": str(directory)},
        "model": {"weights": str(weights), **sections.pop("model", {})},
        "data": {"source": "synthetic"},
        "train": {"steps": 2, "global_batch_size": 4, "sequence_length": 16},
        "optimizer": {"learning_rate": 1e-4},
        **sections,
    }


def losses(directory):
    return [
        json.loads(line)["loss"]
        for line in (directory / "metrics.jsonl").read_text().splitlines()
    ]


def test_the_section_model_is_theirs():
    found = load(config(GOLDEN / "qwen3")).model
    assert (
        found.family,
        found.layers,
        found.head_dim,
        found.qk_norm,
        found.vocab_size,
    ) == (
        "qwen3",
        3,
        8,
        True,
        45,
    )


def test_a_key_may_say_the_same_or_what_they_do_not_and_nothing_else():
    assert (
        load(
            config(GOLDEN / "qwen3", model={"layers": 3, "dropout": 0.1})
        ).model.dropout
        == 0.1
    )
    with pytest.raises(ConfigError, match=r"model\.layers is 8, .*qwen3 has 3"):
        load(config(GOLDEN / "qwen3", model={"layers": 8}))
    with pytest.raises(ConfigError, match=r"model\.heads is 2, but"):
        load(config(GOLDEN / "qwen3"), ["model.heads=2"])


def test_of_another_config_only_what_was_changed_counts_as_given():
    assert (
        load(
            load({}), [f"model.weights={GOLDEN / 'gpt2'}", "train.sequence_length=16"]
        ).model.family
        == "gpt2"
    )


@pytest.mark.thorough
def test_a_run_begins_with_their_loss_and_goes_on_from_its_own_steps(tmp_path):
    hf = tmp_path / "hf"
    model = {
        "family": "qwen3",
        "layers": 3,
        "d_model": 16,
        "heads": 4,
        "kv_heads": 2,
        "d_ff": 24,
        "vocab_size": 260,
    }
    program = mt.Program(load({"model": model}))
    export(
        program.config,
        live_source(program.layout, program.init().params),
        hf,
        "float32",
    )
    given = load(
        config(
            hf,
            tmp_path / "run",
            mesh={"data": 2, "tensor": 2, "pipeline": 2},
            parallel={"zero_stage": 3, "microbatches": 2},
        )
    )
    assert mt.train(given).exit_code == 0
    data, _ = mt.open_data(given)
    first = mt.read_model(hf).loss(data.batch(0))
    np.testing.assert_allclose(losses(tmp_path / "run")[0], first, rtol=1e-5)
    # the run's own config says all of it
    shutil.rmtree(hf)
    assert (
        mt.train(load(tmp_path / "run" / "config.yaml", ["train.steps=3"])).exit_code
        == 0
    )
    assert len(losses(tmp_path / "run")) == 3
    assert load(tmp_path / "run" / "config.yaml").model == given.model
    (tmp_path / "again.yaml").write_text(to_yaml(given))
    assert load(tmp_path / "again.yaml") == given


def test_weights_that_are_not_there_are_refused_in_one_sentence(tmp_path):
    with pytest.raises(ConfigError, match=r"/no/such/config\.json cannot be read"):
        load(config("/no/such"))
