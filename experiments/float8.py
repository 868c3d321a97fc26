"""What a model loses where the products of its layers are in float8: the quickstart, 200 steps on one device, by recipe.

    python -m experiments.float8                              all recipes, a table
    python -m experiments.float8 --figure experiments/float8.svg    and their losses, drawn
    python -m experiments.float8 --losses DIR --only rowwise  one of them, its losses kept in DIR for the others' call

The model computes in bfloat16; all of its layers are in float8, the gradients of weights too (the config's own default leaves these, and
the first and last layer, in the compute dtype). `apart` is the mean loss of the last 50 steps over that of bfloat16 on the same batches.
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
STEPS, LAST, SMOOTHED = 200, 50, 10
ALONE = (
    "mesh.data=1",
    "mesh.tensor=1",
    "mesh.pipeline=1",
    "parallel.sequence_parallel=false",
    "parallel.schedule=auto",
)


def losses(recipe: str) -> np.ndarray:
    """The loss of every step, of one of RECIPES or bfloat16."""
    asked = ["parallel.microbatches=1", f"train.steps={STEPS}", "precision.compute=bfloat16"]
    if recipe != "bfloat16":
        asked += ["precision.matmul=float8", f"precision.float8_recipe={recipe}", "precision.float8_wgrad=float8"]
        asked += ["precision.float8_skip=[0, 0]"]
    program = Program(config := load(QUICKSTART, [*ALONE, *asked]))
    (data, _), state, found = open_data(config), program.init(), []
    for step in range(STEPS):
        state, metrics = program.train_step(state, program.place(data.batch(step)))
        found.append(metrics["loss"])
    return np.array(found, np.float64)


def kept(recipe: str, directory: Path | None) -> np.ndarray:
    """The losses of a recipe, from the directory where it has them."""
    file = directory and directory / f"{recipe}.npy"
    if file and file.exists():
        return np.load(file)
    found = losses(recipe)
    if file:
        file.parent.mkdir(parents=True, exist_ok=True)
        np.save(file, found)
    return found


def draw(curves: dict[str, np.ndarray], path: Path) -> None:
    """Draws the means of 10 steps each, and what the recipes have more than bfloat16."""
    means = {name: np.convolve(found, np.ones(SMOOTHED) / SMOOTHED, "valid") for name, found in curves.items()}
    at, steps = np.arange(SMOOTHED, STEPS + 1), Axis("step", [(n, str(n)) for n in range(0, STEPS + 1, 50)], log=False)
    lines = [Line(name, list(zip(at, y, strict=True)), i) for i, (name, y) in enumerate(means.items())]
    more = {name: 100 * (y / means["bfloat16"] - 1) for name, y in means.items()}
    apart = [Line(name, list(zip(at, y, strict=True)), i) for i, (name, y) in enumerate(more.items())]
    losses, percent = ([(x, f"{x:g}") for x in ticks] for ticks in ((1, 2, 3, 4, 5, 6), (-2, -1, 0, 1, 2)))
    panels = [
        chart("loss, means of 10 steps", steps, Axis("", losses, log=False), lines),
        chart("% more than with products in bfloat16", steps, Axis("", percent, log=False), apart),
    ]
    write(path, panels, 2, legend(lines, 4), 24)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--losses", type=Path)
    parser.add_argument("--only", choices=("bfloat16", *RECIPES))
    options = parser.parse_args()
    curves = {name: kept(name, options.losses) for name in ([options.only] if options.only else ("bfloat16", *RECIPES))}
    print("| products | loss | apart |\n| --- | --- | --- |")
    for name, found in curves.items():
        base = curves.get("bfloat16", found)
        print(f"| {name} | {found[-LAST:].mean():.4f} | {found[-LAST:].mean() / base[-LAST:].mean() - 1:+.2%} |")
    if options.figure:
        draw(curves, options.figure)


if __name__ == "__main__":
    main()
