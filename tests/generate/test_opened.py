"""Every kind of directory that holds a model is opened with its tokenizer, ends and template, on the mesh that is asked
for or that fits; what cannot be is refused in a sentence.
"""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from checkpoint_runs import build_for, config, numbered
from golden import GOLDEN
from refusals import tells
from tiny_models import SPECIAL, hugging_face

import meshtrain as mt
from meshtrain.config import MeshConfig
from meshtrain.generate.opened import choose_mesh, memory_needs
from meshtrain.generate.programs import Decoding
from meshtrain.mesh import part_bytes
from meshtrain.reader import read_config, read_model

pytest.importorskip("safetensors")

from meshtrain.adopt.__main__ import main as adopt
from meshtrain.checkpoint import Checkpointer
from meshtrain.errors import ConfigError
from meshtrain.generate.opened import _sampling, open_model
from meshtrain.generate.request import Sampling

END, EOS = SPECIAL.index("<|end|>"), SPECIAL.index("</s>")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    return hugging_face(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run's directory with one step, of a model of bytes."""
    settings = config(
        tmp_path_factory.mktemp("runs") / "mine",
        model={"layers": 2},
        mesh={"pipeline": 2},
    )
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
    assert (
        opened.marked.encode(["<|end|>"])[0].tolist()
        == [END]
        != opened.tokenizer.encode(["<|end|>"])[0].tolist()
    )


@pytest.mark.parametrize(
    ("generation", "expected", "said"),
    [
        ({"eos_token_id": 3, "transformers_version": "5"}, None, ""),
        (
            {"do_sample": True, "temperature": 0.6, "top_p": 0.9},
            Sampling(0.6, 0, 0.9),
            "says: temperature 0.6, top_p 0.9.",
        ),
        ({"do_sample": True}, Sampling(1.0), "says: temperature 1."),
        (
            {"temperature": 0.7, "top_k": 20, "top_p": None},
            Sampling(0.7, 20),
            "says: temperature 0.7, top_k 20.",
        ),
        ({"do_sample": False, "temperature": 0.6}, Sampling(), ""),
        ({"repetition_penalty": 1.0, "num_beams": 1, "min_p": 0.0}, None, ""),
        (
            {"do_sample": True, "repetition_penalty": 1.05, "min_p": 0.1},
            Sampling(1.0),
            "repetition_penalty, min_p, ... not built here",
        ),
    ],
)
def test_how_tokens_are_drawn_is_as_the_models_makers_have_it(
    generation, expected, said
):
    sampling, asks = _sampling(generation)
    assert sampling == expected and (tells(" ".join(asks), said) if said else not asks)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "hot"),
        ("temperature", -1),
        ("top_p", 0),
        ("top_p", True),
        ("top_k", 2.5),
        ("top_k", -1),
        ("top_p", 10**400),
    ],
)
def test_what_is_no_way_to_draw_tokens_is_refused(copied, name, value):
    (copied / "generation_config.json").write_text(
        json.dumps({"do_sample": True, name: value})
    )
    with pytest.raises(ConfigError, match=rf"^generation_config\.json: {name} is "):
        open_model(copied)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("config_json", "generation", "expected"),
    [
        (7, None, {7}),
        ([7, 8], None, {7, 8}),
        (None, 9, {9}),
        (7, [9, 10], {7, 9, 10}),
        (True, ["x", -1, 1000], set()),
    ],
)
def test_all_end_tokens_are_ends_that_any_file_names(
    copied, config_json, generation, expected
):
    given = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(
        json.dumps(given | {"eos_token_id": config_json})
    )
    if generation is not None:
        (copied / "generation_config.json").write_text(
            json.dumps({"eos_token_id": generation})
        )
    assert open_model(copied).ends == {EOS, END} | expected


def test_a_model_without_a_template_says_why(copied):
    (copied / "tokenizer_config.json").unlink()
    opened = open_model(copied)
    assert (
        opened.template is None and "neither chat_template.jinja nor" in opened.without
    )
    assert opened.ends == {EOS}


