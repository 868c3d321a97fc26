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
from collections.abc import Iterable

from experiments import bench
from experiments.bench import LLAMA_3, Table
from meshtrain.config import load, to_yaml
from meshtrain.config.schema import ACTIVATIONS
from meshtrain.plan import named
from meshtrain.plan.search import search

from . import memory, sources

MODELS = {
    "gpt 125M": {"family": "gpt2", "layers": 12, "d_model": 768, "heads": 12, "vocab_size": 50257},
    "gpt 1.3B": {"family": "gpt2", "layers": 24, "d_model": 2048, "heads": 16, "vocab_size": 50304},
    "1B": {"layers": 16, "d_model": 2048, "heads": 32, "kv_heads": 8, "d_ff": 8192, "vocab_size": 128256, "tied_head": True},
    "3B": {"layers": 28, "d_model": 3072, "heads": 24, "kv_heads": 8, "d_ff": 8192, "vocab_size": 128256},
    "8B": LLAMA_3["8B"],
    "13B": {"layers": 40, "d_model": 5120, "heads": 40, "d_ff": 13824, "vocab_size": 32000},
    "34B": {"layers": 48, "d_model": 8192, "heads": 64, "kv_heads": 8, "d_ff": 22016, "vocab_size": 32000},
    "70B": LLAMA_3["70B"],
    "hybrid 1B": {
        "family": "qwen3_5", "layers": 16, "d_model": 2048, "heads": 16, "kv_heads": 4, "head_dim": 128, "d_ff": 6144, "vocab_size": 128256,
        "linear": {"key_heads": 8, "value_heads": 16},
    },
    "hybrid 9B": {
        "family": "qwen3_5", "layers": 32, "d_model": 4096, "heads": 16, "kv_heads": 4, "head_dim": 256, "d_ff": 12288, "vocab_size": 248320,
        "linear": {"key_heads": 16, "value_heads": 32},
    },
}  # fmt: skip

