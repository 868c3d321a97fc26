"""ViT of transformers on every mesh: its logits from the pixels on, and its files again as they were."""

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from refusals import tells

pytest.importorskip("safetensors")

from golden import GOLDEN, MESHES

import meshtrain as mt
from meshtrain.adopt.__main__ import main
from meshtrain.adopt.exporting import export, live_source
from meshtrain.config import load
from meshtrain.config.follow import replaced
from meshtrain.data.images.pixels import patches, scaling
from meshtrain.errors import ConfigError
from meshtrain.hf import loading
from meshtrain.hf.hf_directory import PREPROCESSOR, TensorFiles, config_of
from meshtrain.hf.mapping import mappings
from meshtrain.hf_families import CONFIG, config_json, model_section, read_json
from meshtrain.model.weights import weights

THEIRS = GOLDEN / "vit"


@functools.cache
def adopted(mesh: str = "one") -> tuple[mt.Program, Any]:
    """The program on a mesh, and the directory's weights there."""
    (data, tensor, pipeline), parallel = MESHES[mesh]
    sizes = {"data": data, "tensor": tensor, "pipeline": pipeline}
    program = mt.Program(replaced(config_of(THEIRS), mesh=sizes, parallel=parallel))
    return program, loading.read(program.layout, THEIRS)


def read(program: mt.Program) -> np.ndarray:
    """The golden images as our data hands them over, with the directory's mean and deviation."""
    images, model = program.config.data.images, program.config.model
    factor, term = scaling(images.mean, images.std, model.channels)
    return patches(np.load(THEIRS / "pixels.npy") * factor + term, model.patch_size)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "mesh", [pytest.param("one", marks=pytest.mark.slow), "2x2x2", "uneven stages"]
)
def test_logits_are_those_of_transformers(mesh):
    program, params = adopted(mesh)
    rows = np.resize(read(program), (4, 9, 75))
    logits = program.logits(params, jax.device_put(rows, program.batch_sharding))[:3, 0]
    np.testing.assert_allclose(logits, np.load(THEIRS / "logits.npy"), atol=1e-5)


def export_beside_theirs(program, params, out):
    export(
        program.config,
        live_source(program.layout, params),
        out,
        "float32",
        hf_config=read_json(THEIRS / CONFIG),
    )


@pytest.mark.thorough
@pytest.mark.parametrize("mesh", ["2x2x2", "padded data"])
def test_there_and_back_every_bit_and_name_is_kept(tmp_path, mesh):
    (program, params), files = adopted(mesh), TensorFiles(THEIRS)
    export_beside_theirs(program, params, tmp_path / "out")
    written = TensorFiles(tmp_path / "out")
    # the pooler is read by none of their models of classes
    assert sorted(written.names) == sorted(
        name for name in files.names if "pooler" not in name
    )
    for name in written.names:
        np.testing.assert_array_equal(written.tensor(name), files.tensor(name))
    again, before = (read_json(path / CONFIG) for path in (tmp_path / "out", THEIRS))
    ours = {key: again[key] for key in again if key not in ("torch_dtype",)}
    assert ours == {key: before[key] for key in ours}
    assert config_of(tmp_path / "out") == config_of(THEIRS)


@pytest.mark.thorough
def test_a_box_of_the_patches_is_read_as_the_whole_is(monkeypatch):
    """Whatever share of a patch's numbers a device has."""
    model = config_of(THEIRS).model
    weight = next(
        weight for weight in weights(model) if weight.name == "embedding.patches"
    )
    mapping, theirs = (
        mappings(model)[weight.name],
        np.arange(20 * 75).reshape(20, 3, 5, 5),
    )
    ours = mapping.cut((slice(0, 75), slice(0, 20)), theirs)
    # numbers of a patch lie by row, column, channel
    assert ours[(2 * 5 + 4) * 3 + 1, 7] == theirs[7, 1, 2, 4]
    box = (slice(19, 38), slice(3, 11))
    np.testing.assert_array_equal(mapping.cut(box, theirs[mapping.box(box)]), ours[box])
    np.testing.assert_array_equal(mapping.converted(ours), theirs)
    program, whole = adopted()
    monkeypatch.setattr(loading, "PIECE", 400)
    jax.tree.map(
        np.testing.assert_array_equal, loading.read(program.layout, THEIRS), whole
    )


@pytest.mark.thorough
def test_an_imported_one_says_what_theirs_does_and_is_exported_with_its_labels(
    tmp_path, capsys
):
    assert (
        main(["inspect", str(THEIRS)]) == 0 and "family: vit" in capsys.readouterr().out
    )
    assert main(["import", str(THEIRS), str(tmp_path / "imported")]) == 0
    model = mt.read_model(tmp_path / "imported")
    assert model.config.data.images == config_of(THEIRS).data.images
    np.testing.assert_allclose(
        model(read(model.program)), np.load(THEIRS / "logits.npy"), atol=1e-5
    )
    np.testing.assert_array_equal(
        mt.read_model(THEIRS)(read(model.program)), model(read(model.program))
    )
    assert (
        main(
            [
                "export",
                str(tmp_path / "imported"),
                str(tmp_path / "out"),
                "--dtype",
                "float32",
            ]
        )
        == 0
    )
    assert "tokenizer" not in capsys.readouterr().err
    again, before = (read_json(path / CONFIG) for path in (tmp_path / "out", THEIRS))
    assert again["id2label"] == before["id2label"]
    again, before = (
        read_json(path / PREPROCESSOR) for path in (tmp_path / "out", THEIRS)
    )
    assert again == before


