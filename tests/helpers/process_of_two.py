"""One process of two, a CPU device each: python process_of_two.py RANK PORT RUN_DIRECTORY.
tests/checkpoint/test_processes.py starts both.

Goes on from the run's checkpoint for two steps, of which it saves each, takes one more, then waits to be told to stop.
"""

import json
import sys
import time
from pathlib import Path

import jax
from checkpoint_runs import build_for, config, take

from meshtrain.checkpoint import Checkpointer
from meshtrain.config import Config
from meshtrain.mesh import fake_cpu_devices
from meshtrain.run.signals import StopSignals


def settings(directory: Path) -> Config:
    """5 layers over two stages, one in each process: what is saved has to be rearranged between them.

    The base is frozen.
    """
    layout = {
        "mesh": {"pipeline": 2},
        "parallel": {"schedule": "gpipe", "microbatches": 2},
    }
    return config(
        directory, lora={"rank": 2}, optimizer={"learning_rate": 0.1}, **layout
    )


def main(rank: int, port: str, directory: Path) -> None:
    fake_cpu_devices(1)
    jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=rank)
    assert jax.process_count() == 2 and len(jax.devices()) == 2
    program = build_for(settings(directory))
    checkpointer = Checkpointer(program.config, program)
    state, step = checkpointer.restore_or_init()
    losses = []
    for k in (step + 1, step + 2):
        state, loss = take(program, state, k)
        checkpointer.save(k, state, loss)
        losses.append(loss)
    losses.append(take(program, state, step + 3)[1])
    checkpointer.wait()
    checkpointer.close()
    asked = 0
    with StopSignals() as stop:
        tell(step=step, losses=losses)
        while not stop.requested and asked < 1000:
            asked += 1
            time.sleep(0.02)
    tell(asked=asked)


def tell(**what: object) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