# (model, (data, tensor, pipeline), global batch, sequence length, microbatches, other keys: of `parallel`, but for
# those in SECTIONS)
SEEN: list[
    tuple
    # The moments in `plan.memory` and what `schedule.facts` counts were found on these
] = [
    ("gpt 125M", (1, 1, 1), 8, 1024, 1, {"zero_stage": 0}),
    ("gpt 125M", (8, 1, 1), 64, 1024, 1, {}),
    (
        "gpt 125M",
        (4, 2, 1),
        64,
        1024,
        4,
        {"zero_stage": 2, "zero_hold": True, "remat": "full"},
    ),
    ("gpt 125M", (2, 2, 2), 32, 1024, 8, {"compute": "float32"}),
    ("1B", (8, 1, 1), 32, 4096, 1, {"zero_stage": 3, "remat": "full"}),
    ("1B", (8, 1, 1), 32, 4096, 2, {"remat": "dots"}),
    (
        "1B",
        (4, 2, 1),
        32,
        4096,
        4,
        {"zero_stage": 2, "zero_hold": True, "sequence_parallel": True},
    ),
    ("1B", (2, 2, 2), 32, 4096, 8, {"sequence_parallel": True}),
    ("1B", (1, 1, 8), 16, 4096, 16, {"zero_stage": 0, "remat": "full"}),
    ("1B", (2, 1, 4), 32, 4096, 16, {"schedule": "interleaved", "virtual_stages": 2}),
    ("8B", (8, 1, 1), 16, 8192, 1, {"zero_stage": 3, "remat": "full"}),
    ("8B", (4, 4, 1), 32, 4096, 4, {"sequence_parallel": True, "remat": "full"}),
    ("8B", (2, 4, 2), 32, 4096, 8, {"sequence_parallel": True}),
    ("8B", (2, 2, 4), 64, 4096, 16, {"sequence_parallel": True, "remat": "full"}),
    (
        "8B",
        (2, 2, 4),
        64,
        4096,
        16,
        {
            "zero_stage": 2,
            "zero_hold": True,
            "schedule": "interleaved",
            "virtual_stages": 4,
            "remat": "full",
        },
    ),
    ("13B", (4, 8, 1), 32, 4096, 4, {"sequence_parallel": True}),
    ("13B", (4, 2, 4), 64, 4096, 16, {"remat": "full"}),
    ("13B", (2, 4, 4), 32, 4096, 16, {}),
    ("34B", (4, 8, 2), 64, 4096, 16, {"sequence_parallel": True, "remat": "full"}),
    (
        "34B",
        (2, 8, 4),
        32,
        4096,
        16,
        {"sequence_parallel": True, "schedule": "interleaved", "virtual_stages": 3},
    ),
    ("34B", (64, 1, 1), 128, 4096, 1, {"zero_stage": 3, "remat": "full"}),
    ("70B", (2, 8, 8), 64, 4096, 32, {"sequence_parallel": True, "remat": "full"}),
    (
        "70B",
        (4, 8, 4),
        64,
        4096,
        16,
        {
            "sequence_parallel": True,
            "schedule": "interleaved",
            "virtual_stages": 5,
            "remat": "full",
        },
    ),
    (
        "70B",
        (16, 8, 1),
        64,
        4096,
        4,
        {"zero_stage": 3, "sequence_parallel": True, "remat": "full"},
    ),
    (
        "70B",
        (8, 8, 2),
        64,
        8192,
        8,
        {"zero_stage": 3, "sequence_parallel": True, "remat": "full"},
    ),
    ("1B", (8, 1, 1), 32, 4096, 1, {"zero_stage": 3}),
    ("8B", (4, 2, 1), 32, 4096, 8, {"zero_stage": 3, "remat": "dots"}),
    ("gpt 1.3B", (8, 1, 1), 64, 1024, 2, {"remat": "full"}),
    ("gpt 1.3B", (2, 2, 2), 32, 1024, 8, {"sequence_parallel": True}),
    ("gpt 1.3B", (4, 2, 1), 32, 1024, 2, {"zero_stage": 0, "remat": "dots"}),
    ("3B", (8, 1, 1), 16, 4096, 2, {"remat": "dots"}),
    ("3B", (4, 2, 1), 16, 4096, 2, {"zero_stage": 3, "sequence_parallel": True}),
    ("3B", (2, 1, 4), 32, 4096, 16, {"remat": "dots"}),
    (
        "3B",
        (1, 2, 4),
        16,
        4096,
        16,
        {
            "zero_stage": 0,
            "schedule": "interleaved",
            "virtual_stages": 7,
            "remat": "full",
            "sequence_parallel": True,
        },
    ),
    (
        "8B",
        (2, 8, 1),
        16,
        8192,
        8,
        {
            "zero_stage": 2,
            "zero_hold": True,
            "remat": "full",
            "sequence_parallel": True,
        },
    ),
    (
        "13B",
        (8, 1, 4),
        64,
        4096,
        8,
        {"zero_stage": 2, "zero_hold": True, "remat": "full"},
    ),
    (
        "13B",
        (2, 8, 2),
        32,
        2048,
        8,
        {"schedule": "interleaved", "virtual_stages": 2, "sequence_parallel": True},
    ),
    (
        "70B",
        (1, 8, 8),
        32,
        4096,
        32,
        {
            "zero_stage": 0,
            "schedule": "interleaved",
            "virtual_stages": 2,
            "sequence_parallel": True,
            "remat": "full",
        },
    ),
    (
        "34B",
        (32, 4, 1),
        128,
        4096,
        2,
        {"zero_stage": 3, "remat": "dots", "sequence_parallel": True},
    ),
    ("1B", (2, 2, 2), 16, 4096, 4, {"schedule": "zb_h1"}),
    ("3B", (2, 2, 4), 32, 4096, 8, {"schedule": "zb_h1", "remat": "full"}),
    ("3B", (4, 1, 4), 32, 4096, 8, {"schedule": "gpipe", "remat": "full"}),
    ("1B", (2, 2, 2), 32, 2048, 8, {"schedule": "v_1f1b", "sequence_parallel": True}),
    ("1B", (4, 1, 2), 16, 4096, 4, {"schedule": "gpipe"}),
    ("1B", (2, 2, 2), 4, 4096, 2, {"schedule": "gpipe"}),
    ("1B", (2, 2, 2), 16, 4096, 8, {"schedule": "interleaved", "virtual_stages": 1}),
    ("1B", (2, 1, 4), 8, 4096, 4, {"schedule": "zb_h1"}),
    ("1B", (2, 1, 4), 16, 4096, 8, {"schedule": "zb_interleaved", "virtual_stages": 2}),
    ("1B", (2, 2, 2), 4, 4096, 2, {"schedule": "v_1f1b"}),
    ("1B", (8, 1, 1), 32, 4096, 2, {"remat": "names"}),
    ("1B", (8, 1, 1), 32, 4096, 2, {"remat": "names", "remat_keep": ("attention",)}),
    (
        "1B",
        (8, 1, 1),
        32,
        4096,
        2,
        {"remat": "names", "remat_offload": ("mlp_hidden",)},
    ),
    (
        "1B",
        (4, 2, 1),
        32,
        4096,
        4,
        {
            "remat": "names",
            "remat_keep": ("qkv", "attention"),
            "sequence_parallel": True,
        },
    ),
    ("1B", (4, 2, 1), 32, 4096, 4, {"remat": "names", "remat_keep": ACTIVATIONS}),
    ("1B", (2, 2, 2), 32, 4096, 8, {"remat": "names"}),
    (
        "1B",
        (2, 2, 2),
        32,
        4096,
        8,
        {
            "remat": "names",
            "remat_keep": ("qkv", "attention"),
            "sequence_parallel": True,
        },
    ),
    ("3B", (2, 1, 4), 32, 4096, 16, {"remat": "names", "remat_keep": ("mlp_hidden",)}),
    ("3B", (2, 1, 4), 32, 4096, 16, {"remat": "names", "remat_keep": ACTIVATIONS}),
    ("1B", (8, 1, 1), 16, 2048, 1, {"batching": "packed"}),
    ("1B", (8, 1, 1), 16, 2048, 1, {"dropout": 0.1}),
]
UNSEEN: list[tuple] = [
    ("gpt 125M", (1, 1, 4), 16, 1024, 8, {"remat": "dots"}),
    ("gpt 1.3B", (2, 4, 1), 32, 2048, 4, {"compute": "float32", "remat": "full"}),
    ("1B", (4, 1, 2), 32, 2048, 4, {"remat": "full"}),
    ("3B", (8, 2, 1), 32, 8192, 2, {"sequence_parallel": True}),
    (
        "8B",
        (8, 4, 1),
        32,
        8192,
        1,
        {"zero_stage": 3, "sequence_parallel": True, "remat": "dots"},
    ),
    (
        "8B",
        (2, 4, 4),
        32,
        8192,
        16,
        {
            "schedule": "interleaved",
            "virtual_stages": 2,
            "sequence_parallel": True,
            "remat": "dots",
        },
    ),
    ("13B", (2, 8, 1), 16, 4096, 2, {"remat": "dots"}),
    ("34B", (4, 8, 4), 64, 4096, 16, {"sequence_parallel": True, "remat": "full"}),
    ("70B", (64, 1, 1), 64, 4096, 1, {"zero_stage": 3, "remat": "full"}),
    (
        "70B",
        (4, 8, 8),
        128,
        4096,
        32,
        {
            "schedule": "zb_interleaved",
            "virtual_stages": 2,
            "sequence_parallel": True,
            "remat": "full",
        },
    ),
    ("1B", (2, 1, 2), 16, 4096, 8, {"schedule": "zb_h1", "remat": "dots"}),
    ("8B", (1, 4, 4), 16, 4096, 16, {"schedule": "zb_h1"}),
    ("8B", (1, 4, 4), 16, 4096, 16, {"schedule": "v_1f1b", "remat": "dots"}),
    (
        "3B",
        (2, 2, 4),
        32,
        4096,
        8,
        {"schedule": "looped_bfs", "virtual_stages": 2, "remat": "full"},
    ),
    (
        "8B",
        (4, 4, 1),
        32,
        4096,
        4,
        {
            "remat": "names",
            "remat_keep": ("attention_out", "mlp_hidden"),
            "sequence_parallel": True,
        },
    ),
    (
        "8B",
        (2, 4, 2),
        32,
        4096,
        8,
        {"remat": "names", "remat_keep": ("attention_out",), "sequence_parallel": True},
    ),
]

