"""The embedding of images: patches to the residual stream, a linear layer of their numbers (Dosovitskiy et al. 2021, equation 1).

    image [H, W, C] ─cut─► patches [N, P] ─x W─ + bias ─┐
                                                         ├─ + positions ─►  [T, D]
                                   class token [1, D] ───┘                  T = N + 1, or N where the head takes the mean

W [P, D] is cut along P as a vocabulary is along its ids: each rank multiplies the numbers of a patch whose rows it has, and the sums of
the ranks meet where those of looked-up tokens do. A convolution whose stride is its width is this product.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from meshtrain.compat import vary, varying
from meshtrain.config import ModelConfig
from meshtrain.model.collectives import Collectives
from meshtrain.model.dropout import EMBEDDING_SITE, NO_DROPOUT, Dropout
from meshtrain.model.layers import make_parameters
from meshtrain.model.products import linear


class PatchEmbedding(nnx.Module):
    """Linear embedding of patches, rows of its weight split as a vocabulary's; a class token and learned positions where they are."""

    patches: nnx.Param
    bias: nnx.Param
    class_token: nnx.Param | None = None
    positions: nnx.Param | None = None

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        make_parameters(self, "embedding", config, rngs)

    def __call__(
        self, patches_BNP: jax.Array, positions: jax.Array, collectives: Collectives, dropout: Dropout = NO_DROPOUT
    ) -> jax.Array:
        """The residual stream [B, T, D] (this rank's part of it) of patches of any floating dtype; computed in the weights'."""
        weight = self.patches[...]
        own = _own(patches_BNP, len(weight), collectives).astype(weight.dtype)
        own = vary(own, varying(weight))
        x = linear(own.reshape(-1, own.shape[-1]), weight).reshape(*own.shape[:2], -1)
        x = x + collectives.share_embedding(self.bias[...])
        if self.class_token is not None:
            token = collectives.share_embedding(self.class_token[...])
            x = jnp.concatenate([jnp.broadcast_to(token, (len(x), 1, x.shape[-1])), x], axis=1)
        if self.positions is not None:
            x = x + collectives.share_embedding(self.positions[...])[positions]
        x = collectives.leave_embedding(x)
        return dropout.at(EMBEDDING_SITE).stream(x, collectives.first_position(x.shape[1]))


def _own(patches_BNP: jax.Array, rows: int, collectives: Collectives) -> jax.Array:
    """Of each patch the numbers that this rank's `rows` of the weight are for; zeros where rows are padding."""
    padding = rows * collectives.vocabulary_ranks - patches_BNP.shape[-1]
    padded = jnp.pad(patches_BNP, ((0, 0), (0, 0), (0, padding))) if padding else patches_BNP
    return jax.lax.dynamic_slice_in_dim(padded, collectives.first_token_id(rows), rows, axis=-1)
