# %% [markdown]
# # 15 Experts: a router learns, its load is kept even, and rows travel
# A mixture of experts has many MLPs in a layer, and a router, one matrix, which chooses a few of them for each token
# (Shazeer et al. 2017). Parameters grow, the work for a token does not. What can go wrong: all tokens choose the same
# experts, and rows wait for links. Here a router is written by hand; one learns, without and with a rule that keeps
# its load even, on one device and on four; and what crosses between devices is counted in the compiled program, by
# formula and by the planner.

# %%
import jax.numpy as jnp
import numpy as np

import meshtrain as mt
from meshtrain.model.experts import route
from meshtrain.model.slots import slots_of
from meshtrain.plan import traffic

mt.fake_devices(8)

# %% [markdown]
# ## A router by hand
# Six tokens, four experts, two for each token. Logits are the tokens times the router's matrix, always in float32: a
# token on the edge between two experts would otherwise choose another one on another mesh. The two largest
# probabilities are taken, and divided by their sum.

# %%
random = np.random.default_rng(2)
logits = random.standard_normal((6, 4)).astype(np.float32)
probabilities = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
chosen = np.argsort(-probabilities, axis=1)[:, :2]
weights = np.take_along_axis(probabilities, chosen, 1)
weights /= weights.sum(1, keepdims=True)
for token in range(6):
    print(
        f"token {token}: "
        + ", ".join(
            f"{w:.2f} of expert {e}"
            for e, w in zip(chosen[token], weights[token], strict=True)
        )
    )
load = np.bincount(chosen.reshape(-1), minlength=4)
print(f"load {load}, the fullest over the mean: {load.max() / load.mean():.2f}")

moe = mt.load({"model": {"moe": {"experts": 4, "top_k": 2}}}).model.moe
ours = route(moe, jnp.asarray(logits), jnp.zeros(4), None)
assert (ours.chosen == chosen).all() and np.allclose(ours.weights, weights, atol=1e-6)

# %% [markdown]
# Rows are then sorted by expert into blocks, each of one expert, so that every product is of a whole block and one
# weight. Blocks that are not full hold rows of zeros: 16 rows is the shortest block, which for so few tokens is mostly
# empty.

