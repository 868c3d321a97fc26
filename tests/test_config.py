"""Bad input is refused in one plain sentence with the numbers or names that would be legal: exit code 2, no traceback."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshtrain.config import decode, notes
from meshtrain.train import USAGE, main

GOOD = (
    "model: {layers: 4, d_model: 32, heads: 4, vocab_size: 257}\ntrain: {global_batch_size: 8, sequence_length: 32}\n"
)

# what is wrong: (the config file, --set overrides, what the sentence must say)
BAD: dict[str, tuple[str | bytes, list[str], list[str]]] = {
    "a mistyped section": ("modle: {layers: 4}", [], ["line 1", "no section modle", "did you mean model?"]),
    "an unknown section": ("zebra: {layers: 4}", [], ["no section zebra", "legal are run, model, mesh"]),
    "a mistyped key": ("mesh: {data: 1}\nmodel:\n  layrs: 4", [], ["line 3", "no key model.layrs", "did you mean layers?"]),
    "a key of another section": ("model: {microbatches: 4}", [], ["no key model.microbatches", "legal are family, layers"]),
    "a key twice": ("model:\n  layers: 4\n  layers: 5", [], ["line 3", "model.layers", "twice"]),
    "a word for a number": ("model: {layers: four}", [], ["line 1: model.layers is 'four'", "whole number"]),
    "a fraction for a whole number": ("model: {layers: 4.5}", [], ["model.layers is '4.5'", "whole number"]),
    "a list for a number": ("model: {layers: [4]}", [], ["model.layers is a list", "whole number"]),
    "a mapping for a number": ("model: {layers: {a: 1}}", [], ["model.layers is a mapping", "whole number"]),
    "no value": ("model:\n  layers:", [], ["model.layers has no value", "whole number"]),
    "a number for a switch": ("parallel: {sequence_parallel: 3}", [], ["sequence_parallel is '3'", "true or false"]),
    "a number for a list": ("parallel: {layer_split: 4}", [], ["layer_split", "must be a list"]),
    "not a finite number": ("optimizer: {learning_rate: nan}", [], ["optimizer.learning_rate", "finite"]),
    "a value for a section": ("model: 3", [], ["section 'model' must be a mapping"]),
    "a negative size": ("model: {layers: -2}", [], ["model.layers is -2", "at least 1"]),
    "a size of zero": ("mesh: {tensor: 0}", [], ["mesh.tensor is 0", "at least 1"]),
    "a probability above one": ("model: {dropout: 1.5}", [], ["model.dropout is 1.5", "at most 0.99"]),
    "a learning rate of zero": ("optimizer: {learning_rate: 0}", [], ["learning_rate is 0.0", "above 0"]),
    "a mistyped choice": ("model: {family: lama}", [], ["model.family is 'lama'", "llama, gpt2", "did you mean llama?"]),
    "a ZeRO stage that is none": ("parallel: {zero_stage: 4}", [], ["zero_stage is '4'", "one of 0, 1, 2, 3"]),
    "a mistyped schedule": ("parallel: {schedule: 1fb1}", [], ["parallel.schedule", "gpipe", "did you mean 1f1b?"]),
    "a schedule table that is not there": ("parallel: {schedule: mine.csv}", [], ["mine.csv", "no such file"]),
    "heads that tensor does not divide": (GOOD, ["mesh.tensor=3"], ["mesh.tensor 3", "model.heads 4", "legal are 1, 2, 4"]),
    "kv heads that do not divide heads": (GOOD, ["model.kv_heads=3"], ["model.kv_heads 3", "legal are 1, 2, 4"]),
    "a width that heads do not divide": (GOOD, ["model.d_model=30"], ["model.d_model 30", "heads that divide it: 1, 2, 3"]),
    "rotary pairs of an odd head": (GOOD, ["model.head_dim=7"], ["model.head_dim is 7", "even"]),
    "a batch that data does not divide": (GOOD, ["mesh.data=3"], ["mesh.data 3", "global_batch_size 8", "1, 2, 4, 8"]),
    "microbatches that do not divide": (GOOD, ["mesh.data=2", "parallel.microbatches=3"], ["microbatches 3", "legal are 1, 2, 4"]),
    "a sequence that tensor does not divide": (
        GOOD, ["mesh.tensor=4", "train.sequence_length=30", "parallel.sequence_parallel=true"], ["mesh.tensor 4", "sequence_length 30", "legal for mesh.tensor are 1, 2"]
    ),
    "more stages than layers": (GOOD, ["mesh.pipeline=8"], ["mesh.pipeline 8", "model.layers 4", "at most 4"]),
    "more virtual stages than layers": (
        GOOD, ["mesh.pipeline=4", "parallel.schedule=interleaved", "parallel.virtual_stages=2"], ["virtual_stages 2", "8 stages", "model.layers 4"]
    ),
    "chunks for a schedule that has none": (GOOD, ["mesh.pipeline=2", "parallel.virtual_stages=2"], ["virtual_stages is 2", "1f1b always has 1", "interleaved"]),
    "a layer split of another sum": (GOOD, ["mesh.pipeline=2", "parallel.layer_split=[1, 2]"], ["[1, 2]", "sum to 3", "layers 4"]),
    "positions that gpt2 has not learned": (
        GOOD, ["model.family=gpt2", "model.max_positions=16"], ["sequence_length 32", "max_positions 16"]
    ),
    "an activation that has no such name": (
        GOOD, ["parallel.remat=names", "parallel.remat_keep=[qvk]"], ["'qvk'", "legal are qkv", "did you mean qkv?"]
    ),
    "names that nobody asked for": (GOOD, ["parallel.remat_keep=[qkv]"], ["parallel.remat_keep", "remat: names"]),
    "an empty file": ("", [], ["is empty"]),
    "a file of comments": ("# nothing yet\n", [], ["is empty"]),
    "a binary file": (b"\x89PNG\r\n\x1a\n\x00\xff", [], ["is not text", "UTF-8"]),
    "text with a null in it": (b"model: {layers: 4}\x00", [], ["is not valid YAML"]),
    "a list": ("- model\n- mesh\n", [], ["line 1", "must be a mapping", "not a list"]),
    "a single word": ("llama", [], ["must be a mapping"]),
    "broken YAML": ("model: {layers: 4\nmesh: {data: 2}", [], ["line 2", "is not valid YAML"]),
    "tabs for blanks": ("model:\n\tlayers: 4", [], ["line 2", "is not valid YAML"]),
    "an override of nothing": (GOOD, ["model.layers"], ["--set model.layers", "section.key=value"]),
    "an override of a section": (GOOD, ["model=3"], ["--set model=3", "section.key=value"]),
    "an override of a mistyped key": (GOOD, ["model.layer=3"], ["--set model.layer=3", "did you mean layers?"]),
    "an override of a mistyped section": (GOOD, ["mdel.layers=3"], ["no section mdel", "did you mean model?"]),
    "an override of a wrong type": (GOOD, ["model.layers=many"], ["--set model.layers=many", "whole number"]),
    "an override without a value": (GOOD, ["model.layers="], ["model.layers", "whole number"]),
    "more devices than there are": (GOOD, ["mesh.data=8", "mesh.tensor=2", "run.fake_devices=8", "data.source=synthetic"], ["needs 16 devices", "there are 8", "fake"]),
    "a vocabulary smaller than the tokenizer's": (GOOD, ["model.vocab_size=100"], ["model.vocab_size 100", "at least 257"]),
    "text that is not there": (GOOD, ["data.source=/no/such/text"], ["/no/such/text"]),
}  # fmt: skip


@pytest.mark.parametrize("wrong", BAD)
def test_bad_input_is_refused_in_one_sentence(wrong, tmp_path, capsys, monkeypatch):
    text, overrides, says = BAD[wrong]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    arguments = [part for override in overrides for part in ("--set", override)]
    assert main(["--config", "run.yaml", *arguments]) == USAGE
    assert_sentence(capsys.readouterr().err, says)


def assert_sentence(stderr: str, says: list[str]) -> None:
    assert stderr.startswith("meshtrain: ") and stderr.count("\n") == 1 and stderr.rstrip()[-1] in ".?", stderr
    assert "Traceback" not in stderr and "Error" not in stderr
    for part in says:
        assert part in stderr, f"{part!r} is not in: {stderr}"


def test_missing_config_names_the_nearest_file(tmp_path, capsys):
    (tmp_path / "quickstart.yaml").write_text(GOOD)
    assert main(["--config", str(tmp_path / "quickstrat.yaml")]) == USAGE
    assert_sentence(capsys.readouterr().err, ["there is no config file", "did you mean", "quickstart.yaml?"])


def test_directory_for_a_config_is_refused(tmp_path, capsys):
    assert main(["--config", str(tmp_path)]) == USAGE
    assert_sentence(capsys.readouterr().err, ["is a directory"])


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_unreadable_config_is_refused(tmp_path, capsys):
    (tmp_path / "run.yaml").write_text(GOOD)
    (tmp_path / "run.yaml").chmod(0)
    assert main(["--config", str(tmp_path / "run.yaml")]) == USAGE
    assert_sentence(capsys.readouterr().err, ["cannot be read"])


def test_run_directory_that_cannot_be_made_is_refused(tmp_path, capsys):
    (tmp_path / "run.yaml").write_text(GOOD)
    (tmp_path / "file").write_text("in the way")
    where = f"run.directory={tmp_path / 'file' / 'runs'}"
    assert main(["--config", str(tmp_path / "run.yaml"), "--set", where]) == USAGE
    assert_sentence(capsys.readouterr().err, ["run.directory", "cannot be written"])


def test_fewer_microbatches_than_stages_are_legal_but_their_cost_is_told():
    model = {"layers": 4, "d_model": 32, "heads": 4}
    config = decode({"model": model, "mesh": {"pipeline": 4}, "parallel": {"microbatches": 2}})
    (note,) = notes(config)
    assert "parallel.microbatches 2 is fewer than mesh.pipeline 4" in note
    assert "60%" in note, "3 of 5 ticks"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--config", "nowhere.yaml"], ["there is no config file nowhere.yaml"]),
        (["--config", "run.yaml", "--set", "mesh.tensor=3"], ["mesh.tensor 3", "legal are 1, 2, 4"]),
        (["--config", "run.yaml", "--set", "run.directory=run.yaml/x"], ["run.directory", "cannot be written"]),
    ],
)
def test_command_exits_with_2_and_one_sentence(arguments, says, tmp_path):
    (tmp_path / "run.yaml").write_text(GOOD)
    root = str(Path(__file__).parents[1])
    ended = subprocess.run(
        [sys.executable, "-m", "meshtrain.train", *arguments],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": root}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert ended.returncode == 2 and ended.stdout == ""
    assert_sentence(ended.stderr, says)
