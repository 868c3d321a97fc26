"""Memory of odd settings: the plan beside XLA's CPU program, for layers of 256 on up to eight devices.

`tests/plan/test_odd.py` holds the plan to them (`pytest -m ''`: about 20 minutes on 2 cores).

Goal: within 5%. CPUs differ from GPUs in what the plan says of both: they multiply 16 bits in float32, and XLA turns
weights and activations of all layers to float32 before the loop that reads them; they keep experts' rows as they came,
without slots; they draw all random numbers of attention's dropout before; they iterate all of Muon's stacks at once.
`ON_GPUS` are compiled by XLA's CUDA compiler too, with layers of 1,024.

The compiled program holds its arguments, its results that take the place of none, and its temporaries. Where they
differ, XLA's buffer assignment says which arrays are there (XLA_FLAGS=--xla_dump_to=DIRECTORY).
"""

from meshtrain.config import Config, load
from meshtrain.config.follow import as_run_on
from meshtrain.plan import memory, pipeline
from meshtrain.plan.compiled import compile_step

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

LARGE = {"d_model": 1024, "d_ff": 2816}
SETTINGS = read("odd")
ON_GPUS = ["bfloat16", "experts, recomputed", "Muon, short rows", "a large vocabulary"]


def config_of(name: str, target: str = "cpu") -> Config:
    """Returns the config of a setting: as it is for CPUs, large and in bfloat16 for GPUs."""
    setting = SETTINGS[name]
    model = MODEL | setting.get("model", {})
    train = TRAIN | setting.get("train", {})
    if target != "cpu":
        setting = setting | {"precision": {"compute": "bfloat16"}}
        model |= LARGE
        if "moe" in model:
            model |= {"d_ff": None, "moe": model["moe"] | {"d_ff": LARGE["d_model"]}}
        # but for short rows
        train["sequence_length"] *= 4 if train["sequence_length"] > 64 else 1
    return load(setting | {"model": model, "train": train})


def held(config: Config, target: str = "cpu") -> tuple[float, float]:
    """Returns the bytes of a device: planned, and of the program compiled for `cpu` or a GPU."""
    platform = "cpu" if target == "cpu" else "gpu"
    config = as_run_on(platform, config)
    items = memory.items(config, pipeline.facts(config), platform)
    return memory.total(items), compile_step(config, target).total_bytes
