"""What lies in a stranger's directory: names with and without a prefix, adapters by any of their names, numbers that
are none, pipes.
"""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("safetensors")

from golden import GOLDEN
from safetensors.numpy import load_file, save_file
from tiny_models import hugging_face

from meshtrain.adopt.__main__ import main
from meshtrain.data.tokenizer import load_tokenizer
from meshtrain.errors import ConfigError
from meshtrain.generate.opened import open_model
from meshtrain.hf import loading, peft
from meshtrain.hf.hf_directory import TensorFiles, config_of
from meshtrain.hf.mapping import layers, mappings
from meshtrain.hf.peft import Adapters
from meshtrain.model.weights import adapters

FILE = f"{peft.STEM}.safetensors"
HEADS = ("lm_head.", "classifier.")
PREFIXES = {"gpt2": "transformer.", "vit": "vit."}
FAMILIES = sorted(
    path.name for path in GOLDEN.iterdir() if (path / "config.json").is_file()
)


def renamed(directory: Path, rename) -> None:
    """Names the tensors of all files of a directory otherwise, and in an index too."""
    for path in directory.glob("*.safetensors"):
        save_file(
            {rename(name): array for name, array in load_file(path).items()},
            path,
            metadata={"format": "pt"},
        )
    for path in directory.glob("*.index.json"):
        index = json.loads(path.read_text())
        index["weight_map"] = {
            rename(name): file for name, file in index["weight_map"].items()
        }
        path.write_text(json.dumps(index))


