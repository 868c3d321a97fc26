"""Computes log-probabilities of given tokens: rows of any length in, log-probabilities of the tokens to be scored out.

    rows, the longest first     cut into batches      padded to powers of two         one program a shape
    ─────────────────────┐                            ┌──────────────────────┐
    c c c c c c c s s    │  ──►  [rows a batch]  ──►  │ c c c c c c c s · ·  │ ──►  float32 [B, N]: the N scored places
    c c c s              │                            │ c c c · · · · · · ·  │
    ─────────────────────┘                            └──────────────────────┘      (c context, s scored, · padding)

The residual stream is taken at the scored places before the head, so that a context costs no logits; the logits stay
where they are made, in shards of the vocabulary, and some places at a time: neither [B, T, V] nor a full row of V is
ever anywhere. Perplexity and the harness both use this.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from meshtrain.errors import ConfigError
from meshtrain.families import FAMILIES
from meshtrain.parallel.logits import compute_logits, stream
from meshtrain.reader import Model, check_learned

LEAST = 16  # places that a row is padded to, and that are scored at once
LOGITS = 1 << 28  # bytes of a device's logits at a time

Progress = Callable[[int, int], None]  # rows done, of how many


@dataclass(frozen=True)
class TokenRow:
    """Tokens int32 [n], of which those from `begin` (at least 1) on are scored, each given all before it."""

    tokens: np.ndarray
    begin: int = 1

    @property
    def scored(self) -> int:
        return len(self.tokens) - self.begin


class Scores(NamedTuple):
    """The log-probabilities of a row's scored tokens, float32 [n - begin], and whether each is the argmax."""

    logprobs: np.ndarray
    greedy: np.ndarray


