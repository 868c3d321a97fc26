"""What a model loses by each way of sending gradients: the quickstart, 150 steps, 3 seeds, against float32 of the same
seed.

    python -m experiments.communicate.quality                       all methods, about 40 s a run on 2 cores
    python -m experiments.communicate.quality --only int8 int4      some
    python -m experiments.communicate.quality --seeds 12            more seeds, for what 3 cannot tell apart

Every run stands in a directory of its own, so a stop loses nothing: what has ended is read, what was stopped goes on.
Exit code 1 if a method's mean misses its goal. All run data parallel on 4 fake devices, in one island or two, since how
gradients are sent over data is all that differs; the two rows of plain float32 on islands say how far rounding alone
moves the loss in 150 steps.
"""

import json
import math
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

import yaml

from experiments import bench
from meshtrain.config import Config, load

ROOT = Path(__file__).resolve().parents[2]
STEPS, SEEDS, MOST_SEEDS = 150, 3, 100
BASE = f"""mesh.data=4 mesh.tensor=1 mesh.pipeline=1 run.fake_devices=4 parallel.sequence_parallel=false
    parallel.schedule=gpipe parallel.microbatches=1 train.steps={STEPS}""".split()


@dataclass(frozen=True)
class Method:
    """A way to send gradients, and by how much its evaluation loss may be above float32's (None: it is only
    reported).
    """

    name: str
    settings: tuple[str, ...] = ()
    most: float | None = None

    def config(self, seed: int, work: Path) -> Config:
        own = (f"run.seed={seed}", f"run.directory={directory(work, self.name, seed)}")
        return load(ROOT / "configs" / "quickstart.yaml", [*BASE, *self.settings, *own])


PLAIN = "float32"
# by how much the loss may be above float32's, and settings; islands take 10 steps by themselves after 50 in common
METHODS = tuple(
    Method(name, tuple(settings), most)
    for name, (most, *settings) in yaml.safe_load("""
float32: [null]
float32, 2 islands: [null, mesh.islands=2]
bfloat16: [0.01, parallel.reduce.compression=bfloat16]
int8: [0.01, parallel.reduce.compression=int8]
float8: [0.01, parallel.reduce.compression=float8]
int4 with feedback: [0.05, parallel.reduce.compression=int4]
int4 without: [null, parallel.reduce.compression=int4, parallel.reduce.feedback=false]
PowerSGD rank 4 with feedback: [0.05, parallel.reduce.compression=powersgd, parallel.reduce.rank=4]
PowerSGD rank 4 without: [null, parallel.reduce.compression=powersgd, parallel.reduce.rank=4, parallel.reduce.feedback=false]
top 1% with feedback: [null, parallel.reduce.compression=topk]
top 1% without: [null, parallel.reduce.compression=topk, parallel.reduce.feedback=false]
int8 across 2 islands: [null, mesh.islands=2, parallel.reduce.compression=int8, parallel.reduce.over=islands]
DiLoCo, 10 steps alone: [0.1, &islands mesh.islands=2, &every parallel.sync.every=10, &start parallel.sync.start=50]
DiLoCo, momentum 0.5: [null, *islands, *every, *start, parallel.sync.outer_momentum=0.5]
local SGD, 10 steps alone: [null, *islands, *every, *start, parallel.sync.outer_learning_rate=1.0, parallel.sync.outer_momentum=0]
""").items()
)
# Feedback is there to make a method better: pairs of which the first must end below the second.
BETTER = (("top 1% with feedback", "top 1% without"),)


@dataclass(frozen=True)
class Result:
    """A run's evaluation loss by step, and bytes that a device sent a step for gradients, where rows tell them."""

    losses: dict[int, float]
    sent: float | None


def directory(work: Path, name: str, seed: int) -> Path:
    words = "".join(letter if letter.isalnum() else " " for letter in name).split()
    return work / f"{'-'.join(words)}-{seed}"


def result(work: Path, name: str, seed: int) -> Result | None:
    """What a run has found, None before its end."""
    path = directory(work, name, seed) / "metrics.jsonl"
    rows = (
        [json.loads(line) for line in path.read_text().splitlines()]
        if path.exists()
        else []
    )
    losses = {row["step"]: row["eval_loss"] for row in rows if "eval_loss" in row}
    return Result(losses, rows[-1].get("reduce_bytes")) if STEPS in losses else None


def differences(work: Path, name: str) -> list[float]:
    """Evaluation loss at the end over float32's of the same seed, of the seeds that both have run."""
    pairs = [
        (result(work, PLAIN, seed), result(work, name, seed))
        for seed in range(MOST_SEEDS)
    ]
    return [
        own.losses[STEPS] - plain.losses[STEPS] for plain, own in pairs if plain and own
    ]


def table(work: Path) -> tuple[list[str], list[str]]:
    """The lines of the table, means with their standard errors, and a sentence for each goal that was missed."""
    lines = [
        f"{'':31}{'eval loss':>10}{'over float32':>17}{'goal':>7}{'kB sent':>9}  by seed"
    ]
    missed, mean = [], {}
    for method in METHODS:
        found = [
            r for seed in range(MOST_SEEDS) if (r := result(work, method.name, seed))
        ]
        by_seed = differences(work, method.name)
        if not found or not by_seed:
            continue
        mean[method.name] = statistics.mean(by_seed)
        loss = statistics.mean(r.losses[STEPS] for r in found)
        seeds = " ".join(f"{difference:+.4f}" for difference in by_seed)
        goal = "" if method.most is None else f"{method.most:.2f}"
        sent = "" if found[0].sent is None else f"{found[0].sent / 1e3:,.0f}"
        error = (
            statistics.stdev(by_seed) / len(by_seed) ** 0.5
            if len(by_seed) > 1
            else math.nan
        )
        over = f"{mean[method.name]:+.4f} ± {error:.4f}"
        lines.append(
            f"{method.name:31}{loss:10.4f}{over:>17}{goal:>7}{sent:>9}  {seeds}"
        )
        if method.most is not None and mean[method.name] > method.most:
            missed.append(f"{method.name}: {over}, and the goal is {method.most}.")
    for better, than in BETTER:
        if better in mean and than in mean and mean[better] >= mean[than]:
            missed.append(f"{better} is no better than {than}.")
    return lines, missed


def main() -> int:
    parser = bench.parser(__doc__)
    parser.add_argument(
        "--work",
        type=Path,
        default=ROOT / "runs" / "quality",
        help="directory of the runs, kept",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="WORD",
        default=[],
        help="methods whose name has one of these",
    )
    parser.add_argument(
        "--seeds", type=int, default=SEEDS, help=f"runs of each method; default {SEEDS}"
    )
    options = parser.parse_args()
    chosen = [
        m
        for m in METHODS
        if not options.only or m.name == PLAIN or any(w in m.name for w in options.only)
    ]
    run(chosen, options.work, options.seeds)
    lines, missed = table(options.work)
    print("\n".join([*lines, *missed]))
    return 1 if missed else 0


def run(chosen: list[Method], work: Path, seeds: int) -> None:
    """Runs what has not ended yet, one run after the other."""
    # after the arguments, so that --help needs no JAX
    from meshtrain.train import train

    for method in chosen:
        for seed in range(seeds):
            if result(work, method.name, seed) is None:
                print(f"{method.name}, seed {seed}", flush=True)
                train(method.config(seed, work))


if __name__ == "__main__":
    sys.exit(main())
