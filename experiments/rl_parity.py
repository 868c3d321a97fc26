"""Losses of reinforcement learning beside TRL's, on frozen tokens.

    python -m experiments.rl_parity       needs TRL: pip install trl torch

The same log-probabilities and advantages go through TRL's own `GRPOTrainer._compute_loss`, and through `rl.rows.pack`
and `model.policy_loss`. `gradient` is the largest difference in the loss's derivative by a token's log-probability.

    rl.loss     rl.average    loss_type    importance_sampling_level
    ppo_clip    token         dapo         token
    ppo_clip    sequence      grpo         token
    ppo_clip    constant      dr_grpo      token
    gspo        sequence      grpo         sequence
    cispo       token         cispo        token

TRL clips CISPO's ratio above only, and its `epsilon_high` is then the bound itself: 1 plus the second of `rl.clip`. So
the first is next to 1 here.
"""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments import bench
from experiments.bench import Table
from meshtrain.config import Config, load
from meshtrain.model.loss import counted
from meshtrain.model.policy_loss import policy_loss
from meshtrain.rl.rows import Learned, pack

LENGTHS = (3, 6, 1, 4, 7, 2, 7, 5)  # tokens of the answers, of which a group has half
MOST = 7
PROMPT = 2
CLIP = (0.2, 0.28)


class Case(NamedTuple):
    """Our keys of `rl`, and TRL's names for the same."""

    loss: str
    average: str
    beta: float
    loss_type: str
    level: str = "token"

    @property
    def clip(self) -> tuple[float, float]:
        return (0.999, CLIP[1]) if self.loss == "cispo" else CLIP


CASES = [
    Case(*names[:2], beta, *names[2:])
    for names in (
        ("ppo_clip", "token", "dapo"),
        ("ppo_clip", "sequence", "grpo"),
        ("ppo_clip", "constant", "dr_grpo"),
        ("gspo", "sequence", "grpo", "sequence"),
        ("cispo", "token", "cispo"),
    )
    for beta in (0.0, 0.1)
]


class Tokens(NamedTuple):
    """Log-probabilities of the answers' tokens, float32 [n] for each answer, and an advantage for each."""

    now: list[np.ndarray]
    drawn: list[np.ndarray]
    reference: list[np.ndarray]
    advantages: np.ndarray


def frozen() -> Tokens:
    """Returns the tokens; no generator makes them, so that they are the same everywhere."""
    at = np.arange(sum(LENGTHS), dtype=np.float64)
    by_answer = lambda x: np.split(x.astype(np.float32), np.cumsum(LENGTHS)[:-1])
    now = -1.5 - 1.2 * np.sin(1.7 * at + 0.3)
    drawn = now + 0.45 * np.sin(2.3 * at + 1.1)
    reference = now + 0.3 * np.cos(0.9 * at)
    advantages = 1.3 * np.sin(1.9 * np.arange(len(LENGTHS)) + 0.7)
    return Tokens(
        *map(by_answer, (now, drawn, reference)), advantages.astype(np.float32)
    )


