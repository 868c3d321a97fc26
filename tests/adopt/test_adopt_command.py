"""The command's words, and its sentences."""

import os
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("safetensors")

from golden import GOLDEN
from refusals import refused, tells
from safetensors.numpy import save_file

import meshtrain as mt
from meshtrain.adopt.__main__ import main
from meshtrain.adopt.importing import import_weights
from meshtrain.hf.hf_directory import INDEX, TensorFiles

pytestmark = pytest.mark.usefixtures("shared_programs")


def test_inspect_tells_the_section_that_a_config_takes(capsys, tmp_path):
    assert main(["inspect", str(GOLDEN / "qwen2")]) == 0
    said = capsys.readouterr().out
    assert "6,208 parameters" in said or "parameters (" in said
    (tmp_path / "x.yaml").write_text(said)
    assert mt.load(tmp_path / "x.yaml").model.qkv_bias is True


def _replaced(name, old, new):
    return lambda model: (model / name).write_text(
        (model / name).read_text().replace(old, new)
    )


def _text(name, text):
    files = {"tokenizer.json": TOKENIZER, name: text}
    return lambda model: [
        (model / file).write_text(content) for file, content in files.items()
    ]


def _tensor(change):
    def changed(model):
        files = TensorFiles(model)
        save_file(
            {name: change(name, files.tensor(name)) for name in files.names},
            model / "model.safetensors",
        )
        (model / INDEX).unlink()

    return changed


def _file(make):
    """All weights in one file, and something else in its place."""

    def changed(model):
        _tensor(lambda name, array: array)(model)
        make(model / "model.safetensors")

    return changed


def _holding(content):
    """`content`: other bytes, or what becomes of those that there are."""

    def write(path):
        path.write_bytes(content(path.read_bytes()) if callable(content) else content)

    return write


def _instead(make):
    def write(path):
        path.unlink()
        make(path)

    return write


def _header(text):
    return lambda whole: struct.pack("<Q", len(text)) + text + whole[-4096:]


