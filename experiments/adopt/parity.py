"""Our logits, loss and gradients beside those of transformers, float32, on random tiny models of every family, of
images too.

    pip install -e '.[parity]' && python -m experiments.adopt.parity

Norms and biases are random too: at ones and zeros a mapping that drops them would pass. Goal: logits within 1e-4,
gradients within 1e-3 of each weight's largest.
"""

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers as hf
from flax import nnx
from safetensors.numpy import load_file

import meshtrain as mt
from experiments import bench
from meshtrain.config import Config, load, replaced
from meshtrain.config.model import ModelConfig, positions_of
from meshtrain.hf.mapping import full_box, layers, mappings
from meshtrain.hf_families import model_section
from meshtrain.inputs import LABELS, PATCHES, TOKENS, WEIGHTS
from meshtrain.model.decoder import Decoder

WIDTH, LAYERS, HEADS, GROUPS, HIDDEN, WORDS = 64, 3, 4, 2, 96, 131
LENGTH = 96
LOGITS, GRADIENTS = 1e-4, 1e-3  # goals
# Compared on 2 x 2 x 2 devices too
ON_MESH = ("ViT", "Mixtral", "Qwen3-MoE", "OLMoE", "gpt-oss")
COMMON: dict[str, Any] = dict(
    hidden_size=WIDTH,
    num_hidden_layers=LAYERS,
    num_attention_heads=HEADS,
    num_key_value_heads=GROUPS,
    intermediate_size=HIDDEN,
    vocab_size=WORDS,
    max_position_embeddings=4096,
    attn_implementation="eager",
    initializer_range=0.2,
)


def models() -> Iterator[tuple[str, Any]]:
    """Tiny models of transformers, by name."""
    llama3 = dict(
        rope_type="llama3",
        rope_theta=500000.0,
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=32,
    )
    yarn = dict(
        rope_type="yarn",
        rope_theta=10000.0,
        factor=4.0,
        original_max_position_embeddings=32,
    )
    yield "Llama 2", hf.LlamaForCausalLM(hf.LlamaConfig(**COMMON))
    yield (
        "Llama 3.1, 3 x its length",
        hf.LlamaForCausalLM(hf.LlamaConfig(**COMMON, rope_parameters=llama3)),
    )
    yield (
        "Llama, YaRN, 3 x its length",
        hf.LlamaForCausalLM(hf.LlamaConfig(**COMMON, rope_parameters=yarn)),
    )
    yield (
        "Mistral, window 20 of 96",
        hf.MistralForCausalLM(hf.MistralConfig(**COMMON, sliding_window=20)),
    )
    yield (
        "Qwen2.5, tied",
        hf.Qwen2ForCausalLM(hf.Qwen2Config(**COMMON, tie_word_embeddings=True)),
    )
    yield (
        "Qwen3, heads of 32",
        hf.Qwen3ForCausalLM(hf.Qwen3Config(**COMMON, head_dim=32)),
    )
    # its own padding token would have an embedding of zeros, and no gradient
    gemma = dict(
        head_dim=24,
        num_hidden_layers=7,
        sliding_window=20,
        query_pre_attn_scalar=40,
        pad_token_id=None,
    )
    linear = dict(
        full_attention=dict(rope_type="linear", factor=8.0, rope_theta=1000000.0),
        sliding_attention=dict(rope_type="default", rope_theta=10000.0),
    )
    # caps so low that they bend scores and logits of these sizes
    caps = dict(attn_logit_softcapping=2.0, final_logit_softcapping=3.0)
    yield (
        "Gemma 2, window 20 of 96",
        hf.Gemma2ForCausalLM(hf.Gemma2Config(**COMMON | gemma | caps)),
    )
    yield (
        "Gemma 3, window 20 of 96",
        hf.Gemma3ForCausalLM(
            hf.Gemma3TextConfig(**COMMON | gemma, rope_parameters=linear)
        ),
    )
    experts = dict(num_experts=8, num_experts_per_tok=3)
    yield (
        "Mixtral",
        hf.MixtralForCausalLM(hf.MixtralConfig(**COMMON, num_local_experts=4)),
    )
    qwen3 = dict(head_dim=32, moe_intermediate_size=48, norm_topk_prob=True)
    yield (
        "Qwen3-MoE",
        hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**COMMON, **experts, **qwen3)),
    )
    yield (
        "OLMoE",
        hf.OlmoeForCausalLM(hf.OlmoeConfig(**COMMON, **experts, pad_token_id=None)),
    )
    oss = dict(
        num_local_experts=8,
        num_experts_per_tok=3,
        head_dim=32,
        sliding_window=20,
        pad_token_id=None,
    )
    yield (
        "gpt-oss, window 20 of 96",
        with_large_gates(hf.GptOssForCausalLM(hf.GptOssConfig(**COMMON | oss))),
    )
    gpt2 = dict(
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=HEADS,
        vocab_size=WORDS,
        n_positions=128,
        initializer_range=0.2,
    )
    none = dict(attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)
    yield (
        "GPT-2",
        hf.GPT2LMHeadModel(hf.GPT2Config(**gpt2, **none, attn_implementation="eager")),
    )
    vit = dict(
        hidden_size=60,
        num_hidden_layers=LAYERS,
        num_attention_heads=6,
        intermediate_size=95,
        initializer_range=0.2,
        num_labels=11,
        attn_implementation="eager",
    )
    yield (
        "ViT, 9 patches of 5 x 5",
        hf.ViTForImageClassification(hf.ViTConfig(**vit, image_size=15, patch_size=5)),
    )
    yield (
        "ViT, grey, no bias of q, k, v",
        hf.ViTForImageClassification(
            hf.ViTConfig(
                **vit, image_size=21, patch_size=3, num_channels=1, qkv_bias=False
            )
        ),
    )


