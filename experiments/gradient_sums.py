"""What a model loses where gradients are summed over the microbatches in bfloat16: the quickstart, 300 steps of 8 microbatches, one device.

    python experiments/gradient_sums.py                 2 seeds, in float32 and in bfloat16 sums
    python experiments/gradient_sums.py --seeds 5

The model computes in bfloat16. `apart` is the loss with bfloat16 sums over that with float32 ones of the same seed, mean of the last 50
steps; the last line is how far the seeds are apart with float32 sums.
"""

import argparse
from pathlib import Path

import numpy as np

from meshtrain.config import load
from meshtrain.data.from_config import open_data
from meshtrain.step import Program

QUICKSTART = Path(__file__).resolve().parents[1] / "configs" / "quickstart.yaml"
STEPS, MICROBATCHES, LAST = 300, 8, 50


def losses(sums: str, seed: int) -> np.ndarray:
    """The loss of every step."""
    shape = (
        "mesh.data=1",
        "mesh.tensor=1",
        "mesh.pipeline=1",
        "parallel.sequence_parallel=false",
        "parallel.schedule=auto",
    )
    asked = (
        f"parallel.microbatches={MICROBATCHES}",
        f"precision.gradient_sums={sums}",
        f"run.seed={seed}",
        f"train.steps={STEPS}",
    )
    program = Program(config := load(QUICKSTART, [*shape, *asked, "precision.compute=bfloat16"]))
    (data, _), state, found = open_data(config), program.init(), []
    for step in range(STEPS):
        state, metrics = program.train_step(state, program.place(data.batch(step)))
        found.append(metrics["loss"])
    return np.array(found, np.float64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2)
    last = []
    print("| seed | float32 | bfloat16 | apart | most in 20 steps |\n| --- | --- | --- | --- | --- |")
    for seed in range(parser.parse_args().seeds):
        plain, rounded = (losses(sums, seed) for sums in ("float32", "bfloat16"))
        means = [x[-LAST:].mean() for x in (plain, rounded)]
        gap = np.abs(np.convolve(rounded - plain, np.full(20, 1 / 20), "valid")).max()
        print(f"| {seed} | {means[0]:.4f} | {means[1]:.4f} | {means[1] - means[0]:+.4f} | {gap:.4f} |", flush=True)
        last.append(means[0])
    print(f"seeds alone: {np.ptp(last):.4f}")


if __name__ == "__main__":
    main()
