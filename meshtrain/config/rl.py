"""The section `rl`: which answers are drawn, how they are rewarded, and what a step learns from them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from meshtrain.config.key import Resume, key
from meshtrain.errors import listed_divisors, short

REFUSED = Resume.REFUSED
LARGEST = 1e6  # weight of a reward


# A key keeps together what it says.
# fmt: off
@dataclass(frozen=True)
class RlConfig:
    prompts: str | None = key(
        None, "JSON Lines: a record for each prompt, with `prompt` (text, or messages) and whatever its reward reads",
        path=True, resume=Resume.CONTENT
    )
    reward: str | None = key(
        None, "MODULE:NAME, a function of run.imports; exact: the answer is the record's `answer`; number: its last "
              "number is; or a sum with weights, such as exact + 0.2 mine:brief", resume=Resume.REPORTED
    )
    environment: str | None = key(
        None, "MODULE:NAME, a class of run.imports that replies to answers: several turns", resume=REFUSED
    )
    group: int = key(8, "answers to each prompt, which are compared with one another; it divides "
                        "train.global_batch_size, the answers of a step", least=2, resume=REFUSED)
    answers: int = key(256, "tokens of an answer, at most", least=1, resume=REFUSED)
    temperature: float = key(1.0, "temperature of drawing, and of the log-probabilities that are learned from",
                             above=0.0, resume=REFUSED)
    loss: Literal["ppo_clip", "cispo", "gspo", "reinforce"] = key(
        "ppo_clip", "ppo_clip: the clipped ratio of each token (Schulman et al. 2017; GRPO: Shao et al. 2024); cispo: "
                    "the clipped ratio as a weight (MiniMax 2025); gspo: the clipped ratio of each answer (Zheng et "
                    "al. 2025); reinforce: no ratio (Williams 1992)"
    )
    clip: tuple[float, ...] = key((0.2, 0.28), "the ratio is clipped to 1 - the first and 1 + the second", least=0.0)
    beta: float = key(0.0, "weight of the distance (k3) from the model without its adapters; 0: no reference",
                      least=0.0)
    scale: Literal["group", "none"] = key(
        "group", "group: advantages are divided by their group's standard deviation; none: not (Dr. GRPO: Liu et al. "
                 "2025)"
    )
    average: Literal["token", "sequence", "constant"] = key(
        "token", "a step's loss is a mean over tokens (DAPO: Yu et al. 2025), over answers of their means (GRPO), or "
                 "over answers of their sums, divided by rl.answers (Dr. GRPO)"
    )
    supervised: int = key(0, "steps at the beginning that learn from data, as objective next_token does, before any "
                             "answers are drawn", least=0, resume=REFUSED)
    epochs: int = key(1, "steps on the same answers", least=1, most=64, resume=REFUSED)
    lag: int = key(0, "steps that the weights which draw are behind those that are trained", least=0, most=8,
                   resume=REFUSED)
    gap_limit: float = key(
        0.1, "a run stops where a token's log-probability differs by more between drawing and training with the same "
             "weights", above=0.0
    )
    reward_seconds: float = key(10.0, "seconds that the reward of an answer may take; then it is 0", above=0.0)
    replay_routing: bool = key(
        False, "each token takes the experts that took it where it was drawn, whatever a router that rounds otherwise "
               "would choose (Ma et al. 2025, \"Rollout Routing Replay\")", resume=REFUSED
    )
    drop_flat_groups: bool = key(False, "leave groups out whose rewards are all equal: they teach nothing (DAPO)")
    teacher: str | None = key(
        None, "a run or directory of weights: the reward of each token is its log-probability under the teacher less "
              "the model's own (on-policy distillation)", path=True, resume=REFUSED
    )
# fmt: on


def reward_terms(text: str | None) -> tuple[tuple[str, float], ...]:
    """Returns the rewards of `rl.reward` with their weights; ValueError for a term that is none."""
    terms = []
    for term in text.replace(" - ", " + - ").split("+") if text else ():
        *weights, name = term.split()
        sign = 1
        if weights[:1] == ["-"]:
            sign = -1
            weights = weights[1:]
        (weight,) = map(float, weights or ["1"])
        if not abs(weight) <= LARGEST:
            raise ValueError(f"the weight {weight} is none")
        terms.append((name, sign * weight))
    return tuple(terms)


def has_reference(config: Any) -> bool:
    """Returns whether each step begins with a forward without adapters."""
    objective = config.train.objective
    return objective == "dpo" or (objective == "grpo" and config.rl.beta > 0)


def problems(config: Any) -> Iterator[str]:
    """Yields a sentence on each thing that the section asks for in vain, or cannot have."""
    rl = config.rl
    train = config.train
    if train.objective != "grpo":
        if rl.prompts or rl.reward or rl.teacher:
            wanted = "the section rl has prompts, a reward or a teacher"
            yield f"{wanted}, but train.objective is {train.objective}; set it to grpo."
        return
    yield from _unused(config)
    if not rl.prompts:
        yield "train.objective grpo draws answers to rl.prompts, which is null; give a file of JSON Lines."
    if not rl.reward and not rl.teacher:
        yield "train.objective grpo needs rl.reward (MODULE:NAME, exact or number) or rl.teacher; give one."
    try:
        reward_terms(rl.reward)
    except ValueError:
        legal = "write MODULE:NAME, exact or number, or a sum of them with weights, such as exact + 0.2 mine:brief"
        yield f"rl.reward is {short(repr(rl.reward))}; {legal}."
    if len(rl.clip) != 2 or rl.clip[0] >= 1:
        yield f"rl.clip is {list(rl.clip)}; it must be two numbers, the first below 1."
    if train.global_batch_size % rl.group:
        groups = f"rl.group is {rl.group}, which does not divide the {train.global_batch_size} answers of a step"
        legal = listed_divisors(train.global_batch_size).removeprefix("1, ")
        yield f"{groups} (train.global_batch_size); legal are {legal}."
    if rl.answers >= train.sequence_length:
        room = f"train.sequence_length is {train.sequence_length}, a prompt and its answer together"
        yield f"rl.answers is {rl.answers}, but {room}; give a longer row or shorter answers."
    if rl.lag and rl.loss == "reinforce":
        why = f"rl.lag is {rl.lag}, but rl.loss reinforce does not weigh answers by who drew them"
        yield f"{why}; cispo does, with the same gradient for fresh ones."
    if rl.replay_routing and not config.model.moe.experts:
        yield "rl.replay_routing is true, but model.moe.experts is 0: there is no routing; leave it out."
    if rl.lag and rl.epochs > 1:
        yield f"rl.lag is {rl.lag} and rl.epochs {rl.epochs}; one of them must be as it is by default."


def _unused(config: Any) -> Iterator[str]:
    """Yields a sentence on each key outside the section that objective grpo has no use for."""
    train = config.train
    if config.rl.beta:
        reference = f"rl.beta is {config.rl.beta:g}, which takes the model without its adapters as reference"
        if not config.lora.rank:
            yield f"{reference}, but lora.rank is 0; give lora.rank, or set rl.beta to 0."
        if train.trainable:
            yield f"{reference}, which train.trainable would move; leave it out."
    if train.loss:
        yield f"train.loss is {train.loss}, but train.objective grpo has a loss of its own (rl.loss); leave it out."
    if config.mesh.islands > 1:
        yield f"mesh.islands is {config.mesh.islands}, but answers are drawn on one mesh without islands; set it to 1."
    if config.eval.every:
        yield "eval.every asks for evaluations, which train.objective grpo has none of; set it to 0."
