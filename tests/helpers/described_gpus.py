"""What XLA's CUDA compiler makes of a script for described GPUs, in a process of its own, because tests have started
JAX on CPU.

It needs the compiler (pip install -e '.[compile]'), though no GPU.
"""

import importlib.util
import json
import os
import subprocess
import sys
from typing import Any

import pytest

needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda12_plugin") is None,
    reason="XLA's CUDA compiler is not installed (pip install -e '.[compile]')",
)
STEP = """
import json
import sys
from meshtrain.config import load
from meshtrain.mesh import make_mesh
from meshtrain.plan.compiled import described_devices
from meshtrain.step import Program

config = load(json.loads(sys.argv[1]))
print(Program(config, make_mesh(config, described_devices("h100", 8))).lower().compile().as_text())
"""


def printed(*words: str) -> str:
    """Returns what Python prints that is started with these words, in an environment where JAX may see the described
    GPUs.
    """
    environment = {
        k: v for k, v in os.environ.items() if k not in ("JAX_PLATFORMS", "XLA_FLAGS")
    }
    done = subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def compiled_step(given: dict[str, Any]) -> str:
    """Returns the step of a config for 8 H100s, as text."""
    return printed("-c", STEP, json.dumps(given))
