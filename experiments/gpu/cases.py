"""The runs that are timed on one GPU: layers of real models, as many as fit.

`h100.jsonl` has what `speed` found of some of them on an H100.
"""

from typing import Any, NamedTuple

LLAMA_8B = {
    "family": "llama",
    "d_model": 4096,
    "heads": 32,
    "kv_heads": 8,
    "d_ff": 14336,
    "vocab_size": 128256,
    "rope_theta": 500000.0,
}
LLAMA_1B = {
    "family": "llama",
    "layers": 16,
    "d_model": 2048,
    "heads": 32,
    "kv_heads": 8,
    "d_ff": 8192,
    "vocab_size": 128256,
}
GPT_2 = {
    "family": "gpt2",
    "layers": 12,
    "d_model": 768,
    "heads": 12,
    "d_ff": 3072,
    "vocab_size": 50304,
}
QWEN3_30B = {
    "family": "qwen3",
    "d_model": 2048,
    "heads": 32,
    "kv_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "rope_theta": 1.0e6,
}
MIXTRAL = {
    "family": "mistral",
    "d_model": 4096,
    "heads": 32,
    "kv_heads": 8,
    "vocab_size": 32000,
    "rope_theta": 1.0e6,
}
NARROW = {
    "experts": 128,
    "top_k": 8,
    "d_ff": 768,
    "balance": "sequence",
    "balance_weight": 1.0e-3,
}
WIDE = {
    "experts": 8,
    "top_k": 2,
    "d_ff": 14336,
    "balance": "sequence",
    "balance_weight": 1.0e-2,
}
BFLOAT16 = {"compute": "bfloat16"}
FLOAT8 = BFLOAT16 | {"matmul": "float8", "float8_skip": [0, 0]}


class Case(NamedTuple):
    """A config by its sections, and the rows and tokens of a step; or `plain` JAX that computes the same."""

    model: dict[str, Any]
    rows: int
    tokens: int
    sections: dict[str, dict[str, Any]]
    plain: bool = False

    def config(self) -> dict[str, Any]:
        train = {
            "global_batch_size": self.rows,
            "sequence_length": self.tokens,
        } | self.sections.get("train", {})
        return {
            "precision": BFLOAT16,
            "optimizer": {"learning_rate": 1.0e-2, "warmup_steps": 2},
            **self.sections,
            "model": self.model,
            "train": train,
        }


def case(
    model: dict[str, Any], rows: int, tokens: int, **sections: dict[str, Any]
) -> Case:
    return Case(model, rows, tokens, sections)


_FOUR = LLAMA_8B | {"layers": 4}
_LORA = {"rank": 16}
SPEED = {
    "8b x 4": case(_FOUR, 2, 8192),
    "8b x 4 full": case(_FOUR, 2, 8192, parallel={"remat": "full"}),
    "8b x 4 chunks": case(_FOUR, 2, 8192, train={"loss_chunk": 2048}),
    "8b x 4 short": case(_FOUR, 8, 2048),
    "8b x 4 halves": case(_FOUR, 4, 8192, parallel={"microbatches": 2}),
    "8b x 4 rowwise": case(_FOUR, 2, 8192, precision=FLOAT8),
    "8b x 4 rowwise wgrad": case(
        _FOUR, 2, 8192, precision=FLOAT8 | {"float8_wgrad": "float8"}
    ),
    "8b x 4 tensorwise": case(
        _FOUR,
        2,
        8192,
        precision=FLOAT8 | {"float8_recipe": "tensorwise", "float8_wgrad": "float8"},
    ),
    "8b x 4 blockwise": case(
        _FOUR, 2, 8192, precision=FLOAT8 | {"float8_recipe": "blockwise"}
    ),
    "8b x 4 dropout": case(_FOUR | {"dropout": 0.1}, 2, 8192),
    "8b lora": case(
        LLAMA_8B | {"layers": 32}, 2, 4096, lora=_LORA, parallel={"remat": "full"}
    ),
    "8b lora float8": case(
        LLAMA_8B | {"layers": 32},
        2,
        4096,
        lora=_LORA,
        parallel={"remat": "full"},
        precision=FLOAT8 | {"float8_frozen": True},
    ),
    "1b": case(LLAMA_1B, 2, 4096),
    "1b plain": Case(LLAMA_1B, 2, 4096, {}, plain=True),
    "gpt2": case(GPT_2, 32, 1024),
    "qwen3 x 2": case(QWEN3_30B | {"layers": 2, "moe": NARROW}, 4, 4096),
    "qwen3 x 2 dense": case(QWEN3_30B | {"layers": 2, "d_ff": 6144}, 4, 4096),
    "mixtral x 1": case(MIXTRAL | {"layers": 1, "moe": WIDE}, 4, 4096),
    "mixtral x 1 dense": case(MIXTRAL | {"layers": 1, "d_ff": 28672}, 4, 4096),
}
