"""How many tokens a second a run could at most take on the devices that it is on: what its MFU is a share of."""

from meshtrain.config import Config
from meshtrain.plan.cluster.accelerators import ACCELERATORS
from meshtrain.plan.shapes import model_flops

# What JAX calls a device (`device_kind`; NVIDIA's driver names its own) whose rates we know. The PCIe and NVL boards of the
# H100 are slower than the SXM one, and stand here no more than any other that has no data sheet in `accelerators`.
KINDS = {
    "NVIDIA A100-SXM4-40GB": "a100-40",
    "NVIDIA A100-PCIE-40GB": "a100-40",
    "NVIDIA A100-SXM4-80GB": "a100-80",
    "NVIDIA A100 80GB PCIe": "a100-80",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H200": "h200",
    "NVIDIA B200": "b200",
    "NVIDIA GB200": "gb200",
    "Tesla V100-SXM2-32GB": "v100",
    "TPU v5": "tpu-v5p",
    "TPU v5p": "tpu-v5p",
}


def tokens_at_peak(config: Config, kind: str, devices: int) -> float | None:
    """Tokens a second, were every device of this kind to do nothing but the model's FLOPs at its peak rate; None if that is not known.

    A run's tokens a second over these are its model FLOPs utilisation (PaLM, appendix B).
    """
    if kind not in KINDS:
        return None
    of_a_token = model_flops(config) / (config.train.global_batch_size * config.train.sequence_length)
    return devices * ACCELERATORS[KINDS[kind]].flops(config.precision.compute) / of_a_token
