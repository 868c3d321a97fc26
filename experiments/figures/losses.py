"""What a change of precision costs in loss, and what a model makes of long rows.

Any rounding sets a trajectory on another course, however small it is. So each run has a rival of the same seed, from
the same weights on the same batches, and float8 runs at a calm learning rate, where trajectories stay closer.
"""

from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

import meshtrain as mt
from experiments.bench import QUICKSTART, Table
from meshtrain.config.schema import RECIPES

LAST = 50  # steps whose mean loss counts
PARTS = 4  # of a row
ONE_DEVICE = ["mesh.data=1", "mesh.tensor=1", "mesh.pipeline=1"]
ALONE = [*ONE_DEVICE, "parallel.sequence_parallel=false", "parallel.schedule=auto"]


def losses(settings: Sequence[str], seed: int, steps: int) -> np.ndarray:
    """Returns the loss of every step of the quickstart on one device, in bfloat16 unless `settings` say otherwise."""
    asked = [
        *ALONE,
        f"run.seed={seed}",
        f"train.steps={steps}",
        "precision.compute=bfloat16",
        *settings,
    ]
    config = mt.load(QUICKSTART, asked)
    program = mt.Program(config)
    data, _ = mt.open_data(config)
    state = program.init()
    found = []
    for step in range(steps):
        state, metrics = program.train_step(state, program.place(data.batch(step)))
        found.append(metrics["loss"])
    return np.array(found, np.float64)


def float8(*, seeds: int = 2, rate: float = 3e-4, steps: int = 200) -> None:
    """Prints the loss by recipe: all layers in float8, the gradients of weights too, which the config's defaults leave
    out.
    """
    calm = ["parallel.microbatches=1", f"optimizer.learning_rate={rate}"]
    base = np.zeros(0)
    table = Table("products   ", " loss", "over bfloat16's", "by seed")
    for recipe in (None, *RECIPES):
        narrow = [
            "precision.matmul=float8",
            f"precision.float8_recipe={recipe}",
            "precision.float8_wgrad=float8",
        ]
        asked = [*calm, *narrow, "precision.float8_skip=[0, 0]"] if recipe else calm
        ends = np.array(
            [losses(asked, seed, steps)[-LAST:].mean() for seed in range(seeds)]
        )
        base = base if recipe else ends
        apart = 100 * (ends / base - 1)
        error = apart.std(ddof=1) / np.sqrt(seeds) if seeds > 1 else np.nan
        each = " ".join(f"{x:+.3f}" for x in apart)
        table.row(
            recipe or "bfloat16",
            f"{ends.mean():.4f}",
            f"{apart.mean():+.3f} ± {error:.3f}%",
            each,
        )
    print(f"bfloat16's seeds are {100 * np.ptp(base) / base.mean():.1f}% apart")


def gradient_sums(*, seeds: int = 2, steps: int = 300) -> None:
    """Prints the loss with sums of 8 microbatches' gradients in float32 and in bfloat16, by seed."""
    table = Table("seed", "float32", "bfloat16", "  apart", "most in 20 steps")
    ends = []
    for seed in range(seeds):
        asked = ["parallel.microbatches=8", "precision.gradient_sums="]
        plain, rounded = (
            losses([asked[0], asked[1] + sums], seed, steps)
            for sums in ("float32", "bfloat16")
        )
        first, second = (found[-LAST:].mean() for found in (plain, rounded))
        gap = np.abs(np.convolve(rounded - plain, np.full(20, 1 / 20), "valid")).max()
        table.row(
            seed,
            f"{first:.4f}",
            f"{second:.4f}",
            f"{second - first:+.4f}",
            f"{gap:.4f}",
        )
        ends.append(first)
    print(f"the seeds alone are {np.ptp(ends):.4f} apart")


def long_rows(*, run: str | None = None, rounds: int = 16) -> None:
    """Prints the mean held-out loss of each quarter of a row, in nats a label that counts."""
    assert run is not None, "the command asks for it"
    model = mt.read_model(run)
    _, held_out = mt.open_data(mt.load(Path(run) / "config.yaml"))
    assert held_out is not None, "the run held nothing out"
    sums = np.zeros(PARTS)
    weights = np.zeros(PARTS)
    for k in range(rounds):
        batch = held_out.batch(k)
        log_p = np.asarray(jax.nn.log_softmax(model(batch["tokens"])))
        found = -np.take_along_axis(log_p, batch["labels"][..., None], axis=-1)[..., 0]
        counts = batch.get("weights", np.ones_like(found))
        sums += (found * counts).reshape(len(found), PARTS, -1).sum((0, 2))
        weights += counts.reshape(len(found), PARTS, -1).sum((0, 2))
    print(" ".join(f"{loss:.4f}" for loss in sums / weights))
