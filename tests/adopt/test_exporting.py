"""What is written is what was read, on every mesh."""

import json
from itertools import product

import numpy as np
import pytest

pytest.importorskip("safetensors")

from covering import covering, slow_but
from golden import FAMILIES, GOLDEN, MESHES, adopted
from safetensors.numpy import save_file

from meshtrain.adopt.exporting import export, live_source
from meshtrain.config import load
from meshtrain.errors import ConfigError
from meshtrain.hf import loading
from meshtrain.hf.hf_directory import INDEX, SINGLE, TensorFiles, config_of
from meshtrain.hf_families import CONFIG, model_section, read_json


def whole(files: TensorFiles, name: str) -> np.ndarray:
    return files.read(name, tuple(slice(0, n) for n in files.shape(name)))


DTYPES = ("float32", "bfloat16")
NOW = [("gpt2", "2x2x2", "bfloat16"), ("gemma3", "uneven stages", "float32")]
COVERING = NOW + covering(list(product(FAMILIES, MESHES, DTYPES)), beside=NOW)


FEW = list(
    {
        case[0]: case
        for case in COVERING
        if case[0] not in {family for family, *_ in NOW}
    }.values()
)  # each other family once


@pytest.mark.thorough
@pytest.mark.parametrize("case", slow_but(COVERING, NOW + FEW), ids=str)
def test_there_and_back_every_bit_and_name_is_kept(tmp_path, case):
    family, mesh, dtype = case
    program, files = adopted(GOLDEN / family, mesh)
    params = loading.load(program.layout, files)
    tokenizer = tmp_path / "mine.json"
    tokenizer.write_text('{"model": {"vocab": {"a": 0}}}')
    source = live_source(program.layout, params)
    export(
        program.config,
        source,
        tmp_path / "out",
        dtype,
        {"tokenizer.json": tokenizer},
        part=20_000,
    )
    written = TensorFiles(tmp_path / "out")
    assert sorted(written.names) == sorted(files.names)
    for name in files.names:
        wanted = whole(files, name)
        np.testing.assert_array_equal(
            whole(written, name), wanted.astype(whole(written, name).dtype)
        )
        assert written.dtype(name) == {"float32": "F32", "bfloat16": "BF16"}[dtype]
    section = model_section(read_json(tmp_path / "out" / CONFIG), "out")
    again = load(
        {
            "model": section,
            "train": {"sequence_length": program.config.train.sequence_length},
        }
    )
    assert again.model == program.config.model
    assert (tmp_path / "out" / "tokenizer.json").is_file() and not list(
        tmp_path.glob("*.writing")
    )
    index = (
        json.loads((tmp_path / "out" / INDEX).read_text())
        if (tmp_path / "out" / INDEX).is_file()
        else None
    )
    assert index is None or index["metadata"]["total_size"] == sum(
        whole(written, n).nbytes for n in written.names
    )


def with_merged_experts(golden, to, names):
    """A directory with the experts of each layer merged, as transformers 5 writes them with
    save_original_format=False.
    """
    files, tensors = TensorFiles(golden), {}
    experts = [name for name in files.names if ".experts." in name]
    for name in (name for name in files.names if ".experts." not in name):
        tensors[name.replace("block_sparse_moe", "mlp")] = whole(files, name)
    for layer in sorted({name.split(".")[2] for name in experts}):
        prefix, mlp = f"model.layers.{layer}.mlp.experts", experts[0].split(".")[3]
        count = len({name.split(".")[5] for name in experts})
        gate, up, down = (
            np.stack(
                [
                    whole(files, f"model.layers.{layer}.{mlp}.experts.{e}.{of}.weight")
                    for e in range(count)
                ]
            )
            for of in names
        )
        tensors |= {
            f"{prefix}.gate_up_proj": np.concatenate([gate, up], 1),
            f"{prefix}.down_proj": down,
        }
    to.mkdir()
    save_file(tensors, str(to / SINGLE), metadata={"format": "pt"})
    (to / CONFIG).write_text((golden / CONFIG).read_text())
    return to


MERGED = {"mixtral": ("w1", "w3", "w2"), "olmoe": ("gate_proj", "up_proj", "down_proj")}
MERGED["qwen3_moe"] = MERGED["olmoe"]


def are_the_same(written, wanted):
    assert sorted(written.names) == sorted(wanted.names)
    for name in wanted.names:
        np.testing.assert_array_equal(whole(written, name), whole(wanted, name))


@pytest.mark.parametrize("family", MERGED)
def test_merged_experts_are_read_and_written_one_by_one(tmp_path, family):
    merged = with_merged_experts(GOLDEN / family, tmp_path / "merged", MERGED[family])
    model, files = config_of(merged).model, TensorFiles(merged)
    loading.check(model, files)
    export(
        config_of(merged),
        loading.layer_source(model, files),
        tmp_path / "out",
        "float32",
    )
    are_the_same(TensorFiles(tmp_path / "out"), TensorFiles(GOLDEN / family))


@pytest.mark.thorough
@pytest.mark.parametrize("family", MERGED)
def test_merged_experts_lie_on_a_mesh_as_others_do(tmp_path, family):
    program, files = adopted(
        with_merged_experts(GOLDEN / family, tmp_path / "merged", MERGED[family]),
        "2x2x2",
    )
    source = live_source(program.layout, loading.load(program.layout, files))
    export(program.config, source, tmp_path / "out", "float32")
    are_the_same(TensorFiles(tmp_path / "out"), TensorFiles(GOLDEN / family))


def test_one_part_has_no_index(tmp_path):
    program, files = adopted(GOLDEN / "llama3")
    export(
        program.config,
        loading.layer_source(program.config.model, files),
        tmp_path / "out",
    )
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        CONFIG,
        SINGLE,
    ]


def test_a_bias_of_the_routers_is_refused_and_not_left_out(tmp_path):
    config = config_of(GOLDEN / "mixtral", overrides=["model.moe.balance=bias"])
    read = loading.layer_source(config.model, TensorFiles(GOLDEN / "mixtral"))
    export(config, read, tmp_path / "zeros", "float32")
    says = r"MixtralForCausalLM .* no bias .* model\.moe\.balance bias"
    with pytest.raises(ConfigError, match=says):
        export(
            config,
            lambda weight, layer: read(weight, layer) + weight.counts * (layer == 2),
            tmp_path / "out",
        )
    assert [path.name for path in tmp_path.iterdir()] == ["zeros"]


def test_what_float16_cannot_hold_is_refused_and_not_infinite(tmp_path):
    _, files = adopted(GOLDEN / "llama3")
    config = config_of(GOLDEN / "llama3")
    read = loading.layer_source(config.model, files)
    with pytest.raises(ConfigError, match="has numbers beyond float16"):
        export(
            config,
            lambda weight, layer: 1e5 * read(weight, layer),
            tmp_path / "out",
            "float16",
        )
    assert not list(tmp_path.iterdir())
