"""The program that XLA's CUDA compiler makes for 8 described GPUs: gradients travel over data under the backward's matrix products.

It needs the compiler (pip install 'meshtrain[compile]'), though no GPU. It runs in a process of its own, because tests have started JAX on CPU.
"""

import importlib.util
import json
import os
import subprocess
import sys

import jax
import pytest

from meshtrain.config import load
from meshtrain.hlo import Module
from meshtrain.mesh import make_mesh
from meshtrain.model.weights import parameters
from meshtrain.plan import named
from meshtrain.plan.timed import timed

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(
        importlib.util.find_spec("jax_cuda12_plugin") is None,
        reason="XLA's CUDA compiler is not installed (pip install 'meshtrain[compile]')",
    ),
]

COMPILE = """
import json
import sys
from meshtrain.config import load
from meshtrain.mesh import make_mesh
from meshtrain.plan.compiled import described_devices
from meshtrain.step import Program

config = load(json.loads(sys.argv[1]))
print(Program(config, make_mesh(config, described_devices("h100", 8))).lower().compile().as_text())
"""


def test_all_gradients_but_the_first_buckets_and_the_vocabularys_travel_under_matrix_products():
    given = {
        "model": {"layers": 16, "d_model": 4096, "heads": 32, "d_ff": 8192, "vocab_size": 8192},
        "mesh": {"data": 4, "tensor": 2},
        "parallel": {"remat": "none", "sequence_parallel": True},
        "precision": {"compute": "bfloat16"},
        "train": {"global_batch_size": 4, "sequence_length": 4096},
    }
    environment = {k: v for k, v in os.environ.items() if k not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    command = [sys.executable, "-c", COMPILE, json.dumps(given)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    config, cluster = load(given), named("h100", 8)
    found = timed(Module(done.stdout), make_mesh(config, jax.devices()[:8]), config, cluster)
    scattered = found.sent["data", "reduce-scatter"]
    assert scattered.bytes == pytest.approx(4 * parameters(config.model) / 2, rel=0.01)
    vocabulary = 2 * 4 * 8192 * 4096 / 2
    first = (scattered.bytes - vocabulary) / 8
    assert scattered.under == pytest.approx(scattered.bytes - vocabulary - first, rel=0.02)