def numbers(directory: Path) -> dict[str, np.ndarray]:
    config, files = config_of(directory), TensorFiles(directory)
    loading.check(config.model, files)
    read = loading.layer_source(config.model, files)
    weights = [mapping.weight for mapping in mappings(config.model, files).values()]
    return {
        f"{weight.name} {layer}": read(weight, layer)
        for weight in weights
        for layer in layers(weight)
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_without_the_heads_prefix_are_read_alike(family, tmp_path):
    """As transformers writes them of the class without a head, beside the head itself."""
    theirs = json.loads((GOLDEN / family / "config.json").read_text())["model_type"]
    prefix, copy = (
        PREFIXES.get(theirs, "model."),
        shutil.copytree(GOLDEN / family, tmp_path / family),
    )
    renamed(
        copy, lambda name: name if name.startswith(HEADS) else name.removeprefix(prefix)
    )
    assert not any(
        name.startswith(prefix)
        for path in copy.glob("*.safetensors")
        for name in load_file(path)
    )
    expected, found = numbers(GOLDEN / family), numbers(copy)
    assert expected.keys() == found.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(array, found[name])


def test_weights_without_a_head_that_is_not_tied_are_refused(tmp_path, capsys):
    copy = shutil.copytree(GOLDEN / "llama3", tmp_path / "base")
    given = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(
        json.dumps(given | {"tie_word_embeddings": False})
    )
    tensors = {}
    for path in list(copy.glob("model*")):
        tensors |= load_file(path) if path.suffix == ".safetensors" else {}
        path.unlink()
    tensors = {
        name.removeprefix("model."): array
        for name, array in tensors.items()
        if name != "lm_head.weight"
    }
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    assert main(["inspect", str(copy)]) == 2
    assert "has no lm_head.weight" in capsys.readouterr().err


def test_a_tensor_that_stands_under_both_names_is_refused(tmp_path):
    path = GOLDEN / "qwen3_lora"
    copy = shutil.copytree(path, tmp_path / "lora")
    tensors = load_file(copy / FILE)
    name = next(iter(tensors))
    save_file(
        tensors | {name.removeprefix("base_model.model."): tensors[name]}, copy / FILE
    )
    with pytest.raises(ConfigError, match="which are one tensor"):
        Adapters(copy, config_of(GOLDEN / "qwen3").model)


NAMES = {
    "of the class without a head": lambda name, prefix: name.replace(
        f"base_model.model.{prefix}", "base_model.model."
    ),
    "with the adapter's name": lambda name, prefix: name.replace(
        ".weight", ".default.weight"
    ),
    "without PEFT's prefix": lambda name, prefix: name.removeprefix(
        "base_model.model."
    ),
    "without any": lambda name, prefix: name.removeprefix(f"base_model.model.{prefix}"),
}


@pytest.mark.parametrize("names", NAMES)
@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_adapters_are_read_by_any_of_the_names_that_peft_has_for_them(
    family, names, tmp_path
):
    copy = shutil.copytree(GOLDEN / f"{family}_lora", tmp_path / "lora")
    prefix = PREFIXES.get(family, "model.")
    save_file(
        {NAMES[names](n, prefix): array for n, array in load_file(copy / FILE).items()},
        copy / FILE,
    )
    model = config_of(GOLDEN / family).model
    expected, found = Adapters(GOLDEN / f"{family}_lora", model), Adapters(copy, model)
    for weight in adapters(model, expected.lora):
        for layer in range(model.layers):
            np.testing.assert_array_equal(
                expected.read(weight, layer), found.read(weight, layer)
            )


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("command", ["merge", "import", "read"])
def test_an_adapter_with_a_number_that_is_none_is_refused_however_it_comes_in(
    command, value, tmp_path, capsys
):
    copy = shutil.copytree(GOLDEN / "qwen3_lora", tmp_path / "lora")
    tensors = load_file(copy / FILE)
    name = sorted(tensors)[-1]
    tensors[name] = tensors[name].copy()
    tensors[name].flat[-1] = value
    save_file(tensors, copy / FILE)
    base, out = str(GOLDEN / "qwen3"), tmp_path / "out"
    if command == "read":
        with pytest.raises(ConfigError, match="contains NaN or infinity"):
            Adapters(copy, config_of(GOLDEN / "qwen3").model)
        return
    assert main([command, base, str(out), "--adapter", str(copy)]) == 2
    assert "contains NaN or infinity" in capsys.readouterr().err and not out.exists()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("tensor", ["first", "last"])
@pytest.mark.parametrize("command", ["merge", "import", "inspect", "export"])
def test_a_model_with_a_number_that_is_none_is_refused_however_it_comes_in(
    command, tensor, value, tmp_path, capsys
):
    copy, out = shutil.copytree(GOLDEN / "qwen3", tmp_path / "model"), tmp_path / "out"
    at = 0 if tensor == "first" else -1
    file = sorted(copy.glob("*.safetensors"))[at]
    tensors = load_file(file)
    name = sorted(tensors)[at]
    tensors[name] = tensors[name].copy()
    tensors[name].flat[-1] = value
    save_file(tensors, file)
    adapter = ["--adapter", str(GOLDEN / "qwen3_lora")] if command == "merge" else []
    assert (
        main(
            [
                command,
                str(copy),
                *([] if command == "inspect" else [str(out)]),
                *adapter,
            ]
        )
        == 2
    )
    said = capsys.readouterr().err
    assert (
        f"{name} in {copy} contains NaN or infinity" in said.replace("\n", " ")
        and not out.exists()
    )


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    return hugging_face(tmp_path_factory.mktemp("models") / "tiny-llama")


WRONG = [
    ("temperature", float("nan")),
    ("temperature", -1),
    ("temperature", "0.5"),
    ("temperature", True),
    ("temperature", float("inf")),
    ("temperature", 10**400),
    ("top_p", 0),
    ("top_p", 1.5),
    ("top_p", -0.1),
    ("top_p", float("nan")),
    ("top_p", True),
    ("top_p", "1"),
    ("top_k", -1),
    ("top_k", 2.5),
    ("top_k", True),
    ("top_k", "50"),
    ("top_k", 10**30),
    ("do_sample", "yes"),
    ("do_sample", 1),
]
IDS = [
    ("eos_token_id", value)
    for value in ("x", -1, 10**30, True, 1.0, [1, "x"], {"a": 1})
]


@pytest.mark.parametrize(("key", "value"), [*WRONG, *IDS, ("bos_token_id", -1)])
@pytest.mark.parametrize("command", ["inspect", "import"])
def test_what_is_no_way_to_generate_is_refused_where_it_comes_in(
    command, key, value, theirs, tmp_path, capsys
):
    copy = shutil.copytree(theirs, tmp_path / "copy")
    (copy / "generation_config.json").write_text(json.dumps({key: value}))
    assert (
        main(
            [
                command,
                str(copy),
                *([] if command == "inspect" else [str(tmp_path / "out")]),
            ]
        )
        == 2
    )
    said = capsys.readouterr().err
    assert (
        f"generation_config.json: {key} is " in said
        and "it must be " in said
        and not (tmp_path / "out").exists()
    )


@pytest.mark.parametrize(
    "name", ["model.safetensors", "adapter_config.json", "adapter_model.safetensors"]
)
def test_a_pipe_in_the_place_of_a_file_is_refused_at_once(
    name, theirs, tmp_path, capsys
):
    copy = shutil.copytree(theirs, tmp_path / "copy")
    lora = shutil.copytree(GOLDEN / "qwen3_lora", tmp_path / "lora")
    if name.startswith("adapter"):
        (lora / name).unlink()
        os.mkfifo(lora / name)
        assert (
            main(
                [
                    "merge",
                    str(GOLDEN / "qwen3"),
                    str(tmp_path / "out"),
                    "--adapter",
                    str(lora),
                ]
            )
            == 2
        )
    else:
        for path in copy.glob("model*"):
            path.unlink()
        os.mkfifo(copy / "shard.safetensors")
        (copy / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": {"a": "shard.safetensors"}})
        )
        assert main(["inspect", str(copy)]) == 2
    said = capsys.readouterr().err
    assert "is a pipe" in said or "has neither" in said


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
        "model.safetensors.index.json",
        "special_tokens_map.json",
    ],
)
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_no_file_of_a_directory_is_waited_for(name, kind, theirs, tmp_path):
    copy = shutil.copytree(theirs, tmp_path / "copy")
    (copy / name).unlink(missing_ok=True)
    os.mkfifo(copy / name) if kind == "pipe" else os.symlink("/dev/zero", copy / name)
    # either it is taken as not there, or refused
    try:
        TensorFiles(copy), config_of(copy), load_tokenizer(str(copy / "tokenizer.json"))
    except ConfigError as error:
        assert str(error).count(".") >= 1


@pytest.mark.thorough
def test_ids_that_no_model_has_are_left_out_with_a_sentence(theirs, tmp_path):
    copy = shutil.copytree(theirs, tmp_path / "copy")
    (copy / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [2, 10**6, "x"]})
    )
    said = " ".join(open_model(copy).asks)
    assert "1000000 of generation_config.json is left out" in said
    assert "generation_config.json: eos_token_id is 'x', which is left out" in said
