"""meshtrain: train transformers on a 3-D device mesh (data x tensor x pipeline) in JAX and Flax."""
