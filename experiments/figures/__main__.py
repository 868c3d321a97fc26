"""One-off figures, a command each: python -m experiments.figures NAME [--rounds N] [--seeds N] [--rate R] [--run RUN]

    float8           loss of the quickstart with products in float8, over bfloat16's
    gradient_sums    loss of the quickstart with gradients summed over microbatches in bfloat16
    long_rows        held-out loss of a RUN by quarter of a row: whether it uses what lies far back
    grouped          the grouped product of experts beside a dense one of as many rows, and `jax.lax.ragged_dot`
    ragged           a step of a mixture beside the same in plain JAX with `ragged_dot`, and as MaxText computes it
    images           images a second of one core, beside a bare loop over NumPy or Pillow

docs/benchmarks.md has what they printed, where and when.
"""

import importlib
import sys

from experiments import bench

MODULES = {
    "losses": ("float8", "gradient_sums", "long_rows"),
    "products": ("grouped",),
    "ragged": ("ragged",),
    "images": ("images",),
}
MODULE_OF = {name: module for module, names in MODULES.items() for name in names}


def main() -> None:
    parser = bench.parser(__doc__)
    parser.add_argument("name", metavar="NAME", choices=MODULE_OF)
    parser.add_argument(
        "--rounds", type=int, help="turns of each run, where runs take turns"
    )
    parser.add_argument(
        "--seeds", type=int, help="runs of each kind, where runs differ by their seed"
    )
    parser.add_argument("--rate", type=float, help="learning rate of float8")
    parser.add_argument("--steps", type=int, help="steps of each training run")
    parser.add_argument("--run", help="the run directory of long_rows")
    given = vars(parser.parse_args())
    name = given.pop("name")
    module = importlib.import_module(f"experiments.figures.{MODULE_OF[name]}")
    figure = getattr(module, name)
    legal = figure.__kwdefaults__ or {}
    asked = {option: value for option, value in given.items() if value is not None}
    if unknown := asked.keys() - legal.keys():
        parser.error(f"{name} does not take --{', --'.join(sorted(unknown))}")
    if missing := [
        option
        for option, default in legal.items()
        if default is None and option not in asked
    ]:
        parser.error(f"{name} needs --{', --'.join(missing)}")
    figure(**asked)


if __name__ == "__main__":
    sys.exit(main())
