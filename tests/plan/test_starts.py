"""The configs that people start a fine-tuning from: each fits with memory to spare, as planned and as XLA compiles it
for described GPUs.
"""

import importlib.util
import json
import os
import subprocess
import sys

import numpy as np
import pytest

import meshtrain as mt
from meshtrain.config import load

CUDA = importlib.util.find_spec("jax_plugins") and importlib.util.find_spec(
    "jax_plugins.xla_cuda12"
)
DEVICES = {"llama3_8b_lora": 8, "llama3_70b_lora": 32, "llama3_70b": 512}


@pytest.mark.parametrize("name", DEVICES)
def test_it_fits_its_gpus_with_a_fifth_of_the_memory_to_spare(name):
    config = load(f"configs/{name}.yaml")
    plan = mt.plan(config, "h100")
    assert config.mesh.devices == DEVICES[name] and plan.fits
    assert plan.bytes <= 0.8 * plan.cluster.accelerator.usable_bytes


def test_rows_of_a_million_tokens_fit_64_gpus_and_the_long_quickstart_8_fake_devices():
    config, small = (
        load(f"configs/{name}.yaml") for name in ("llama3_8b_1m", "quickstart_long")
    )
    plan = mt.plan(config, "h100")
    assert (
        config.train.sequence_length,
        config.mesh.devices,
        config.parallel.context_strategy,
    ) == (2**20, 64, "ring")
    assert plan.fits and plan.bytes <= 0.8 * plan.cluster.accelerator.usable_bytes
    assert (
        small.mesh.devices == small.run.fake_devices == 8
        and small.mesh.context == 4
        and mt.plan(small).fits
    )


@pytest.mark.thorough
@pytest.mark.skipif(not CUDA, reason="needs the extra meshtrain[compile]")
@pytest.mark.parametrize("name", DEVICES)
def test_its_memory_is_that_of_xlas_gpu_program(name):
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu,cuda",
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
    }
    command = [
        sys.executable,
        "-m",
        "meshtrain.plan",
        "--config",
        f"configs/{name}.yaml",
        "--json",
        "--compile",
        "h100",
    ]
    done = subprocess.run(
        command,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    found = json.loads(done.stdout)
    assert found["per_device_bytes"]["total"] == pytest.approx(
        found["compiled"]["total_bytes"], rel=0.03
    )


def test_what_the_long_quickstart_asks_stands_at_the_beginning_of_the_row():
    config = load("configs/quickstart_long.yaml")
    batch, (keys, values) = mt.open_data(config)[0].batch(3), (16, 8)
    tables = [
        dict(divmod(item - values - keys, values) for item in row[:keys].tolist())
        for row in batch["tokens"]
    ]
    asked = np.argwhere(batch["weights"])
    assert len(asked) == 8 * (config.train.sequence_length - keys) / 2 and {
        len(table) for table in tables
    } == {keys}
    for row, at in asked:
        assert (
            tables[row][batch["tokens"][row, at] - values] == batch["labels"][row, at]
        )
