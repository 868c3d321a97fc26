"""Rates that hold at every size: what `optimizer.transfer` makes of each weight's beginning and of its steps.

    m = model.d_model / transfer.width          k = model.layers / transfer.depth

    weight                              begins times    steps times    gradients times
    embedding, positions                1               1              m
    matrices of a layer                 1 / sqrt m      1 / m          m k
      that lead into the stream         1 / (k sqrt m)  1 / (m k)      m
      that lead to experts' scores      1 / m           1 / m          k
    norms and biases of a layer         1               1              m k
    norm of the head                    1 / m           1 / m          1
    weight of the head                  1               1              m

By width this is muP for Adam (Yang et al. 2022, "Tensor Programs V", table 8, in the form with a multiplier at the
head; table 3, without, for experts' scores, whose number does not grow). By depth it is CompleteP with alpha 1 (Dey et
al. 2025, "Don't be lazy: CompleteP enables compute-efficient deep transformers", table 1; m there m_N, k there m_L):

    table 1                                   here
    hidden init. var. / m_N                   begins times 1 / sqrt m
    hidden LR / m_N, its WD times m_N         steps times 1 / m, and decoupled decay, rate x weight_decay, is as it was
    LRs times m_L^(alpha - 1)                 1
    residual branches times m_L^-alpha        weights that lead into the stream, or their `post_norms`, hold 1 / k
    unembedding forward / m_N                 the norm of the head holds 1 / m
    eps / m_N, hidden ones / (m_N m_L^alpha)  gradients times m, and times m k (equation 40)

No factor stands in the model, so that a file of weights says all. A step of Adam is then as much smaller as the weight
is, and its gradient as much larger. Gradients are multiplied for `optimizer.eps` alone, beside which they would shrink.
Table 8's scores are divided by the heads' width and not by its root: where heads are wider than `transfer.head_dim`,
queries hold that factor. The widths of MLPs and experts are taken to grow as the model's does.

Without JAX.
"""

from dataclasses import dataclass
from typing import Any

from meshtrain.config import Config
from meshtrain.config.model import ModelConfig

SCORES = ("routes", "one")  # axes of outputs whose number does not grow with the width


@dataclass(frozen=True)
class TransferFactors:
    """The factors of the values that a weight begins with, of its steps, and of its gradients."""

    begin: float = 1.0
    step: float = 1.0
    gradient: float = 1.0


def factors(config: Config, weight: Any) -> TransferFactors:
    """Returns the factors of a weight, a `Weight` or a `Placed`."""
    model = config.model
    transfer = config.optimizer.transfer
    width = model.d_model / (transfer.width or model.d_model)
    depth = model.layers / (transfer.depth or model.layers)
    if not weight.stacked:
        return _outside(model, weight, width)
    scaled = _scaled(model, transfer.head_dim, weight, depth)
    if not weight.decayed:
        return TransferFactors(scaled, scaled, width * depth * scaled)
    if weight.axes[-1] in SCORES:
        return TransferFactors(scaled / width, scaled / width, depth * scaled)
    begin = scaled * width**-0.5
    # The table has its beginning for as many layers as there are.
    begin *= depth**0.5 if weight.axes[-1] == "embed" else 1.0
    return TransferFactors(begin, scaled / width, width * depth * scaled)


def _outside(model: ModelConfig, weight: Any, width: float) -> TransferFactors:
    """Returns the factors of a weight that is of no layer."""
    embedding = width**-0.5 if model.scaled_embedding else 1.0
    scaled = 1.0
    if weight.name.startswith("embedding."):
        scaled = embedding
    elif weight.name.startswith("head.norm."):
        # A head that is the embedding has the factor of that already.
        scaled = 1 / width / (embedding if model.tied_head else 1.0)
    elif not weight.decayed:
        return TransferFactors()
    return TransferFactors(scaled, scaled, width * scaled)


def _scaled(model: ModelConfig, head_dim: int, weight: Any, depth: float) -> float:
    """Returns the factor of a branch, or of scores, that a weight of a layer holds."""
    if is_added(model, weight):
        return 1 / depth
    name = weight.name.partition(".")[2]
    queries = (
        ("attention.q_norm.scale",)
        if model.qk_norm
        else ("attention.q", "attention.q_bias")
    )
    if name in queries:
        return ((head_dim or model.head_dim) / model.head_dim) ** 0.5
    return 1.0


def is_added(model: ModelConfig, weight: Any) -> bool:
    """Returns whether a weight of a layer is the last before its branch is added to the stream."""
    if model.post_norms:
        return "_post_norm." in weight.name
    module = weight.name.rpartition(".")[0]
    return bool(weight.axes[-1] == "embed" and not module.endswith("norm"))


def begun(config: Config, weight: Any, values: Any) -> Any:
    """Returns the values that a weight begins with, from those of the table."""
    begin = factors(config, weight).begin
    # A norm by 1 + scale.
    beyond = float(config.model.norm_plus_one and weight.name.endswith("norm.scale"))
    return values * begin + beyond * (begin - 1)