# Past about 80% of the device's memory XLA computes what it can a second time, rather than hold it: on a larger device
# (--compile h200) these hold as much as planned, on an H100 less.
TIGHT: list[tuple] = [
    ("8B", (16, 1, 1), 32, 8192, 1, {"zero_stage": 3, "remat": "dots"}),
    ("8B", (8, 1, 2), 64, 4096, 8, {"remat": "dots"}),
    (
        "13B",
        (4, 4, 2),
        64,
        4096,
        8,
        {
            "zero_stage": 2,
            "zero_hold": True,
            "schedule": "zb_h1",
            "remat": "full",
            "sequence_parallel": True,
        },
    ),
]

# Layers of linear attention, three to one of attention.
HYBRIDS: list[tuple] = [
    ("hybrid 1B", (8, 1, 1), 16, 4096, 1, {"zero_stage": 3, "remat": "full"}),
    ("hybrid 1B", (8, 1, 1), 32, 4096, 2, {"remat": "dots"}),
    ("hybrid 1B", (8, 1, 1), 16, 4096, 2, {}),
    ("hybrid 1B", (2, 2, 2), 32, 4096, 8, {"sequence_parallel": True, "remat": "full"}),
    (
        "hybrid 1B",
        (2, 1, 1),
        4,
        32768,
        1,
        {"context": 4, "zero_stage": 3, "remat": "full"},
    ),
    (
        "hybrid 1B",
        (1, 1, 2),
        4,
        32768,
        4,
        {"context": 4, "context_strategy": "all_gather"},
    ),
    (
        "hybrid 9B",
        (16, 1, 1),
        16,
        32768,
        1,
        {"context": 4, "zero_stage": 3, "remat": "full"},
    ),
    ("hybrid 9B", (8, 4, 2), 64, 8192, 8, {"sequence_parallel": True, "remat": "full"}),
]
GROUPS = {
    "seen": ("seen while the formulas were made", SEEN),
    "unseen": ("not seen", UNSEEN),
    "tight": ("more than XLA likes to hold", TIGHT),
    "hybrids": ("layers of several kinds", HYBRIDS),
}

