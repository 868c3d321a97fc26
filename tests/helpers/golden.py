"""Small models that transformers has written with their logits, on our meshes; `experiments/adopt/golden.py` made
them.
"""

from pathlib import Path

from meshtrain.config import load
from meshtrain.hf.hf_directory import TensorFiles
from meshtrain.hf_families import CONFIG, model_section, read_json
from meshtrain.mesh import make_mesh
from meshtrain.step import Program

GOLDEN = Path(__file__).parents[1] / "adopt" / "golden"
FAMILIES = (
    "gemma2", "gemma3", "gpt2", "llama3", "mistral", "qwen2", "qwen3", "mixtral", "olmoe", "qwen3_moe", "gpt_oss",
    "glm4_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe",
    "deepseek_v3",
)  # fmt: skip
MESHES = {
    "one": ((1, 1, 1), {}),
    "2x2x2": ((2, 2, 2), {"zero_stage": 3, "microbatches": 2}),
    "uneven stages": ((1, 2, 2), {"layer_split": (2, 1)}),
    "padded data": ((4, 1, 2), {"zero_stage": 1}),
}


def adopted(directory: Path, mesh: str = "one"):
    """The program of a directory's model on a mesh, and its files."""
    (data, tensor, pipeline), parallel = MESHES[mesh]
    model = model_section(read_json(directory / CONFIG), CONFIG)
    if "layer_split" in parallel:
        parallel = parallel | {"layer_split": (model["layers"] - 1, 1)}
    config = load(
        {
            "model": model,
            "mesh": {"data": data, "tensor": tensor, "pipeline": pipeline},
            "parallel": parallel,
            "train": {"global_batch_size": 8, "sequence_length": 48},
        }
    )
    return Program(config, make_mesh(config)), TensorFiles(directory)