def with_large_gates(model: Any) -> Any:
    """gpt-oss with gates beyond the limit that it keeps them within."""
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.experts.gate_up_proj *= 4
    return model


def randomise(model: Any) -> None:
    """Norms and biases as well."""
    by_one = ("gemma", "qwen3_next", "qwen3_5")
    plus_one = any(family in model.config.model_type for family in by_one)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # of experts they are matrices
            if parameter.ndim == 1 or name.endswith("_bias"):
                alone = not plus_one or name.endswith("linear_attn.norm.weight")
                middle = 1.0 if name.endswith("weight") and alone else 0.0
                parameter.copy_(middle + 0.3 * torch.randn_like(parameter))


class InMemory:
    """Tensors in the place of `meshtrain.hf.hf_directory.TensorFiles`."""

    def __init__(self, tensors: dict[str, np.ndarray]) -> None:
        self.tensors = tensors

    def read(self, name: str, box: tuple[slice, ...]) -> np.ndarray:
        return self.tensors[name][box]


def ours(model: ModelConfig, theirs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Their tensors as our weights, by name."""
    found, used, files = {}, set(), InMemory(theirs)
    for mapping in mappings(model).values():
        weight, box, each = mapping.weight, full_box(mapping.weight), []
        for layer in layers(weight):
            for name in mapping.tensors(layer):
                used.add(name)
                assert theirs[name].shape == mapping.shape(), (
                    name,
                    theirs[name].shape,
                    mapping.shape(),
                )
            each.append(mapping.read(files, layer, box))
        found[weight.name] = np.stack(each) if weight.stacked else each[0]
    left = set(theirs) - used - ({"lm_head.weight"} if model.tied_head else set())
    assert not left, left
    return found


def tree(found: dict[str, np.ndarray]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name, array in found.items():
        *path, last = name.split(".")
        here = made
        for word in path:
            here = here.setdefault(word, {})
        here[last] = jnp.asarray(array)
    return made


def numbers(model: Any, gradients: bool = False) -> dict[str, np.ndarray]:
    """By their names in files, which in memory may be others."""
    parameters = list(model.parameters())
    held = [p.data for p in parameters]
    with tempfile.TemporaryDirectory() as directory:
        for p in parameters:
            p.data = p.grad if gradients else p.data
        model.save_pretrained(directory)
        for p, data in zip(parameters, held, strict=True):
            p.data = data
        return load_file(Path(directory) / "model.safetensors")


def of_text(theirs: Any) -> tuple[np.ndarray, np.ndarray, Any]:
    """What our model reads, the labels of its first logits, and what theirs makes of them."""
    tokens = np.random.default_rng(0).integers(0, WORDS, (2, LENGTH))
    return (
        tokens,
        tokens[:, 1:],
        theirs(torch.tensor(tokens), labels=torch.tensor(tokens)),
    )


def of_images(theirs: Any) -> tuple[np.ndarray, np.ndarray, Any]:
    """Likewise of pixels, which theirs reads as [B, C, H, W]."""
    side, patch, channels = (
        getattr(theirs.config, name)
        for name in ("image_size", "patch_size", "num_channels")
    )
    random = np.random.default_rng(0)
    pixels = random.standard_normal(
        (4, side // patch, patch, side // patch, patch, channels), np.float32
    )
    labels = random.integers(0, theirs.config.num_labels, (4, 1))
    patches = pixels.transpose(0, 1, 3, 2, 4, 5).reshape(4, (side // patch) ** 2, -1)
    image = pixels.reshape(4, side, side, channels).transpose(0, 3, 1, 2)
    return (
        patches,
        labels,
        theirs(torch.tensor(image), labels=torch.tensor(labels[:, 0])),
    )


def compared(theirs: Any, meshed: bool) -> tuple[float, float, float, str]:
    """Largest difference of logits, difference of losses, worst relative gradient and its weight."""
    section = model_section(
        theirs.config.to_dict() | {"architectures": [type(theirs).__name__]},
        "config.json",
    )
    of_it = (
        {"data": {"source": "synthetic"}}
        if section["family"] == "vit"
        else {"train": {"sequence_length": LENGTH}}
    )
    config = load({"model": section, **of_it})
    given, labels, result = (of_images if positions_of(config.model) else of_text)(
        theirs
    )
    theirs.zero_grad()
    result.loss.backward()
    params = tree(ours(config.model, numbers(theirs)))
    value, logits, found = (on_mesh if meshed else on_one_device)(
        config, params, given, labels
    )
    right = tree(ours(config.model, numbers(theirs, gradients=True)))
    worst, where = 0.0, ""
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(right), strict=True
    ):
        off = float(jnp.abs(a - b).max() / jnp.abs(b).max())
        # a key's bias has no gradient in theory: noise over noise; a router's load counts
        if off > worst and path[-1].key not in ("k_bias", "load"):
            worst, where = off, ".".join(p.key for p in path)
    off = np.abs(
        np.asarray(logits).reshape(result.logits.shape) - result.logits.detach().numpy()
    ).max()
    return float(off), abs(float(value) - result.loss.item()), worst, where


def on_one_device(
    config: Config, params: Any, given: np.ndarray, labels: np.ndarray
) -> tuple[Any, Any, Any]:
    """Loss, logits and gradients of our decoder by itself."""
    decoder = nnx.eval_shape(lambda: Decoder(config.model, nnx.Rngs(0)))
    graph, _ = nnx.split(decoder)

    def loss(params: Any) -> tuple[jax.Array, jax.Array]:
        state = nnx.state(decoder)
        nnx.replace_by_pure_dict(state, params)
        logits = nnx.merge(graph, state)(jnp.asarray(given))
        log_p = jax.nn.log_softmax(logits[:, : labels.shape[1]])
        return -jnp.mean(
            jnp.take_along_axis(log_p, jnp.asarray(labels)[..., None], -1)
        ), logits

    (value, logits), found = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    return value, logits, found


def on_mesh(
    config: Config, params: Any, given: np.ndarray, labels: np.ndarray
) -> tuple[Any, Any, Any]:
    """The same by the train step's own gradients, on 2 x 2 x 2 devices."""
    sizes = {"data": 2, "tensor": 2, "pipeline": 2}
    # rows for two microbatches on two data ranks; twice the same have the same mean
    repeats = 4 // len(given)
    rows = {"global_batch_size": repeats * len(given)}
    program = mt.Program(
        replaced(config, mesh=sizes, train=rows, parallel={"microbatches": 2})
    )
    labels, name = (
        labels.astype(np.int32),
        PATCHES if positions_of(config.model) else TOKENS,
    )
    batch = {name: given, LABELS: labels}
    if name == TOKENS:
        weights = np.ones(given.shape, np.float32)
        weights[:, -1] = 0  # nothing follows the last one
        batch = {
            TOKENS: given.astype(np.int32),
            LABELS: np.pad(labels, ((0, 0), (0, 1))),
            WEIGHTS: weights,
        }
    batch = program.place(
        {name: np.concatenate([x] * repeats) for name, x in batch.items()}
    )
    live = jax.jit(program.layout.live, out_shardings=program.state_shardings.params)(
        params
    )
    loss, gradients = jax.jit(program.gradients)(
        live, batch, jnp.zeros((), jnp.int32), jnp.ones(())
    )
    logits = program.logits(live, batch[name])[: len(given)]
    return (
        loss,
        logits,
        jax.tree.map(np.asarray, jax.jit(program.layout.canonical)(gradients)),
    )


def main() -> int:
    bench.parser(__doc__).parse_args()
    mt.fake_devices(8)
    hf.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    good = True
    print(
        f"{'transformers ' + hf.__version__:30}{'logits':>10}{'loss':>10}{'gradients':>11}  worst at"
    )
    for name, model in models():
        randomise(model)
        for meshed in (False, True) if name.startswith(ON_MESH) else (False,):
            logits, loss, gradient, where = compared(model.eval(), meshed)
            good &= logits <= LOGITS and gradient <= GRADIENTS
            told = "  on 2 x 2 x 2" if meshed else name
            print(
                f"{told:30}{logits:10.1e}{loss:10.1e}{gradient:11.1e}  {where}",
                flush=True,
            )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