SECTIONS = {
    "compute": "precision",
    "dropout": "model",
    "batching": "data",
    "context": "mesh",
}


def config_of(row: tuple) -> dict:
    model, (data, tensor, pipeline), batch, length, microbatches, given = row
    found: dict = {
        "model": dict(MODELS[model]),
        "mesh": {"data": data, "tensor": tensor, "pipeline": pipeline},
        "parallel": {"schedule": "1f1b", "microbatches": microbatches},
        "precision": {"compute": "bfloat16"},
        "data": {},
        "train": {"global_batch_size": batch, "sequence_length": length},
    }
    for key, value in given.items():
        found[SECTIONS.get(key, "parallel")][key] = value
    return found


def gigabytes() -> None:
    """Prints published memory of other frameworks, by how they hold what they train."""
    title = "memory of other frameworks: no number is fitted, the formulas were made with these rows in sight"
    table = Table(
        "source      ",
        "run                           ",
        "reported GiB",
        "predicted",
        "off by",
        title=title,
    )
    errors = [row.predicted / row.reported - 1 for row in memory.ROWS]
    for row, error in zip(memory.ROWS, errors, strict=True):
        table.row(
            row.source,
            row.name,
            f"{row.reported:.1f}",
            f"{row.predicted:.1f}",
            f"{error:+.1%}",
        )
    median, percentile, worst, _ = sources.spread(errors)
    print(f"{len(errors)} rows: median {median}, p90 {percentile}, worst {worst}")
    right, layouts = memory.called_right()
    print(
        f"layouts that ran or ran out of memory: {right} of {layouts} called right, {right / layouts:.1%}"
    )


