"""Samples at each evaluation: their prompts, the same texts on every mesh and after a resume, and where they are told."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from covering import thorough_but
from refusals import tells

from meshtrain.config import ConfigError, load
from meshtrain.evaluate.samples import prompts
from meshtrain.monitor.__main__ import main as monitor
from meshtrain.report.__main__ import main as report
from meshtrain.train import main

MESHES = {
    "one device": {},
    "data 2, ZeRO-3": {"mesh": {"data": 2}, "parallel": {"zero_stage": 3}},
    "tensor 2, pipeline 2": {
        "mesh": {"tensor": 2, "pipeline": 2},
        "parallel": {"microbatches": 2},
    },
    "context 2": {"mesh": {"context": 2}},
    "rows padded": {"mesh": {"data": 8}, "train": {"uneven_batch": "pad"}},
}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n\n".join(f"{n} times {n} is {n * n}." for n in range(600)))
    return path


def trained(directory, text, steps=2, **sections):
    values = {
        "run": {"directory": str(directory)},
        "model": {
            "layers": 2,
            "d_model": 16,
            "heads": 2,
            "d_ff": 32,
            "vocab_size": 257,
        },
        "data": {"source": str(text), "validation_source": str(text)},
        "train": {"steps": steps, "global_batch_size": 4, "sequence_length": 48},
        "optimizer": {"schedule": "constant", "learning_rate": 0.03, "warmup_steps": 0},
        "eval": {"every": 1, "batches": 1, "samples": 3},
    }
    for name, keys in sections.items():
        values[name] = values.get(name, {}) | keys
    path = directory.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(values))
    assert main(["--config", str(path)]) == 0
    rows = [
        json.loads(line)
        for line in (directory / "metrics.jsonl").read_text().splitlines()
    ]
    return [row["samples"] for row in rows]


@pytest.fixture(scope="module")
def alone(tmp_path_factory, text):
    directory = tmp_path_factory.mktemp("alone") / "run"
    return directory, trained(directory, text)


def test_each_evaluation_has_texts_that_go_on_with_the_begins_of_validation_rows(
    alone, text
):
    _, evaluations = alone
    assert len(evaluations) == 2
    written = text.read_text()
    for samples in evaluations:
        assert len(samples) == 3
        for sample in samples:
            assert len(sample["prompt"]) == 24 and sample["prompt"] in written
            assert 1 <= len(sample["text"]) <= 24
    first, second = evaluations
    assert [s["prompt"] for s in first] == [s["prompt"] for s in second]
    assert [s["text"] for s in first] != [s["text"] for s in second]


@pytest.mark.parametrize(
    "mesh", thorough_but(list(MESHES)[1:], lambda mesh: "pipeline" in mesh)
)
def test_a_mesh_changes_no_sample(tmp_path, text, alone, mesh):
    assert trained(tmp_path / "run", text, **MESHES[mesh]) == alone[1]


@pytest.mark.thorough
def test_a_resumed_run_has_the_samples_of_one_that_went_through(tmp_path, text, alone):
    trained(tmp_path / "run", text, steps=1)
    assert trained(tmp_path / "run", text) == alone[1]


@pytest.mark.thorough
def test_monitor_and_report_show_them(alone, capsys, tmp_path):
    directory, evaluations = alone
    newest = evaluations[-1][0]
    capsys.readouterr()
    assert monitor([str(directory), "--once"]) == 0
    flat = " ".join(newest["prompt"].split())
    assert flat[:16] in " ".join(capsys.readouterr().out.split())
    page = tmp_path / "page.html"
    assert report([str(directory), "--html", str(page)]) == 0
    told = capsys.readouterr().out
    assert "Samples" in told and "step" in told
    assert "Samples" in page.read_text() and newest["prompt"][:12] in page.read_text()


@pytest.mark.parametrize(
    ("sections", "why"),
    [
        ({"eval": {"samples": 2}}, "eval.every is 0"),
        ({"data": {"source": "synthetic"}}, "synthetic"),
        (
            {"mesh": {"islands": 2, "data": 2}, "parallel": {"sync": {"every": 2}}},
            "mesh.islands",
        ),
    ],
)
def test_what_cannot_be_sampled_is_refused(sections, why):
    values = {"eval": {"every": 1, "samples": 2}} | sections
    with pytest.raises(ConfigError) as error:
        load(values)
    assert tells(str(error.value), "eval.samples", why)


def test_prompts_of_conversations_are_all_before_the_first_answer():
    weights = np.zeros((2, 40), np.float32)
    weights[0, 35:38] = 1
    tokens = np.arange(80, dtype=np.int32).reshape(2, 40)
    held_out = SimpleNamespace(
        one_pass=lambda most: range(1),
        batches=SimpleNamespace(batch=lambda k: {"tokens": tokens, "weights": weights}),
    )
    asked = SimpleNamespace(
        train=SimpleNamespace(sequence_length=40),
        eval=SimpleNamespace(samples=2),
        data=SimpleNamespace(format="chat"),
    )
    (only,) = prompts(asked, held_out)
    assert only.tolist() == list(range(36))
