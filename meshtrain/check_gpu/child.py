"""python -m meshtrain.check_gpu.child NAME...: takes two steps of each run on the platform of JAX_PLATFORMS.

Prints a JSON line on the device, then one a run: `{"name": ..., "steps": [[loss, norm], ...]}`, or with `error`.
"""

import json
import sys
from typing import Any

import jax
import numpy as np

import meshtrain as mt
from meshtrain import xla
from meshtrain.check_gpu.cases import CASES, STEPS
from meshtrain.errors import short
from meshtrain.run.versions import versions


def device() -> dict[str, Any]:
    """Returns what a report says of the device and of what drives it."""
    here = jax.devices()[0]
    return {
        "platform": here.platform,
        "kind": here.device_kind,
        "devices": jax.device_count(),
        "driver": here.client.platform_version,
    } | versions()


def losses(name: str) -> list[list[float]]:
    """Returns loss and norm of the gradient of each step of a run."""
    config = mt.load(CASES[name])
    if config.precision.compute == "float32":
        # A GPU's products are else of 10 bits.
        jax.config.update("jax_default_matmul_precision", "highest")
    program = mt.Program(config)
    state = program.init()
    train = config.train
    steps = []
    for step in range(STEPS):
        shape = (train.global_batch_size, train.sequence_length + 1)
        random = np.random.default_rng(step)
        tokens = random.integers(0, config.model.vocab_size, shape).astype(np.int32)
        batch = program.place({"tokens": tokens[:, :-1], "labels": tokens[:, 1:]})
        state, metrics = program.train_step(state, batch)
        steps.append([float(metrics["loss"]), float(metrics["grad_norm"])])
    return steps


def main() -> None:
    xla.ask_for_pool()
    print(json.dumps(device()), flush=True)
    for name in sys.argv[1:]:
        line: dict[str, Any] = {"name": name}
        try:
            line["steps"] = losses(name)
        except Exception as error:  # the next one is to be tried all the same
            line["error"] = f"{type(error).__name__}: {short(str(error))}"
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
