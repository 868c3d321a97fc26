"""The runs of `meshtrain check-gpu`: two layers each, so small that they compile in seconds."""

from typing import Any, NamedTuple

ROWS = 2
TOKENS = 256
STEPS = 2
_DENSE: dict[str, Any] = {
    "family": "llama",
    "layers": 2,
    "d_model": 128,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 64,
    "d_ff": 256,
    "vocab_size": 512,
}
_MOE = {
    "experts": 8,
    "top_k": 2,
    "d_ff": 64,
    "balance": "sequence",
    "balance_weight": 1.0e-2,
}
_SPARSE = {name: value for name, value in _DENSE.items() if name != "d_ff"} | {
    "moe": _MOE
}
_LINEAR = {
    "key_heads": 2,
    "value_heads": 4,
    "key_dim": 32,
    "value_dim": 32,
    "conv": 4,
    "chunk": 64,
}
_HYBRID = _DENSE | {
    "family": "qwen3_5",
    "pattern": ["linear", "full"],
    "linear": _LINEAR,
}
_LATENT = {"q_rank": 64, "kv_rank": 32, "nope": 16, "rope": 16, "value": 16}
_OF_HEADS = ("kv_heads", "head_dim")
_DEEPSEEK = {
    name: value for name, value in _SPARSE.items() if name not in _OF_HEADS
} | {
    "family": "deepseek_v3",
    "dense_layers": 1,
    "dense_d_ff": 256,
    "mla": _LATENT,
    "mtp": 1,
}
_BFLOAT16 = {"compute": "bfloat16"}
_FLOAT8 = _BFLOAT16 | {"matmul": "float8", "float8_skip": [0, 0]}


class Tolerance(NamedTuple):
    """Relative differences that a run may have: of its losses, and of the first gradient's norm.

    Later norms hang on an update of Adam's, which goes by the sign of what is all but zero.
    """

    loss: float
    norm: float


TOLERANCES = {
    "float32": Tolerance(2e-5, 1e-4),
    "bfloat16": Tolerance(1e-3, 5e-3),
    "float16": Tolerance(1e-3, 5e-3),
}


def _case(
    model: dict[str, Any],
    rows: int = ROWS,
    tokens: int = TOKENS,
    **sections: dict[str, Any],
) -> dict[str, Any]:
    train = {"global_batch_size": rows, "sequence_length": tokens} | sections.pop(
        "train", {}
    )
    return {
        "precision": _BFLOAT16,
        "optimizer": {"learning_rate": 1.0e-2, "warmup_steps": 2},
        **sections,
        "model": model,
        "train": train,
    }


CASES: dict[str, dict[str, Any]] = {
    "bfloat16": _case(_DENSE),
    "float16": _case(_DENSE, precision={"compute": "float16"}),
    "float32": _case(_DENSE, precision={"compute": "float32"}),
    "remat": _case(_DENSE, parallel={"remat": "full"}),
    "microbatches": _case(_DENSE, parallel={"microbatches": 2}),
    "dropout": _case(_DENSE | {"dropout": 0.2}),
    "windows": _case(_DENSE | {"family": "gemma2", "window": 64}),
    "qk_norm": _case(_DENSE | {"family": "qwen3"}),
    "sinks": _case(_SPARSE | {"family": "gpt_oss", "window": 64}),
    "odd sizes": _case(_DENSE | {"head_dim": 40, "vocab_size": 517}, 3, 193),
    "experts": _case(_SPARSE),
    "experts, capacity": _case(_SPARSE, parallel={"experts": {"capacity": 1.25}}),
    "linear attention": _case(_HYBRID),
    "latent attention": _case(_DEEPSEEK),
    "float8, rowwise": _case(_DENSE, precision=_FLOAT8),
    "float8, wgrad": _case(_DENSE, precision=_FLOAT8 | {"float8_wgrad": "float8"}),
    "float8, tensorwise": _case(
        _DENSE, precision=_FLOAT8 | {"float8_recipe": "tensorwise"}
    ),
    "float8, blockwise": _case(
        _DENSE, precision=_FLOAT8 | {"float8_recipe": "blockwise"}
    ),
    "float8, experts": _case(_SPARSE, precision=_FLOAT8),
    "LoRA": _case(_DENSE, lora={"rank": 16}),
    "LoRA, float8": _case(
        _DENSE, lora={"rank": 16}, precision=_FLOAT8 | {"float8_frozen": True}
    ),
    "loss by chunks": _case(_DENSE, train={"loss_chunk": 128}),
    "offloaded optimizer": _case(_DENSE, parallel={"offload_optimizer": True}),
    "muon": _case(
        _DENSE, optimizer={"name": "muon", "learning_rate": 1.0e-2, "warmup_steps": 2}
    ),
}


def tolerance(name: str) -> Tolerance:
    return TOLERANCES[CASES[name]["precision"]["compute"]]
