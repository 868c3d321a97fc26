# %% [markdown]
# # 2 Tensor and sequence parallelism, from two matrix products up
# How can several devices share one layer, so that each holds a part of its weights and does a part of its work? We
# begin with two matrix products in plain JAX and one sum over the devices, see in the compiled program what that
# sends, forward and backward, and build attention and a whole block from it (Shoeybi et al. 2019, section 3). Sequence
# parallelism then costs two changed lines (Korthikanti et al. 2022, section 4). At the end the same calls are found in
# meshtrain's step, and counted; and rows are split by their tokens.

# %%
import meshtrain as mt

mt.fake_devices(8)

import inspect
from collections import Counter

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from meshtrain.hlo import KINDS, CompiledCollectives, collectives
from meshtrain.parallel.tensor import MeshCollectives

mesh = mt.make_mesh(mt.load(None, ["mesh.tensor=4"]))
n = mesh.shape["tensor"]
mt.show(mesh)

# %% [markdown]
# ## Two matrix products
# The MLP of a transformer is $y = \mathrm{gelu}(x A)\,B$, with tokens $x$ of shape $[T, D]$, $A$ of $[D, F]$ and $B$
# of $[F, D]$. On one device:

# %%
T, D, F = 32, 16, 64
keys = iter(jax.random.split(jax.random.key(0), 16))


def drawn(*shape):
    return jax.random.normal(next(keys), shape) / shape[0] ** 0.5


def mlp(x, A, B):
    return jax.nn.gelu(x @ A) @ B


x, A, B = jax.random.normal(next(keys), (T, D)), drawn(D, F), drawn(F, D)
y = mlp(x, A, B)

# %% [markdown]
# Give each of 4 devices some *columns* of $A$ and the same *rows* of $B$. A column of $xA$ needs one column of $A$,
# and gelu takes each number by itself, so everything up to the second product happens without a word between the
# devices. That product is a sum over $F$, and each device has a part of its terms:
#
# $$y = \mathrm{gelu}\big(x\,[A_0\,A_1\,A_2\,A_3]\big) \begin{bmatrix}B_0\\B_1\\B_2\\B_3\end{bmatrix} = \sum_i \mathrm{gelu}(x A_i)\,B_i$$

# %%
COLUMNS, ROWS, WHOLE = P(None, "tensor"), P("tensor"), P()
mt.show(
    {
        "A": jax.device_put(A, NamedSharding(mesh, COLUMNS)),
        "B": jax.device_put(B, NamedSharding(mesh, ROWS)),
    }
)


# %% [markdown]
# Inside `jax.shard_map` the function sees its device's share alone. The code is that of one device, and `psum` at the
# end: the sum over $i$.


# %%
@jax.jit
@jax.shard_map(mesh=mesh, in_specs=(WHOLE, COLUMNS, ROWS), out_specs=WHOLE)
def columns_then_rows(x, A, B):
    return lax.psum(mlp(x, A, B), "tensor")


def equal(a, b):
    """All numbers of two trees, within float32's rounding of sums in another order."""
    return jax.tree.all(
        jax.tree.map(lambda a, b: bool(jnp.allclose(a, b, rtol=1e-5, atol=1e-5)), a, b)
    )


assert equal(columns_then_rows(x, A, B), y)

# %% [markdown]
# What do the devices send? Not what we meant to write counts, but what XLA made of it: `meshtrain.hlo` reads the
# collectives from the compiled program, each with the line that it came from. An all-reduce of $b$ bytes over $n$
# devices in a ring has each send $2\,\frac{n-1}{n}\,b$: every part once round to be summed, once round to be told.


# %%
def sent(function, *arguments):
    return collectives(function.lower(*arguments).compile(), mesh)


found = sent(columns_then_rows, x, A, B)
assert [c.kind for c in found] == ["all-reduce"]
assert found.traffic["tensor"] == 2 * (n - 1) / n * 4 * T * D
found

# %% [markdown]
# Why not the other way round, rows of $A$ first? Then $xA = \sum_i x_i A_i$ must be summed *before* gelu, since
# $\mathrm{gelu}(a + b) \neq \mathrm{gelu}(a) + \mathrm{gelu}(b)$; and $F$ is wider than $D$. With columns of $B$ the
# result is in pieces, and must be gathered: two collectives, and here more than four times the bytes.


