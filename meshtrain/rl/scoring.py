"""Log-probabilities of texts that are there already, by weights laid out for decoding."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from meshtrain.generate.forward import DecodingForward
from meshtrain.generate.resharding import Parts, Resharding


class LogprobReader:
    """Reads texts with a model, each by itself and on one rank of slots: no other text and no cache can change it."""

    def __init__(self, forward: DecodingForward, resharding: Resharding) -> None:
        self._forward = forward
        self._resharding = resharding

    def logprobs(
        self, weights: Parts, texts: Sequence[np.ndarray], temperature: float
    ) -> list[np.ndarray]:
        """Returns for each text, int32 [n], the log-probability of its tokens behind the first, float32 [n - 1].

        All processes call it alike, and all get all numbers.
        """
        longest = self._forward.bucket(max(map(len, texts)) - 1) + 1
        rows = -(-len(texts) // self._forward.ranks) * self._forward.ranks
        tokens = np.zeros((rows, longest), np.int32)
        for row, text in zip(tokens, texts, strict=False):
            row[: len(text)] = text
        found = np.asarray(self._program(weights, tokens, np.float32(temperature)))
        return [row[: len(text) - 1] for row, text in zip(found, texts, strict=False)]

    @cached_property
    def _program(self) -> Any:
        """The compiled program (weights, texts [N, T + 1], temperature) -> log-probabilities [N, T], on all devices."""
        rows = PartitionSpec(self._forward.rows)
        mapped = jax.shard_map(
            self._read,
            mesh=self._forward.mesh,
            in_specs=(self._resharding.specs, rows, PartitionSpec()),
            out_specs=rows,
        )
        everywhere = NamedSharding(self._forward.mesh, PartitionSpec())
        weights = self._resharding.shardings(self._resharding.specs)
        return jax.jit(
            mapped,
            in_shardings=(weights, everywhere, everywhere),
            out_shardings=everywhere,
        )

    def _read(
        self, weights: Parts, texts: jax.Array, temperature: jax.Array
    ) -> jax.Array:
        # One text after the other: the logits of all of them together may not fit.
        return lax.map(
            lambda text: self._forward.logprobs(weights, text, temperature), texts
        )
