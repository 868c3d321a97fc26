"""Weights that others have trained: Hugging Face directories read straight onto a mesh.

    config.json ──theirs──► section model          names and shapes ──mapping──► boxes of our weights
    safetensors ──files───► boxes of tensors       a box a device and layer ──loading──► live masters

    model = mt.read_model("Qwen3-0.6B/")            logits, on any mesh (mesh=...)
    model: {weights: Qwen3-0.6B/}                   a run that begins with them
    checkpoint: {resume: OUT}                       likewise, of what `adopt import` has made of them

Families: Llama 2 and 3, Mistral, Qwen 2 and 3, Gemma 2 and 3 (text), GPT-2; of images ViT. What a config.json asks for that is not computed here is refused by name.

- `meshtrain.config.theirs`: their config; `meshtrain.adopt.theirs`: ours as theirs. `meshtrain.adopt.mapping`: their names, and how the
  numbers lie. None imports JAX.
- `meshtrain.adopt.files`: what is in a directory. `meshtrain.adopt.loading`: onto the devices. `meshtrain.adopt.importing`: a checkpoint.
- `meshtrain.adopt.exporting`: whatever has weights, merged or not; `meshtrain.adopt.exportable`: what their classes hold of it;
  `meshtrain.adopt.writing`, `meshtrain.adopt.aside`: whole or not there; `meshtrain.adopt.beside`: tokenizers and what else goes with it;
  `meshtrain.adopt.preprocessor`: how pixels become what a model of images reads.
- `meshtrain.adopt.peft`, `meshtrain.adopt.adapters`: LoRA's adapters in PEFT's files, written and read.
- `meshtrain.adopt.configs`: configs of LLaMA-Factory and DeepSpeed as ours, a row a key.

Measured: `python -m experiments.adopt.parity`, logits within 3e-5 of transformers and gradients within 1e-5, on eleven tiny models.
"""
