"""Published runs of data-parallel training on A100 and H100, from 125M to 70B parameters and from 512 to 65,536 tokens.

None is fitted.

mosaicml/llm-foundry, scripts/train/benchmarking/README.md (commit 061f2c7), all rows in bfloat16; `llm_foundry.csv` has
their figures.
Shapes of the models: scripts/train/yamls/pretrain of the same repository. PyTorch's FSDP, everything sharded and
gathered at use, nothing compiled; microbatches are sequences a device.

The tables do not say which PyTorch they were made with. Two were, by their captions and by sweep.sh beside them: an
older one for all rows in mixed precision "pure", whose checkpoints of blocks are recomputed whole, and a newer one for
"default", which stops once the backward has what it reads (torch.utils.checkpoint, early stop): before a block's last
product. Attention is the Triton kernel of FlashAttention 1.
"""

import csv
import functools
from pathlib import Path

from experiments.bench import MODELS, config_of
from meshtrain.plan.compute import FrameworkProfile

from .kernels import TRITON_AMPERE, TRITON_HOPPER
from .published import BY_KERNEL, PYTORCH_LOSS, Run

KERNELS = {"a100-40": TRITON_AMPERE, "a100-80": TRITON_AMPERE, "h100": TRITON_HOPPER}


@functools.cache
def runs() -> tuple[Run, ...]:
    """Every row."""
    text = Path(__file__).with_name("llm_foundry.csv").read_text(encoding="utf-8")
    return tuple(_run(row) for row in csv.DictReader(text.splitlines()))


def _run(row: dict[str, str]) -> Run:
    layers, width, heads = MODELS["MosaicML"][row["model"]]
    length, devices, microbatches = (
        int(row[key]) for key in ("length", "devices", "microbatches")
    )
    batch = int(row["microbatch"]) * microbatches * devices
    pure = row["mixed_precision"] == "pure"
    checkpoints = row["checkpointing"] == "yes"
    model = {"family": "gpt2", "layers": layers, "d_model": width, "heads": heads}
    parallel = {
        "zero_stage": 3,
        "zero_hold": False,
        "microbatches": microbatches,
        "remat": "full" if checkpoints else "none",
    }
    shape = model | {"vocab_size": 50368}
    config = config_of(shape, {"data": devices}, batch, length, parallel)
    profile = FrameworkProfile(
        execution="asynchronous",
        overlap_data=True,
        **BY_KERNEL,
        loss_passes=PYTORCH_LOSS,
        kernel=KERNELS[row["accelerator"]],
        gradient_bytes=2 if pure else 4,
        # Gathers of FSDP1 end where the weights lie; the gradient is divided, or cast to float32, before it is sent.
        copy_bytes=2 + 2 if pure else 2 + 4,
        sum_bytes=0,
        recomputes=(1, 1, 1) if checkpoints and pure else None,
    )
    name = f"{row['model']} {length} x {row['microbatch']} on {devices}{' recomputed' if checkpoints else ''}"
    speed = float(row["tokens_per_second"])
    return Run(
        "llm-foundry",
        name,
        config,
        row["accelerator"],
        profile,
        batch * length / speed,
        f"{speed:,.0f} tokens/s",
    )
