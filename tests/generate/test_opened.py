"""Every kind of directory that holds a model is opened with its tokenizer, its ends and its template; what cannot be is refused in a sentence."""

import json
import shutil
from pathlib import Path

import jax
import pytest
from checkpoint_runs import build_for, config, numbered
from golden import GOLDEN
from tiny_models import SPECIAL, hugging_face

pytest.importorskip("safetensors")

from meshtrain.adopt.__main__ import main as adopt
from meshtrain.checkpoint import Checkpointer
from meshtrain.errors import ConfigError
from meshtrain.generate.opened import open_model

END, EOS = SPECIAL.index("<|end|>"), SPECIAL.index("</s>")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    return hugging_face(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run's directory with one step, of a model of bytes."""
    settings = config(tmp_path_factory.mktemp("runs") / "mine", model={"layers": 2}, mesh={"pipeline": 2})
    program = build_for(settings)
    checkpointer = Checkpointer(settings, program)
    checkpointer.save(3, numbered(program), 1.0)
    checkpointer.wait()
    checkpointer.close()
    return Path(settings.run.directory)


@pytest.fixture
def copied(theirs, tmp_path):
    return shutil.copytree(theirs, tmp_path / "copy")


def test_a_hugging_face_directory_has_its_tokenizer_its_ends_and_its_template(theirs):
    opened = open_model(theirs)
    assert opened.name == "tiny-llama" and opened.model.step == 0
    assert opened.ends == {EOS, END} and opened.template is not None
    assert (opened.longest, opened.length) == (64, 64)
    assert opened.marked.encode(["<|end|>"])[0].tolist() == [END] != opened.tokenizer.encode(["<|end|>"])[0].tolist()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("config_json", "generation", "expected"),
    [(7, None, {7}), ([7, 8], None, {7, 8}), (None, 9, {9}), (7, [9, 10], {7, 9, 10}), (True, ["x", -1, 1000], set())],
)
def test_all_end_tokens_are_ends_that_any_file_names(copied, config_json, generation, expected):
    given = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(given | {"eos_token_id": config_json}))
    if generation is not None:
        (copied / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    assert open_model(copied).ends == {EOS, END} | expected


def test_a_model_without_a_template_says_why(copied):
    (copied / "tokenizer_config.json").unlink()
    opened = open_model(copied)
    assert opened.template is None and "neither chat_template.jinja nor a tokenizer_config.json" in opened.without
    assert opened.ends == {EOS}


def test_a_run_of_bytes_is_opened_by_any_of_its_names_whatever_mesh_it_was_trained_on(run):
    for path in (run, run / "checkpoints", run / "checkpoints" / "3"):
        opened = open_model(path, length=20)
        assert (opened.name, opened.model.step, opened.tokenizer.name) == ("mine", 3, "byte")
        assert (opened.ends, opened.longest, opened.length) == ({256}, 16, 20)
        assert opened.model.config.mesh.devices == 1 and "the tokenizer byte has none" in opened.without


@pytest.mark.thorough
def test_an_import_keeps_what_lay_beside_the_weights(theirs, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(theirs, "hf")
    assert adopt(["import", "hf", "imported", "--set", "mesh.pipeline=2"]) == 0
    shutil.rmtree("hf")
    # to where the config does not say it is
    shutil.move("imported", "moved")
    opened = open_model("moved", mesh="tensor=2")
    assert opened.name == "moved" and opened.ends == {EOS, END} and opened.template is not None
    assert opened.longest == 64 and opened.model.config.mesh.tensor == 2


@pytest.mark.thorough
def test_weights_are_held_in_what_computes(theirs):
    opened = open_model(theirs, precision="bfloat16")
    assert {str(x.dtype) for x in jax.tree.leaves(opened.model.params)} == {"bfloat16"}


def test_what_cannot_be_opened_is_refused_in_a_sentence(theirs, run, copied, tmp_path, monkeypatch):
    monkeypatch.chdir(theirs.parent)

    def refused(path, **how) -> str:
        with pytest.raises(ConfigError) as caught:
            open_model(path, **how)
        return str(caught.value)

    assert refused("tiny-lama") == "there is no directory tiny-lama; did you mean tiny-llama?"
    assert "hf download meta-llama/Llama-3.1-8B --local-dir Llama-3.1-8B" in refused("meta-llama/Llama-3.1-8B")
    assert refused("./no/such/thing").startswith("there is no directory ./no/such/thing; give a run")
    assert "is no directory; give a run" in refused(theirs / "config.json")
    assert "there is no checkpoint in" in refused(tmp_path.parent / theirs.parent.name)
    assert "there is no step 7" in refused(run, step=7)
    assert "adapter is given" in refused(run, adapter=theirs)
    assert "legal are data and tensor" in refused(theirs, mesh="rows=2")
    assert "without stages" in refused(theirs, mesh="pipeline=2")
    assert "does not divide 1 slots" in refused(theirs, mesh="data=2")
    # a model of images has no text
    assert "is a model of images (family vit), which has no text to go on with" in refused(GOLDEN / "vit")
    assert refused(theirs, precision="float8") == "the precision 'float8' is none to compute in; did you mean float32?"
    assert refused(theirs, precision="int4").endswith("is none to compute in; legal are float32, bfloat16, float16.")
    (copied / "tokenizer.json").rename(copied / "tokenizer.model")
    assert "is a tokenizer.model, but no tokenizer.json" in refused(copied)
    (copied / "tokenizer.model").unlink()
    assert "has weights but no tokenizer.json" in refused(copied)
