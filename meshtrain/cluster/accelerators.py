"""Accelerators by name: what their makers' data sheets say, and how much of it training reaches.

Dense rates without sparsity, in TFLOP/s; bandwidth in GB/s (10^9); memory in GiB as the device reports it to programs.

    a100-40, a100-80  NVIDIA A100 data sheet (2021): 312 TFLOP/s bf16/fp16, 156 tf32; 1555 and 2039 GB/s; 400 W
    h100              NVIDIA H100 SXM data sheet (2023): 989.4 bf16/fp16, 494.7 tf32, 1978.9 fp8; 3350 GB/s; 700 W
    h100-96           the H100 of torchtitan's benchmarks/llama3_h100_202412: 96 GB HBM2e, 2400 GB/s, run at 500 W;
                      its peak is "between SXM and NVL" (989 and 835), so we take the middle
    h200              NVIDIA H200 SXM data sheet (2024): as H100, 141 GB at 4800 GB/s
    b200              NVIDIA HGX B200 data sheet (2025): 2250 bf16/fp16, 1100 tf32, 4500 fp8; 180 GB at 7700 GB/s
    gb200             NVIDIA GB200 NVL72 data sheet (2025): 2500 bf16/fp16, 1250 tf32, 5000 fp8; 186 GB at 8000 GB/s;
                      1200 W
    v100              NVIDIA V100 SXM2 data sheet (2020): 125 fp16, 15.7 fp32 (no bf16 units), 32 GB at 900 GB/s
    tpu-v5p           cloud.google.com/tpu/docs/v5p: 459 bf16, 95 GiB at 2765 GB/s
    cpu               a small cloud machine, a 2-core x86 virtual machine with AVX-512, as a whole: medians of four
                      runs of `python -m meshtrain.plan --measure` on two fake devices, memory given by hand; measure
                      your own

float32 matmuls on NVIDIA devices are counted at the TF32 rate, which is what XLA uses by default.
"""

import re
from dataclasses import astuple, dataclass, field, replace
from typing import Literal

from meshtrain.config.schema import key
from meshtrain.xla import POOL

RATE = {"least": 0.0, "most": 1e5, "unit": "TFLOP/s (2.25 PFLOP/s are 2250)"}
GIB = "GiB, as the device reports it"


@dataclass(frozen=True)
class Peak:
    """Matmul rates in TFLOP/s by dtype; 0: the device has no units for it."""

    float32: float = key(0.0, "TFLOP/s in float32 (TF32 where XLA uses it)", **RATE)
    bfloat16: float = key(0.0, "TFLOP/s in bfloat16", **RATE)
    float16: float = key(0.0, "TFLOP/s in float16", **RATE)
    float8: float = key(0.0, "TFLOP/s in float8, for precision.matmul", **RATE)


@dataclass(frozen=True)
class Efficiency:
    """Numbers between the data sheet and what training reaches.

        matmul      share of the peak that a very large matrix product reaches
        half_size   a product (m, k, n) reaches that share times 1/(1 + half_size (1/m + 1/k + 1/n))
        attention   share of the peak that cuDNN's attention reaches forward on very long sequences, on the half of
                    the scores that is not masked; `compute.Kernel` has the law for shorter ones, its backward, and
                    other kernels
        memory      share of the memory bandwidth that norms, activations, residuals and the optimizer reach
        link        share of a link's bandwidth that collectives reach
        exposed     share of the communication over data that could hide behind compute, but does not
        exposed_tensor   the same of collectives over tensor, of frameworks that send them in pieces beside their
                    products

    `experiments/plan/calibrate.py` fits them on published runs.
    """

    matmul: float = key(
        0.75,
        "share of the peak that a very large matrix product reaches",
        above=0.0,
        most=1.0,
    )
    half_size: float = key(
        100.0, "a side of a matrix product that costs half the rate", least=0.0
    )
    attention: float = key(
        0.45,
        "share of the peak that attention reaches forward on very long sequences",
        above=0.0,
        most=1.0,
    )
    memory: float = key(
        0.75, "share of the memory bandwidth reached", above=0.0, most=1.0
    )
    link: float = key(
        0.75, "share of a link's bandwidth that collectives reach", above=0.0, most=1.0
    )
    exposed: float = key(
        0.3,
        "share of hideable communication that stays exposed: it competes for the device",
        least=0.0,
        most=1.0,
    )
    # Measured, not fitted: of torchtitan's and Transformer Engine's pieces 36 to 49% were hidden, one machine with and
    # without. A piece is a smaller product, and its message takes multiprocessors from it.
    exposed_tensor: float = key(
        0.57,
        "share of a tensor collective sent in pieces that stays exposed",
        least=0.0,
        most=1.0,
    )


