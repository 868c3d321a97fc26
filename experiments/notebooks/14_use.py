# %% [markdown]
# # 14 Use: a model that goes on with a text, and one that sees
# First a tiny model learns lines of text, and goes on with others: the prompt is read at once (prefill), then a token
# is chosen at a time (decode), and keys and values are kept so that nothing is computed twice. Then a Vision
# Transformer learns to read digits, from images that are moved, turned and mixed as they come. Every claim is held
# against the numbers.

# %%
import json
import os
import tempfile
from pathlib import Path

import jax
import matplotlib.pyplot as plt
import numpy as np
from IPython.utils.io import capture_output

import meshtrain as mt
from meshtrain.data.images.pixels import unpatched
from meshtrain.generate.engine import Engine
from meshtrain.generate.opened import open_model
from meshtrain.generate.programs import Decoding
from meshtrain.generate.request import Request, Sampling
from meshtrain.model.delta_rule import RuleInputs, step
from meshtrain.plan.rollouts import bytes_remembered

mt.fake_devices(2)

# everything below is written here, and named without the way to it
os.chdir(tempfile.mkdtemp())
os.environ["XDG_CACHE_HOME"] = "cache"


def trained(config):
    """Trains; of what it says of itself only the last row."""
    with capture_output() as said:
        assert mt.train(config).exit_code == 0
    print([row for row in said.stdout.splitlines() if row.startswith("step ")][-1])


# %% [markdown]
# ## Text
# Lines that say of ten things which colour they have, in any order, a byte a token. After a few hundred steps the
# model knows how a word is spelled and which colour a thing has, and that any thing may come next.

# %% tags=["varies"]
COLOURS = {
    "grass": "green",
    "coal": "black",
    "blood": "red",
    "sky": "blue",
    "lemon": "yellow",
    "carrot": "orange",
    "ash": "grey",
    "snow": "white",
}
draw = np.random.default_rng(0)
Path("lines.txt").write_text(
    "".join(
        f"{thing} is {COLOURS[thing]}.\n" for thing in draw.choice(list(COLOURS), 6000)
    )
)
text = {
    "run": {"directory": "lines"},
    "model": {
        "layers": 2,
        "d_model": 48,
        "heads": 4,
        "kv_heads": 2,
        "d_ff": 96,
        "vocab_size": 260,
    },
    "data": {"source": "lines.txt", "validation": 0.0},
    "train": {"steps": 150, "global_batch_size": 16, "sequence_length": 64},
    "optimizer": {"learning_rate": 1e-2},
}
trained(mt.load(text))

# %% [markdown]
# ### Prefill and decode
# A slot holds one sequence: its keys and values in every layer, key/value heads over `tensor`, slots over `data`.
# Prefill reads the whole prompt and chooses the token behind it; each decode step reads one token and chooses the
# next. What is kept is as large as the positions, whatever stands in them:

# %%
opened = open_model("lines", slots=2, length=64)
decoding = Decoding(opened.model, 2, 64)
state = decoding.empty()
model = opened.model.config.model
expected = 2 * model.layers * 2 * 64 * model.kv_heads * model.head_dim * 4
held = sum(x.nbytes for x in jax.tree.leaves(state.cache))
print(
    f"keys and values, layers, slots, positions, heads, width, bytes: 2 x {model.layers} x 2 x 64 x {model.kv_heads} x {model.head_dim} x 4 = {held:,}"
)
assert held == expected

prompt = np.frombuffer(b"coal is", np.uint8).astype(np.int32)
state, picked = decoding.prefill(state, 0, prompt, Sampling())
chosen = [int(picked.tokens)]
for _ in range(7):
    state, picked = decoding.decode(state)
    chosen.append(int(picked.tokens[0]))
print(bytes(chosen))

# %% [markdown]
# The same tokens as without any cache, where the whole text is read again for each:

# %%
ids = list(prompt)
for _ in chosen:
    padded = np.zeros((1, 64), int)
    padded[0, : len(ids)] = ids
    ids.append(int(np.asarray(opened.model(padded))[0, len(ids) - 1].argmax()))
assert ids[len(prompt) :] == chosen and bytes(chosen).startswith(b" black.\n")

# %% [markdown]
# ### What a layer of linear attention remembers
# A hybrid (`model.pattern`) has layers that keep no keys and values, but a matrix a head, of one size whatever was
# read. Below, one head reads six tokens, and each picture is its matrix behind one of them. A token lets all of it
# decay, and replaces the share β of what stands under its key by its value. So the second `a` leaves nothing of the
# first, `c` writes half of its value, and at `d` all that was read before grows pale.

