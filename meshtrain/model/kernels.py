"""Which kernel computes attention, and in what blocks: without JAX, for the planner too."""

from collections.abc import Collection
from typing import Literal

Kernel = Literal["cudnn", "fused", "splash", "blocks"]

MASKED = -1e30  # the score of what is not seen, the logit of what is no token

# Blocks of BLOCK queries, or larger ones where those would be more than BLOCKS: code grows with their number.
BLOCK = 128
BLOCKS = 8

# The widest head of the fused kernel: wider ones leave no room for blocks.
FUSED_WIDTH = 256

# Kernels that take values of another width than keys; the others get both as wide as the wider one.
WIDTHS_APART = ("fused", "blocks")

# Splash attention's blocks are whole lanes of a TPU's vector registers; larger ones are faster.
SPLASH_BLOCKS = (512, 256, 128)


def attention_kernel(
    platform: str,
    dtype: str,
    head_dim: int,
    length: int,
    packed: bool,
    dropout: bool,
    capped: bool = False,
    in_pieces: bool = False,
    window: bool = False,
    tops: bool = False,
) -> Kernel:
    """Returns how attention is computed on a platform (cpu, gpu or tpu), for documents `packed` in sequences, with
    `dropout` and scores `capped`.

    Where a row is cut `in_pieces` over context (`parallel.context`), a kernel is called for two of them: of a `window`,
    and of dropout, it must know where they lie. `tops`: each query's largest score is wanted, which neither cuDNN's
    nor the TPU's kernel returns.

    Only `blocks` ever has scores in memory; the others keep q, k, v, their output and a log of sums.

    cudnn: cuDNN's flash attention (cuDNN 9 on Ampere and later). 16 bits, head widths in eights up to 128, neither
        packed nor dropped nor capped: JAX does not offer a cap, its dropout would depend on the mesh, and see
        `model.fused` for its packed sequences.
    fused: `model.fused`, for all else on GPUs.
    splash: JAX's kernel for TPUs, packed or not. Sequences in blocks of 128, head widths in 64; no dropout.
    blocks: `attention.blockwise`, on CPUs and where no other kernel is.
    """
    if platform == "gpu" and head_dim <= FUSED_WIDTH:
        plain = dtype in ("bfloat16", "float16") and not (
            packed or dropout or capped or tops or (window and in_pieces)
        )
        if plain and head_dim % 8 == 0 and head_dim <= 128:
            return "cudnn"
        return "fused"
    length = length // 2 if in_pieces else length
    blocks = dropout or tops or (window and in_pieces)
    if (
        platform == "tpu"
        and length % SPLASH_BLOCKS[-1] == 0
        and head_dim % 64 == 0
        and not blocks
    ):
        return "splash"
    return "blocks"


def block_size(length: int) -> int:
    """Returns the queries in a block of a sequence."""
    return max(BLOCK, -(-length // BLOCKS))


# The widest keys and values, and the longest chunk, whose numbers the registers of a program hold.
RULE_WIDTHS = (16, 32, 64, 128)
RULE_CHUNKS = (16, 32, 64)


def has_rule_kernel(
    platform: str, chunk: int, widths: Collection[int], decays_by_channel: bool
) -> bool:
    """Returns whether `model.rule_kernel` computes chunks of linear attention of these widths; else XLA does."""
    fits = chunk in RULE_CHUNKS and set(widths) <= set(RULE_WIDTHS)
    return platform == "gpu" and fits and not decays_by_channel
