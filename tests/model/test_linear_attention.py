"""Layers of linear attention are their papers' formulas, written apart in NumPy, and those of transformers."""

import importlib

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from meshtrain.config import load
from meshtrain.config.stacks import model_of_stack
from meshtrain.model.collectives import Collectives
from meshtrain.model.dropout import NO_DROPOUT
from meshtrain.model.linear_attention import LinearAttention
from meshtrain.model.rope import Sequence

D, GROUPS, H, K, V, CONV, T = 32, 2, 4, 8, 6, 4, 21
EPS = 1e-5
X = np.random.default_rng(0).standard_normal((2, T, D)).astype(np.float32)


def layer(kind: str, **sizes: int) -> LinearAttention:
    linear = {
        "kind": kind,
        "key_heads": GROUPS,
        "value_heads": H,
        "key_dim": K,
        "value_dim": V,
    }
    model = {
        "layers": 2,
        "d_model": D,
        "heads": 4,
        "d_ff": 16,
        "pattern": ["linear", "full"],
    }
    config = load(
        {
            "model": model
            | {
                "vocab_size": 8,
                "norm_eps": EPS,
                "linear": linear | {"chunk": 8} | sizes,
            }
        }
    )
    of_layer = model_of_stack(config.model, "linear_blocks")
    return LinearAttention("blocks.attention", of_layer, nnx.Rngs(0, lora=0))


def weights(module: LinearAttention) -> dict[str, nnx.Param]:
    return {
        ".".join(path): param for path, param in nnx.to_flat_state(nnx.state(module))
    }


def outputs(module: LinearAttention, given: dict[str, np.ndarray]) -> np.ndarray:
    """Returns what a layer of these weights makes of X."""
    params = weights(module)
    assert params.keys() == given.keys()
    for name, param in params.items():
        param[...] = jnp.asarray(given[name], jnp.float32).reshape(param.shape)
    nnx.update(
        module,
        nnx.from_flat_state([(tuple(n.split(".")), p) for n, p in params.items()]),
    )
    return np.asarray(module(jnp.asarray(X), Sequence(), Collectives(), NO_DROPOUT))


def silu(x):
    return x / (1 + np.exp(-x))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def rms(x):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS)


def convolved(w, name, x):
    """Returns silu of the causal convolution of x [T, D] times its weight."""
    y = np.tensordot(x, w[name], 1)
    before = np.concatenate([np.zeros((CONV - 1, *y.shape[1:])), y])
    total = sum(w[f"{name}_conv"][at] * before[at : at + T] for at in range(CONV))
    return silu(total + w.get(f"{name}_conv_bias", 0))


def gate(w, name, x):
    few = x @ w[f"{name}_down"] if f"{name}_down" in w else x
    return np.tensordot(few, w.get(f"{name}_up", w.get(name)), 1)