# %%
slots = slots_of(ours.chosen, 4, ours.chosen.size)
block = len(slots.pairs) // len(slots.expert_of_block)
used = np.asarray(slots.pairs)[: int(slots.blocks) * block].reshape(-1, block)
for expert, pairs in zip(slots.expert_of_block[: len(used)], used, strict=True):
    tokens = [int(pair) // 2 for pair in pairs if pair < ours.chosen.size]
    print(f"a block of {block} rows for expert {expert}: tokens {tokens}")
assert sum((pairs < ours.chosen.size).sum() for pairs in used) == 12

# %% [markdown]
# ## One learns
# Two layers of 8 experts, of which a token takes 2. The corpus is skewed as words are: a word is as frequent as its
# rank says (Zipf), and often follows the same one. `telemetry.experts_every` has a step also return the tokens of each
# expert of each layer.

# %%
settings = {
    "model": {
        "layers": 2, "d_model": 64, "heads": 4, "vocab_size": 256,
        "moe": {"experts": 8, "top_k": 2, "d_ff": 64, "router": "sigmoid"},
    },
    "train": {"steps": 200, "global_batch_size": 64, "sequence_length": 64},
    "optimizer": {"learning_rate": 1e-3},
    "telemetry": {"experts_every": 1},
}  # fmt: skip


def batch(random):
    frequency = 1 / np.arange(1, 257)
    text = random.choice(256, (64, 65), p=frequency / frequency.sum())
    follows = random.random(text.shape) < 0.3
    text[:, 1:] = np.where(follows[:, 1:], (7 * text[:, :-1] + 3) % 256, text[:, 1:])
    text = text.astype(np.int32)
    return {"tokens": text[:, :-1], "labels": text[:, 1:]}


def trained(steps, *overrides):
    """The program, what each step measured, and the tokens of each expert in it."""
    program = mt.Program(mt.load(settings, overrides))
    state, random, rows, tokens = program.init(), np.random.default_rng(0), [], []
    for _ in range(steps):
        state, metrics = program.train_step(state, program.place(batch(random)))
        tokens.append(np.asarray(metrics.pop("expert_counts"))[:, :8])
        rows.append({name: float(x) for name, x in metrics.items()})
    return program, rows, tokens


free, free_rows, free_tokens = trained(200, "model.moe.balance=none")
for name, rows in {"at first": free_rows[:20], "at the end": free_rows[-20:]}.items():
    loss, entropy, most = (
        np.mean([row[key] for row in rows])
        for key in ("loss", "router_entropy", "expert_load")
    )
    print(
        f"{name:10} loss {loss:.1f}, entropy of the router {entropy:.1f} nats, the fullest expert {most:.1f} x the mean"
    )
assert all((tokens.sum(1) == 64 * 64 * 2).all() for tokens in free_tokens), (
    "each token takes two experts in each layer"
)
assert (
    free_rows[-1]["loss"] < free_rows[0]["loss"] - 1
    and free_rows[-1]["router_entropy"] < free_rows[0]["router_entropy"]
)

# %% [markdown]
# The router has learned to choose the same: the fullest expert ends with four times the mean, the most that 2 of 8 can
# give, so that two experts compute all tokens of a layer and the others learn nothing. The entropy of its
# probabilities stays near $\ln 8 = 2.08$: small differences decide.
#
# ## Kept even
# The classic mend adds a loss of the batch's loads, which is another one with every cut of the batch into microbatches
# and ranks; `meshtrain` refuses it. Here each expert has a bias that is added to its score where experts are chosen,
# and nowhere else: it rises while the expert's load, counted over the whole step, is below the mean, and falls
# otherwise (Wang et al. 2024). No gradient is changed by it.

# %%
even, even_rows, even_tokens = trained(
    200, "model.moe.balance=bias", "model.moe.bias_rate=0.002"
)
most = np.mean([row["expert_load"] for row in even_rows[-20:]])
print(
    f"the fullest expert: {max(row['expert_load'] for row in even_rows):.1f} x the mean at its worst, {most:.1f} at the end"
)
print(f"loss {np.mean([row['loss'] for row in even_rows[-20:]]):.1f}")
assert max(row["expert_load"] for row in even_rows) > 3 and most < 1.3
assert even_rows[0]["loss"] == free_rows[0]["loss"], "at first the bias is zero"

# %% [markdown]
# ## No mesh changes it
# The same first ten steps on four data ranks that share the experts, two on each (`mesh.expert: 4`): where experts lie
# is no part of the model.

# %%
_, shared, counts = trained(
    10,
    "model.moe.balance=bias",
    "model.moe.bias_rate=0.002",
    "mesh.data=4",
    "mesh.expert=4",
)
apart = max(
    abs(a["loss"] / b["loss"] - 1) for a, b in zip(shared, even_rows[:10], strict=True)
)
same = sum(int((a == b).all()) for a, b in zip(counts, even_tokens[:10], strict=True))
print(
    f"losses apart by less than 1e-5: {apart < 1e-5}; steps with the same tokens of every expert: {same} of 10"
)
assert apart < 1e-5 and same == 10

# %% [markdown]
# ## What crosses `expert`
# Rows travel in one of two ways. `all_gather` sends every row to all P ranks, and a reduce-scatter brings the sums
# back. `all_to_all` sends a row only to the ranks of the experts that it chose, into room that is `capacity` times an
# even load; rows beyond it are dropped, and counted. On 8 data ranks, of which 4 share the experts, a rank has n = 512
# tokens of D = 64 numbers. What it sends in a layer:
#
# | | all_gather | all_to_all |
# | --- | --- | --- |
# | rows out, sums back, and their cotangents | $4 (P-1) n D$ | $4 \frac{P-1}{P} R D$ |
# | who chose what, its weight, and that one's cotangent | $3 (P-1) n k$ | $3 \frac{P-1}{P} R$ |
#
# in numbers of four bytes, with $R = \lceil c\, n k / P \rceil P$ rows of room, $c$ the capacity and $k$ the experts
# of a token.

# %%
P, n, D, k, layers = 4, 64 * 64 // 8, 64, 2, 2
R = -(-1.25 * n * k // P) * P
formula = {
    "all_gather": 4 * layers * (P - 1) * n * (4 * D + 3 * k),
    "all_to_all": 4 * layers * (P - 1) / P * R * (4 * D + 3),
}
for dispatch, expected in formula.items():
    capacity = "null" if dispatch == "all_gather" else 1.25
    wanted = [
        f"parallel.experts.dispatch={dispatch}",
        f"parallel.experts.capacity={capacity}",
    ]
    program = mt.Program(mt.load(settings, ["mesh.data=8", "mesh.expert=4", *wanted]))
    found = [
        c
        for c in program.collectives()
        if c.axes == ("expert",) and "layer" in c.source
    ]
    sent = sum(c.sent * c.times for c in found)
    planned = traffic.by_axis(mt.plan(program.config, "cpu").transfers)["expert"]
    print(
        f"{dispatch}: {sent:,.0f} bytes in the program, {expected:,.0f} by formula, {planned:,.0f} planned"
    )
    assert {c.kind for c in found} == (
        {"all-gather", "reduce-scatter"} if dispatch == "all_gather" else {"all-to-all"}
    )
    assert np.isclose(sent, expected, rtol=0.01) and np.isclose(
        sent, planned, rtol=0.01
    )

# %% [markdown]
# all_gather sends less while P is below $c\,k$, and with every row there is nothing to drop. With many ranks
# all_to_all wins; `parallel.experts.dispatch: auto` takes the one that sends less.

# %% [markdown]
# ## Things to try
# - `"model.moe.balance=sequence", "model.moe.balance_weight=0.02"`: a loss over each sequence, the other rule that no
#   mesh changes.
# - `bias_rate` 0.02: the bias overshoots, and loads swing about the mean.
# - `"model.moe.shared_experts=1"`: an expert that every token takes, so that the others can specialise.
# - `meshtrain plan --config ../configs/qwen3_30b_a3b.yaml`: what 128 experts over 16 GPUs send, and how long a step
#   waits for it.
