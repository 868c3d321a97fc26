"""Hooks: plain functions from outside that replace the block, attention or the loss.

    def parallel_block(block, x, sequence, collectives, dropout):            # GPT-J, PaLM: both branches from one norm
        h = collectives.enter(block.attention_norm(x))
        y = block.attention(h, sequence, collectives, dropout.at(0)) + block.mlp(h, collectives)
        return x + dropout.at(1).stream(y, collectives.first_position(x.shape[1]))

    def capped_loss(logits, labels, vocabulary):                             # as model.logit_cap 30 does
        logits = 30 * jnp.tanh(logits / 30)
        return vocabulary.log_sum_exp(logits) - vocabulary.of_label(logits, labels)

    program = mt.Program(config, block=parallel_block, loss=capped_loss)     # train_step, eval_step and logits use them

The built-in ones are the defaults on the same path. A hook runs inside the step on one device's share of the arrays, so
it must be made of jax.numpy and of the helpers that it is given; with them it is right on every mesh, schedule and ZeRO
stage.
"""

import dataclasses
import inspect
from collections.abc import Callable, Iterable
from functools import partial
from types import ModuleType
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from meshtrain.compat import varying
from meshtrain.config import Config, ConfigError
from meshtrain.config.check import hooks
from meshtrain.errors import name_of
from meshtrain.families import FAMILIES
from meshtrain.model.attention import attend, attention_arguments, output_shape
from meshtrain.model.collectives import Collectives
from meshtrain.model.decoder import Block
from meshtrain.model.dropout import Dropout
from meshtrain.model.loss import LabelLosses, Mixed, Vocabulary, cross_entropies
from meshtrain.model.rope import Sequence


class BlockHook(Protocol):
    """One layer: the residual stream `[B, T, D]` (`[B, T / tensor, D]` with sequence parallelism) to the same, in the
    same dtype.

    `block` holds the layer's weights, this device's share of each, as modules: attention_norm, attention, mlp_norm, mlp
    (see `model.layers`). The input of a column-parallel weight passes `collectives.enter` first, the output of a
    row-parallel one `collectives.leave` (`block.attention` and `block.mlp` do the latter).
    """

    def __call__(
        self,
        block: Block,
        x_BTD: jax.Array,
        sequence: Sequence,
        collectives: Collectives,
        dropout: Dropout,
        /,
    ) -> jax.Array: ...


