"""Published layouts of Llama 13B to 65B on A100, tensor parallelism of 1 to 8 with and without sequence parallelism,
pipelines of 1 to 16.

Aleph-Alpha/NeurIPS-WANT-submission-efficient-parallelization-layouts, data/*.xlsx (commit e13c2cb), the rows with
FlashAttention-2; `aleph_alpha.csv` has their figures, and says which layouts ran out of memory. Hagemann et al. 2023,
"Efficient Parallelization Layouts for Large-Scale Distributed Model Training", section 3: nodes of a DGX A100 of 80 GB,
bfloat16, a vocabulary of 128,000, ZeRO-1, 2,048 sequences of 2,048 tokens a step, or 512 of 8,192, 1F1B. Some rows have
a kernel for RMSNorm; rotation and gate are PyTorch's everywhere.
"""

import csv
import functools
from dataclasses import replace
from pathlib import Path

from experiments.bench import MODELS, config_of
from meshtrain.config import Config
from meshtrain.plan.compute import FrameworkProfile

from .kernels import FLASH_2_AMPERE
from .published import BY_KERNEL, PYTORCH_LOSS, Run

# Of an element forward; its backward counts twice. Of pairs of rows that differ in the kernel of norms alone, the
# median.
NORM_BYTES = 51.0
PROFILE = FrameworkProfile(
    execution="asynchronous",
    kernel=FLASH_2_AMPERE,
    **BY_KERNEL,
    loss_passes=PYTORCH_LOSS + 1,
    whole_logits=True,
    gradient_bytes=4,
    sum_bytes=6,
    overlap_pipeline=False,
    input_sums=3,
    regathers=False,
)


@functools.cache
def rows() -> tuple[dict[str, str], ...]:
    """Every layout, those that ran out of memory among them."""
    text = Path(__file__).with_name("aleph_alpha.csv").read_text(encoding="utf-8")
    return tuple(csv.DictReader(text.splitlines()))


@functools.cache
def runs() -> tuple[Run, ...]:
    """Every row that ran."""
    return tuple(_run(row) for row in rows() if row["seconds"] != "oom")


def config(row: dict[str, str]) -> Config:
    """A row's layout."""
    sizes = (int(row[key]) for key in ("length", "tensor", "pipeline", "devices"))
    length, tensor, pipeline, devices = sizes
    data = devices // tensor // pipeline
    batch = 2048 if length == 2048 else 512
    parallel = {
        "zero_stage": 1,
        "sequence_parallel": row["sequence_parallel"] == "yes",
        "schedule": "1f1b",
        "vocab": "edge",
        "microbatches": batch // data // int(row["microbatch"]),
        "remat": "full" if row["checkpointing"] == "yes" else "none",
    }
    mesh = {"data": data, "tensor": tensor, "pipeline": pipeline}
    model = MODELS["Aleph Alpha"][row["model"]]
    return config_of(model, mesh, batch, length, parallel)


def _run(row: dict[str, str]) -> Run:
    profile = replace(
        PROFILE,
        recomputes=(1, 1, 1) if row["checkpointing"] == "yes" else None,
        norm_bytes=4.0 if row["kernel"] == "flash2+rms" else NORM_BYTES,
    )
    layout = f"{row['microbatch']} x {row['tensor']} x {row['pipeline']}"
    split = " sp" if row["sequence_parallel"] == "yes" else ""
    name = f"{row['model']} {row['length']} on {row['devices']}, {layout}{split}"
    seconds = row["seconds"]
    told = f"{seconds} s"
    return Run(
        "Aleph Alpha", name, config(row), "a100-80", profile, float(seconds), told
    )
