"""Learns from a teacher's log-probabilities of what the model drew itself: on-policy distillation.

    A_t = log pi_teacher(t) - log mu(t)        of each token t of an answer, both at `rl.temperature`

Its mean over tokens is the negative of the KL divergence from the teacher, which the run makes smaller (Agarwal et al.
2024, "On-Policy Distillation of Language Models", section 3; Lu et al. 2025, Thinking Machines).
"""

from collections.abc import Sequence

import numpy as np

from meshtrain.errors import ConfigError, short
from meshtrain.generate.forward import DecodingForward
from meshtrain.generate.resharding import Resharding
from meshtrain.reader import read_model
from meshtrain.rl.scoring import LogprobReader
from meshtrain.step import Program


class Teacher:
    """The model of `rl.teacher` on the trainer's mesh, in texts of at most `length` tokens.

    Raises ConfigError for a directory without a model, and for one with another vocabulary.
    """

    def __init__(self, program: Program, length: int) -> None:
        config = program.config
        path = str(config.rl.teacher)
        try:
            model = read_model(
                path,
                mesh=program.mesh,
                masters=False,
                precision=config.precision.compute,
            )
        except ConfigError as error:
            raise ConfigError(f"rl.teacher: {error}") from None
        own = config.model.vocab_size
        theirs = model.config.model.vocab_size
        if theirs != own:
            raise ConfigError(
                f"rl.teacher: the model of {short(path)} has a vocabulary of {theirs}, but this one has {own}; "
                "both must read the same tokens."
            )
        forward = DecodingForward(model.program, program.mesh.size, length)
        resharding = Resharding(model.program.layout, forward.layout)
        self._weights = resharding.take_over(model.params, keep=False)
        self._scorer = LogprobReader(forward, resharding)
        self._temperature = config.rl.temperature

    def logprobs(self, texts: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Returns for each text, int32 [n], the log-probability of its tokens behind the first, float32 [n - 1]."""
        return self._scorer.logprobs(self._weights, texts, self._temperature)
