"""Computes the rewards of answers in child processes, never in the trainer's.

A reward is a function of a file or a module of `run.imports`, or one of those that are built in. It is called once for
each answer.

    def score(prompt, answer, record):     the prompt (a text, or messages), the answer's text, and the prompt's record
        return float(...)                  a finite number; the higher the better

    exact      1 where the answer is the record's `answer`, but for white space around the two; else 0
    number     1 where the last number of the answer is that of the record's `answer`; else 0

A call that fails has the reward 0 and is counted by its kind; the run goes on:

    timeout       takes longer than `rl.reward_seconds`
    memory        takes more memory than it may
    raised        raises an exception, SystemExit included
    not_finite    returns NaN, an infinity, what float32 cannot hold, or no number
    not_messages  returns no list of messages (an environment, see `episodes`)
    died          ends its process, or is killed in it

Timeout, memory and died cost the process, with everything that it has started and its temporary files; the next call
has a new one. A child has neither JAX nor the trainer, unless the file of the reward imports them. So a reward is best
in a file of its own. Its prints are discarded. It has one thread for BLAS, and JAX on the CPU.

The limits are for accidents. They do not make a sandbox: a child runs as the trainer's user, with its files, network
and processes. A reward that runs a model's code has to put it into a container of its own.
"""

import json
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from decimal import Decimal
from multiprocessing.connection import Pipe, wait
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshtrain.config.imports import definition, named
from meshtrain.errors import ConfigError, nearest, short
from meshtrain.model.hook_checks import misfit
from meshtrain.rl.keeper import Reply, Spec, call

LOADING = 60.0  # seconds that the imports of rewards may take
ENDING = 5.0  # seconds in which a child ends
MEMORY = 4 * 2**30  # bytes beside what a reward's imports take
MOST = 8  # children
LONGEST = 2**16  # bytes of a reply
# A keeper is started with the trainer's own path: its working directory may be anywhere.
START = "import sys; sys.path[:] = sys.argv[3:]; from meshtrain.rl.keeper import keep; keep(*map(int, sys.argv[1:3]))"
NUMBER = re.compile(r"(?:(?<![\w.])-)?\d[\d,]*(?:\.\d+)?")


class Case(NamedTuple):
    """An answer to be scored: what a reward is called with."""

    prompt: str | Sequence[dict[str, Any]]
    answer: str
    record: dict[str, Any]


class RewardScores(NamedTuple):
    """The rewards of some cases, and what failed: a call's part of a weighted sum is 0 then."""

    values: NDArray[np.float32]  # [cases]
    failed: Counter[str]  # calls, by their kind of failure
    first: dict[str, str]  # a sentence on the first one of each kind


def last_number(text: str) -> Decimal:
    """Returns the last number in a text; NaN, which equals nothing, where there is none."""
    return Decimal(["nan", *NUMBER.findall(text)][-1].replace(",", ""))


# They are pure and linear in the answer's length, so they need no process.
BUILT_IN = {
    "exact": lambda prompt, answer, record: (
        answer.strip() == str(record["answer"]).strip()
    ),
    "number": lambda prompt, answer, record: (
        last_number(answer) == last_number(str(record["answer"]))
    ),
}