def searched() -> None:
    """Searches every layout of Llama-3 405B on 16,384 H100s."""
    train = {"global_batch_size": 2048, "sequence_length": 8192}
    config = load(
        {"model": LLAMA_3["405B"], "precision": {"compute": "bfloat16"}, "train": train}
    )
    found = search(config, named("h100", 16384), 16384)
    print(f"405B on 16,384 H100: {found.legal:,} layouts in {found.seconds:.1f} s")


def compiled(target: str, only: str | None) -> None:
    """Compiles each config of all groups, or of one."""
    for title, rows in GROUPS.values() if only is None else [GROUPS[only]]:
        heads = (
            "planned GiB",
            "compiled GiB",
            "off by",
            "traffic off by",
            "seconds planned",
            "of the program",
            "off by",
        )
        table = Table(
            "model   ",
            "mesh       ",
            "parallel" + 40 * " ",
            *heads,
            title=f"{target}, {title}",
        )
        errors: dict[str, list[float]] = {
            "memory": [],
            "traffic of the worst axis": [],
            "seconds": [],
        }
        for row in rows:
            mesh = " x ".join(map(str, row[1]))
            keys = " ".join(f"{k}={v}" for k, v in ({"m": row[4]} | row[5]).items())
            found = planned_and_compiled(config_of(row), target)
            if found is None:
                table.row(row[0], mesh, "failed to compile", *[""] * len(heads))
                continue
            planned = found["per_device_bytes"]["total"]
            real = found["compiled"]["total_bytes"]
            seconds = found["step_seconds"], found["program_seconds"]
            of_row = (
                planned / real - 1,
                _traffic_error(found),
                seconds[0] / seconds[1] - 1,
            )
            for known, error in zip(errors.values(), of_row, strict=True):
                known.append(error)
            sizes = (
                f"{planned / 2**30:.2f}",
                f"{real / 2**30:.2f}",
                f"{of_row[0]:+.1%}",
                f"{of_row[1]:.2%}",
            )
            table.row(
                row[0],
                mesh,
                keys,
                *sizes,
                *(f"{s:.3f}" for s in seconds),
                f"{of_row[2]:+.1%}",
            )
        print("; ".join(f"{what}: {_summary(found)}" for what, found in errors.items()))
        print(
            f"seconds of {sum(abs(e) <= 0.05 for e in errors['seconds'])} of {len(errors['seconds'])} within 5%"
        )


def planned_and_compiled(config: dict, target: str) -> dict | None:
    """Returns what `experiments.plan.timed` says of a config, in a process of its own, since the compiler must start
    before any other backend; None if it fails.
    """
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(to_yaml(load(config)))
        file.flush()
        command = [sys.executable, "-m", "experiments.plan.timed", file.name, target]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stderr.splitlines()[-1], file=sys.stderr)
        return None
    return json.loads(done.stdout)


def _traffic_error(found: dict, smallest: float = 1e6) -> float:
    """Of the axis where the two differ most, leaving out what is less than a megabyte."""
    sent: dict[str, float] = {}
    for collective in found["compiled"]["collectives"]:
        sent[collective["axis"]] = (
            sent.get(collective["axis"], 0.0) + collective["sent_bytes"]
        )
    planned = found["traffic_bytes_per_step"]
    axes = [
        axis
        for axis in {*sent, *planned}
        if max(sent.get(axis, 0), planned.get(axis, 0)) > smallest
    ]
    return max(
        (
            abs(planned.get(axis, 0) - sent.get(axis, 0)) / max(sent.get(axis, 0), 1)
            for axis in axes
        ),
        default=0.0,
    )


def _summary(errors: Iterable[float]) -> str:
    errors = list(errors)
    sizes = [abs(error) for error in errors]
    if not sizes:
        return "nothing compiled"
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