# %%
@jax.shard_map(mesh=mesh, in_specs=(COLUMNS, ROWS, COLUMNS), out_specs=COLUMNS)
def rows_then_columns(x, A, B):
    return jax.nn.gelu(lax.psum(x @ A, "tensor")) @ B


gathering = jax.jit(rows_then_columns, out_shardings=NamedSharding(mesh, WHOLE))
other = sent(gathering, x, A, B)
assert equal(gathering(x, A, B), y)
assert sorted(c.kind for c in other) == ["all-gather", "all-reduce"]
assert other.traffic["tensor"] == 2 * (n - 1) / n * 4 * T * F + (n - 1) / n * 4 * T * D
print(f"{other.traffic['tensor'] / found.traffic['tensor']} times the bytes")
other

# %% [markdown]
# ## Backward
# Shoeybi et al. write two functions around such a pair: $g$ after it (all-reduce forward, nothing backward) and $f$
# before it (nothing forward, all-reduce backward). Here nobody writes $f$. JAX knows that $x$ is the same on all
# devices and $A_i$ is not, and the transpose of that meeting is a sum: $\partial x = \sum_i \partial h_i\,A_i^\top$.
# If nobody asks for $\partial x$ there is none.


# %%
def loss_of(function):
    return lambda *arguments: 0.5 * jnp.sum(function(*arguments) ** 2)


of_weights = jax.jit(jax.grad(loss_of(columns_then_rows), argnums=(1, 2)))
of_all = jax.jit(jax.grad(loss_of(columns_then_rows), argnums=(0, 1, 2)))
assert equal(of_all(x, A, B), jax.grad(loss_of(mlp), argnums=(0, 1, 2))(x, A, B))
assert [c.backward for c in sent(of_weights, x, A, B)] == [False]
assert sorted(c.backward for c in sent(of_all, x, A, B)) == [False, True]
sent(of_all, x, A, B)

# %% [markdown]
# ## Attention, and a whole block
# Heads of attention never meet before the output projection sums over them. So heads are to attention what columns are
# to the MLP: queries, keys and values by columns, the output projection by rows. The functions below are written for
# one device, and do not know how many heads they have. A block calls `enter` before what is split by columns, and
# `leave` after what is split by rows; on one device neither does anything.

# %%
H, K = 4, 8  # heads, and their width
weights = {name: drawn(D, H, K) for name in "qkv"} | {
    "out": drawn(H, K, D) / 2,
    "A": A,
    "B": B,
}
split = {name: COLUMNS for name in "qkvA"} | {"out": ROWS, "B": ROWS}


def attention(x, w):
    q, k, v = (jnp.einsum("td,dhk->thk", x, w[name]) for name in "qkv")
    scores = jnp.einsum("thk,shk->hts", q, k) / K**0.5
    scores = jnp.where(jnp.tri(len(x), dtype=bool), scores, -jnp.inf)
    return jnp.einsum("hts,shk,hkd->td", jax.nn.softmax(scores), v, w["out"])


def norm(x):
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-5)


def block(x, w, enter=lambda x: x, leave=lambda y: y):
    x = x + leave(attention(enter(norm(x)), w))
    return x + leave(mlp(enter(norm(x)), w["A"], w["B"]))


# %% [markdown]
# On the mesh `leave` is `psum`. Forward that is two all-reduces, and with the two $f$ of the backward four. But look
# at the bytes: the backward one of attention is three times as large as the others.


# %%
def on_mesh(stream, **places):
    """The block on the mesh, the residual stream split as `stream` says, and its gradients."""
    run = jax.shard_map(
        lambda x, w: block(x, w, **places),
        mesh=mesh,
        in_specs=(stream, split),
        out_specs=stream,
    )
    return jax.jit(run), jax.jit(jax.grad(loss_of(run), argnums=(0, 1)))


def summed(y):
    return lax.psum(y, "tensor")


