import pytest

from meshtrain.config import Config, load

LLAMA_8B = {
    "layers": 32,
    "d_model": 4096,
    "heads": 32,
    "kv_heads": 8,
    "d_ff": 14336,
    "vocab_size": 128256,
}


@pytest.fixture
def llama_8b():
    """A function (parallel keys, mesh, train) -> config of Llama-3 8B in bfloat16 on 16 devices."""

    def make(mesh=None, train=None, **parallel) -> Config:
        return load(
            {
                "model": LLAMA_8B,
                "mesh": mesh or {"data": 2, "tensor": 2, "pipeline": 4},
                "parallel": {"microbatches": 16} | parallel,
                "precision": {"compute": "bfloat16"},
                "train": {"global_batch_size": 64, "sequence_length": 8192}
                | (train or {}),
            }
        )

    return make
