# %% [markdown]
# # 16 Reinforcement: a model that learns from its own answers
# Where a program can check an answer, nobody has to write the right one down. A model draws several answers to each
# prompt, a reward scores them, and a step makes the better ones more likely (GRPO: Shao et al. 2024). Here a tiny model
# learns to tell the greater of two digits. The same devices draw the answers and train on them, so that drawing can be held against
# training in every step; the last section breaks the two apart, and is told.

# %%
import json
import os
import tempfile
from itertools import product
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from IPython.utils.io import capture_output

import meshtrain as mt
from meshtrain.rl.advantages import group_advantages
from meshtrain.rl.rollouts import Rollouts

mt.fake_devices(4)

# everything below is written here, and named without the way to it
os.chdir(tempfile.mkdtemp())

# %% [markdown]
# ## A group by hand
# The four answers to a prompt have these rewards. An answer's advantage is its reward less the mean of its group, over
# the group's standard deviation. No model judges how good a state is; the other answers do.

# %%
rewards = np.array([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]])
advantages = group_advantages(rewards, "group")
print(advantages.round(2))
by_hand = (rewards[0] - rewards[0].mean()) / (rewards[0].std(ddof=1) + 1e-4)
assert np.allclose(advantages[0], by_hand, atol=1e-6)

# %% [markdown]
# The second group is flat: all its answers are equally good, so it teaches nothing.

# %%
assert not advantages[1].any()

# %% [markdown]
# ## The greater digit
# All pairs of digits, a byte a token. So that the model knows what an answer looks like, it first learns from a few
# examples, of which half have any digit for an answer: they alone would have it guess.

# %%
draw = np.random.default_rng(0)
pairs = list(product(range(10), repeat=2))
prompts = [{"prompt": f"{a} {b} ", "answer": str(max(a, b))} for a, b in pairs]
Path("prompts.jsonl").write_text("".join(json.dumps(one) + "\n" for one in prompts))
with Path("examples.jsonl").open("w") as file:
    for k in draw.integers(0, 100, 2000):
        a, b = pairs[k]
        answer = max(a, b) if draw.random() < 0.5 else draw.integers(0, 10)
        file.write(json.dumps({"text": f"{a} {b} {answer}"}) + "\n")
print(prompts[57])

# %% tags=["varies"]
settings = {
    "run": {"directory": "run", "seed": 1},
    "model": {"layers": 2, "d_model": 64, "heads": 4, "d_ff": 176, "vocab_size": 260},
    "mesh": {"data": 2, "tensor": 2},
    "data": {"source": "examples.jsonl", "tokenizer": "byte", "validation": 0.0},
    "train": {
        "objective": "grpo",
        "steps": 240,
        "global_batch_size": 128,
        "sequence_length": 8,
    },
    "rl": {
        "prompts": "prompts.jsonl",
        "reward": "exact",
        "answers": 3,
        "supervised": 100,
    },
    "optimizer": {"learning_rate": 2e-3, "schedule": "constant", "warmup_steps": 5},
}


def trained(*changes):
    """Trains; returns the rows of the steps that drew answers."""
    config = mt.load(settings, list(changes))
    with capture_output() as said:
        assert mt.train(config).exit_code == 0
    print([row for row in said.stdout.splitlines() if row.startswith("step ")][-1])
    rows = map(
        json.loads, Path(config.run.directory, "metrics.jsonl").read_text().splitlines()
    )
    return [row for row in rows if "rl/reward" in row]


rows = trained()

# %%
panels = {
    "rl/reward": "reward",
    "rl/gap_max": "largest gap of a log-probability",
    "rl/answer_tokens": "tokens of an answer",
    "rl/entropy": "entropy, nats a token",
}
figure, axes = plt.subplots(2, 2, figsize=(9, 5), sharex=True, layout="constrained")
for axis, (metric, title) in zip(axes.flat, panels.items(), strict=True):
    axis.plot([row["step"] for row in rows], [row[metric] for row in rows])
    axis.set_title(title, fontsize=10)
axes[0, 1].set_yscale("log")
axes[0, 1].axhline(0.1, color="0.6")
plt.show()
first, last = (
    np.mean([row["rl/reward"] for row in part]) for part in (rows[:10], rows[-10:])
)
print(f"reward {first:.1f} at the beginning, {last:.1f} at the end")
assert last > first + 0.3 and max(row["rl/gap_max"] for row in rows) < 1e-3

# %% [markdown]
# The grey line is `rl.gap_limit`. Drawing and training compute the same log-probabilities by different programs, one
# with a cache of keys and values, the other in packed rows: what is left between them is rounding of float32. What the
# model answered is in the run, and in the page of `meshtrain report run --html FILE`:

# %% tags=["varies"]
for line in Path("run/answers.jsonl").read_text().splitlines()[-3:]:
    sample = json.loads(line)
    print(
        f"{sample['kind']:6} {sample['prompt']}{sample['answer']}  {sample['group_rewards']}"
    )

# %% [markdown]
# ## Weights that are not synchronised
# After each step the weights have to reach what draws. Elsewhere that is another engine, and where they do not, nothing
# fails: the ratios are wrong, and the reward rises more slowly. Here is a run whose answers are drawn by the weights of
# its first draw for ever.

# %%
synchronise = Rollouts.synchronise
kept = []


def synchronise_once(rollouts, params):
    kept.append(kept[0] if kept else jax.tree.map(jnp.copy, params))
    synchronise(rollouts, kept[-1])


Rollouts.synchronise = synchronise_once
try:
    trained("run.directory=stale")
except FloatingPointError as error:
    sentence = str(error)
Rollouts.synchronise = synchronise
print(sentence.replace(f"{Path.cwd()}/", ""))

# %% [markdown]
# The first step on answers, number 101, passes: there was nothing to synchronise yet. The next one ends the run before
# it learns from what it does not know, and the rows that disagree are saved.

# %%
file = next(Path("stale/gaps").iterdir())
saved = np.load(file)
print(f"{len(saved['gaps'])} rows in {file}, apart by up to {saved['gaps'].max():.1f}")
assert file.stem == "102" and saved["gaps"].max() > 0.1 and "rl.gap_limit" in sentence

# %% [markdown]
# ## Things to try
# - `"rl.loss=gspo"`, `"rl.loss=reinforce"`: another loss, the same curve?
# - `"rl.supervised=0"`: without the examples nearly all groups are flat, and nothing is learned.
# - `"mesh.data=1", "mesh.tensor=1"`: the same answers, drawn by one device.
# - `"rl.epochs=4"`: four steps on the same answers. `rl/clipped` tells how far the weights move meanwhile.
# - A reward of your own: `run.imports` and `rl.reward`, as in `docs/reinforcement.md`.
