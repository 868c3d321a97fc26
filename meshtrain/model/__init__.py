"""The model, on whatever shard of the weights a device has.

    tokens [B, T] ─► Embedding ─► Block x layers ─► Head ─► logits [B, T, V] ─► loss [B, T]
    patches [B, N, P] ─► PatchEmbedding ─► likewise ─► Head ─► logits [B, 1, V] ─► loss [B, 1]

    Block     x ─┬─ norm ─ attention ─ + ─┬─ norm ─ MLP ─ + ─►          enter after each norm, leave before each sum
                 └─────────────────────┘  └───────────────┘

The model knows of no mesh. It calls named places, `meshtrain.model.collectives`, where devices that share a layer must
meet; on one device these do nothing, and `meshtrain.parallel.tensor` fills them in. One decoder serves all families,
which differ by options only (`meshtrain.families`).

- `meshtrain.model.weights`: every weight: its name, axes, shape and first value. Without JAX: planner and checkpoints
  read it too.
- `meshtrain.model.decoder`, `meshtrain.model.layers`: the drawing above, in Flax NNX.
- `meshtrain.model.rope`: rotary positions, and what each layer must know of the sequences.
- `meshtrain.model.attention`, `meshtrain.model.kernels`: attention, and which kernel is taken where.
- `meshtrain.model.fused`, `meshtrain.model.splash`: attention's kernels of our own for GPUs, and of JAX for TPUs.
- `meshtrain.model.products`: products with weights, and LoRA's beside them.
- `meshtrain.model.loss`: cross-entropy where no device has all the logits. And one loss for each pair of answers (DPO).
- `meshtrain.model.dropout`: masks that follow from what a value is, not from where it lies.
- `meshtrain.model.hooks`: block, attention and loss as functions of your own; `hook_checks`: what is looked at in them.

A block is Vaswani et al. 2017 ("Attention is all you need", section 3) with its norms first; each part names its own
paper. The choices that make the layers quick on a CPU were found with `experiments/bench_layouts.py`, see "Layouts" in
`experiments/README.md`.
"""
