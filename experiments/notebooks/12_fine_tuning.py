# %% [markdown]
# # 12 Fine-tuning: from import to export
#
# A model of somebody else's comes as a directory of Hugging Face's. It is read onto a mesh, learns from conversations how to answer, with LoRA
# on 2 × 2 × 2 devices, and goes home: as adapters for PEFT, and merged into weights that transformers loads. On the way every claim is held
# against the numbers: which tokens are learned, that the base does not change, that merged and unmerged say the same.

# %%
import html
import json
import os
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from IPython.display import HTML
from IPython.utils.io import capture_output
from tokenizers import Tokenizer

import meshtrain as mt
import meshtrain.adopt.__main__ as adopt
import meshtrain.data.__main__ as data

mt.fake_devices(8)

# everything below is written here, and named without the way to it
os.chdir(tempfile.mkdtemp())
os.environ["XDG_CACHE_HOME"] = "cache"


def typed(command, *words):
    """What `python -m meshtrain.COMMAND WORDS` prints."""
    with capture_output() as said:
        assert command.main(words) == 0
    print(said.stdout, end="")


def trained(config):
    """Trains; of what it says of itself only every fourth row, and the last."""
    with capture_output() as said:
        assert mt.train(config).exit_code == 0
    rows = [row for row in said.stdout.splitlines() if row.startswith("step ")]
    print(*rows[3:-1:4], rows[-1], sep="\n")


# %% [markdown]
# ## A base
# Usually it is downloaded. Here nothing is, so a small one is made first: it reads books that say of ten things which colour they have, and
# nothing else. Its tokenizer is made of the same books, and its chat template, a piece of Jinja that stands beside the tokenizer, says how a
# conversation is written down.

# %%
COLOURS = {
    "grass": "green",
    "coal": "black",
    "blood": "red",
    "sky": "blue",
    "lemon": "yellow",
    "carrot": "orange",
    "chocolate": "brown",
    "ash": "grey",
    "snow": "white",
    "plum": "purple",
}
things = list(COLOURS)
draw = np.random.default_rng(0)
Path("books").mkdir()
for k in range(400):
    lines = [f"{thing} is {COLOURS[thing]}." for thing in draw.choice(things, 12)]
    Path("books", f"{k:03}.txt").write_text("\n".join(lines))

Path("words").mkdir()
typed(
    data,
    "train-tokenizer",
    "--input",
    "books",
    "--vocab-size",
    "320",
    "--output",
    "words/tokenizer.json",
)

template = """{% for message in messages %}{{ message.role }}
{{ message.content }}{{ eos_token }}
{% endfor %}{% if add_generation_prompt %}assistant
{% endif %}"""
told = {"chat_template": template, "eos_token": "<|endoftext|>"}
Path("words/tokenizer_config.json").write_text(json.dumps(told))
print(Path("books/000.txt").read_text()[:60], "...")

# %% tags=["varies"]
base = mt.load(
    {
        "run": {"directory": "base"},
        "model": {
            "layers": 2,
            "d_model": 64,
            "heads": 4,
            "kv_heads": 2,
            "d_ff": 128,
            "vocab_size": 320,
        },
        "data": {"source": "books", "tokenizer": "words/tokenizer.json"},
        "train": {"steps": 200, "global_batch_size": 16, "sequence_length": 64},
        "optimizer": {"learning_rate": 3e-3},
        "log": {"every": 20},
    }
)
trained(base)
typed(adopt, "export", "base", "hf", "--dtype", "float32")

# %% [markdown]
# `hf/` now holds what such a directory holds, and from here on it is all that we know of the model.

# %%
print(*sorted(path.name for path in Path("hf").iterdir()), sep=", ")
typed(adopt, "inspect", "hf")

# %% [markdown]
# ## In
# `import` reads it onto a mesh, each device its part of each layer, and writes a checkpoint of ours, from which a run on any mesh may begin.
# (`model.weights: hf` in a config does without the checkpoint.) The logits are those of the directory itself, on one device and on eight.

# %%
typed(adopt, "import", "hf", "imported")


def mesh(data, tensor, pipeline):
    return mt.make_mesh(
        mt.load({"mesh": {"data": data, "tensor": tensor, "pipeline": pipeline}})
    )


tokenizer = Tokenizer.from_file("hf/tokenizer.json")
line = [tokenizer.encode("coal is black.\nsnow is white.\n").ids] * 2
theirs, ours = (
    mt.read_model("hf")(line),
    mt.read_model("imported", mesh=mesh(2, 2, 2))(line),
)
assert np.abs(np.asarray(theirs) - np.asarray(ours)).max() < 1e-4

