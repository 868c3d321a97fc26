# %% [markdown]
# # 7 Checkpoints: killed, flipped, restored on another mesh
# A run on 8 devices is killed in the middle of a save, goes on, has one bit of its newest checkpoint flipped, goes on
# from the one before on another mesh with another ZeRO stage, and ends where a run ends that nothing disturbed. After
# each blow the notebook looks at what lies in the run directory, and at the end at the weights that come out.

# %%
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import meshtrain as mt

mt.fake_devices(8)

# %% [markdown]
# A model small enough to train 24 steps in seconds, on a text of a few thousand characters, with a checkpoint every 8
# steps. Runs are processes of their own here, so that they can be killed; they share what XLA has compiled.

# %%
os.chdir(tempfile.mkdtemp())
Path("text.txt").write_text(
    "the mesh is a placement, the schedule is a table, the step is one program. " * 100
)
Path("tiny.yaml").write_text("""
model:      {layers: 4, d_model: 32, heads: 4, d_ff: 64, vocab_size: 260}
mesh:       {data: 2, tensor: 2, pipeline: 2}
parallel:   {zero_stage: 1, schedule: 1f1b, microbatches: 2}
data:       {source: text.txt, validation: 0.0}
train:      {steps: 24, global_batch_size: 8, sequence_length: 32}
optimizer:  {learning_rate: 3.0e-3, warmup_steps: 4}
checkpoint: {every: 8, keep: 3}
""")
shared = {
    "JAX_PLATFORMS": "cpu",
    "XDG_CACHE_HOME": "cache",
    "JAX_COMPILATION_CACHE_DIR": os.path.abspath("compiled"),
}
environment = {
    **os.environ,
    **shared,
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
}


def training(directory, *overrides, program=("-m", "meshtrain.train")):
    """The process of a run."""
    settings = [
        word
        for setting in (f"run.directory={directory}", *overrides)
        for word in ("--set", setting)
    ]
    command = [sys.executable, *program, "--config", "tiny.yaml", *settings]
    return subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process):
    """Its exit code, and what it had to say beyond its progress."""
    said = process.communicate()[1].replace(f"{os.getcwd()}/", "")
    return process.returncode, said


def losses(directory):
    """[(step, loss)] as the run's own rows have it."""
    rows = map(json.loads, Path(directory, "metrics.jsonl").read_text().splitlines())
    return [(row["step"], row["loss"]) for row in rows]


def checkpoints(directory):
    """What lies among its checkpoints, the steps in order."""
    names = [
        path.name
        for path in Path(directory, "checkpoints").iterdir()
        if not path.name.startswith(".")
    ]
    return sorted(names, key=lambda name: (int(name.partition(".")[0]), name))


# %% [markdown]
# ## Undisturbed
# The run that the others will be held against.

# %%
code, said = ended(training("calm"))
calm = losses("calm")
print(
    f"exit code {code}, {len(calm)} steps, checkpoints {', '.join(checkpoints('calm'))}"
)
assert (
    code == 0
    and [step for step, _ in calm] == list(range(1, 25))
    and checkpoints("calm") == ["8", "16", "24"]
)

# %% [markdown]
# ## What lies in a checkpoint
# A directory a step. `arrays/` is written by Orbax; the manifest says what it holds and what the run was;
# `digests.json` has a SHA-256 of every file above it, in blocks; and `COMMIT`, written last, has the digest of the
# digests. So that one small file vouches for every byte.

# %%
step = Path("calm", "checkpoints", "24")
print(", ".join(sorted(path.name for path in step.iterdir())))
manifest = json.loads((step / "manifest.json").read_text())
print("manifest:", ", ".join(manifest))
files = json.loads((step / "digests.json").read_text())["files"]
present = {str(path.relative_to(step)) for path in step.rglob("*") if path.is_file()}
assert files.keys() == present - {"COMMIT", "digests.json"}

