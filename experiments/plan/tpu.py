"""Published runs of MaxText on TPU v5p, with everything that their configs need.

AI-Hypercomputer/maxtext, MaxText/configs/v5p/README.md, tables of one slice ("v5p-128" has 64 chips), and 32b.sh to
1024b.sh there: FSDP x tensor, 2,048 tokens, synthetic data, splash attention, "minimal" recomputation (all but products
without batch dimensions) or "full". The sizes follow from `global_parameter_scale` (its pyconfig: heads and d_ff double
first, then d_model, then layers) and base.yml (d_model 2048, 16 heads of 128, d_ff 7168, 16 layers, vocabulary 32000).
TFLOP/s are of 6 N a token and of half of the scores (as it counted in 2024). 1024B on v5p-2048 is left out: this table
and the repository's README give different figures.
"""

from experiments.bench import config_of
from meshtrain.model.weights import parameters
from meshtrain.plan.compute import FrameworkProfile

from . import PUBLISHED
from .published import Run

MAXTEXT = FrameworkProfile(overlap_data=True, overlap_tensor=True)
LENGTH, VOCABULARY = 2048, 32000


def _maxtext(
    scale: int, chips: int, tensor: int, sequences: int, remat: str, reported: float
) -> Run:
    """`sequences` a chip; `scale` is a power of two, about the parameters in 10^9."""
    cycles, rest = divmod(scale.bit_length() - 1, 3)
    wide = 2 ** (cycles + (rest > 0))
    shape = {
        "layers": 16 * 2**cycles,
        "d_model": 2048 * 2 ** (cycles + (rest > 1)),
        "heads": 16 * wide,
        "head_dim": 128,
        "d_ff": 7168 * wide,
        "vocab_size": VOCABULARY,
    }
    mesh = {"data": chips // tensor, "tensor": tensor}
    parallel = {"zero_stage": 3, "remat": remat, "sequence_parallel": True}
    parallel["microbatches"] = 1
    config = config_of(shape, mesh, sequences * chips, LENGTH, parallel)
    model = config.model
    a_token = (
        6 * parameters(model) + 6 * model.heads * model.head_dim * model.layers * LENGTH
    )
    seconds = a_token * sequences * LENGTH / (reported * 1e12)
    return Run(
        "MaxText",
        f"{scale}B on {chips}",
        config,
        "tpu-v5p",
        MAXTEXT,
        seconds,
        f"{reported:g} TFLOP/s",
    )


FITTED = tuple(_maxtext(*row) for row in PUBLISHED["tpu"]["fitted"])
HELD_OUT = tuple(_maxtext(*row) for row in PUBLISHED["tpu"]["held out"])
