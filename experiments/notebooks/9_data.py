# %% [markdown]
# # 9 Data: one global order
# Which text does step 1,000 train on? Here it is a function of the seed and the number 1,000, and of nothing else: not
# of the mesh, the number of processes, or how often the run was stopped. This notebook follows text into shards,
# shards into rows and rows into batches, shuffles a billion rows without storing an order, packs documents side by
# side, and ends with a run that notices that its text has changed.

# %%
import json
import os
import tempfile
from pathlib import Path

import meshtrain as mt

mt.fake_devices(8)

# %%
import matplotlib.pyplot as plt
import numpy as np
from IPython.utils.io import capture_output

# everything below is written here, and named without the way to it
os.chdir(tempfile.mkdtemp())
os.environ["XDG_CACHE_HOME"] = "cache"

# %% [markdown]
# ## From text to shards
# A corpus that one can see through: 26 documents, each of one letter.


# %%
def write(folder, texts):
    """A file a document."""
    Path(folder).mkdir(exist_ok=True)
    for name, text in texts.items():
        Path(folder, f"{name}.txt").write_text(text)


draw = np.random.default_rng(0)
alphabet = [chr(ord("a") + i) for i in range(26)]
write("letters", {letter: letter * int(draw.integers(2, 60)) for letter in alphabet})

MODEL = {"layers": 2, "d_model": 32, "heads": 4, "d_ff": 64, "vocab_size": 260}


def config(source, length=40, rows=8, seed=0, overrides=(), **data):
    train = {"global_batch_size": rows, "sequence_length": length, "steps": 2}
    data = {"source": source, "validation": 0.0, **data}
    return mt.load(
        {"model": MODEL, "run": {"seed": seed}, "train": train, "data": data}, overrides
    )


train, _ = mt.open_data(config("letters"))
print(train.describe())

# %% [markdown]
# Opening it tokenized it (here: bytes, and 256 for the end of a document) and wrote shards: one stream of tokens, and
# where each document begins. The stream begins with an end, so that each document's first token has something to be
# predicted from. Every token but the first is a label once.


# %%
def readable(ids):
    return "".join("·" if i == 256 else chr(i) for i in ids)


(shards,) = Path("cache/meshtrain").glob("letters-*")
tokens = np.fromfile(shards / "train-00000.tokens", np.uint16)
begins = np.fromfile(shards / "train-00000.offsets", np.uint64)
print(", ".join(sorted(path.name for path in shards.iterdir())))
print(readable(tokens[:100]), "...")
print(begins[:4], "...")

characters = sum(path.stat().st_size for path in Path("letters").iterdir())
assert len(tokens) == 1 + characters + len(alphabet)
assert all((tokens[begin - 1] == 256) for begin in begins.tolist())

# %% [markdown]
# ## Batch k
# The simplest batching, `window`, cuts the stream into rows of equal length, whatever documents it cuts apart. A batch
# is rows of tokens, and beside each token its label: the token after it.

# %%
batch = train.batch(0)
for row in batch["tokens"]:
    print(readable(row))

assert batch["tokens"].shape == (8, 40)
assert (batch["labels"][:, :-1] == batch["tokens"][:, 1:]).all()

# %% [markdown]
# Ask again, in another order, from data opened anew: the same. Another seed: another order.


# %%
def same(one, other):
    return one.keys() == other.keys() and all(
        np.array_equal(one[name], other[name]) for name in one
    )


again, _ = mt.open_data(config("letters"))
order = [5, 0, 3, 7, 3]
assert all(same(again.batch(k), train.batch(k)) for k in order)

other, _ = mt.open_data(config("letters", seed=1))
assert not same(other.batch(0), train.batch(0))

# %% [markdown]
# ## On every mesh
# A mesh only says who reads which rows. Of 8 devices here three meshes; what each device holds is the same rows of the
# same batch 0.

# %%
for shape in (
    ("mesh.data=8",),
    ("mesh.data=4", "mesh.pipeline=2"),
    ("mesh.data=2", "mesh.tensor=2", "mesh.pipeline=2"),
):
    spread = config("letters", overrides=shape)
    program = mt.Program(spread)
    placed = program.place(mt.open_data(spread)[0].batch(0))["tokens"]
    for part in placed.addressable_shards:
        assert (part.data == batch["tokens"][part.index]).all()
    held = sorted({part.index[0].indices(8)[:2] for part in placed.addressable_shards})
    print(f"{', '.join(shape)}: rows", *(f"{first}:{end}" for first, end in held))
    assert len(held) == spread.mesh.data
