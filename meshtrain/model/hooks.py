"""What may be replaced from outside with a plain function: the block, attention, the loss.

    def parallel_block(block, x, sequence, collectives, dropout):            # GPT-J, PaLM: both branches from one norm
        h = collectives.enter(block.attention_norm(x))
        y = block.attention(h, sequence, collectives, dropout.at(0)) + block.mlp(h, collectives)
        return x + dropout.at(1).stream(y, collectives.first_position(x.shape[1]))

    def capped_loss(logits, labels, vocabulary):                             # as model.logit_cap 30 does
        logits = 30 * jnp.tanh(logits / 30)
        return vocabulary.log_sum_exp(logits) - vocabulary.of_label(logits, labels)

    program = mt.Program(config, block=parallel_block, loss=capped_loss)     # train_step, eval_step and logits use them

The built-in ones are the defaults on the same path. A hook runs inside the step on one device's share of the arrays, so it must be
made of jax.numpy and of the helpers that it is given; with them it is right on every mesh, schedule and ZeRO stage.
"""

import dataclasses
import inspect
import math
import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from meshtrain.compat import varying
from meshtrain.config import Config, ConfigError, short
from meshtrain.families import FAMILIES
from meshtrain.model.attention import attend, of_attention
from meshtrain.model.collectives import Collectives
from meshtrain.model.dropout import Dropout
from meshtrain.model.layers import Block, Sequence
from meshtrain.model.loss import Mixed, Vocabulary, cross_entropy


class BlockHook(Protocol):
    """One layer: the residual stream [B, T, D] (T / tensor of it with sequence parallelism) to the same, in the same dtype.

    `block` holds the layer's weights, this device's share of each, as modules: attention_norm, attention, mlp_norm, mlp (see
    `model.layers`). What goes into a column-parallel weight passes `collectives.enter` first, what comes out of a row-parallel one
    `collectives.leave` (`block.attention` and `block.mlp` do the latter).
    """

    def __call__(
        self, block: Block, x_BTD: jax.Array, sequence: Sequence, collectives: Collectives, dropout: Dropout, /
    ) -> jax.Array: ...


class AttentionHook(Protocol):
    """Queries [B, T, H, K] against keys and values [B, T, G, K], of this device's heads, to [B T, H K] in the queries' dtype.

    H is a multiple of G; rotary positions are in them already. Causal where the family is, and within `segments_BT` where that is not None: these are
    the hook's own to keep, as is dropout (`dropout.attention`). It needs no collective.
    """

    def __call__(
        self,
        q_BTHK: jax.Array,
        k_BTGK: jax.Array,
        v_BTGK: jax.Array,
        segments_BT: jax.Array | None,
        collectives: Collectives,
        dropout: Dropout,
        /,
    ) -> jax.Array: ...


class LossHook(Protocol):
    """Loss of each token, float32 [B, T], from this device's share of the logits, float32 [B, T, V share].

    Labels [B, T] are ids of the whole vocabulary. softmax, mean, max and one_hot over the last axis see the share only: what needs
    more goes through `vocabulary` (sum, max, log_sum_exp, of_label, ids). The tokens' weights and the mean over the batch come
    afterwards. Where the vocabulary is split, the hook is tried once on made-up logits, see `Parts`.
    """

    def __call__(self, logits_BTV: jax.Array, labels_BT: jax.Array, vocabulary: Vocabulary, /) -> jax.Array: ...


@dataclasses.dataclass(frozen=True)
class Hooks:
    """The functions that replace built-in ones, None where none does."""

    block: BlockHook | None = None
    attention: AttentionHook | None = None
    loss: LossHook | None = None

    def check(self, config: Config) -> None:
        """ConfigError for what cannot be called as the hook is, and for keys that the replaced loss would have obeyed."""
        for kind, protocol in (("block", BlockHook), ("attention", AttentionHook), ("loss", LossHook)):
            if (hook := getattr(self, kind)) is not None:
                _check_call(kind, hook, list(inspect.signature(protocol.__call__).parameters)[1:])
        unheard = [
            ("train", "label_smoothing", "loss", 0), ("train", "z_loss", "loss", 0), ("model", "window", "attention", 0),
            ("model", "score_cap", "attention", 0), ("model", "query_scalar", "attention", config.model.head_dim),
        ]  # fmt: skip
        for section, key, kind, usual in unheard:
            hook, value = getattr(self, kind), getattr(getattr(config, section), key)
            if hook is not None and value != usual:
                raise ConfigError(
                    f"{section}.{key} is {value}, but the {kind} is replaced by {_name(hook)}, which does not obey it; "
                    "leave the key out, and have the function do it."
                )

    @property
    def names(self) -> dict[str, str]:
        """What is replaced, and the function's name: for checkpoints, which cannot hold the function."""
        return {kind: _name(hook) for kind, hook in vars(self).items() if hook is not None}


