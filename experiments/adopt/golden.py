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
import yaml
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil
from transformers.models.vit.modeling_vit import ViTPooler

from experiments import bench

WHERE = Path(__file__).resolve().parents[2] / "tests" / "adopt" / "golden"
LENGTH = 48
LABELS = ("cat", "dog", "bird", "fish", "fly", "frog", "newt")
# Tokens that a text begins with, and of the likeliest text after them
PROMPT, SAID = 16, 12


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
    known = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())["models"]
    made = {}
    for number, (name, (classes, sizes)) in enumerate(known.items()):
        model, config = (getattr(hf, each) for each in classes)
        made[name] = model(config(**sizes))
        if name == "gpt_oss":
            with_large_gates(made[name])
        for weight, buffer in made[name].named_buffers():
            if weight.endswith("e_score_correction_bias"):
                # so that a router chooses other experts than scores alone would
                if name == "glm4_moe":
                    buffer.normal_(std=0.3)
                else:
                    buffer.copy_(0.2 * torch.randn_like(buffer))
        # the first five are drawn before any of them is changed
        if number >= 4:
            yield from made.items()
            made = {}


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