@pytest.mark.thorough
def test_a_run_of_bytes_is_opened_by_any_of_its_names_whatever_mesh_it_was_trained_on(
    run,
):
    for path in (run, run / "checkpoints", run / "checkpoints" / "3"):
        opened = open_model(path, length=20)
        assert (opened.name, opened.model.step, opened.tokenizer.name) == (
            "mine",
            3,
            "byte",
        )
        assert (opened.ends, opened.longest, opened.length) == ({256}, 16, 20)
        assert (
            opened.model.config.mesh.devices == 1
            and "the tokenizer byte has none" in opened.without
        )


@pytest.mark.thorough
def test_an_import_keeps_what_lay_beside_the_weights(
    theirs, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(theirs, "hf")
    assert adopt(["import", "hf", "imported", "--set", "mesh.pipeline=2"]) == 0
    shutil.rmtree("hf")
    # to where the config does not say it is
    shutil.move("imported", "moved")
    opened = open_model("moved", mesh="tensor=2")
    assert (
        opened.name == "moved"
        and opened.ends == {EOS, END}
        and opened.template is not None
    )
    assert opened.longest == 64 and opened.model.config.mesh.tensor == 2


@pytest.mark.thorough
def test_weights_are_held_in_what_computes(theirs):
    opened = open_model(theirs, precision="bfloat16")
    assert {str(x.dtype) for x in jax.tree.leaves(opened.model.params)} == {"bfloat16"}


def test_what_cannot_be_opened_is_refused_in_a_sentence(
    theirs, run, copied, tmp_path, monkeypatch
):
    monkeypatch.chdir(theirs.parent)

    def refused(path, **how) -> str:
        with pytest.raises(ConfigError) as caught:
            open_model(path, **how)
        return str(caught.value)

    assert tells(refused("tiny-lama"), "directory tiny-lama; ... mean tiny-llama?")
    assert "hf download meta-llama/Llama-3.1-8B --local-dir Llama-3.1-8B" in refused(
        "meta-llama/Llama-3.1-8B"
    )
    assert "did you mean int8?" in refused(theirs, weights="int4")
    assert "float8, int8" in refused(theirs, weights="gptq")
    assert tells(refused("./no/such/thing"), "no directory ./no/such/thing; give")
    assert "is not a directory; give a run" in refused(theirs / "config.json")
    assert "there is no checkpoint in" in refused(tmp_path.parent / theirs.parent.name)
    assert "there is no step 7" in refused(run, step=7)
    assert "adapter is given" in refused(run, adapter=theirs)
    assert "legal are data, tensor" in refused(theirs, mesh="rows=2")
    assert "without stages" in refused(theirs, mesh="pipeline=2")
    assert "does not divide 1 slots" in refused(theirs, mesh="data=2")
    # a model of images has no text
    assert "model of images (family vit)" in refused(GOLDEN / "vit")
    said = refused(theirs, precision="float8")
    assert tells(said, "precision 'float8' ... did you mean float32?")
    said = refused(theirs, precision="int4")
    assert tells(said, "'int4' ... legal are float32, bfloat16, float16.")
    (copied / "tokenizer.json").rename(copied / "tokenizer.model")
    assert "a tokenizer.model, but no tokenizer.json" in refused(copied)
    (copied / "tokenizer.model").unlink()
    assert "has weights but no tokenizer.json" in refused(copied)


SIZES = {
    "layers": 4,
    "d_model": 96,
    "heads": 6,
    "kv_heads": 6,
    "d_ff": 250,
    "vocab_size": 1001,
}
CONFIG = mt.load({"model": SIZES, "precision": {"compute": "bfloat16"}})


def accelerators(count: int, memory: int) -> list:
    stats = {"bytes_limit": memory}
    return [SimpleNamespace(platform="cuda", memory_stats=lambda: stats)] * count


@pytest.mark.parametrize(("count", "tensor"), [(1, 1), (4, 2), (8, 3), (8, 6)])
def test_it_is_the_smallest_tensor_that_divides_the_heads_and_fits(count, tensor):
    on = mt.load(
        {
            "model": SIZES,
            "precision": {"compute": "bfloat16"},
            "mesh": {"tensor": tensor},
        }
    )
    fits = memory_needs(on, 8, 512).all
    assert choose_mesh(CONFIG, None, 8, 512, accelerators(count, fits)) == MeshConfig(
        tensor=tensor
    )
    if tensor == 1:
        with pytest.raises(
            ConfigError, match=r"has 0\.0; give fewer slots, .*more devices"
        ):
            choose_mesh(CONFIG, None, 8, 512, accelerators(count, fits - 1))


def test_on_a_cpu_it_is_one_device_whatever_it_needs():
    assert choose_mesh(CONFIG, None, 10**6, 10**6, jax.devices()) == MeshConfig()


HYBRID = {
    "pattern": ["linear", "full"],
    "linear": {"key_heads": 2, "value_heads": 4, "key_dim": 8, "value_dim": 6},
}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("mesh", "model"),
    [
        ({"tensor": 4}, {}),
        ({}, {}),
        ({"data": 2, "tensor": 2}, {}),
        ({"tensor": 2}, HYBRID),
    ],
)
def test_what_is_said_to_be_needed_is_what_is_held(mesh, model):
    sizes = {**SIZES, "heads": 8, "kv_heads": 2, **model}
    config = mt.load({"model": sizes, "mesh": mesh, "parallel": {"zero_stage": 0}})
    program = mt.Program(config, masters=False)
    params = jax.jit(
        program.layout.init,
        out_shardings=jax.tree.map(lambda x: x.sharding, program.layout.masters),
    )
    run = Decoding(
        mt.reader.Model(program, params(jax.random.key(0)), 0, GOLDEN), 4, 24
    )
    found = memory_needs(config, 4, 24)
    assert found.weights == sum(map(part_bytes, jax.tree.leaves(run.weights)))
    assert found.cache == sum(map(part_bytes, jax.tree.leaves(run.empty().cache)))


