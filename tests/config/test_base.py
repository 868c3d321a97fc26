"""A config may change another one: `base: other.yaml`, by values, paths, imports and circles."""

import subprocess
import sys

import pytest
import yaml

import meshtrain as mt
from meshtrain import keys
from meshtrain.config.load import config_files

CHANGES = "base: below/middle.yaml\ntrain: {steps: 7}\n"


@pytest.fixture
def chain(tmp_path, monkeypatch):
    """Three configs: the top one in the working directory, the others in a folder with what they name."""
    below = tmp_path / "below"
    (below / "text").mkdir(parents=True)
    (below / "root.yaml").write_text(
        "data: {source: text}\nmodel: {layers: 3, moe: {experts: 4, top_k: 2}}\ntrain: {steps: 5}\n"
    )
    (below / "middle.yaml").write_text(
        "base: root.yaml\nmodel: {moe: {top_k: 1}}\ntrain: {global_batch_size: 8}\n"
    )
    (tmp_path / "top.yaml").write_text(CHANGES)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_values_come_from_the_nearest_config_and_paths_count_from_their_own_folder(
    chain,
):
    config = mt.load("top.yaml", ["optimizer.learning_rate=0.5"])
    assert (config.train.steps, config.train.global_batch_size) == (7, 8)
    assert (config.model.moe.experts, config.model.moe.top_k) == (4, 1)
    assert config.data.source == "below/text"
    assert config.optimizer.learning_rate == 0.5
    assert list(map(str, config_files("top.yaml"))) == [
        "top.yaml",
        "below/middle.yaml",
        "below/root.yaml",
    ]


def test_print_config_shows_the_resolved_one_without_a_base(chain):
    command = [
        sys.executable,
        "-m",
        "meshtrain.train",
        "--config",
        "top.yaml",
        "--print-config",
    ]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "base" not in yaml.safe_load(printed)
    (chain / "whole.yaml").write_text(printed)
    assert mt.load("whole.yaml") == mt.load("top.yaml")


def test_a_base_may_come_along_by_its_name(chain):
    (chain / "top.yaml").write_text("base: quickstart\ntrain: {steps: 3}\n")
    config = mt.load("top.yaml", ["mesh.tensor=1"])
    assert config.model == mt.load("quickstart").model
    assert config.train.steps == 3


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("base: top.yaml", "top.yaml, line 1: base is top.yaml, .*back.*"),
        ("base: [a.yaml]", "line 1: base is a list; it must be a text."),
        ("base: nowhere.yaml", "there is no config file nowhere.yaml"),
        ("base: quickstrt", "there is no config quickstrt; .*did you mean quickstart"),
        ("base: below/text", "below/text is a directory; base takes a YAML file."),
    ],
)
def test_what_is_no_base_is_refused(text, sentence, chain):
    (chain / "top.yaml").write_text(text)
    with pytest.raises(mt.ConfigError, match=sentence):
        mt.load("top.yaml")


def test_a_circle_is_refused_wherever_it_closes(chain):
    (chain / "below" / "root.yaml").write_text("base: ../top.yaml")
    with pytest.raises(
        mt.ConfigError, match=r"root.yaml, line 1: base is ../top.yaml, .*circle"
    ):
        mt.load("top.yaml")
    with pytest.raises(mt.ConfigError, match="circle"):
        config_files("top.yaml")


def test_a_mistake_names_the_file_and_line_that_has_it(chain):
    (chain / "below" / "root.yaml").write_text("train: {steps: 5}\nmodel: {layer: 3}")
    with pytest.raises(
        mt.ConfigError, match=r"below/root.yaml, line 2: .*did you mean model.layers"
    ):
        mt.load("top.yaml")


def test_imports_of_both_hold(chain):
    for place, name in ((chain / "below", "lower"), (chain, "upper")):
        (place / f"{name}.py").write_text("def loss(*_):\n    return 0.0\n")
    (chain / "below" / "root.yaml").write_text(
        "run: {imports: [lower.py]}\ntrain: {loss: 'lower:loss'}\n"
    )
    (chain / "top.yaml").write_text(
        "base: below/root.yaml\nrun: {imports: [upper.py]}\n"
    )
    config = mt.load("top.yaml")
    assert config.run.imports == (
        str(chain / "below" / "lower.py"),
        str(chain / "upper.py"),
    )
    assert config.train.loss == "lower:loss"


def test_imports_of_a_strangers_base_are_left_out_where_a_command_only_reads(chain):
    run = chain / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.yaml").write_text(
        "run: {imports: [bad.py]}\ntrain: {loss: 'bad:loss'}\n"
    )
    (run / "bad.py").write_text("raise SystemExit('this ran')\n")
    (chain / "top.yaml").write_text("base: run/config.yaml\n")
    assert mt.load("top.yaml", reading=True).train.loss == "bad:loss"


def test_the_schema_knows_a_base():
    assert '"base"' in keys.json_schema()
