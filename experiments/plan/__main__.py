"""How true the planner is, as tables.

python -m experiments.plan                   seconds of published runs, and bytes (`sources`: whole sources left out of the fit)
python -m experiments.plan --search          a search over every layout of 16,384 devices, timed
python -m experiments.plan --compile h100    bytes: memory and traffic beside XLA's, for configs from 125M to 70B
                                            parameters (no GPU needed; about 15 minutes on 2 cores); with --only
                                            hybrids those with layers of linear attention
"""

import json
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict

from experiments import bench
from experiments.bench import LLAMA_3, MODELS, Table, config_of
from meshtrain.config import Config, replaced, to_yaml
from meshtrain.plan import named
from meshtrain.plan.search import search

from . import memory, read, sources

GROUPS = read("compiled")

# Keys that are not of `parallel`
SECTIONS = {"compute": "precision", "dropout": "model", "batching": "data"}


def row_config(row: list) -> Config:
    """Returns the config of a row of `compiled.yaml`."""
    model, (data, tensor, pipeline), batch, length, microbatches, given = row
    mesh = {"data": data, "tensor": tensor, "pipeline": pipeline}
    others: dict[str, dict] = {}
    parallel = {"schedule": "1f1b", "microbatches": microbatches}
    for key, value in given.items():
        if key == "context":
            mesh[key] = value
        elif key in SECTIONS:
            others[SECTIONS[key]] = {key: value}
        else:
            parallel[key] = value
    config = config_of(MODELS["plain"][model], mesh, batch, length, parallel)
    return replaced(config, **others)


def gigabytes() -> None:
    """Prints published memory of other frameworks, by how they hold what they train."""
    title = "memory of other frameworks: no number is fitted, the formulas were made with these rows in sight"
    heads = "reported GiB", "predicted", "off by"
    table = Table("source      ", "run".ljust(30), *heads, title=title)
    errors = []
    for row in memory.ROWS:
        errors.append(row.predicted / row.reported - 1)
        sizes = f"{row.reported:.1f}", f"{row.predicted:.1f}"
        table.row(row.source, row.name, *sizes, f"{errors[-1]:+.1%}")
    median, percentile, worst, _ = sources.spread(errors)
    print(f"{len(errors)} rows: median {median}, p90 {percentile}, worst {worst}")
    right, layouts = memory.called_right()
    share = f"{right} of {layouts} called right, {right / layouts:.1%}"
    print(f"layouts that ran or ran out of memory: {share}")


def searched() -> None:
    """Searches every layout of Llama-3 405B on 16,384 H100s."""
    config = config_of(LLAMA_3["405B"], {}, 2048, 8192)
    found = search(config, named("h100", 16384), 16384)
    print(f"405B on 16,384 H100: {found.legal:,} layouts in {found.seconds:.1f} s")


def compiled(target: str, only: str | None) -> None:
    """Compiles each config of all groups, or of one."""
    for title in GROUPS if only is None else [only]:
        heads = "planned GiB", "compiled GiB", "off by", "traffic off by"
        both = "seconds planned", "of the program", "off by"
        shown = "model   ", "mesh       ", "parallel" + 40 * " "
        table = Table(*shown, *heads, *both, title=f"{target}, {title}")
        errors: dict[str, list[float]] = defaultdict(list)
        for row in GROUPS[title]:
            mesh = " x ".join(map(str, row[1]))
            keys = " ".join(f"{k}={v}" for k, v in ({"m": row[4]} | row[5]).items())
            found = planned_and_compiled(row_config(row), target)
            if found is None:
                table.row(row[0], mesh, "failed to compile", *[""] * 7)
                continue
            planned = found["per_device_bytes"]["total"]
            real = found["compiled"]["total_bytes"]
            seconds = found["step_seconds"], found["program_seconds"]
            memory_error = planned / real - 1
            traffic_error = _traffic_error(found)
            error = seconds[0] / seconds[1] - 1
            errors["memory"].append(memory_error)
            errors["traffic of the worst axis"].append(traffic_error)
            errors["seconds"].append(error)
            sizes = f"{planned / 2**30:.2f}", f"{real / 2**30:.2f}"
            off = f"{memory_error:+.1%}", f"{traffic_error:.2%}"
            took = f"{seconds[0]:.3f}", f"{seconds[1]:.3f}", f"{error:+.1%}"
            table.row(row[0], mesh, keys, *sizes, *off, *took)
        print("; ".join(f"{what}: {_summary(found)}" for what, found in errors.items()))
        near = sum(abs(error) <= 0.05 for error in errors["seconds"])
        print(f"seconds of {near} of {len(errors['seconds'])} within 5%")


def planned_and_compiled(config: Config, target: str) -> dict | None:
    """Returns what `experiments.plan.timed` says of a config, in a process of its own, since the compiler must start
    before any other backend; None if it fails.
    """
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(to_yaml(config))
        file.flush()
        command = [sys.executable, "-m", "experiments.plan.timed", file.name, target]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stderr.splitlines()[-1], file=sys.stderr)
        return None
    return json.loads(done.stdout)


def _traffic_error(found: dict, smallest: float = 1e6) -> float:
    """Of the axis where the two differ most, leaving out what is less than a megabyte."""
    sent: dict[str, float] = defaultdict(float)
    for collective in found["compiled"]["collectives"]:
        sent[collective["axis"]] += collective["sent_bytes"]
    planned = defaultdict(float, found["traffic_bytes_per_step"])
    return max(
        (
            abs(planned[axis] - sent[axis]) / max(sent[axis], 1)
            for axis in {*sent, *planned}
            if max(sent[axis], planned[axis]) > smallest
        ),
        default=0.0,
    )


def _summary(errors: list[float]) -> str:
    sizes = [abs(error) for error in errors]
    return f"median {statistics.median(sizes):.2%}, worst {max(sizes):.2%}, lowest {min(errors):+.2%}"


def main() -> None:
    parser = bench.parser(__doc__)
    parser.add_argument(
        "--compile", metavar="TARGET", help="cpu, a100, h100, h200 or b200"
    )
    parser.add_argument(
        "--only", choices=GROUPS, help="with --compile: one group of configs"
    )
    parser.add_argument("--search", action="store_true")
    options = parser.parse_args()
    if options.compile:
        compiled(options.compile, options.only)
    elif options.search:
        searched()
    else:
        sources.tables(sources.shipped())
        gigabytes()


if __name__ == "__main__":
    main()