@dataclass(frozen=True)
class Accelerator:
    name: str = key(
        "", "one of the accelerators known by name, or a new one with all its figures"
    )
    platform: Literal["gpu", "tpu", "cpu"] = key(
        "gpu", "what JAX takes it for; of one known by name that is known"
    )
    memory: float = key(
        0.0, "memory in GiB, as the device reports it", least=0.0, most=1e5, unit=GIB
    )
    reserved: float = key(
        0.0,
        "GiB of it that programs cannot have: context, collective buffers, fragmentation",
        least=0.0,
        most=1e5,
        unit=GIB,
    )
    bandwidth: float = key(
        0.0,
        "memory bandwidth in GB/s",
        least=0.0,
        most=1e5,
        unit="GB/s (3.35 TB/s are 3350)",
    )
    watts: float = key(
        0.0,
        "power at which the rates hold (informative)",
        least=0.0,
        most=1e5,
        unit="watts",
    )
    peak: Peak = field(default_factory=Peak)
    efficiency: Efficiency = field(default_factory=Efficiency)

    def flops(self, dtype: str) -> float:
        """Peak FLOP/s in a compute dtype; where the device has no units for it, float32's."""
        return (getattr(self.peak, dtype) or self.peak.float32) * 1e12

    @property
    def memory_rate(self) -> float:
        """Bytes a second that passes over memory reach."""
        return self.bandwidth * 1e9 * self.efficiency.memory

    @property
    def memory_bytes(self) -> float:
        return self.memory * 2**30

    @property
    def usable_bytes(self) -> float:
        return (self.memory - self.reserved) * 2**30


# Fitted by `calibrate` on three rows of `experiments/plan/tpu.py`, whose four others it predicts within 9%.
TPU_V5P = Efficiency(
    matmul=0.844,
    half_size=102.0,
    attention=0.441,
    memory=0.737,
    link=0.741,
    exposed=0.319,
    exposed_tensor=0.319,
)


def _peak(half: float, single: float, float8: float = 0.0) -> Peak:
    """Returns the rates of a GPU whose 16-bit types are equally fast."""
    return Peak(float32=single, float16=half, bfloat16=half, float8=float8)


def _gpu(
    name: str,
    memory: float,
    bandwidth: float,
    peak: Peak,
    watts: float,
    efficiency: Efficiency,
) -> Accelerator:
    return Accelerator(
        name,
        "gpu",
        memory,
        round(memory * (1 - POOL), 1),
        bandwidth,
        watts,
        peak,
        efficiency,
    )


# Fitted by `experiments/plan/calibrate.py` on published runs, most of them of PyTorch; `python -m
# experiments.plan.sources` prints the fit, and what it says of each source that it was not fitted on.
AMPERE = Efficiency(
    matmul=0.786,
    half_size=60.1,
    attention=0.576,
    memory=0.717,
    link=0.75,
    exposed=0.318,
)
CPU = Efficiency(matmul=0.8, half_size=32.0, exposed=1.0)
HOPPER = Efficiency(
    matmul=0.713,
    half_size=160.0,
    attention=0.673,
    memory=0.614,
    link=0.795,
    exposed=0.388,
)
# Of the sheet's peak a GPU reaches less where its power, and so its clock, is held below it: the share of `matmul`
# alone was fitted.
HOPPER_500_W = replace(HOPPER, matmul=0.65)
BLACKWELL = replace(HOPPER, matmul=0.55)

# What our own step reaches on a device alone: steps of seven models, by `python -m experiments.gpu`. By these rates
# published runs of several H100s are planned 4 to 9% too fast, those of XLA (MaxText) 8%: what devices lose beside
# others is not known apart, but is in the fit.
_HOPPER_ALONE = replace(HOPPER, matmul=0.818, memory=0.65)
ALONE = {"h100": _HOPPER_ALONE, "h200": _HOPPER_ALONE}