# %%
# name, key, value, β, decay
READ = [
    ("a", 0, 0, 1.0, 1.0),
    ("b", 1, 1, 1.0, 1.0),
    ("c", 2, 2, 0.5, 1.0),
    ("d", 3, 3, 1.0, 0.6),
    ("a", 0, 4, 1.0, 1.0),
    ("b", 1, 5, 0.5, 1.0),
]
unit = np.eye(6, dtype=np.float32)
memory = np.zeros((1, 1, 6, 6), np.float32)
figure, axes = plt.subplots(1, len(READ), figsize=(9, 1.9))
for axis, (name, key, value, beta, decay) in zip(axes, READ, strict=True):
    token = RuleInputs(
        q=unit[None, None, key],
        k=unit[None, None, key],
        v=unit[None, None, value],
        log_decay=np.log([[decay]], dtype=np.float32),
        beta=np.full((1, 1), beta, np.float32),
    )
    found, memory = step(token, memory)
    axis.imshow(memory[0, 0], cmap="gray_r", vmin=0, vmax=1)
    axis.set(
        xticks=[], yticks=[], title=f"{name}, β {beta:g}", xlabel=f"decay {decay:g}"
    )
axes[0].set_ylabel("keys")
plt.tight_layout()
plt.show()
rows = np.asarray(memory[0, 0])
assert np.allclose(rows[0], unit[4]), "nothing is left of the first a"
assert np.allclose(rows[1], 0.5 * 0.6 * unit[1] + 0.5 * unit[5]), (
    "half of b was replaced"
)
assert np.allclose(rows[2], 0.5 * 0.6 * unit[2])

# %% [markdown]
# What a slot of Qwen3.5 9B holds, whose every fourth layer has attention, beside the same model with attention alone:

# %%
QWEN = {"layers": 32, "d_model": 4096, "heads": 16, "kv_heads": 4, "head_dim": 256}
hybrid, attention = (
    mt.load({"model": {"family": "qwen3_5", "pattern": pattern, **QWEN}})
    for pattern in (["linear", "linear", "linear", "full"], ["full"])
)
for length in (1024, 32768, 262144):
    nbytes = [bytes_remembered(config, 1, length) for config in (hybrid, attention)]
    print(
        f"{length:7,} positions: {nbytes[0] / 2**20:8,.0f} MiB and {nbytes[1] / 2**20:8,.0f}"
    )
assert 3.9 < nbytes[1] / nbytes[0] < 4

# %% [markdown]
# ### How a token is chosen
# Behind `.⏎` any of eight things may follow. Temperature 0 takes the likeliest; 1 draws from the distribution that was
# learned; more makes all tokens more alike, until words fall apart. `top_k` and `top_p` leave the unlikely ones out
# first. The random number follows from the seed and the position alone, so the same seed says the same again, whatever
# else runs beside it.


# %%
def go_on(engine, prompts, how, most=40):
    """What an engine says after each prompt, all of them waiting at once."""
    said = ["" for _ in prompts]

    def listener(k):
        def hear(piece):
            said[k] += piece.text

        return hear

    for k, text in enumerate(prompts):
        ids = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
        engine.submit(Request(ids, most, how), listener(k))
    while engine.step():
        pass
    return said


engine = Engine(opened, slots=2, length=64)

# %% tags=["varies"]
for how in (
    Sampling(),
    Sampling(temperature=0.5),
    Sampling(temperature=1.0),
    Sampling(temperature=2.0),
    Sampling(temperature=2.0, top_k=4),
    Sampling(temperature=2.0, top_p=0.8),
):
    (said,) = go_on(engine, ["snow is white.\n"], how)
    print(
        f"temperature {how.temperature:g}, top_k {how.top_k}, top_p {how.top_p:g}".ljust(
            38
        ),
        repr(said),
    )

# %% [markdown]
# Six prompts share two slots: a free one takes the next while the other goes on. None hears of the others.

# %%
prompts, how = (
    [f"{thing} is" for thing in list(COLOURS)[:6]],
    Sampling(temperature=1.0, seed=3),
)
together = go_on(engine, prompts, how)
assert together == [go_on(engine, [text], how)[0] for text in prompts]
right = [
    said.startswith(f" {COLOURS[text.split()[0]]}.")
    for text, said in zip(prompts, together, strict=True)
]
print(f"{sum(right)} of {len(right)} colours are right at temperature 1")
engine.close()

# %% [markdown]
# `python -m meshtrain.generate lines --prompt "coal is"` does the same from a terminal, `python -m meshtrain.serve
# lines` for many at once.
#
# ## Images
# Scikit-learn brings 1797 handwritten digits of 8 × 8 pixels along; 360 are held out. The model cuts an image into 2 ×
# 2 patches of 4 × 4 pixels; each becomes a vector as a token does, with its place added, and the layers are those of
# the language model, but that every patch sees every other.

# %%
CHANGES = {
    "as they are": {},
    "shift": {"shift": 1},
    "randaugment": {"policy": "randaugment", "operations": 2, "magnitude": 12.0},
    "mixup": {"mixup": 0.8},
    "cutmix": {"cutmix": 1.0},
}
vit = {
    "run": {"directory": "digits"},
    "model": {
        "family": "vit",
        "layers": 3,
        "d_model": 64,
        "heads": 4,
        "d_ff": 128,
        "vocab_size": 10,
        "image_size": 8,
        "patch_size": 4,
        "channels": 1,
        "pool": "mean",
        "init_std": 0.05,
    },
    "data": {"source": "digits"},
    "train": {"global_batch_size": 120, "label_smoothing": 0.1},
}


