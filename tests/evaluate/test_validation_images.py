"""Accuracy of a model of images: what its run's evaluations told, and what its logits say of a folder that it has never
seen.
"""

import json

import numpy as np
import pytest
import yaml
from golden import GOLDEN
from refusals import refused, tells

import meshtrain as mt
from meshtrain.config import ConfigError
from meshtrain.evaluate.__main__ import main as command
from meshtrain.evaluate.validation import evaluate_images, validation_images
from meshtrain.train import main

pytestmark = pytest.mark.thorough

CLASSES, SIZE, PATCH = 11, 8, 4


def drawn(count: int, seed: int) -> dict[str, np.ndarray]:
    """Images that get brighter with their class."""
    random = np.random.default_rng(seed)
    labels = random.integers(0, CLASSES, count)
    pixels = random.integers(0, 60, (count, SIZE, SIZE)) + 15 * labels[:, None, None]
    return {"images": pixels.astype(np.uint8), "labels": labels}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A short run on arrays; its directory and its last row of metrics."""
    directory = tmp_path_factory.mktemp("images")
    np.savez(directory / "images.npz", **drawn(90, 0))
    values = {
        "run": {"directory": str(directory / "run")},
        "model": {
            "family": "vit",
            "image_size": SIZE,
            "patch_size": PATCH,
            "channels": 1,
            "vocab_size": CLASSES,
            "layers": 1,
            "d_model": 16,
            "heads": 2,
        },
        "data": {"source": str(directory / "images.npz"), "validation": 0.3},
        "train": {"steps": 12, "global_batch_size": 8, "label_smoothing": 0.1},
        "optimizer": {"learning_rate": 0.01, "warmup_steps": 1},
        "eval": {"every": 12, "batches": 7},
    }
    (directory / "config.yaml").write_text(yaml.safe_dump(values))
    assert main(["--config", str(directory / "config.yaml")]) == 0
    rows = [
        json.loads(line)
        for line in (directory / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    return directory / "run", rows[-1]


@pytest.fixture(scope="module")
def model(run):
    return mt.read_model(run[0])


@pytest.mark.parametrize("rows", [8, 3])
def test_loss_and_accuracy_are_those_of_the_runs_last_evaluation(run, model, rows):
    directory, last = run
    found = evaluate_images(
        model, *validation_images(directory, model.config, None), rows
    )
    assert found["eval_loss"] == pytest.approx(last["eval_loss"], rel=1e-6)
    assert found["eval_accuracy"] == pytest.approx(last["eval_accuracy"], abs=1e-6)
    # 27 are held out, so that there are four batches and not seven, and the last one has rows that weigh nothing
    assert (
        found["images"] == 27
        and 1 / CLASSES < found["eval_accuracy"] < found["top_5"] < 1
    )


def test_of_other_images_the_places_are_those_of_the_logits(run, model, tmp_path):
    others = drawn(21, 5)
    np.savez(tmp_path / "others.npz", **others)
    batches, count = validation_images(
        run[0], model.config, str(tmp_path / "others.npz")
    )
    found = evaluate_images(model, batches, count, 8)
    # pixels from 0 to 1, less 0.5, over 0.5; a patch's numbers row by row
    whole = (others["images"].astype(np.float32) / 255 - 0.5) / 0.5
    side = SIZE // PATCH
    cut = whole.reshape(-1, side, PATCH, side, PATCH).transpose(0, 1, 3, 2, 4)
    patches = cut.reshape(-1, side * side, PATCH * PATCH)
    order = np.argsort(-np.asarray(model(patches)), axis=1, kind="stable")
    places = np.argmax(order == others["labels"][:, None], axis=1)
    assert found["images"] == 21
    shares = np.mean(places == 0), np.mean(places < 5)
    assert (found["eval_accuracy"], found["top_5"]) == pytest.approx(shares)


def test_what_was_not_trained_here_has_no_images_of_its_own(model):
    says = "llama3 .*no held-out images .* --images"
    with pytest.raises(ConfigError, match=says):
        validation_images(GOLDEN / "llama3", model.config, None)


def test_equal_logits_come_in_the_order_of_their_classes(run, model):
    import jax

    zero = mt.reader.Model(
        model.program, jax.tree.map(lambda x: x * 0, model.params), 0, model.directory
    )
    batches, count = validation_images(run[0], model.config, None)
    found = evaluate_images(zero, batches, count, 8)
    labels = np.concatenate(
        [batches.batch(k)["labels"][:, 0] for k in batches.one_pass(count)]
    )[:27]
    shares = np.mean(labels == 0), np.mean(labels < 5)
    assert (found["eval_accuracy"], found["top_5"]) == pytest.approx(shares)


def test_the_command_says_the_same_as_the_run(run, capsys):
    directory, last = run
    assert command([str(directory), "--json", "--mesh", "data=2", "--batch", "4"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["eval_loss"] == pytest.approx(last["eval_loss"], rel=1e-6)
    assert found["eval_accuracy"] == pytest.approx(last["eval_accuracy"], abs=1e-6)
    assert (found["model"], found["step"], found["images"]) == ("run", 12, 27)
    said = refused(command, capsys, str(directory), "--text", "a")
    assert tells(said, "--text and --tasks ... models of text")
