"""Hugging Face directories: their weights straight onto a mesh, and LoRA's adapters of PEFT.

    config.json ──hf_families──► section model         names of tensors ──mapping──► boxes of our weights
    safetensors ──hf_directory─► boxes of tensors      a box a device and layer ──loading──► live fp32 master weights

- `meshtrain.hf_families`: what each of their model classes is: its config.json, its names. `meshtrain.hf.mapping`: how
  the numbers lie.
- `meshtrain.hf.hf_directory`: what is in a directory. `meshtrain.hf.loading`: onto the devices. `meshtrain.hf.peft`:
  adapters.

Commands, and what is written for others: `meshtrain.adopt`.
"""
