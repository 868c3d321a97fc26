"""Matrices in float8 with a float32 scale for each block of 128 x 128 (DeepSeek-V3, section 3.3), as the hub has them.

    NAME             float8 e4m3 [rows, columns]
    NAME_scale_inv   float32 [rows / 128, columns / 128], rounded up: what the numbers of a block are multiplied by

safetensors reads no float8 as NumPy's, so its bytes are taken from the file: behind a header of JSON, which says where
each tensor begins (huggingface/safetensors, README).

The products of attention and the MLPs are written so, as in DeepSeek's own files. Embeddings, routers, norms and what
joins the inputs of a prediction stay in bfloat16.
"""

import json
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np

SCALES = "_scale_inv"
BLOCK = 128
DTYPE = "F8_E4M3"
NUMPY = np.dtype(ml_dtypes.float8_e4m3fn)
LARGEST = float(ml_dtypes.finfo(NUMPY).max)
# quantization_config of config.json
CONFIG = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "weight_block_size": [BLOCK, BLOCK],
    "activation_scheme": "dynamic",
}

Read = Callable[[str, tuple[slice, ...]], np.ndarray]


def read_bytes(path: Path, name: str, box: tuple[slice, ...]) -> np.ndarray:
    """Returns a box of a tensor in float8, from a file that safetensors has opened."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        field = json.loads(file.read(length))[name]
    start = 8 + length + field["data_offsets"][0]
    mapped = np.memmap(path, np.uint8, "r", start, tuple(field["shape"]))
    return np.ascontiguousarray(mapped[box]).view(NUMPY)


def read(
    numbers: np.ndarray, read: Read, name: str, box: tuple[slice, ...]
) -> np.ndarray:
    """Returns float32 numbers of a box times their blocks' scales, with a function that reads boxes of tensors."""
    blocks = tuple(slice(s.start // BLOCK, -(-s.stop // BLOCK)) for s in box)
    scales = read(f"{name}{SCALES}", blocks)
    of_row, of_column = (
        np.arange(s.start, s.stop) // BLOCK - by.start
        for s, by in zip(box, blocks, strict=True)
    )
    return numbers.astype(np.float32) * scales[of_row][:, of_column]


def is_quantized(name: str) -> bool:
    """Returns whether files in float8 have a tensor so."""
    return name.endswith("_proj.weight") and not name.endswith("eh_proj.weight")


def quantized(name: str, matrix: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the tensors of a matrix [rows, columns]: numbers over their block's scale, and the scales.

    The largest of a block becomes float8's largest.
    """
    rows, columns = matrix.shape
    padded = np.pad(matrix.astype(np.float32), [(0, -n % BLOCK) for n in matrix.shape])
    blocks = padded.reshape(-(-rows // BLOCK), BLOCK, -1, BLOCK)
    largest = np.abs(blocks).max(axis=(1, 3))
    scales = np.where(largest > 0, largest / np.float32(LARGEST), np.float32(1))
    numbers = (blocks / scales[:, None, :, None]).reshape(padded.shape)[:rows, :columns]
    return {name: np.ascontiguousarray(numbers, NUMPY), f"{name}{SCALES}": scales}