# %% [markdown]
# ## Conversations, and what is learned of them
# Eight of the ten things are asked for, two never are. Records in the form of OpenAI's (those of ShareGPT and Alpaca are read as well).

# %%
asked = things[:8]


def conversation(thing):
    question, answer = f"{thing}, which colour?", f"{thing} is {COLOURS[thing]}."
    return {
        "messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
    }


records = [conversation(thing) for thing in draw.choice(asked, 300)]
Path("chats.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
typed(data, "show", "--input", "chats.jsonl", "--tokenizer", "hf/tokenizer.json")

# %% [markdown]
# Between `[[` and `]]` stands what is learned: the answer with the token that ends it, and nothing of the question or of the template. The
# same in a batch, where several conversations share a row, and attention stays within each:


# %%
def spans(row):
    """A row's labels, learned ones green, conversations apart."""
    for label, weight, segment in zip(
        row["labels"], row["weights"], row["segments"], strict=True
    ):
        text = html.escape(
            tokenizer.decode([label], skip_special_tokens=False)
        ).replace("\n", "⏎")
        colour = (
            "#9be29b"
            if weight
            else ("#eef", "#fee")[segment % 2]
            if segment
            else "#fff"
        )
        yield f'<span style="background:{colour};color:#000">{text if segment else "·"}</span>'


tuned = mt.load(
    {
        "run": {"directory": "tuned"},
        "model": {"weights": "hf"},
        "lora": {"rank": 8},
        "mesh": {"data": 2, "tensor": 2, "pipeline": 2},
        "parallel": {"microbatches": 2},
        "data": {
            "source": "chats.jsonl",
            "tokenizer": "hf/tokenizer.json",
            "format": "chat",
            "validation": 0.1,
        },
        "train": {"epochs": 10, "global_batch_size": 8, "sequence_length": 64},
        "optimizer": {
            "learning_rate": 1e-2,
            "weight_decay": 0.0,
            "warmup_steps": 5,
            "final_ratio": 0.0,
        },
        "checkpoint": {"resume": "imported"},
        "eval": {"every": 20},
        "log": {"every": 5},
    }
)
train, held_out = mt.open_data(tuned)
batch = train.batch(0)
rows = [{name: array[k] for name, array in batch.items()} for k in range(3)]
HTML("<br>".join("".join(spans(row)) for row in rows))

# %% [markdown]
# To the token: what is learned of the batch, spelled, is a sequence of the answers that were written above.

# %%
learned = batch["labels"][batch["weights"] > 0]
said = [
    text
    for text in tokenizer.decode(learned.tolist(), skip_special_tokens=False).split(
        "<|endoftext|>"
    )
    if text
]
print(said)
assert (
    set(said) <= {f"{thing} is {COLOURS[thing]}." for thing in asked} and len(said) >= 8
)

# %% [markdown]
# ## LoRA on 2 × 2 × 2
# Beside each frozen projection $W$ stand two narrow matrices (Hu et al. 2021): $xW + \frac{\alpha}{r}\,(xA)B$, of which $B$ begins at zero, so that the
# tuned model begins as the base. They are weights like others, and lie on the mesh as their projection does: where it is cut along its
# outputs $B$ is, where along its inputs $A$ is. Gradients and optimizer state there are only of them.

# %%
program = mt.Program(tuned)
adapters = [weight for weight in program.layout.flat if weight.trained]
for weight in adapters[:4]:
    print(f"{weight.name:30} {weight.shape}")
count = sum(int(np.prod(weight.shape)) for weight in adapters)
print(
    f"trained are {count:,} parameters, beside {program.layout.parameters:,} that are not"
)
assert all("_lora_" in weight.name for weight in adapters)

full = mt.plan(mt.load(tuned, ["lora.rank=0"]), "cpu")
lora = mt.plan(tuned, "cpu")


def state(plan):
    return sum(item.nbytes for item in plan.memory if item.kind == "optimizer_state")


print(
    f"optimizer state a device: {state(full):,} bytes in full, {state(lora):,} with LoRA"
)
assert state(lora) < state(full) / 4

# %% tags=["varies"]
trained(tuned)

# %%
written = [
    json.loads(row) for row in Path("tuned/metrics.jsonl").read_text().splitlines()
]
losses = [(row["step"], row["loss"]) for row in written if "loss" in row]
evals = [(row["step"], row["eval_loss"]) for row in written if "eval_loss" in row]
plt.figure(figsize=(7, 2.6))
plt.plot(*zip(*losses, strict=True), color="0.7", label="of the batch")
plt.plot(*zip(*evals, strict=True), "o-", ms=3, label="of held-out conversations")
plt.xlabel("step")
plt.ylabel("loss a learned token")
plt.legend()
plt.show()
assert evals[-1][1] < evals[0][1] < losses[0][1]

# %% [markdown]
# That it ends well above zero is the head's doing, which is frozen too: in the books any thing may follow any other, so they never taught it to
# tell the things apart. (`train.trainable: [head.weight]` beside LoRA lets it learn that, and the loss goes to zero.)
#
# The base has not moved by a bit. The adapters have.

# %%
after, before = mt.read_model("tuned").weights, mt.read_model("imported").weights
assert all(np.array_equal(after[name], before[name]) for name in before)
moved = [name for name in after if name not in before]
assert len(moved) == len(adapters) and all(
    np.asarray(after[name]).any() for name in moved
)

# %% [markdown]
# ## Off and on
# `export --adapter` writes the adapters alone, in PEFT's files. With them and without them, the same base:

# %%
typed(adopt, "export", "tuned", "adapter", "--adapter")
sizes = {
    path.name: path.stat().st_size
    for folder in ("hf", "adapter")
    for path in Path(folder).glob("*.safetensors")
}
print(", ".join(f"{name}: {size:,} bytes" for name, size in sizes.items()))


def answer(model, thing, most=16):
    """What the model finds likeliest, token after token, until it ends its turn."""
    ids = tokenizer.encode(
        f"user\n{thing}, which colour?<|endoftext|>\nassistant\n"
    ).ids
    begin, end = len(ids), tokenizer.token_to_id("<|endoftext|>")
    while len(ids) < begin + most:
        # one shape for all, compiled once; what stands behind is not seen
        row = np.zeros((1, 64), int)
        row[0, : len(ids)] = ids
        ids.append(int(np.asarray(model(row))[0, len(ids) - 1].argmax()))
        if ids[-1] == end:
            return tokenizer.decode(ids[begin:-1])
    return tokenizer.decode(ids[begin:]).replace("\n", "⏎") + " ..."


off, on = mt.read_model("hf"), mt.read_model("hf", adapter="adapter")

# %% tags=["varies"]
for thing in things:
    never = "" if thing in asked else "   (never asked in training)"
    print(
        f"{thing + '?':12} off: {answer(off, thing):42} on: {answer(on, thing)}{never}"
    )

# %% [markdown]
# Without them it goes on as its books do, and does not stop. With them it answers, and ends. On what it was never asked a model of this size
# has learned nothing to go by: it names one of the things that it was asked for.

# %%
assert all(answer(on, thing) == f"{thing} is {COLOURS[thing]}." for thing in asked)
assert not any(answer(off, thing) == f"{thing} is {COLOURS[thing]}." for thing in asked)

# %% [markdown]
# ## Home
# `merge` adds the adapters to the projections: $W + \frac{\alpha}{r} AB$. What comes out has the names and shapes of what came in, so whatever loads the
# one loads the other, and needs to know nothing of LoRA. And it is read here again, on one device or eight, with the logits of base and
# adapters.

# %%
from safetensors import safe_open

typed(adopt, "merge", "tuned", "merged", "--dtype", "float32")


def tensors(folder):
    with safe_open(Path(folder, "model.safetensors"), "numpy") as file:
        return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118


assert tensors("merged") == tensors("hf")
print(*sorted(path.name for path in Path("merged").iterdir()), sep=", ")

one, eight = mt.read_model("merged"), mt.read_model("merged", mesh=mesh(2, 2, 2))
question = [
    tokenizer.encode("user\ncoal, which colour?<|endoftext|>\nassistant\n").ids
] * 2
unmerged = np.asarray(on(question))
for model in (one, eight, mt.read_model("tuned")):
    assert np.abs(np.asarray(model(question)) - unmerged).max() < 1e-4
assert all(answer(one, thing) == answer(on, thing) for thing in things)

# %% [markdown]
# ## Things to try
# - `lora.targets: [q, v]`, or `lora.rank: 2`: how much smaller may the adapters be?
# - `train.trainable: ["blocks.mlp.*"]` in place of `lora`: what is tuned, and how large are checkpoint and optimizer state then?
# - Another mesh, another `zero_stage`, another schedule: the losses are the same to the last digits of float32.
# - A template that marks its answers, `{% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}`: what does `show` say?
# - Import the adapters onto another base: what is refused, and in which words?
