"""Every test sees 8 fake CPU devices, a compiler told to be quick, and what was compiled the last time."""

import os
import signal
from importlib.metadata import version
from pathlib import Path

import jax

from meshtrain.mesh import fake_cpu_devices

DEVICES = 8
FLAGS = [
    "--xla_cpu_collective_call_terminate_timeout_seconds=60",  # a hang fails soon, and says where
    "--xla_backend_optimization_level=0",  # tests compile far longer than they run
]
if version("jaxlib") < "0.11":  # later versions know no other way, and end on a flag that they do not know
    FLAGS.append("--xla_cpu_use_fusion_emitters=false")


def pytest_configure() -> None:
    # Under nohup, or in a script's background, they are ignored, as a run then does too; the tests of signals send them.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    given = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = " ".join([*FLAGS, given]).strip()  # what the user sets comes last and wins
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])
    fake_cpu_devices(DEVICES)
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "meshtrain" / "compiled-tests"
    jax.config.update("jax_compilation_cache_dir", str(cache))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
