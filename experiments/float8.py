"""What a model loses where the products of its layers are in float8: the quickstart, 200 steps on one device, by recipe.

    python -m experiments.float8                              all recipes and seeds, a table
    python -m experiments.float8 --figure experiments/float8.svg    and their losses, drawn
    python -m experiments.float8 --losses DIR --only rowwise --seeds 0 3   one recipe and some seeds, their losses stored in DIR for another call
    python -m experiments.float8 --rate 3e-3                  at the quickstart's own learning rate

The model computes in bfloat16; all of its layers are in float8, the gradients of weights too (the config's own default leaves these, and
the first and last layer, in the compute dtype). `apart` is the mean loss of the last 50 steps over that of bfloat16 from the same weights on
the same batches: the mean of the seeds, and its standard error. Any rounding sets a trajectory on another course, however small it is. At a calm
learning rate these stay closer, so that fewer seeds tell a loss from chance.
"""

import argparse
from pathlib import Path

import numpy as np

from experiments.communicate.draw import Axis, Line, chart, legend, write
from meshtrain.config import load
from meshtrain.config.schema import RECIPES
from meshtrain.data.from_config import open_data
from meshtrain.step import Program

QUICKSTART = Path(__file__).resolve().parents[1] / "configs" / "quickstart.yaml"
STEPS, LAST, SMOOTHED, SEEDS, RATE = 200, 50, 10, 2, 3e-4
PRODUCTS = ("bfloat16", *RECIPES)
ALONE = (
    "mesh.data=1",
    "mesh.tensor=1",
    "mesh.pipeline=1",
    "parallel.sequence_parallel=false",
    "parallel.schedule=auto",
)


def losses(products: str, seed: int, rate: float) -> np.ndarray:
    """The loss of every step, of one of RECIPES or of a dtype."""
    asked = ["parallel.microbatches=1", f"train.steps={STEPS}", f"run.seed={seed}", f"optimizer.learning_rate={rate}"]
    asked += [f"precision.compute={'float32' if products == 'float32' else 'bfloat16'}"]
    if products in RECIPES:
        asked += ["precision.matmul=float8", f"precision.float8_recipe={products}", "precision.float8_wgrad=float8"]
        asked += ["precision.float8_skip=[0, 0]"]
    program = Program(config := load(QUICKSTART, [*ALONE, *asked]))
    (data, _), state, found = open_data(config), program.init(), []
    for step in range(STEPS):
        state, metrics = program.train_step(state, program.place(data.batch(step)))
        found.append(metrics["loss"])
    return np.array(found, np.float64)


def stored(products: str, seed: int, rate: float, directory: Path | None) -> np.ndarray:
    """The same, from the directory where it has them."""
    file = directory and directory / f"{products}-{seed}-{rate:g}.npy"
    if file and file.exists():
        return np.load(file)
    of_run = losses(products, seed, rate)
    if file:
        file.parent.mkdir(parents=True, exist_ok=True)
        np.save(file, of_run)
    return of_run


def draw(curves: dict[str, np.ndarray], path: Path) -> None:
    """Draws the means of 10 steps each, and what the recipes have more than bfloat16."""
    means = {name: np.convolve(found, np.ones(SMOOTHED) / SMOOTHED, "valid") for name, found in curves.items()}
    at, steps = np.arange(SMOOTHED, STEPS + 1), Axis("step", [(n, str(n)) for n in range(0, STEPS + 1, 50)], log=False)
    lines = [Line(name, list(zip(at, y, strict=True)), i) for i, (name, y) in enumerate(means.items())]
    more = {name: 100 * (y / means["bfloat16"] - 1) for name, y in means.items()}
    apart = [Line(name, list(zip(at, y, strict=True)), i) for i, (name, y) in enumerate(more.items())]
    losses, percent = ([(x, f"{x:g}") for x in ticks] for ticks in ((1, 2, 3, 4, 5, 6), (-0.2, -0.1, 0, 0.1, 0.2)))
    panels = [
        chart("loss, means of 10 steps", steps, Axis("", losses, log=False), lines),
        chart("% more than with products in bfloat16", steps, Axis("", percent, log=False), apart),
    ]
    write(path, panels, 2, legend(lines, 4), 24)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--losses", type=Path)
    parser.add_argument("--only", choices=PRODUCTS, nargs="+", default=PRODUCTS)
    parser.add_argument("--seeds", type=int, nargs=2, default=(0, SEEDS), help="the first, and behind the last")
    parser.add_argument("--rate", type=float, default=RATE)
    options = parser.parse_args()
    seeds = range(*options.seeds)
    runs = {
        name: np.array([stored(name, seed, options.rate, options.losses) for seed in seeds]) for name in options.only
    }
    if "bfloat16" not in runs:
        return
    base = runs["bfloat16"][:, -LAST:].mean(1)
    print("| products | loss | apart | of the seeds |\n| --- | --- | --- | --- |")
    for name, of_seeds in runs.items():
        ends = of_seeds[:, -LAST:].mean(1)
        apart = 100 * (ends / base - 1)
        error = apart.std(ddof=1) / np.sqrt(len(apart))
        each = " ".join(f"{x:+.2f}" for x in apart)
        print(f"| {name} | {ends.mean():.4f} | {apart.mean():+.2f} ± {error:.2f}% | {each} |")
    print(f"bfloat16's seeds are {100 * np.ptp(base) / base.mean():.1f}% apart")
    if options.figure:
        draw({name: of_seeds.mean(0) for name, of_seeds in runs.items()}, options.figure)


if __name__ == "__main__":
    main()
