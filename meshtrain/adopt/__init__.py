"""Weights that others have trained: Hugging Face directories read straight onto a mesh, and ours written as such.

    model = mt.read_model("Qwen3-0.6B/")            logits, on any mesh (mesh=...)
    model: {weights: Qwen3-0.6B/}                   a run that begins with them
    checkpoint: {resume: OUT}                       likewise, of what `adopt import` has made of them

Families: Llama 2 and 3, Mistral, Qwen 2 and 3, Gemma 2 and 3 (text), GPT-2; of images ViT. A config.json that asks
for more than is computed here is refused by name.

- `meshtrain.hf_families`, `meshtrain.hf`: their classes, names and files, and how they are read onto the devices.
- `meshtrain.adopt.importing`: a checkpoint. `meshtrain.adopt.exporting`: whatever has weights, merged or not.
- `meshtrain.adopt.extra_files`: tokenizers and what else goes with weights; directories that are complete or not there.
- `meshtrain.adopt.configs`: configs of LLaMA-Factory and DeepSpeed as ours, a row a key.

Held by `tests/hf/test_loading.py`: logits of tiny models are within 1e-4 of those that transformers wrote.
"""