TOKENIZER = '{"model": {"vocab": {"a": 0}}}'
# What a file of weights may be instead; each is refused by its name.
NO_WEIGHTS = {
    "truncated": _holding(lambda whole: whole[: len(whole) // 2]),
    "empty": _holding(b""),
    "zeros": _holding(bytes(4096)),
    "no header": _holding(lambda whole: bytes(8) + whole[8:]),
    "long header": _holding(lambda whole: struct.pack("<Q", 2**40) + whole[8:]),
    "endless header": _holding(lambda whole: struct.pack("<Q", 2**63) + whole[8:]),
    "no JSON": _holding(_header(b"{" * 64)),
    "a list": _holding(_header(b"[]")),
    "nested deep": _holding(_header(b"[" * 100_000)),
    "no tensor": _holding(_header(b"{}")),
    "a dtype": _holding(lambda whole: whole.replace(b'"F32"', b'"F99"', 1)),
    "offsets": _holding(lambda whole: whole[:-64]),
    "a pickle": _holding(b"\x80\x04\x95" + bytes(200)),
    "a page": _holding(b"<html>404</html>"),
    "a pointer": _holding(b"version https://git-lfs.github.com/spec/v1\nsize 1\n"),
    "removed": Path.unlink,
    "a directory": _instead(Path.mkdir),
    "a link to nothing": _instead(lambda path: path.symlink_to("gone")),
    "a link to itself": _instead(lambda path: path.symlink_to(path)),
    "a pipe": _instead(os.mkfifo),
}
BROKEN = {
    **{f"weights {kind}": (_file(make), "hf") for kind, make in NO_WEIGHTS.items()},
    **{
        f"{name} {text[:9]}": (_text(name, text), name)
        for name in ("config.json", INDEX)
        for text in ("{", "[]", "null", "", "[" * 100_000, '{"a":' * 100_000)
    },
    "config digits": (
        _text("config.json", '{"hidden_size": ' + "9" * 5000 + "}"),
        "config.json",
    ),
    "no map": (_text(INDEX, "{}"), "weight_map"),
    "a map that is a list": (_text(INDEX, '{"weight_map": []}'), "weight_map"),
    "an empty map": (_text(INDEX, '{"weight_map": {}}'), "hf"),
    "a file that is a number": (_text(INDEX, '{"weight_map": {"a": 3}}'), "weight_map"),
    "a file with a NUL": (_text(INDEX, '{"weight_map": {"a": "a\\u0000b"}}'), "hf"),
    "a file that is a directory": (_text(INDEX, '{"weight_map": {"a": "."}}'), "hf"),
    "shape": (
        _tensor(
            lambda name, array: array[:-1] if name == "model.norm.weight" else array
        ),
        "is [15]; this model's is [16]",
    ),
    "int8": (
        _tensor(lambda name, array: array.astype(np.int8) if "norm" in name else array),
        "is I8 ... one of",
    ),
    "nan": (
        _tensor(
            lambda name, array: array * np.nan if name == "model.norm.weight" else array
        ),
        "model.norm.weight in",
    ),
    "missing": (
        _replaced(INDEX, "model.norm.weight", "model.other.weight"),
        "but it is not in there",
    ),
    "other layers": (
        _replaced("config.json", '"num_hidden_layers": 3', '"num_hidden_layers": 2'),
        "has no place",
    ),
    "tokenizer": (_text("tokenizer.json", "{"), "tokenizer.json is not JSON"),
    "tokenizer list": (_text("tokenizer.json", "[]"), "must hold a JSON object"),
    "tokenizer deep": (_text("tokenizer.json", "[" * 100_000), "tokenizer.json"),
    "tokenizer empty": (_text("tokenizer.json", ""), "tokenizer.json is not JSON"),
    "vocabulary": (_text("tokenizer.json", "{}"), "it has no vocabulary"),
    "tokenizer_config": (
        _text("tokenizer_config.json", "x"),
        "tokenizer_config.json is not JSON",
    ),
    "generation_config": (
        _text("generation_config.json", "[1"),
        "generation_config.json is not JSON",
    ),
    "generation_config alone": (
        lambda model: (model / "generation_config.json").write_text("[1"),
        "generation_config.json is not JSON",
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
@pytest.mark.parametrize(
    "words", [["inspect", "hf"], ["import", "hf", "out"]], ids=" ".join
)
def test_what_is_not_whole_is_neither_called_so_nor_imported(
    tmp_path, monkeypatch, capsys, kind, words
):
    break_it, says = BROKEN[kind]
    shutil.copytree(GOLDEN / "llama3", tmp_path / "hf")
    break_it(tmp_path / "hf")
    monkeypatch.chdir(tmp_path)
    assert (
        tells(refused(main, capsys, *words), says) and not (tmp_path / "out").exists()
    )


@pytest.mark.thorough
def test_a_run_is_exported_and_read_again_with_the_same_logits(capsys, tmp_path):
    model = {
        "family": "qwen3",
        "layers": 2,
        "d_model": 16,
        "heads": 2,
        "d_ff": 32,
        "vocab_size": 260,
    }
    train = {"steps": 1, "global_batch_size": 2, "sequence_length": 8}
    run = {"directory": str(tmp_path / "run")}
    assert (
        mt.train(
            mt.load(
                {
                    "run": run,
                    "model": model,
                    "data": {"source": "synthetic"},
                    "train": train,
                }
            )
        ).exit_code
        == 0
    )
    assert (
        main(
            [
                "export",
                str(tmp_path / "run"),
                str(tmp_path / "hf"),
                "--dtype",
                "float32",
            ]
        )
        == 0
    )
    one, two = (
        mt.read_model(tmp_path / name)([[5, 6, 7, 8]]) for name in ("run", "hf")
    )
    assert (one == two).all()


def test_weights_that_leave_without_a_tokenizer_say_so_and_a_directory_that_is_there_is_left_before_anything_is_read(
    capsys, tmp_path
):
    assert main(["export", str(GOLDEN / "gpt2"), str(tmp_path / "hf")]) == 0
    assert "no tokenizer was found" in capsys.readouterr().err
    assert main(["export", str(GOLDEN / "vit"), str(tmp_path / "of-images")]) == 0
    assert capsys.readouterr().err == ""
    with pytest.raises(mt.ConfigError, match="already exists"):
        import_weights(mt.load({}), Path("/no/such"), tmp_path / "hf")


@pytest.mark.parametrize(
    "words, says",
    [
        (["inspect", "/no/such"], "/no/such/config.json cannot be read"),
        (["export", str(GOLDEN / "gpt2"), str(GOLDEN)], "already exists"),
        (["exprot", "a", "b"], "did you mean export?"),
        (["export", "/no/such", "/no/out"], "/no/such"),
        (["export", str(GOLDEN / "gpt2"), f"{__file__}/out"], "test_adopt_command.py"),
        (["export", str(GOLDEN / "gpt2"), "/no/out", "--step", "last"], "--step"),
        (["export", str(GOLDEN / "gpt2"), "/no/out", "--dtype", "int8"], "--dtype"),
        (["config", "/no/such.yaml"], "there is no config file /no/such.yaml"),
        (["config"], "the following arguments are required: FILE"),
        (["config", "x.yaml", "--devices", "0"], "'0' ... at least 1"),
        (
            ["export", str(GOLDEN / "gpt2"), "/no/out", "--tokenizer", "/no"],
            "not a directory with a tokenizer.json",
        ),
    ],
)
def test_a_mistake_gets_one_sentence(capsys, words, says):
    assert tells(refused(main, capsys, *words), says)
