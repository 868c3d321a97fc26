"""What dpo costs: step time over that of next_token on the same batch, with the same adapters.

    python -m experiments.adopt.dpo

The reference is a forward more: of frozen weights a step multiplies twice (forward, and the cotangents of activations),
so 3/2 of it is what FLOPs alone would give, but for the adapters. Steps of both are taken in turns; processor time is
that of all fake devices.
"""

from typing import Any

import numpy as np

import meshtrain as mt
from experiments import bench
from experiments.bench import Compared, Stepping, Table, config_of, spread
from meshtrain.config import replaced
from meshtrain.mesh import AXES
from meshtrain.plan.shapes import model_flops
from meshtrain.step import Program

ROUNDS, PAIRS, ANSWER = 5, 3, 12
SIZES = {"layers": 8, "d_model": 192, "heads": 8, "d_ff": 512, "vocab_size": 2048}
#          mesh, section parallel
LAYOUTS: dict[str, tuple[tuple[int, int, int], dict[str, Any]]] = {
    "one device": ((1, 1, 1), {"microbatches": 2}),
    "data 8, ZeRO-3": ((8, 1, 1), {"zero_stage": 3}),
    "tensor 4, sequence parallel": (
        (1, 4, 1),
        {"sequence_parallel": True, "microbatches": 2},
    ),
    "2 x 2 x 2, 1F1B": ((2, 2, 2), {"microbatches": 4, "schedule": "1f1b"}),
    "pipeline 4, zero bubble, remat full": (
        (1, 1, 4),
        {"microbatches": 8, "schedule": "zb_h1", "remat": "full"},
    ),
}


def batch_of(rows: int, length: int, words: int) -> dict[str, np.ndarray]:
    """Random tokens, in each row `PAIRS` pairs of equally long sides with `ANSWER` learned labels each."""
    text = np.random.default_rng(0).integers(0, words, (rows, length + 1), np.int32)
    side = length // (2 * PAIRS)
    at = np.arange(length)
    segments = np.where(at < 2 * PAIRS * side, at // side + 1, 0)
    learned = (at % side >= side - ANSWER) & (segments > 0)
    found = {
        "segments": segments,
        "positions": np.where(segments > 0, at % side, 0),
        "pairs": (segments + 1) // 2,
        "weights": np.where(learned, np.where(segments % 2, 1.0, -1.0), 0.0).astype(
            np.float32
        ),
    }
    whole = {name: np.broadcast_to(row, (rows, length)) for name, row in found.items()}
    return {"tokens": text[:, :-1], "labels": text[:, 1:], **whole}


def main() -> None:
    bench.parser(__doc__).parse_args()
    mt.fake_devices(8)
    base = replaced(
        config_of(SIZES, {}, 16, 128, compute="float32"),
        train={"objective": "dpo"},
        data={"format": "pairs"},
        lora={"rank": 8},
    )
    batch = batch_of(16, 128, SIZES["vocab_size"])
    plain = {name: np.abs(x) for name, x in batch.items() if name != "pairs"}
    heads = (
        "wall over next_token's",
        "processor           ",
        "by FLOPs",
        "temporary MB of both",
    )
    table = Table("layout                              ", *heads)
    for name, (mesh, parallel) in LAYOUTS.items():
        placed = {
            "mesh": dict(zip(AXES, mesh, strict=True)),
            "parallel": {"microbatches": 1, **parallel},
        }
        preferring = replaced(base, **placed)
        tuned = replaced(
            preferring, train={"objective": "next_token"}, data={"format": "text"}
        )
        runs, held = {}, []
        for kind, config, arrays in (
            ("next_token", tuned, plain),
            ("dpo", preferring, batch),
        ):
            program = Program(config)
            state = program.init()
            placed_batch = program.place(arrays)
            compiled = program.train_step.lower(state, placed_batch).compile()
            runs[kind] = Stepping(compiled, state, placed_batch)
            held.append(f"{compiled.memory_analysis().temp_size_in_bytes / 1e6:.1f}")
        times = bench.turns(runs, ROUNDS)
        ratios = Compared(times["dpo"], times["next_token"])
        flops = model_flops(preferring) / model_flops(tuned)
        table.row(
            name,
            spread(ratios.walls),
            spread(ratios.processors),
            f"{flops:.2f}",
            ", ".join(held),
        )


if __name__ == "__main__":
    main()
