"""Which kernel computes attention, and in what blocks: without JAX, since the planner asks too."""

from typing import Literal

Kernel = Literal["cudnn", "scores", "blocks"]

# Blocks of BLOCK queries, or larger ones where those would be more than BLOCKS: code grows with their number.
BLOCK, BLOCKS = 128, 8


def attention_kernel(platform: str, dtype: str, head_dim: int, packed: bool, dropout: bool) -> Kernel:
    """How attention is computed on a platform (cpu, gpu or tpu), for documents `packed` in a sequence and with `dropout`.

    cudnn: one kernel, which keeps no scores. scores: XLA's products, with all scores between. blocks: `attention.blockwise`.
    """
    if platform != "gpu" or dropout:
        return "blocks"
    fast = dtype in ("bfloat16", "float16") and head_dim % 8 == 0 and not packed
    return "cudnn" if fast else "scores"


def block_size(length: int) -> int:
    """Queries in a block of a sequence."""
    return max(BLOCK, -(-length // BLOCKS))
