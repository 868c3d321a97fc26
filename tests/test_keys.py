"""What the keys of a config mean is told from the lines that declare them; editors complete by a schema of the same."""

import json
import re

import pytest
import yaml
from documented import ROOT
from refusals import tells

from meshtrain import keys
from meshtrain.config import Config
from meshtrain.config.key import keys as keys_of

CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
SCHEMA = ROOT / "configs" / "schema.json"


class AsEditorsRead(yaml.SafeLoader):
    """YAML 1.2, in which 7.0e7 is a number."""


AsEditorsRead.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?[0-9.]+e[-+]?[0-9]+"),
    list("0123456789"),
)


def said(capsys, *words):
    assert keys.main(list(words)) == 0
    return capsys.readouterr().out


def test_one_key_is_told_with_bounds_default_and_resume(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    text = said(capsys, "parallel.microbatches")
    assert (
        "a whole number, at least 1\n" in text
        and "default   1\n" in text
        and "gradient accumulation" in text
    )
    assert tells(said(capsys, "run.seed"), "it is refused", "unless checkpoint.allow")
    assert "takes     a whole number, at least 1 or auto\n" in said(
        capsys, "train.loss_chunk"
    )
    assert "default   auto, resolved" in said(capsys, "parallel.schedule")


def test_all_keys_are_listed_those_of_a_section_and_as_json_and_markdown(capsys):
    paths = list(keys_of(Config))
    assert [entry.path for entry in keys.declared()] == paths
    printed = said(capsys)
    assert all(f"\n{path}: " in f"\n{printed}" for path in paths)
    assert [entry["key"] for entry in json.loads(said(capsys, "lora", "--json"))] == [
        p for p in paths if p.startswith("lora.")
    ]
    rows = [
        line.split(" | ")
        for line in said(capsys, "--markdown").splitlines()
        if line.startswith("| [`")
    ]
    assert len(rows) == len(paths) and {len(row) for row in rows} == {5}


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("mesh.dta", "mesh.dta; did you mean mesh.data?"),
        (
            "every",
            "there is parallel.sync.every, checkpoint.every, eval.every, log.every, telemetry.every.",
        ),
        ("zzz", "lists all."),
    ],
)
def test_an_unknown_key_is_a_sentence(name, sentence, capsys):
    assert keys.main([name]) == 2
    assert sentence in capsys.readouterr().err


def test_the_schema_is_that_of_now_and_every_config_names_it():
    assert SCHEMA.read_text() == keys.json_schema(), (
        "python -m meshtrain config --json-schema > configs/schema.json"
    )
    assert CONFIGS
    assert {path.read_text().splitlines()[0] for path in CONFIGS} == {
        f"# yaml-language-server: $schema={SCHEMA.name}"
    }


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("text", "legal"),
    [
        *((path.read_text(), True) for path in CONFIGS),
        (
            "train: {loss_chunk: auto}\nmodel: {kv_heads: null, family: mine}\nlora:",
            True,
        ),
        ("train: {loss_chunk: some}", False),
        ("mesh: {data: 0}", False),
        ("mesh: {dta: 2}", False),
        ("optimizer: {learning_rate: 0}", False),
        ("telemetry: {trackers: [wandb, other]}", False),
    ],
)
def test_the_schema_takes_what_is_legal_and_names_what_is_not(text, legal):
    validator = pytest.importorskip("jsonschema").Draft7Validator(
        json.loads(SCHEMA.read_text())
    )
    assert validator.is_valid(yaml.load(text, Loader=AsEditorsRead)) == legal