run, gradients = on_mesh(WHOLE, leave=summed)
reference = jax.grad(loss_of(block), argnums=(0, 1))(x, weights)
assert equal(run(x, weights), block(x, weights)) and equal(
    gradients(x, weights), reference
)
first = sent(gradients, x, weights)
assert sorted(c.bytes // (4 * T * D) for c in first) == [1, 1, 1, 3]
first

# %% [markdown]
# The same $x$ meets the weights of $q$, of $k$ and of $v$: three meetings, three sums (XLA does them in one message).
# $f$ belongs
# *before* the ways part, and that is what `enter` is for: `pcast` says "from here on this may differ between devices". It moves
# nothing, and its transpose is the one sum.


# %%
def differs(x):
    return lax.pcast(x, "tensor", to="varying")


run, gradients = on_mesh(WHOLE, enter=differs, leave=summed)
assert equal(run(x, weights), block(x, weights)) and equal(
    gradients(x, weights), reference
)
tensor_parallel = sent(gradients, x, weights)
assert Counter((c.kind, c.backward) for c in tensor_parallel) == {
    ("all-reduce", False): 2,
    ("all-reduce", True): 2,
}
assert tensor_parallel.traffic["tensor"] == 4 * 2 * (n - 1) / n * 4 * T * D
tensor_parallel

# %% [markdown]
# ## Sequence parallelism
# Between `leave` and the next `enter` all devices still do the same: norms and the residual sum, on the same $[T, D]$.
# An all-reduce is a reduce-scatter followed by an all-gather. Korthikanti et al. let other work in between: leave with
# the first, and each device goes on with its $T/n$ tokens alone; enter with the second. The functions stay, the two
# places change.


# %%
def gathered(x):
    return lax.all_gather(x, "tensor", axis=0, tiled=True)


def scattered(y):
    return lax.psum_scatter(y, "tensor", scatter_dimension=0, tiled=True)


run, gradients = on_mesh(ROWS, enter=gathered, leave=scattered)
out = run(x, weights)
assert equal(out, block(x, weights)) and equal(gradients(x, weights), reference)
assert out.addressable_shards[0].data.shape == (T // n, D)
mt.show(out)

# %% [markdown]
# More collectives, but each sends half as much: the bytes are the same, to the last one. Backward the two have changed
# places, for the transpose of a gather is a scatter.

# %%
sequence_parallel = sent(gradients, x, weights)
assert Counter((c.kind, c.backward) for c in sequence_parallel) == {
    (kind, backward): 2
    for kind in ("all-gather", "reduce-scatter")
    for backward in (False, True)
}
assert sequence_parallel.traffic == tensor_parallel.traffic
sequence_parallel

# %% [markdown]
# ## In meshtrain
# The model in `meshtrain.model` calls `enter` and `leave` just so (`decoder.Block`), and knows of no mesh. What they do
# on one is in `meshtrain/parallel/tensor.py`; per layer, forward / backward:
#
# | | tensor parallel | + sequence parallel |
# | --- | --- | --- |
# | `enter` (twice) | nothing / all-reduce | all-gather / reduce-scatter, and all-gather again |
# | `leave` (twice) | all-reduce / nothing | reduce-scatter / all-gather |

# %%
print(
    inspect.getsource(MeshCollectives.enter),
    inspect.getsource(MeshCollectives.leave),
    sep="\n",
)

# %% [markdown]
# Now a Llama-style model on three placements: one device, `mesh.tensor` 4, and that with `sequence_parallel`. Each
# step is compiled once; below, the compiled step is both run and read. The losses are those of one device.

# %%
base = {
    "model": {"layers": 2, "d_model": 64, "heads": 8, "kv_heads": 4, "vocab_size": 260},
    "data": {"source": "synthetic"},
    "train": {"global_batch_size": 4, "sequence_length": 64},
    "optimizer": {"warmup_steps": 0, "learning_rate": 1e-2},
}
changes = {
    "one device": [],
    "tensor 4": ["mesh.tensor=4"],
    "sequence parallel": ["mesh.tensor=4", "parallel.sequence_parallel=true"],
}
programs = {name: mt.Program(mt.load(base, keys)) for name, keys in changes.items()}
programs["tensor 4"]

# %%
steps = {name: program.lower().compile() for name, program in programs.items()}
data, _ = mt.open_data(mt.load(base))
losses, trained = {}, {}
for name, program in programs.items():
    state, losses[name] = program.init(), []
    for k in range(4):
        state, metrics = steps[name](state, program.place(data.batch(k)))
        losses[name].append(float(metrics["loss"]))
    trained[name] = state.params
    print(f"{name:18}", *(f"{loss:.4f}" for loss in losses[name]))
assert all(
    abs(a - b) < 1e-5
    for of in losses.values()
    for a, b in zip(of, losses["one device"], strict=True)
)

# %% [markdown]
# What does a layer send? The layers are one loop in the compiled step, so what stands in a loop belongs to them. By
# the table that is, forward and backward together, 4 all-reduces a layer, or 6 all-gathers and 4 reduce-scatters.

# %%
layers = programs["one device"].config.model.layers
sends = {name: collectives(step, programs[name].mesh) for name, step in steps.items()}
of_layers = {
    name: CompiledCollectives(c for c in found if c.loops)
    for name, found in sends.items()
}
for name, times in {
    "tensor 4": {"all-reduce": 4},
    "sequence parallel": {"all-gather": 6, "reduce-scatter": 4},
}.items():
    counted = {
        kind: sum(c.times for c in of_layers[name] if c.kind == kind) / layers
        for kind in KINDS
    }
    assert counted == {kind: times.get(kind, 0) for kind in KINDS}
    print(
        f"{name}, a layer:",
        ", ".join(f"{times:.0f} × {kind}" for kind, times in counted.items() if times),
    )
assert not any(c.sent for c in sends["one device"])
of_layers["sequence parallel"]

# %% [markdown]
# The bytes of the whole step follow from the shapes: a stream of $b$ bytes at 4 places in each of $L$ layers, and at 2
# more (the embedding forward, the head backward), each with $2\,\frac{n-1}{n}\,b$. With sequence parallelism that is
# the same but for what is gathered again, twice a layer $\frac{n-1}{n}\,b$. What is left is small: the loss, norms,
# gradients of norms' scales.

# %%
model, train = programs["tensor 4"].config.model, programs["tensor 4"].config.train
tokens = train.global_batch_size * train.sequence_length
stream = 4 * tokens * model.d_model
formula = (4 * layers + 2) * 2 * (n - 1) / n * stream
total = {
    name: found.traffic["tensor"]
    for name, found in sends.items()
    if name != "one device"
}
again = 2 * layers * (n - 1) / n * stream
assert total["sequence parallel"] == total["tensor 4"] + again
assert formula < total["tensor 4"] < 1.01 * formula
print(
    f"{total['tensor 4']:,.0f} bytes, of them {formula:,.0f} by the formula; gathered again {again:,.0f}"
)

# %% [markdown]
# ## What sequence parallelism is for
# Memory. Of each layer four arrays like $x$ are kept for the backward (the input of attention and of the MLP, each also
# normalised), and shrink to $1/n$: of what `enter` gathers only the share is kept, and gathered once more in the
# backward (Korthikanti et al. 2022, section 4.2.2). The planner counts on it, and XLA's own account of the compiled
# step agrees.

# %% tags=["varies"]
kept = {
    name: next(
        item.nbytes
        for item in mt.plan(program.config, "cpu").memory
        if item.name.startswith("activations kept")
    )
    for name, program in programs.items()
}
temporary = {
    name: step.memory_analysis().temp_size_in_bytes for name, step in steps.items()
}
print("bytes              kept for the backward    all temporaries of the step")
for name in programs:
    print(f"{name:18} {kept[name]:>21,.0f} {temporary[name]:>30,}")
saved = kept["tensor 4"] - kept["sequence parallel"]
assert saved == layers * 4 * stream * (n - 1) / n
assert temporary["tensor 4"] - temporary["sequence parallel"] >= saved

# %% [markdown]
# ## The vocabulary
# The head is split by columns as well: each device has the logits of a share of the vocabulary. To gather them would
# be the largest message of all. The loss of a token is $\log\sum_v e^{z_v - m} - (z_\ell - m)$ with $m = \max_v z_v$:
# three numbers a token, a maximum and two sums, whatever the vocabulary (Shoeybi et al. 2019, section 3, last
# paragraphs). By hand:


# %%
@jax.jit
@jax.shard_map(mesh=mesh, in_specs=(COLUMNS, WHOLE), out_specs=WHOLE)
def cross_entropy(logits, labels):
    ids = lax.axis_index("tensor") * logits.shape[1] + jnp.arange(logits.shape[1])
    top = lax.pmax(lax.stop_gradient(jnp.max(logits, axis=1)), "tensor")
    shifted = logits - top[:, None]
    of_label = jnp.where(ids == labels[:, None], shifted, 0)
    total, target = lax.psum(
        jnp.stack([jnp.exp(shifted).sum(1), of_label.sum(1)]), "tensor"
    )
    return jnp.log(total) - target


V = model.vocab_size
logits, labels = (
    3 * jax.random.normal(next(keys), (T, V)),
    jax.random.randint(next(keys), (T,), 0, V),
)
assert equal(
    cross_entropy(logits, labels), -jax.nn.log_softmax(logits)[jnp.arange(T), labels]
)
backward = sent(jax.jit(jax.grad(lambda z: cross_entropy(z, labels).mean())), logits)
assert (
    not any(c.backward for c in backward)
    and sum(c.bytes for c in backward) == 3 * 4 * T
)
backward

# %% [markdown]
# Even with the gradient there is no third: what each logit's gradient needs (softmax less one at the label) is there
# already. meshtrain's loss (`model/loss.py`) does the same, and its step sends just these 3 numbers a token:

# %%
of_loss = CompiledCollectives(
    c for c in sends["tensor 4"] if any("loss.py" in str(line) for line in c.lines)
)
assert sum(c.bytes for c in of_loss) == 3 * 4 * tokens
gathering_logits = (n - 1) / n * 4 * tokens * V
print(
    f"gathering the logits would send {gathering_logits / of_loss.traffic['tensor']:.1f} times the bytes"
)
of_loss

# %% [markdown]
# ## Rows split by tokens
# Where a row is too long for one tensor group, its *tokens* are split over a mesh axis of their own, `context`. Only
# attention looks at other tokens, so only there keys and values are sent: a ring passes them on, and each device
# attends with its queries to those that are with it. What it has seen is a numerator and a denominator of the softmax,
# and adds up (with the maximum taken off, which these small numbers spare us). First the cut that comes to mind: rank
# $r$ holds the $r$-th part of the row.

# %%
rows = mt.make_mesh(mt.load(None, ["mesh.context=4"]))
tokens, width = 512, 32
q, k, v = (jax.random.normal(next(keys), (tokens, width)) for _ in range(3))
SPLIT = P("context")


def seen(q, k, v, mask=True):
    weights = jnp.where(mask, jnp.exp(q @ k.T / width**0.5), 0)
    return jnp.concatenate([weights @ v, weights.sum(1, keepdims=True)], axis=1)


def passed_on(x):
    return lax.ppermute(x, "context", [(r, (r + 1) % n) for r in range(n)])


@jax.jit
@jax.shard_map(mesh=rows, in_specs=(SPLIT, SPLIT, SPLIT), out_specs=SPLIT)
def in_order(q, k, v):
    rank, place, total = lax.axis_index("context"), jnp.arange(len(q)), 0
    for step in range(n):
        source = (rank - step) % n
        mask = rank * len(q) + place[:, None] >= source * len(q) + place
        total += seen(q, k, v, mask)
        k, v = passed_on((k, v))
    return total[:, :-1] / total[:, -1:]


causal = jnp.tril(jnp.ones((tokens, tokens), bool))
whole = seen(q, k, v, causal)
whole = whole[:, :-1] / whole[:, -1:]
assert equal(in_order(q, k, v), whole)

# %% [markdown]
# Cut like this rank 3 has four times as much to see as rank 0. `parallel.context_strategy=ring` gives each rank an
# early and a late chunk in place of one, and does this in each layer, forward and backward, with the device's
# attention kernel. The losses are those above.

# %%
ring = mt.Program(mt.load(base, ["mesh.context=4", "parallel.context_strategy=ring"]))
batch = ring.place(data.batch(0))
_, metrics = ring.train_step(ring.init(), batch)
assert abs(float(metrics["loss"]) - losses["one device"][0]) < 1e-5
mt.show(batch["tokens"])

# %% [markdown]
# ## Things to try
# - In `loss_of` take a linear loss, `jnp.sum(function(*arguments))`. Its gradient needs nothing of the forward's sum,
#   so XLA drops that all-reduce, and the assert on `of_weights` says so.
# - Leave `psum` out of `columns_then_rows`: `shard_map` refuses, since the result may vary over `tensor`.
# - Look at `mt.Program(mt.load(base, [*changes["sequence parallel"], "mesh.data=2"])).collectives()`: sums over `data`
#   are added, and what the layers send over `tensor` is half as large, since each data rank has half the rows.
# - Set `model.kv_heads` to 1 (multi-query): no `tensor` above 1 splits the keys, and the gradients of `k` and `v` join
#   what is summed over `tensor`: `total` grows by about 12 KiB.
