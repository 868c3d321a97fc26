"""Memory of odd settings: the plan beside XLA's CPU program, for layers of 256 on up to eight devices.

`tests/plan/test_odd.py` holds the plan to them (`pytest -m ''`: about 20 minutes on 2 cores).

Goal: within 5%. In bfloat16 CPUs hold 15 to 28% more than is planned: what they compute in float32. Dropout over a ring
is planned 10% low, Muon with ZeRO-3 and several microbatches 8% high, and experts 30% high: CPUs keep their rows as
they came, without slots.

The compiled program holds its arguments, its results that take the place of none, and its temporaries. Where they
differ, XLA's buffer assignment says which arrays are there (XLA_FLAGS=--xla_dump_to=DIRECTORY).
"""

from meshtrain.config import Config, load
from meshtrain.config.follow import as_run_on
from meshtrain.mesh import make_mesh
from meshtrain.plan import memory, pipeline
from meshtrain.step import Program

from . import read

GOAL = 0.05
MODEL = {
    "layers": 8,
    "d_model": 256,
    "heads": 8,
    "kv_heads": 4,
    "d_ff": 704,
    "vocab_size": 512,
}
TRAIN = {"global_batch_size": 16, "sequence_length": 256}

SETTINGS = read("odd")


def config_of(name: str) -> Config:
    """Returns the config of a setting."""
    setting = SETTINGS[name]
    model = MODEL | setting.get("model", {})
    return load({"train": TRAIN} | setting | {"model": model})


def held(config: Config) -> tuple[float, float]:
    """Returns the bytes of a device: planned, and of the compiled program."""
    found = Program(config, make_mesh(config)).lower().compile().memory_analysis()
    results = found.output_size_in_bytes - found.alias_size_in_bytes
    on_cpu = as_run_on("cpu", config)
    planned = memory.total(memory.items(on_cpu, pipeline.facts(on_cpu), platform="cpu"))
    return planned, found.argument_size_in_bytes + results + found.temp_size_in_bytes