class AttentionHook(Protocol):
    """Queries `[B, T, H, K]` against keys and values `[B, T, G, K]`, of this device's heads, to `[B*T, H*K]` in the
    queries' dtype.

    H is a multiple of G; rotary positions are in them already. Causal where the family is, and within `segments_BT`
    where that is not None: these are the hook's own to keep, as is dropout (`dropout.attention`). It needs no
    collective.
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
    """Loss of each token, float32 `[B, T]`, from this device's share of the logits, float32 `[B, T, V / shards]`.

    Labels `[B, T]` are ids of the whole vocabulary. softmax, mean, max and one_hot over the last axis see the share
    only: what needs more goes through `vocabulary` (sum, max, log_sum_exp, of_label, ids). The tokens' weights and the
    mean over the batch come afterwards. Where the vocabulary is split, the hook is tried once on made-up logits, see
    `ModelParts`.
    """

    def __call__(
        self, logits_BTV: jax.Array, labels_BT: jax.Array, vocabulary: Vocabulary, /
    ) -> jax.Array: ...


@dataclasses.dataclass(frozen=True)
class Hooks:
    """The functions that replace built-in ones, None where none does."""

    block: BlockHook | None = None
    attention: AttentionHook | None = None
    loss: LossHook | None = None

    @staticmethod
    def of(config: Config, **given: Any) -> "Hooks":
        """Returns the given functions and, in the place of None, those that the config names."""
        return Hooks(
            **hooks(config)
            | {kind: hook for kind, hook in given.items() if hook is not None}
        )

    def check(self, config: Config) -> None:
        """Raises ConfigError for what cannot be called as the hook is, and for keys that the replaced function would
        have obeyed.
        """
        for kind, protocol in (
            ("block", BlockHook),
            ("attention", AttentionHook),
            ("loss", LossHook),
        ):
            if (hook := getattr(self, kind)) is not None:
                _checks().check_call(
                    kind,
                    hook,
                    list(inspect.signature(protocol.__call__).parameters)[1:],
                )
        if (
            self.attention is not None
            and config.mesh.context > 1
            and config.parallel.context_strategy != "ulysses"
        ):
            raise ConfigError(
                f"mesh.context {config.mesh.context} gives attention a part of each row, but it is replaced by "
                f"{name_of(self.attention)}, "
                "which would take it for the whole; set parallel.context_strategy to ulysses, or leave context out."
            )
        ignored = [
            ("train", "label_smoothing", "loss", 0),
            ("train", "z_loss", "loss", 0),
            ("model", "window", "attention", 0),
            ("model", "score_cap", "attention", 0),
            ("model", "query_scalar", "attention", config.model.head_dim),
            ("optimizer", "qk_clip", "attention", 0),
            ("optimizer", "qk_clip", "block", 0),
        ]
        for section, key, kind, usual in ignored:
            hook = getattr(self, kind)
            value = getattr(getattr(config, section), key)
            if hook is not None and value != usual:
                raise ConfigError(
                    f"{section}.{key} is {value}, but the {kind} is replaced by {name_of(hook)}, which does not obey "
                    "it; "
                    "leave the key out, and have the function do it."
                )

    @property
    def names(self) -> dict[str, str]:
        """The names of the functions by what they replace: for checkpoints, which cannot hold the functions."""
        return {
            kind: name_of(hook) for kind, hook in vars(self).items() if hook is not None
        }


class ModelParts:
    """The block, attention and loss of a config: built in, or the hooks', whose results are checked as they are traced.

    Raises ConfigError for a loss hook that gives another value on a sharded vocabulary than on all of it.
    """

    def __init__(self, config: Config, collectives: Collectives, hooks: Hooks) -> None:
        self.collectives = collectives
        self.hooks = hooks
        self.vocabulary = Vocabulary(config.model.vocab_size, collectives)
        train = config.train
        built_in = partial(
            cross_entropies, label_smoothing=train.label_smoothing, z_loss=train.z_loss
        )
        # Answers are learned from at the temperature that they were drawn at.
        self.temperature = config.rl.temperature if train.objective == "grpo" else 1.0
        self.block: BlockHook = (
            hooks.block or FAMILIES[config.model.family].block or Block.__call__
        )
        self._loss: Callable[..., Any] = hooks.loss or built_in
        # the built-in one as a hook means no hook
        self._attention_hook = (
            hooks.attention if hooks.attention is not attend else None
        )
        if self._attention_hook is not None and FAMILIES[config.model.family].sinks:
            raise ConfigError(
                f"model.attention takes no sinks, which {config.model.family} has; leave it out."
            )
        self._attend: Callable[..., jax.Array] = partial(
            attend, **attention_arguments(config.model)
        )
        if hooks.loss is not None:
            vocabulary = collectives.vocabulary
            _checks().check_sharded_loss(hooks.loss, config, vocabulary)

    def check_block(self, x_BTD: jax.Array, y_BTD: jax.Array) -> None:
        """Raises ConfigError if the output of `block` is not a residual stream."""
        wanted = jax.ShapeDtypeStruct(x_BTD.shape, x_BTD.dtype)
        _check_result(
            "block",
            self.block,
            y_BTD,
            wanted,
            varying(x_BTD),
            "pass each branch through collectives.leave",
        )

    def attention(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        segments: jax.Array | None,
        collectives: Collectives,
        dropout: Dropout,
        local: jax.Array | None = None,
        sinks: jax.Array | None = None,
        counted: jax.Array | None = None,
    ) -> Any:
        hook = self._attention_hook
        arguments = (q, k, v, segments, collectives, dropout)
        if hook is None:
            return self._attend(*arguments, local=local, sinks=sinks, counted=counted)
        out = hook(*arguments)
        batch, length, heads, width = output_shape(q, v)
        wanted = jax.ShapeDtypeStruct((batch * length, heads * width), q.dtype)
        _check_result(
            "attention",
            hook,
            out,
            wanted,
            varying(q) | varying(k) | varying(v),
            "it needs no collective",
        )
        # the built-in one names its output itself, where its backward takes it
        return checkpoint_name(out, "attention")

    def loss(
        self, logits_BTV: jax.Array, labels_BT: jax.Array, mixed: Mixed | None = None
    ) -> LabelLosses:
        """Returns the loss of each label; where labels are `mixed`, a hook is called for each of the two."""
        if self.temperature != 1:
            logits_BTV = logits_BTV / self.temperature
        if self.hooks.loss is None:
            return self._loss(logits_BTV, labels_BT, self.vocabulary, mixed=mixed)
        if mixed is None:
            losses = self._loss(logits_BTV, labels_BT, self.vocabulary)
        else:
            first, other = (
                self.loss(logits_BTV, labels).losses
                for labels in (labels_BT, mixed.labels)
            )
            losses = mixed.share * first + (1 - mixed.share) * other
        wanted = jax.ShapeDtypeStruct(labels_BT.shape, jnp.float32)
        shared = varying(logits_BTV) - set(self.collectives.vocabulary)
        _check_result(
            "loss",
            self._loss,
            losses,
            wanted,
            shared,
            "sum it over the vocabulary with vocabulary.sum",
        )
        return LabelLosses(losses)


SHAPES = {
    "block": "[B, T, D]",
    "attention": "[B*T, H*K]",
    "loss": "[B, T]",
}  # of a device, as the protocols name them


def _check_result(
    kind: str,
    hook: Any,
    result: Any,
    wanted: jax.ShapeDtypeStruct,
    axes: Iterable[str],
    way_out: str,
) -> None:
    """Raises ConfigError if a hook's result has another shape or dtype, or differs between devices that must agree."""
    if not isinstance(result, jax.Array):
        gave = f"a {type(result).__name__}"
    elif (result.shape, result.dtype) != (wanted.shape, wanted.dtype):
        gave = _array(result)
    elif more := sorted(varying(result) - set(axes)):
        raise ConfigError(
            f"the {kind} hook {name_of(hook)} gave a value that differs over {' and '.join(more)}, where devices must "
            f"agree; {way_out}."
        )
    else:
        return
    raise ConfigError(
        f"the {kind} hook {name_of(hook)} gave {gave} on a device, and {_array(wanted)} is wanted, {SHAPES[kind]}."
    )


def _array(x: jax.Array | jax.ShapeDtypeStruct) -> str:
    return f"{x.dtype}{list(x.shape)}"


def _checks() -> ModuleType:
    """Returns the module of what is legal for a hook, which no run without hooks imports."""
    from meshtrain.model import hook_checks

    return hook_checks
