"""Share of a step's seconds that the loop of reinforcement learning itself costs: python -m experiments.rl_loop [CONFIG]

The loop is what is neither the model (drawing, resharding, learning) nor a reward: packing rows, decoding texts, writing
answers, placing batches. Takes the steps of `configs/rl_arithmetic.yaml` without its supervised ones, and leaves out those
that compile. Then the same steps with a reward that takes a while (`--reward-seconds`), with `rl.lag` 0 and 1.
"""

import argparse
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

import meshtrain as mt
from meshtrain.generate.resharding import Resharding
from meshtrain.rl.rewards import Rewards
from meshtrain.rl.rollouts import Rollouts
from meshtrain.run.hooks import RunHook

SLOW = """
import time

def score(prompt, answer, record):
    time.sleep({seconds})
    return float(answer.startswith(record["answer"]))
"""
STEPS = 16
COMPILING = 4


class Shares(RunHook):
    """The seconds of a run by what they went to."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.steps: list[Counter[str]] = []
        self._began = time.perf_counter()

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any, **named: Any) -> Any:
            began = time.perf_counter()
            result = jax.block_until_ready(call(*given, **named))
            self.seconds[name] += time.perf_counter() - began
            return result

        return run

    def before_step(self, step: int, compiled: Any, state: Any, batch: Any) -> tuple[Any, Any]:
        jax.block_until_ready(batch)
        self._learning = time.perf_counter()
        return state, batch

    def after_step(self, step: int, compiled: Any, metrics: Any) -> None:
        jax.block_until_ready(metrics)
        self.seconds["learning"] += time.perf_counter() - self._learning

    def after_metrics(self, row: Any, due: bool) -> None:
        now = time.perf_counter()
        self.seconds["all"] = now - self._began
        self.steps.append(self.seconds)
        self.seconds = Counter()
        self._began = now


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", nargs="?", default="configs/rl_arithmetic.yaml")
    parser.add_argument("--reward-seconds", type=float, default=0.01)
    options = parser.parse_args()
    lagging = {lag: lagged(options, lag) for lag in (0, 1)}
    shares = Shares()
    drawing = Rollouts._program.func  # type: ignore[attr-defined]
    resharding = Resharding.program.func  # type: ignore[attr-defined]
    Rollouts._program = property(lambda self: shares.timed("drawing", _kept(self, drawing)))  # type: ignore
    Resharding.program = property(lambda self: shares.timed("resharding", _kept(self, resharding)))  # type: ignore
    Rewards.score = shares.timed("rewards", Rewards.score)  # type: ignore[method-assign]
    train(options.config, shares)
    steps = shares.steps[COMPILING:]
    total = sum(step["all"] for step in steps)
    parts = {
        name: sum(step[name] for step in steps)
        for name in ("drawing", "resharding", "learning", "rewards")
    }
    parts["the loop"] = total - sum(parts.values())
    print(f"{'':<12}{'ms a step':>10}{'share':>8}")
    for name, seconds in parts.items():
        print(f"{name:<12}{1000 * seconds / len(steps):>10.1f}{seconds / total:>8.1%}")

    for lag, seconds in lagging.items():
        each = f"a reward of {1000 * options.reward_seconds:g} ms"
        print(f"{each}, rl.lag {lag}: {1000 * seconds:.1f} ms a step")


def train(config: str, callback: Any, *changes: str, reward: str = "") -> None:
    with tempfile.TemporaryDirectory() as directory:
        changed = [
            f"run.directory={Path(directory) / 'run'}",
            "rl.supervised=0",
            f"train.steps={STEPS}",
            "checkpoint.every=0",
            *changes,
        ]
        if reward:
            file = Path(directory) / "slow.py"
            file.write_text(reward)
            changed += [f'run.imports=["{file}"]', "rl.reward=slow:score"]
        mt.train(mt.load(config, changed), callbacks=[callback])


def lagged(options: argparse.Namespace, lag: int) -> float:
    """Returns the median seconds of a step with `rl.lag` and a slow reward."""
    times: list[float] = []
    reward = SLOW.format(seconds=options.reward_seconds)
    note = lambda row: times.append(time.perf_counter())
    train(options.config, note, f"rl.lag={lag}", reward=reward)
    return float(np.median(np.diff(times)[COMPILING:]))


def _kept(owner: Any, make: Callable[[Any], Any]) -> Any:
    programs = vars(owner).setdefault("kept_programs", {})
    if make not in programs:
        programs[make] = make(owner)
    return programs[make]


if __name__ == "__main__":
    main()