@pytest.mark.parametrize(
    "file, change, says",
    [
        (CONFIG, {"architectures": ["ViTModel"]}, "has no classes"),
        (CONFIG, {"head_dim": 8}, "head_dim 8"),
        (CONFIG, {"hidden_act": "mish"}, "'mish'"),
        (
            CONFIG,
            {"image_size": [15, 20]},
            "image_size [15, 20] is not computed here ... square's",
        ),
        (CONFIG, {"image_size": "x"}, "image_size is 'x' ... whole number"),
        (
            CONFIG,
            {"patch_size": 4},
            "model.patch_size 4 does not divide model.image_size 15",
        ),
        (
            CONFIG,
            {"num_channels": 1},
            "data.images.mean has 3 numbers, but model.channels is 1",
        ),
        (
            CONFIG,
            {"hidden_size": 24},
            "is [20, 3, 5, 5]; this model's is [24, 3, 5, 5]",
        ),
        (CONFIG, {"id2label": {"0": "cat", "1": "dog"}}, "classifier.weight"),
        (CONFIG, {"id2label": ["cat"]}, "id2label is ['cat'] ... mapping"),
        # whose positions transformers would stretch if it were told to
        (CONFIG, {"image_size": 20}, "position_embeddings"),
        (PREPROCESSOR, {"do_rescale": False}, "rescale_factor must be 1 / 255"),
        (PREPROCESSOR, {"image_mean": [0.5, 0.5]}, "data.images.mean"),
        (PREPROCESSOR, {"image_std": "x"}, "data.images.std"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(tmp_path, file, change, says):
    copy = Path(shutil.copytree(THEIRS, tmp_path / "model"))
    (copy / file).write_text(json.dumps(json.loads((copy / file).read_text()) | change))
    with pytest.raises(ConfigError) as error:
        loading.check(config_of(copy).model, TensorFiles(copy))
    assert tells(str(error.value), says) and "\n" not in str(error.value)


def test_a_square_may_be_given_by_both_its_sides(tmp_path):
    copy = Path(shutil.copytree(THEIRS, tmp_path / "model"))
    (copy / CONFIG).write_text(
        json.dumps(
            read_json(copy / CONFIG) | {"image_size": [15, 15], "patch_size": [5, 5]}
        )
    )
    assert config_of(copy) == config_of(THEIRS)


@pytest.mark.parametrize(
    "given, resize, mean",
    [
        ({"size": 15}, "stretch", ()),
        ({"size": {"shortest_edge": 15}, "image_mean": 0.3}, "crop", (0.3,)),
        (
            {
                "size": {"height": 15, "width": 15},
                "do_normalize": False,
                "image_mean": [0.5] * 3,
            },
            "stretch",
            (0.0,),
        ),
    ],
)
def test_what_is_said_of_pixels_is_read(tmp_path, given, resize, mean):
    copy = Path(shutil.copytree(THEIRS, tmp_path / "model"))
    (copy / PREPROCESSOR).write_text(json.dumps(given))
    found = config_of(copy).data.images
    assert (found.resize, found.mean) == (resize, mean)


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"activation": "relu", "qkv_bias": False},
        {"activation": "gelu", "d_ff": 7, "vocab_size": 2},
    ],
)
def test_what_their_class_can_hold_is_read_again_as_it_was(keys):
    given = {
        "family": "vit",
        "layers": 2,
        "d_model": 32,
        "heads": 4,
        "image_size": 6,
        "patch_size": 3,
        "channels": 1,
    }
    model = load({"model": given | keys, "data": {"source": "synthetic"}}).model
    section = model_section(config_json(vars(model), 5, "float32"), "x")
    assert load({"model": section, "data": {"source": "synthetic"}}).model == model


def test_the_mean_of_patches_is_none_of_theirs():
    with pytest.raises(
        ConfigError,
        match=r"ViTForImageClassification of transformers cannot hold model\.pool mean\.$",
    ):
        config_json(
            vars(replaced(config_of(THEIRS), model={"pool": "mean"}).model),
            9,
            "float32",
        )


def test_transformers_reads_what_was_exported(tmp_path):
    """Where torch and transformers are (extra parity)."""
    torch, hf = (pytest.importorskip(name) for name in ("torch", "transformers"))
    program, params = adopted()
    export_beside_theirs(program, params, tmp_path / "out")
    of_images = hf.AutoModelForImageClassification
    read, told = of_images.from_pretrained(
        tmp_path / "out", dtype=torch.float32, output_loading_info=True
    )
    assert not (
        told["missing_keys"] or told["unexpected_keys"] or told["mismatched_keys"]
    )
    assert read.config.id2label[3] == "fish"
    processor = hf.AutoImageProcessor.from_pretrained(tmp_path / "out")
    given = processor(
        list(np.load(THEIRS / "pixels.npy")),
        input_data_format="channels_last",
        return_tensors="pt",
    )
    with torch.no_grad():
        np.testing.assert_allclose(
            read.eval()(**given).logits, np.load(THEIRS / "logits.npy"), atol=1e-5
        )
