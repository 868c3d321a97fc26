"""What kernels of attention reach by sequence length, read from published tables of kernels that were timed alone.

TFLOP/s with a causal mask, of which only the half that is not masked is counted: 2 products a score forward, 5
backward.

    cuDNN 9.27   NVIDIA/cudnn-frontend, benchmark/attention_training/results/llama3.1 (28 September 2026): h200, and a100 (PCIe); bfloat16,
                 batch 2, 64 heads of 128 over 8 of keys, not deterministic
    FlashAttention-2   `flash_attention` in the same table of the A100. On an H100 it reaches 35% of the peak (Shah et al. 2024,
                 "FlashAttention-3", abstract), and nothing is said of its lengths: as on an A100
    Triton       triton-lang/triton, pull request 1917, "before" (July 2023): the tutorial's kernel on an A100, float16, batch 4, 48 heads
                 of 64. Of its like on an H100 nothing is published: we let it lose what FlashAttention-2 loses, the
                 other kernel written for an A100's instructions.

`law` finds in each what `compute.Kernel` says: a rate on long sequences, and the length at which half of it is reached.
"""

from collections.abc import Sequence

import numpy as np

from meshtrain.plan.compute import Kernel

from . import PUBLISHED

Table = tuple[Sequence[int], Sequence[float]]

# Forward and backward, by kernel and device.
TABLES: dict[tuple[str, str], tuple[Table, Table]] = {
    tuple(name.rsplit(" ", 1)): (
        (rates["lengths"], rates["forward"]),
        (rates["lengths"], rates["backward"]),
    )
    for name, rates in PUBLISHED["kernels"].items()
}
PEAK = {"h200": 989.4, "a100": 312.0}  # TFLOP/s, dense, bfloat16 and float16


def law(tables: Sequence[Table]) -> tuple[float, list[float]]:
    """The half length that several tables share, and the rate of each on long sequences in TFLOP/s: least squares of
    the logarithm.

    For one half length the best rate of a table is a mean, so that the half length is all there is to search.
    """

    def logarithms(half: float) -> list[np.ndarray]:
        return [
            np.log(rates) + np.log1p(half / np.asarray(lengths))
            for lengths, rates in tables
        ]

    halves = np.arange(0.0, 2000.0)
    spread = [
        sum(float(((x - x.mean()) ** 2).sum()) for x in logarithms(half))
        for half in halves
    ]
    best = float(halves[int(np.argmin(spread))])
    return best, [float(np.exp(x.mean())) for x in logarithms(best)]


def share(kernel: str, device: str) -> float:
    """Of the peak, on long sequences, forward."""
    _, [rate] = law([TABLES[kernel, device][0]])
    return rate / PEAK[device]


def kernel(name: str, rate: float | None = None) -> Kernel:
    """A kernel by its tables, on all devices that there are tables of; its `rate` is given apart, being each device's
    own.
    """
    found = [tables for (known, _), tables in TABLES.items() if known == name]
    half_length, forward = law([table for table, _ in found])
    half_length_backward, backward = law([table for _, table in found])
    ratio = float(np.mean([b / f for b, f in zip(backward, forward, strict=True)]))
    return Kernel(
        rate, round(ratio, 2), round(half_length, -1), round(half_length_backward, -1)
    )


FLASH_2_AMPERE = kernel("flash 2", round(share("flash 2", "a100"), 3))
FLASH_2_HOPPER = kernel("flash 2", 0.35)
TRITON_AMPERE = kernel("triton", round(share("triton", "a100"), 3))
TRITON_HOPPER = kernel(
    "triton", round(share("triton", "a100") * 0.35 / share("flash 2", "a100"), 3)
)