class Parts:
    """The block, attention and loss of a config: built in, or the hooks', whose results are checked as they are traced.

    ConfigError for a loss hook whose value on shares of the vocabulary is not its value on the whole of it.
    """

    def __init__(self, config: Config, collectives: Collectives, hooks: Hooks) -> None:
        self.collectives, self.hooks = collectives, hooks
        self.vocabulary = Vocabulary(config.model.vocab_size, collectives)
        train = config.train
        built_in = partial(cross_entropy, label_smoothing=train.label_smoothing, z_loss=train.z_loss)
        self._block = hooks.block or FAMILIES[config.model.family].block or Block.__call__
        self._loss: Callable[..., jax.Array] = hooks.loss or built_in
        # who gives the built-in one means it as it is
        self._given = hooks.attention if hooks.attention is not attend else None
        self._attend: Callable[..., jax.Array] = partial(attend, **of_attention(config.model))
        if hooks.loss is not None:
            _check_shares(hooks.loss, config, collectives.vocabulary)

    def block(
        self,
        block: Block,
        x_BTD: jax.Array,
        sequence: Sequence,
        dropout: Dropout,
        attend: Callable[..., jax.Array] | None = None,
    ) -> jax.Array:
        """`attend`: by what it attends in place of `attention`, which a cache does."""
        block.attention.attend = attend or self.attention
        y = self._block(block, x_BTD, sequence, self.collectives, dropout)
        wanted = jax.ShapeDtypeStruct(x_BTD.shape, x_BTD.dtype)
        _check_result("block", self._block, y, wanted, varying(x_BTD), "pass each branch through collectives.leave")
        return y

    def attention(self, q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None, collectives: Collectives, dropout: Dropout, local: jax.Array | None = None) -> jax.Array:  # fmt: skip
        given = (q, k, v, segments, collectives, dropout)
        out = self._given(*given) if self._given else self._attend(*given, local=local)
        wanted = jax.ShapeDtypeStruct((q.shape[0] * q.shape[1], q.shape[2] * q.shape[3]), q.dtype)
        _check_result(
            "attention",
            self._given or attend,
            out,
            wanted,
            varying(q) | varying(k) | varying(v),
            "it needs no collective",
        )
        # the built-in one names its output itself, where its backward takes it
        return checkpoint_name(out, "attention") if self._given else out

    def loss(self, logits_BTV: jax.Array, labels_BT: jax.Array, mixed: Mixed | None = None) -> jax.Array:
        """Of each label, float32 [B, T]; where labels are `mixed`, a hook is asked for each of the two, and theirs are shared likewise."""
        if mixed is None:
            losses = self._loss(logits_BTV, labels_BT, self.vocabulary)
        elif self.hooks.loss is None:
            losses = self._loss(logits_BTV, labels_BT, self.vocabulary, mixed=mixed)
        else:
            first, other = (self.loss(logits_BTV, labels) for labels in (labels_BT, mixed.labels))
            losses = mixed.share * first + (1 - mixed.share) * other
        wanted = jax.ShapeDtypeStruct(labels_BT.shape, jnp.float32)
        shared = varying(logits_BTV) - set(self.collectives.vocabulary)
        _check_result("loss", self._loss, losses, wanted, shared, "sum it over the vocabulary with vocabulary.sum")
        return losses


def _check_call(kind: str, hook: Any, names: list[str]) -> None:
    wanted = f"it is called with ({', '.join(names)})"
    if not callable(hook):
        raise ConfigError(f"the {kind} hook is {short(repr(hook))}; it must be a function, and {wanted}.")
    try:
        signature = inspect.signature(hook)
    except ValueError:
        # some callables written in C tell none; the call will say
        return
    try:
        signature.bind(*names)
    except TypeError:
        raise ConfigError(f"the {kind} hook {_name(hook)} takes {short(str(signature))}, but {wanted}.") from None


def _check_result(
    kind: str, hook: Any, result: Any, wanted: jax.ShapeDtypeStruct, axes: Iterable[str], way_out: str
) -> None:
    """ConfigError if a hook's result has another shape or dtype, or differs between devices that must agree."""
    if not isinstance(result, jax.Array):
        gave = f"a {type(result).__name__}"
    elif (result.shape, result.dtype) != (wanted.shape, wanted.dtype):
        gave = _array(result)
    elif more := sorted(varying(result) - set(axes)):
        raise ConfigError(
            f"the {kind} hook {_name(hook)} gave a value that differs over {' and '.join(more)}, where devices must agree; {way_out}."
        )
    else:
        return
    raise ConfigError(f"the {kind} hook {_name(hook)} gave {gave} on a device, and {_array(wanted)} is wanted.")


