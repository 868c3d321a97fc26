"""Images with a class each, cut into patches: the same global batches on any mesh.

The content of row r of batch k is a function of the seed, k and r alone: which image, how it is changed, and what it is
mixed with. So a run goes on with any number of processes as it would have gone on with its own.

    folders, arrays, digits ──ImageSource──► one image, uint8 [H, W, C] ──crop, flip, policy, shift──► [S, S, C]
                                                                                        rows of a batch │
    patches float32 [B, N, P], labels int32 [B, 1] ◄──cut── mixup, cutmix with the row beside it ◄─── normalized
             (mixed: labels_b, mix)

- `meshtrain.data.images.image_batches`: `open_images`, from a config to `ImageBatches`, and the rows of an epoch.
- `meshtrain.data.images.image_sources`: arrays, digits and random images. `meshtrain.data.images.folders`: a folder for
  each class.
- `meshtrain.data.images.pixels`: channels, sizes, patches, and Pillow.
- `meshtrain.data.images.augment`: what is done to one image, mixup, cutmix. `meshtrain.data.images.policies`:
  RandAugment, AutoAugment.
"""