class Scorer:
    """Scores rows with a model, `rows` at a time (rounded up to what its data axis needs).

    ConfigError for a mesh with context.
    """

    def __init__(self, model: Model, rows: int = 8) -> None:
        if (context := model.config.mesh.context) > 1:
            raise ConfigError(
                f"the model is on a mesh with context {context}, which texts are too short for; leave it out."
            )
        self.model = model
        self.rows = rows + -rows % model.config.mesh.data

    @property
    def longest(self) -> int | None:
        """Tokens that a row may have before its last, None for any number."""
        model = self.model.config.model
        if FAMILIES[model.family].positions == "learned":
            return model.max_positions
        return None

    def __call__(
        self, rows: Sequence[TokenRow], progress: Progress = lambda done, total: None
    ) -> list[Scores]:
        """Returns the scores of each row, in the order given.

        ConfigError for ids beyond the vocabulary, for a row longer than the positions that the model has learned, and
        where the model gives NaN.
        """
        for row in rows:
            self._check(row)
        # The longest first: what does not fit is known at once, and rows of about one length meet in a batch.
        order = sorted(
            range(len(rows)), key=lambda k: (-len(rows[k].tokens), -rows[k].scored)
        )
        batches = [
            order[begin : begin + self.rows]
            for begin in range(0, len(order), self.rows)
        ]
        scores: dict[int, Scores] = {}
        pending: Any = None
        # The device works on the next batch while the host looks at the last.
        for n in range(len(batches) + 1):
            started = (
                self._start([rows[k] for k in batches[n]]) if n < len(batches) else None
            )
            if n:
                scores |= self._finish(rows, batches[n - 1], pending)
                progress(len(scores), len(rows))
            pending = started
        return [scores[k] for k in range(len(rows))]

    def _start(self, rows: Sequence[TokenRow]) -> Any:
        length = _padded(max(len(row.tokens) - 1 for row in rows), 2, self.longest)
        places = min(_padded(max(row.scored for row in rows), 4), length)
        tokens = np.zeros((self.rows, length), np.int32)
        at, labels = np.zeros((2, self.rows, places), np.int32)
        for k, row in enumerate(rows):
            tokens[k, : len(row.tokens) - 1] = row.tokens[:-1]
            at[k, : row.scored] = np.arange(row.begin - 1, len(row.tokens) - 1)
            labels[k, : row.scored] = row.tokens[row.begin :]
        sharding = self.model.program.batch_sharding
        return self._program(
            self.model.params,
            *(jax.device_put(array, sharding) for array in (tokens, at, labels)),
        )

    def _finish(
        self, rows: Sequence[TokenRow], batch: Sequence[int], outputs: Any
    ) -> dict[int, Scores]:
        logprobs, greedy = map(np.asarray, outputs)
        scores = {
            n: Scores(logprobs[k, : rows[n].scored], greedy[k, : rows[n].scored])
            for k, n in enumerate(batch)
        }
        if not all(np.isfinite(row.logprobs).all() for row in scores.values()):
            raise ConfigError(
                f"the model of {self.model.directory} gives no numbers (NaN) for the text: its weights are damaged or "
                "it has diverged; "
                "give another checkpoint, or --precision float32."
            )
        return scores

    def _check(self, row: TokenRow) -> None:
        model = self.model.config.model
        if not 1 <= row.begin < len(row.tokens):
            raise ValueError(
                f"a row of {len(row.tokens)} tokens has none to score from {row.begin} on"
            )
        if row.tokens.min() < 0 or row.tokens.max() >= model.vocab_size:
            raise ConfigError(
                f"the text has the token {row.tokens.max()}, but the model's are 0 to {model.vocab_size - 1}; it is "
                "of another tokenizer."
            )
        check_learned(model, len(row.tokens) - 1)

    @cached_property
    def _program(self) -> Callable[..., Any]:
        """Maps (params, tokens [B, T], at [B, N], labels [B, N]) to float32 and bool [B, N].

        These are each label's log-probability, and whether no other token has a higher one (of equals the first counts,
        as for argmax).
        """
        program = self.model.program
        forward = program.local.forward
        zero = program.local.zero
        vocabulary = forward.parts.vocabulary

        def local(
            params: Any, tokens: jax.Array, at: jax.Array, labels: jax.Array
        ) -> tuple[jax.Array, jax.Array]:
            weights = zero.gather_params(params)
            x_BTD, resident = stream(
                forward, weights, {"tokens": tokens, "rows": jnp.arange(len(tokens))}
            )
            x_BND = jnp.take_along_axis(x_BTD, at[..., None], axis=1)
            shard = -(-vocabulary.size // forward.collectives.vocabulary_ranks)
            chunks = _chunks(at.shape[1], 4 * shard * len(tokens))

            def score(
                chunk: tuple[jax.Array, jax.Array],
            ) -> tuple[jax.Array, jax.Array]:
                x, labels = chunk
                logits = compute_logits(forward, weights, x, resident)
                logprobs = vocabulary.of_label(logits, labels) - vocabulary.log_sum_exp(
                    logits
                )
                return logprobs, vocabulary.argmax(logits) == labels

            scored = lax.map(score, (_cut(x_BND, chunks), _cut(labels, chunks)))
            return jax.tree.map(
                lambda a: jnp.moveaxis(a, 0, 1).reshape(at.shape), scored
            )

        rows = program.rows
        mapped = jax.shard_map(
            local,
            mesh=program.mesh,
            in_specs=(program.layout.shards, rows, rows, rows),
            out_specs=(rows, rows),
        )
        # Replicated, since every process reads all of it.
        return jax.jit(
            mapped, out_shardings=jax.NamedSharding(program.mesh, PartitionSpec())
        )


def _cut(x: jax.Array, chunks: int) -> jax.Array:
    """Cuts [B, N, ...] into chunks of the places: [chunks, B, N / chunks, ...]."""
    return jnp.moveaxis(x.reshape(len(x), chunks, -1, *x.shape[2:]), 1, 0)


def _padded(n: int, factor: int, most: int | None = None) -> int:
    """The first of LEAST, LEAST * factor, LEAST * factor^2, ... that holds n, but not more than `most`."""
    length = LEAST
    while length < n:
        length *= factor
    return length if most is None else min(length, most)


def _chunks(places: int, bytes_a_place: int) -> int:
    """The number of equal chunks of the places such that the logits of one take at most LOGITS bytes."""
    return next(
        n
        for n in range(1, places + 1)
        if places % n == 0 and (places // n * bytes_a_place <= LOGITS or n == places)
    )
