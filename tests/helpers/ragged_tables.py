"""Legal tables as nobody would write them."""

import numpy as np

from meshtrain.schedule.table import B, F, Table, W


def ragged_table(
    stages: int,
    microbatches: int,
    chunks: int,
    split: bool = True,
    placement: str = "v",
    spread: int = 3,
    seed: int = 0,
) -> Table:
    """Microbatches in no order, clocks and stages idle at random, each op up to `spread` clocks after it could be."""
    random = np.random.default_rng(seed)
    virtual = stages * chunks
    when = np.full((3, virtual, microbatches), -1)
    back = [placement == "v" and k // stages % 2 == 1 for k in range(virtual)]
    stage = [stages - 1 - k % stages if back[k] else k % stages for k in range(virtual)]
    used: set[tuple[int, int, int]] = set()

    def put(slot: int, k: int, microbatch: int, earliest: int) -> int:
        clock = earliest + int(random.integers(0, spread))
        while (slot, stage[k], clock) in used:
            clock += 1
        used.add((slot, stage[k], clock))
        when[slot, k, microbatch] = clock
        return clock

    for microbatch in random.permutation(microbatches).tolist():
        clock = -1
        for k in range(virtual):
            clock = put(F, k, microbatch, clock + 1)
        clock -= 1  # the loss head hands its cotangent to the B of the same clock
        for k in reversed(range(virtual)):
            clock = put(B, k, microbatch, clock + 1)
            if split:
                put(W, k, microbatch, clock)
    return Table.place(
        when, name="own", stages=stages, chunks=chunks, split=split, placement=placement
    )


def random_table(seed: int) -> Table:
    """Of random sizes."""
    random = np.random.default_rng(seed)
    stages, microbatches, chunks, spread = (
        int(random.integers(2, most)) for most in (5, 17, 4, 5)
    )
    split, placement = bool(random.integers(2)), ("loop", "v")[random.integers(2)]
    return ragged_table(
        stages, microbatches - 1, chunks - 1, split, placement, spread, seed
    )
