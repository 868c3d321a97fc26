"""Matrices in float8 are read as their numbers times their blocks' scales, whichever box is asked for."""

import json

import numpy as np
import pytest

pytest.importorskip("safetensors")

import ml_dtypes

from meshtrain.hf.hf_directory import TensorFiles


def written(directory, arrays):
    """Writes arrays as safetensors lays them out, by hand: its NumPy side writes no float8."""
    header, data = {}, b""
    for name, x in arrays.items():
        dtype = {"float8_e4m3fn": "F8_E4M3", "float32": "F32"}[x.dtype.name]
        header[name] = {
            "dtype": dtype,
            "shape": list(x.shape),
            "data_offsets": [len(data), len(data) + x.nbytes],
        }
        data += x.tobytes()
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (directory / "model.safetensors").write_bytes(
        len(text).to_bytes(8, "little") + text + data
    )


@pytest.mark.parametrize(
    "box", [(slice(0, 200), slice(0, 300)), (slice(120, 131), slice(250, 260))]
)
def test_a_box_has_its_blocks_scales(tmp_path, box):
    draw = np.random.default_rng(0)
    numbers = draw.standard_normal((200, 300)).astype(ml_dtypes.float8_e4m3fn)
    scales = draw.uniform(0.5, 2, (2, 3)).astype(np.float32)
    other = draw.standard_normal((3, 5)).astype(np.float32)
    name = "model.layers.0.mlp.up_proj.weight"
    written(tmp_path, {"other": other, name: numbers, f"{name}_scale_inv": scales})
    files = TensorFiles(tmp_path)
    assert sorted(files.names) == sorted(["other", name])
    assert files.dtype(name) == "BF16"
    wanted = (
        numbers.astype(np.float32) * np.kron(scales, np.ones((128, 128)))[:200, :300]
    )
    np.testing.assert_array_equal(files.read(name, box), wanted[box].astype(np.float32))
    np.testing.assert_array_equal(files.tensor("other"), other)