def test_a_mesh_that_is_asked_for_is_taken():
    assert choose_mesh(CONFIG, " tensor=2, data=4", 8, 512) == MeshConfig(
        data=4, tensor=2
    )
    assert choose_mesh(CONFIG, "data=1", 3, 512) == MeshConfig()


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("tensor=4", "mesh.tensor 4 ... model.heads 6; legal are 1, 2, 3, 6"),
        ("data=3", "data=3 ... divide 8 slots; legal are 1, 2, 4, 8"),
        ("pipeline=2", "without stages"),
        ("tenser=2", "did you mean tensor"),
        ("tensor=2,tensor=2", "tensor is given twice"),
        ("tensor", "tensor is ''; ... a whole number"),
        ("tensor=0", "tensor is '0'"),
        ("tensor=²", "tensor is '²'"),
        ("tensor=" + 5000 * "9", "it must be a whole number"),
        ("", "no axis ''; legal are data, tensor"),
    ],
)
def test_a_mesh_that_cannot_be_is_refused_with_what_can(asked, said):
    with pytest.raises(ConfigError) as raised:
        choose_mesh(CONFIG, asked, 8, 512)
    assert tells(str(raised.value), said) and len(str(raised.value)) < 300


@pytest.mark.thorough
def test_the_config_that_a_mesh_is_chosen_for_is_that_of_the_model_read():
    config = read_config(GOLDEN / "qwen3", precision="bfloat16")
    assert config == read_model(GOLDEN / "qwen3", precision="bfloat16").config


def test_what_is_needed_for_a_moment_is_the_prompt_of_one_slot_and_all_logits():
    # eight times the stream, gate and up and their product; float32 logits twice
    assert (
        memory_needs(CONFIG, 8, 5120).moment
        == 5120 * (8 * 96 + 3 * 250) * 2 + 8 * 8 * 1001
    )
