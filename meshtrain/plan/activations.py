"""Activations of a microbatch in one layer: those kept for its backward, and those alive in it for a moment.

Activations follow Korthikanti et al. 2022 (section 4), with flash attention, which keeps no scores (Dao et al. 2022).
"""

import functools
import math
from dataclasses import replace
from typing import NamedTuple

from meshtrain.config import Config, ModelConfig
from meshtrain.config.follow import drops
from meshtrain.config.model import MlaConfig
from meshtrain.config.stacks import LINEAR, kind_of
from meshtrain.families import FAMILIES
from meshtrain.model.kernels import Kernel, attention_kernel, block_size
from meshtrain.model.weights import adapted, all_weights, is_trained
from meshtrain.parallel.placement import local_kv_heads
from meshtrain.plan import experts, float8, shapes
from meshtrain.plan.by_stack import averaged, stack_configs
from meshtrain.plan.shapes import compute_size

FLOAT32 = 4  # bytes


class Widths(NamedTuple):
    """Elements a token of one layer's activations on one device."""

    stream: float  # residual stream: 1/tensor of it with sequence parallelism
    full: int  # the same as the products take it
    heads: int
    query: int
    own: int  # keys as the product gives them, and values
    # As attention takes them: replicated ones are spread out to the query heads
    key: int
    hidden: int
    matrices: int  # products into `hidden`
    normed: int  # queries and keys before their own norms, where they have them
    behind: float  # what a norm behind attention or the MLP takes, where there is one
    value: int  # values as attention takes them
    out: int  # attention's output
    made: int  # what attention's first products give, by the name qkv
    products: int  # what all of its products into heads give
    latent: int = 0  # what products out of latents take
    gate: int = 0  # of attention's output, where it has one
    # Of linear attention, of a row: all of what is below `query` is then what `linear_widths` says
    state: int = 0


