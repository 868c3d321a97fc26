"""Weights in 8 bits beside bfloat16: bytes, and the loss of the same model: python -m experiments.serving.weights [RUN]

Without a RUN the quickstart's model is trained first. Perplexity is that of its own validation data, or of --text.
"""

import math
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import jax

from experiments import bench
from experiments.serving.servers import made_run
from meshtrain.draw.picture import columns
from meshtrain.evaluate.__main__ import parser as evaluate_parser
from meshtrain.evaluate.command import evaluate
from meshtrain.generate.held import KINDS
from meshtrain.generate.opened import open_model
from meshtrain.generate.programs import Decoding
from meshtrain.units import size


def row(run: str, weights: str | None, more: Sequence[str]) -> list[str]:
    words = [
        run,
        "--precision",
        "bfloat16",
        *more,
        *(["--weights", weights] if weights else []),
    ]
    record, _ = evaluate(evaluate_parser().parse_args(words))
    loss = record.get("nats_per_token", record.get("eval_loss", math.nan))
    opened = open_model(run, precision="bfloat16", weights=weights, length=64)
    decoding = Decoding(opened.model, 1, 64, keep=False, kind=weights)
    blocks = sum(x.nbytes for x in jax.tree.leaves(decoding.weights.blocks))
    every = sum(x.nbytes for x in jax.tree.leaves(decoding.weights))
    return [
        weights or "bfloat16",
        size(blocks),
        size(every),
        f"{loss:.5f}",
        f"{math.exp(loss):.4f}",
    ]


def table(run: str, more: Sequence[str]) -> str:
    head = ["weights", "of the layers", "all", "nats per token", "perplexity"]
    return columns([head, *(row(run, weights, more) for weights in (None, *KINDS))])


def main() -> int:
    parser = bench.parser(__doc__)
    parser.add_argument(
        "run", nargs="?", help="a run directory or a Hugging Face directory"
    )
    parser.add_argument("--text", nargs="+", default=[], help="files or folders")
    options = parser.parse_args()
    more = ["--text", *options.text] if options.text else []
    with tempfile.TemporaryDirectory() as work:
        print(
            table(
                options.run or str(made_run(Path(work), "--set", "train.steps=400")),
                more,
            )
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