ACCELERATORS: dict[str, Accelerator] = {
    a.name: a
    for a in (
        _gpu("a100-40", 39.4, 1555, _peak(312, 156), 400, AMPERE),
        _gpu("a100-80", 79.2, 2039, _peak(312, 156), 400, AMPERE),
        _gpu("h100", 79.6, 3350, _peak(989.4, 494.7, 1978.9), 700, HOPPER),
        _gpu("h100-96", 95.0, 2400, _peak(912, 456, 1824), 500, HOPPER_500_W),
        _gpu("h200", 139.8, 4800, _peak(989.4, 494.7, 1978.9), 700, HOPPER),
        _gpu("b200", 178.4, 7700, _peak(2250, 1100, 4500), 1000, BLACKWELL),
        _gpu("gb200", 185.0, 8000, _peak(2500, 1250, 5000), 1200, BLACKWELL),
        _gpu("v100", 31.7, 900, Peak(float16=125, float32=15.7), 300, AMPERE),
        Accelerator(
            "tpu-v5p",
            "tpu",
            95.0,
            1.0,
            2765,
            0.0,
            Peak(bfloat16=459.0, float32=230.0),
            TPU_V5P,
        ),
        Accelerator("cpu", "cpu", 16.0, 0.0, 33.0, 0.0, Peak(0.45, 0.44, 0.44), CPU),
    )
}

# What JAX calls a device (`device_kind`; NVIDIA's driver names its own), without its maker, whose rates we know. The
# PCIe and NVL boards of the H100 are slower than the SXM one, and stand here no more than any other that has no data
# sheet.
KINDS = {
    "a100-sxm4-40gb": "a100-40", "a100-pcie-40gb": "a100-40", "a100-sxm4-80gb": "a100-80", "a100-80gb-pcie": "a100-80",
    "h100-80gb-hbm3": "h100", "h200": "h200", "b200": "b200", "gb200": "gb200",
    "v100-sxm2-16gb": "v100", "v100-sxm2-32gb": "v100", "tpu-v5": "tpu-v5p", "tpu-v5p": "tpu-v5p",
}  # fmt: skip


def canonical(kind: str) -> str:
    """The name of a device in `ACCELERATORS`; of one that is not there what JAX calls it, in lower case with
    hyphens.
    """
    name = re.sub("[^a-z0-9]+", "-", kind.lower()).strip("-")
    return KINDS.get(re.sub("^(nvidia|tesla)-", "", name), name)


def reaching(accelerator: Accelerator, devices: int) -> Accelerator:
    """Returns the accelerator with what it reaches alone or beside others, where its figures are ours and both are
    known.
    """
    beside = ACCELERATORS.get(accelerator.name, accelerator).efficiency
    alone = ALONE.get(accelerator.name, beside)
    if accelerator.efficiency not in (alone, beside):
        return accelerator
    return replace(accelerator, efficiency=alone if devices == 1 else beside)


# Whose efficiencies those have that no run of theirs was fitted on, and that are another chip than the fitted ones.
LENDERS = {"b200": "GB200", "v100": "Ampere"}
_FITTED = {
    "a100-40": "published runs on A100s, six sources",
    "a100-80": "published runs on A100s, six sources",
    "h100": "published runs on H100s, four sources",
    "h200": "published runs on H100s, whose chip it has",
    "h100-96": "published runs at 500 W, one source",
    "gb200": "published runs on GB200s, one source",
    "tpu-v5p": "published runs on v5p, one source",
}


def evidence(accelerator: Accelerator) -> str:
    """Says in words where the share of the peak that matmuls reach comes from."""
    known = ACCELERATORS.get(accelerator.name, Accelerator())
    if accelerator.efficiency == ALONE.get(accelerator.name):
        return "fitted on steps of our own on one H100"
    if accelerator.efficiency.matmul != known.efficiency.matmul:
        return "given by the cluster's description"
    if borrowed := lender(accelerator):
        return f"a guess, borrowed from {borrowed}"
    return f"fitted on {_FITTED[known.name]}" if known.name in _FITTED else "a guess"


def lender(accelerator: Accelerator) -> str | None:
    """Whose efficiencies an accelerator has, if not its own; none where all of them were given."""
    known = ACCELERATORS.get(accelerator.name, Accelerator())
    own = astuple(accelerator.efficiency)
    if not any(a == b for a, b in zip(own, astuple(known.efficiency), strict=True)):
        return None
    if accelerator.name in ACCELERATORS:
        return LENDERS.get(accelerator.name)
    return "no device in particular"