@functools.lru_cache(maxsize=4096)
def widths(
    model: ModelConfig, tensor: int, sequence_parallel: bool, gathered: int = 1
) -> Widths:
    """The widths of a model's layers, which are all alike, over `tensor` devices; `gathered`: of how many context ranks
    latent attention has the keys and values.
    """
    if kind_of(model) == LINEAR:
        return linear_widths(model, tensor, sequence_parallel)
    heads = model.heads // tensor
    own = local_kv_heads(model.kv_heads, tensor)
    k = model.head_dim
    groups = own if own * tensor == model.kv_heads else heads
    stream = model.d_model / (tensor if sequence_parallel else 1)
    normed = (heads + own) * k if model.qk_norm else 0
    gate = heads * k * FAMILIES[model.family].gated_attention
    attention = Widths(
        stream=stream,
        full=model.d_model,
        heads=heads,
        query=heads * k,
        own=own * k,
        key=gathered * groups * k,
        hidden=-(-model.d_ff // tensor),
        matrices=1 + FAMILIES[model.family].gated,
        normed=normed,
        behind=stream if model.post_norms else 0,
        value=gathered * groups * k,
        out=heads * k,
        made=heads * k + (own if normed else groups) * k + groups * k + gate,
        products=(heads + 2 * own) * k + gate,
        gate=gate,
    )
    if model.mla.kv_rank:
        return _latent_widths(attention, model.mla, gathered)
    return attention


def _latent_widths(attention: Widths, mla: MlaConfig, gathered: int) -> Widths:
    """The widths of latent attention, which has as many heads as `attention`."""
    heads = attention.heads
    values = heads * mla.value
    latent = mla.q_rank + gathered * mla.kv_rank
    down = mla.kv_rank + mla.rope + (mla.q_rank or attention.query)
    up = gathered * (heads * mla.nope + values) + (attention.query if mla.q_rank else 0)
    return attention._replace(
        normed=mla.q_rank + mla.kv_rank + latent,
        value=gathered * values,
        out=values,
        made=down + attention.gate,
        products=down + up + attention.gate,
        latent=latent,
    )


def linear_widths(model: ModelConfig, tensor: int, sequence_parallel: bool) -> Widths:
    """The widths of layers of linear attention: `query` is what the rule gives, `query` and twice `own` all
    projections, `key` half of them.
    """
    sizes = model.linear
    others = widths(replace(model, pattern=()), tensor, sequence_parallel)
    heads = sizes.value_heads // tensor
    values = heads * sizes.value_dim
    projected = (
        2 * (sizes.key_heads * sizes.key_dim // tensor + values) + heads * sizes.gates
    )
    latent = 2 * sizes.latent
    # what is made of latents is computed again
    made = projected - (values + heads * sizes.key_dim) * (latent > 0) + latent
    projected += latent
    return others._replace(
        heads=0,
        query=values,
        own=(projected - values) // 2,
        key=projected // 2,
        normed=0,
        value=projected // 2,
        out=values,
        made=made,
        products=projected,
        latent=latent,
        gate=0,
        state=heads * sizes.key_dim * sizes.value_dim,
    )


def _model_drops(config: Config) -> bool:
    return config.model.dropout > 0 and drops(config)


def kernel(config: Config, platform: str) -> Kernel:
    """Returns how the program computes attention on a platform."""
    model = config.model
    pieces = splits_kernel_calls(config)
    length = shapes.length(config) if pieces else config.train.sequence_length
    window = 0 < model.window < config.train.sequence_length
    dtype = config.precision.compute
    return attention_kernel(
        platform,
        dtype,
        max(model.head_dim, model.value_width),
        length,
        is_packed(config),
        _model_drops(config),
        model.score_cap > 0,
        pieces,
        window,
        config.optimizer.qk_clip > 0,
    )


def is_packed(config: Config) -> bool:
    """Returns whether attention keeps within the documents of a row."""
    return config.data.batching == "packed" or config.data.format == "pairs"


def makes_attention_again(config: Config) -> bool:
    """Returns whether the backward computes attention again."""
    parallel = config.parallel
    return parallel.remat != "none" and "attention" not in (
        *parallel.names_kept,
        *parallel.remat_offload,
    )


def gathered_ranks(config: Config) -> int:
    """Returns how many context ranks' keys and values latent attention makes of gathered latents."""
    gathers = (
        config.model.mla.kv_rank and config.parallel.context_strategy == "all_gather"
    )
    return config.mesh.context if gathers else 1


def splits_kernel_calls(config: Config) -> bool:
    """Returns whether attention's kernel is called for two chunks at a time, of a row in zigzag order (see
    `parallel.context`).
    """
    return config.mesh.context > 1 and config.parallel.context_strategy != "ulysses"


class Tuned(NamedTuple):
    """Counts of the activations kept for the gradients of a layer's weights."""

    # Of attention's and the MLP's products, the residual stream as they take it
    inputs: int = 2
    hidden: int = 1  # of the product out of the MLP
    ranks: int = 0  # columns of all products with LoRA's A
    # products whose adapters keep an input of their own: what was dropped of it, or rounded to float8
    apart: tuple[str, ...] = ()
    mask: int = 0  # bytes of an element that may go


ALL = Tuned()


def tuned(config: Config) -> Tuned:
    """Counts what a config's trained weights ask for: what is frozen and has no adapter asks for nothing (see
    `model.products.linear`).
    """
    model = config.model
    lora = config.lora
    trainable = config.train.trainable
    if not (lora.rank or trainable):
        return ALL
    names = {
        weight.name.split(".")[-1].partition("_lora_")[0]
        for weight in all_weights(model, lora)
        if weight.stacked and weight.decayed and is_trained(weight, lora, trainable)
    }
    given = adapted(model, lora)
    ranks = lora.rank * len(given)
    if given and lora.dropout:
        return Tuned(0, 0, ranks, given, 1)
    inputs = bool(names & {"q", "k", "v"}) + bool(names & {"gate", "up"})
    if given and config.precision.matmul == "float8":
        others = tuple(name for name in ("out", "down") if name in names)
        return Tuned(0, 0, ranks, others + ("",) * inputs)
    return Tuned(inputs, int("down" in names), ranks)


def apart_width(w: Widths, tuned: Tuned) -> float:
    """Elements a token of the inputs that adapters of a layer keep by themselves."""
    special = {"out": w.out, "down": w.hidden}
    return sum(special.get(name, w.full) for name in tuned.apart)


@functools.lru_cache(maxsize=65536)
def residuals(
    model: ModelConfig,
    tensor: int,
    sequence_parallel: bool,
    remat: str,
    names: tuple[str, ...],
    size: int,
    tuned: Tuned = ALL,
    given: float = 0.0,
    gathered: int = 1,
) -> float:
    """Bytes a token that one layer keeps for its backward: what `jax.vjp` of `model.decoder.Block` holds besides
    weights.

    Counts of [token, width] arrays: `tests/plan/test_memory.py` compares them with the traced model. `names` are those
    that remat: names keeps, `size` is of an element, `given` of one that is kept for a weight's gradient alone (0: the
    same), `gathered` as in `widths`.
    """
    w = widths(model, tensor, sequence_parallel, gathered)
    if remat == "full":
        return size * w.stream
    if remat in ("names", "selective"):
        return size * w.stream + sum(named(w, name, size) for name in names)
    # Layer input, attention's output (and the MLP's); up (and gate); q, k, v
    if remat == "dots":
        entered = w.full * (1 + model.post_norms)
        return size * (
            w.stream + entered + w.matrices * w.hidden + w.products + tuned.ranks
        )
    # twice: a norm's input, and its output, which the products take as it is or, with sequence parallelism, gather
    # again
    given = given or size
    stream = size * (2 * w.stream + 2 * w.behind) + given * tuned.inputs * w.stream
    # a byte for each element that may go
    dropped = 2 * w.stream if model.dropout else 0
    apart = (size + tuned.mask) * apart_width(w, tuned)
    # and of each query the log of its sum, in float32
    sums = 4 * w.heads
    products = (
        (tuned.hidden * given / size + w.matrices) * w.hidden
        + w.query
        + w.key
        + w.value
        + w.out
        + 2 * w.gate
        + w.normed
        + tuned.ranks
    )
    return stream + size * products + sums + dropped + apart


def named(w: Widths, name: str, size: int) -> float:
    """Bytes a token of an activation that remat: names can keep (see `model.layers`).

    Only a norm behind the MLP reads mlp_out again.
    """
    # a norm of its own takes keys before they are spread out
    return {
        "qkv": size * w.made,
        "attention": size * w.out + 4 * w.heads,
        "attention_out": size * w.stream,
        "dispatched": 0,
        "mlp_in": size * w.matrices * w.hidden,
        "mlp_hidden": size * w.hidden,
        "mlp_out": size * w.behind,
    }[name]


@averaged
def kept(config: Config, remat: str) -> float:
    """Bytes that one layer keeps of one microbatch on the device, under a remat mode."""
    return _bytes(config, remat, config.parallel.names_kept)


@averaged
def offloaded(config: Config) -> float:
    """Bytes that one layer sends to the host of one microbatch, and has back for its backward."""
    names = config.parallel.remat_offload
    if names:
        return _bytes(config, "names", names) - _bytes(config, "names", ())
    return 0.0


def _bytes(config: Config, remat: str, names: tuple[str, ...]) -> float:
    tensor = config.mesh.tensor
    split = config.parallel.sequence_parallel
    size = compute_size(config)
    idle_dropout = config.model.dropout > 0 and not drops(config)
    trained = replace(config.model, dropout=0.0) if idle_dropout else config.model
    held = residuals(
        trained,
        tensor,
        split,
        remat,
        names,
        size,
        tuned(config),
        float8.kept_size(config),
        gathered_ranks(config),
    )
    if (
        config.mesh.context > 1
        and config.parallel.context_strategy == "ulysses"
        and remat == "none"
    ):
        # the output in the order of the tokens too
        held += size * widths(config.model, tensor, split).out
    if remat == "none" or "attention" in names:
        held += _states(config) / shapes.tokens(config)
    of_experts = (
        experts.kept(config, remat, names, float8.kept_size(config))
        if config.model.moe.experts
        else 0.0
    )
    return shapes.tokens(config) * held + of_experts


def _states(config: Config) -> float:
    """Returns the bytes of the states before a microbatch's pieces of rows, of one layer of linear attention; before
    whole rows there are none.
    """
    if config.mesh.context == 1:
        return 0.0
    w = widths(config.model, config.mesh.tensor, config.parallel.sequence_parallel)
    return FLOAT32 * 2 * shapes.microbatch_rows(config) * w.state


@averaged
def weight_grad_residuals(config: Config) -> float:
    """Bytes that the input gradient of a layer and a microbatch leaves for the weight gradient
    (`parallel.pipeline.split_backward`): cotangents of what the products give, and where the layer was computed again
    what these were given too.
    """
    model = config.model
    tensor = config.mesh.tensor
    parallel = config.parallel
    w = widths(model, tensor, parallel.sequence_parallel, gathered_ranks(config))
    width: float = 2 * w.full + w.matrices * w.hidden + w.products
    if parallel.remat != "none":
        width += w.latent
    if parallel.remat == "dots":
        width += w.stream + w.out + FAMILIES[model.family].biases * w.hidden
        # what the norm behind the rule takes
        width += w.query * (w.state > 0)
    elif parallel.remat != "none":
        names = parallel.names_kept
        width += ("qkv" not in names) * w.full + (
            w.stream if "mlp_in" in names else w.full
        )
        if model.post_norms and "mlp_out" not in names:
            # what the norm behind the MLP takes is computed again before, from the hidden activations
            width += ("mlp_hidden" not in names) * w.hidden
        else:
            width += (
                ("mlp_in" not in names and "mlp_hidden" not in names)
                * w.matrices
                * w.hidden
            )
        # the product out of attention takes what a gate has made of it
        again = ("qkv" not in names or w.latent > 0) and (w.gate > 0 or w.state > 0)
        width += ("attention" not in names or again) * w.out
    # cotangents of the products with A
    width += tuned(config).ranks
    return compute_size(config) * shapes.tokens(config) * width


def work(config: Config, platform: str) -> float:
    """Bytes that one layer's backward has at hand when it is in the MLP: hidden activations and their cotangents, and
    the residual stream in the forms that the products and the attention want it in. Where attention runs in blocks also
    some of scores; if the layer is computed again its forward's beside its backward's, and with dropout what the random
    numbers are made of. Layers of several kinds count by the greatest.
    """
    return max(_work(one, platform) for _, one in stack_configs(config))


def _work(config: Config, platform: str) -> float:
    w = widths(config.model, config.mesh.tensor, config.parallel.sequence_parallel)
    tokens = shapes.tokens(config)
    rounded = compute_size(config)
    # CPUs multiply in float32, and round the hidden activations
    size = FLOAT32 if platform == "cpu" else rounded
    how = kernel(config, platform) if not w.state else "rule"
    # what is gathered is also copied, from [rank, sequence] to [sequence]
    copies = 6 if config.parallel.sequence_parallel else 4
    hidden = rounded * w.matrices * w.hidden
    mlp = 2 * hidden + size * (copies * w.full + 3 * w.stream + 3 * w.query)
    of_experts = (
        experts.transient_bytes(config, platform) if config.model.moe.experts else 0.0
    )
    scores = 0.0
    if how == "blocks":
        block = _block_of_scores(config, w)
        chosen = tuned(config)
        # what adapters drop from, with two words of random numbers for each element, which are drawn before
        drawn = chosen.mask * (size + 8) * apart_width(w, chosen)
        if config.parallel.remat == "none":
            # with dropout those of all calls, since their random numbers are drawn before
            blocks = (3 + 6 * _calls(config) if _model_drops(config) else 6) * block
            beside = 3 * block * (of_experts > 0)
            in_attention = max(blocks + 2 * size * w.full, drawn)
            return max(of_experts + tokens * (mlp + beside), tokens * in_attention)
        scores = _blocks_again(config) * block
        held = "mlp_in" in (*config.parallel.names_kept, *config.parallel.remat_offload)
        again = (not held) + (config.lora.rank > 0)
        mlp += hidden * again + scores + drawn
    if w.latent and not w.state:
        # all heads' and their cotangents, which blocks have in another order too
        heads = (2 + (how == "blocks")) * (w.query + w.key + w.value + w.out)
        mlp = max(mlp, size * (heads + 4 * w.full) + scores)
    # beside the rule its layer's projections, the stream as they take it, and its cotangent
    around = size * (w.products + 2 * w.full)
    across = _rule(config) + around if w.state else _across(config, w, size)
    # Under the messages of a ring XLA puts what the MLP leaves, the products that give its weights' gradients; with
    # tensor parallelism these are under the MLP's own messages.
    both = config.parallel.context_strategy == "ring" and config.mesh.tensor == 1
    return tokens * (mlp + across if both else max(mlp, across)) + of_experts


def _blocks_again(config: Config) -> float:
    """Returns how many blocks of scores are there where attention is computed again: with dropout those of all random
    numbers, which are drawn before, unless messages stand between.
    """
    if not _model_drops(config):
        return 3
    if splits_kernel_calls(config):
        return 4 + 3 * _calls(config)
    if config.mesh.tensor > 1:
        return 6
    return 14 if makes_attention_again(config) else 10


def _calls(config: Config) -> float:
    """Returns for how many whole blocks of scores an attention without remat draws random numbers: of a row the later
    blocks see more keys, and two chunks of a ring see each other.
    """
    if splits_kernel_calls(config):
        return 2 * config.mesh.context + 1
    length = config.train.sequence_length
    return (math.ceil(length / block_size(length)) + 1) / 2


def _block_of_scores(config: Config, w: Widths) -> float:
    """Bytes a token of the scores of one block."""
    pieces = splits_kernel_calls(config)
    length = shapes.length(config) // 2 if pieces else config.train.sequence_length
    return 4 * w.heads * min(length, block_size(length)) / (1 + pieces)


# What the rule's backward has at hand (`shapes.rule_numbers`), read off programs for a described H100, with chunks of
# 32 and 64, widths of 64 and 128.
AT_HAND = {
    "gated_delta": (3.4, 4.9, 4.0, 3.3),
    "kda": (30.0, 3.7, 1.6, 1.4),
    "mamba2": (1.7, 3.6, 2.0, 3.4),
}


def _rule(config: Config) -> float:
    """Bytes a token that the backward of linear attention has at hand, float32; on several context ranks the columns
    of its pieces' maps beside those of the states.
    """
    sizes = config.model.linear
    value = sizes.value_dim
    columns = value + (config.mesh.context > 1) * sizes.key_dim
    numbers = shapes.rule_numbers(AT_HAND[sizes.kind], sizes, value, columns)
    return FLOAT32 * numbers * sizes.value_heads / config.mesh.tensor


def _across(config: Config, w: Widths, size: int) -> float:
    """Bytes a token that attention's backward has at hand where tokens are split over context: queries, output and
    their cotangents, in float32 as they are summed; and keys, values and their float32 cotangents, gathered of all
    ranks, of a ring those that come and those that go.
    """
    n = config.mesh.context
    own = size * 3 * (w.full + w.query) + FLOAT32 * 2 * w.query
    if n == 1:
        return 0.0
    if config.parallel.context_strategy == "ulysses":
        return own + size * (4 * w.query + 2 * (w.key + w.value))
    ranks = 2 if config.parallel.context_strategy == "ring" else n
    return own + ranks * (w.key + w.value) * (size + FLOAT32)