def published(w, x):
    """Kimi Linear, equations 1 and 10 (with one decay a head: Gated Delta Networks, equation 10), of a sequence
    [T, D]; without beta Mamba-2, section 3.2.2 and figure 6.
    """
    q, k, v = (convolved(w, name, x) for name in "qkv")
    q, k = (np.repeat(a, H // GROUPS, axis=1) for a in (q, k))
    delta = "beta" in w
    if delta:
        q, k = (a / np.sqrt((a * a).sum(-1, keepdims=True) + 1e-6) for a in (q, k))
        q = q * K**-0.5
    steps = np.log1p(np.exp(gate(w, "decay", x) + w["decay_bias"])).reshape(T, H, -1)
    decays = np.exp(-np.exp(w["decay_log"])[:, None] * steps)
    state = np.zeros((H, K, V))
    out = np.zeros((T, H, V))
    for t in range(T):
        state = decays[t][..., None] * state
        if delta:
            found = np.einsum("hk,hkv->hv", k[t], state)
            new = sigmoid(x[t] @ w["beta"])[:, None] * (v[t] - found)
        else:
            new = steps[t] * v[t]
        state = state + k[t][..., None] * new[:, None]
        out[t] = np.einsum("hk,hkv->hv", q[t], state)
    z = gate(w, "z", x)
    if not delta:
        gated = (out + w["skip"][:, None] * v) * silu(z)
        out = rms(gated.reshape(T, GROUPS, -1)).reshape(T, H, V) * w["norm.scale"]
    else:
        out = rms(out) * w["norm.scale"] * (sigmoid if "z_up" in w else silu)(z)
    return np.tensordot(out, w["out"], 2)


@pytest.mark.parametrize(
    "kind",
    [
        "kda",
        *(
            pytest.param(k, marks=pytest.mark.thorough)
            for k in ("gated_delta", "mamba2")
        ),
    ],
)
def test_a_layer_is_that_of_the_papers_formulas(kind):
    module = layer(kind)
    draw = np.random.default_rng(1).standard_normal
    given = {name: 0.4 * draw(param.shape) for name, param in weights(module).items()}
    got = outputs(module, given)
    want = np.stack([published(given, np.float64(row)) for row in X])
    assert np.abs(got - want).max() < 1e-6 * np.abs(want).max() + 1e-6


def of_kimi(kimi):
    """Returns a layer of theirs, and the weights of ours by name from those of theirs."""
    types = ["linear_attention", "full_attention"]
    sizes = {
        "linear_head_dim": K,
        "linear_num_heads": H,
        "linear_conv_kernel_dim": CONV,
    }
    config = kimi.KimiLinearConfig(
        hidden_size=D, num_hidden_layers=2, layer_types=types, rms_norm_eps=EPS, **sizes
    )

    def ours(w):
        found = {name: w[f"{name}_proj.weight"].T for name in "qkv"}
        parts = np.split(w["conv1d.weight"][:, 0].T, 3, axis=1)
        found |= zip(("q_conv", "k_conv", "v_conv"), parts, strict=True)
        return found | {
            "beta": w["b_proj.weight"].T,
            "decay_down": w["forget_gate.f_a_proj.weight"].T,
            "decay_up": w["forget_gate.f_b_proj.weight"].T,
            "decay_log": w["forget_gate.A_log"],
            "decay_bias": w["forget_gate.dt_bias"],
            "z_down": w["g_a_proj.weight"].T,
            "z_up": w["g_b_proj.weight"].T,
            "norm.scale": w["o_norm.weight"],
            "out": w["o_proj.weight"].T,
        }

    return kimi.KimiLinearDeltaAttention(config, 0), ours


def of_bamba(bamba):
    """Returns the same."""
    config = bamba.BambaConfig(
        hidden_size=D,
        num_hidden_layers=2,
        attn_layer_indices=[1],
        rms_norm_eps=EPS,
        mamba_n_heads=H,
        mamba_d_head=K,
        mamba_n_groups=GROUPS,
        mamba_d_state=K,
        mamba_d_conv=CONV,
        mamba_expand=1,
        mamba_chunk_size=8,
    )
    keys = GROUPS * K
    of_vkq = [H * K, H * K + keys]

    def ours(w):
        found = dict(
            zip(
                "vkq", np.split(w["conv1d.weight"][:, 0].T, of_vkq, axis=1), strict=True
            )
        )
        found = {f"{name}_conv": x for name, x in found.items()}
        biases = np.split(w["conv1d.bias"], of_vkq)
        found |= zip(("v_conv_bias", "k_conv_bias", "q_conv_bias"), biases, strict=True)
        ends = np.cumsum([H * K, H * K, keys, keys])
        parts = np.split(w["in_proj.weight"].T, ends, axis=1)
        found |= zip(("z", "v", "k", "q", "decay"), parts, strict=True)
        names = {"decay_log": "A_log", "decay_bias": "dt_bias", "skip": "D"}
        found |= {name: w[theirs] for name, theirs in names.items()}
        return found | {"norm.scale": w["norm.weight"], "out": w["out_proj.weight"].T}

    return bamba.BambaMixer(config, 0), ours


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "theirs", "sizes"),
    [
        ("kda", "kimi_linear", {"key_heads": H, "value_dim": K}),
        ("mamba2", "bamba", {"value_dim": K}),
    ],
)
def test_a_layer_is_that_of_transformers(kind, theirs, sizes):
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    models = importlib.import_module(f"transformers.models.{theirs}.modeling_{theirs}")
    torch.manual_seed(0)
    reference, ours = (of_kimi if kind == "kda" else of_bamba)(models)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape))
        want = reference.eval()(torch.tensor(X)).numpy()
    given = ours({name: x.detach().numpy() for name, x in reference.named_parameters()})
    got = outputs(layer(kind, **sizes), given)
    assert np.abs(got - want).max() < 2e-6 * np.abs(want).max()