def batches(**images):
    return mt.open_data(
        mt.load({**vit, "data": {"source": "digits", "images": images}})
    )[0]


train, held_out = mt.open_data(mt.load(vit))
print(train)
print({name: (x.shape, str(x.dtype)) for name, x in train.batch(0).items()})

# %% [markdown]
# ### As training sees them
# Below, the first images of batch 0, changed in five ways. What happens to an image follows from the seed, the batch
# and its row: the second row of pictures is the first, moved. A mixed image has two classes, and the share of each in
# the loss is that of its pixels.

# %%
figure, axes = plt.subplots(len(CHANGES), 10, figsize=(9, 5.4))
for (name, images), line in zip(CHANGES.items(), axes, strict=True):
    batch = batches(**images).batch(0)
    pictures = unpatched(batch["patches"], 4)[..., 0]
    for r, axis in enumerate(line):
        axis.imshow(pictures[r], cmap="gray_r", vmin=-1, vmax=1)
        axis.set(xticks=[], yticks=[])
        label = f"{batch['labels'][r, 0]}"
        if "mix" in batch:
            share = batch["mix"][r, 0]
            label = f"{share:.0%} {label}, {1 - share:.0%} {batch['labels_b'][r, 0]}"
        axis.set_title(label, fontsize=7)
    line[0].set_ylabel(name, fontsize=8)
plt.tight_layout()
plt.show()

# %% [markdown]
# To the number: mixup is the blend of an image and its partner, that of the row beside: 0 with 1, 2 with 3.

# %%
plain, mixed = batches().batch(0), batches(mixup=0.8).batch(0)
beside, share = np.arange(120) ^ 1, mixed["mix"][..., None]
blend = share * plain["patches"] + (1 - share) * plain["patches"][beside]
assert np.allclose(mixed["patches"], blend, atol=1e-6)
assert np.array_equal(mixed["labels_b"], plain["labels"][beside])

# %% [markdown]
# ### Training
# A short run (`configs/vit_digits.yaml` takes longer and gets further), on two devices that share the heads.

# %% tags=["varies"]
short = mt.load(
    {
        **vit,
        "mesh": {"tensor": 2},
        "data": {"source": "digits", "images": {"shift": 1}},
        "train": {**vit["train"], "epochs": 30},
        "optimizer": {
            "learning_rate": 3e-3,
            "warmup_steps": 20,
            "weight_decay": 0.05,
            "final_ratio": 0.01,
        },
        "eval": {"every": 33, "batches": 3},
        "log": {"every": 5},
    }
)
trained(short)

# %%
rows = [
    json.loads(row) for row in Path("digits/metrics.jsonl").read_text().splitlines()
]
losses = [(row["step"], row["loss"]) for row in rows if "loss" in row]
evals = [
    (row["step"], row["eval_loss"], row["eval_accuracy"])
    for row in rows
    if "eval_loss" in row
]
steps, eval_losses, accuracies = zip(*evals, strict=True)
figure, axes = plt.subplots(figsize=(6, 3))
axes.plot(*zip(*losses, strict=True), color="0.7", label="loss of the batch, moved")
axes.plot(steps, eval_losses, "o-", ms=3, label="loss of held-out digits")
axes.plot(steps, accuracies, "x-", ms=3, label="held-out digits told right")
axes.set(xlabel="step")
axes.legend()
plt.show()
assert accuracies[-1] > 0.85

# %% [markdown]
# `mt.read_model` reads it on one device; what it says of the held-out digits is what the run has written. Some that
# it takes for others:

# %%
model = mt.read_model("digits")
held = [held_out.batch(k) for k in range(held_out.batches_per_epoch)]
patches, labels = (
    np.concatenate([batch[name] for batch in held]) for name in ("patches", "labels")
)
found, true = np.asarray(model(patches)).argmax(-1), labels[:, 0]
assert abs((found == true).mean() - accuracies[-1]) < 1e-6

wrong = np.flatnonzero(found != true)[:12]
figure, axes = plt.subplots(1, 12, figsize=(9, 1.2))
for k, axis in zip(wrong, axes, strict=False):
    axis.imshow(unpatched(patches, 4)[k, ..., 0], cmap="gray_r")
    axis.set_title(f"{true[k]}, not {found[k]}", fontsize=7)
    axis.axis("off")
plt.show()

# %% [markdown]
# ## Things to try
# - `pool: class`: a token of its own before the patches, which the head reads. Does it learn as fast?
# - `patch_size: 2`, or 1: how many positions are there then, and how long does a step take?
# - `model.kv_heads: 1` of the text model: how large is what is kept?
# - A folder of your own images: `data.source: FOLDER`, with a folder for each class.