def config_of(case: Case) -> Config:
    rl = {"prompts": "prompts.jsonl", "reward": "exact", "group": len(LENGTHS) // 2}
    keys = {
        "loss": case.loss,
        "average": case.average,
        "beta": case.beta,
        "clip": case.clip,
    }
    train = {
        "objective": "grpo",
        "global_batch_size": len(LENGTHS),
        "sequence_length": 16,
    }
    # a reference needs adapters
    sections = {
        "train": train,
        "rl": {**rl, **keys, "answers": MOST},
        "lora": {"rank": 2},
    }
    return load(sections)


def ours(case: Case, tokens: Tokens) -> tuple[float, np.ndarray]:
    """Returns the loss, and its derivative by each token's log-probability, answer after answer."""
    config = config_of(case)
    prompt = np.arange(1, PROMPT + 1, dtype=np.int32)

    def packed(numbers: list[np.ndarray]) -> dict[str, np.ndarray]:
        learned = [
            Learned(
                np.concatenate([prompt, np.arange(len(of), dtype=np.int32)]),
                np.arange(PROMPT + len(of)) >= PROMPT,
                np.concatenate([np.zeros(PROMPT, np.float32), of]),
                np.full(PROMPT + len(of), advantage, np.float32),
            )
            for of, advantage in zip(numbers, tokens.advantages, strict=True)
        ]
        return pack(learned, config, PROMPT + MOST - 1)

    batch = packed(tokens.drawn)
    batch["reference"] = -packed(tokens.reference)["drawn"]
    logprobs = jnp.asarray(packed(tokens.now)["drawn"])

    def loss(logprobs: jax.Array) -> jax.Array:
        return policy_loss(-logprobs, batch, config.rl)[0] / counted(batch)

    value, gradient = jax.value_and_grad(loss)(logprobs)
    numbered = np.arange(1, sum(LENGTHS) + 1, dtype=np.float32)
    places = packed(np.split(numbered, np.cumsum(LENGTHS)[:-1]))["drawn"].astype(int)
    by_token = np.zeros(sum(LENGTHS))
    by_token[places[places > 0] - 1] = np.asarray(gradient)[places > 0]
    return float(value), by_token


def theirs(case: Case, tokens: Tokens) -> tuple[float, np.ndarray]:
    """Returns the same of TRL."""
    import torch
    from trl import GRPOTrainer

    mask = torch.zeros(len(LENGTHS), MOST)
    for row, length in enumerate(LENGTHS):
        mask[row, :length] = 1

    def padded(numbers: list[np.ndarray]) -> Any:
        rows = torch.zeros(len(LENGTHS), MOST)
        rows[mask > 0] = torch.from_numpy(np.concatenate(numbers))
        return rows

    now = padded(tokens.now).requires_grad_()
    low, high = case.clip
    same = lambda x, **how: x
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *of, **how: (
            now,
            torch.zeros_like(now),
            None,
        ),
        _metrics=defaultdict(lambda: defaultdict(list)),
        _entropy_bonus_enabled=False,
        accelerator=SimpleNamespace(num_processes=1, gather=same, reduce=same),
        args=SimpleNamespace(
            use_bias_correction_kl=False, delta=None, steps_per_generation=1
        ),
        aux_loss_enabled=False,
        beta=case.beta,
        current_gradient_accumulation_steps=1,
        epsilon_high=1 + high if case.loss == "cispo" else high,
        epsilon_low=low,
        importance_sampling_level=case.level,
        loss_type=case.loss_type,
        max_completion_length=MOST,
        model=SimpleNamespace(training=True),
        off_policy_mask_threshold=None,
        top_entropy_quantile=1.0,
        use_vllm=False,
        vllm_importance_sampling_correction=False,
    )
    ids = torch.zeros(len(LENGTHS), PROMPT, dtype=torch.long)
    inputs = {
        "prompt_ids": ids,
        "prompt_mask": torch.ones_like(ids),
        "completion_ids": mask.long(),
        "completion_mask": mask,
        "advantages": torch.from_numpy(tokens.advantages),
        "old_per_token_logps": padded(tokens.drawn),
        "ref_per_token_logps": padded(tokens.reference),
        "num_items_in_batch": mask.sum(),
    }
    loss = GRPOTrainer._compute_loss(trainer, None, inputs)
    loss.backward()
    return loss.item(), now.grad[mask > 0].numpy()


def main() -> None:
    bench.parser(__doc__).parse_args()
    try:
        import torch
        import trl
    except ImportError as error:
        raise SystemExit(
            f"TRL is not here ({error}); pip install trl torch installs it."
        ) from None
    print(f"TRL {trl.__version__}, torch {torch.__version__}")
    heads = ("rl.loss", "average", "beta", "TRL".ljust(16), "its loss ", "our loss ")
    table = Table(*heads, "difference", "gradient")
    tokens = frozen()
    for case in CASES:
        (mine, gradient), (other, their_gradient) = (
            ours(case, tokens),
            theirs(case, tokens),
        )
        apart = np.abs(gradient - their_gradient).max()
        name = (
            case.loss_type
            if case.level == "token"
            else f"{case.loss_type}, {case.level}"
        )
        losses = f"{other:.7f}", f"{mine:.7f}", f"{abs(mine - other):.1e}"
        table.row(case.loss, case.average, case.beta, name, *losses, f"{apart:.1e}")


if __name__ == "__main__":
    main()