# %% [markdown]
# The arrays have no trace of the mesh. On the devices the four layers were two stages, split over tensor, and the
# moments over data as well; here each array is one, with all layers stacked in order. Below, where the first of them
# lies while the run is under way. That is why any mesh can read it (`meshtrain/checkpoint/global_arrays.py`).

# %%
print(f"{len(manifest['leaves'])} arrays, of which")
for name in ("params.blocks.attention.q", "optimizer.mu.blocks.attention.q", "step"):
    leaf = manifest["leaves"][name]
    print(f"  {name:42}{leaf['dtype']:9}{leaf['shape']}")
config = mt.load("tiny.yaml")
layout = mt.Program(config).layout
assert (
    manifest["leaves"]["params.blocks.attention.q"]["shape"][0] == config.model.layers
)
numbers = sum(
    np.prod(leaf["shape"])
    for name, leaf in manifest["leaves"].items()
    if name.startswith("params.")
)
assert numbers == layout.parameters
mt.show(layout.masters["blocks"]["attention"]["q"])

# %% [markdown]
# ## Killed while saving
# The worst moment for a kill is when everything of a save is written but its last word. To hit it each time, this run
# kills itself there, with the signal that no program can catch.

# %%
DYING = """
import os, signal, sys
from meshtrain.checkpoint import steps
from meshtrain.train import main

def commit(directory):
    if directory.name == "16.writing":
        os.kill(os.getpid(), signal.SIGKILL)
    whole(directory)

whole, steps.commit = steps.commit, commit
sys.exit(main(sys.argv[1:]))
"""
code, said = ended(training("run", program=("-c", DYING)))
cut = losses("run")
print(
    f"ended by {signal.Signals(-code).name}; checkpoints: {', '.join(checkpoints('run'))}"
)
assert (
    code == -signal.SIGKILL
    and checkpoints("run") == ["8", "16.writing"]
    and len(cut) >= 16
)

# %% [markdown]
# `16.writing` is no checkpoint: a directory becomes one by `COMMIT` and then by its name, and it has neither. The same
# command again goes on from step 8. The rows after step 8 are taken back first, so that each step stands once, and
# every loss is that of the calm run to the last bit.

# %%
code, said = ended(training("run"))
print(said, end="")
print(f"exit code {code}; checkpoints: {', '.join(checkpoints('run'))}")
assert code == 0 and losses("run") == calm and checkpoints("run") == ["8", "16", "24"]
assert "removed run/checkpoints/16.writing" in said

# %% [markdown]
# ## One bit
# Disks and networks flip bits, rarely and without a word. Here it is done on purpose, to the first number of the
# output head in the newest checkpoint: its highest exponent bit. Orbax reads that back without complaint.

# %%
import jax

from meshtrain.checkpoint import arrays


def head(step):
    """The output head of a step, as Orbax gives it; nothing is verified."""
    leaf = json.loads((step / "manifest.json").read_text())["leaves"][
        "params.head.weight"
    ]
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target = jax.ShapeDtypeStruct(tuple(leaf["shape"]), leaf["dtype"], sharding=here)
    return np.asarray(
        arrays.read((step / "arrays").absolute(), {"params.head.weight": target})[
            "params.head.weight"
        ]
    )


newest = Path("run", "checkpoints", "24")
before = head(newest)
(file,) = [
    path
    for path in newest.rglob("*")
    if path.is_file() and before[0, :4].tobytes() in path.read_bytes()
]
content = bytearray(file.read_bytes())
content[content.find(before[0, :4].tobytes()) + 3] ^= 0b0100_0000
file.write_bytes(content)

after = head(newest)
print(f"{before[0, 0]:.4f} is now {after[0, 0]:.1e}, and nobody said so")
assert (before != after).sum() == 1 and float(after[0, 0]) == float(
    before[0, 0]
) * 2.0**128

# %% [markdown]
# `verify` reads every file and compares it with its digest.


