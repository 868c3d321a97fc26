"""MXFP4: blocks of 32 numbers of four bits that share a power of two (Open Compute Project, Microscaling Formats 1.0,
2023).

    NAME_blocks  uint8 [..., rows, blocks, 16]    two numbers a byte, the lower half first
    NAME_scales  uint8 [..., rows, blocks]        of each block: the exponent, and 127
    NAME         [..., 32 blocks, rows]           what they stand for: rows are columns in gpt-oss's matrices

Every number is exact in bfloat16 and in float32.
"""

from collections.abc import Callable

import numpy as np

BLOCKS = "_blocks"
SCALES = "_scales"
BLOCK = 32
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
NUMBERS = np.array([*MAGNITUDES, *(-x for x in MAGNITUDES)], np.float32)

Read = Callable[[str, tuple[slice, ...]], np.ndarray]


def shape(blocks: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape of the matrices, of that of their blocks."""
    *outer, rows, count, _ = blocks
    return (*outer, BLOCK * count, rows)


def read(read: Read, name: str, box: tuple[slice, ...]) -> np.ndarray:
    """Returns a box of the matrices, float32, with a function that reads boxes of their two tensors."""
    *outer, inputs, rows = box
    count = slice(inputs.start // BLOCK, -(-inputs.stop // BLOCK))
    blocks = read(f"{name}{BLOCKS}", (*outer, rows, count, slice(0, BLOCK // 2)))
    scales = read(f"{name}{SCALES}", (*outer, rows, count))
    first = inputs.start - BLOCK * count.start
    return np.swapaxes(numbers(blocks, scales), -1, -2)[
        ..., first : first + inputs.stop - inputs.start, :
    ]


def numbers(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Returns float32 [..., rows, 32 blocks]."""
    pairs = np.stack([NUMBERS[blocks & 15], NUMBERS[blocks >> 4]], -1)
    scaled = np.ldexp(pairs, scales.astype(np.int32)[..., None, None] - 127)
    return scaled.reshape(*scales.shape[:-1], -1)
