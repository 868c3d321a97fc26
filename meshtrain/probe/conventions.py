"""What a size and a bandwidth mean: nccl-tests' conventions (NVIDIA/nccl-tests, doc/PERFORMANCE.md; src/alltoall.cu, src/sendrecv.cu).

S is the size of the whole array: what an all-reduce sums, what an all-gather ends with, what a reduce-scatter and an all-to-all begin
with on a device; of a permute the message. n devices, t seconds:

    algbw = S / t        what the caller gets
    busbw = algbw f      what a link carries, so that it may be held against the link's own bandwidth

    kind              f
    all-reduce        2 (n-1)/n
    all-gather        (n-1)/n
    reduce-scatter    (n-1)/n
    all-to-all        (n-1)/n
    permute           1
"""

from meshtrain.plan.cluster.algorithms import sent

BARRIER = "barrier"
PARTS = (BARRIER, "collectives", "pairs", "products")  # what is measured
XLA = "xla"  # the algorithm that XLA and NCCL choose; others are programs of messages (`meshtrain.parallel.reduce.algorithms`)


def bus_factor(kind: str, devices: int) -> float:
    """busbw over algbw: the bytes that a device sends for each byte of the array."""
    return sent(kind, devices, 1.0)
