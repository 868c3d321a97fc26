"""Writes the small models of transformers that the tests hold ours against: tests/adopt/golden/NAME/ with their logits.

pip install -e '.[parity]' && python -m experiments.adopt.golden
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
import transformers as hf
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil
from transformers.models.vit.modeling_vit import ViTPooler

from experiments import bench

WHERE = Path(__file__).resolve().parents[2] / "tests" / "adopt" / "golden"
LENGTH = 48
LABELS = ("cat", "dog", "bird", "fish", "fly", "frog", "newt")
# Tokens that a text begins with, and of the likeliest text after them
PROMPT, SAID = 16, 12
SIZES = dict(
    hidden_size=16,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=24,
    vocab_size=45,
    max_position_embeddings=64,
    initializer_range=0.3,
    attn_implementation="eager",
    bos_token_id=1,
    eos_token_id=2,
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


def models() -> Iterator[tuple[str, Any]]:
    """By name; one after the other, so that a model added behind the others leaves their numbers as they are."""
    llama3 = dict(
        rope_type="llama3",
        rope_theta=500000.0,
        factor=4.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=16,
    )
    gpt2 = dict(
        n_embd=16,
        n_layer=3,
        n_head=4,
        vocab_size=45,
        n_positions=64,
        initializer_range=0.3,
    )
    gpt2 |= dict(bos_token_id=1, eos_token_id=2)
    yield from {
        "llama3": hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, rope_parameters=llama3)),
        "mistral": hf.MistralForCausalLM(hf.MistralConfig(**SIZES, sliding_window=10)),
        "qwen2": hf.Qwen2ForCausalLM(hf.Qwen2Config(**SIZES, tie_word_embeddings=True)),
        "qwen3": hf.Qwen3ForCausalLM(hf.Qwen3Config(**SIZES, head_dim=8)),
        "gpt2": hf.GPT2LMHeadModel(hf.GPT2Config(**gpt2, attn_implementation="eager")),
    }.items()
    gemma = dict(
        SIZES, head_dim=8, sliding_window=10, query_pre_attn_scalar=6, pad_token_id=None
    )
    ropes = dict(
        full_attention=dict(rope_type="linear", factor=8.0, rope_theta=1000000.0),
        sliding_attention=dict(rope_type="default", rope_theta=10000.0),
    )
    caps = dict(attn_logit_softcapping=2.0, final_logit_softcapping=3.0)
    yield "gemma2", hf.Gemma2ForCausalLM(hf.Gemma2Config(**gemma, **caps))
    yield (
        "gemma3",
        hf.Gemma3ForCausalLM(
            hf.Gemma3TextConfig(
                **gemma, sliding_window_pattern=2, rope_parameters=ropes
            )
        ),
    )
    yield (
        "mixtral",
        hf.MixtralForCausalLM(hf.MixtralConfig(**SIZES, num_local_experts=4)),
    )
    qwen3 = dict(
        head_dim=8,
        moe_intermediate_size=12,
        num_experts=8,
        num_experts_per_tok=3,
        norm_topk_prob=True,
    )
    yield "qwen3_moe", hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**SIZES, **qwen3))
    oss = dict(
        SIZES,
        num_local_experts=4,
        num_experts_per_tok=2,
        head_dim=8,
        sliding_window=10,
        pad_token_id=None,
    )
    yarn = dict(
        rope_type="yarn",
        rope_theta=150000.0,
        factor=4.0,
        original_max_position_embeddings=16,
        beta_fast=32.0,
        beta_slow=1.0,
        truncate=False,
    )
    yield (
        "olmoe",
        hf.OlmoeForCausalLM(
            hf.OlmoeConfig(
                **SIZES, num_experts=6, num_experts_per_tok=2, pad_token_id=None
            )
        ),
    )
    yield (
        "gpt_oss",
        with_large_gates(
            hf.GptOssForCausalLM(hf.GptOssConfig(**oss, rope_parameters=yarn))
        ),
    )
    glm = dict(
        head_dim=8,
        attention_bias=True,
        use_qk_norm=True,
        first_k_dense_replace=1,
        moe_intermediate_size=12,
        n_routed_experts=8,
        n_shared_experts=2,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
        num_mtp_layers=0,
        pad_token_id=None,
    )
    yield (
        "glm4_moe",
        with_biased_scores(hf.Glm4MoeForCausalLM(hf.Glm4MoeConfig(**SIZES, **glm))),
    )
    yield from hybrids()
    yield "deepseek_v3", deepseek()


def with_biased_scores(model: Any) -> Any:
    """The model with biases that choose other experts than scores alone."""
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(std=0.3)
    return model


def hybrids() -> Iterator[tuple[str, Any]]:
    """Layers of gated DeltaNet, and some of gated attention; the last has all kinds of layers with experts."""
    linear, full = "linear_attention", "full_attention"
    # where a head hardly finds anything its norm makes much of rounding: so with a large epsilon
    sizes = dict(SIZES, num_hidden_layers=4, head_dim=8, rms_norm_eps=1e-3)
    sizes |= dict(
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=8,
        linear_value_head_dim=6,
    )
    experts = dict(
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=12,
        shared_expert_intermediate_size=24,
    )
    rope = dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5)
    halves = dict(sizes, layer_types=[linear, full] * 2, rope_parameters=rope)
    yield "qwen3_next", hf.Qwen3NextForCausalLM(hf.Qwen3NextConfig(**sizes, **experts))
    yield "qwen3_5", hf.Qwen3_5ForCausalLM(hf.Qwen3_5TextConfig(**halves))
    of_experts = {
        name: value for name, value in halves.items() if name != "intermediate_size"
    }
    yield (
        "qwen3_5_moe",
        hf.Qwen3_5MoeForCausalLM(hf.Qwen3_5MoeTextConfig(**of_experts, **experts)),
    )


def deepseek() -> Any:
    """A model of a dense layer and two of experts in groups, whose router has biases."""
    yarn = dict(
        rope_type="yarn",
        rope_theta=10000.0,
        factor=4.0,
        original_max_position_embeddings=16,
        beta_fast=32.0,
        beta_slow=1.0,
        mscale=1.0,
        mscale_all_dim=0.8,
    )
    sizes = dict(
        SIZES,
        num_key_value_heads=4,
        q_lora_rank=10,
        kv_lora_rank=12,
        qk_nope_head_dim=6,
        qk_rope_head_dim=8,
        v_head_dim=5,
        n_routed_experts=8,
        n_group=4,
        topk_group=2,
        num_experts_per_tok=3,
        moe_intermediate_size=12,
        n_shared_experts=1,
        routed_scaling_factor=1.7,
        first_k_dense_replace=1,
        num_mtp_layers=0,
    )
    model = hf.DeepseekV3ForCausalLM(hf.DeepseekV3Config(**sizes, rope_parameters=yarn))
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.2 * torch.randn_like(buffer))
    return model


def main() -> None:
    bench.parser(__doc__).parse_args()
    torch.manual_seed(0)
    made = {}
    for name, model in models():
        made[name] = model
        randomise(model)
        # so small that the index is used
        model.eval().save_pretrained(WHERE / name, max_shard_size="8KB")
        (WHERE / name / "generation_config.json").unlink(missing_ok=True)
        tokens = np.random.default_rng(0).integers(0, 45, (2, LENGTH))
        with torch.no_grad():
            np.save(
                WHERE / name / "logits.npy", model(torch.tensor(tokens)).logits.numpy()
            )
        said = model.generate(
            torch.tensor(tokens[:, :PROMPT]),
            max_new_tokens=SAID,
            do_sample=False,
            eos_token_id=None,
        )
        np.save(
            WHERE / name / "generated.npy", said[:, PROMPT:].numpy().astype(np.int32)
        )
        print(
            name, sum(file.stat().st_size for file in (WHERE / name).iterdir()), "bytes"
        )
    write_vit(WHERE / "vit")
    torch.manual_seed(0)
    tune(made["llama3"], WHERE / "llama3_lora")
    for name, settings in ADAPTERS.items():
        adapt(made[name], WHERE / f"{name}_lora", **settings)


def write_vit(to: Path) -> None:
    """A model of images of odd sizes, the images [3, 15, 15, 3] as pixels.npy, its preprocessor and its logits.

    Its file has a pooler too, as those of ViTModel have: its class of images never reads it.
    """
    torch.manual_seed(0)
    config = hf.ViTConfig(
        hidden_size=20,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=24,
        image_size=15,
        patch_size=5,
        initializer_range=0.3,
        id2label=dict(enumerate(LABELS)),
        label2id={label: i for i, label in enumerate(LABELS)},
        attn_implementation="eager",
    )
    model = hf.ViTForImageClassification(config)
    model.vit.pooler = ViTPooler(config)
    randomise(model)
    model.eval().save_pretrained(to, max_shard_size="8KB")
    mean, std = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
    processor = ViTImageProcessorPil(
        size={"height": 15, "width": 15}, image_mean=mean, image_std=std
    )
    processor.save_pretrained(to)
    pixels = np.random.default_rng(0).integers(0, 256, (3, 15, 15, 3), np.uint8)
    read = processor(
        list(pixels), input_data_format="channels_last", return_tensors="pt"
    )["pixel_values"]
    np.save(to / "pixels.npy", pixels)
    with torch.no_grad():
        np.save(to / "logits.npy", model(read).logits.numpy())


ADAPTERS = {
    "qwen3": dict(
        r=4,
        lora_alpha=6,
        use_rslora=True,
        target_modules=["q_proj", "v_proj", "down_proj"],
    ),
    "gpt2": dict(r=4, lora_alpha=6, target_modules=["c_attn", "c_proj"]),
}


def adapt(model: Any, to: Path, **settings: Any) -> None:
    """An adapter of random numbers, and the logits with it."""
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(task_type="CAUSAL_LM", **settings)
    ).eval()
    # else the directory that it was made in
    adapted.peft_config["default"].base_model_name_or_path = to.name.partition("_")[0]
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.3)
        adapted.save_pretrained(to)
        (to / "README.md").unlink(missing_ok=True)
        tokens = np.random.default_rng(0).integers(0, 45, (2, LENGTH))
        np.save(to / "logits.npy", adapted(torch.tensor(tokens)).logits.numpy())
    print(to.name, sum(file.stat().st_size for file in to.iterdir()), "bytes")


def tune(model: Any, to: Path) -> None:
    """Five steps of PEFT's LoRA: the adapter before and after them, and their losses, on tokens that the test draws
    likewise.
    """
    config = peft.LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
        base_model_name_or_path="llama3",
    )
    tuned = peft.get_peft_model(model, config)
    # what is at zero would hide a mistake in A for a step
    for name, parameter in tuned.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    tuned.save_pretrained(to / "before")
    optimizer = torch.optim.AdamW(
        tuned.parameters(), lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1
    )
    losses = []
    for step in range(5):
        tokens = torch.tensor(
            np.random.default_rng(step).integers(0, 45, (4, LENGTH + 1))
        )
        logits = tuned(tokens[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(
            logits.reshape(-1, 45), tokens[:, 1:].reshape(-1)
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    tuned.save_pretrained(to / "after")
    np.save(to / "losses.npy", np.array(losses))
    for directory in ("before", "after"):
        (to / directory / "README.md").unlink(missing_ok=True)
    print("llama3_lora", losses)


if __name__ == "__main__":
    main()
