"""meshtrain: train transformers on a device mesh (data x tensor x pipeline x context x islands) in JAX and Flax.

    import meshtrain as mt

    mt.fake_devices(8)                                        # in a notebook, before anything uses JAX: 8 CPU devices
    config = mt.load("configs/quickstart.yaml", ["mesh.tensor=2"])  # a file, dicts, a config or None; overrides
    program = mt.Program(config)                              # shows its mesh; block=, attention=, loss= replace parts
    state, (data, held_out) = program.init(), mt.open_data(config)
    state, metrics = program.train_step(state, program.place(data.batch(0)))
    program.layout                                            # where each weight lies; mt.show(state): the live arrays
    program.collectives()                                     # what a step sends: axis, bytes, line of the source
    program.layout.table                                      # the pipeline's schedule, clock by clock
    logits = mt.read_model("runs/quickstart")([[72, 105]])    # a checkpoint's weights, as a function of tokens

Config, Program, Layout, Table, Timeline, Plan and Collectives draw themselves as the last line of a cell, `print`
writes them, and `mt.show` does so for meshes and arrays. `mt.schedule` holds what makes, proves, simulates and draws
schedules.

Every name is imported when it is first asked for: `import meshtrain` alone loads no JAX and starts no backend. Bad
input is a ConfigError, one plain sentence. `train` and `plan` are modules with commands of their own (python -m
meshtrain.train). Called, they are the functions of the same name: mt.train(config), mt.plan(config, "h100").
"""

# The interpreter has loaded these three before the first line of any program.
import _signal  # type: ignore[import-not-found]
import os
import sys


def _is_command() -> bool:
    """Returns whether the process is a command's: `meshtrain ...`, or Python with `-m` and a module of ours."""
    if sys.argv[:1] != ["-m"]:
        return os.path.basename(sys.argv[0] if sys.argv else "") == __name__
    # `-m`, which looks for the module still.
    return (
        sys.orig_argv[-len(sys.argv) :][0].removeprefix("-m").partition(".")[0]
        == __name__
    )


if _is_command():
    # Imports take seconds, and the first of them, of what has words for a request, a tenth of one.
    for _number in (_signal.SIGINT, _signal.SIGTERM):
        _signal.signal(_number, lambda *_: os._exit(75))
    from meshtrain.run import early

    early.hear()

import importlib  # noqa: E402
from typing import TYPE_CHECKING, Any  # noqa: E402

if TYPE_CHECKING:
    from meshtrain import schedule as schedule
    from meshtrain.checkpoint import Checkpointer as Checkpointer
    from meshtrain.checkpoint import CheckpointError as CheckpointError
    from meshtrain.config import Config as Config
    from meshtrain.config import ConfigError as ConfigError
    from meshtrain.config.load import load as load
    from meshtrain.data import open_data as open_data
    from meshtrain.mesh import fake_devices as fake_devices
    from meshtrain.mesh import make_mesh as make_mesh
    from meshtrain.pictures import show as show
    from meshtrain.plan import plan as plan
    from meshtrain.reader import Model as Model
    from meshtrain.reader import read_model as read_model
    from meshtrain.run.hooks import RunHook as RunHook
    from meshtrain.step import Program as Program
    from meshtrain.step import State as State
    from meshtrain.train import train as train

# Where each name is defined; "" for a module that is also the function of its name.
_HOMES = {
    "CheckpointError": "checkpoint",
    "Checkpointer": "checkpoint",
    "Config": "config",
    "ConfigError": "config",
    "Model": "reader",
    "Program": "step",
    "RunHook": "run.hooks",
    "State": "step",
    "fake_devices": "mesh",
    "load": "config",
    "make_mesh": "mesh",
    "open_data": "data",
    "plan": "",
    "read_model": "reader",
    "schedule": "",
    "show": "pictures",
    "train": "",
}
__all__ = list(_HOMES)


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            # Whoever looks for a schedule's function here is told where it is.
            if name[:1].isalpha():
                schedule = importlib.import_module(f"{__name__}.schedule")
            else:
                schedule = None
            there = ""
            if name in getattr(schedule, "__all__", ()):
                there = f"; it is mt.schedule.{name}"
            raise AttributeError(
                f"module {__name__!r} has no attribute {name!r}{there}"
            )
        home = importlib.import_module(f"{__name__}.{_HOMES[name] or name}")
        globals()[name] = home
        if _HOMES[name]:
            globals()[name] = getattr(home, name)
        return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