# %%
def verify(directory):
    """What `python -m meshtrain.checkpoint verify` says, without its sizes and speeds and Orbax's random names."""
    command = [sys.executable, "-m", "meshtrain.checkpoint", "verify", directory]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False
    )
    return done.returncode, re.sub(
        r"[0-9a-f]{32}", "...", re.sub(r", [\d.,]+ \w*B at .*", "", done.stdout)
    )


code, said = verify("run")
print(said + f"exit code {code}")
assert code == 1 and re.search("^24: DAMAGED", said, re.M) and said.count("intact") == 2

# %% [markdown]
# ## On another mesh
# Every start verifies too. So the next one finds step 24 damaged, sets it aside for a person to look at, and takes
# step 16. And since half of the machine is wanted for something else, it shall go on as 4 data ranks instead of 2 × 2
# × 2, with the weights sharded as well (ZeRO-3).

# %%
other_mesh = [
    "mesh.data=4",
    "mesh.tensor=1",
    "mesh.pipeline=1",
    "parallel.zero_stage=3",
]
code, said = ended(training("run", *other_mesh))
print(re.sub("[0-9a-f]{32}", "...", said), end="")
print(f"exit code {code}; checkpoints: {', '.join(checkpoints('run'))}")
assert code == 0 and checkpoints("run") == ["8", "16", "24", "24.damaged"]
assert "24 is damaged" in said and "mesh.data was 2 and is 4 from here on" in said

# %% [markdown]
# Sums are taken in another order there, so the last bits are others; no more than those. Steps up to 16 are the old
# rows, untouched.

# %%
moved = losses("run")
assert [step for step, _ in moved] == [step for step, _ in calm] and moved[:16] == calm[
    :16
]
apart = max(
    abs(one - other) / other for (_, one), (_, other) in zip(moved, calm, strict=True)
)
assert 0 < apart < 1e-5

print(f"from step 17 on losses are apart by {apart:.0e} of themselves at most")

# %% [markdown]
# ## Asked to stop
# A scheduler that wants its machines back sends SIGTERM. The step under way is finished and saved, and exit code 75
# says that the run is to be started again (0: done, 1: failed, 2: the config is wrong). Here amid a run of a million
# steps:

# %%
process = training("stopped", "train.steps=1000000", "checkpoint.every=0")
while process.poll() is None and not (
    Path("stopped", "metrics.jsonl").exists() and len(losses("stopped")) >= 10
):
    time.sleep(0.05)
process.send_signal(signal.SIGTERM)
code, said = ended(process)
print(re.sub(r"\d+", "N", said) + f"exit code {code}")
assert code == 75 and checkpoints("stopped") == [str(losses("stopped")[-1][0])]

# %% [markdown]
# ## The weights
# What all of this is for. `read_model` verifies a checkpoint and reads its weights alone, onto this process's one
# device, whatever mesh wrote it. On text that neither run has come to, the one that was killed, flipped and moved is
# as good as the calm one.

# %%
data, _ = mt.open_data(config)
assert data.batches_per_epoch > 24
batch = data.batch(24)
models = {directory: mt.read_model(directory) for directory in ("calm", "run")}
found = {directory: model.loss(batch) for directory, model in models.items()}
print(
    ", ".join(
        f"{directory}: step {models[directory].step}, loss {loss:.3f}"
        for directory, loss in found.items()
    )
)
assert np.isclose(found["run"], found["calm"], rtol=1e-5)

# %% [markdown]
# ## Things to try
# - Flip a bit of `COMMIT`, of `digests.json`, of `manifest.json`: what does `verify` say of each? Which file stands
#   for which?
# - Damage all of 8, 16 and 24: the next start refuses, with exit code 2, rather than begin anew in silence.
# - In `DYING`, die in `steps.publish` instead: everything is written, `COMMIT` too, but not the name. From which step
#   does it go on?
# - Rename `16` to `best`: it is a person's own then, never removed; `checkpoint.resume: run/checkpoints/best` starts
#   another run from it.
