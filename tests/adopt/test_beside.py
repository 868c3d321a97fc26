"""A run's tokenizer is found where the run has it, or where it began."""

import json

import pytest

from meshtrain.adopt.beside import CARRIED, KEPT, check_tokenizer, found_config, found_tokenizer, written_config
from meshtrain.config import load
from meshtrain.config.follow import put
from meshtrain.errors import ConfigError


def directory(path, **files):
    path.mkdir(parents=True)
    for name, content in files.items():
        (path / f"{name}.json").write_text(content)
    return path


def config(**sections):
    return put(load({}), **sections)


def test_the_one_that_it_was_trained_with_comes_first(tmp_path):
    weights = directory(tmp_path / "hf", tokenizer="theirs", tokenizer_config="{}")
    run = directory(tmp_path / "run")
    began = {"weights": str(weights)}
    assert found_tokenizer(run, config()) == {}
    assert found_tokenizer(run, config(model=began))["tokenizer_config.json"].parent == weights
    own = directory(tmp_path / "own", mine="ours") / "mine.json"
    found = found_tokenizer(run, config(model=began, data={"tokenizer": str(own)}))
    assert {name: path.read_text() for name, path in found.items()} == {"tokenizer.json": "ours"}


@pytest.mark.parametrize("path", ["out", "out/checkpoints", "out/checkpoints/0"])
def test_a_run_that_began_with_an_import_has_what_was_kept_there(tmp_path, path):
    out = directory(tmp_path / "out", tokenizer="kept", hf_config='{"model_type": "llama", "eos_token_id": 2}')
    (out / "checkpoints" / "0").mkdir(parents=True)
    began = config(checkpoint={"resume": str(tmp_path / path)})
    assert found_tokenizer(tmp_path / "run", began)["tokenizer.json"].read_text() == "kept"
    assert found_config(tmp_path / "run", began)["eos_token_id"] == 2
    # of the step itself
    assert found_tokenizer(tmp_path / path, config())["tokenizer.json"].read_text() == "kept"
    assert found_config(tmp_path / "run", put(began, model={"family": "gpt2"})) == {}


def test_what_only_says_more_of_a_tokenizer_is_none(tmp_path):
    run = directory(tmp_path / "run", generation_config="{}")
    assert found_tokenizer(run, config()) == {}


@pytest.mark.parametrize("vocab", [{"a": 0, "b": 45}, ["a"] * 46])
def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path, vocab):
    at = directory(tmp_path / "t", tokenizer=json.dumps({"model": {"vocab": vocab}}))
    check_tokenizer({"tokenizer.json": at / "tokenizer.json"}, 46)
    with pytest.raises(ConfigError, match="has the id 45, but the model's vocabulary is 45"):
        check_tokenizer({"tokenizer.json": at / "tokenizer.json"}, 45)


@pytest.mark.parametrize(
    "content", ["{}", '{"model": 3}', '{"model": {"vocab": {"a": "b"}}}', '{"model": {"vocab": 1}}']
)
def test_a_damaged_tokenizer_is_one_sentence(tmp_path, content):
    at = directory(tmp_path / "t", tokenizer=content)
    with pytest.raises(ConfigError, match=r"is no tokenizer\.json: it has no vocabulary\.$"):
        check_tokenizer({"tokenizer.json": at / "tokenizer.json"}, 45)


def test_added_tokens_count_as_a_tokenizers_own(tmp_path):
    added = {"model": {"vocab": {}}, "added_tokens": [{"id": 99, "content": "<s>"}]}
    at = directory(tmp_path / "t", tokenizer=json.dumps(added))
    with pytest.raises(ConfigError, match="has the id 99"):
        check_tokenizer({"tokenizer.json": at / "tokenizer.json"}, 45)


def test_a_models_longest_sequence_is_never_made_shorter():
    given, theirs = (
        {"max_position_embeddings": 256},
        {"max_position_embeddings": 4096, "vocab_size": 3, "pad_token_id": None},
    )
    assert json.loads(written_config(given, theirs)) == {"max_position_embeddings": 4096}
    assert json.loads(written_config({"max_position_embeddings": 8192}, theirs)) == {"max_position_embeddings": 8192}
    assert "max_position_embeddings" in CARRIED and KEPT != "config.json"


def test_the_chat_template_of_the_run_goes_with_it(tmp_path):
    run = directory(tmp_path / "run", tokenizer="t", tokenizer_config="theirs")
    (run / "chat_template.jinja").write_text("theirs")
    (tmp_path / "mine.jinja").write_text("mine")
    found = found_tokenizer(run, config(data={"template": str(tmp_path / "mine.jinja")}))
    assert found["chat_template.jinja"].read_text() == "mine" and found["tokenizer_config.json"].read_text() == "theirs"
    mine = directory(tmp_path / "own", tokenizer_config="mine") / "tokenizer_config.json"
    found = found_tokenizer(run, config(data={"template": str(mine)}))
    assert "chat_template.jinja" not in found and found["tokenizer_config.json"].read_text() == "mine"