class Rewards:
    """The children that score answers: a context manager, which leaves none.

    names: each reward with its weight in the sum, as MODULE:FUNCTION of `run.imports` or built in.
    seconds: a call may take, by the clock and of CPU time.
    environment: a class that replies to answers, as MODULE:NAME.
    memory: bytes that a call may take; each file that it writes may have as many.
    processes: children at most; by default one a core, and 8 at most.

    ConfigError for a name of nothing, and for one whose module cannot be imported in a child.
    """

    def __init__(
        self,
        names: Sequence[tuple[str, float]],
        seconds: float,
        environment: str | None = None,
        memory: int = MEMORY,
        processes: int = 0,
    ) -> None:
        self._names = names
        self.environment = environment
        outside = [name for name, _ in names if name not in BUILT_IN]
        # The child's first function is one that does nothing.
        self._numbers = {name: number for number, name in enumerate(outside, 1)}
        functions = [_defined(name) for name in outside]
        if environment is not None:
            _check_call("rl.environment", environment, ["record"])
            if not callable(
                getattr(named("rl.environment", environment), "step", None)
            ):
                raise ConfigError(
                    f"rl.environment: {environment} has no method step; give it step(self, messages)."
                )
            functions.append(definition("rl.environment", environment))
            outside = [*outside, environment]
        self._spec = Spec(tuple(functions), seconds, memory, environment is not None)
        # A sentence on the first turn that failed of each kind
        self.first: dict[str, str] = {}
        self._processes = processes or min(len(os.sched_getaffinity(0)), MOST)
        self._idle: list[_Child] = []
        if outside and (reply := self._ask({0: (0,)})[0]).kind is not None:
            raise ConfigError(
                f"rl.reward: {' and '.join(outside)} cannot be imported in a process of its own, which "
                f"{short(reply.how)}."
            )

    def score(self, cases: Sequence[Case]) -> RewardScores:
        """Returns the weighted sum of the rewards of each case. A failure is counted, and raises nothing."""
        calls = [
            (case, name, weight)
            for case in range(len(cases))
            for name, weight in self._names
        ]
        replies = self._ask(
            {
                (case, name): (self._numbers[name], *cases[case])
                for case, name, _ in calls
                if name in self._numbers
            }
        )
        sums = np.zeros(len(cases))
        failed: Counter[str] = Counter()
        first: dict[str, str] = {}
        for case, name, weight in calls:
            reply = replies.get((case, name)) or call(BUILT_IN[name], cases[case])
            sums[case] += weight * reply.value
            if reply.kind is not None:
                failed[reply.kind] += 1
                first.setdefault(reply.kind, f"the reward {name} {short(reply.how)}")
        return RewardScores(sums.astype(np.float32), failed, first)

    def turns(
        self, conversations: Sequence[tuple[list[dict[str, Any]], dict[str, Any]]]
    ) -> tuple[list[list[dict[str, Any]] | None], Counter[str]]:
        """Returns what the environment replies to conversations with their records, None where they end, and how many
        calls failed in which way: an episode ends there.
        """
        number = len(self._spec.functions)
        replies = self._ask(
            {key: (number, *each) for key, each in enumerate(conversations)}
        )
        failed = Counter(
            reply.kind for reply in replies.values() if reply.kind is not None
        )
        for reply in replies.values():
            if reply.kind is not None:
                self.first.setdefault(
                    f"turn {reply.kind}", f"{self.environment} {short(reply.how)}"
                )
        in_order = [replies[key] for key in range(len(conversations))]
        return [None if reply.kind else reply.value for reply in in_order], failed

    def close(self) -> None:
        _close(self._idle)
        self._idle.clear()

    def __enter__(self) -> "Rewards":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, calls: Mapping[Any, Sequence[Any]]) -> dict[Any, Reply]:
        """Returns the replies to calls of the children, which take them as they become idle."""
        replies: dict[Any, Reply] = {}
        waiting = list(calls)
        busy: list[_Child] = []
        try:
            while waiting or busy:
                while waiting and len(busy) < self._processes:
                    busy.append(self._idle.pop() if self._idle else _Child(self._spec))
                    key = waiting.pop(0)
                    busy[-1].ask(key, calls[key])
                # A process of a worker that has ended may hold its pipe open.
                wait([child.pipe for child in busy], 0.05)
                for child in list(busy):
                    if (reply := child.reply()) is not None:
                        replies[child.key] = reply
                        busy.remove(child)
                        if not child.pipe.closed:
                            self._idle.append(child)
        finally:
            _close(busy)
        return replies


class _Child:
    """A keeper's process with its worker, as the trainer sees it."""

    def __init__(self, spec: Spec) -> None:
        self.pipe, theirs = Pipe()
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                START,
                str(theirs.fileno()),
                str(os.getpid()),
                *sys.path,
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            # Ctrl-C is the trainer's.
            start_new_session=True,
            env={"OMP_NUM_THREADS": "1"} | os.environ | {"JAX_PLATFORMS": "cpu"},
        )
        theirs.close()
        self._seconds = spec.seconds
        self._is_loaded = False
        self._send(spec)

    def ask(self, key: Any, call: Sequence[Any]) -> None:
        """Sends a call, now or when the worker has loaded the functions."""
        self.key = key
        self._call = call
        self.ends = time.monotonic() + LOADING
        if self._is_loaded:
            self._begin()

    def _begin(self) -> None:
        self.ends = time.monotonic() + self._seconds
        self._send(self._call)

    def _send(self, content: Any) -> None:
        # The reply tells that the child is gone.
        with suppress(OSError):
            self.pipe.send_bytes(pickle.dumps(content))

    def reply(self) -> Reply | None:
        """Returns what has become of the call, or None as long as nothing has. A child in doubt is closed."""
        with suppress(EOFError, OSError, ValueError, TypeError):
            while self.pipe.poll():
                reply = Reply(*json.loads(self.pipe.recv_bytes(LONGEST)))
                if self._is_loaded or reply.kind is not None:
                    if reply.kind == "memory" or not self._is_loaded:
                        _close([self])
                    return reply
                self._is_loaded = True
                self._begin()
            if self.process.poll() is None and time.monotonic() < self.ends:
                return None
        is_late = self.process.poll() is None and time.monotonic() >= self.ends
        _close([self])
        code = self.process.returncode
        if is_late or code == 128 + signal.SIGXCPU:
            limit = self._seconds if self._is_loaded else LOADING
            clock = "" if is_late else " of CPU time"
            return Reply("timeout", 0.0, f"took more than {limit:g} seconds{clock}")
        return Reply("died", 0.0, f"ended its process with code {code}")


def _close(children: Sequence[_Child]) -> None:
    """Ends children with all that they have started."""
    for child in children:
        child.pipe.close()
        child.process.terminate()
    for child in children:
        try:
            child.process.wait(ENDING)
        except subprocess.TimeoutExpired:
            child.process.kill()
            child.process.wait()


def _defined(name: str) -> tuple[str, str, str, str]:
    if ":" not in name:
        raise ConfigError(
            f"rl.reward is {short(repr(name))}; write {' or '.join(BUILT_IN)}, or MODULE:FUNCTION of what run.imports "
            f"and plug-ins bring{nearest(name, BUILT_IN) or '.'}"
        )
    _check_call("rl.reward", name, Case._fields)
    return definition("rl.reward", name)


def _check_call(key: str, name: str, words: Sequence[str]) -> None:
    """Raises ConfigError where what a key names does not take arguments of these names, by their places."""
    if taken := misfit(named(key, name), words):
        raise ConfigError(
            f"{key}: {name} takes {taken}; it is called with ({', '.join(words)})."
        )
