import numpy as np
import pytest

from experiments.plan import kernels
from meshtrain.cluster.accelerators import AMPERE
from meshtrain.plan import ACCELERATORS, compute
from meshtrain.plan.compute import CUDNN, DEFAULT_PROFILE, FrameworkProfile


@pytest.mark.parametrize("key", kernels.TABLES, ids=" ".join)
def test_the_law_is_within_a_few_per_cent_of_every_published_rate(key):
    for lengths, rates in kernels.TABLES[key]:
        half, [rate] = kernels.law([(lengths, rates)])
        assert rate / (1 + half / np.array(lengths)) == pytest.approx(
            np.array(rates), rel=0.065
        )


def test_the_law_finds_what_a_table_was_made_of():
    lengths = np.array([512, 2048, 16384])
    half, rates = kernels.law(
        [(lengths, rate / (1 + 300 / lengths)) for rate in (100.0, 250.0)]
    )
    assert half == 300 and rates == pytest.approx([100, 250])


def test_our_own_kernel_is_that_of_the_tables():
    assert kernels.kernel("cudnn") == CUDNN
    # None of the fitted Ampere runs has a kernel of attention, so that the tables alone say what it reaches.
    assert pytest.approx(kernels.share("cudnn", "a100"), rel=2e-3) == AMPERE.attention


@pytest.mark.parametrize(
    ("kernel", "device"),
    [(kernels.FLASH_2_AMPERE, "a100-80"), (kernels.TRITON_AMPERE, "a100-80")],
)
def test_the_planner_gives_a_kernel_the_time_that_its_table_does(kernel, device):
    """Forward and backward of 2 sequences of 16,384 tokens, 64 heads of 128."""
    name = "flash 2" if kernel is kernels.FLASH_2_AMPERE else "triton"
    accelerator, length, profile = (
        ACCELERATORS[device],
        16384,
        FrameworkProfile(kernel=kernel),
    )
    scores = 2 * 64 * length**2
    forward = compute.attention(accelerator, "bfloat16", 128, length, scores, profile)
    backward = compute.layer_backward(forward, accelerator, length, profile)
    flops = 4 * 128 * scores / 2
    for seconds, work, (lengths, rates) in zip(
        (forward, backward),
        (flops, 2.5 * flops),
        kernels.TABLES[name, "a100"],
        strict=True,
    ):
        assert work / seconds.attention / 1e12 == pytest.approx(
            rates[lengths.index(length)], rel=0.05
        )


def test_attention_slows_down_on_short_sequences_and_only_where_there_is_such_a_kernel():
    def rate(name, length):
        seconds = compute.attention(
            ACCELERATORS[name], "float32", 64, length, length**2, DEFAULT_PROFILE
        )
        return length**2 / seconds.attention

    assert rate("h100", 512) < 0.7 * rate("h100", 16384)
    assert rate("cpu", 512) == pytest.approx(rate("cpu", 16384))