class _Shares(Collectives):
    """Every share of the vocabulary on one device, where the mesh axes `vocabulary` are axes of vmap."""

    def __init__(self, vocabulary: tuple[str, ...], ranks: int) -> None:
        self.vocabulary, self.vocabulary_ranks = vocabulary, ranks

    def first_token_id(self, rows: int) -> jax.Array:
        return jax.lax.axis_index(self.vocabulary) * rows

    def vocabulary_sum(self, x: jax.Array) -> jax.Array:
        return jax.lax.psum(x, self.vocabulary)

    def vocabulary_max(self, x: jax.Array) -> jax.Array:
        return jax.lax.pmax(jax.lax.stop_gradient(x), self.vocabulary)


def _check_shares(hook: LossHook, config: Config, axes: tuple[str, ...]) -> None:
    """ConfigError if a loss hook takes its share of the vocabulary, which the mesh axes `axes` split, for the whole of it.

    Its losses of made-up logits in one piece are compared with those of the same logits cut as on the mesh, all on one device. On
    the mesh itself nobody could tell: devices agree on a wrong sum as on a right one.
    """
    size, split = config.model.vocab_size, [getattr(config.mesh, axis) for axis in axes]
    ways = math.prod(split)
    if ways == 1:
        return
    logits, labels = _made_up(size)
    # the padding is like the rest, so that a hook that counts it in is seen
    padding = ((0, 0), (0, 0), (0, -size % ways))
    padded = np.pad(logits, padding, constant_values=logits.mean() + 1)
    shares = np.moveaxis(padded.reshape(*labels.shape, *split, -1), (0, 1), (-3, -2))
    in_one = logits.reshape(*(1 for _ in axes), *logits.shape)

    def losses(logits: jax.Array) -> jax.Array:
        ranks = math.prod(logits.shape[: len(axes)])
        of_share = lambda share: hook(share, jnp.asarray(labels), Vocabulary(size, _Shares(axes, ranks)))  # noqa: E731
        for axis in reversed(axes):
            of_share = jax.vmap(of_share, axis_name=axis)
        return of_share(logits).reshape(-1, *labels.shape)

    def compared(whole: jax.Array, shares: jax.Array) -> tuple[jax.Array, ...]:
        # twice of the whole: a hook that draws its own random numbers cannot be judged
        return losses(whole), losses(whole), losses(shares)

    try:
        lowered = jax.jit(compared).lower(in_one, shares)
        (whole,), (again,), cut = (np.asarray(x, np.float32) for x in lowered.compile()(in_one, shares))
    except Exception:
        # the trace of the step says what is wrong with it, if anything is with arrays as long as that has
        return
    # wider where the hook has chosen to add up in 16 bits or fewer
    tolerance = 0.05 if re.search(r"xb?f(16|8)", lowered.as_text()) else 1e-4
    same = partial(np.isclose, rtol=tolerance, atol=tolerance, equal_nan=True)
    # of shares that come to different values the trace tells
    if not np.array_equal(whole, again, equal_nan=True) or not np.all(same(cut, cut[0])) or np.all(same(cut[0], whole)):
        return
    at = np.unravel_index(np.argmin(same(cut[0], whole)), whole.shape)
    masks = f", and leave out the ids from {size} on, which are padding" if size % ways else ""
    raise ConfigError(
        f"the loss hook {_name(hook)} gives {cut[0][at]:.4f} where the vocabulary is cut into {ways} shares, and {whole[at]:.4f} of the "
        "same logits where it is whole; softmax, mean and one_hot over the last axis see one share only: "
        f"use vocabulary.sum, max, log_sum_exp and of_label{masks}."
    )


def _made_up(size: int) -> tuple[np.ndarray, np.ndarray]:
    """Logits, float32 [2, 3, size], and labels from the first id to the last, of probability 0.1 to 0.9."""
    labels = np.linspace(0, size - 1, 6).round().astype(np.int32).reshape(2, 3)
    # their mean is not 0, and rises with the id: what is true of one share is not of another
    logits = np.random.default_rng(0).normal(size=(2, 3, size)) + np.linspace(0, 2, size)
    here = np.arange(size) == labels[..., None]
    others = np.log(np.sum(np.exp(logits), axis=-1, where=~here))
    logits = np.where(here, (others + np.linspace(-2, 2, 6).reshape(2, 3))[..., None], logits)
    return logits.astype(np.float32), labels


def _array(x: jax.Array | jax.ShapeDtypeStruct) -> str:
    return f"{x.dtype}{list(x.shape)}"


def _name(hook: Any) -> str:
    while isinstance(hook, partial):
        hook = hook.func
    return getattr(hook, "__qualname__", type(hook).__qualname__).rpartition("<locals>.")[2]
