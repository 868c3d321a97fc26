"""Runs on images as a user meets them: rows of metrics, resumed, restored elsewhere, read, tuned."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from covering import thorough_but

import meshtrain as mt
from meshtrain.checkpoint import steps
from meshtrain.config import ConfigError
from meshtrain.inputs import LABELS, PATCHES
from meshtrain.mesh import make_mesh
from meshtrain.train import main

# Everything random that needs no Pillow.
AUGMENTED = {"shift": 1, "flip": 0.5, "mixup": 0.8, "cutmix": 1.0}
RUN: dict[str, Any] = {
    "model": {
        "family": "vit",
        "layers": 2,
        "d_model": 16,
        "heads": 4,
        "d_ff": 32,
        "vocab_size": 10,
        "image_size": 8,
        "patch_size": 4,
        "channels": 1,
        "dropout": 0.1,
    },
    "train": {"steps": 4, "global_batch_size": 8, "label_smoothing": 0.1},
    "data": {"source": "digits", "images": AUGMENTED},
    "optimizer": {"warmup_steps": 1},
    "eval": {"every": 2, "batches": 2},
    "checkpoint": {"every": 2, "keep": 9},
}
ALL_AXES = {
    "mesh": {"data": 2, "tensor": 2, "pipeline": 2},
    "parallel": {"microbatches": 2},
}


def run(directory: Path, **sections: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of a run in a directory of its own."""
    directory.mkdir(exist_ok=True)
    values = {"run": {"directory": str(directory / "run")}, **RUN}
    for name, keys in sections.items():
        values[name] = {**values.get(name, {}), **keys}
    (directory / "config.yaml").write_text(yaml.safe_dump(values))
    assert main(["--config", str(directory / "config.yaml")]) == 0
    return rows(directory)


def rows(directory: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for line in (directory / "run" / "metrics.jsonl").read_text().splitlines()
    ]


def told(found: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """What must be the same bit by bit of the last two steps."""
    return [
        tuple(
            row.get(name)
            for name in ("step", "loss", "grad_norm", "eval_loss", "eval_accuracy")
        )
        for row in found
    ][2:]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, list[dict[str, Any]]]:
    directory = tmp_path_factory.mktemp("images")
    return directory, run(directory)


def resumed_from_2(
    source: Path, directory: Path, **sections: dict[str, Any]
) -> list[dict[str, Any]]:
    """The run after step 2 once more, in another directory."""
    shutil.copytree(source / "run", directory / "run")
    steps.remove(directory / "run" / "checkpoints" / "4")
    return run(directory, **sections)


@pytest.mark.thorough
def test_rows_tell_positions_and_of_evaluations_the_accuracy(trained):
    _, found = trained
    assert [row["tokens"] for row in found] == [8 * 5] * 4, (
        "four patches and the class token"
    )
    assert [row["step"] for row in found if "eval_accuracy" in row] == [2, 4]
    assert all(("eval_accuracy" in row) == ("eval_loss" in row) for row in found)


@pytest.mark.thorough
def test_a_resumed_run_is_the_same_bit_by_bit_with_all_augmentations(trained, tmp_path):
    directory, found = trained
    assert told(resumed_from_2(directory, tmp_path)) == told(found)


@pytest.mark.thorough
def test_a_model_read_from_its_checkpoint_tells_the_accuracy_that_the_run_told(trained):
    directory, found = trained
    model = mt.read_model(directory / "run")
    _, held_out = mt.open_data(model.config)
    hits, losses = [], []
    for k in range(RUN["eval"]["batches"]):
        batch = held_out.batch(k)
        logits = model(batch[PATCHES][:7])
        assert logits.shape == (7, 10)
        hits += list(
            np.argmax(np.asarray(model(batch[PATCHES])), -1) == batch[LABELS][:, 0]
        )
        losses.append(model.loss(batch))
    assert np.mean(hits) == pytest.approx(found[-1]["eval_accuracy"])
    assert np.mean(losses) == pytest.approx(found[-1]["eval_loss"], rel=1e-5)
    with pytest.raises(
        ConfigError, match=r"patches are int64\[2, 5\]; .* \[B, 4, 16\]"
    ):
        model(np.zeros((2, 5), int))


@pytest.mark.thorough
def test_a_checkpoint_of_all_axes_goes_on_alike_on_another_mesh(tmp_path):
    found = run(tmp_path / "all", **ALL_AXES)
    there = resumed_from_2(tmp_path / "all", tmp_path / "tensor", mesh={"tensor": 4})
    for one, other in zip(told(found), told(there), strict=True):
        np.testing.assert_allclose(
            *(np.array(x, float) for x in (one, other)), rtol=2e-5
        )


OTHERS: dict[str, dict[str, dict[str, Any]]] = {
    "DiLoCo": {"mesh": {"data": 4, "islands": 2}, "parallel": {"sync": {"every": 2}}},
    "offloaded, ring": {
        "mesh": {"data": 4},
        "parallel": {
            "reduce": {"algorithm": "ring"},
            "zero_stage": 2,
            "offload_optimizer": True,
        },
    },
    "a batch filled up": {"mesh": {"data": 3}, "train": {"uneven_batch": "pad"}},
}


@pytest.mark.parametrize(
    "case", thorough_but(OTHERS, lambda _: False, ["offloaded, ring"])
)
def test_what_text_can_do_images_can_too(case, trained, tmp_path):
    """Each begins as the plain run does; what is exact stays it."""
    (_, plain), found = trained, run(tmp_path / "other", **OTHERS[case])
    assert found[0]["loss"] == pytest.approx(plain[0]["loss"], rel=2e-6)
    exact = case in ("offloaded, ring", "a batch filled up")
    last = [row["eval_loss"] for row in (plain[-1], found[-1])]
    assert last[0] == pytest.approx(last[1], rel=2e-5 if exact else 0.2)
    assert np.isfinite(last).all() and found[-1]["eval_accuracy"] <= 1


@pytest.mark.thorough
def test_a_lora_of_images_adapts_the_projections_of_the_layers_alone():
    config = mt.load({**RUN, "lora": {"rank": 2}, "data": {"source": "synthetic"}})
    layout = mt.Program(config, make_mesh(config)).layout
    trained = {weight.name for weight in layout.flat if weight.trained}
    assert trained == {
        f"blocks.{part}_lora_{which}"
        for part in (
            "attention.q",
            "attention.k",
            "attention.v",
            "attention.out",
            "mlp.up",
            "mlp.down",
        )
        for which in "ab"
    }
