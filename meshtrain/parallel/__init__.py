"""How the model is spread over the mesh: tensor, ZeRO and pipeline parallelism."""
