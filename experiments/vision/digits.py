"""What a small ViT learns of scikit-learn's digits, from several seeds.

    python -m experiments.vision.digits [--seeds 0,1,2] [--set key.path=value ...]

Each seed is a run of its own of configs/vit_digits.yaml, in a process of its own: accuracy on the 360 held-out digits at its end, the
best on the way, and its seconds, wall-clock and of processor, from the start of Python on.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

CONFIG = Path(__file__).parents[2] / "configs" / "vit_digits.yaml"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2", help="one run each (default: 0,1,2)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="key.path=value", help="as meshtrain.train takes it"
    )
    chosen = parser.parse_args()
    made = Table()
    for column in ("seed", "steps", "held out: right", "best on the way", "eval loss", "seconds", "of processor"):
        made.add_column(column, justify="right")
    for seed in chosen.seeds.split(","):
        with tempfile.TemporaryDirectory() as directory:
            sets = [f"run.directory={directory}/run", f"run.seed={seed}", *chosen.set]
            command = [sys.executable, "-m", "meshtrain.train", "--config", str(CONFIG)]
            before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
            subprocess.run([*command, *(word for each in sets for word in ("--set", each))], check=True)
            seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
            spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            rows = [json.loads(row) for row in Path(directory, "run", "metrics.jsonl").read_text().splitlines()]
        evals = [row for row in rows if "eval_accuracy" in row]
        last, best = evals[-1], max(row["eval_accuracy"] for row in evals)
        shares = (f"{last['eval_accuracy']:.2%}", f"{best:.2%}", f"{last['eval_loss']:.4f}")
        made.add_row(seed, str(last["step"]), *shares, f"{seconds:.0f}", f"{spent:.0f}")
    Console(width=110).print(made)


if __name__ == "__main__":
    main()