mt.show(placed)

# %% [markdown]
# With several processes each reads only its own rows: `batch(k, rows)`. It is the same function of $k$, cut.

# %%
halves = [train.batch(3, rows) for rows in (slice(0, 4), slice(4, 8))]
assert same(
    {name: np.concatenate([half[name] for half in halves]) for name in batch},
    train.batch(3),
)

# %% [markdown]
# ## Going on
# A loader that reads ahead hands out $(k, \text{batch } k)$ from any $k$ on. So a checkpoint keeps one integer of the
# data, and a resume seeks nothing: a run of six steps, and one that is stopped after four, read the same.

# %%
from meshtrain.data import Loader


def read(start, end):
    loader = Loader(mt.open_data(config("letters"))[0], start)
    found = [next(loader) for _ in range(start, end)]
    loader.close()
    return found


whole, parts = read(0, 6), read(0, 4) + read(4, 6)
for (k, one), (number, other) in zip(whole, parts, strict=True):
    assert k == number and same(one, other) and same(one, train.batch(k))

# %% [markdown]
# ## A shuffle that is computed
# An order of $10^9$ rows as a list takes 8 GB, and every process would need it. `meshtrain/data/permutation.py`
# computes where a row goes instead, by a Feistel network: write the index as two digits $(x, y)$ of a grid $a \times
# b$, and in turns
#
# $$x \leftarrow x + F_i(y) \bmod a, \qquad y \leftarrow y + F_{i+1}(x) \bmod b.$$
#
# Each turn can be undone, whatever $F$ is: the digit that $F$ has read is still there to be read again. So all turns
# together are a bijection of the grid. Here with an $F$ made up on the spot:


# %%
def F(turn, digit):
    return digit * digit * 31 + turn * 1009


def network(v, a, b, turns):
    x, y = np.divmod(v, b)
    for turn in turns:
        x, y = ((x + F(turn, y)) % a, y) if turn % 2 == 0 else (x, (y + F(turn, x)) % b)
    return x * b + y


for a, b in ((3, 7), (20, 20), (1000, 999)):
    grid = np.arange(a * b)
    assert (np.sort(network(grid, a, b, range(6))) == grid).all()
print("a bijection of every grid")

# %% [markdown]
# Few sizes are $a \cdot b$. A row that lands beyond the last is sent through again until it lands inside (Black &
# Rogaway 2002): the way on from any inner point leads back inside, and two ways never join. The project's own, for
# every size up to 300 and three large ones:

# %%
from meshtrain.data.permutation import key_of, permute

for size in (*range(1, 301), 65_537, 99_991, 1_000_000):
    assert (
        np.sort(permute(np.arange(size), size, key_of(0, "rows", size)))
        == np.arange(size)
    ).all()

far = permute(np.array([0, 1, 2]), 10**12, key_of(0, "rows", 0))
print("rows 0, 1, 2 of 10^12 come from", *far)

# %% [markdown]
# ## An epoch
# So every row comes once before any comes twice. With `data.last: pad` no token is left out: the labels of one epoch
# are those of the text, each as often as it stands there.


# %%
def epoch_of(data):
    return [data.batch(k) for k in range(data.batches_per_epoch)]


padded, _ = mt.open_data(config("letters", last="pad"))
met = np.concatenate([b["labels"][b["weights"] > 0] for b in epoch_of(padded)])
assert (np.bincount(met, minlength=257) == np.bincount(tokens[1:], minlength=257)).all()
assert (
    len(met)
    == characters + len(alphabet)
    == round(padded.tokens_per_batch * padded.batches_per_epoch)
)
print(
    f"{len(met)} labels in {padded.batches_per_epoch} batches; the next epoch is in another order:"
)
for k in (0, padded.batches_per_epoch):
    print(f"  batch {k}, row 0: {readable(padded.batch(k)['tokens'][0])}")
assert not same(padded.batch(0), padded.batch(padded.batches_per_epoch))

# %% [markdown]
# ## Documents kept whole
# Windows cut documents apart and let attention look across. Two ways not to: `packed` puts whole documents side by
# side in a row, `grouped` gives each a row of its own, padded, with documents of about equal length together. Here
# 1,200 documents, most short and a few very long, as texts are.

# %%
lengths = np.ceil(draw.lognormal(np.log(80), 1.0, 1200)).astype(int).tolist()
write(
    "documents",
    {f"{i:04}": alphabet[i * 7 % 26] * length for i, length in enumerate(lengths)},
)


def opened(batching):
    return mt.open_data(
        config("documents", 256, batching=batching, last="pad", lengths=4)
    )[0]


