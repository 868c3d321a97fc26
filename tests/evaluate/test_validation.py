"""A run's own held-out text: the loss that its evaluations told of, on any mesh and by as many rows as one likes."""

import json
import math

import pytest
import yaml
from golden import GOLDEN
from refusals import refused, tells

import meshtrain as mt
from meshtrain.config import ConfigError
from meshtrain.evaluate.__main__ import main as command
from meshtrain.evaluate.validation import describe_text, evaluate_text, validation_text
from meshtrain.train import main

pytestmark = pytest.mark.thorough


def trained(directory, **sections):
    """A short run on text of its own; its directory and its last eval loss."""
    # of lengths that do not fill rows, so that places weigh nothing
    lines = [
        json.dumps({"text": f"{k} goes on and on, {'so ' * (k % 9)}it does."})
        for k in range(150)
    ]
    (directory / "text").mkdir()
    (directory / "text" / "a.jsonl").write_text("\n".join(lines))
    values = {
        "run": {"directory": str(directory / "run")},
        "model": {
            "layers": 2,
            "d_model": 16,
            "heads": 2,
            "d_ff": 32,
            "vocab_size": 259,
        },
        "data": {
            "source": str(directory / "text"),
            "validation": 0.3,
            "batching": "packed",
        },
        "train": {"steps": 3, "global_batch_size": 6, "sequence_length": 32},
        "eval": {"every": 1, "batches": 3},
    }
    for name, keys in sections.items():
        values[name] = {**values.get(name, {}), **keys}
    (directory / "config.yaml").write_text(yaml.safe_dump(values))
    assert main(["--config", str(directory / "config.yaml")]) == 0
    rows = [
        json.loads(line)
        for line in (directory / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    return directory / "run", rows[-1]["eval_loss"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("held_out"), mesh={"data": 2})


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("mesh", "rows"), [({}, 6), ({}, 4), ({"data": 2, "tensor": 2}, 1)], ids=str
)
def test_the_loss_is_that_of_the_runs_last_evaluation(run, mesh, rows):
    directory, last = run
    model = mt.read_model(
        directory,
        mesh=mt.make_mesh(mt.load({"mesh": mesh, "train": {"uneven_batch": "pad"}})),
    )
    told = []
    found = evaluate_text(
        model,
        validation_text(directory, model),
        rows,
        lambda *given: told.append(given),
    )
    assert found["eval_loss"] == pytest.approx(last, rel=1e-6)
    assert found["perplexity"] == pytest.approx(math.exp(last), rel=1e-5)
    assert told == [(1, 3), (2, 3), (3, 3)] and 300 < found["tokens"] < 3 * 6 * 32


def test_another_text_than_the_run_read_is_said(run, capsys):
    directory, _ = run
    model = mt.read_model(directory)
    more = directory.parent / "text" / "more.txt"
    more.write_text("what nobody has read. " * 30)
    try:
        validation_text(directory, model)
    finally:
        more.unlink()
    assert "not what the run has read" in capsys.readouterr().err
    validation_text(directory, model)
    assert "is not what" not in capsys.readouterr().err


def test_what_was_not_trained_here_has_no_text_of_its_own():
    model = mt.read_model(GOLDEN / "llama3")
    says = "llama3 .*no held-out text .* --text"
    with pytest.raises(ConfigError, match=says):
        validation_text(GOLDEN / "llama3", model)


def test_a_run_that_learns_from_its_own_answers_has_no_held_out_text(run):
    directory, _ = run
    model = mt.read_model(directory)
    rl = {"prompts": "prompts.jsonl", "reward": "exact", "answers": 8}
    model.config = mt.load(
        {"train": {"objective": "grpo", "global_batch_size": 8}, "rl": rl}
    )
    with pytest.raises(ConfigError) as refused:
        validation_text(directory, model)
    assert tells(str(refused.value), str(directory), "train.objective grpo", "--text")


@pytest.mark.thorough
def test_the_perplexity_of_a_run_with_label_smoothing_is_that_of_the_likelihood_alone(
    tmp_path,
):
    directory, last = trained(tmp_path, train={"label_smoothing": 0.1, "steps": 1})
    model = mt.read_model(directory)
    found = evaluate_text(model, validation_text(directory, model), 8)
    assert found["eval_loss"] == pytest.approx(last, rel=1e-6)
    assert found["perplexity"] == pytest.approx(math.exp(last), rel=1e-5)
    assert any("perplexity" in line for line in describe_text(found))


def test_the_command_says_the_same_as_the_run_in_json_too(run, capsys):
    directory, last = run
    assert command([str(directory), "--json", "--batch", "6"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["eval_loss"] == pytest.approx(last, rel=1e-6) and (
        found["model"],
        found["step"],
    ) == ("run", 3)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--stride 3", "--stride ... without --text"),
        ("--text a --shots 3", "--shots ... without --tasks"),
        (
            "--length 64",
            "--length ... without --text or --tasks",
        ),
        (
            "--text a --length 8 --stride 9",
            "--stride is 9, but --length 8",
        ),
        ("--images a", "--images ... {} ... of text (family llama)"),
        ("--text {}/none.txt", "no file or directory {}/none.txt"),
        (
            "--precision float8",
            "precision 'float8' ... did you mean float32?",
        ),
        ("--mesh data=3", "mesh data=3 does not divide 8 slots"),
    ],
)
def test_what_cannot_be_evaluated_is_a_sentence(run, words, says, capsys):
    directory = str(run[0])
    said = refused(command, capsys, directory, *words.replace("{}", directory).split())
    assert tells(said, says.replace("{}", directory))
