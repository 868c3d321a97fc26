"""Images with a class each, cut into patches: the same global batches on any mesh.

What row r of batch k holds is a function of the seed, k and r alone: which image, how it is changed, and what it is mixed with. So a
run goes on with any number of processes as it would have gone on with its own.

    folders, arrays, digits ──ImageSource──► one image, uint8 [H, W, C] ──crop, flip, policy, shift──► [S, S, C]
                                                                                                          │ rows: a batch's
    patches float32 [B, N, P], labels int32 [B, 1] ◄──cut── mixup, cutmix with the row beside it ◄─── normalised
             (mixed: labels_b, mix)

- `meshtrain.data.images.opened`: `open_images`, from a config to `ImageBatches`. `meshtrain.data.images.rows`: the rows of an epoch.
- `meshtrain.data.images.source`: what a source is. `meshtrain.data.images.folders` and its `meshtrain.data.images.index`,
  `meshtrain.data.images.arrays`, `meshtrain.data.images.digits`, `meshtrain.data.images.synthetic`: those that there are.
- `meshtrain.data.images.pixels`: channels, sizes, patches. `meshtrain.data.images.pillow`: the library, where it is needed.
- `meshtrain.data.images.augment`: what is done to one image. `meshtrain.data.images.operations`, `meshtrain.data.images.policies`:
  RandAugment, AutoAugment. `meshtrain.data.images.mixing`: mixup, cutmix.
"""