batchings = {batching: opened(batching) for batching in ("window", "packed", "grouped")}
for name, data in batchings.items():
    shown = data.batch(0)
    print(f"{name}: a batch of {' × '.join(map(str, shown['tokens'].shape))}")
    for ids, weights in zip(shown["tokens"][:3], shown["weights"], strict=False):
        print("  ", readable(np.where(weights > 0, ids, ord(" ")))[:100])

# %% [markdown]
# Padding is computed for nothing. Packing here needs no more of it than windows do, which only pad the last batch: it
# fits pieces into rows by their lengths, the longest first (Krell et al. 2021). What `open_data` says that padding
# will be, an epoch then has.

# %%
pieces = [
    part for n in lengths for part in [256] * ((n + 1) // 256) + [(n + 1) % 256] if part
]
print(f"{'one document a row':20}{1 - np.mean(pieces) / 256:6.1%} padding")
for name, data in batchings.items():
    weights = [b["weights"] > 0 for b in epoch_of(data)]
    padding = 1 - sum(w.sum() for w in weights) / sum(w.size for w in weights)
    shapes = ", ".join(f"{rows} × {length}" for rows, length in data.shapes)
    print(f"{name:20}{padding:6.1%} padding in {len(weights)} batches of {shapes}")
    assert np.isclose(padding, data.padding, rtol=1e-9)
    assert sum(w.sum() for w in weights) == sum(pieces)
assert batchings["packed"].batches_per_epoch == batchings["window"].batches_per_epoch
assert (
    batchings["packed"].padding
    < batchings["grouped"].padding
    < 1 - np.mean(pieces) / 256
)

# %% [markdown]
# ## The mask
# A packed batch says of each place its segment (the number of its document in the row, 0 for padding) and its position
# in the document. A place may look at another if that is not later and in the same segment: blocks on the diagonal.

# %%
packed = batchings["packed"].batch(0)
full = np.argsort(packed["segments"].max(1))[::-1]  # the rows of most documents first
row = int(full[0])
segments, positions = packed["segments"][row], packed["positions"][row]
sees = (segments[:, None] == segments) & np.tri(256, dtype=bool) & (segments > 0)
# a place sees itself and all of its document before it
assert (sees.sum(1) == np.where(segments > 0, positions + 1, 0)).all()

plt.imshow(sees, cmap="Greys")
plt.title(f"row {row}: {segments.max()} documents; down: looks, across: is looked at")
plt.show()

# %% [markdown]
# ## Text that has changed
# One global order is worth nothing if the text under it is another. A checkpoint keeps the digest of what was read,
# and a run goes on only with the same. Two steps, then one letter of one document is changed:

# %%
with capture_output():
    mt.train(config("letters", overrides=["run.directory=run"]))

Path("letters", "m.txt").write_text("M" + Path("letters", "m.txt").read_text()[1:])
try:
    mt.train(config("letters", overrides=["run.directory=run", "train.steps=4"]))
except mt.ConfigError as error:
    sentence = str(error).replace(f"{Path.cwd()}/", "")
print(sentence)
assert "data.source letters holds other tokens than it did" in sentence

# %% [markdown]
# Put back, the run goes on with the third batch. Here it lies under another name, which the run must be told is meant;
# its digest is still that of the text, and batch 3 still batch 3.

# %%
Path("letters", "m.txt").write_text("m" * Path("letters", "m.txt").stat().st_size)
Path("letters").rename("moved")
moved, _ = mt.open_data(config("moved"))
assert moved.digest == train.digest and same(moved.batch(3), train.batch(3))

meant = ["run.directory=run", "train.steps=4", "checkpoint.allow=[data.source]"]
with capture_output() as said:
    mt.train(config("moved", overrides=meant))
steps = [
    json.loads(row)["step"]
    for row in Path("run", "metrics.jsonl").read_text().splitlines()
]
print(said.stderr + f"steps {steps}")
assert steps == [1, 2, 3, 4] and "data.source was letters and is moved" in said.stderr

# %% [markdown]
# ## Things to try
# - `opened("budget")`: batches of equally many tokens, more rows the shorter the documents. What happens to the
#   padding, what to the shapes?
# - Let $F$ in `network` read the digit that it changes: which assert finds it?
# - Draw the points (k, the row of batch k) of an epoch, then with two turns in place of six
#   (`meshtrain.data.permutation.ROUNDS = 2`).
# - `lengths=1` and `lengths=16` in `opened`: how much padding does each further length save, and what does it cost (a
#   compilation each)?
